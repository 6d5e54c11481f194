// Memory for large tensors that live for a moment, and not again soon.

#ifndef TF_RECSYNC_CC_KERNELS_PAGE_ALLOCATOR_H_
#define TF_RECSYNC_CC_KERNELS_PAGE_ALLOCATOR_H_

#include <cstddef>
#include <string>

#include "tensorflow/core/framework/allocator.h"

namespace recsync {

// Takes pages from the system and gives them back when they are freed. The
// heap would keep some of them for the next call, in each of its arenas, of
// which a process has as many as eight times its cores.
class PageAllocator : public tensorflow::Allocator {
 public:
  static PageAllocator* Global();

  std::string Name() override { return "recsync_pages"; }
  // Null where the system has no memory left.
  void* AllocateRaw(size_t alignment, size_t bytes) override;
  void DeallocateRaw(void* data) override;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_PAGE_ALLOCATOR_H_
