// The tagged queue: order, tags, what is dropped, waits and their ends.

#include "cc/engine/update_queue.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace recsync {
namespace {

using Queue = UpdateQueue<std::string>;

std::vector<std::string> Values(const std::vector<Queue::Entry>& entries) {
  std::vector<std::string> values;
  for (const Queue::Entry& entry : entries) values.push_back(entry.update);
  return values;
}

// What a wait came to, once it has.
struct Outcome {
  bool called = false;
  Queue::Answer answer = Queue::Answer::kClosed;
  std::vector<std::string> values;

  Queue::Callback Callback() {
    return [this](Queue::Answer given, std::vector<Queue::Entry> entries) {
      EXPECT_FALSE(called);
      called = true;
      answer = given;
      values = Values(entries);
    };
  }
};

using Values_ = std::vector<std::string>;

TEST(UpdateQueueTest, DequeueTakesTheFirstEntriesOfItsTag) {
  Queue queue({3, 10});
  for (const int64_t iteration : {0, 1, 2, 1}) {
    for (const int64_t sender : {4, 5}) {
      queue.Enqueue(std::to_string(iteration) + "/" + std::to_string(sender),
                    {iteration, sender});
    }
  }
  EXPECT_EQ(queue.Size({1, kAny}), 4);
  EXPECT_EQ(queue.Size({kAny, 4}), 4);
  EXPECT_EQ(queue.Size({kAny, kAny}), 8);
  Outcome first, second, third;
  queue.Dequeue(3, {1, kAny}, first.Callback());
  EXPECT_EQ(first.values, (Values_{"1/4", "1/5", "1/4"}));
  queue.Dequeue(2, {kAny, 5}, second.Callback());
  EXPECT_EQ(second.values, (Values_{"0/5", "2/5"}));
  queue.Dequeue(3, {kAny, kAny}, third.Callback());
  EXPECT_EQ(third.values, (Values_{"0/4", "2/4", "1/5"}));
  EXPECT_EQ(queue.Size({kAny, kAny}), 0);
  EXPECT_EQ(queue.counts().dequeued, 8);
}

TEST(UpdateQueueTest, SlotsThatTwoIterationsShareKeepThemApart) {
  Queue queue({2, 10});
  queue.Enqueue("1", {1, 0});
  queue.Enqueue("3", {3, 0});
  EXPECT_EQ(queue.Size({3, kAny}), 1);
  EXPECT_EQ(Values(queue.Drain({3, kAny})), (Values_{"3"}));
  EXPECT_EQ(Values(queue.Drain({kAny, kAny})), (Values_{"1"}));
}

TEST(UpdateQueueTest, DequeueWaitsUntilThereAreEnough) {
  Queue queue({2, 10});
  Outcome outcome;
  queue.Dequeue(2, {5, kAny}, outcome.Callback());
  queue.Enqueue("a", {5, 0});
  queue.Enqueue("other", {6, 1});
  EXPECT_FALSE(outcome.called);
  queue.Enqueue("b", {5, 1});
  EXPECT_EQ(outcome.values, (Values_{"a", "b"}));
  EXPECT_EQ(outcome.answer, Queue::Answer::kEntries);
}

TEST(UpdateQueueTest, WhoWaitsFirstIsServedFirst) {
  Queue queue({2, 10});
  Outcome first, second;
  queue.Dequeue(1, {kAny, kAny}, first.Callback());
  queue.Dequeue(1, {kAny, kAny}, second.Callback());
  queue.Enqueue("a", {0, 0});
  EXPECT_TRUE(first.called);
  EXPECT_FALSE(second.called);
}

TEST(UpdateQueueTest, WhatIsBelowTheFloorIsDroppedAndCounted) {
  Queue queue({4, 10});
  queue.Enqueue("0", {0, 0});
  queue.Enqueue("1", {1, 0});
  queue.Change([](Queue::Entries* entries) { entries->Raise(1); });
  EXPECT_EQ(queue.Enqueue("0", {0, 1}), Queue::Enqueued::kUnusable);
  EXPECT_EQ(queue.Size({kAny, kAny}), 1);
  EXPECT_EQ(queue.counts().unusable, 2);
  EXPECT_EQ(queue.counts().enqueued, 3);
}

TEST(UpdateQueueTest, NewestOnlyKeepsTheNewestOfEachSender) {
  Queue queue({4, 2, /*newest_only=*/true});
  queue.Enqueue("3", {3, 0});
  EXPECT_EQ(queue.Enqueue("2", {2, 0}), Queue::Enqueued::kSuperseded);
  EXPECT_EQ(queue.Enqueue("4", {4, 0}), Queue::Enqueued::kQueued);
  EXPECT_EQ(queue.Enqueue("1", {1, 1}), Queue::Enqueued::kQueued);
  EXPECT_EQ(Values(queue.Drain({kAny, kAny})), (Values_{"4", "1"}));
  EXPECT_EQ(queue.counts().superseded, 2);
}

TEST(UpdateQueueTest, TheCapacityCountsWhatIsLeft) {
  Queue queue({4, 2});
  queue.Enqueue("0", {0, 0});
  queue.Enqueue("1", {1, 0});
  EXPECT_EQ(queue.Enqueue("2", {2, 0}), Queue::Enqueued::kFull);
  queue.Change([](Queue::Entries* entries) { entries->Raise(1); });
  EXPECT_EQ(queue.Enqueue("2", {2, 0}), Queue::Enqueued::kQueued);
}

TEST(UpdateQueueTest, UnlimitLastsUntilReset) {
  Queue queue({2, 1});
  queue.Change([](Queue::Entries* entries) { entries->Unlimit(); });
  for (const int64_t iteration : {0, 1, 2, 3}) {
    EXPECT_EQ(queue.Enqueue("x", {iteration, 0}), Queue::Enqueued::kQueued);
  }
  EXPECT_EQ(queue.Size({2, kAny}), 1);
  queue.Change([](Queue::Entries* entries) { entries->Reset(0); });
  EXPECT_EQ(queue.Enqueue("x", {0, 0}), Queue::Enqueued::kQueued);
  EXPECT_EQ(queue.Enqueue("x", {1, 0}), Queue::Enqueued::kFull);
}

TEST(UpdateQueueTest, ACancelledWaitIsNeverCalledAndTakesNothing) {
  Queue queue({1, 1});
  Outcome outcome;
  const auto ticket = queue.Dequeue(1, {kAny, kAny}, outcome.Callback());
  EXPECT_TRUE(queue.Cancel(ticket));
  EXPECT_FALSE(queue.Cancel(ticket));
  queue.Enqueue("a", {0, 0});
  EXPECT_FALSE(outcome.called);
  EXPECT_EQ(queue.Size({kAny, kAny}), 1);
}

TEST(UpdateQueueTest, CloseAnswersAllThatWaitAndAllThatCome) {
  Outcome before, after;
  Queue queue({1, 1});
  queue.Dequeue(1, {kAny, kAny}, before.Callback());
  queue.Close();
  EXPECT_TRUE(before.called);
  EXPECT_EQ(before.answer, Queue::Answer::kClosed);
  queue.Dequeue(1, {kAny, kAny}, after.Callback());
  EXPECT_EQ(after.answer, Queue::Answer::kClosed);
  EXPECT_EQ(queue.Enqueue("a", {0, 0}), Queue::Enqueued::kClosed);
}

TEST(UpdateQueueTest, CallbacksMayCallTheQueue) {
  Queue queue({1, 4});
  int calls = 0;
  std::function<void()> again = [&] {
    queue.Dequeue(1, {kAny, kAny}, [&](auto, auto) {
      if (++calls < 3) again();
    });
  };
  again();
  for (int i = 0; i < 3; ++i) queue.Enqueue("a", {0, 0});
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace recsync
