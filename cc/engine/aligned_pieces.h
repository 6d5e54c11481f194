// Where the pieces of a message lie: groups of pieces, one after the other,
// each group at a multiple of some alignment, so that a receiver may use a
// piece where it lies instead of copying it. What lies between groups is zero.

#ifndef TF_RECSYNC_CC_ENGINE_ALIGNED_PIECES_H_
#define TF_RECSYNC_CC_ENGINE_ALIGNED_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace recsync {

// The starts of pieces of these sizes, and behind them the end of the last one,
// at which the message ends. All but `alignment`, which is positive, are >= 0.
// `groups` says how many pieces each group has, all together sizes.size().
inline std::vector<int64_t> AlignedStarts(const std::vector<int64_t>& sizes,
                                          const std::vector<int64_t>& groups,
                                          int64_t alignment) {
  std::vector<int64_t> starts;
  starts.reserve(sizes.size() + 1);
  int64_t end = 0;
  size_t piece = 0;
  for (const int64_t pieces : groups) {
    int64_t size = 0;
    for (int64_t i = 0; i < pieces; ++i) size += sizes[piece + i];
    if (size > 0) end = (end + alignment - 1) / alignment * alignment;
    for (int64_t i = 0; i < pieces; ++i) {
      starts.push_back(end);
      end += sizes[piece++];
    }
  }
  starts.push_back(end);
  return starts;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ALIGNED_PIECES_H_
