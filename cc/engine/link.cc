#include "cc/engine/link.h"

#include <algorithm>
#include <limits>

namespace recsync {

Link::Time Link::Reserve(int64_t amount, double per_second, Time now) {
  // More would overflow the clock.
  constexpr std::chrono::seconds kLongest(1'000'000'000);
  const std::chrono::duration<double> seconds(
      std::min(static_cast<double>(amount) / per_second,
               static_cast<double>(kLongest.count())));
  const auto passing = std::chrono::ceil<Time::duration>(seconds);
  MutexLock lock(&mu_);
  free_at_ = std::min(std::max(free_at_, now) + passing, now + kLongest);
  // Of what passes forever nobody asks how much it is.
  reserved_.amount +=
      std::min(amount, std::numeric_limits<int64_t>::max() - reserved_.amount);
  reserved_.seconds += seconds;
  return free_at_;
}

Link::Total Link::Reserved() const {
  MutexLock lock(&mu_);
  return reserved_;
}

}  // namespace recsync
