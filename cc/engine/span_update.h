// Calls a rule on one span with the widest vectors that the machine has: the
// library must run on any x86-64, whose common part has vectors of four floats.
//
// All variants compute the same to the last bit: the wider ones hold no fused
// multiply-add, and the rules' loops are elementwise. (Sums of squares are
// taken in the same order by all of them.) Common row widths are compiled in.
//
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_SPAN_UPDATE_H_
#define TF_RECSYNC_CC_ENGINE_SPAN_UPDATE_H_

#include <cstdint>

namespace recsync {

template <typename Rule>
using SpanUpdate = double (*)(const Rule& rule, float* w,
                              float* const* accumulators, const float* g,
                              int64_t n, float rho, float decay);

namespace span_internal {

template <typename Rule, bool kMeasure>
__attribute__((always_inline)) inline double ByWidth(const Rule& rule, float* w,
                                                     float* const* accumulators,
                                                     const float* g, int64_t n,
                                                     float rho, float decay) {
  switch (n) {
    case 8:
      return rule.template Apply<kMeasure>(w, accumulators, g, 8, rho, decay);
    case 16:
      return rule.template Apply<kMeasure>(w, accumulators, g, 16, rho, decay);
    case 32:
      return rule.template Apply<kMeasure>(w, accumulators, g, 32, rho, decay);
    case 64:
      return rule.template Apply<kMeasure>(w, accumulators, g, 64, rho, decay);
    default:
      return rule.template Apply<kMeasure>(w, accumulators, g, n, rho, decay);
  }
}

template <typename Rule, bool kMeasure>
double Common(const Rule& rule, float* w, float* const* accumulators,
              const float* g, int64_t n, float rho, float decay) {
  return ByWidth<Rule, kMeasure>(rule, w, accumulators, g, n, rho, decay);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define RECSYNC_HAS_AVX2_SPANS
template <typename Rule, bool kMeasure>
__attribute__((target("avx2"))) double Avx2(const Rule& rule, float* w,
                                            float* const* accumulators,
                                            const float* g, int64_t n,
                                            float rho, float decay) {
  return ByWidth<Rule, kMeasure>(rule, w, accumulators, g, n, rho, decay);
}
#endif

}  // namespace span_internal

// The variant for this machine; with kMeasure it returns the sum of squares of
// the update, else 0.
template <typename Rule, bool kMeasure>
SpanUpdate<Rule> ChooseSpanUpdate() {
#ifdef RECSYNC_HAS_AVX2_SPANS
  if (__builtin_cpu_supports("avx2")) {
    return span_internal::Avx2<Rule, kMeasure>;
  }
#endif
  return span_internal::Common<Rule, kMeasure>;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_SPAN_UPDATE_H_
