#include "cc/engine/row_copy.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "cc/engine/row_locks.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

template <typename T>
RowField FieldOf(const std::vector<T>& from, std::vector<T>* to,
                 int64_t width) {
  RowField field;
  field.from = reinterpret_cast<const char*>(from.data());
  field.to = reinterpret_cast<char*>(to->data());
  field.bytes = width * static_cast<int64_t>(sizeof(T));
  return field;
}

TEST(RowCopyTest, RowsAreCopiedWithWhatLiesBesideThemInTheOrderGiven) {
  const std::vector<float> values = {0, 1, 10, 11, 20, 21, 30, 31};
  const std::vector<int64_t> versions = {5, 6, 7, 8};
  const std::vector<int64_t> ids = {3, 0, 3};
  std::vector<float> copied(6, -1);
  std::vector<int64_t> copied_versions(3, -1);
  CopyRows(
      {FieldOf(values, &copied, 2), FieldOf(versions, &copied_versions, 1)},
      ids.data(), 0, 3, nullptr);
  EXPECT_EQ(copied, (std::vector<float>{30, 31, 0, 1, 30, 31}));
  EXPECT_EQ(copied_versions, (std::vector<int64_t>{8, 5, 8}));
}

TEST(RowCopyTest, OnlyThePositionsAskedForAreWritten) {
  const std::vector<int64_t> values = {1, 2, 3};
  const std::vector<int64_t> ids = {2, 1, 0};
  std::vector<int64_t> copied(3, -1);
  CopyRows({FieldOf(values, &copied, 1)}, ids.data(), 1, 2, nullptr);
  EXPECT_EQ(copied, (std::vector<int64_t>{-1, 2, -1}));
}

TEST(RowCopyTest, WhatIsCopiedOfARowIsOfOneMoment) {
  constexpr int64_t kRows = 3, kWidth = 5, kRounds = 2000;
  std::vector<int64_t> values(kRows * kWidth, 0), versions(kRows, 0);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) {
      for (int64_t row = 0; row < kRows; ++row) {
        const RowLock lock(&RowLocks::Global().Of(values.data(), row));
        ++versions[row];
        for (int64_t i = 0; i < kWidth; ++i) ++values[row * kWidth + i];
      }
    }
  });
  const std::vector<int64_t> ids = {0, 1, 2, 1};
  std::vector<int64_t> copied(ids.size() * kWidth), seen(ids.size());
  for (int64_t round = 0; round < kRounds; ++round) {
    CopyRows({FieldOf(values, &copied, kWidth), FieldOf(versions, &seen, 1)},
             ids.data(), 0, static_cast<int64_t>(ids.size()), values.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int64_t j = 0; j < kWidth; ++j) {
        ASSERT_EQ(copied[i * kWidth + j], seen[i]);
      }
    }
  }
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace recsync
