#include "cc/engine/row_groups.h"

#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Grouping = std::map<int64_t, std::vector<int64_t>>;

// Positions by row, in the order given.
template <typename Index>
Grouping GroupWithAMap(const std::vector<Index>& ids) {
  Grouping grouping;
  for (size_t i = 0; i < ids.size(); ++i) {
    grouping[ids[i]].push_back(static_cast<int64_t>(i));
  }
  return grouping;
}

Grouping Collect(const RowGroups& groups) {
  Grouping grouping;
  for (int64_t group = 0; group < groups.size(); ++group) {
    // A row that two groups claim would have its positions twice.
    std::vector<int64_t>& positions = grouping[groups.row(group)];
    for (int64_t p = groups.first(group); p >= 0; p = groups.next(p)) {
      positions.push_back(p);
    }
  }
  return grouping;
}

template <typename Index>
void ExpectGroupedLikeAMap(const std::vector<Index>& ids, RowGroups* groups) {
  groups->Build(ids.data(), static_cast<int64_t>(ids.size()));
  const Grouping expected = GroupWithAMap(ids);
  EXPECT_EQ(groups->size(), static_cast<int64_t>(expected.size()));
  EXPECT_EQ(Collect(*groups), expected);
}

template <typename Index>
std::vector<Index> RandomIds(int n, int64_t rows, std::mt19937* random) {
  std::uniform_int_distribution<int64_t> row(0, rows - 1);
  std::vector<Index> ids(n);
  for (Index& id : ids) id = static_cast<Index>(row(*random));
  return ids;
}

TEST(RowGroupsTest, NoIdsMakeNoGroups) {
  RowGroups groups;
  EXPECT_EQ(groups.size(), 0);
  groups.Build(static_cast<const int64_t*>(nullptr), 0);
  EXPECT_EQ(groups.size(), 0);
}

TEST(RowGroupsTest, OneIdMakesOneGroup) {
  const int64_t id = 42;
  RowGroups groups;
  groups.Build(&id, 1);
  ASSERT_EQ(groups.size(), 1);
  EXPECT_EQ(groups.row(0), 42);
  EXPECT_EQ(groups.first(0), 0);
  EXPECT_EQ(groups.next(0), -1);
}

TEST(RowGroupsTest, ARepeatedRowKeepsItsPositionsInOrder) {
  const std::vector<int32_t> ids = {7, 3, 7, 7, 0, 3};
  RowGroups groups;
  groups.Build(ids.data(), 6);
  const Grouping expected = {{0, {4}}, {3, {1, 5}}, {7, {0, 2, 3}}};
  EXPECT_EQ(Collect(groups), expected);
}

TEST(RowGroupsTest, GroupsRandomIdsLikeAMap) {
  std::mt19937 random(9);
  RowGroups groups;
  for (int n : {1, 2, 7, 8, 9, 16, 17, 100, 1000, 4097}) {
    for (int64_t rows : {1, 2, 10, 1000, 1000000}) {
      ExpectGroupedLikeAMap(RandomIds<int32_t>(n, rows, &random), &groups);
      ExpectGroupedLikeAMap(RandomIds<int64_t>(n, rows, &random), &groups);
    }
  }
}

TEST(RowGroupsTest, GroupsIdsFromTheWholeRangeOfTheirType) {
  std::mt19937 random(10);
  RowGroups groups;
  ExpectGroupedLikeAMap(
      RandomIds<int64_t>(3000, std::numeric_limits<int64_t>::max(), &random),
      &groups);
  ExpectGroupedLikeAMap(
      std::vector<int64_t>{std::numeric_limits<int64_t>::max(), 0,
                           std::numeric_limits<int64_t>::max()},
      &groups);
  ExpectGroupedLikeAMap(
      std::vector<int32_t>{0, std::numeric_limits<int32_t>::max(), 0}, &groups);
}

TEST(RowGroupsTest, GroupsRegularIdsThatCouldCollide) {
  RowGroups groups;
  for (int shift = 0; shift < 52; ++shift) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 600; ++i) ids.push_back((i % 400) << shift);
    ExpectGroupedLikeAMap(ids, &groups);
  }
}

TEST(RowGroupsTest, AReusedObjectRemembersNothing) {
  std::mt19937 random(11);
  RowGroups groups;
  for (int n : {5000, 3, 0, 200, 5000, 1}) {
    ExpectGroupedLikeAMap(RandomIds<int64_t>(n, 50, &random), &groups);
  }
}

TEST(RowGroupsTest, ManyThreadsReadOneGrouping) {
  std::mt19937 random(12);
  const std::vector<int64_t> ids = RandomIds<int64_t>(2000, 300, &random);
  RowGroups groups;
  groups.Build(ids.data(), static_cast<int64_t>(ids.size()));
  const Grouping expected = GroupWithAMap(ids);
  std::vector<Grouping> collected(4);
  std::vector<std::thread> threads;
  for (Grouping& grouping : collected) {
    threads.emplace_back([&groups, &grouping] { grouping = Collect(groups); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Grouping& grouping : collected) EXPECT_EQ(grouping, expected);
}

}  // namespace
}  // namespace recsync
