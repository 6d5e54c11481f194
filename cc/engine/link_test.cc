#include "cc/engine/link.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Link::Time kStart = std::chrono::steady_clock::now();

TEST(LinkTest, AMessageTakesItsBytesOverTheBandwidth) {
  Link link;
  EXPECT_EQ(link.Reserve(2000, 1e6, kStart), kStart + milliseconds(2));
}

TEST(LinkTest, MessagesPassOneAfterTheOther) {
  Link link;
  EXPECT_EQ(link.Reserve(2000, 1e6, kStart), kStart + milliseconds(2));
  EXPECT_EQ(link.Reserve(3000, 1e6, kStart), kStart + milliseconds(5));
  EXPECT_EQ(link.Reserve(1000, 1e6, kStart + milliseconds(4)),
            kStart + milliseconds(6));
}

TEST(LinkTest, ItIsBusyWithWhatPassesAndNotWithWhatWaits) {
  Link link;
  EXPECT_EQ(link.Busy(kStart).count(), 0.0);
  link.Reserve(2000, 1e6, kStart);
  link.Reserve(3000, 1e6, kStart);
  EXPECT_NEAR(link.Busy(kStart).count(), 0.0, 1e-12);
  EXPECT_NEAR(link.Busy(kStart + milliseconds(4)).count(), 0.004, 1e-12);
  EXPECT_NEAR(link.Busy(kStart + seconds(1)).count(), 0.005, 1e-12);
  link.Reserve(1000, 1e6, kStart + seconds(1));
  EXPECT_NEAR(link.Busy(kStart + seconds(1)).count(), 0.005, 1e-12);
  EXPECT_NEAR(link.Busy(kStart + seconds(2)).count(), 0.006, 1e-12);
}

TEST(LinkTest, AnIdleLinkStoresNoBandwidth) {
  Link link;
  link.Reserve(1000, 1e6, kStart);
  const Link::Time later = kStart + seconds(10);
  EXPECT_EQ(link.Reserve(1000, 1e6, later), later + milliseconds(1));
  EXPECT_EQ(link.Reserve(1000, 1e6, later), later + milliseconds(2));
}

TEST(LinkTest, AnEmptyMessageWaitsForThoseBeforeIt) {
  Link link;
  EXPECT_EQ(link.Reserve(0, 1.0, kStart), kStart);
  link.Reserve(1000, 1e6, kStart);
  EXPECT_EQ(link.Reserve(0, 1.0, kStart), kStart + milliseconds(1));
}

TEST(LinkTest, EachMessageHasItsOwnBandwidth) {
  Link link;
  EXPECT_EQ(link.Reserve(1000, 1e6, kStart), kStart + milliseconds(1));
  EXPECT_EQ(link.Reserve(1000, 1e5, kStart), kStart + milliseconds(11));
}

TEST(LinkTest, WithoutALimitAMessageWaitsForThoseBeforeIt) {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  Link link;
  EXPECT_EQ(link.Reserve(1000, kNoLimit, kStart), kStart);
  link.Reserve(1000, 1e6, kStart);
  EXPECT_EQ(link.Reserve(1000, kNoLimit, kStart), kStart + milliseconds(1));
}

TEST(LinkTest, TheTotalIsTheSumOfWhatWasReserved) {
  Link link;
  EXPECT_EQ(link.Reserved().amount, 0);
  link.Reserve(2000, 1e6, kStart);
  link.Reserve(1000, 1e5, kStart + seconds(1));
  EXPECT_EQ(link.Reserved().amount, 3000);
  EXPECT_NEAR(link.Reserved().seconds.count(), 0.012, 1e-9);
}

TEST(LinkTest, WhatTakesForeverDoesNotOverflow) {
  Link link;
  const seconds longest(1'000'000'000);
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(link.Reserve(INT64_MAX, 1e-300, kStart), kStart + longest);
  }
  EXPECT_EQ(link.Reserve(1, 1e300, kStart), kStart + longest);
  EXPECT_EQ(link.Reserved().amount, INT64_MAX);
}

TEST(LinkTest, AgreesWithAQueueComputedInFloatingPoint) {
  std::mt19937 random(5);
  Link link;
  double now = 0.0;
  double free_at = 0.0;
  for (int i = 0; i < 2000; ++i) {
    now += std::uniform_real_distribution<double>(0.0, 0.002)(random);
    const int64_t bytes =
        std::uniform_int_distribution<int64_t>(0, 2000)(random);
    free_at = std::max(free_at, now) + static_cast<double>(bytes) / 1e6;
    const auto since = std::chrono::duration_cast<Link::Time::duration>(
        std::chrono::duration<double>(now));
    const std::chrono::duration<double> passed =
        link.Reserve(bytes, 1e6, kStart + since) - kStart;
    // A nanosecond's rounding for each message.
    EXPECT_NEAR(passed.count(), free_at, 2e-9 * (i + 1));
  }
}

TEST(LinkTest, MessagesOfManyThreadsTakeTheSumOfTheirTimes) {
  constexpr int kThreads = 4;
  constexpr int kMessages = 1000;
  Link link;
  std::vector<std::vector<Link::Time>> passed(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&link, &own = passed[t]] {
      for (int i = 0; i < kMessages; ++i) {
        own.push_back(link.Reserve(1000, 1e6, kStart));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Link::Time> all;
  for (const auto& own : passed) {
    EXPECT_TRUE(std::is_sorted(own.begin(), own.end()));
    all.insert(all.end(), own.begin(), own.end());
  }
  std::sort(all.begin(), all.end());
  for (int i = 0; i < kThreads * kMessages; ++i) {
    ASSERT_EQ(all[i], kStart + milliseconds(i + 1));
  }
}

}  // namespace
}  // namespace recsync
