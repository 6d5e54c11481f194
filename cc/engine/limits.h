// The most that an argument may ask for: beyond it, a size is a mistake, and to
// try to get the memory would end the process with all that it serves.

#ifndef TF_RECSYNC_CC_ENGINE_LIMITS_H_
#define TF_RECSYNC_CC_ENGINE_LIMITS_H_

#include <cstdint>
#include <limits>

namespace recsync {

// Elements of a tensor, or of sums, whose size an argument says. Many of
// TensorFlow's own kernels number elements by int32, too; of floats these are 8
// GiB.
inline constexpr int64_t kMostElements = std::numeric_limits<int32_t>::max();

// Elements of a table that an argument says the size of: it may take most of a
// server's memory, whose size is checked besides.
inline constexpr int64_t kMostTableElements = int64_t{1} << 40;

// Things that take memory each without a tensor's being there for it: workers,
// servers, slots, iterations, updates that wait.
inline constexpr int64_t kMostEntries = int64_t{1} << 20;

// Threads that somebody may ask for; systems give a process a few ten thousand.
inline constexpr int64_t kMostThreads = 4096;

// Steps, iterations and numbers that are counted on: sums of some of them, and
// small multiples, must not overflow.
inline constexpr int64_t kMostSteps = int64_t{1} << 61;

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_LIMITS_H_
