// How the pieces of messages between workers and servers are aligned.

#ifndef TF_RECSYNC_CC_KERNELS_MESSAGE_ALIGNMENT_H_
#define TF_RECSYNC_CC_KERNELS_MESSAGE_ALIGNMENT_H_

#include <cstdint>
#include <vector>

#include "cc/engine/aligned_pieces.h"
#include "tensorflow/core/framework/allocator.h"

namespace recsync {

// As AlignedStarts, such that the first piece of a group may be a tensor's
// buffer.
template <typename T>
std::vector<int64_t> MessageStarts(const std::vector<int64_t>& sizes,
                                   const std::vector<int64_t>& groups) {
  return AlignedStarts(sizes, groups,
                       tensorflow::Allocator::kAllocatorAlignment / sizeof(T));
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_MESSAGE_ALIGNMENT_H_
