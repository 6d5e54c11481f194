#include "cc/engine/row_sums.h"

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

Ids IdsOf(const RowSums& sums) {
  Ids ids;
  for (int64_t i = 0; i < sums.size(); ++i) ids.push_back(sums.id(i));
  return ids;
}

TEST(RowSumsTest, RowsComeInTheOrderInWhichTheyWereFirstNamed) {
  RowSums sums;
  sums.set_width(2);
  const Floats gradient = {1, 2, 3, 4, 5, 6};
  RowPush push;
  push.gradient = gradient.data();
  const Ids first = {7, 3, 7}, second = {0, 3, 9};
  sums.Add(first.data(), 3, push, 1.0f);
  EXPECT_EQ(IdsOf(sums), (Ids{7, 3}));
  EXPECT_EQ(sums.sum(0)[0], 6);
  EXPECT_EQ(sums.sum(0)[1], 8);
  sums.Add(second.data(), 3, push, 0.5f);
  EXPECT_EQ(IdsOf(sums), (Ids{7, 3, 0, 9}));
  EXPECT_EQ(sums.sum(1)[0], 3 + 1.5);
  EXPECT_EQ(sums.sum(1)[1], 4 + 2);
  EXPECT_EQ(sums.oldest(1), RowSums::kNoVersion);
}

TEST(RowSumsTest, AClearedOneHoldsNothingOfWhatItHeld) {
  RowSums sums;
  sums.set_width(1);
  const Floats gradient = {1, 1};
  const Ids ids = {5, 5}, versions = {9, 4};
  RowPush push;
  push.gradient = gradient.data();
  push.pulled = versions.data();
  for (int round = 0; round < 5; ++round) {
    EXPECT_EQ(sums.size(), 0);
    sums.Add(ids.data(), 2, push, 1.0f);
    EXPECT_EQ(sums.sum(0)[0], 2);
    EXPECT_EQ(sums.oldest(0), 4);
    sums.Clear();
  }
}

TEST(RowSumsTest, AgreesWithAMapWhileItGrows) {
  std::mt19937 random(3);
  RowSums sums;
  sums.set_width(3);
  for (int round = 0; round < 3; ++round) {
    std::map<int64_t, int64_t> expected, oldest;
    for (int i = 0; i < 40; ++i) {
      const int64_t n = random() % 300;
      Ids ids(n), versions(n);
      Floats gradient(3 * n), scales(n);
      for (int64_t p = 0; p < n; ++p) {
        ids[p] = static_cast<int64_t>(random() % 2000) << (random() % 2 * 33);
        versions[p] = random() % 100;
        scales[p] = random() % 3;
        for (int j = 0; j < 3; ++j) gradient[3 * p + j] = 10 * p + j;
        expected[ids[p]] += static_cast<int64_t>(scales[p]) * 10 * p;
        const auto [at, is_new] = oldest.emplace(ids[p], versions[p]);
        if (!is_new) at->second = std::min(at->second, versions[p]);
      }
      RowPush push;
      push.gradient = gradient.data();
      push.bags.scales = scales.data();
      push.pulled = versions.data();
      sums.Add(ids.data(), n, push, 1.0f);
    }
    ASSERT_EQ(sums.size(), static_cast<int64_t>(expected.size()));
    for (int64_t i = 0; i < sums.size(); ++i) {
      EXPECT_EQ(sums.sum(i)[0], expected.at(sums.id(i)));
      EXPECT_EQ(sums.oldest(i), oldest.at(sums.id(i)));
    }
    sums.Clear();
  }
}

TEST(RowSumsTest, OfARowThatWasGivenToAnotherKeyTheLatestLifeIsSummed) {
  RowSums sums;
  sums.set_width(1);
  const int64_t first = FirstOfNextLife(0), second = FirstOfNextLife(first);
  const auto add = [&](const Ids& ids, const Ids& versions,
                       const Floats& gradient) {
    RowPush push;
    push.gradient = gradient.data();
    push.pulled = versions.data();
    sums.Add(ids.data(), static_cast<int64_t>(ids.size()), push, 1.0f);
  };
  add({7, 8, 7}, {first + 5, 3, first + 4}, {1, 10, 2});
  EXPECT_EQ(sums.sum(0)[0], 3);
  EXPECT_EQ(sums.oldest(0), first + 4);
  add({7, 7, 7, 7}, {first, second + 2, second + 1, kNoLife}, {4, 8, 16, 32});
  EXPECT_EQ(sums.sum(0)[0], 24);
  EXPECT_EQ(sums.oldest(0), second + 1);
  EXPECT_EQ(sums.sum(1)[0], 10);
  EXPECT_EQ(sums.oldest(1), 3);
}

}  // namespace
}  // namespace recsync
