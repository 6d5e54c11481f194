// The token queue: counting, waiting, and a neighbor that is gone.

#include "cc/engine/token_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace recsync {
namespace {

using Answer = TokenQueue::Answer;

TEST(TokenQueueTest, AcquireTakesWhatIsThereAndWaitsForMore) {
  TokenQueue queue(2);
  int acquired = 0;
  const auto count = [&](Answer answer) {
    acquired += answer == Answer::kTokens;
  };
  queue.Acquire(1, count);
  queue.Acquire(2, count);
  queue.Acquire(1, count);
  // The second needs two and comes first.
  EXPECT_EQ(acquired, 1);
  EXPECT_EQ(queue.size(), 1);
  queue.Insert(1);
  EXPECT_EQ(acquired, 2);
  queue.Insert(1);
  EXPECT_EQ(acquired, 3);
  EXPECT_EQ(queue.size(), 0);
}

TEST(TokenQueueTest, GrantsThatAreRepeatedOrLateDoNoHarm) {
  TokenQueue queue(4);
  queue.GrantUpTo(6);
  queue.GrantUpTo(6);
  queue.GrantUpTo(5);
  EXPECT_EQ(queue.size(), 6);
  queue.Acquire(2, [](Answer) {});
  queue.GrantUpTo(7);
  EXPECT_EQ(queue.size(), 5);
}

TEST(TokenQueueTest, ALiftedQueueGivesAtOnceAndResetCountsAnew) {
  TokenQueue queue(0);
  bool acquired = false;
  queue.Acquire(3,
                [&](Answer answer) { acquired = answer == Answer::kTokens; });
  EXPECT_FALSE(acquired);
  queue.Lift(true);
  EXPECT_TRUE(acquired);
  EXPECT_TRUE(queue.lifted());
  EXPECT_EQ(queue.size(), -3);
  queue.Reset(9, 7);
  EXPECT_FALSE(queue.lifted());
  EXPECT_EQ(queue.size(), 2);
}

TEST(TokenQueueTest, WhatWasTakenWhileLiftedStaysTaken) {
  TokenQueue queue(4);
  queue.Lift(true);
  queue.Acquire(6, [](Answer) {});
  bool acquired = false;
  queue.Restore(7);
  EXPECT_FALSE(queue.lifted());
  EXPECT_EQ(queue.size(), 1);
  queue.Acquire(2,
                [&](Answer answer) { acquired = answer == Answer::kTokens; });
  EXPECT_FALSE(acquired);
  queue.GrantUpTo(8);
  EXPECT_TRUE(acquired);
}

TEST(TokenQueueTest, ACancelledWaitTakesNoTokens) {
  TokenQueue queue(0);
  const auto ticket = queue.Acquire(1, [](Answer) { FAIL(); });
  EXPECT_TRUE(queue.Cancel(ticket));
  EXPECT_FALSE(queue.Cancel(ticket));
  queue.Insert(1);
  EXPECT_EQ(queue.size(), 1);
}

TEST(TokenQueueTest, CloseAnswersAllThatWaitAndAllThatCome) {
  int closed = 0;
  const auto count = [&](Answer answer) {
    closed += answer == Answer::kClosed;
  };
  TokenQueue queue(0);
  queue.Acquire(1, count);
  queue.Close();
  queue.Acquire(1, count);
  EXPECT_EQ(closed, 2);
}

TEST(TokenQueueTest, ThreadsTakeAsManyAsAreGiven) {
  constexpr int kTokens = 4000;
  TokenQueue queue(0);
  std::atomic<int> acquired{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < kTokens; ++k) queue.Insert(1);
    });
    threads.emplace_back([&] {
      for (int k = 0; k < kTokens; ++k) {
        queue.Acquire(1, [&](Answer) { ++acquired; });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(acquired, 2 * kTokens);
  EXPECT_EQ(queue.size(), 0);
}

}  // namespace
}  // namespace recsync
