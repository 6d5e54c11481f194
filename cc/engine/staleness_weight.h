// The weight rho(tau) that a gradient of staleness tau gets before it enters
// any accumulator: g_hat = rho(tau) g (Liu and Zhao 2021, Eq. 3 to 8).
//
//   StalenessWeight weight;
//   weight.decay = StalenessDecay::kInversePower;
//   weight.baseline = 1000;  // workers of the cluster it was tuned on
//   double rho = weight.Of(tau, last_update, measured_deviation,
//   measured_mean);
//
// Thread compatible: no state of its own.

#ifndef TF_RECSYNC_CC_ENGINE_STALENESS_WEIGHT_H_
#define TF_RECSYNC_CC_ENGINE_STALENESS_WEIGHT_H_

#include <cmath>
#include <cstdint>
#include <string>

namespace recsync {

enum class StalenessDecay {
  kConstant,      // rho = 1
  kInversePower,  // 1 up to the baseline, falling beyond it
  kThreshold,     // 1 up to an age of iota, 0 beyond it (GBA)
};

// Parses "constant", "inverse_power" or "threshold"; false for anything else.
inline bool ParseStalenessDecay(const std::string& name,
                                StalenessDecay* decay) {
  if (name == "constant") {
    *decay = StalenessDecay::kConstant;
  } else if (name == "inverse_power") {
    *decay = StalenessDecay::kInversePower;
  } else if (name == "threshold") {
    *decay = StalenessDecay::kThreshold;
  } else {
    return false;
  }
  return true;
}

struct StalenessWeight {
  StalenessDecay decay = StalenessDecay::kConstant;
  double power = 2.0;      // k of the inverse power
  double baseline = 1.0;   // mu, in updates; at least 1
  bool normalized = true;  // (mu / tau)^k; false: tau^-k, Eq. 7 to the letter
  double iota = 0.0;       // threshold: the largest age with weight 1
  // lambda of Eq. 6: rho is taken at tau * sigmoid(lambda |dw|). Negative: off.
  double update_sensitivity = -1.0;
  // delta' and mu' of the smaller cluster that tau is rescaled to. A deviation
  // of 0 switches rescaling off; a mean of 0 leaves the means out, which is the
  // paper's tau' = (delta' / delta) tau.
  double target_deviation = 0.0;
  double target_mean = 0.0;
  // The deviation and mean of tau are those of so many pushes, or up to twice
  // as many, see StalenessCounters::BeginPush.
  int64_t window = 1000;

  bool uses_last_update() const { return update_sensitivity >= 0.0; }
  bool rescales() const { return target_deviation > 0.0; }

  // The weight at staleness `tau`. `last_update` is |dw|, the length of the
  // last update applied; `deviation` and `mean` are those measured. With
  // no spread measured yet there is nothing to rescale by, and tau is kept.
  double Of(double tau, double last_update, double deviation,
            double mean) const {
    if (decay == StalenessDecay::kConstant) return 1.0;
    // Only towards a smaller cluster: a fresh gradient keeps its full weight.
    if (rescales() && deviation > target_deviation) {
      tau = target_mean > 0.0
                ? target_deviation * (tau - mean) / deviation + target_mean
                : target_deviation / deviation * tau;
    }
    if (uses_last_update()) {
      // Without sensitivity even an update of infinite length counts as none.
      const double trans =
          update_sensitivity > 0.0 ? -update_sensitivity * last_update : 0.0;
      tau *= 1.0 / (1.0 + std::exp(trans));
    }
    if (decay == StalenessDecay::kThreshold) {
      // A fresh gradient has staleness 1 and age 0.
      return tau - 1.0 <= iota ? 1.0 : 0.0;
    }
    if (tau <= baseline) return 1.0;
    const double ratio = (normalized ? baseline : 1.0) / tau;
    if (power == 2.0) return ratio * ratio;  // the default, for every row
    return std::pow(ratio, power);
  }
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_STALENESS_WEIGHT_H_
