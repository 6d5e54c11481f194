#include "cc/engine/mean_normalization.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr float kEpsilon = 1e-2f;

// y = alpha x / (sign(E) max(|E|, epsilon)) - beta, in double precision and
// column by column.
std::vector<double> Reference(const std::vector<double>& x,
                              const std::vector<double>& alpha,
                              const std::vector<double>& beta, int64_t rows,
                              int64_t features) {
  std::vector<double> y(x.size());
  for (int64_t f = 0; f < features; ++f) {
    double sum = 0.0;
    for (int64_t r = 0; r < rows; ++r) sum += x[r * features + f];
    const double mean = rows == 0 ? 0.0 : sum / rows;
    const double sign = mean < 0.0 ? -1.0 : 1.0;
    const double size = std::fmax(std::fabs(mean), double{kEpsilon});
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = r * features + f;
      y[i] = alpha[f] * x[i] / (sign * size) - beta[f];
    }
  }
  return y;
}

std::vector<double> Widen(const std::vector<float>& values) {
  return std::vector<double>(values.begin(), values.end());
}

struct Case {
  int64_t rows;
  int64_t features;
  std::vector<float> x, dy;        // [rows, features]
  std::vector<float> alpha, beta;  // [features]
};

// Feature f has a mean of about f - features / 2, so that both signs occur, and
// one feature's mean is held at epsilon.
Case RandomCase(int64_t rows, int64_t features, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Case c{rows, features, {}, {}, {}, {}};
  for (int64_t i = 0; i < rows * features; ++i) {
    const int64_t f = i % features;
    c.x.push_back(f == features / 2 ? 1e-4f * normal(random)
                                    : static_cast<float>(f - features / 2) +
                                          0.1f * normal(random));
    c.dy.push_back(normal(random));
  }
  for (int64_t f = 0; f < features; ++f) {
    c.alpha.push_back(normal(random));
    c.beta.push_back(normal(random));
  }
  return c;
}

struct Forward {
  std::vector<float> y, mean;
};

Forward Normalize(const Case& c) {
  Forward out{std::vector<float>(c.x.size(), -99.0f),
              std::vector<float>(c.alpha.size(), -99.0f)};
  MeanNormalize(c.x.data(), c.alpha.data(), c.beta.data(), kEpsilon, c.rows,
                c.features, out.y.data(), out.mean.data());
  return out;
}

struct Gradients {
  std::vector<float> dx, dalpha, dbeta;
};

Gradients Differentiate(const Case& c, const std::vector<float>& mean) {
  Gradients out{std::vector<float>(c.x.size(), -99.0f),
                std::vector<float>(c.alpha.size(), -99.0f),
                std::vector<float>(c.alpha.size(), -99.0f)};
  MeanNormalizeGrad(c.dy.data(), c.x.data(), c.alpha.data(), mean.data(),
                    kEpsilon, c.rows, c.features, out.dx.data(),
                    out.dalpha.data(), out.dbeta.data());
  return out;
}

// A number of 8 bits of mantissa that converts explicitly only, like the short
// types of the kernels.
class Short {
 public:
  Short() = default;
  explicit Short(float value) {
    int exponent;
    const float mantissa = std::frexp(value, &exponent);
    value_ = std::ldexp(std::nearbyint(mantissa * 256.0f), exponent - 8);
  }
  explicit operator float() const { return value_; }

 private:
  float value_ = 0.0f;
};

TEST(GuardedDivisorTest, IsTheMeanFromEpsilonOn) {
  for (float mean : {0.01f, 0.5f, 1e30f, -0.01f, -0.5f, -1e30f}) {
    EXPECT_EQ(GuardedDivisor(mean, 0.01f), mean);
  }
}

TEST(GuardedDivisorTest, IsHeldAtEpsilonWithTheSignOfTheMean) {
  EXPECT_EQ(GuardedDivisor(0.0099f, 0.01f), 0.01f);
  EXPECT_EQ(GuardedDivisor(-0.0099f, 0.01f), -0.01f);
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(GuardedDivisor(tiny, 0.01f), 0.01f);
  EXPECT_EQ(GuardedDivisor(-tiny, 0.01f), -0.01f);
}

TEST(GuardedDivisorTest, OfWhatIsNoNumberIsNone) {
  EXPECT_TRUE(std::isnan(GuardedDivisor(std::nanf(""), 0.01f)));
}

TEST(GuardedDivisorTest, BothZerosCountAsPositive) {
  EXPECT_EQ(GuardedDivisor(0.0f, 0.01f), 0.01f);
  EXPECT_EQ(GuardedDivisor(-0.0f, 0.01f), 0.01f);
}

TEST(MeanNormalizeTest, EqualsTheFormulaInDoublePrecision) {
  for (int64_t rows : {1, 2, 3, 64, 1000}) {
    for (int64_t features : {1, 2, 5, 17}) {
      const Case c = RandomCase(rows, features, 19);
      const Forward out = Normalize(c);
      const std::vector<double> expected =
          Reference(Widen(c.x), Widen(c.alpha), Widen(c.beta), rows, features);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(out.y[i], expected[i], 1e-5 * (1 + std::fabs(expected[i])));
      }
    }
  }
}

TEST(MeanNormalizeTest, ReturnsTheMeanOfEachFeature) {
  const Case c = RandomCase(500, 7, 20);
  const Forward out = Normalize(c);
  for (int64_t f = 0; f < c.features; ++f) {
    double sum = 0.0;
    for (int64_t r = 0; r < c.rows; ++r) sum += c.x[r * c.features + f];
    EXPECT_NEAR(out.mean[f], sum / c.rows, 1e-6);
  }
}

TEST(MeanNormalizeTest, TheMeanStaysAccurateOverManyRows) {
  // A float sum of these stops growing by 1 at 2^24.
  const int64_t rows = (1 << 24) + (1 << 22);
  const std::vector<float> x(rows, 1.0f);
  std::vector<float> y(rows);
  const float alpha = 3.0f, beta = 1.0f;
  float mean;
  MeanNormalize(x.data(), &alpha, &beta, kEpsilon, rows, 1, y.data(), &mean);
  EXPECT_EQ(mean, 1.0f);
  EXPECT_EQ(y.front(), 2.0f);
  EXPECT_EQ(y.back(), 2.0f);
}

TEST(MeanNormalizeTest, AMeanOfExactlyZeroDividesByPositiveEpsilon) {
  const std::vector<float> x = {1.0f, -1.0f};
  std::vector<float> y(2);
  const float alpha = 1.0f, beta = 0.5f;
  float mean = -99.0f;
  MeanNormalize(x.data(), &alpha, &beta, 0.25f, 2, 1, y.data(), &mean);
  EXPECT_EQ(mean, 0.0f);
  EXPECT_EQ(y, (std::vector<float>{3.5f, -4.5f}));
}

TEST(MeanNormalizeTest, NegativeZerosDivideByPositiveEpsilonToo) {
  const std::vector<float> x = {-0.0f, -0.0f};
  std::vector<float> y(2);
  const float alpha = 1.0f, beta = 0.0f;
  float mean;
  MeanNormalize(x.data(), &alpha, &beta, 0.25f, 2, 1, y.data(), &mean);
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(mean, 0.0f);
}

TEST(MeanNormalizeTest, WithoutRowsTheMeanIsZeroAndNothingElseIsWritten) {
  const std::vector<float> alpha = {1.0f, 2.0f}, beta = {3.0f, 4.0f};
  std::vector<float> mean = {-99.0f, -99.0f};
  float guard = 7.0f;
  MeanNormalize(&guard, alpha.data(), beta.data(), kEpsilon, 0, 2, &guard,
                mean.data());
  EXPECT_EQ(mean, (std::vector<float>{0.0f, 0.0f}));
  EXPECT_EQ(guard, 7.0f);
}

TEST(MeanNormalizeTest, WithoutFeaturesThereIsNothingToDo) {
  const Case c{3, 0, {}, {}, {}, {}};
  EXPECT_TRUE(Normalize(c).y.empty());
  EXPECT_TRUE(Differentiate(c, {}).dx.empty());
}

TEST(MeanNormalizeTest, RoundsShortTypesOnceAtTheEnd) {
  const Case c = RandomCase(50, 5, 21);
  std::vector<Short> x, y(c.x.size());
  std::vector<double> wide_x;
  for (float value : c.x) {
    x.push_back(Short(value));
    wide_x.push_back(static_cast<float>(x.back()));
  }
  std::vector<float> mean(c.alpha.size());
  MeanNormalize(x.data(), c.alpha.data(), c.beta.data(), kEpsilon, c.rows,
                c.features, y.data(), mean.data());
  const std::vector<double> expected =
      Reference(wide_x, Widen(c.alpha), Widen(c.beta), c.rows, c.features);
  for (size_t i = 0; i < expected.size(); ++i) {
    // Half a unit of the eighth bit, and some room for float arithmetic.
    EXPECT_NEAR(static_cast<float>(y[i]), expected[i],
                std::fabs(expected[i]) / 256 + 1e-5);
  }
}

// The gradients of sum(dy * y) by central differences of the formula.
class MeanNormalizeGradTest : public testing::Test {
 protected:
  static double Loss(const Case& c, const std::vector<double>& x,
                     const std::vector<double>& alpha,
                     const std::vector<double>& beta) {
    const std::vector<double> y = Reference(x, alpha, beta, c.rows, c.features);
    double loss = 0.0;
    for (size_t i = 0; i < y.size(); ++i) loss += c.dy[i] * y[i];
    return loss;
  }

  static void ExpectSlopes(std::vector<double>* variable,
                           const std::vector<float>& gradient,
                           const std::function<double()>& loss) {
    constexpr double kStep = 1e-6;
    for (size_t i = 0; i < variable->size(); ++i) {
      const double value = (*variable)[i];
      (*variable)[i] = value + kStep;
      const double above = loss();
      (*variable)[i] = value - kStep;
      const double below = loss();
      (*variable)[i] = value;
      const double slope = (above - below) / (2 * kStep);
      EXPECT_NEAR(gradient[i], slope, 1e-4 * (1.0 + std::fabs(slope)))
          << "element " << i;
    }
  }
};

TEST_F(MeanNormalizeGradTest, EqualsFiniteDifferences) {
  for (int64_t rows : {1, 2, 9, 40}) {
    const Case c = RandomCase(rows, 5, 22);
    const Gradients gradients = Differentiate(c, Normalize(c).mean);
    std::vector<double> x = Widen(c.x), alpha = Widen(c.alpha),
                        beta = Widen(c.beta);
    const auto loss = [&] { return Loss(c, x, alpha, beta); };
    ExpectSlopes(&x, gradients.dx, loss);
    ExpectSlopes(&alpha, gradients.dalpha, loss);
    ExpectSlopes(&beta, gradients.dbeta, loss);
  }
}

TEST_F(MeanNormalizeGradTest, AMeanHeldAtEpsilonHasNoInfluence) {
  // Means of 0.005 and -0.005, both within epsilon.
  Case c = RandomCase(2, 2, 23);
  c.x = {0.004f, -0.004f, 0.006f, -0.006f};
  const Gradients gradients = Differentiate(c, Normalize(c).mean);
  for (int i = 0; i < 4; ++i) {
    const double divisor = i % 2 == 0 ? 0.01 : -0.01;
    const double expected = c.dy[i] * c.alpha[i % 2] / divisor;
    EXPECT_NEAR(gradients.dx[i], expected, 1e-5 * std::fabs(expected));
  }
}

TEST_F(MeanNormalizeGradTest, AMeanOfExactlyEpsilonHasInfluence) {
  // A row alone: y = alpha x / x - beta does not depend on x.
  for (float x : {0.25f, -0.25f}) {
    const float dy = 3.0f, alpha = 2.0f;
    float dx, dalpha, dbeta;
    MeanNormalizeGrad(&dy, &x, &alpha, /*mean=*/&x, /*epsilon=*/0.25f, 1, 1,
                      &dx, &dalpha, &dbeta);
    EXPECT_EQ(dx, 0.0f);
    EXPECT_EQ(dalpha, 3.0f);
    EXPECT_EQ(dbeta, -3.0f);
  }
}

TEST_F(MeanNormalizeGradTest, WithoutRowsTheParametersGetZeros) {
  const Case c{0, 3, {}, {}, {1.0f, 2.0f, 3.0f}, {4.0f, 5.0f, 6.0f}};
  const Gradients gradients = Differentiate(c, Normalize(c).mean);
  EXPECT_EQ(gradients.dalpha, (std::vector<float>{0.0f, 0.0f, 0.0f}));
  EXPECT_EQ(gradients.dbeta, (std::vector<float>{0.0f, 0.0f, 0.0f}));
}

}  // namespace
}  // namespace recsync
