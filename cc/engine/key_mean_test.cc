#include "cc/engine/key_mean.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cc/engine/key_table.h"
#include "cc/engine/key_table_testing.h"
#include "cc/engine/simulation_length_testing.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr int64_t kWidth = 3;

// A keyed table with values of its own and the state of a pass.
struct Averaged {
  Averaged(int64_t rows, const KeyOptions& options)
      : keyed(rows, options),
        values(kWidth * rows, 0.0f),
        state(KeyMean::StateSize(kWidth), 0.0) {}

  void Advance(int64_t rows, int64_t tick = 1, double* logs = nullptr) {
    const RowDecay decay =
        logs == nullptr ? RowDecay() : RowDecay(logs, keyed.rows());
    KeyTable table = keyed.Table();
    table.Prepare();
    KeyMean(state.data(), kWidth)
        .Advance(table, rows, tick, decay, values.data());
  }
  // Rows that have keys get random values.
  void Draw(std::mt19937_64* random) {
    std::normal_distribution<float> normal;
    for (int64_t row = keyed.partitions(); row < keyed.rows(); ++row) {
      for (int64_t i = 0; i < kWidth; ++i) {
        values[kWidth * row + i] = keyed.has_key(row) ? normal(*random) : 99.0f;
      }
    }
  }
  // By going through all rows.
  std::vector<double> Expected() const {
    std::vector<double> sums(kWidth, 0.0);
    int64_t count = 0;
    for (int64_t row = 0; row < keyed.rows(); ++row) {
      if (!keyed.has_key(row)) continue;
      ++count;
      for (int64_t i = 0; i < kWidth; ++i) sums[i] += values[kWidth * row + i];
    }
    for (double& sum : sums)
      sum /= static_cast<double>(std::max<int64_t>(count, 1));
    return sums;
  }
  void ExpectMeanInReservedRows(const std::vector<double>& expected) const {
    for (int64_t row = 0; row < keyed.partitions(); ++row) {
      for (int64_t i = 0; i < kWidth; ++i) {
        EXPECT_NEAR(values[kWidth * row + i], expected[i], 1e-6);
      }
    }
  }

  OwnedKeyTable keyed;
  std::vector<float> values;
  std::vector<double> state;
};

KeyOptions Partitions(int64_t partitions) {
  KeyOptions options;
  options.partitions = partitions;
  return options;
}

std::vector<int64_t> Keys(int64_t n) {
  std::vector<int64_t> keys(n);
  for (int64_t i = 0; i < n; ++i) keys[i] = i * 7919 - 100;
  return keys;
}

TEST(KeyMeanTest, ReservedRowsGetTheMeanOfRowsThatHaveKeys) {
  std::mt19937_64 random(3);
  for (const int64_t n : {0, 1, 5, 60}) {
    Averaged averaged(100, Partitions(4));
    if (n > 0) averaged.keyed.Train(Keys(n));
    averaged.Draw(&random);
    averaged.Advance(100);
    averaged.ExpectMeanInReservedRows(averaged.Expected());
  }
}

TEST(KeyMeanTest, APassGoesOnWhereTheLastCallStoppedAndEndsWithOneCall) {
  std::mt19937_64 random(4);
  Averaged averaged(41, Partitions(1));
  averaged.keyed.Train(Keys(40));
  averaged.Draw(&random);
  const std::vector<double> expected = averaged.Expected();
  const std::vector<double> zeros(kWidth, 0.0);
  for (int call = 0; call < 3; ++call) {
    averaged.Advance(10);
    averaged.ExpectMeanInReservedRows(zeros);
  }
  averaged.Advance(1000);
  averaged.ExpectMeanInReservedRows(expected);
  // A pass that was ended by this call would have begun another one.
  for (const double number : averaged.state) EXPECT_EQ(number, 0.0);
  averaged.Draw(&random);
  for (int call = 0; call < 3; ++call) averaged.Advance(10);
  averaged.ExpectMeanInReservedRows(expected);
  averaged.Advance(10);
  averaged.ExpectMeanInReservedRows(averaged.Expected());
}

TEST(KeyMeanTest, ManyRowsWithoutKeysCountAsOne) {
  Averaged averaged(1 + 16 * KeyMean::kFreeRows, Partitions(1));
  averaged.keyed.Train(Keys(1));
  averaged.values[kWidth] = 5.0f;
  averaged.Advance(15);
  EXPECT_EQ(averaged.values[0], 0.0f);
  averaged.Advance(2);
  EXPECT_EQ(averaged.values[0], 5.0f);
}

TEST(KeyMeanTest, RowsOfExpiredKeysAreLeftOut) {
  KeyOptions options = Partitions(1);
  options.max_idle = 3;
  Averaged averaged(10, options);
  averaged.keyed.Train(1);
  averaged.keyed.Train(2);
  averaged.values[kWidth] = 1.0f;
  averaged.values[2 * kWidth] = 2.0f;
  for (const auto& [tick, mean] : {std::pair{4, 1.5f}, {5, 2.0f}, {6, 0.0f}}) {
    averaged.Advance(10, tick);
    EXPECT_EQ(averaged.values[0], mean) << tick;
  }
}

TEST(KeyMeanTest, PendingDecayOfRowsIsInTheMeanWhichHasNonePending) {
  Averaged averaged(4, Partitions(1));
  averaged.keyed.Train({1, 2});
  std::vector<double> logs = {0.0, 0.0, -0.5, 0.0, -0.7, 0.0};
  averaged.values[kWidth] = 1.0f;
  averaged.values[2 * kWidth] = 3.0f;
  averaged.Advance(10, 1, logs.data());
  EXPECT_NEAR(averaged.values[0], (std::exp(-0.7) + 3 * std::exp(-0.2)) / 2,
              1e-6);
  EXPECT_EQ(logs[0], -0.7);
  EXPECT_EQ(averaged.values[kWidth], 1.0f);
}

TEST(KeyMeanTest, RowsOfBFloat16HaveTheNearestToTheMean) {
  OwnedKeyTable keyed(300, Partitions(1));
  keyed.Train(Keys(299));
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal(10.0f, 1.0f);
  std::vector<BFloat16> values(300);
  double sum = 0.0;
  for (int64_t row = 1; row < 300; ++row) {
    values[row] = ToBFloat16(normal(random));
    sum += static_cast<float>(values[row]);
  }
  std::vector<double> state(KeyMean::StateSize(1), 0.0);
  KeyMean(state.data(), 1)
      .Advance(keyed.Table(), 300, 1, RowDecay(), values.data());
  EXPECT_EQ(values[0].bits, ToBFloat16(static_cast<float>(sum / 299)).bits);
}

TEST(KeyMeanTest, VersionsOfReservedRowsRiseInTheirLifeWithEachMean) {
  Averaged averaged(20, Partitions(2));
  averaged.keyed.Train(Keys(3));
  const std::vector<int64_t> before = averaged.keyed.versions;
  for (int pass = 1; pass <= 3; ++pass) {
    averaged.Advance(20);
    for (int64_t row = 0; row < 20; ++row) {
      EXPECT_EQ(averaged.keyed.versions[row], before[row] + (row < 2) * pass);
    }
  }
  EXPECT_EQ(LifeOf(averaged.keyed.versions[0]), LifeOf(kVersionOfUnknown));
}

TEST(KeyMeanTest, AnyStateEndsInAMean) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const double number : {-1.0, 1e300, kInfinity, -kInfinity, kNaN, 7.5}) {
    Averaged averaged(20, Partitions(1));
    averaged.keyed.Train(Keys(9));
    averaged.values[kWidth] = 9.0f;
    averaged.state.assign(averaged.state.size(), number);
    averaged.Advance(20);
    averaged.Advance(20);
    EXPECT_EQ(averaged.values[0], 1.0f) << number;
  }
}

// What is added up by two threads at once, or skipped, would show.
TEST(KeyMeanTest, ThreadsThatAdvanceAtOnceMakeNoMeanOfPartsOfPasses) {
  constexpr int kThreads = 8;
  // 150 rows that have keys and 48 that have none, by 7 that have keys.
  constexpr int64_t kCallsOfPass =
      (150 * KeyMean::kFreeRows + 48 - 1) / (7 * KeyMean::kFreeRows) + 1;
  std::mt19937_64 random(6);
  Averaged averaged(200, Partitions(2));
  averaged.keyed.Train(Keys(150));
  averaged.Draw(&random);
  const std::vector<double> expected = averaged.Expected();
  averaged.Advance(200);
  averaged.ExpectMeanInReservedRows(expected);
  const int64_t first = averaged.keyed.versions[0];
  const int64_t calls = 100 + SimulationLength(100000) / kThreads;
  std::atomic<int64_t> wrong{0};
  std::atomic<int> there{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      ++there;
      while (there < kThreads) std::this_thread::yield();
      for (int64_t call = 0; call < calls; ++call) {
        averaged.Advance(7);
        RowLock lock(&RowLocks::Global().Of(averaged.values.data(), 0));
        for (int64_t i = 0; i < kWidth; ++i) {
          wrong += std::abs(averaged.values[i] - expected[i]) > 1e-6;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  // However often threads found another one at it, the pass goes on.
  for (int64_t call = 0; call < kCallsOfPass; ++call) averaged.Advance(7);
  averaged.ExpectMeanInReservedRows(expected);
  const int64_t passes = averaged.keyed.versions[0] - first;
  EXPECT_GT(passes, 0);
  EXPECT_LE(passes, kThreads * calls / kCallsOfPass + 1);
}

}  // namespace
}  // namespace recsync
