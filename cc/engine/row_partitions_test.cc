#include "cc/engine/row_partitions.h"

#include <cstdint>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

template <typename F>
void Serial(int64_t count, int64_t /*cost*/, const F& f) {
  f(0, count);
}

// Every unit on a thread of its own, as different from Serial as can be.
struct ManyThreads {
  template <typename F>
  void operator()(int64_t count, int64_t /*cost*/, const F& f) const {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; ++i) {
      threads.emplace_back([&f, i] { f(i, i + 1); });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

// Every position of each row, by brute force and by partitions.
template <typename Index>
void CheckAgainstBruteForce(const std::vector<Index>& ids) {
  std::map<int64_t, std::vector<int64_t>> expected, found;
  for (size_t p = 0; p < ids.size(); ++p) expected[ids[p]].push_back(p);
  RowPartitions partitions;
  partitions.Build(ids.data(), ids.size(), ManyThreads());
  std::map<int64_t, int64_t> partition_of;
  for (int64_t i = 0; i < partitions.count(); ++i) {
    for (int64_t k = 0; k < partitions.size(i); ++k) {
      const int64_t row = partitions.rows(i)[k];
      found[row].push_back(partitions.positions(i)[k]);
      EXPECT_EQ(partition_of.emplace(row, i).first->second, i);
    }
  }
  EXPECT_EQ(found, expected);
}

TEST(RowPartitionsTest, EveryPositionIsInThePartitionOfItsRowInTheGivenOrder) {
  std::mt19937 random(5);
  for (int64_t n : {0, 1, 100, 1024, 1025, 30000}) {
    for (int64_t rows : {1, 50, 1000000}) {
      std::uniform_int_distribution<int64_t> row(0, rows - 1);
      std::vector<int64_t> ids(n);
      std::vector<int32_t> narrow(n);
      for (int64_t p = 0; p < n; ++p) narrow[p] = ids[p] = row(random);
      CheckAgainstBruteForce(ids);
      CheckAgainstBruteForce(narrow);
    }
  }
}

TEST(RowPartitionsTest, PartitionsOfManyDifferentRowsAreAboutEqual) {
  std::vector<int64_t> ids(100000);
  for (size_t p = 0; p < ids.size(); ++p) ids[p] = 3 * p;
  RowPartitions partitions;
  partitions.Build(
      ids.data(), ids.size(),
      [](int64_t n, int64_t c, const auto& f) { Serial(n, c, f); });
  for (int64_t i = 0; i < partitions.count(); ++i) {
    EXPECT_LE(partitions.size(i), 2 * RowPartitions::kLargest);
  }
}

TEST(RowPartitionsTest, IsBuiltAnewWithoutTraceOfWhatItHeld) {
  RowPartitions partitions;
  const auto serial = [](int64_t n, int64_t c, const auto& f) {
    Serial(n, c, f);
  };
  std::vector<int64_t> many(5000, 7), one = {3};
  partitions.Build(many.data(), many.size(), serial);
  partitions.Build(one.data(), one.size(), serial);
  ASSERT_EQ(partitions.count(), 1);
  ASSERT_EQ(partitions.size(0), 1);
  EXPECT_EQ(partitions.rows(0)[0], 3);
  EXPECT_EQ(partitions.positions(0)[0], 0);
}

}  // namespace
}  // namespace recsync
