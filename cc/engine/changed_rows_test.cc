#include "cc/engine/changed_rows.h"

#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

std::vector<int64_t> Changed(const std::vector<int64_t>& versions,
                             const std::vector<int64_t>& saved, int64_t begin,
                             int64_t end) {
  std::vector<int64_t> rows(end - begin, -1);
  rows.resize(
      ChangedRows(versions.data(), saved.data(), begin, end, rows.data()));
  return rows;
}

TEST(ChangedRowsTest, RowsOfHigherAndOfLowerVersionsAreFoundInTheirOrder) {
  EXPECT_EQ(Changed({0, 5, 3, 2, 9}, {0, 4, 3, 7, 8}, 0, 5),
            (std::vector<int64_t>{1, 3, 4}));
}

TEST(ChangedRowsTest, OnlyRowsThatAreAskedForAreLookedAt) {
  const std::vector<int64_t> versions = {1, 1, 1, 1}, saved = {0, 0, 0, 0};
  EXPECT_EQ(Changed(versions, saved, 1, 3), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(Changed(versions, saved, 2, 2), (std::vector<int64_t>{}));
  EXPECT_EQ(Changed(versions, versions, 0, 4), (std::vector<int64_t>{}));
}

TEST(ChangedRowsTest, AllAreFoundOfAnyThatHaveChanged) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = random() % 50;
    std::vector<int64_t> versions(rows), saved(rows), expected;
    const int64_t begin = random() % (rows + 1);
    const int64_t end = begin + random() % (rows - begin + 1);
    for (int64_t row = 0; row < rows; ++row) {
      versions[row] = random() % 3;
      saved[row] = random() % 3;
      if (row >= begin && row < end && versions[row] != saved[row]) {
        expected.push_back(row);
      }
    }
    EXPECT_EQ(Changed(versions, saved, begin, end), expected);
  }
}

TEST(ChangedRowsTest, WhatIsUpdatedMeanwhileIsFoundThenOrTheNextTime) {
  constexpr int64_t kRows = 100, kUpdates = 20000;
  std::vector<int64_t> versions(kRows, 0), saved(kRows, 0);
  std::atomic<bool> has_ended{false};
  std::thread writer([&] {
    std::mt19937_64 random(3);
    for (int64_t i = 0; i < kUpdates; ++i) {
      int64_t& version = versions[random() % kRows];
      __atomic_store_n(&version, version + 1, __ATOMIC_RELAXED);
    }
    has_ended = true;
  });
  bool is_last = false;
  while (!is_last) {
    is_last = has_ended;
    for (const int64_t row : Changed(versions, saved, 0, kRows)) {
      saved[row] = __atomic_load_n(&versions[row], __ATOMIC_RELAXED);
    }
  }
  writer.join();
  EXPECT_EQ(saved, versions);
}

}  // namespace
}  // namespace recsync
