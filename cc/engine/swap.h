// SWAP, samples weighted according to period (Liu and Zhao 2021, "Asynchronous
// Stochastic Gradient Descent for Extreme-Scale Recommender Systems",
// Algorithm 2): the accumulator of an adaptive optimizer is multiplied by
// lambda_0 whenever the global step is a multiple of the period T.
//
// The eager rule touches every element of every accumulator at each period.
// This class states the same rule lazily: whoever owns an accumulator (a dense
// variable, or one row of a table) remembers the last period applied to it and
// asks, at its next touch, for the factor that it missed.
//
//   Swap swap{/*period=*/10000, /*decay=*/0.8};
//   float factor = swap.DecaySince(&last_period, global_step);
//   v = factor * v + g * g;
//
// After a switch of the training mode, periods go on being numbered where they
// were, though both the period's length and the global step have changed:
// `offset` says by how much a step is off.
//
// Periods are counted up to the largest number of the type that the last one is
// kept in, int32 beside a row: whatever comes after belongs to that one, and
// decays nothing any more.
//
// Thread compatible: no state of its own.

#ifndef TF_RECSYNC_CC_ENGINE_SWAP_H_
#define TF_RECSYNC_CC_ENGINE_SWAP_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cc/engine/saturated.h"

namespace recsync {

struct Swap {
  int64_t period = 0;  // T, in global steps; 0 switches SWAP off.
  double decay = 1.0;  // lambda_0, in (0, 1].
  int64_t offset = 0;  // Added to the global step; the sum is never negative.

  static constexpr int32_t kNoPeriod = -1;

  bool enabled() const { return period > 0; }

  // The period that `global_step` (counted from 1) falls into: the number of
  // multiples of T in 1..global_step + offset.
  int64_t PeriodOf(int64_t global_step) const {
    // Steps come from checkpoints and peers: any number may.
    return SaturatedSum(global_step, offset) / period;
  }

  // Whether a period that is not applied to an accumulator yet has begun.
  bool Enters(int64_t last_period, int64_t global_step) const {
    return PeriodOf(global_step) > last_period;
  }

  // Has an accumulator that is ahead of the step before `global_step` go on
  // there: somebody has set the global step back. Nothing is decayed for that.
  template <typename Period>
  void SetBack(Period* last_period, int64_t global_step) const {
    *last_period =
        std::min(*last_period, Saturated<Period>(PeriodOf(global_step - 1)));
  }

  // The product of lambda_t over the periods entered since `*last_period`,
  // which it brings up to date; of an accumulator that has just been given its
  // first value (kNoPeriod) none is missed. A push that arrives after a younger
  // one (its period is over already) decays nothing.
  template <typename Period>
  float DecaySince(Period* last_period, int64_t global_step) const {
    const Period now = Saturated<Period>(PeriodOf(global_step));
    const Period before = *last_period;
    if (now <= before) return 1.0f;
    if (before == kNoPeriod) {
      *last_period = now;
      return 1.0f;
    }
    *last_period = now;
    if (now - 1 == before) return static_cast<float>(decay);
    const double missed =
        static_cast<double>(now) - static_cast<double>(before);
    return static_cast<float>(std::pow(decay, missed));
  }
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_SWAP_H_
