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
#include <cstring>

#include "cc/engine/span_update.h"

namespace recsync {

// Elements that pass through a thread's own memory together: few enough for
// the first-level cache and for races to be rare, enough for wide vectors.
inline constexpr int64_t kHogwildBlock = 256;

// Two neighbors, read and written at once where they lie at a multiple of eight
// bytes: twice as fast as one at a time, and still each of them whole.
using HogwildPair = float __attribute__((vector_size(8)));

namespace hogwild_internal {

using Bits = uint64_t __attribute__((may_alias));

inline HogwildPair LoadPair(const float* from) {
  const uint64_t bits =
      __atomic_load_n(reinterpret_cast<const Bits*>(from), __ATOMIC_RELAXED);
  HogwildPair pair;
  std::memcpy(&pair, &bits, sizeof(pair));
  return pair;
}

inline void StorePair(HogwildPair pair, float* to) {
  uint64_t bits;
  std::memcpy(&bits, &pair, sizeof(bits));
  __atomic_store_n(reinterpret_cast<Bits*>(to), bits, __ATOMIC_RELAXED);
}

inline float LoadOne(const float* from) {
  float value;
  __atomic_load(from, &value, __ATOMIC_RELAXED);
  return value;
}

inline void StoreOne(float value, float* to) {
  __atomic_store(to, &value, __ATOMIC_RELAXED);
}

// Calls one(i) and pair(i), of i and i + 1, for all of the n elements at
// `shared`.
template <typename One, typename Pair>
void InPairs(const float* shared, int64_t n, One one, Pair pair) {
  int64_t i = 0;
  if (n > 0 && reinterpret_cast<uintptr_t>(shared) % sizeof(HogwildPair)) {
    one(i++);
  }
  for (; i + 1 < n; i += 2) pair(i);
  if (i < n) one(i);
}

}  // namespace hogwild_internal

inline void LoadHogwild(const float* from, int64_t n, float* to) {
  using hogwild_internal::LoadOne;
  using hogwild_internal::LoadPair;
  hogwild_internal::InPairs(
      from, n, [=](int64_t i) { to[i] = LoadOne(from + i); },
      [=](int64_t i) {
        const HogwildPair pair = LoadPair(from + i);
        std::memcpy(to + i, &pair, sizeof(pair));
      });
}

inline void StoreHogwild(const float* from, int64_t n, float* to) {
  using hogwild_internal::StoreOne;
  using hogwild_internal::StorePair;
  hogwild_internal::InPairs(
      to, n, [=](int64_t i) { StoreOne(from[i], to + i); },
      [=](int64_t i) {
        HogwildPair pair;
        std::memcpy(&pair, from + i, sizeof(pair));
        StorePair(pair, to + i);
      });
}

// Replaces each of the n elements at `shared` by change(value, i), which is
// called with single floats and with pairs, i then being the first one's place.
template <typename Change>
void ChangeHogwild(float* shared, int64_t n, Change change) {
  using namespace hogwild_internal;  // NOLINT(build/namespaces)
  InPairs(
      shared, n,
      [=](int64_t i) { StoreOne(change(LoadOne(shared + i), i), shared + i); },
      [=](int64_t i) {
        StorePair(change(LoadPair(shared + i), i), shared + i);
      });
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
