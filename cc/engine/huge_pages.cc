#include "cc/engine/huge_pages.h"

#include <cstdint>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace recsync {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
// Buffers that fit into the table of small pages gain nothing.
constexpr size_t kSmallest = 2 * kHugePage;

// Which buffers were advised. One that was freed may leave an entry behind;
// should another of the same size take its place, it keeps its small pages.
struct Advised {
  Mutex mu;
  std::unordered_map<void*, size_t> sizes ABSL_GUARDED_BY(mu);

  bool Add(void* data, size_t bytes) {
    MutexLock lock(&mu);
    size_t& known = sizes[data];
    if (known == bytes) return false;
    known = bytes;
    return true;
  }
};

}  // namespace

void* HugePagesOf(void* data, size_t bytes, size_t* size) {
  *size = 0;
  if (bytes < kSmallest) return data;
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t last = (start + bytes) & ~(kHugePage - 1);
  if (last > first) *size = last - first;
  return reinterpret_cast<void*>(first);
}

void PreferHugePages(void* data, size_t bytes) {
#ifdef __linux__
  size_t size;
  void* pages = HugePagesOf(data, bytes, &size);
  if (size > 0) madvise(pages, size, MADV_HUGEPAGE);
#endif
}

void AdviseHugePages(void* data, size_t bytes) {
#ifdef __linux__
  size_t size;
  void* pages = HugePagesOf(data, bytes, &size);
  if (size == 0) return;
  static Advised advised;
  if (!advised.Add(data, bytes)) return;
  if (madvise(pages, size, MADV_HUGEPAGE) != 0) return;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE \
  25  // Linux 6.1; an older one refuses it, and takes longer
#endif
  madvise(pages, size, MADV_COLLAPSE);
#endif
}

}  // namespace recsync
