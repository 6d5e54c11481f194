#include "cc/engine/row_locks.h"

#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

TEST(RowLocksTest, ARowsValueAndVersionAreSeenTogether) {
  struct Row {
    int64_t value = 0;
    int64_t version = 0;
  };
  constexpr int kRows = 5, kThreads = 4, kRounds = 5000;
  std::vector<Row> table(kRows);
  RowLocks& locks = RowLocks::Global();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        const int row = i % kRows;
        RowLock lock(&locks.Of(table.data(), row));
        EXPECT_EQ(table[row].value, table[row].version);
        ++table[row].value;
        ++table[row].version;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Row& row : table) {
    EXPECT_EQ(row.version, kThreads * kRounds / kRows);
  }
}

TEST(RowLocksTest, ARowHasOneLockAndManyRowsHaveMany) {
  RowLocks locks;
  int table = 0, other = 0;
  std::set<SpinLock*> of_table, of_other;
  for (int64_t row = 0; row < 1000; ++row) {
    EXPECT_EQ(&locks.Of(&table, row), &locks.Of(&table, row));
    of_table.insert(&locks.Of(&table, row));
    of_other.insert(&locks.Of(&other, row));
  }
  EXPECT_GT(of_table.size(), 900);
  EXPECT_GT(of_other.size(), 900);
}

}  // namespace
}  // namespace recsync
