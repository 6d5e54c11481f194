// Reading and writing parameters that other threads read and write meanwhile,
// without locks (Hogwild: Recht et al. 2011).
//
// Each element is read and written whole, but two threads that update the same
// element at once may lose one of the updates, and what is read of several
// elements need not have been there at one time. That is the algorithm's; the
// relaxed atomics say so to the compiler, and make it no data race.
//
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_HOGWILD_H_
#define TF_RECSYNC_CC_ENGINE_HOGWILD_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "cc/engine/span_update.h"

namespace recsync {

// Elements that pass through a thread's own memory together: few enough for
// the first-level cache and for races to be rare, enough for wide vectors.
inline constexpr int64_t kHogwildBlock = 256;

inline void LoadHogwild(const float* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    __atomic_load(from + i, to + i, __ATOMIC_RELAXED);
  }
}

inline void StoreHogwild(const float* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    float value = from[i];
    __atomic_store(to + i, &value, __ATOMIC_RELAXED);
  }
}

// Applies a rule to a span, as `apply` by itself does; returns the sum over
// blocks of what it returned.
template <typename Rule>
double UpdateHogwild(SpanUpdate<Rule> apply, const Rule& rule, float* w,
                     float* const* accumulators, const float* g, int64_t n,
                     float rho, float decay) {
  constexpr int slots = Rule::kAccumulators;
  float own[kHogwildBlock];
  std::array<std::array<float, kHogwildBlock>, slots> own_slots;
  std::array<float*, slots> pointers;
  for (int k = 0; k < slots; ++k) pointers[k] = own_slots[k].data();
  double squares = 0.0;
  for (int64_t begin = 0; begin < n; begin += kHogwildBlock) {
    const int64_t size = std::min(kHogwildBlock, n - begin);
    LoadHogwild(w + begin, size, own);
    for (int k = 0; k < slots; ++k) {
      LoadHogwild(accumulators[k] + begin, size, pointers[k]);
    }
    squares += apply(rule, own, pointers.data(), g + begin, size, rho, decay);
    StoreHogwild(own, size, w + begin);
    for (int k = 0; k < slots; ++k) {
      StoreHogwild(pointers[k], size, accumulators[k] + begin);
    }
  }
  return squares;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOGWILD_H_
