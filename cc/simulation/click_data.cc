#include "cc/simulation/click_data.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cc/simulation/random_numbers.h"

namespace recsync {
namespace {

constexpr double kBias = -1.0;

}  // namespace

ClickData::ClickData(const ClickDataOptions& options)
    : options_(options), bias_(kBias) {
  const double features = options.features, numbers = options.numbers;
  // Linear parts have the same share each.
  const double deviation = options.signal / std::sqrt(features + numbers);
  for (int i = 0; i < options.numbers; ++i) {
    RandomNumbers random(options.seed, RandomNumbers::kTruth, 0, -1 - i);
    dense_.push_back(deviation * random.Normal());
  }
  // All pairs together deviate by as much as the rest.
  const double pairs = std::max(1.0, features * (features - 1) / 2);
  const double of_factors =
      options.dimension == 0
          ? 0.0
          : std::sqrt(options.signal / std::sqrt(pairs * options.dimension));
  for (int row = 0; row < rows(); ++row) {
    RandomNumbers random(options.seed, RandomNumbers::kTruth, 0, row);
    linear_.push_back(deviation * random.Normal());
    for (int k = 0; k < options.dimension; ++k) {
      factors_.push_back(of_factors * random.Normal());
    }
  }
}

void ClickData::Draw(int64_t batch, bool is_test, int count,
                     ClickExamples* examples) const {
  const int features = options_.features, dimension = options_.dimension;
  examples->count = count;
  examples->rows.clear();
  examples->numbers.clear();
  examples->labels.clear();
  examples->logits.clear();
  std::vector<double> sums(dimension);
  for (int e = 0; e < count; ++e) {
    RandomNumbers random(options_.seed,
                         is_test ? RandomNumbers::kTest : RandomNumbers::kBatch,
                         static_cast<uint32_t>(e), batch);
    double logit = bias_, squares = 0.0;
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int f = 0; f < features; ++f) {
      const double uniform = random.Uniform();
      const int id =
          std::min(options_.vocabulary - 1,
                   static_cast<int>(options_.vocabulary * uniform * uniform));
      const int row = f * options_.vocabulary + id;
      examples->rows.push_back(row);
      logit += linear_[row];
      for (int k = 0; k < dimension; ++k) {
        const double factor = factors_[int64_t{row} * dimension + k];
        sums[k] += factor;
        squares += factor * factor;
      }
    }
    for (int i = 0; i < options_.numbers; ++i) {
      const float x = static_cast<float>(random.Normal());
      examples->numbers.push_back(x);
      logit += dense_[i] * x;
    }
    double pairs = -squares;
    for (const double sum : sums) pairs += sum * sum;
    logit += pairs / 2;
    const double probability = 1.0 / (1.0 + std::exp(-logit));
    examples->labels.push_back(random.Uniform() < probability ? 1.0f : 0.0f);
    examples->logits.push_back(logit);
  }
}

double AreaUnderCurve(const std::vector<float>& labels,
                      const std::vector<double>& scores) {
  std::vector<size_t> order(labels.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return scores[a] < scores[b]; });
  double below = 0.0, clicks = 0.0, wins = 0.0;
  for (size_t first = 0; first < order.size();) {
    size_t last = first;
    double with = 0.0, without = 0.0;
    for (; last < order.size() && scores[order[last]] == scores[order[first]];
         ++last) {
      (labels[order[last]] > 0.5f ? with : without) += 1.0;
    }
    wins += with * (below + without / 2);
    below += without;
    clicks += with;
    first = last > first ? last : first + 1;  // One that is no number.
  }
  return clicks > 0.0 && below > 0.0 ? wins / (clicks * below) : 0.5;
}

}  // namespace recsync
