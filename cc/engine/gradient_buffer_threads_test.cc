// Many threads push to one gradient buffer: nothing is lost or applied twice.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "cc/engine/gradient_buffer.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

// Of one dense element and a table of `rows` numbers; sums are not divided.
GradientBufferOptions Options(int64_t capacity, int64_t rows) {
  GradientBufferOptions options;
  options.capacity = capacity;
  options.dense_size = 1;
  options.dense_count = 1;
  if (rows > 0) options.tables = {{rows, 1}};
  return options;
}

float DenseOf(const Aggregate& aggregate) {
  float dense;
  aggregate.WriteDense(0, 1, &dense);
  return dense;
}

// What a thread was given out.
struct Received {
  double dense = 0;
  std::map<int64_t, double> rows;
  Ids steps;

  void Add(const Aggregate& aggregate) {
    steps.push_back(aggregate.step());
    if (aggregate.has_dense()) dense += DenseOf(aggregate);
    const RowSums& sums = aggregate.rows(0);
    Floats values(sums.size());
    aggregate.WriteRows(0, 0, sums.size(), values.data());
    for (int64_t i = 0; i < sums.size(); ++i) rows[sums.id(i)] += values[i];
  }
  void Add(const Received& other) {
    dense += other.dense;
    for (const auto& [row, sum] : other.rows) rows[row] += sum;
    steps.insert(steps.end(), other.steps.begin(), other.steps.end());
  }
};

TEST(GradientBufferThreadsTest,
     AMillionPushesOfSixteenThreadsAreEachAppliedOnce) {
  constexpr int kThreads = 16;
  constexpr int kPushes = 62500;  // of a thread
  constexpr int64_t kRows = 40;
  GradientBuffer buffer(Options(/*capacity=*/7, kRows));
  std::vector<Received> received(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&buffer, &received, t] {
      for (int i = 0; i < kPushes; ++i) {
        // Integers, so that all sums are exact.
        const float dense = t + 1;
        const int64_t ids[] = {(i + t) % kRows, i % 3, i % 3};
        const float gradient[] = {1, 2, 3};
        GradientPush push;
        push.token_index = t * kPushes + i;
        push.pulled_step = buffer.applied();
        push.token_value = push.pulled_step;
        push.dense = &dense;
        push.tables.resize(1);
        push.tables[0].ids = ids;
        push.tables[0].n = 3;
        push.tables[0].push.gradient = gradient;
        std::unique_ptr<Aggregate> aggregate;
        if (!buffer.Push(push, &aggregate).ok()) return;
        if (aggregate == nullptr) continue;
        received[t].Add(*aggregate);
        if (!buffer.Applied(aggregate->step()).ok()) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Received all;
  for (const Received& one : received) all.Add(one);
  constexpr int64_t kAll = int64_t{kThreads} * kPushes;
  EXPECT_EQ(static_cast<int64_t>(all.steps.size()), kAll / 7);
  const std::unique_ptr<Aggregate> last = buffer.Flush();
  ASSERT_EQ(last != nullptr, kAll % 7 != 0);
  all.Add(*last);
  std::sort(all.steps.begin(), all.steps.end());
  for (size_t i = 0; i < all.steps.size(); ++i) {
    ASSERT_EQ(all.steps[i], static_cast<int64_t>(i) + 1);
  }
  EXPECT_NEAR(all.dense, kPushes * (kThreads * (kThreads + 1) / 2), 1e-3);
  std::map<int64_t, double> expected;
  for (int t = 0; t < kThreads; ++t) {
    for (int i = 0; i < kPushes; ++i) {
      expected[(i + t) % kRows] += 1;
      expected[i % 3] += 5;
    }
  }
  EXPECT_EQ(all.rows, expected);
  const GradientBufferState state = buffer.state();
  EXPECT_EQ(state.included, kAll);
  EXPECT_EQ(state.applied, state.step - 1);  // all but the flush
  EXPECT_EQ(state.staleness[StalenessCounters::kCount], kAll);
}

TEST(GradientBufferThreadsTest, ATokenThatTwoThreadsPushIsTakenOnce) {
  constexpr int kThreads = 8;
  constexpr int kSteps = 1000;
  GradientBufferOptions options = Options(/*capacity=*/kThreads, /*rows=*/0);
  options.drop_late = true;
  GradientBuffer buffer(options);
  std::vector<Floats> sums(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&buffer, &sums, t] {
      for (int step = 0; step < kSteps; ++step) {
        for (const int token : {t, (t + 1) % kThreads}) {
          const float dense = 1 << token;
          GradientPush push;
          push.token_index = step * kThreads + token;
          push.token_value = step;
          push.dense = &dense;
          std::unique_ptr<Aggregate> aggregate;
          if (!buffer.Push(push, &aggregate).ok()) return;
          if (aggregate == nullptr) continue;
          sums[t].push_back(DenseOf(*aggregate));
          EXPECT_TRUE(buffer.Applied(aggregate->step()).ok());
        }
        while (buffer.applied() <= step) std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t given_out = 0;
  for (const Floats& own : sums) {
    for (const float sum : own) {
      ++given_out;
      ASSERT_EQ(sum, (1 << kThreads) - 1);
    }
  }
  EXPECT_EQ(given_out, kSteps);
  const GradientBufferState state = buffer.state();
  EXPECT_EQ(state.included, kSteps * kThreads);
  EXPECT_EQ(state.late + state.duplicates, kSteps * kThreads);
}

}  // namespace
}  // namespace recsync
