#include "cc/engine/nonfinite.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Limits = std::numeric_limits<float>;

TEST(NonfiniteTest, NumbersOfEverySizeAreFinite) {
  const std::vector<float> values = {0.0f,          -0.0f,
                                     Limits::max(), Limits::lowest(),
                                     Limits::min(), Limits::denorm_min()};
  EXPECT_TRUE(AllFinite(values.data(), static_cast<int64_t>(values.size())));
  EXPECT_TRUE(AllFinite(values.data(), 0));
}

TEST(NonfiniteTest, OneBadValueIsFoundWhereverItStands) {
  for (float bad :
       {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
    for (int position = 0; position < 37; ++position) {
      std::vector<float> values(37, 1.0f);
      values[position] = bad;
      EXPECT_FALSE(AllFinite(values.data(), 37)) << bad << " at " << position;
      EXPECT_TRUE(AllFinite(values.data(), position));
    }
  }
}

TEST(NonfiniteTest, ParsesTheThreeNamesAndNothingElse) {
  Nonfinite nonfinite = Nonfinite::kApply;
  EXPECT_TRUE(ParseNonfinite("skip", &nonfinite));
  EXPECT_EQ(nonfinite, Nonfinite::kSkip);
  EXPECT_TRUE(ParseNonfinite("error", &nonfinite));
  EXPECT_EQ(nonfinite, Nonfinite::kError);
  for (const char* name : {"", "Skip", "skip ", "ignore"}) {
    EXPECT_FALSE(ParseNonfinite(name, &nonfinite)) << name;
    EXPECT_EQ(nonfinite, Nonfinite::kError) << "is left alone";
  }
  EXPECT_TRUE(ParseNonfinite("apply", &nonfinite));
  EXPECT_EQ(nonfinite, Nonfinite::kApply);
}

}  // namespace
}  // namespace recsync
