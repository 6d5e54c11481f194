#include "cc/engine/update_rules.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cc/engine/span_update.h"
#include "cc/engine/swap.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

std::vector<float> RandomFloats(int64_t n, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = normal(*random);
  return values;
}

TEST(SgdRuleTest, StepsAgainstTheWeightedGradient) {
  std::mt19937 random(13);
  // Lengths around the width of vector registers.
  for (int64_t n : {0, 1, 3, 4, 7, 8, 15, 16, 33, 1000}) {
    const std::vector<float> before = RandomFloats(n, &random);
    const std::vector<float> g = RandomFloats(n, &random);
    std::vector<float> w = before;
    SgdRule rule;
    rule.learning_rate = 0.1f;
    const double squares = rule.Apply<true>(w.data(), nullptr, g.data(), n,
                                            /*rho=*/0.25f, /*decay=*/1.0f);
    double expected_squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const double update = 0.1 * 0.25 * g[i];
      expected_squares += update * update;
      EXPECT_NEAR(w[i], before[i] - update, 1e-6);
    }
    EXPECT_NEAR(squares, expected_squares, 1e-6 * expected_squares);
  }
}

TEST(SgdRuleTest, AWeightOfZeroMovesNothing) {
  std::mt19937 random(14);
  const std::vector<float> before = RandomFloats(20, &random);
  const std::vector<float> g = RandomFloats(20, &random);
  std::vector<float> w = before;
  SgdRule rule;
  rule.learning_rate = 0.1f;
  EXPECT_EQ(rule.Apply<true>(w.data(), nullptr, g.data(), 20, 0.0f, 0.5f), 0.0);
  EXPECT_EQ(w, before);
}

TEST(SgdRuleTest, ReturnsZeroUnlessMeasuring) {
  const float g = 3.0f;
  float w = 1.0f;
  SgdRule rule;
  rule.learning_rate = 0.5f;
  EXPECT_EQ(rule.Apply<false>(&w, nullptr, &g, 1, 1.0f, 1.0f), 0.0);
  EXPECT_EQ(w, -0.5f);
  EXPECT_EQ(rule.Apply<true>(&w, nullptr, &g, 1, 1.0f, 1.0f), 2.25);
  EXPECT_EQ(w, -2.0f);
}

TEST(AdagradRuleTest, EqualsTheRuleInDoublePrecisionOver100Steps) {
  std::mt19937 random(15);
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  AdagradRule rule;
  rule.learning_rate = 0.05f;
  rule.epsilon = 1e-6f;
  for (int64_t n : {1, 5, 8, 17, 64}) {
    std::vector<float> w = RandomFloats(n, &random);
    std::vector<float> v(static_cast<size_t>(n), 0.1f);
    std::vector<double> expected_w(w.begin(), w.end());
    std::vector<double> expected_v(v.begin(), v.end());
    for (int step = 0; step < 100; ++step) {
      const std::vector<float> g = RandomFloats(n, &random);
      const float rho = unit(random);
      const float decay = step % 10 == 9 ? 0.8f : 1.0f;
      float* const accumulators[] = {v.data()};
      const double squares =
          rule.Apply<true>(w.data(), accumulators, g.data(), n, rho, decay);
      double expected_squares = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        const double weighted = static_cast<double>(rho) * g[i];
        expected_v[i] =
            static_cast<double>(decay) * expected_v[i] + weighted * weighted;
        const double update = 0.05 * weighted / std::sqrt(expected_v[i] + 1e-6);
        expected_w[i] -= update;
        expected_squares += update * update;
        ASSERT_NEAR(v[i], expected_v[i], 1e-5 * expected_v[i]);
        ASSERT_NEAR(w[i], expected_w[i], 1e-5);
      }
      ASSERT_NEAR(squares, expected_squares, 1e-4 * expected_squares);
    }
  }
}

TEST(AdagradRuleTest, TheFirstStepFromAnEmptyAccumulatorIsTheLearningRate) {
  AdagradRule rule;
  rule.learning_rate = 0.125f;
  for (float g : {-1000.0f, -1.0f, 0.01f, 30.0f}) {
    float w = 0.0f;
    float v = 0.0f;
    float* const accumulators[] = {&v};
    rule.Apply<false>(&w, accumulators, &g, 1, 1.0f, 1.0f);
    EXPECT_NEAR(w, g > 0 ? -0.125 : 0.125, 1e-7) << "gradient " << g;
  }
}

TEST(AdagradRuleTest, AWeightOfZeroOnlyDecaysTheAccumulator) {
  std::mt19937 random(16);
  const std::vector<float> before = RandomFloats(9, &random);
  const std::vector<float> g = RandomFloats(9, &random);
  std::vector<float> w = before;
  std::vector<float> v(9, 0.5f);
  float* const accumulators[] = {v.data()};
  AdagradRule rule;
  rule.learning_rate = 0.1f;
  EXPECT_EQ(rule.Apply<true>(w.data(), accumulators, g.data(), 9, 0.0f, 0.5f),
            0.0);
  EXPECT_EQ(w, before);
  EXPECT_EQ(v, std::vector<float>(9, 0.25f));
}

TEST(AdagradRuleTest, TheGradientIsWeightedBeforeItEntersTheAccumulator) {
  // rho inside the square: v = (0.5 * 4)^2 = 4, not 0.5 * 16.
  const float g = 4.0f;
  float w = 0.0f;
  float v = 0.0f;
  float* const accumulators[] = {&v};
  AdagradRule rule;
  rule.learning_rate = 1.0f;
  rule.Apply<false>(&w, accumulators, &g, 1, 0.5f, 1.0f);
  EXPECT_EQ(v, 4.0f);
  EXPECT_EQ(w, -1.0f);
}

TEST(AdagradRuleTest, MeasuringDoesNotChangeTheUpdate) {
  std::mt19937 random(17);
  const std::vector<float> start = RandomFloats(100, &random);
  const std::vector<float> g = RandomFloats(100, &random);
  AdagradRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  std::vector<float> w = start, measured_w = start;
  std::vector<float> v(100, 0.1f), measured_v(100, 0.1f);
  float* const accumulators[] = {v.data()};
  float* const measured_accumulators[] = {measured_v.data()};
  EXPECT_EQ(
      rule.Apply<false>(w.data(), accumulators, g.data(), 100, 0.7f, 0.9f),
      0.0);
  EXPECT_GT(rule.Apply<true>(measured_w.data(), measured_accumulators, g.data(),
                             100, 0.7f, 0.9f),
            0.0);
  for (int i = 0; i < 100; ++i) {
    // The compiler may vectorize one of the loops only.
    EXPECT_FLOAT_EQ(measured_w[i], w[i]);
    EXPECT_FLOAT_EQ(measured_v[i], v[i]);
  }
}

TEST(AdagradRuleTest, OnlyTheSpanIsTouched) {
  std::vector<float> w(12, 1.0f), v(12, 2.0f);
  const std::vector<float> g(12, 3.0f);
  AdagradRule rule;
  rule.learning_rate = 0.1f;
  float* const accumulators[] = {v.data() + 3};
  rule.Apply<false>(w.data() + 3, accumulators, g.data() + 3, 5, 1.0f, 1.0f);
  rule.Apply<false>(w.data(), accumulators, g.data(), 0, 1.0f, 1.0f);
  for (int i = 0; i < 12; ++i) {
    const bool inside = i >= 3 && i < 8;
    EXPECT_EQ(w[i] == 1.0f, !inside) << i;
    EXPECT_EQ(v[i] == 2.0f, !inside) << i;
  }
}

// The kernels' way of training a table against Algorithm 2 of the SWAP paper,
// which decays the accumulators of all rows at each period.
TEST(AdagradRuleTest, LazySwapOverRowsEqualsTheEagerDenseRule) {
  constexpr int kRows = 20;
  constexpr int kWidth = 6;
  constexpr int kSteps = 2000;
  const Swap swap{/*period=*/50, /*decay=*/0.7};
  AdagradRule rule;
  rule.learning_rate = 0.02f;
  rule.epsilon = 1e-6f;
  std::mt19937 random(18);
  std::vector<float> w = RandomFloats(kRows * kWidth, &random);
  std::vector<float> v(kRows * kWidth, 0.1f);
  std::vector<int64_t> last_period(kRows, 0);
  std::vector<double> eager_w(w.begin(), w.end());
  std::vector<double> eager_v(v.begin(), v.end());
  for (int64_t step = 1; step <= kSteps; ++step) {
    if (step % 50 == 0) {
      for (double& value : eager_v) value *= 0.7;
    }
    const int row = static_cast<int>(random() % kRows * (random() % 2));
    const std::vector<float> g = RandomFloats(kWidth, &random);
    for (int i = 0; i < kWidth; ++i) {
      double& value = eager_v[row * kWidth + i];
      value += static_cast<double>(g[i]) * g[i];
      eager_w[row * kWidth + i] -= 0.02 * g[i] / std::sqrt(value + 1e-6);
    }
    float* const accumulators[] = {v.data() + row * kWidth};
    rule.Apply<false>(w.data() + row * kWidth, accumulators, g.data(), kWidth,
                      1.0f, swap.DecaySince(&last_period[row], step));
  }
  for (int i = 0; i < kRows * kWidth; ++i) {
    v[i] *= std::pow(0.7f, kSteps / 50 - last_period[i / kWidth]);
    EXPECT_NEAR(w[i], eager_w[i], 1e-4);
    EXPECT_NEAR(v[i], eager_v[i], 1e-4 * eager_v[i]);
  }
}

TEST(RowwiseAdagradRuleTest, EqualsTheRuleInDoublePrecisionOver100Steps) {
  std::mt19937 random(19);
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  RowwiseAdagradRule rule;
  rule.learning_rate = 0.05f;
  rule.epsilon = 1e-6f;
  for (int64_t n : {1, 5, 8, 17, 64}) {
    std::vector<float> w = RandomFloats(n, &random);
    std::vector<double> expected_w(w.begin(), w.end());
    std::vector<float> v = {7.0f, 0.1f, 7.0f};  // and its neighbors
    double expected_v = v[1];
    for (int step = 0; step < 100; ++step) {
      const std::vector<float> g = RandomFloats(n, &random);
      const double rho = unit(random);
      const float decay = step % 10 == 9 ? 0.8f : 1.0f;
      float* const accumulators[] = {&v[1]};
      const double squares = rule.Apply<true>(
          w.data(), accumulators, g.data(), n, static_cast<float>(rho), decay);
      double mean = 0.0;
      for (float one : g) mean += rho * one * rho * one / n;
      expected_v = static_cast<double>(decay) * expected_v + mean;
      double expected_squares = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        const double update = 0.05 * rho * g[i] / std::sqrt(expected_v + 1e-6);
        expected_w[i] -= update;
        expected_squares += update * update;
        ASSERT_NEAR(w[i], expected_w[i], 1e-5);
      }
      ASSERT_NEAR(v[1], expected_v, 1e-5 * expected_v);
      ASSERT_NEAR(squares, expected_squares, 1e-4 * expected_squares);
    }
    EXPECT_EQ(v[0], 7.0f);
    EXPECT_EQ(v[2], 7.0f);
  }
}

TEST(RowwiseAdagradRuleTest, RowsOfEqualGradientsAreThoseOfAdagrad) {
  AdagradRule whole;
  RowwiseAdagradRule rowwise;
  whole.learning_rate = rowwise.learning_rate = 0.25f;
  whole.epsilon = rowwise.epsilon = 1e-6f;
  std::vector<float> w(16, 1.0f), v(16, 0.5f), own_w = w;
  float own_v = 0.5f;
  float* const accumulators[] = {v.data()};
  float* const own_accumulators[] = {&own_v};
  for (float g : {1.0f, -0.5f, 2.0f}) {  // squares that add up exactly
    const std::vector<float> gradient(16, g);
    whole.Apply<false>(w.data(), accumulators, gradient.data(), 16, 0.5f, 1.0f);
    rowwise.Apply<false>(own_w.data(), own_accumulators, gradient.data(), 16,
                         0.5f, 1.0f);
  }
  EXPECT_EQ(own_w, w);
  EXPECT_EQ(own_v, v[3]);
}

TEST(RowwiseAdagradRuleTest, VectorsOfAnyWidthGiveTheSameToTheLastBit) {
  std::mt19937 random(20);
  RowwiseAdagradRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  for (int64_t n : {0, 1, 7, 8, 9, 16, 31, 32, 64, 100}) {
    const std::vector<float> g = RandomFloats(n, &random);
    std::vector<float> w = RandomFloats(n, &random), own_w = w;
    float v = 0.1f, own_v = v;
    float* const accumulators[] = {&v};
    float* const own_accumulators[] = {&own_v};
    rule.Apply<false>(w.data(), accumulators, g.data(), n, 0.3f, 0.9f);
    const auto apply = ChooseSpanUpdate<RowwiseAdagradRule, false>();
    apply(rule, own_w.data(), own_accumulators, g.data(), n, 0.3f, 0.9f);
    EXPECT_EQ(own_w, w) << n;
    EXPECT_EQ(own_v, v) << n;
  }
}

TEST(AdamRuleTest, ARowThatWaitedHasTheMomentsOfStepsWithoutGradient) {
  AdamRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  float w = 1.0f, m = 0.0f, v = 0.0f;
  float* const slots[] = {&m, &v};
  int64_t last_step = 0;
  double ew = 1.0, em = 0.0, ev = 0.0;
  int64_t t = 0;
  for (int64_t gap : {1, 1, 5, 1, 300, 2}) {
    const float g = 0.5f - 0.1f * gap;
    for (int64_t i = 1; i < gap; ++i, ++t) {
      em *= 0.9;
      ev *= 0.999;
    }
    ++t;
    em = 0.9 * em + 0.1 * g;
    ev = 0.999 * ev + 0.001 * g * g;
    ew -= 0.1 * std::sqrt(1 - std::pow(0.999, t)) / (1 - std::pow(0.9, t)) *
          em / (std::sqrt(ev) + 1e-7);
    rule.Begin(t);
    rule.At(t, &last_step).Apply<false>(&w, slots, &g, 1, 1.0f, 1.0f);
    EXPECT_EQ(last_step, t);
    EXPECT_NEAR(w, ew, 1e-4);
    EXPECT_NEAR(m, em, 1e-5);
  }
}

TEST(AdamRuleTest, PushesOfATrainerThatIsBehindWeighAsMuchAsOthers) {
  // Of two trainers that push in turn, one has made half as many steps.
  AdamRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  rule.several_counters = true;
  float w = 1.0f, m = 0.0f, v = 0.0f;
  float* const slots[] = {&m, &v};
  int32_t last_step = 0;
  double em = 0.0, ev = 0.0;
  for (int64_t push = 0; push < 300; ++push) {
    const bool is_slow = push % 3 == 2;
    const int64_t ahead = 1 + push / 3 * 2 + push % 3;
    const int64_t t = is_slow ? 1 + push / 3 : ahead;
    const float g = is_slow ? 2.0f : -1.0f;
    em = 0.9 * em + 0.1 * g;
    ev = 0.999 * ev + 0.001 * g * g;
    rule.Begin(t);
    rule.At(t, &last_step).Apply<false>(&w, slots, &g, 1, 1.0f, 1.0f);
    ASSERT_NEAR(m, em, 1e-5) << push;
    ASSERT_NEAR(v, ev, 1e-5) << push;
  }
  EXPECT_EQ(last_step, 200);
}

TEST(AdamRuleTest, ARowOfACounterFarAheadGoesOnWithThisOne) {
  AdamRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  float w = 1.0f, m = 0.5f, v = 0.25f;
  float* const slots[] = {&m, &v};
  int32_t last_step = 100000;
  const float g = -2.0f;
  rule.Begin(10);
  rule.At(10, &last_step).Apply<false>(&w, slots, &g, 1, 1.0f, 1.0f);
  EXPECT_EQ(last_step, 10);
  EXPECT_NEAR(m, 0.9f * 0.5f + 0.1f * g, 1e-6);
  EXPECT_NEAR(v, 0.999f * 0.25f + 0.001f * g * g, 1e-6);
}

TEST(AdamRuleTest, NothingIsLeftOfMomentsAfterMoreStepsThanCanBeCounted) {
  AdamRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  float w = 1.0f, m = 0.5f, v = 0.25f;
  float* const slots[] = {&m, &v};
  int64_t last_step = std::numeric_limits<int64_t>::min();
  const float g = -2.0f;
  rule.Begin(10);
  rule.At(10, &last_step).Apply<false>(&w, slots, &g, 1, 1.0f, 1.0f);
  EXPECT_EQ(last_step, 10);
  EXPECT_NEAR(m, 0.1f * g, 1e-6);
  EXPECT_NEAR(v, 0.001f * g * g, 1e-6);
}

TEST(AdamRuleTest, BeyondWhatInt32CountsEachStepIsTheOneAfterTheLast) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  AdamRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  float w = 1.0f, m = 0.5f, v = 0.25f;
  float* const slots[] = {&m, &v};
  double em = m, ev = v;
  int64_t t = kMost - 60;
  int32_t last_step = static_cast<int32_t>(t);
  for (int touch = 0; touch < 40; ++touch) {
    const int64_t next = t + 1 + static_cast<int64_t>(random() % 6);
    const float g = normal(random);
    // Step by step, as long as it is known which was the last.
    const bool is_known = t < kMost;
    for (++t; t < next; ++t) {
      if (!is_known) continue;
      em *= 0.9;
      ev *= 0.999;
    }
    em = 0.9 * em + 0.1 * g;
    ev = 0.999 * ev + 0.001 * g * g;
    rule.Begin(t);
    rule.At(t, &last_step).Apply<false>(&w, slots, &g, 1, 1.0f, 1.0f);
    ASSERT_EQ(last_step, std::min(t, kMost));
    ASSERT_NEAR(m, em, 1e-5) << t;
    ASSERT_NEAR(v, ev, 1e-5) << t;
  }
  ASSERT_GT(t, kMost + 1);
}

TEST(AdamRuleTest, WithoutDecayOfMomentsItStepsByTheSignOfTheGradient) {
  AdamRule rule;
  rule.learning_rate = 0.25f;
  rule.beta_1 = rule.beta_2 = 0.0;
  rule.epsilon = 1e-7f;
  float w = 1.0f, m = 3.0f, v = 5.0f;
  float* const slots[] = {&m, &v};
  const float g = -8.0f;
  int64_t last_step = 2;
  rule.Begin(9);
  rule.At(9, &last_step).Apply<false>(&w, slots, &g, 1, 1.0f, 1.0f);
  EXPECT_NEAR(w, 1.25f, 1e-6);
  EXPECT_EQ(m, -8.0f);
  EXPECT_EQ(v, 64.0f);
}

TEST(FtrlRuleTest, SmallWeightsAreExactlyZeroUnderL1) {
  FtrlRule rule;
  rule.learning_rate = 0.1f;
  rule.l1 = 0.5f;
  float w[] = {0.0f, 0.0f}, n[] = {0.1f, 0.1f}, z[] = {0.0f, 0.0f};
  float* const slots[] = {n, z};
  const float g[] = {0.4f, -2.0f};
  rule.Apply<false>(w, slots, g, 2, 1.0f, 1.0f);
  EXPECT_EQ(w[0], 0.0f);
  EXPECT_NEAR(w[1], 1.5 * 0.1 / std::sqrt(4.1), 1e-6);
}

TEST(FtrlRuleTest, SwapsDecayAloneMovesNoWeight) {
  FtrlRule rule;
  rule.learning_rate = 0.1f;
  for (float power : {-0.5f, -0.7f}) {
    rule.learning_rate_power = power;
    float w = 0.0f, n = 0.1f, z = 0.0f;
    float* const slots[] = {&n, &z};
    const float g = -2.0f, none = 0.0f;
    rule.Apply<false>(&w, slots, &g, 1, 1.0f, 1.0f);
    const float before = w, sum = n;
    rule.Apply<false>(&w, slots, &none, 1, 1.0f, /*decay=*/0.25f);
    EXPECT_NEAR(w, before, 1e-6);
    EXPECT_NEAR(n, 0.25f * sum, 1e-6);
  }
}

TEST(FtrlRuleTest, WithoutASquareOrARegularizationTheWeightIsZero) {
  FtrlRule rule;
  rule.learning_rate = 0.1f;
  for (float power : {-0.5f, -0.7f}) {
    rule.learning_rate_power = power;
    // The last gradient is so small that its square is none.
    float w[] = {0.0f, 0.5f, 0.0f, 0.0f}, n[] = {0.0f, 0.0f, 0.0f, 0.0f};
    float z[] = {0.0f, 0.0f, 0.0f, 0.0f};
    float* const slots[] = {n, z};
    const float g[] = {0.0f, 0.0f, 1.0f, 1e-30f};
    const double squares = rule.Apply<true>(w, slots, g, 4, 1.0f, 1.0f);
    EXPECT_EQ(w[0], 0.0f);
    EXPECT_EQ(w[1], 0.0f);
    EXPECT_NEAR(w[2], -0.1, 1e-6);  // -lr z / n^p, of n = 1
    EXPECT_EQ(w[3], 0.0f);
    EXPECT_NEAR(squares, 0.25 + 0.01, 1e-6);
  }
}

}  // namespace
}  // namespace recsync
