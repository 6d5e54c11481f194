#include "cc/engine/bfloat16.h"

#include <cmath>
#include <cstdint>
#include <limits>

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

TEST(BFloat16Test, TooLargeNumbersBecomeInfiniteAndNoNumberStaysNone) {
  using Limits = std::numeric_limits<float>;
  EXPECT_EQ(Rounded(Limits::max()), Limits::infinity());
  EXPECT_EQ(Rounded(-Limits::infinity()), -Limits::infinity());
  EXPECT_TRUE(std::isnan(Rounded(Limits::signaling_NaN())));
}

}  // namespace
}  // namespace recsync
