#include "cc/simulation/logistic_problem.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "cc/engine/philox.h"

namespace recsync {

LogisticProblem::LogisticProblem(const Options& options) : options_(options) {
  std::mt19937_64 random(options.seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  // The probabilities that labels are drawn from: some near 0 and 1, and many
  // between them.
  const double scale = 2.0 / std::sqrt(static_cast<double>(options.features));
  std::vector<double> truth(options.features);
  for (double& value : truth) value = scale * normal(random);
  inputs_.reserve(options.examples * options.features);
  labels_.reserve(options.examples);
  for (int64_t i = 0; i < options.examples; ++i) {
    double score = -0.5;
    for (const double weight : truth) {
      const double input = normal(random);
      inputs_.push_back(static_cast<float>(input));
      score += weight * input;
    }
    labels_.push_back(uniform(random) < 1.0 / (1.0 + std::exp(-score)));
  }
}

double LogisticProblem::Score(const float* w, int64_t example) const {
  const float* const x = &inputs_[example * options_.features];
  double score = w[options_.features];
  for (int64_t f = 0; f < options_.features; ++f) score += w[f] * x[f];
  return score;
}

void LogisticProblem::Gradient(const float* w, int64_t worker, int64_t step,
                               float* gradient) const {
  std::vector<double> sums(parameters(), 0.0);
  PhiloxWords words{};
  for (int64_t i = 0; i < options_.batch_size; ++i) {
    if (i % 4 == 0) {
      words = Philox(
          options_.seed,
          {static_cast<uint32_t>(i / 4), static_cast<uint32_t>(step),
           static_cast<uint32_t>(step >> 32), static_cast<uint32_t>(worker)});
    }
    // The upper bits of a product: no modulo, and as good as uniform.
    const int64_t example =
        static_cast<uint64_t>(words[i % 4]) * options_.examples >> 32;
    const double score = Score(w, example);
    const double error = 1.0 / (1.0 + std::exp(-score)) - labels_[example];
    const float* const x = &inputs_[example * options_.features];
    for (int64_t f = 0; f < options_.features; ++f) sums[f] += error * x[f];
    sums[options_.features] += error;
  }
  const double batch = static_cast<double>(options_.batch_size);
  for (int64_t p = 0; p < parameters(); ++p) {
    gradient[p] =
        static_cast<float>(sums[p] / batch + options_.weight_decay * w[p]);
  }
}

double LogisticProblem::Loss(const float* w) const {
  double sum = 0.0;
  for (int64_t i = 0; i < options_.examples; ++i) {
    const double score = Score(w, i);
    // log(1 + exp(score)) - label * score, which does not overflow.
    sum += std::max(score, 0.0) + std::log1p(std::exp(-std::abs(score))) -
           labels_[i] * score;
  }
  double squares = 0.0;
  for (int64_t p = 0; p < parameters(); ++p) {
    squares += static_cast<double>(w[p]) * w[p];
  }
  return sum / static_cast<double>(options_.examples) +
         0.5 * options_.weight_decay * squares;
}

}  // namespace recsync
