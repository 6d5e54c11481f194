// Sums that metrics of click models are computed from, in one pass over the
// examples of a batch.
//
// Labels, predictions and weights are T, sums double: billions of examples
// don't lose precision. Weights are one for all examples or one for each.
//
// Thread compatible: no state of its own.

#ifndef TF_RECSYNC_CC_ENGINE_CLICK_METRICS_H_
#define TF_RECSYNC_CC_ENGINE_CLICK_METRICS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/types/span.h"

namespace recsync {

// The examples of a batch. `predictions` has as many as `labels`; `weights` as
// many, or one.
template <typename T>
struct Examples {
  absl::Span<const T> labels;
  absl::Span<const T> predictions;
  absl::Span<const T> weights;

  T weight(size_t i) const {
    return weights.size() == 1 ? weights[0] : weights[i];
  }
};

struct LogLossSums {
  double loss = 0.0;
  double label = 0.0;
  double weight = 0.0;
};

// The log loss of a probability, which is clipped to between epsilon and 1
// minus epsilon.
inline double LogLoss(double label, double probability, double epsilon) {
  const double p = std::clamp(probability, epsilon, 1.0 - epsilon);
  // Labels are mostly 0 or 1, and a logarithm is what takes the time.
  double loss = 0.0;
  if (label != 0.0) loss -= label * std::log(p);
  if (label != 1.0) loss -= (1.0 - label) * std::log1p(-p);
  return loss;
}

// The log loss of the probability that a logit stands for, without overflow.
inline double LogLossOfLogit(double label, double logit) {
  return std::max(logit, 0.0) - label * logit +
         std::log1p(std::exp(-std::fabs(logit)));
}

// Adds the weighted log losses, the weighted labels and the weights.
template <typename T>
void AddLogLoss(const Examples<T>& examples, bool from_logits, double epsilon,
                LogLossSums& sums) {
  for (size_t i = 0; i < examples.labels.size(); ++i) {
    const double label = examples.labels[i];
    const double prediction = examples.predictions[i];
    const double weight = examples.weight(i);
    sums.loss += weight * (from_logits ? LogLossOfLogit(label, prediction)
                                       : LogLoss(label, prediction, epsilon));
    sums.label += weight * label;
    sums.weight += weight;
  }
}

// What divides the buckets of scores evenly: probabilities, or logits from
// -kLogitRange to kLogitRange. All float32 probabilities below 1 have logits
// below that.
enum class Spacing { kLinear, kLogit };
constexpr double kLogitRange = 17.0;

// Where a prediction lies in the range that is divided into buckets: from 0 to
// 1.
template <typename T>
T Share(T prediction, bool from_logits, Spacing spacing) {
  if (spacing == Spacing::kLinear) {
    if (from_logits) prediction = T{1} / (T{1} + std::exp(-prediction));
    return std::clamp(prediction, T{0}, T{1});
  }
  constexpr T range = static_cast<T>(kLogitRange);
  if (!from_logits) {
    prediction = std::clamp(prediction, T{0}, T{1});
    prediction = std::log(prediction / (T{1} - prediction));
  }
  return (std::clamp(prediction, -range, range) + range) / (T{2} * range);
}

// Adds the weights of examples to buckets by their predictions: those with a
// label other than 0 to `positives`, others to `negatives`.
//
// There are as many buckets of each, n. With linear spacing, as in
// keras.metrics.AUC with n + 1 thresholds, bucket i has predictions above
// i / n, up to and with (i + 1) / n, the first also those of 0; predictions are
// clipped to [0, 1]. With logit spacing, the same goes for the place of the
// prediction's logit between -kLogitRange and kLogitRange. Those that are no
// numbers are left out.
template <typename T>
void AddScores(const Examples<T>& examples, bool from_logits, Spacing spacing,
               absl::Span<double> positives, absl::Span<double> negatives) {
  const T buckets = static_cast<T>(positives.size());
  for (size_t i = 0; i < examples.labels.size(); ++i) {
    if (std::isnan(examples.predictions[i])) continue;
    const T share = Share(examples.predictions[i], from_logits, spacing);
    const size_t place =
        static_cast<size_t>(std::max(std::ceil(share * buckets) - T{1}, T{0}));
    absl::Span<double> counts =
        examples.labels[i] != T{0} ? positives : negatives;
    // A T may be too coarse for the number of buckets, and round up.
    counts[std::min(place, counts.size() - 1)] += examples.weight(i);
  }
}

// The area under the ROC curve of the sums that AddScores made: the chance that
// a positive example lies in a higher bucket than a negative one; the same
// bucket counts a half. 0 unless there are both.
inline double AreaUnderCurve(absl::Span<const double> positives,
                             absl::Span<const double> negatives) {
  double won = 0.0, positive = 0.0, below = 0.0;
  for (size_t i = 0; i < positives.size(); ++i) {
    won += positives[i] * (below + negatives[i] / 2.0);
    positive += positives[i];
    below += negatives[i];
  }
  const double pairs = positive * below;
  return pairs > 0.0 ? won / pairs : 0.0;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_CLICK_METRICS_H_
