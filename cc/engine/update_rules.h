// The arithmetic of the optimizers, on one span of contiguous floats: a dense
// variable or a piece of one, or one row of a table. A rule is a class with
//
//   static constexpr int kAccumulators;  // float slots like the variable,
//   static constexpr bool kOnePerRow;    // or of one float for each row
//   template <bool kMeasure>
//   double Apply(float* w, float* const* accumulators, const float* g,
//                int64_t n, float rho, float decay) const;
//
// A rule with kOnePerRow is for rows of tables only, and has each of them in
// one span. One with kReplaces makes the value anew of its accumulators. A rule
// with kKeepsSteps keeps the global step of the last touch
// beside a variable or row, and is asked for the rule of this touch first:
//
//   void Begin(int64_t global_step);                       // once a push
//   template <typename Step>
//   Rule At(int64_t global_step, Step* last_step) const;
//
// and, if it is the latest touch for certain, this before:
//
//   template <typename Step>
//   static void SetBack(int64_t global_step, Step* last_step);
//
// `rho` weighs the gradient before it enters the accumulator and `decay` is
// the accumulator's SWAP factor. With kMeasure the sum of squares of the
// applied update is returned, else 0.
//
// Thread compatible; spans that two threads update must not overlap.

#ifndef TF_RECSYNC_CC_ENGINE_UPDATE_RULES_H_
#define TF_RECSYNC_CC_ENGINE_UPDATE_RULES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cc/engine/saturated.h"

// Inlined into variants for different processors (span_update.h).
#define RECSYNC_ALWAYS_INLINE __attribute__((always_inline)) inline
#define RECSYNC_ALWAYS_INLINE_LAMBDA __attribute__((always_inline))

namespace recsync {

// w <- w - lr g_hat
struct SgdRule {
  static constexpr int kAccumulators = 0;
  static constexpr bool kOnePerRow = false;
  static constexpr bool kKeepsSteps = false;
  static constexpr bool kReplaces = false;
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
  static constexpr bool kOnePerRow = false;
  static constexpr bool kKeepsSteps = false;
  static constexpr bool kReplaces = false;
  float learning_rate = 0.0f;
  float epsilon = 0.0f;

  template <bool kMeasure>
  RECSYNC_ALWAYS_INLINE double Apply(float* __restrict w,
                                     float* const* accumulators,
                                     const float* __restrict g, int64_t n,
                                     float rho, float decay) const {
    float* __restrict v = accumulators[0];
    // Members could be what is written, for all that the compiler knows.
    const float rate = learning_rate, small = epsilon;
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const float weighted = rho * g[i];
      v[i] = decay * v[i] + weighted * weighted;
      const float update = rate * weighted / std::sqrt(v[i] + small);
      w[i] -= update;
      if (kMeasure) squares += static_cast<double>(update) * update;
    }
    return squares;
  }
};

// Adagrad with one accumulator for a row:
//
//   v <- decay v + mean(g_hat^2);  w <- w - lr g_hat / sqrt(v + epsilon)
struct RowwiseAdagradRule {
  static constexpr int kAccumulators = 1;
  static constexpr bool kOnePerRow = true;
  static constexpr bool kKeepsSteps = false;
  static constexpr bool kReplaces = false;
  float learning_rate = 0.0f;
  float epsilon = 0.0f;

  template <bool kMeasure>
  RECSYNC_ALWAYS_INLINE double Apply(float* __restrict w,
                                     float* const* accumulators,
                                     const float* __restrict g, int64_t n,
                                     float rho, float decay) const {
    float& v = *accumulators[0];
    v = decay * v + SumOfSquares(g, n, rho) / std::max<int64_t>(n, 1);
    const float rate = learning_rate, root = std::sqrt(v + epsilon);
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const float update = rate * (rho * g[i]) / root;
      w[i] -= update;
      if (kMeasure) squares += static_cast<double>(update) * update;
    }
    return squares;
  }

 private:
  // Of rho g, in the same order whatever the width of vectors: eight sums side
  // by side, and these by halves.
  RECSYNC_ALWAYS_INLINE static float SumOfSquares(const float* __restrict g,
                                                  int64_t n, float rho) {
    constexpr int kLanes = 8;
    float sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int k = 0; k < kLanes; ++k) {
        const float weighted = rho * g[i + k];
        sums[k] += weighted * weighted;
      }
    }
    for (int k = 0; i + k < n; ++k) {
      const float weighted = rho * g[i + k];
      sums[k] += weighted * weighted;
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    return sums[0];
  }
};

// Adam with moments that are decayed lazily: a variable or row that was touched
// at global step s and is touched again at t > s has
//
//   m <- beta_1^(t-s) m + (1 - beta_1) g_hat
//   v <- lambda beta_2^(t-s) v + (1 - beta_2) g_hat^2   (lambda: SWAP's factor)
//   w <- w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)
//
// The moments are those of Adam with gradients of 0 at the steps between; w
// does not move at those steps, unless `lazy` is false: then RowUpdate has each
// row make them. A push that arrives after a younger one (t <= s) enters the
// moments with the weight that it would have by now, beta^(s-t).
//
// With `several_counters`, trainers that count their steps apart update the
// same rows: then t <= s says nothing of when a push was made, and each is the
// step after the last at least, so that slow trainers' gradients weigh as much.
struct AdamRule {
  static constexpr int kAccumulators = 2;  // m and v
  static constexpr bool kOnePerRow = false;
  static constexpr bool kKeepsSteps = true;
  static constexpr bool kReplaces = false;
  float learning_rate = 0.0f;
  double beta_1 = 0.9;
  double beta_2 = 0.999;
  float epsilon = 0.0f;
  bool lazy = true;
  bool several_counters = false;

  void Begin(int64_t global_step) {
    log_beta_1_ = std::log(beta_1);
    log_beta_2_ = std::log(beta_2);
    rate_ = static_cast<float>(
        learning_rate *
        std::sqrt(1.0 - Power(beta_2, log_beta_2_, global_step)) /
        (1.0 - Power(beta_1, log_beta_1_, global_step)));
    // By how much m / sqrt(v) falls in each of them; it may rise instead.
    const double fall = log_beta_2_ / 2 - log_beta_1_;
    constexpr double kStill = 25.0;  // e^-25 < 2^-36
    if (fall > kStill / kMostSteps) {
      moving_steps_ = static_cast<int64_t>(kStill / fall) + 1;
    }
  }

  // Has what is ahead of `global_step` make that step next: no push is late, so
  // somebody has set the global step back.
  template <typename Step>
  static void SetBack(int64_t global_step, Step* last_step) {
    *last_step = std::min(*last_step, Saturated<Step>(global_step - 1));
  }

  template <typename Step>
  AdamRule At(int64_t global_step, Step* last_step) const {
    AdamRule rule = *this;
    constexpr Step kMost = std::numeric_limits<Step>::max();
    // Once the last step is more than its type knows, each is the one after.
    int64_t missed = global_step > kMost && *last_step == kMost
                         ? 1
                         : SaturatedDifference(global_step, *last_step);
    if (several_counters) {
      missed = std::max<int64_t>(missed, 1);
      *last_step = std::max(*last_step, Saturated<Step>(global_step));
    } else if (missed > 0 || missed < -kMostLate) {
      // No push is that late: another counter was here, before a checkpoint.
      missed = std::max<int64_t>(missed, 1);
      *last_step = Saturated<Step>(global_step);
    }
    const int64_t late = missed < 0 ? -missed : 0;
    const int64_t decayed = missed > 0 ? missed : 0;
    rule.m_decay_ = static_cast<float>(Power(beta_1, log_beta_1_, decayed));
    rule.v_decay_ = static_cast<float>(Power(beta_2, log_beta_2_, decayed));
    rule.m_gain_ =
        static_cast<float>((1.0 - beta_1) * Power(beta_1, log_beta_1_, late));
    rule.v_gain_ =
        static_cast<float>((1.0 - beta_2) * Power(beta_2, log_beta_2_, late));
    return rule;
  }

  // After as many steps without a gradient w moves no more that float32 knows:
  // after none where m is 0.
  int64_t MovingSteps(const float* const* accumulators, int64_t n) const {
    const float* m = accumulators[0];
    const bool moves = std::any_of(m, m + n, [](float x) { return x != 0.0f; });
    return moves ? moving_steps_ : 0;
  }

  template <bool kMeasure>
  RECSYNC_ALWAYS_INLINE double Apply(float* __restrict w,
                                     float* const* accumulators,
                                     const float* __restrict g, int64_t n,
                                     float rho, float decay) const {
    float* __restrict m = accumulators[0];
    float* __restrict v = accumulators[1];
    const float v_decay = decay * v_decay_, v_gain = v_gain_;
    const float m_decay = m_decay_, m_gain = m_gain_;
    const float rate = rate_, small = epsilon;
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const float weighted = rho * g[i];
      m[i] = m_decay * m[i] + m_gain * weighted;
      v[i] = v_decay * v[i] + v_gain * weighted * weighted;
      const float update = rate * m[i] / (std::sqrt(v[i]) + small);
      w[i] -= update;
      if (kMeasure) squares += static_cast<double>(update) * update;
    }
    return squares;
  }

 private:
  static constexpr int64_t kMostSteps = 100000;
  static constexpr int64_t kMostLate = 1 << 16;

  static double Power(double beta, double log_beta, int64_t n) {
    if (n == 0) return 1.0;
    if (n == 1) return beta;
    return std::exp(static_cast<double>(n) * log_beta);
  }

  int64_t moving_steps_ = kMostSteps;
  double log_beta_1_ = 0.0;
  double log_beta_2_ = 0.0;
  float rate_ = 0.0f;
  float m_decay_ = 1.0f;
  float v_decay_ = 1.0f;
  float m_gain_ = 0.0f;
  float v_gain_ = 0.0f;
};

// FTRL-Proximal, p = -learning_rate_power:
//
//   n' = lambda n + g_hat^2   (lambda: SWAP's factor)
//   z <- z + g_hat - (n'^p - n^p) / lr w
//   w <- (clip(z, -l1, l1) - z) / (n'^p / lr + 2 l2 + beta / lr);  n <- n'
//
// Where that divides by 0, w is 0.
//
// SWAP's decay is part of the difference n'^p - n^p, so that a decay alone
// leaves an unregularized w where it is, as it does in Adagrad.
struct FtrlRule {
  static constexpr int kAccumulators = 2;  // n and z
  static constexpr bool kOnePerRow = false;
  static constexpr bool kKeepsSteps = false;
  static constexpr bool kReplaces = true;
  float learning_rate = 0.0f;
  float learning_rate_power = -0.5f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  float beta = 0.0f;

  template <bool kMeasure>
  RECSYNC_ALWAYS_INLINE double Apply(float* __restrict w,
                                     float* const* accumulators,
                                     const float* __restrict g, int64_t size,
                                     float rho, float decay) const {
    if (learning_rate_power == -0.5f) {
      return ApplyWith<kMeasure>(
          w, accumulators, g, size, rho, decay,
          [](float n) RECSYNC_ALWAYS_INLINE_LAMBDA { return std::sqrt(n); });
    }
    const float power = -learning_rate_power;
    return ApplyWith<kMeasure>(w, accumulators, g, size, rho, decay,
                               [power](float n) RECSYNC_ALWAYS_INLINE_LAMBDA {
                                 return std::pow(n, power);
                               });
  }

 private:
  template <bool kMeasure, typename Power>
  RECSYNC_ALWAYS_INLINE double ApplyWith(float* __restrict w,
                                         float* const* accumulators,
                                         const float* __restrict g,
                                         int64_t size, float rho, float decay,
                                         const Power& power) const {
    float* __restrict n = accumulators[0];
    float* __restrict z = accumulators[1];
    const float rate = learning_rate, limit = l1;
    const float quadratic = 2.0f * l2 + beta / rate;
    double squares = 0.0;
    for (int64_t i = 0; i < size; ++i) {
      const float weighted = rho * g[i];
      const float sum = decay * n[i] + weighted * weighted;
      const float root = power(sum);
      const float linear = z[i] + weighted - (root - power(n[i])) / rate * w[i];
      z[i] = linear;
      n[i] = sum;
      const float clipped = std::min(std::max(linear, -limit), limit);
      // Without a square or a regularization there is nothing that a gradient
      // has said. Not a branch, so that it vectorizes.
      const float scale = root / rate + quadratic;
      const bool is_unknown = scale == 0.0f;
      const float value =
          (is_unknown ? 0.0f : clipped - linear) / (is_unknown ? 1.0f : scale);
      const float update = w[i] - value;
      w[i] = value;
      if (kMeasure) squares += static_cast<double>(update) * update;
    }
    return squares;
  }
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_UPDATE_RULES_H_
