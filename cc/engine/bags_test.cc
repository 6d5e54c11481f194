#include "cc/engine/bags.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

int64_t FirstBad(const std::vector<int32_t>& bags, int64_t count) {
  return FirstBadBag(bags.data(), static_cast<int64_t>(bags.size()), count);
}

TEST(BagsTest, WithoutBagsEveryPositionIsOneOfItsOwnWithWeightOne) {
  const Bags bags;
  for (int64_t position : {0, 1, 7}) {
    EXPECT_EQ(bags.bag(position), position);
    EXPECT_EQ(bags.scale(position), 1.0f);
    EXPECT_EQ(bags.FirstOf(position, 9), position);
  }
  EXPECT_EQ(bags.FirstOf(12, 9), 9);
}

TEST(BagsTest, TheFirstPositionOfABagWithoutAnyIsThatOfTheNext) {
  const std::vector<int32_t> of = {1, 1, 2, 5, 5, 5};
  const std::vector<float> scales = {1, 2, 3, 4, 5, 6};
  Bags bags;
  bags.bags = of.data();
  bags.scales = scales.data();
  const int64_t n = 6;
  for (int64_t bag = 0; bag < 8; ++bag) {
    int64_t expected = 0;
    while (expected < n && of[expected] < bag) ++expected;
    EXPECT_EQ(bags.FirstOf(bag, n), expected) << "bag " << bag;
  }
  EXPECT_EQ(bags.bag(3), 5);
  EXPECT_EQ(bags.scale(3), 4.0f);
}

TEST(BagsTest, BagsThatDoNotDecreaseAndAreInRangeAreGood) {
  EXPECT_EQ(FirstBad({}, 0), -1);
  EXPECT_EQ(FirstBad({0, 0, 2, 2, 4}, 5), -1);
}

TEST(BagsTest, TheFirstBadBagIsFound) {
  EXPECT_EQ(FirstBad({0}, 0), 0);
  EXPECT_EQ(FirstBad({-1, 0}, 3), 0);
  EXPECT_EQ(FirstBad({0, 1, 0}, 3), 2);
  EXPECT_EQ(FirstBad({0, 1, 3, 9}, 3), 2);
  EXPECT_EQ(FirstBad({0, std::numeric_limits<int32_t>::min()}, 3), 1);
}

TEST(BagsTest, ScaledVectorsAreAdded) {
  const std::vector<float> from = {1, -2, 3};
  std::vector<float> to = {10, 20, 30};
  AddScaled(from.data(), 0.5f, 3, to.data());
  EXPECT_EQ(to, (std::vector<float>{10.5f, 19.0f, 31.5f}));
}

}  // namespace
}  // namespace recsync
