// The arithmetic of the optimizers, on one span of contiguous floats: a dense
// variable or a piece of one, or one row of a table. A rule is a class with
//
//   static constexpr int kAccumulators;  // float slots like the variable
//   template <bool kMeasure>
//   double Apply(float* w, float* const* accumulators, const float* g,
//                int64_t n, float rho, float decay) const;
//
// `rho` weighs the gradient before it enters the accumulator and `decay` is
// the accumulator's SWAP factor. With kMeasure the sum of squares of the
// applied update is returned, else 0.
//
// Thread compatible; spans that two threads update must not overlap.

#ifndef TF_RECSYNC_CC_ENGINE_UPDATE_RULES_H_
#define TF_RECSYNC_CC_ENGINE_UPDATE_RULES_H_

#include <cmath>
#include <cstdint>

// Inlined into variants for different processors (span_update.h).
#define RECSYNC_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace recsync {

// w <- w - lr g_hat
struct SgdRule {
  static constexpr int kAccumulators = 0;
  float learning_rate = 0.0f;

  template <bool kMeasure>
  RECSYNC_ALWAYS_INLINE double Apply(float* __restrict w,
                                     float* const* /*accumulators*/,
                                     const float* __restrict g, int64_t n,
                                     float rho, float /*decay*/) const {
    const float step = learning_rate * rho;
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const float update = step * g[i];
      w[i] -= update;
      if (kMeasure) squares += static_cast<double>(update) * update;
    }
    return squares;
  }
};

// v <- decay v + g_hat^2;  w <- w - lr g_hat / sqrt(v + epsilon)
struct AdagradRule {
  static constexpr int kAccumulators = 1;
  float learning_rate = 0.0f;
  float epsilon = 0.0f;

  template <bool kMeasure>
  RECSYNC_ALWAYS_INLINE double Apply(float* __restrict w,
                                     float* const* accumulators,
                                     const float* __restrict g, int64_t n,
                                     float rho, float decay) const {
    float* __restrict v = accumulators[0];
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const float weighted = rho * g[i];
      v[i] = decay * v[i] + weighted * weighted;
      const float update = learning_rate * weighted / std::sqrt(v[i] + epsilon);
      w[i] -= update;
      if (kMeasure) squares += static_cast<double>(update) * update;
    }
    return squares;
  }
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_UPDATE_RULES_H_
