#include "cc/engine/bfloat16.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace recsync {
namespace {

float Rounded(float value) { return static_cast<float>(ToBFloat16(value)); }

TEST(BFloat16Test, EveryBFloat16ComesBackFromFloat) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const BFloat16 value{static_cast<uint16_t>(bits)};
    const float wide = static_cast<float>(value);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(Rounded(wide)));
    } else {
      EXPECT_EQ(ToBFloat16(wide).bits, bits);
    }
  }
}

TEST(BFloat16Test, RoundsToTheNearestAndTiesToEven) {
  const float step = std::ldexp(1.0f, -7);  // between neighbours above 1
  EXPECT_EQ(Rounded(1.0f + 0.49f * step), 1.0f);
  EXPECT_EQ(Rounded(1.0f + 0.51f * step), 1.0f + step);
  EXPECT_EQ(Rounded(1.0f + 0.5f * step), 1.0f);
  EXPECT_EQ(Rounded(1.0f + 1.5f * step), 1.0f + 2 * step);
  EXPECT_EQ(Rounded(-1.0f - 1.5f * step), -1.0f - 2 * step);
}

TEST(BFloat16Test, OfAllRandomNumbersAsManyRoundUpAsTheValueIsAboveTheLower) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    uint32_t bits = static_cast<uint32_t>(random());
    if ((bits & 0x7F800000) == 0x7F800000) bits &= ~0x00800000u;
    if ((bits & 0x7F800000) == 0x7F000000) bits &= ~0x01000000u;
    float value, lower;
    std::memcpy(&value, &bits, sizeof(value));
    const uint32_t cut = bits & 0xFFFF0000;
    std::memcpy(&lower, &cut, sizeof(lower));
    double sum = 0.0;
    for (int number = 0; number < 65536; ++number) {
      const BFloat16 rounded = ToBFloat16(value, static_cast<uint16_t>(number));
      const uint32_t above = rounded.bits - (bits >> 16);
      ASSERT_LE(above, 1u);
      sum += static_cast<float>(rounded);
    }
    // Exactly, as far as the sum is exact.
    EXPECT_NEAR(sum / 65536, value, 1e-9 * std::abs(value));
  }
}

TEST(BFloat16Test, WhatBFloat16HasStaysWhateverTheRandomNumber) {
  for (int bits = 0; bits < 65536; ++bits) {
    const BFloat16 value{static_cast<uint16_t>(bits)};
    const float wide = static_cast<float>(value);
    for (int number : {0, 1, 0x7FFF, 0x8000, 0xFFFF}) {
      const BFloat16 rounded = ToBFloat16(wide, static_cast<uint16_t>(number));
      if (std::isnan(wide)) {
        EXPECT_TRUE(std::isnan(static_cast<float>(rounded)));
      } else {
        EXPECT_EQ(rounded.bits, bits);
      }
    }
  }
}

TEST(BFloat16Test, TooLargeNumbersBecomeInfiniteAndNoNumberStaysNone) {
  using Limits = std::numeric_limits<float>;
  EXPECT_EQ(Rounded(Limits::max()), Limits::infinity());
  EXPECT_EQ(Rounded(-Limits::infinity()), -Limits::infinity());
  EXPECT_TRUE(std::isnan(Rounded(Limits::signaling_NaN())));
}

}  // namespace
}  // namespace recsync
