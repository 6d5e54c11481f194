#include "cc/engine/row_update.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "cc/engine/row_checks.h"
#include "cc/engine/row_gather.h"
#include "cc/engine/update_rules.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

const auto kSerial = [](int64_t n, int64_t, const auto& f) { f(0, n); };

struct Table {
  Table(int64_t rows, int64_t width)
      : values(rows * width, 1.0f),
        accumulator(rows * width, 0.1f),
        versions(rows, 0),
        counters(StalenessCounters::kSize, 0),
        last_periods(rows, 0) {
    view.values = values.data();
    view.accumulators[0] = accumulator.data();
    view.versions = versions.data();
    view.counters = counters.data();
    view.last_periods = last_periods.data();
    view.rows = rows;
    view.width = width;
  }
  std::vector<float> values;
  std::vector<float> accumulator;
  std::vector<int64_t> versions;
  std::vector<int64_t> counters;
  std::vector<int32_t> last_periods;
  TableView view;
};

template <typename Rule>
void Push(const Rule& rule, const UpdateOptions& options, int64_t step,
          Table* table, const std::vector<int64_t>& ids, const RowPush& push) {
  RowPartitions partitions;
  partitions.Build(ids.data(), static_cast<int64_t>(ids.size()), kSerial);
  const RowUpdate<Rule> update(rule, options, step, table->view, push);
  update.Run(partitions, 0, partitions.count());
}

// Pushes at random to tables of many widths, and the same in doubles.
template <typename Rule>
void ExpectTheRuleInDoubles() {
  constexpr int64_t kRows = 50, kPositions = 3000, kBags = 700;
  Rule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  UpdateOptions options;
  options.swap = {3, 0.5};
  options.weight.decay = StalenessDecay::kInversePower;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  // Widths that are compiled in, and others.
  for (int64_t width : {1, 3, 8, 16, 17, 32, 64}) {
    Table table(kRows, width);
    const int64_t slots = Rule::kOnePerRow ? 1 : width;
    std::vector<double> w(kRows * width, 1.0), v(kRows * slots, 0.1);
    for (int64_t step = 1; step <= 7; ++step) {
      std::vector<int64_t> ids(kPositions), pulled(kPositions);
      std::vector<int32_t> bags(kPositions);
      std::vector<float> scales(kPositions), gradient(kBags * width);
      for (int64_t p = 0; p < kPositions; ++p) {
        ids[p] = random() % (kRows - 1);  // the last row is never named
        pulled[p] = random() % (table.versions[ids[p]] + 1);
        bags[p] = p * kBags / kPositions;
        scales[p] = 0.05f * normal(random);
      }
      for (float& g : gradient) g = normal(random);
      std::map<int64_t, std::vector<double>> sums;
      std::map<int64_t, int64_t> oldest;
      for (int64_t p = 0; p < kPositions; ++p) {
        std::vector<double>& sum = sums[ids[p]];
        sum.resize(width, 0.0);
        for (int64_t i = 0; i < width; ++i) {
          sum[i] += double{scales[p]} * gradient[bags[p] * width + i];
        }
        const auto known = oldest.emplace(ids[p], pulled[p]).first;
        known->second = std::min(known->second, pulled[p]);
      }
      if (step % 3 == 0) {
        for (double& value : v) value *= 0.5;  // the eager rule
      }
      for (const auto& [row, sum] : sums) {
        const double tau = table.versions[row] - oldest[row] + 1;
        const double rho = 1.0 / (tau * tau);
        double* const own = &v[row * slots];
        for (int64_t i = 0; i < width; ++i) {
          // Each of them alone, or the mean of all of them.
          own[i % slots] += std::pow(rho * sum[i], 2) * slots / width;
        }
        for (int64_t i = 0; i < width; ++i) {
          w[row * width + i] -=
              0.1 * rho * sum[i] / std::sqrt(own[i % slots] + 1e-7);
        }
      }
      RowPush push;
      push.gradient = gradient.data();
      push.bags = {bags.data(), scales.data()};
      push.pulled = pulled.data();
      Push(rule, options, step, &table, ids, push);
    }
    for (int64_t i = 0; i < kRows * width; ++i) {
      ASSERT_NEAR(table.values[i], w[i], 1e-4) << "width " << width;
    }
    v.resize(kRows * width, 0.1);  // what no row's accumulator is stays
    for (int64_t i = 0; i < kRows * width; ++i) {
      // The last row, which is not named, has not been decayed yet.
      if (i / slots == kRows - 1) continue;
      double expected = v[i];
      if (i < kRows * slots) {
        expected /= std::pow(0.5, 2 - table.last_periods[i / slots]);
      }
      ASSERT_NEAR(table.accumulator[i], expected, 1e-4 * expected + 1e-6)
          << "width " << width;
    }
    EXPECT_EQ(table.versions[0], 7);
    EXPECT_EQ(table.versions[kRows - 1], 0);
  }
}

// The row of keys without one is named by such keys, and by those that lost
// their rows since they were pulled.
TEST(RowUpdateTest, GradientsWithoutALifeLeaveOthersOfTheirRowToBeApplied) {
  constexpr int64_t kWidth = 3;
  const int64_t live = kVersionOfUnknown + 5;
  const std::vector<int64_t> ids = {0, 0, 0};
  const std::vector<float> gradient = {1, 1, 1, 2, 2, 2, 4, 4, 4};
  for (size_t lost = 0; lost < ids.size(); ++lost) {
    Table table(1, kWidth);
    table.versions[0] = live;
    std::vector<int64_t> pulled = {live, live - 2, live};
    pulled[lost] = kNoLife;
    RowPush push;
    push.gradient = gradient.data();
    push.pulled = pulled.data();
    SgdRule rule;
    rule.learning_rate = 1.0f;
    Push(rule, {}, 1, &table, ids, push);
    const float sum = 7.0f - gradient[lost * kWidth];
    EXPECT_EQ(table.values, std::vector<float>(kWidth, 1.0f - sum));
    EXPECT_EQ(table.versions[0], live + 1);
  }
}

TEST(RowUpdateTest, AVersionStaysTheLargestThatThereIs) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Table table(1, 1);
  table.versions[0] = kMost - 1;
  const std::vector<float> gradient = {1.0f};
  SgdRule rule;
  rule.learning_rate = 0.25f;
  RowPush push;
  push.gradient = gradient.data();
  const int64_t life = FirstOfNextLife(kMost - 1 - (int64_t{1} << kLifeBits));
  push.pulled = &life;
  for (int64_t step = 1; step <= 3; ++step) {
    Push(rule, {}, step, &table, {0}, push);
    EXPECT_EQ(table.values[0], 1.0f - 0.25f * step);
    EXPECT_EQ(table.versions[0], kMost);
  }
  EXPECT_EQ(StalenessCounters(table.counters.data()).count(), 3);
}

TEST(RowUpdateTest, BagsDuplicatesWeightsAndSwapAreThoseOfTheRuleInDoubles) {
  ExpectTheRuleInDoubles<AdagradRule>();
}

TEST(RowUpdateTest, OneAccumulatorOfARowIsThatOfTheRuleInDoublesToo) {
  ExpectTheRuleInDoubles<RowwiseAdagradRule>();
}

TEST(RowUpdateTest, RowsThatAreNotFiniteAreSkippedOrFound) {
  Table table(4, 2);
  const std::vector<int64_t> ids = {2, 0, 2, 1};
  const std::vector<float> gradient = {1, 1, 1, 1, NAN, 1, 1, 1};
  RowPush push;
  push.gradient = gradient.data();
  UpdateOptions options;
  options.nonfinite = Nonfinite::kSkip;
  Push(SgdRule{0.5f}, options, 1, &table, ids, push);
  EXPECT_EQ(table.versions, (std::vector<int64_t>{1, 1, 0, 0}));
  EXPECT_EQ(StalenessCounters(table.counters.data()).skipped(), 1);
  EXPECT_EQ(StalenessCounters(table.counters.data()).count(), 2);
  RowPartitions partitions;
  partitions.Build(ids.data(), 4, kSerial);
  EXPECT_EQ(FindNonfiniteRow(push, 2, partitions), 2);
  const std::vector<float> good(8, 1.0f);
  push.gradient = good.data();
  EXPECT_EQ(FindNonfiniteRow(push, 2, partitions), -1);
}

TEST(RowUpdateTest,
     PushesAndGathersAtOnceLoseNothingAndSeeRowsWithTheirVersion) {
  constexpr int64_t kRows = 40, kWidth = 16, kRounds = 60;
  Table table(kRows, kWidth);
  std::fill(table.values.begin(), table.values.end(), 0.0f);
  const std::vector<float> gradient(kRows * kWidth, 1.0f);
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::vector<int64_t> ids(kRows);
      for (int64_t i = 0; i < kRows; ++i) ids[i] = (i * 7 + t) % kRows;
      RowPush push;
      push.gradient = gradient.data();
      const std::vector<int64_t> pulled(kRows, 0);
      push.pulled = pulled.data();
      for (int64_t round = 1; round <= kRounds; ++round) {
        // As the kernel does: checked without the rows' locks.
        EXPECT_EQ(FirstNotAVersion(ids.data(), pulled.data(),
                                   table.versions.data(), 0, kRows),
                  -1);
        // Each push adds 1 to the values and to the versions.
        Push(SgdRule{-1.0f}, UpdateOptions(), round, &table, ids, push);
      }
    });
  }
  std::thread reader([&] {
    RowReader rows;
    rows.values = table.values.data();
    rows.versions = table.versions.data();
    rows.rows = kRows;
    rows.width = kWidth;
    rows.locks = true;
    std::vector<int64_t> ids(kRows), versions(kRows);
    for (int64_t i = 0; i < kRows; ++i) ids[i] = i;
    std::vector<float> to(kRows * kWidth);
    while (!end) {
      EXPECT_EQ(GatherBags(rows, ids.data(), kRows, Bags(), 0, kRows, to.data(),
                           versions.data()),
                -1);
      for (int64_t i = 0; i < kRows * kWidth; ++i) {
        ASSERT_EQ(to[i], versions[i / kWidth]);
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  end = true;
  reader.join();
  for (int64_t version : table.versions) EXPECT_EQ(version, 3 * kRounds);
  for (float value : table.values) EXPECT_EQ(value, 3 * kRounds);
  EXPECT_EQ(StalenessCounters(table.counters.data()).count(),
            3 * kRounds * kRows);
}

TEST(RowUpdateTest, AllRowsMoveAsLongAsStepsCanBeCounted) {
  constexpr int64_t kRows = 4, kMost = std::numeric_limits<int32_t>::max();
  Table table(kRows, 1);
  std::fill(table.accumulator.begin(), table.accumulator.end(), 0.1f);
  std::vector<float> velocities(kRows, 0.2f);
  std::vector<int32_t> last_steps(kRows, kMost - 4);
  table.view.accumulators[1] = velocities.data();
  table.view.last_steps = last_steps.data();
  AdamRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  rule.lazy = false;
  std::vector<double> w(kRows, 1.0), m(kRows, 0.1), v(kRows, 0.2);
  const std::vector<float> gradient = {0.3f};
  RowPush push;
  push.gradient = gradient.data();
  for (int64_t step = kMost - 3; step <= kMost + 4; ++step) {
    const int64_t named = step % kRows;
    for (int64_t row = 0; row < kRows; ++row) {
      // Whether a row has made a later step is not known of those not named.
      if (row != named && step > kMost) continue;
      const double g = row == named ? gradient[0] : 0.0;
      m[row] = 0.9 * m[row] + 0.1 * g;
      v[row] = 0.999 * v[row] + 0.001 * g * g;
      w[row] -= 0.1 * m[row] / (std::sqrt(v[row]) + 1e-7);
    }
    rule.Begin(step);
    RowPartitions partitions;
    partitions.Build(&named, 1, kSerial);
    const RowUpdate<AdamRule> update(rule, UpdateOptions(), step, table.view,
                                     push);
    update.Run(partitions, 0, partitions.count());
    update.RunRest(0, kRows);
    for (int64_t row = 0; row < kRows; ++row) {
      ASSERT_NEAR(table.values[row], w[row], 1e-5) << step << ", " << row;
      ASSERT_EQ(last_steps[row], std::min(step, kMost));
    }
  }
}

// Rows that were last touched at any step, those that a key has just been given
// at none, make all steps up to that of a push; compared with rows that make
// each of them, in doubles.
void ExpectRowsWithoutMomentumStayWhereTheyAre(const Swap& swap, bool is_narrow,
                                               bool rest,
                                               bool several_counters) {
  constexpr int64_t kRows = 6, kWidth = 5, kStep = 30000;
  Table table(kRows, kWidth);
  std::vector<float> velocities(kRows * kWidth);
  std::vector<int32_t> last_steps = {0,         1,        17, kStep - 3000,
                                     kStep - 2, kStep - 1};
  std::vector<BFloat16> narrow(kRows * kWidth);
  const RowRounding rounding;
  std::vector<double> w, v;
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    narrow[i] = ToBFloat16(0.3f * i - 2.0f);
    table.values[i] = static_cast<float>(narrow[i]);
    w.push_back(table.values[i]);
    velocities[i] = 0.1f * (1 + i % 7);
    v.push_back(velocities[i]);
    // In the last row a single element moves.
    table.accumulator[i] = i == kRows * kWidth - 1 ? 0.25f : 0.0f;
  }
  std::vector<double> m(table.accumulator.begin(), table.accumulator.end());
  if (is_narrow) {
    table.view.values = nullptr;
    table.view.narrow = narrow.data();
    table.view.rounding = &rounding;
  }
  table.view.accumulators[1] = velocities.data();
  table.view.last_steps = last_steps.data();
  AdamRule rule;
  rule.learning_rate = 0.01f;
  rule.beta_1 = rule.beta_2 = 0.9995;
  rule.epsilon = 1e-7f;
  rule.lazy = false;
  rule.several_counters = several_counters;
  UpdateOptions options;
  options.swap = swap;
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t before = table.last_periods[row] =
        static_cast<int32_t>(swap.enabled() ? (kStep / swap.period) - 1 : 0);
    ASSERT_GE(before, 0);
    for (int64_t s = last_steps[row] + 1; s <= kStep; ++s) {
      const bool pushed = !rest && s == kStep;
      const double g = pushed ? 0.5 : 0.0;
      const double rate =
          0.01 * std::sqrt(1 - std::pow(0.9995, s)) / (1 - std::pow(0.9995, s));
      for (int64_t i = row * kWidth; i < (row + 1) * kWidth; ++i) {
        // The decay that a period has brought since enters the first step.
        const bool decays = swap.enabled() && s == last_steps[row] + 1;
        m[i] = 0.9995 * m[i] + 0.0005 * g;
        v[i] = (decays ? swap.decay : 1.0) * 0.9995 * v[i] + 0.0005 * g * g;
        w[i] -= rate * m[i] / (std::sqrt(v[i]) + 1e-7);
      }
    }
  }
  rule.Begin(kStep);
  std::vector<int64_t> ids;
  if (!rest) ids = {0, 1, 2, 3, 4, 5};
  const std::vector<float> gradient(kRows * kWidth, 0.5f);
  RowPush push;
  push.gradient = gradient.data();
  RowPartitions partitions;
  partitions.Build(ids.data(), static_cast<int64_t>(ids.size()), kSerial);
  const RowUpdate<AdamRule> update(rule, options, kStep, table.view, push);
  update.Run(partitions, 0, partitions.count());
  if (rest) update.RunRest(0, kRows);
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    const int64_t row = i / kWidth;
    ASSERT_EQ(last_steps[row], kStep);
    // A decay of many steps is one product, not as many with an error each.
    ASSERT_NEAR(velocities[i], v[i], 4e-7 * v[i]) << "row " << row;
    ASSERT_NEAR(table.accumulator[i], m[i], 1e-6 * m[i]) << "row " << row;
    const float value =
        is_narrow ? static_cast<float>(narrow[i]) : table.values[i];
    const double error = is_narrow ? std::abs(w[i]) / 128 : 2e-6;
    ASSERT_NEAR(value, w[i], error) << "row " << row;
    if (rest && row < kRows - 1) {
      ASSERT_EQ(value, w[i]) << "row " << row;
    }
  }
}

TEST(RowUpdateTest, RowsWithoutMomentumStayWhereTheyAreForAnyNumberOfSteps) {
  const Swap swaps[] = {Swap(), Swap{100, 0.5}};
  for (const Swap& swap : swaps) {
    for (int64_t choices = 0; choices < 8; ++choices) {
      SCOPED_TRACE(choices);
      ExpectRowsWithoutMomentumStayWhereTheyAre(
          swap, (choices & 1) != 0, (choices & 2) != 0, (choices & 4) != 0);
    }
  }
}

TEST(RowUpdateTest, ARowOfBFloat16IsTheRowOfFloatsRoundedUpOrDown) {
  constexpr int64_t kWidth = 13;
  Table wide(3, kWidth), narrow(3, kWidth);
  std::vector<BFloat16> values(3 * kWidth);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = ToBFloat16(0.3f * i);
    wide.values[i] = static_cast<float>(values[i]);
  }
  const std::vector<BFloat16> before = values;
  const RowRounding rounding({{0, 1, 2, 77}});
  narrow.view.values = nullptr;
  narrow.view.narrow = values.data();
  narrow.view.rounding = &rounding;
  std::vector<float> gradient(kWidth);
  for (int64_t i = 0; i < kWidth; ++i) gradient[i] = 0.1f * i - 0.5f;
  RowPush push;
  push.gradient = gradient.data();
  AdagradRule rule;
  rule.learning_rate = 0.1f;
  rule.epsilon = 1e-7f;
  for (Table* table : {&wide, &narrow}) {
    table->versions[1] = 6;
    Push(rule, UpdateOptions(), 1, table, {1}, push);
  }
  std::vector<BFloat16> expected = before;
  rounding.Round(1, /*version=*/6, /*step=*/0, wide.values.data() + kWidth,
                 kWidth, expected.data() + kWidth);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i].bits, expected[i].bits) << i;
  }
  EXPECT_EQ(wide.accumulator, narrow.accumulator);
}

TEST(RowUpdateTest, RowsOfBFloat16ThatMoveUnnamedMoveAsFarOnAverage) {
  constexpr int64_t kRows = 40, kWidth = 25;
  Table wide(kRows, kWidth), narrow(kRows, kWidth);
  std::vector<BFloat16> values(kRows * kWidth, ToBFloat16(1.0f));
  const RowRounding rounding;
  narrow.view.values = nullptr;
  narrow.view.narrow = values.data();
  narrow.view.rounding = &rounding;
  AdamRule rule;
  rule.beta_1 = 0.99;
  rule.learning_rate = 1e-3f;
  rule.epsilon = 1e-7f;
  rule.lazy = false;
  std::vector<std::vector<float>> velocities(
      2, std::vector<float>(kRows * kWidth, 1.0f));
  std::vector<std::vector<int32_t>> steps(2, std::vector<int32_t>(kRows, 0));
  Table* const tables[] = {&wide, &narrow};
  for (int t = 0; t < 2; ++t) {
    tables[t]->view.accumulators[1] = velocities[t].data();
    tables[t]->view.last_steps = steps[t].data();
    std::fill(tables[t]->accumulator.begin(), tables[t]->accumulator.end(),
              -1.0f);
  }
  // Steps of at most an eighth of the last place, 1/128.
  for (int64_t step = 1; step <= 300; ++step) {
    rule.Begin(1000000 + step);
    for (int t = 0; t < 2; ++t) {
      const RowUpdate<AdamRule> update(rule, UpdateOptions(), 1000000 + step,
                                       tables[t]->view, RowPush());
      if (step == 1) steps[t].assign(kRows, 1000000);
      update.RunRest(0, kRows);
    }
  }
  double sum = 0.0;
  for (const BFloat16 value : values) sum += static_cast<float>(value);
  const double mean = sum / values.size(), moved = wide.values[0] - 1.0;
  EXPECT_GT(moved, 10.0 / 128);
  // A step of p last places has at most that as its variance.
  const double deviation = std::sqrt(moved / 128 / values.size());
  EXPECT_NEAR(mean, wide.values[0], 5 * deviation);
}

TEST(RowGatherTest, BagsAreSumsOfScaledRowsAndABadRowIsNamed) {
  Table table(4, 3);
  for (size_t i = 0; i < table.values.size(); ++i) table.values[i] = i;
  table.versions = {5, 6, 7, 8};
  RowReader rows;
  rows.values = table.values.data();
  rows.versions = table.versions.data();
  rows.rows = 4;
  rows.width = 3;
  const std::vector<int32_t> of = {0, 2, 2};
  const std::vector<float> scales = {2, 1, -1};
  std::vector<int32_t> ids = {1, 3, 0};
  std::vector<float> to(9, NAN);
  std::vector<int64_t> versions(3);
  const Bags bags = {of.data(), scales.data()};
  EXPECT_EQ(
      GatherBags(rows, ids.data(), 3, bags, 0, 3, to.data(), versions.data()),
      -1);
  EXPECT_EQ(to, (std::vector<float>{6, 8, 10, 0, 0, 0, 9, 9, 9}));
  EXPECT_EQ(versions, (std::vector<int64_t>{6, 8, 5}));
  RowReader unversioned = rows;
  unversioned.versions = nullptr;
  std::vector<float> same(9, NAN);
  EXPECT_EQ(
      GatherBags(unversioned, ids.data(), 3, bags, 0, 3, same.data(), nullptr),
      -1);
  EXPECT_EQ(same, to);
  for (int32_t bad : {-1, 4}) {
    ids[2] = bad;
    EXPECT_EQ(
        GatherBags(rows, ids.data(), 3, bags, 0, 3, to.data(), versions.data()),
        2);
  }
}

TEST(RowChecksTest, TheFirstBadRowAndVersionAreFound) {
  const std::vector<int64_t> ids = {0, 4, 2, 5, -1};
  EXPECT_EQ(FirstNotARow(ids.data(), 5, 5), 3);
  EXPECT_EQ(FirstNotARow(ids.data(), 3, 5), -1);
  EXPECT_EQ(FirstNotARow(ids.data() + 4, 1, 5), 0);
  EXPECT_EQ(FirstNotARow(ids.data(), 1, 0), 0);
  const std::vector<int64_t> versions = {3, 0, 7, 0, 1}, pulled = {3, 0, 8};
  EXPECT_EQ(FirstNotAVersion(ids.data(), pulled.data(), versions.data(), 0, 2),
            -1);
  EXPECT_EQ(FirstNotAVersion(ids.data(), pulled.data(), versions.data(), 0, 3),
            2);
  EXPECT_FALSE(WasAVersion(-1, 3));
}

}  // namespace
}  // namespace recsync
