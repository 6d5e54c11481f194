#include "cc/engine/id_router.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Ints = std::vector<int32_t>;
using Rows = std::vector<int64_t>;
using Floats = std::vector<float>;

RoutedFeature Feature(const std::string& name, int64_t rows, int64_t length,
                      std::vector<ShardPlace> shards,
                      Combiner combiner = Combiner::kSum) {
  return {name,     name + "s",         rows,  length, false,
          combiner, OutOfRange::kError, shards};
}

RoutedInput<int64_t> Dense(const std::vector<int64_t>& ids) {
  return {ids.data(), static_cast<int64_t>(ids.size()), nullptr, nullptr};
}

TEST(IdRouterTest, ListsAPopularRowOnce) {
  const std::vector<RoutedFeature> features = {Feature("a", 10, 1, {{0, 0}}),
                                               Feature("b", 10, 1, {{0, 10}})};
  const std::vector<bool> has_bags = {false};
  const IdRouter router(features, has_bags);
  std::vector<RoutedTable> tables;
  const std::vector<int64_t> a = {3, 1, 3}, b = {1, 1, 2};
  ASSERT_EQ(router.Route<int64_t>({Dense(a), Dense(b)}, 3, &tables).error(),
            "");
  EXPECT_EQ(tables[0].rows, (Rows{3, 1, 11, 12}));
  EXPECT_EQ(tables[0].slots, (Ints{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(tables[0].sources, (Ints{0, 1, 0, 2, 2, 3}));
  EXPECT_TRUE(tables[0].bags.empty());
}

TEST(IdRouterTest, SplitsATableModuloItsShards) {
  const std::vector<RoutedFeature> features = {
      Feature("a", 10, 1, {{0, 100}, {1, 0}})};
  const std::vector<bool> has_bags = {false, false};
  const IdRouter router(features, has_bags);
  std::vector<RoutedTable> tables;
  const std::vector<int64_t> ids = {0, 1, 6, 9};
  ASSERT_EQ(router.Route<int64_t>({Dense(ids)}, 4, &tables).error(), "");
  EXPECT_EQ(tables[0].rows, (Rows{100, 103}));
  EXPECT_EQ(tables[0].slots, (Ints{0, 2}));
  EXPECT_EQ(tables[1].rows, (Rows{0, 4}));
  EXPECT_EQ(tables[1].slots, (Ints{1, 3}));
}

TEST(IdRouterTest, ListsARowOfSeveralFeaturesOnce) {
  std::vector<RoutedFeature> features = {Feature("a", 10, 1, {{0, 0}}),
                                         Feature("b", 10, 1, {{0, 10}}),
                                         Feature("c", 10, 1, {{0, 0}})};
  features[2].table = features[0].table;
  const std::vector<bool> has_bags = {false};
  const IdRouter router(features, has_bags);
  std::vector<RoutedTable> tables;
  const std::vector<int64_t> a = {3, 1}, b = {3, 3}, c = {1, 4};
  ASSERT_EQ(
      router.Route<int64_t>({Dense(a), Dense(b), Dense(c)}, 2, &tables).error(),
      "");
  EXPECT_EQ(tables[0].rows, (Rows{3, 1, 13, 4}));
  EXPECT_EQ(tables[0].sources, (Ints{0, 1, 2, 2, 1, 3}));
}

TEST(IdRouterTest, AShardBesideBagsHasABagForEachExample) {
  const std::vector<RoutedFeature> features = {
      Feature("a", 10, 2, {{1, 0}}), Feature("b", 10, 1, {{0, 0}, {1, 10}})};
  const IdRouter router(features, {false, true});
  std::vector<RoutedTable> tables;
  const std::vector<int64_t> a = {1, 2, 3, 3}, b = {5, 5};
  ASSERT_EQ(router.Route<int64_t>({Dense(a), Dense(b)}, 2, &tables).error(),
            "");
  EXPECT_TRUE(tables[0].rows.empty());
  EXPECT_EQ(tables[1].rows, (Rows{1, 2, 3, 3, 12, 12}));
  EXPECT_EQ(tables[1].bags, (Ints{0, 0, 1, 1, 2, 3}));
  EXPECT_EQ(tables[1].slots, (Ints{0, 1, 2, 3}));
}

TEST(IdRouterTest, LeavesEmptyBagsOut) {
  const std::vector<RoutedFeature> features = {
      Feature("a", 10, 0, {{0, 0}}, Combiner::kMean)};
  const std::vector<bool> has_bags = {true};
  const IdRouter router(features, has_bags);
  std::vector<RoutedTable> tables;
  const std::vector<int64_t> ids = {1, 2, 5}, splits = {0, 2, 2, 3};
  const RoutedInput<int64_t> input = {ids.data(), 3, splits.data(), nullptr};
  ASSERT_EQ(router.Route<int64_t>({input}, 3, &tables).error(), "");
  EXPECT_EQ(tables[0].rows, (Rows{1, 2, 5}));
  EXPECT_EQ(tables[0].bags, (Ints{0, 0, 1}));
  EXPECT_EQ(tables[0].slots, (Ints{0, 2}));
  EXPECT_EQ(tables[0].scales, (Floats{0.5f, 0.5f, 1.0f}));
}

TEST(IdRouterTest, WeightsThatAddUpToNothingGiveZeros) {
  std::vector<RoutedFeature> features = {
      Feature("a", 10, 2, {{0, 0}}, Combiner::kMean)};
  features[0].weighted = true;
  const std::vector<bool> has_bags = {true};
  const IdRouter router(features, has_bags);
  std::vector<RoutedTable> tables;
  const std::vector<int64_t> ids = {1, 2};
  const std::vector<float> weights = {1.0f, -1.0f};
  const RoutedInput<int64_t> input = {ids.data(), 2, nullptr, weights.data()};
  ASSERT_EQ(router.Route<int64_t>({input}, 1, &tables).error(), "");
  EXPECT_EQ(tables[0].scales, (Floats{0.0f, 0.0f}));
}

TEST(IdRouterTest, NamesFeatureTableAndPositionOfAnIdOutOfRange) {
  for (const int64_t bad : {int64_t{-1}, int64_t{10}, int64_t{1} << 40}) {
    const std::vector<RoutedFeature> features = {Feature("a", 10, 1, {{0, 0}})};
    const std::vector<bool> has_bags = {false};
    const IdRouter router(features, has_bags);
    std::vector<RoutedTable> tables;
    const std::vector<int64_t> ids = {0, bad};
    EXPECT_EQ(router.Route<int64_t>({Dense(ids)}, 2, &tables).error(),
              "feature a has id " + std::to_string(bad) +
                  " at position 1, table as has rows 0 to 9; "
                  "out_of_range='clip' or 'hash' would accept it");
  }
}

TEST(IdRouterTest, RefusesRowSplitsThatDecreaseOrEndElsewhere) {
  const std::vector<RoutedFeature> features = {Feature("a", 10, 0, {{0, 0}})};
  const std::vector<bool> has_bags = {true};
  const std::vector<int64_t> ids = {1, 2, 3};
  for (const std::vector<int64_t>& splits : std::vector<std::vector<int64_t>>{
           {0, 2, 1, 3}, {1, 2, 3, 3}, {0, 1, 2, 4}}) {
    const IdRouter router(features, has_bags);
    std::vector<RoutedTable> tables;
    EXPECT_NE(router
                  .Route<int64_t>({{ids.data(), 3, splits.data(), nullptr}}, 3,
                                  &tables)
                  .error(),
              "");
  }
}

TEST(IdRouterTest, EverySlotGetsTheRowThatBruteForceGivesIt) {
  std::mt19937 random(5);
  const int64_t batch = 200, rows = 1000;
  const std::vector<RoutedFeature> features = {
      Feature("a", rows, 1, {{0, 0}}),
      Feature("b", rows, 1, {{0, 1000}, {1, 0}, {2, 7}})};
  const std::vector<bool> has_bags = {false, false, false};
  const IdRouter router(features, has_bags);
  std::vector<RoutedTable> tables;
  std::vector<std::vector<int64_t>> ids(2, std::vector<int64_t>(batch));
  for (auto& own : ids) {
    for (int64_t& id : own) id = random() % 2 ? random() % 5 : random() % rows;
  }
  ASSERT_EQ(
      router.Route<int64_t>({Dense(ids[0]), Dense(ids[1])}, batch, &tables)
          .error(),
      "");
  std::map<int64_t, std::pair<int, int64_t>> expected, found;
  for (int64_t b = 0; b < batch; ++b) {
    expected[b] = {0, ids[0][b]};
    const int64_t id = ids[1][b];
    const int64_t first = id % 3 == 0 ? 1000 : id % 3 == 1 ? 0 : 7;
    expected[batch + b] = {static_cast<int>(id % 3), first + id / 3};
  }
  for (int t = 0; t < 3; ++t) {
    const RoutedTable& table = tables[t];
    std::map<int64_t, int> times;
    for (const int64_t row : table.rows) EXPECT_EQ(++times[row], 1);
    for (size_t i = 0; i < table.slots.size(); ++i) {
      found[table.slots[i]] = {t, table.rows[table.sources[i]]};
    }
  }
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace recsync
