// Fetching memory into the cache ahead of its use.

#ifndef TF_RECSYNC_CC_ENGINE_PREFETCH_H_
#define TF_RECSYNC_CC_ENGINE_PREFETCH_H_

#include <algorithm>
#include <cstdint>

// For functions that only prefetch: a compiler takes them for functions without
// an effect, and drops the calls that it has not inlined by then.
#define RECSYNC_PREFETCHING __attribute__((always_inline)) inline

namespace recsync {

constexpr int64_t kCacheLine = 64;

// Begins to fetch `bytes` bytes, the first few cache lines of more.
RECSYNC_PREFETCHING void Prefetch(const void* address, int64_t bytes) {
  const char* line = static_cast<const char*>(address);
  __builtin_prefetch(line);
  for (int64_t i = kCacheLine; i < std::min<int64_t>(bytes, 8 * kCacheLine);
       i += kCacheLine) {
    __builtin_prefetch(line + i);
  }
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_PREFETCH_H_
