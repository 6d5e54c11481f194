#include "cc/simulation/click_data.h"

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

ClickDataOptions SmallData(int dimension) {
  ClickDataOptions data;
  data.features = 3;
  data.vocabulary = 5;
  data.numbers = 2;
  data.dimension = dimension;
  data.seed = 7;
  return data;
}

TEST(ClickDataTest, ClicksAreAsFrequentAsTheirLogitsSay) {
  for (const int dimension : {0, 4}) {
    ClickDataOptions options;
    options.dimension = dimension;
    const ClickData data(options);
    ClickExamples examples;
    data.Draw(3, false, 20000, &examples);
    // Of examples of about the same logit, about so many click.
    std::map<int, std::pair<double, double>> sums;
    double squares = 0.0, mean = 0.0;
    for (int e = 0; e < examples.count; ++e) {
      const double logit = examples.logits[e];
      auto& [expected, clicks] = sums[static_cast<int>(std::floor(logit))];
      expected += 1.0 / (1.0 + std::exp(-logit));
      clicks += examples.labels[e];
      mean += logit / examples.count;
      squares += logit * logit / examples.count;
    }
    for (const auto& [logit, sum] : sums) {
      EXPECT_NEAR(sum.second, sum.first, 5.0 * std::sqrt(sum.first + 1.0));
    }
    const double deviation = std::sqrt(squares - mean * mean);
    EXPECT_GT(deviation, 0.5);
    EXPECT_LT(deviation, 2.5);
  }
}

TEST(ClickDataTest, ABatchIsAFunctionOfTheSeedAndItsNumber) {
  ClickDataOptions options = SmallData(2);
  ClickExamples one, same, other, test;
  ClickData(options).Draw(4, false, 50, &one);
  ClickData(options).Draw(4, false, 50, &same);
  ClickData(options).Draw(5, false, 50, &other);
  ClickData(options).Draw(4, true, 50, &test);
  EXPECT_EQ(one.rows, same.rows);
  EXPECT_EQ(one.labels, same.labels);
  EXPECT_NE(one.rows, other.rows);
  EXPECT_NE(one.rows, test.rows);
  for (size_t i = 0; i < one.rows.size(); ++i) {
    EXPECT_EQ(one.rows[i] / options.vocabulary, static_cast<int>(i % 3));
  }
}

TEST(ClickDataTest, ProductsOfNumbersAreInTheLogits) {
  ClickDataOptions options = SmallData(0);
  options.numbers = 4;
  options.signal = 0.0;
  ClickExamples without, with;
  ClickData(options).Draw(0, false, 20000, &without);
  options.number_pairs = 2.0;
  ClickData(options).Draw(0, false, 20000, &with);
  ASSERT_EQ(with.numbers, without.numbers);
  // Numbers are independent: the mean of a logit times a product of two is that
  // product's weight, and the squares of the weights are the variance.
  double variance = 0.0, explained = 0.0;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) {
      double weight = 0.0;
      for (int e = 0; e < 20000; ++e) {
        weight += (with.logits[e] - without.logits[e]) *
                  with.numbers[e * 4 + i] * with.numbers[e * 4 + j] / 20000;
      }
      explained += weight * weight;
    }
  }
  for (int e = 0; e < 20000; ++e) {
    const double more = with.logits[e] - without.logits[e];
    variance += more * more / 20000;
  }
  EXPECT_NEAR(explained, variance, 0.1 * variance);
  EXPECT_GT(variance, 1.0);
  EXPECT_LT(variance, 12.0);
}

// The correlation of the logits of the same examples.
double Correlation(const ClickExamples& one, const ClickExamples& other) {
  EXPECT_EQ(one.rows, other.rows);
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (int e = 0; e < one.count; ++e) {
    const double a = one.logits[e] + 1.0, b = other.logits[e] + 1.0;
    ab += a * b;
    aa += a * a;
    bb += b * b;
  }
  return ab / std::sqrt(aa * bb);
}

TEST(ClickDataTest, WeightsOfTwoDaysAreCorrelatedByTheAngleBetweenThem) {
  ClickDataOptions options;
  options.features = 200;
  options.vocabulary = 40;
  options.numbers = 0;
  options.day_batches = 10;
  ClickExamples steady, day, same_day;
  const ClickData without(options);
  options.drift = 0.3;
  const ClickData data(options);
  EXPECT_EQ(without.DayOf(35), 0);
  for (int days = 0; days <= 5; ++days) {
    const int64_t batch = 10 * days;
    without.Draw(batch, false, 2000, &steady);
    data.Draw(batch, false, 2000, &day);
    EXPECT_NEAR(Correlation(steady, day), std::cos(0.3 * days), 0.06) << days;
    EXPECT_EQ(data.DayOf(batch + 9), days);
  }
  // A test's number is that of its day, and the truth that of the day.
  without.Draw(2, true, 2000, &steady);
  data.Draw(2, true, 2000, &day);
  EXPECT_NEAR(Correlation(steady, day), std::cos(0.6), 0.06);
}

TEST(ClickDataTest, TheAreaUnderTheCurveCountsPairs) {
  const std::vector<float> labels{1, 0, 1, 0, 0, 1};
  const std::vector<double> scores{0.3, 0.3, 0.9, 0.1, 0.5, 0.1};
  double wins = 0.0;
  for (const int click : {0, 2, 5}) {
    for (const int none : {1, 3, 4}) {
      wins += scores[click] > scores[none]    ? 1.0
              : scores[click] == scores[none] ? 0.5
                                              : 0.0;
    }
  }
  EXPECT_DOUBLE_EQ(AreaUnderCurve(labels, scores), wins / 9);
  EXPECT_EQ(AreaUnderCurve({1, 1}, {0.1, 0.2}), 0.5);
}

}  // namespace
}  // namespace recsync
