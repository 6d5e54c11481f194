#include "cc/simulation/hidden_layers.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cc/simulation/random_numbers.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

std::vector<float> Normals(int64_t seed, size_t n) {
  RandomNumbers random(1, RandomNumbers::kNoise, 0, seed);
  std::vector<float> found(n);
  for (float& value : found) value = static_cast<float>(random.Normal());
  return found;
}

// The logits by definition, in doubles: of a mini-batch in training if there
// are no moving means.
std::vector<double> LogitsOf(const HiddenLayersOptions& options,
                             const std::vector<double>& parameters, int inputs,
                             const std::vector<double>& x, int rows,
                             const std::vector<double>& moving_means) {
  std::vector<double> in = x;
  size_t at = 0, mean_at = 0;
  for (size_t l = 0; l <= options.units.size(); ++l) {
    const bool is_output = l == options.units.size();
    const int units = is_output ? 1 : options.units[l];
    std::vector<double> out(rows * units);
    for (int u = 0; u < units; ++u) {
      double mean = 0.0;
      for (int r = 0; r < rows; ++r) {
        double sum = parameters[at + inputs * units + u];
        for (int i = 0; i < inputs; ++i) {
          sum += in[r * inputs + i] * parameters[at + i * units + u];
        }
        out[r * units + u] = sum;
        mean += sum / rows;
      }
      if (is_output) continue;
      if (options.mean_normalization) {
        if (!moving_means.empty()) mean = moving_means[mean_at + u];
        if (std::abs(mean) < options.epsilon) {
          mean = mean < 0.0 ? -options.epsilon : options.epsilon;
        }
        const double alpha = parameters[at + (inputs + 1) * units + u];
        const double beta = parameters[at + (inputs + 2) * units + u];
        for (int r = 0; r < rows; ++r) {
          out[r * units + u] = alpha * out[r * units + u] / mean - beta;
        }
      }
      for (int r = 0; r < rows; ++r) {
        out[r * units + u] = std::max(out[r * units + u], 0.0);
      }
    }
    const bool normalizes = options.mean_normalization && !is_output;
    at += units * (inputs + (normalizes ? 3 : 1));
    if (normalizes) mean_at += units;
    inputs = units;
    in = out;
  }
  return in;
}

std::vector<HiddenLayersOptions> AllKinds() {
  std::vector<HiddenLayersOptions> kinds(4);
  kinds[0].units = {4};
  kinds[1].units = {5, 3};
  kinds[2].units = {4};
  kinds[3].units = {5, 3};
  kinds[2].mean_normalization = kinds[3].mean_normalization = true;
  // Some means are below this, others are not.
  kinds[2].epsilon = kinds[3].epsilon = 0.2f;
  return kinds;
}

TEST(HiddenLayersTest, GradientsAreTheSlopesOfTheLogitsOfTheDefinition) {
  constexpr int kInputs = 3, kRows = 6;
  for (const HiddenLayersOptions& options : AllKinds()) {
    HiddenLayers layers(kInputs, options);
    std::vector<float> parameters = Normals(1, layers.parameters());
    const std::vector<float> x = Normals(2, kInputs * kRows);
    const std::vector<float> slopes = Normals(3, kRows);
    std::vector<double> logits(kRows);
    layers.Forward(parameters.data(), x.data(), kRows, logits.data());
    std::vector<float> gradients(parameters.size(), 0.0f), of_x(x.size());
    layers.Backward(parameters.data(), slopes.data(), gradients.data(),
                    of_x.data());

    std::vector<double> exact(parameters.begin(), parameters.end());
    std::vector<double> inputs(x.begin(), x.end());
    const auto loss = [&] {
      const std::vector<double> found =
          LogitsOf(options, exact, kInputs, inputs, kRows, {});
      double sum = 0.0;
      for (int r = 0; r < kRows; ++r) sum += slopes[r] * found[r];
      return sum;
    };
    const auto slope_of = [&](double* value) {
      constexpr double kSmall = 1e-6;
      const double middle = *value;
      *value = middle + kSmall;
      const double above = loss();
      *value = middle - kSmall;
      const double below = loss();
      *value = middle;
      return (above - below) / (2 * kSmall);
    };
    const std::vector<double> expected =
        LogitsOf(options, exact, kInputs, inputs, kRows, {});
    for (int r = 0; r < kRows; ++r) {
      EXPECT_NEAR(logits[r], expected[r], 1e-4 * (1 + std::abs(expected[r])));
    }
    for (size_t i = 0; i < exact.size(); ++i) {
      const double slope = slope_of(&exact[i]);
      EXPECT_NEAR(gradients[i], slope, 1e-3 * (1 + std::abs(slope))) << i;
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      const double slope = slope_of(&inputs[i]);
      EXPECT_NEAR(of_x[i], slope, 1e-3 * (1 + std::abs(slope))) << i;
    }
  }
}

TEST(HiddenLayersTest, InferenceNormalizesByMovingMeans) {
  constexpr int kInputs = 3, kRows = 6;
  for (const HiddenLayersOptions& options : AllKinds()) {
    HiddenLayers layers(kInputs, options);
    const std::vector<float> parameters = Normals(1, layers.parameters());
    const std::vector<float> x = Normals(2, kInputs * kRows);
    const std::vector<float> means = Normals(4, layers.means());
    std::vector<double> logits(kRows);
    layers.Infer(parameters.data(), means.data(), x.data(), kRows,
                 logits.data());
    const std::vector<double> expected =
        LogitsOf(options, {parameters.begin(), parameters.end()}, kInputs,
                 {x.begin(), x.end()}, kRows, {means.begin(), means.end()});
    for (int r = 0; r < kRows; ++r) {
      EXPECT_NEAR(logits[r], expected[r], 1e-4 * (1 + std::abs(expected[r])));
    }
  }
}

TEST(HiddenLayersTest, MovingMeansComeCloserToThoseOfMiniBatches) {
  HiddenLayersOptions options;
  options.units = {2};
  options.mean_normalization = true;
  options.momentum = 0.75f;
  HiddenLayers layers(1, options);
  // Two units, whose dense outputs are x and 2 x + 1.
  const std::vector<float> parameters{1, 2, 0, 1, 1, 1, 1, 1, 1, 1, 0};
  ASSERT_EQ(layers.parameters(), static_cast<int64_t>(parameters.size()));
  const std::vector<float> x{1.0f, 3.0f};
  std::vector<double> logits(2);
  layers.Forward(parameters.data(), x.data(), 2, logits.data());
  const std::vector<float> moving{1.0f, 9.0f};
  std::vector<float> change(2);
  layers.ChangeOfMeans(moving.data(), change.data());
  EXPECT_FLOAT_EQ(change[0], 0.25f * (2.0f - 1.0f));
  EXPECT_FLOAT_EQ(change[1], 0.25f * (5.0f - 9.0f));
}

TEST(HiddenLayersTest, FirstKernelsAreUniformWithinGlorotsLimits) {
  HiddenLayersOptions options;
  options.units = {40};
  options.mean_normalization = true;
  HiddenLayers layers(60, options);
  std::vector<float> parameters(layers.parameters(), 9.0f);
  layers.Initialize(3, parameters.data());
  const double limit = std::sqrt(6.0 / 100);
  double squares = 0.0;
  for (int i = 0; i < 2400; ++i) {
    EXPECT_LE(std::abs(parameters[i]), limit);
    squares += parameters[i] * parameters[i] / 2400;
  }
  EXPECT_NEAR(squares, limit * limit / 3, 0.05 * limit * limit);
  for (int u = 0; u < 40; ++u) {
    EXPECT_EQ(parameters[2400 + u], 0.0f);  // bias
    EXPECT_EQ(parameters[2440 + u], 1.0f);  // alpha
    EXPECT_EQ(parameters[2480 + u], 1.0f);  // beta
  }
  EXPECT_EQ(parameters.back(), 0.0f);
  EXPECT_EQ(HiddenLayers(60, {}).parameters(), 0);
}

}  // namespace
}  // namespace recsync
