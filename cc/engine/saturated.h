// Numbers that may be larger than their type: those that are kept in a narrower
// one than they are counted in, and sums of what came from files and peers.

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

// The number of int64_t that is the nearest to a + b.
constexpr int64_t SaturatedSum(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return a < 0 ? std::numeric_limits<int64_t>::min()
               : std::numeric_limits<int64_t>::max();
}

// The same of a - b.
constexpr int64_t SaturatedDifference(int64_t a, int64_t b) {
  int64_t difference = 0;
  if (!__builtin_sub_overflow(a, b, &difference)) return difference;
  return a < 0 ? std::numeric_limits<int64_t>::min()
               : std::numeric_limits<int64_t>::max();
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_SATURATED_H_
