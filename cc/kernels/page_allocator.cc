#include "cc/kernels/page_allocator.h"

#include <sys/mman.h>

#include <cstring>
#include <limits>

namespace recsync {
namespace {

// Before the memory, which begins at a page: how much there is in all.
constexpr size_t kPage = 4096;

}  // namespace

PageAllocator* PageAllocator::Global() {
  static auto* const allocator =
      new PageAllocator;  // Tensors may outlive main.
  return allocator;
}

void* PageAllocator::AllocateRaw(size_t alignment, size_t bytes) {
  if (alignment > kPage || bytes > std::numeric_limits<size_t>::max() - kPage) {
    return nullptr;
  }
  const size_t total = bytes + kPage;
  void* const all = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  std::memcpy(all, &total, sizeof total);
  return static_cast<char*>(all) + kPage;
}

void PageAllocator::DeallocateRaw(void* data) {
  if (data == nullptr) return;
  char* const all = static_cast<char*>(data) - kPage;
  size_t total;
  std::memcpy(&total, all, sizeof total);
  munmap(all, total);
}

}  // namespace recsync
