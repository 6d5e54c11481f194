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

std::chrono::duration<double> Link::Busy(Time now) const {
  MutexLock lock(&mu_);
  // What is still to pass does so without a pause. It has whole nanoseconds,
  // and the sum has not.
  const std::chrono::duration<double> left = std::max(free_at_, now) - now;
  return std::max(reserved_.seconds - left, std::chrono::duration<double>(0));
}

}  // namespace recsync
