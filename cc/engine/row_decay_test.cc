#include "cc/engine/row_decay.h"

#include <cmath>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "cc/engine/row_copy.h"
#include "cc/engine/row_gather.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr int64_t kWidth = 3;

// A table of ones whose rows decay when they are needed.
struct Table {
  explicit Table(int64_t rows)
      : values(rows * kWidth, 1.0f),
        logs(RowDecay::Size(rows), 0.0),
        decay(logs.data(), rows),
        rows(rows) {}

  void Touch(int64_t row) {
    decay.BringUpToDate(row, RowDecay::kLeastOfUpdate, &values[row * kWidth],
                        kWidth);
  }
  void Settle() {
    const double total = decay.total();
    SettleRows(decay, RowRounding(), values.data(), kWidth, 0, rows);
    decay.Settled(total);
  }

  std::vector<float> values;
  std::vector<double> logs;
  RowDecay decay;
  int64_t rows;
};

TEST(RowDecayTest, LazyDecayEqualsTheEagerRuleOver5000RandomTouches) {
  constexpr int64_t kRows = 40;
  std::mt19937 random(5);
  std::uniform_int_distribution<int64_t> any_row(0, kRows - 1);
  std::uniform_real_distribution<double> any_rate(0.0, 0.01);
  std::uniform_real_distribution<float> any_update(-1.0f, 1.0f);
  Table table(kRows);
  std::vector<double> eager(kRows * kWidth, 1.0);
  for (int touch = 0; touch < 5000; ++touch) {
    const double rate = any_rate(random);
    table.decay.Add(std::log1p(-rate));
    for (double& w : eager) w *= 1.0 - rate;
    const int64_t row = any_row(random);
    table.Touch(row);
    for (int64_t i = row * kWidth; i < (row + 1) * kWidth; ++i) {
      const float update = any_update(random);
      table.values[i] -= update;
      eager[i] -= update;
    }
    if (touch % 1000 != 999) continue;
    if (touch == 2999) table.Settle();
    // What a reader gets is what all rows would be.
    for (int64_t i = 0; i < kRows * kWidth; ++i) {
      EXPECT_NEAR(table.values[i] * table.decay.Factor(i / kWidth), eager[i],
                  1e-5)
          << "after touch " << touch;
    }
  }
  table.Settle();
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    EXPECT_NEAR(table.values[i], eager[i], 1e-5);
  }
}

// A factor so close to 1 rounds to 1 if it is applied at each step.
TEST(RowDecayTest, AMillionSmallDecaysOfATouchedRowAreExactTo1e5) {
  for (const double rate : {1e-8, 1e-6, 3e-6}) {
    Table table(2);
    for (int step = 0; step < 1000000; ++step) {
      table.decay.Add(std::log1p(-rate));
      table.Touch(0);
    }
    table.Settle();
    const double expected = std::exp(1e6 * std::log1p(-rate));
    EXPECT_NEAR(table.values[0] / expected, 1.0, 1e-5) << rate;
    EXPECT_NEAR(table.values[kWidth] / expected, 1.0, 1e-6) << rate;
  }
}

TEST(RowDecayTest, ARowThatIsNamedAfterAMillionLargeDecaysIsExact) {
  Table table(1);
  for (int step = 0; step < 1000000; ++step) {
    table.decay.Add(std::log1p(-0.01));
  }
  table.Touch(0);
  EXPECT_EQ(table.values[0], 0.0f);
  table.values[0] = 1.0f;
  table.decay.Add(std::log1p(-0.01));
  table.Touch(0);
  EXPECT_FLOAT_EQ(table.values[0], 0.99f);
}

TEST(RowDecayTest, SmallDecaysOfABfloat16RowAddUp) {
  std::vector<BFloat16> values(kWidth, ToBFloat16(1.0f));
  std::vector<double> logs(RowDecay::Size(1), 0.0);
  const RowDecay decay(logs.data(), 1);
  for (int step = 0; step < 10000; ++step) {
    decay.Add(std::log1p(-1e-4));
    decay.BringUpToDate(0, RowDecay::kLeastOfNarrowUpdate, values.data(),
                        kWidth);
  }
  SettleRows(decay, RowRounding(), values.data(), kWidth, 0, 1);
  EXPECT_NEAR(static_cast<float>(values[0]), std::exp(-1.0), 0.02);
}

// To the nearest, each of these would be no change at all.
TEST(RowDecayTest, SmallDecaysOfBfloat16RowsThatAreSettledOftenAddUp) {
  constexpr int64_t kRows = 300;
  for (float start = 1.0f; start < 1.95f; start += 0.1f) {
    std::vector<BFloat16> values(kRows * kWidth, ToBFloat16(start));
    std::vector<double> logs(RowDecay::Size(kRows), 0.0);
    const RowDecay decay(logs.data(), kRows);
    for (int settled = 0; settled < 500; ++settled) {
      for (int step = 0; step < 10; ++step) decay.Add(std::log1p(-3e-4));
      SettleRows(decay, RowRounding(), values.data(), kWidth, 0, kRows);
    }
    double sum = 0;
    for (const BFloat16 value : values) sum += static_cast<float>(value);
    const double expected = start * std::exp(5000 * std::log1p(-3e-4));
    EXPECT_NEAR(sum / (kRows * kWidth) / expected, 1.0, 0.02) << start;
  }
}

TEST(RowDecayTest, WhatIsSettledIsUpToDateUntilTheTableDecaysAgain) {
  Table table(3);
  EXPECT_TRUE(table.decay.is_settled());
  table.decay.Add(-0.5);
  EXPECT_FALSE(table.decay.is_settled());
  table.Settle();
  EXPECT_TRUE(table.decay.is_settled());
  for (int64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(table.decay.Factor(row), 1.0);
    EXPECT_FLOAT_EQ(table.values[row * kWidth], std::exp(-0.5));
  }
}

TEST(RowDecayTest, AGatherReadsRowsAsTheyAreDecayedAndLeavesThem) {
  Table table(4);
  std::vector<BFloat16> narrow(4 * kWidth, ToBFloat16(1.0f));
  table.decay.Add(std::log(0.5));
  table.Touch(1);
  table.decay.Add(std::log(0.25));
  RowReader reader;
  reader.values = table.values.data();
  reader.decay = table.decay;
  reader.rows = 4;
  reader.width = kWidth;
  const std::vector<int64_t> ids = {1, 0, 3};
  const std::vector<int32_t> pooled = {0, 1, 1};
  const std::vector<float> scales = {1.0f, 2.0f, 1.0f};
  std::vector<float> got(3 * kWidth);
  EXPECT_EQ(
      GatherBags(reader, ids.data(), 3, Bags(), 0, 3, got.data(), nullptr), -1);
  // The second row is decayed by a half already.
  for (const float value : got) EXPECT_FLOAT_EQ(value, 0.125f);
  const Bags bags{pooled.data(), scales.data()};
  EXPECT_EQ(GatherBags(reader, ids.data(), 3, bags, 0, 2, got.data(), nullptr),
            -1);
  EXPECT_FLOAT_EQ(got[0], 0.125f);
  EXPECT_FLOAT_EQ(got[kWidth], 3 * 0.125f);
  EXPECT_EQ(table.values[0], 1.0f);
  reader.values = nullptr;
  reader.narrow = narrow.data();
  EXPECT_EQ(
      GatherBags(reader, ids.data(), 3, Bags(), 1, 3, got.data(), nullptr), -1);
  EXPECT_FLOAT_EQ(got[kWidth], 0.125f);
}

TEST(RowDecayTest, RowsAreCopiedAsOfOneLogDecayWhateverEachHas) {
  Table table(3);
  table.decay.Add(std::log(0.5));
  CopiedDecay copied;
  copied.decay = table.decay;
  copied.total = table.decay.total();
  copied.width = kWidth;
  // This one goes on while the others are copied.
  table.decay.Add(std::log(0.5));
  table.Touch(2);
  std::vector<float> to(3 * kWidth);
  std::vector<RowField> fields(1);
  fields[0] = {reinterpret_cast<const char*>(table.values.data()),
               reinterpret_cast<char*>(to.data()), kWidth * sizeof(float)};
  const std::vector<int64_t> ids = {0, 2, 1};
  CopyRows(fields, ids.data(), 0, 3, table.values.data(), copied);
  for (const float value : to) EXPECT_FLOAT_EQ(value, 0.5f);
}

TEST(RowDecayTest, NoDecayIsLostBetweenThreadsThatTouchAndSettle) {
  constexpr int kThreads = 4, kSteps = 2000;
  Table table(5);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&table, thread] {
      for (int step = 0; step < kSteps; ++step) {
        table.decay.Add(std::log1p(-2e-4));
        const int64_t row = (thread + step) % 3;
        {
          RowLock lock(&RowLocks::Global().Of(table.values.data(), row));
          table.Touch(row);
          EXPECT_LE(table.decay.Factor(row), 1.0);
        }
        if (step % 500 == 0) table.Settle();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  table.Settle();
  const double expected = std::exp(kThreads * kSteps * std::log1p(-2e-4));
  for (const float value : table.values) {
    EXPECT_NEAR(value / expected, 1.0, 2e-5);
  }
}

}  // namespace
}  // namespace recsync
