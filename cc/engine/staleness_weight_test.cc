#include "cc/engine/staleness_weight.h"

#include <cmath>
#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr double kNoUpdate = 0.0;
constexpr double kNoSpread = 0.0;
constexpr double kNoMean = 0.0;

// The weight where nothing was measured.
double Of(const StalenessWeight& weight, double tau) {
  return weight.Of(tau, kNoUpdate, kNoSpread, kNoMean);
}

// 1 / (1 + exp(-x)), written with another function.
double Sigmoid(double x) { return 0.5 + 0.5 * std::tanh(0.5 * x); }

TEST(StalenessWeightTest, IsOneForEveryStalenessByDefault) {
  const StalenessWeight weight;
  for (double tau : {1.0, 2.0, 1000.0, 1e18}) EXPECT_EQ(Of(weight, tau), 1.0);
}

TEST(StalenessWeightTest, AConstantWeightIgnoresAllThatIsMeasured) {
  StalenessWeight weight;
  weight.update_sensitivity = 3.0;
  weight.target_deviation = 5.0;
  weight.target_mean = 7.0;
  EXPECT_EQ(weight.Of(1e6, 10.0, 100.0, 1000.0), 1.0);
}

TEST(StalenessWeightTest, TheInversePowerIsOneUpToTheBaselineAndFallsBeyond) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 3.0;
  weight.baseline = 10.0;
  for (int tau = 1; tau <= 10; ++tau) EXPECT_EQ(Of(weight, tau), 1.0);
  double last = 1.0;
  for (int tau = 11; tau <= 1000; ++tau) {
    const double ratio = 10.0 / tau;
    EXPECT_NEAR(Of(weight, tau), ratio * ratio * ratio, 1e-14);
    EXPECT_LT(Of(weight, tau), last);
    last = Of(weight, tau);
  }
}

TEST(StalenessWeightTest, ThePowerNeedNotBeWhole) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.baseline = 4.0;
  weight.power = 0.5;
  EXPECT_NEAR(Of(weight, 64.0), 0.25, 1e-15);
  weight.power = 1.5;
  EXPECT_NEAR(Of(weight, 16.0), 0.125, 1e-15);
  weight.power = 0.0;
  EXPECT_EQ(Of(weight, 1e9), 1.0);
}

TEST(StalenessWeightTest, WithoutNormalizationTheWeightJumpsAtTheBaseline) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 2.0;
  weight.baseline = 10.0;
  weight.normalized = false;
  EXPECT_EQ(Of(weight, 10.0), 1.0);
  for (int tau = 11; tau <= 100; ++tau) {
    EXPECT_NEAR(Of(weight, tau), 1.0 / (tau * tau), 1e-16);
  }
}

TEST(StalenessWeightTest, WithABaselineOfOneNormalizationMakesNoDifference) {
  StalenessWeight normalized, literal;
  normalized.decay = literal.decay = StalenessDecay::kInversePower;
  literal.normalized = false;
  for (int tau = 1; tau <= 50; ++tau) {
    EXPECT_NEAR(Of(normalized, tau), 1.0 / (tau * tau), 1e-15);
    EXPECT_NEAR(Of(literal, tau), 1.0 / (tau * tau), 1e-15);
  }
}

TEST(StalenessWeightTest, TheThresholdCountsAgesFromAFreshGradientsZero) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kThreshold;
  EXPECT_EQ(Of(weight, 1.0), 1.0);
  EXPECT_EQ(Of(weight, 2.0), 0.0);
  weight.iota = 4.0;
  for (int tau = 1; tau <= 20; ++tau) {
    const int age = tau - 1;
    EXPECT_EQ(Of(weight, tau), age <= 4 ? 1.0 : 0.0) << "tau " << tau;
  }
}

TEST(StalenessWeightTest, AnUnboundedThresholdKeepsEveryGradient) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kThreshold;
  weight.iota = std::numeric_limits<double>::infinity();
  EXPECT_EQ(Of(weight, 9.2e18), 1.0);
}

TEST(StalenessWeightTest, TheLastUpdateScalesStalenessThroughASigmoid) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 2.0;
  weight.baseline = 5.0;
  weight.update_sensitivity = 0.7;
  for (double last_update : {0.0, 0.01, 1.0, 3.0, 50.0}) {
    for (double tau : {1.0, 9.0, 10.0, 11.0, 100.0}) {
      const double felt = tau * Sigmoid(0.7 * last_update);
      const double expected = felt <= 5.0 ? 1.0 : 25.0 / (felt * felt);
      EXPECT_NEAR(weight.Of(tau, last_update, kNoSpread, kNoMean), expected,
                  1e-12)
          << "tau " << tau << ", last update " << last_update;
    }
  }
}

TEST(StalenessWeightTest, WithoutAnUpdateYetHalfTheStalenessIsFelt) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kThreshold;
  weight.iota = 4.0;
  weight.update_sensitivity = 2.0;
  EXPECT_EQ(Of(weight, 10.0), 1.0);
  EXPECT_EQ(Of(weight, 10.5), 0.0);
}

TEST(StalenessWeightTest, AnEnormousUpdateLetsTheWholeStalenessBeFelt) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 1.0;
  weight.update_sensitivity = 1.0;
  EXPECT_EQ(weight.Of(8.0, std::numeric_limits<double>::infinity(), kNoSpread,
                      kNoMean),
            0.125);
  EXPECT_EQ(weight.Of(8.0, 1e300, kNoSpread, kNoMean), 0.125);
}

TEST(StalenessWeightTest, ASensitivityOfZeroIsOnAndANegativeOneIsOff) {
  StalenessWeight weight;
  EXPECT_FALSE(weight.uses_last_update());
  weight.update_sensitivity = 0.0;
  EXPECT_TRUE(weight.uses_last_update());
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 1.0;
  EXPECT_EQ(weight.Of(8.0, 123.0, kNoSpread, kNoMean), 0.25);
}

TEST(StalenessWeightTest, RescalingMapsTheMeasuredSpreadToTheTargets) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 1.0;
  weight.baseline = 10.0;
  weight.target_deviation = 5.0;
  weight.target_mean = 10.0;
  // Two measured deviations above the mean lie two target deviations above the
  // target mean: 10 + 2 * 5.
  EXPECT_NEAR(weight.Of(300.0, kNoUpdate, 50.0, 200.0), 10.0 / 20.0, 1e-15);
  // At and below the mean nothing decays, though 200 is beyond the baseline.
  EXPECT_EQ(weight.Of(200.0, kNoUpdate, 50.0, 200.0), 1.0);
  EXPECT_EQ(weight.Of(1.0, kNoUpdate, 50.0, 200.0), 1.0);
}

TEST(StalenessWeightTest, WithoutATargetMeanRescalingIsAPlainRatio) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 2.0;
  weight.baseline = 10.0;
  weight.target_deviation = 5.0;
  EXPECT_TRUE(weight.rescales());
  EXPECT_NEAR(weight.Of(300.0, kNoUpdate, 50.0, 200.0), 1.0 / 9.0, 1e-15);
  EXPECT_EQ(weight.Of(100.0, kNoUpdate, 50.0, 200.0), 1.0);
}

TEST(StalenessWeightTest, KeepsTheStalenessWhileNoSpreadWasMeasured) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 1.0;
  weight.target_deviation = 5.0;
  weight.target_mean = 10.0;
  EXPECT_EQ(weight.Of(4.0, kNoUpdate, /*deviation=*/0.0, /*mean=*/3.0), 0.25);
}

TEST(StalenessWeightTest, RescalesBeforeTheLastUpdateIsFelt) {
  StalenessWeight weight;
  weight.decay = StalenessDecay::kInversePower;
  weight.power = 1.0;
  weight.target_deviation = 5.0;
  weight.target_mean = 10.0;
  weight.update_sensitivity = 1.5;
  const double felt = (5.0 * (300.0 - 200.0) / 50.0 + 10.0) * Sigmoid(1.5 * 2);
  EXPECT_NEAR(weight.Of(300.0, 2.0, 50.0, 200.0), 1.0 / felt, 1e-15);
}

TEST(StalenessWeightTest, StaysBetweenZeroAndOne) {
  StalenessWeight weight;
  weight.target_deviation = 3.0;
  weight.target_mean = 2.0;
  weight.update_sensitivity = 0.5;
  for (StalenessDecay decay :
       {StalenessDecay::kConstant, StalenessDecay::kInversePower,
        StalenessDecay::kThreshold}) {
    weight.decay = decay;
    for (double tau = 1.0; tau < 1e19; tau *= 3.0) {
      for (double deviation : {0.0, 1e-9, 1.0, 1e9}) {
        const double rho = weight.Of(tau, 1.0, deviation, 1e4);
        EXPECT_GE(rho, 0.0);
        EXPECT_LE(rho, 1.0);
      }
    }
  }
}

TEST(StalenessWeightTest, ParsesTheThreeNamesAndNothingElse) {
  StalenessDecay decay = StalenessDecay::kConstant;
  EXPECT_TRUE(ParseStalenessDecay("threshold", &decay));
  EXPECT_EQ(decay, StalenessDecay::kThreshold);
  EXPECT_TRUE(ParseStalenessDecay("inverse_power", &decay));
  EXPECT_EQ(decay, StalenessDecay::kInversePower);
  for (const char* name : {"", "Constant", "constant ", "inverse-power"}) {
    EXPECT_FALSE(ParseStalenessDecay(name, &decay)) << name;
    EXPECT_EQ(decay, StalenessDecay::kInversePower) << "is left alone";
  }
  EXPECT_TRUE(ParseStalenessDecay("constant", &decay));
  EXPECT_EQ(decay, StalenessDecay::kConstant);
}

}  // namespace
}  // namespace recsync
