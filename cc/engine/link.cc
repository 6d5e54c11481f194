#include "cc/engine/link.h"

#include <algorithm>

namespace recsync {

Link::Time Link::Reserve(int64_t bytes, double bytes_per_second, Time now) {
  // More would overflow the clock.
  constexpr std::chrono::seconds kLongest(1'000'000'000);
  const std::chrono::duration<double> seconds(
      std::min(static_cast<double>(bytes) / bytes_per_second,
               static_cast<double>(kLongest.count())));
  const auto passing = std::chrono::ceil<Time::duration>(seconds);
  MutexLock lock(&mu_);
  free_at_ = std::min(std::max(free_at_, now) + passing, now + kLongest);
  return free_at_;
}

}  // namespace recsync
