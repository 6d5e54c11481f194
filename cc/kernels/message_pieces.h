// The pieces of messages between workers and servers: where they lie, and how
// they get there.

#ifndef TF_RECSYNC_CC_KERNELS_MESSAGE_PIECES_H_
#define TF_RECSYNC_CC_KERNELS_MESSAGE_PIECES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/string_view.h"
#include "cc/engine/aligned_pieces.h"
#include "cc/kernels/parallel_for.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

// What TensorFlow's ops expect of a buffer, and Tensor::IsAligned looks at.
static_assert(tensorflow::Allocator::kAllocatorAlignment ==
              EIGEN_MAX_ALIGN_BYTES);

// As AlignedStarts, such that the first piece of a group may be a tensor's
// buffer.
template <typename T>
std::vector<int64_t> MessageStarts(const std::vector<int64_t>& sizes,
                                   const std::vector<int64_t>& groups) {
  return AlignedStarts(sizes, groups,
                       tensorflow::Allocator::kAllocatorAlignment / sizeof(T));
}

// Copies a piece.
template <typename T>
void CopyPiece(tensorflow::OpKernelContext* ctx, const T* from, int64_t size,
               T* to) {
  constexpr int64_t kUnit = 64;  // elements
  ParallelFor(ctx, (size + kUnit - 1) / kUnit, /*cost=*/30,
              [&](int64_t begin, int64_t end) {
                const int64_t stop = std::min(end * kUnit, size);
                std::copy(from + begin * kUnit, from + stop,
                          to + begin * kUnit);
              });
}

// Fills with zeros what lies between pieces of these sizes and starts.
template <typename T>
void FillGaps(const std::vector<int64_t>& sizes,
              const std::vector<int64_t>& starts, T* message) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::fill(message + starts[i] + sizes[i], message + starts[i + 1], T(0));
  }
}

// The bytes that so many take in a message of values of several types.
inline int64_t PaddedBytes(int64_t bytes) { return (bytes + 7) / 8 * 8; }

// Copies bytes to where `size` belong to them, the rest of which are zeros;
// returns what is behind.
inline uint8_t* CopyPadded(absl::string_view bytes, int64_t size, uint8_t* to) {
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  std::fill(to + bytes.size(), to + size, 0);
  return to + size;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_MESSAGE_PIECES_H_
