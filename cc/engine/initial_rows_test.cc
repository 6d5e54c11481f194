// First values of rows: the same for any division, and of their distribution.

#include "cc/engine/initial_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cc/engine/philox.h"

namespace recsync {
namespace {

constexpr Distribution kAll[] = {Distribution::kConstant,
                                 Distribution::kUniform, Distribution::kNormal,
                                 Distribution::kTruncatedNormal};

InitialRows Rows(Distribution distribution, int64_t rows, float first = 0.0f,
                 float second = 1.0f) {
  InitialRows made;
  made.rows = rows;
  made.distribution = distribution;
  made.first = first;
  made.second = second;
  made.seed = 0x0123456789ABCDEF;
  return made;
}

std::vector<float> Values(const InitialRows& rows, int64_t dimension) {
  std::vector<float> values(rows.rows * dimension, -77.0f);
  FillRows(rows, dimension, 0, rows.rows, values.data());
  return values;
}

TEST(InitialRowsTest, ARowHasItsValuesInWhateverShardAndBlock) {
  constexpr int64_t kRows = 530;  // More than are worked on together.
  for (const Distribution distribution : kAll) {
    for (const int64_t dimension : {1, 3, 4, 6, 8, 1030}) {
      const InitialRows whole = Rows(distribution, kRows);
      const std::vector<float> expected = Values(whole, dimension);
      for (const int64_t count : {1, 2, 7}) {
        for (int64_t index = 0; index < count; index += 3) {
          InitialRows shard = whole;
          shard.index = index;
          shard.count = count;
          shard.rows = (kRows - index + count - 1) / count;
          std::vector<float> values(shard.rows * dimension);
          const int64_t middle = shard.rows / 3;
          FillRows(shard, dimension, middle, shard.rows, values.data());
          FillRows(shard, dimension, 0, middle, values.data());
          for (int64_t i = 0; i < shard.rows; ++i) {
            ASSERT_TRUE(
                std::equal(values.begin() + i * dimension,
                           values.begin() + (i + 1) * dimension,
                           expected.begin() + (index + i * count) * dimension))
                << dimension << " " << count << " " << i;
          }
        }
      }
    }
  }
}

TEST(InitialRowsTest, WritesTheRowsThatItIsAskedFor) {
  for (const Distribution distribution : kAll) {
    for (const int64_t dimension : {0, 1, 5, 8}) {
      const InitialRows rows = Rows(distribution, 10, 1.0f, 2.0f);
      std::vector<float> values(10 * dimension, -77.0f);
      FillRows(rows, dimension, 3, 7, values.data());
      FillRows(rows, dimension, 5, 5, values.data());
      for (int64_t i = 0; i < 10 * dimension; ++i) {
        const bool asked = i / dimension >= 3 && i / dimension < 7;
        EXPECT_EQ(values[i] != -77.0f, asked) << i;
      }
    }
  }
}

TEST(InitialRowsTest, RowsBeyondTheThirtySecondBitDiffer) {
  InitialRows near = Rows(Distribution::kUniform, 1), far = near;
  far.count = int64_t{1} << 33;
  far.index = int64_t{1} << 32;
  EXPECT_NE(Values(near, 4), Values(far, 4));
}

TEST(InitialRowsTest, UniformValuesAreThoseOfTheCounters) {
  const std::vector<float> values =
      Values(Rows(Distribution::kUniform, 3, -2.0f, 4.0f), 6);
  for (uint32_t row = 0; row < 3; ++row) {
    for (uint32_t column = 0; column < 6; ++column) {
      const uint32_t word =
          Philox(0x0123456789ABCDEF, {row, 0, column / 4, 0})[column % 4];
      const double part = (word >> 8) / 16777216.0;
      EXPECT_NEAR(values[row * 6 + column], -2.0 + 6.0 * part, 1e-6);
    }
  }
}

// How much of a standard normal distribution is above.
double Above(double deviations) {
  return 0.5 * std::erfc(deviations / std::sqrt(2.0));
}

TEST(InitialRowsTest, NormalValuesAreQuantilesOfTheirWords) {
  constexpr int64_t kRows = 100000;
  const std::vector<float> values =
      Values(Rows(Distribution::kNormal, kRows), 4);
  const std::vector<float> truncated =
      Values(Rows(Distribution::kTruncatedNormal, kRows), 4);
  double largest = 0.0;
  for (uint32_t row = 0; row < kRows; ++row) {
    const PhiloxWords words = Philox(0x0123456789ABCDEF, {row, 0, 0, 0});
    for (int i = 0; i < 4; ++i) {
      const double part = ((words[i] >> 1) + 0.5) / 2147483648.0;
      const double sign = words[i] & 1 ? -1.0 : 1.0;
      // The relative error of a quantile is at least that of the mass above it,
      // over the square of the quantile and one.
      const double value = sign * values[4 * row + i];
      ASSERT_GE(value, 0.0);
      const double error = std::abs(Above(value) / (0.5 * part) - 1.0);
      ASSERT_LT(error / (value * value + 1.0), 1e-5) << value;
      largest = std::max(largest, value);
      const double within = sign * truncated[4 * row + i];
      ASSERT_GE(within, 0.0);
      ASSERT_LE(within, 2.0);
      ASSERT_NEAR(Above(within), Above(2.0) + (0.5 - Above(2.0)) * part, 1e-5);
    }
  }
  EXPECT_GT(largest, 4.0);
}

TEST(InitialRowsTest, MeanAndDeviationMoveTheValues) {
  for (const auto distribution :
       {Distribution::kNormal, Distribution::kTruncatedNormal}) {
    const std::vector<float> standard = Values(Rows(distribution, 50), 4);
    const std::vector<float> moved =
        Values(Rows(distribution, 50, 3.0f, 0.5f), 4);
    for (size_t i = 0; i < standard.size(); ++i) {
      EXPECT_NEAR(moved[i], 3.0f + 0.5f * standard[i], 1e-6);
    }
    const std::vector<float> still =
        Values(Rows(distribution, 50, 3.0f, 0.0f), 4);
    EXPECT_EQ(still, std::vector<float>(200, 3.0f));
  }
}

TEST(InitialRowsTest, AnUpperBoundDoesNotOccur) {
  // In a range of two neighbors nearly half of the products round upwards.
  const float above = std::nextafter(1.0f, 2.0f);
  const InitialRows rows = Rows(Distribution::kUniform, 100, 1.0f, above);
  EXPECT_EQ(Values(rows, 4), std::vector<float>(400, 1.0f));
  const InitialRows one = Rows(Distribution::kUniform, 100, 0.1f, 0.1f);
  EXPECT_EQ(Values(one, 4), std::vector<float>(400, 0.1f));
}

TEST(InitialRowsTest, BFloat16ValuesAreTheRoundedOnes) {
  for (const Distribution distribution : kAll) {
    for (const int64_t dimension : {5, 8}) {
      const InitialRows rows = Rows(distribution, 300, 0.3f, 0.7f);
      const std::vector<float> exact = Values(rows, dimension);
      std::vector<BFloat16> rounded(exact.size());
      FillRows(rows, dimension, 0, 300, rounded.data());
      for (size_t i = 0; i < exact.size(); ++i) {
        ASSERT_EQ(rounded[i].bits, ToBFloat16(exact[i]).bits);
      }
    }
  }
}

TEST(InitialRowsTest, WhatMakesNoSenseIsNamed) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kLarge = std::numeric_limits<float>::max();
  for (const Distribution distribution : kAll) {
    EXPECT_TRUE(CheckInitialRows(Rows(distribution, 0)).ok());
    for (const float wrong : {kNan, kInfinity, -kInfinity}) {
      EXPECT_FALSE(CheckInitialRows(Rows(distribution, 1, wrong, 1.0f)).ok());
      EXPECT_FALSE(CheckInitialRows(Rows(distribution, 1, 0.0f, wrong)).ok());
    }
    EXPECT_FALSE(CheckInitialRows(Rows(distribution, -1)).ok());
    InitialRows shard = Rows(distribution, 2);
    shard.count = std::numeric_limits<int64_t>::max() / 2 + 1;
    EXPECT_FALSE(CheckInitialRows(shard).ok());
    shard.count = 0;
    EXPECT_FALSE(CheckInitialRows(shard).ok());
    shard.count = shard.index = 3;
    EXPECT_FALSE(CheckInitialRows(shard).ok());
    shard.index = -1;
    EXPECT_FALSE(CheckInitialRows(shard).ok());
    shard.index = 2;
    EXPECT_TRUE(CheckInitialRows(shard).ok());
  }
  const auto uniform = [](float low, float high) {
    return CheckInitialRows(Rows(Distribution::kUniform, 1, low, high));
  };
  EXPECT_TRUE(uniform(1.0f, 1.0f).ok());
  EXPECT_NE(uniform(2.0f, 1.0f).error().find("not 2 and 1"), std::string::npos);
  EXPECT_FALSE(uniform(-kLarge, kLarge).ok());
  for (const auto distribution :
       {Distribution::kNormal, Distribution::kTruncatedNormal}) {
    const Result negative =
        CheckInitialRows(Rows(distribution, 1, 0.0f, -1.0f));
    EXPECT_NE(negative.error().find("at least 0, not -1"), std::string::npos);
  }
}

}  // namespace
}  // namespace recsync
