// Local mean-normalization (Liu and Zhao 2021, Eq. 9 and 10):
//
//   y = alpha x / E(x) - beta
//
// per feature, with E over the rows of the local mini-batch. The divisor is
// kept away from 0 with its sign: sign(E) max(|E|, epsilon), sign(0) = +1. A
// feature whose mean is no number has outputs and gradients that are none.
//
// Thread compatible: no state of its own.

#ifndef TF_RECSYNC_CC_ENGINE_MEAN_NORMALIZATION_H_
#define TF_RECSYNC_CC_ENGINE_MEAN_NORMALIZATION_H_

#include <cmath>
#include <cstdint>
#include <vector>

namespace recsync {

inline float GuardedDivisor(float mean, float epsilon) {
  // Of what is no number as well.
  if (!(std::fabs(mean) < epsilon)) return mean;
  return std::signbit(mean) && mean != 0.0f ? -epsilon : epsilon;
}

// x, y: [rows, features] row-major; alpha, beta, mean: [features]. Writes the
// mini-batch's mean into `mean` (0 where there are no rows).
template <typename T>
void MeanNormalize(const T* x, const float* alpha, const float* beta,
                   float epsilon, int64_t rows, int64_t features, T* y,
                   float* mean) {
  std::vector<double> sums(static_cast<size_t>(features), 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < features; ++f) {
      sums[f] += static_cast<float>(x[r * features + f]);
    }
  }
  std::vector<float> scale(static_cast<size_t>(features));
  for (int64_t f = 0; f < features; ++f) {
    mean[f] = rows > 0 ? static_cast<float>(sums[f] / rows) : 0.0f;
    scale[f] = alpha[f] / GuardedDivisor(mean[f], epsilon);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < features; ++f) {
      y[r * features + f] = static_cast<T>(
          static_cast<float>(x[r * features + f]) * scale[f] - beta[f]);
    }
  }
}

// The gradients of MeanNormalize, through the mean too: where the divisor is
// the mean itself,
//   dL/dx = alpha dy / E - (1/rows) sum_r(dy x) alpha / E^2,
// and where it is held at epsilon the mean has no influence.
template <typename T>
void MeanNormalizeGrad(const T* dy, const T* x, const float* alpha,
                       const float* mean, float epsilon, int64_t rows,
                       int64_t features, T* dx, float* dalpha, float* dbeta) {
  std::vector<double> dy_x(static_cast<size_t>(features), 0.0);
  std::vector<double> dy_sum(static_cast<size_t>(features), 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < features; ++f) {
      const float g = static_cast<float>(dy[r * features + f]);
      dy_x[f] +=
          static_cast<double>(g) * static_cast<float>(x[r * features + f]);
      dy_sum[f] += g;
    }
  }
  std::vector<float> scale(static_cast<size_t>(features));
  std::vector<float> through_mean(static_cast<size_t>(features), 0.0f);
  for (int64_t f = 0; f < features; ++f) {
    const double divisor = GuardedDivisor(mean[f], epsilon);
    scale[f] = static_cast<float>(alpha[f] / divisor);
    dalpha[f] = static_cast<float>(dy_x[f] / divisor);
    dbeta[f] = static_cast<float>(-dy_sum[f]);
    if (rows > 0 && !(std::fabs(mean[f]) < epsilon)) {
      through_mean[f] =
          static_cast<float>(-dy_x[f] * alpha[f] / (divisor * divisor) / rows);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < features; ++f) {
      dx[r * features + f] =
          static_cast<T>(static_cast<float>(dy[r * features + f]) * scale[f] +
                         through_mean[f]);
    }
  }
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_MEAN_NORMALIZATION_H_
