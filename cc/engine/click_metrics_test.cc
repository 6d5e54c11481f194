#include "cc/engine/click_metrics.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Vector = std::vector<float>;

constexpr double kEpsilon = 1e-7;

struct Data {
  Vector labels, predictions, weights;

  Examples<float> examples() const { return {labels, predictions, weights}; }
};

Data RandomData(int n, bool weighted) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform;
  Data data;
  for (int i = 0; i < n; ++i) {
    data.predictions.push_back(uniform(random));
    data.labels.push_back(uniform(random) < data.predictions.back());
    if (weighted) data.weights.push_back(0.5f + uniform(random));
  }
  if (!weighted) data.weights = {1.0f};
  return data;
}

TEST(AddLogLoss, IsTheSumOfTheFormulaOverExamples) {
  for (bool weighted : {false, true}) {
    const Data data = RandomData(100, weighted);
    LogLossSums sums{10.0, 20.0, 30.0};
    AddLogLoss(data.examples(), false, kEpsilon, sums);
    double loss = 10.0, label = 20.0, weight = 30.0;
    for (int i = 0; i < 100; ++i) {
      const double w = weighted ? data.weights[i] : 1.0;
      const double p = data.predictions[i], y = data.labels[i];
      loss -= w * (y * std::log(p) + (1.0 - y) * std::log(1.0 - p));
      label += w * y;
      weight += w;
    }
    EXPECT_NEAR(sums.loss, loss, 1e-9);
    EXPECT_NEAR(sums.label, label, 1e-9);
    EXPECT_NEAR(sums.weight, weight, 1e-9);
  }
}

TEST(AddLogLoss, LogitsGiveTheSameAsTheirProbabilities) {
  Data data = RandomData(100, true), logits = data;
  for (float& p : logits.predictions) p = std::log(p) - std::log1p(-p);
  LogLossSums sums, of_logits;
  AddLogLoss(data.examples(), false, kEpsilon, sums);
  AddLogLoss(logits.examples(), true, kEpsilon, of_logits);
  EXPECT_NEAR(sums.loss, of_logits.loss, 1e-4);
  EXPECT_EQ(sums.label, of_logits.label);
}

TEST(AddLogLoss, BoundsWhatCertainPredictionsCost) {
  EXPECT_DOUBLE_EQ(LogLoss(1.0, 0.0, 1e-3), -std::log(1e-3));
  EXPECT_DOUBLE_EQ(LogLoss(0.0, 1.0, 1e-3), -std::log1p(1e-3 - 1.0));
  EXPECT_DOUBLE_EQ(LogLossOfLogit(1.0, -1000.0), 1000.0);
  EXPECT_DOUBLE_EQ(LogLossOfLogit(0.0, -1000.0), 0.0);
}

TEST(AddLogLoss, IsNotANumberIfAPredictionIsNone) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Data data{{1.0f, 0.0f}, {0.5f, nan}, {1.0f}};
  LogLossSums sums;
  AddLogLoss(data.examples(), false, kEpsilon, sums);
  EXPECT_TRUE(std::isnan(sums.loss));
  EXPECT_EQ(sums.weight, 2.0);
}

TEST(AddScores, CountsEachExampleInTheBucketOfItsPrediction) {
  // Buckets (or all of 0) to 0.25, 0.5, 0.75, 1.
  const Data data{{0.0f, 1.0f, 1.0f, 0.0f, 1.0f, 0.0f},
                  {0.0f, 0.25f, 0.26f, 0.5f, 1.0f, 7.0f},
                  {1.0f, 2.0f, 4.0f, 8.0f, 16.0f, 32.0f}};
  std::vector<double> positives(4), negatives(4);
  AddScores(data.examples(), false, Spacing::kLinear, absl::MakeSpan(positives),
            absl::MakeSpan(negatives));
  EXPECT_EQ(positives, (std::vector<double>{2.0, 4.0, 0.0, 16.0}));
  EXPECT_EQ(negatives, (std::vector<double>{1.0, 8.0, 0.0, 32.0}));
}

TEST(AddScores, LeavesOutWhatIsNoNumberAndClipsTheRest) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Data data{
      {1.0f, 1.0f, 0.0f},
      {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity},
      {1.0f}};
  for (Spacing spacing : {Spacing::kLinear, Spacing::kLogit}) {
    for (bool from_logits : {false, true}) {
      std::vector<double> positives(3), negatives(3);
      AddScores(data.examples(), from_logits, spacing,
                absl::MakeSpan(positives), absl::MakeSpan(negatives));
      EXPECT_EQ(positives, (std::vector<double>{0.0, 0.0, 1.0}));
      EXPECT_EQ(negatives, (std::vector<double>{1.0, 0.0, 0.0}));
    }
  }
}

TEST(AddScores, LogitSpacingDividesLogitsEvenly) {
  // Buckets to logits of -8.5, 0, 8.5, 17.
  const Vector logits{-20.0f, -9.0f, -8.0f, 0.0f, 0.1f, 8.4f, 8.6f, 16.0f};
  Data data{Vector(8), logits, {1.0f}};
  for (bool from_logits : {false, true}) {
    for (size_t i = 0; i < logits.size(); ++i) {
      data.predictions[i] =
          from_logits ? logits[i] : 1.0f / (1.0f + std::exp(-logits[i]));
    }
    std::vector<double> positives(4), negatives(4);
    AddScores(data.examples(), from_logits, Spacing::kLogit,
              absl::MakeSpan(positives), absl::MakeSpan(negatives));
    EXPECT_EQ(negatives, (std::vector<double>{2.0, 2.0, 2.0, 2.0}));
  }
}

TEST(AddScores, StaysWithinMoreBucketsThanAFloatCanCount) {
  const size_t count = (1 << 24) + 3;
  std::vector<double> positives(count), negatives(count);
  const Data data{{1.0f}, {1.0f}, {1.0f}};
  AddScores(data.examples(), false, Spacing::kLinear, absl::MakeSpan(positives),
            absl::MakeSpan(negatives));
  EXPECT_EQ(positives.back(), 1.0);
}

TEST(AddScores, NoExamplesChangeNothing) {
  std::vector<double> positives{1.0}, negatives{2.0};
  AddScores(Examples<double>{}, false, Spacing::kLogit,
            absl::MakeSpan(positives), absl::MakeSpan(negatives));
  EXPECT_EQ(positives[0], 1.0);
  EXPECT_EQ(negatives[0], 2.0);
}

TEST(AreaUnderCurve, IsTheShareOfPairsInTheRightOrder) {
  const std::vector<double> positives{1.0, 0.0, 2.0}, negatives{3.0, 1.0, 4.0};
  // 1 of the first bucket ties with 3 of 8; 2 of the last win over 4, tie
  // with 4.
  EXPECT_DOUBLE_EQ(AreaUnderCurve(positives, negatives),
                   (1.5 + 2.0 * (4.0 + 2.0)) / (3.0 * 8.0));
}

TEST(AreaUnderCurve, IsZeroWithoutBothLabels) {
  const std::vector<double> some{1.0, 2.0}, none{0.0, 0.0};
  EXPECT_EQ(AreaUnderCurve(some, none), 0.0);
  EXPECT_EQ(AreaUnderCurve(none, some), 0.0);
}

}  // namespace
}  // namespace recsync
