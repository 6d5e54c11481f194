#include "cc/simulation/click_data.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cc/simulation/random_numbers.h"

namespace recsync {
namespace {

constexpr double kBias = -1.0;

double PairsOf(double n) { return n * (n - 1) / 2; }

}  // namespace

ClickData::ClickData(const ClickDataOptions& options)
    : options_(options), first_(DrawTruth(0)) {
  if (options.drift > 0.0) other_ = DrawTruth(1);
}

ClickData::Truth ClickData::DrawTruth(uint32_t which) const {
  Truth truth;
  const double features = options_.features, numbers = options_.numbers;
  // Linear parts have the same share each.
  const double deviation = options_.signal / std::sqrt(features + numbers);
  for (int i = 0; i < options_.numbers; ++i) {
    RandomNumbers random(options_.seed, RandomNumbers::kTruth, which, -1 - i);
    truth.dense.push_back(deviation * random.Normal());
  }
  const double of_products =
      options_.number_pairs / std::sqrt(std::max(1.0, PairsOf(numbers)));
  for (int i = 0; options_.number_pairs > 0.0 && i < options_.numbers; ++i) {
    RandomNumbers random(options_.seed, RandomNumbers::kTruth, which,
                         -1 - options_.numbers - i);
    for (int j = 0; j < options_.numbers; ++j) {
      truth.pairs.push_back(j > i ? of_products * random.Normal() : 0.0);
    }
  }
  // All pairs together deviate by as much as the rest.
  const double pairs = std::max(1.0, PairsOf(features));
  const double of_factors =
      options_.dimension == 0
          ? 0.0
          : std::sqrt(options_.signal / std::sqrt(pairs * options_.dimension));
  for (int row = 0; row < rows(); ++row) {
    RandomNumbers random(options_.seed, RandomNumbers::kTruth, which, row);
    truth.linear.push_back(deviation * random.Normal());
    for (int k = 0; k < options_.dimension; ++k) {
      truth.factors.push_back(of_factors * random.Normal());
    }
  }
  return truth;
}

void ClickData::Draw(int64_t batch, bool is_test, int count,
                     ClickExamples* examples) const {
  const int features = options_.features, dimension = options_.dimension;
  examples->count = count;
  examples->rows.clear();
  examples->numbers.clear();
  examples->labels.clear();
  examples->logits.clear();
  const double angle =
      options_.drift * static_cast<double>(is_test ? batch : DayOf(batch));
  const double of_first = std::cos(angle), of_other = std::sin(angle);
  const auto on_day = [&](std::vector<double> Truth::*part, int64_t at) {
    const double first = (first_.*part)[at];
    return of_other == 0.0 ? first
                           : of_first * first + of_other * (other_.*part)[at];
  };
  std::vector<double> sums(dimension), z(options_.numbers);
  for (int e = 0; e < count; ++e) {
    RandomNumbers random(options_.seed,
                         is_test ? RandomNumbers::kTest : RandomNumbers::kBatch,
                         static_cast<uint32_t>(e), batch);
    double logit = kBias, squares = 0.0;
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int f = 0; f < features; ++f) {
      const double uniform = random.Uniform();
      const int id =
          std::min(options_.vocabulary - 1,
                   static_cast<int>(options_.vocabulary * uniform * uniform));
      const int row = f * options_.vocabulary + id;
      examples->rows.push_back(row);
      logit += on_day(&Truth::linear, row);
      for (int k = 0; k < dimension; ++k) {
        const double factor =
            on_day(&Truth::factors, int64_t{row} * dimension + k);
        sums[k] += factor;
        squares += factor * factor;
      }
    }
    for (int i = 0; i < options_.numbers; ++i) {
      z[i] = random.Normal();
      examples->numbers.push_back(
          static_cast<float>(options_.number_mean + z[i]));
      logit += on_day(&Truth::dense, i) * z[i];
    }
    if (options_.number_pairs > 0.0) {
      const int n = options_.numbers;
      for (int i = 0; i < n; ++i) {
        for (int j = i + 1; j < n; ++j) {
          logit += on_day(&Truth::pairs, int64_t{i} * n + j) * z[i] * z[j];
        }
      }
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
