// Reading and writing parameters that other threads read and write meanwhile,
// without locks (Hogwild: Recht et al. 2011).
//
// Each element is read and written whole, but two threads that update the same
// element at once may lose one of the updates, and what is read of several
// elements need not have been there at one time. That is the algorithm's; the
// relaxed atomics, or single instructions, say so to the compiler, and make it
// no data race.
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

// Four neighbors, read and written together where they lie at a multiple of
// sixteen bytes: as fast as without a thought of other threads, and still each
// of them whole. Processors with AVX even access the four as one.
using HogwildQuad = float __attribute__((vector_size(16)));

namespace hogwild_internal {

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

// C++ has no such access; what an instruction does is no data race to it.
inline HogwildQuad LoadQuad(const float* from) {
  HogwildQuad quad;
  asm volatile("movaps %1, %0"
               : "=x"(quad)
               : "m"(*reinterpret_cast<const HogwildQuad*>(from)));
  return quad;
}

inline void StoreQuad(HogwildQuad quad, float* to) {
  asm volatile("movaps %1, %0"
               : "=m"(*reinterpret_cast<HogwildQuad*>(to))
               : "x"(quad));
}

#else

using Bits = uint64_t __attribute__((may_alias));

inline HogwildQuad LoadQuad(const float* from) {
  const Bits* halves = reinterpret_cast<const Bits*>(from);
  uint64_t bits[2];
  for (int i = 0; i < 2; ++i) {
    bits[i] = __atomic_load_n(halves + i, __ATOMIC_RELAXED);
  }
  HogwildQuad quad;
  std::memcpy(&quad, bits, sizeof(quad));
  return quad;
}

inline void StoreQuad(HogwildQuad quad, float* to) {
  Bits* halves = reinterpret_cast<Bits*>(to);
  uint64_t bits[2];
  std::memcpy(bits, &quad, sizeof(quad));
  for (int i = 0; i < 2; ++i) {
    __atomic_store_n(halves + i, bits[i], __ATOMIC_RELAXED);
  }
}

#endif

inline float LoadOne(const float* from) {
  float value;
  __atomic_load(from, &value, __ATOMIC_RELAXED);
  return value;
}

inline void StoreOne(float value, float* to) {
  __atomic_store(to, &value, __ATOMIC_RELAXED);
}

// Calls one(i) and quad(i), of i to i + 3, for all of the n elements at
// `shared`.
template <typename One, typename Quad>
void InQuads(const float* shared, int64_t n, One one, Quad quad) {
  int64_t i = 0;
  while (i < n &&
         reinterpret_cast<uintptr_t>(shared + i) % sizeof(HogwildQuad)) {
    one(i++);
  }
  for (; i + 3 < n; i += 4) quad(i);
  while (i < n) one(i++);
}

}  // namespace hogwild_internal

inline void LoadHogwild(const float* from, int64_t n, float* to) {
  using hogwild_internal::LoadOne;
  using hogwild_internal::LoadQuad;
  hogwild_internal::InQuads(
      from, n, [=](int64_t i) { to[i] = LoadOne(from + i); },
      [=](int64_t i) {
        const HogwildQuad quad = LoadQuad(from + i);
        std::memcpy(to + i, &quad, sizeof(quad));
      });
}

inline void StoreHogwild(const float* from, int64_t n, float* to) {
  using hogwild_internal::StoreOne;
  using hogwild_internal::StoreQuad;
  hogwild_internal::InQuads(
      to, n, [=](int64_t i) { StoreOne(from[i], to + i); },
      [=](int64_t i) {
        HogwildQuad quad;
        std::memcpy(&quad, from + i, sizeof(quad));
        StoreQuad(quad, to + i);
      });
}

// Replaces each of the n elements at `shared` by change(value, i), which is
// called with single floats and with quads, i then being the first one's place.
template <typename Change>
void ChangeHogwild(float* shared, int64_t n, Change change) {
  using namespace hogwild_internal;  // NOLINT(build/namespaces)
  InQuads(
      shared, n,
      [=](int64_t i) { StoreOne(change(LoadOne(shared + i), i), shared + i); },
      [=](int64_t i) {
        StoreQuad(change(LoadQuad(shared + i), i), shared + i);
      });
}

// Applies a rule to a span, as `apply` by itself does; returns the sum over
// blocks of what it returned.
template <typename Rule>
double UpdateHogwild(SpanUpdate<Rule> apply, const Rule& rule, float* w,
                     float* const* accumulators, const float* g, int64_t n,
                     float rho, float decay) {
  static_assert(!Rule::kOnePerRow, "blocks are no rows");
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
