// Numbers that are kept in a narrower type than they are counted in.

#ifndef TF_RECSYNC_CC_ENGINE_SATURATED_H_
#define TF_RECSYNC_CC_ENGINE_SATURATED_H_

#include <algorithm>
#include <cstdint>
#include <limits>

namespace recsync {

// The number that a type has which is the nearest to `value`.
template <typename To>
constexpr To Saturated(int64_t value) {
  return static_cast<To>(std::clamp<int64_t>(
      value, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_SATURATED_H_
