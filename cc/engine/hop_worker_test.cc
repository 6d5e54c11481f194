// One worker of decentralized training by itself: when it jumps, and how it
// gets on without a neighbor that leaves, is lost, or is back, and which broken
// rules of the protocol it finds.

#include "cc/engine/hop_worker.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace recsync {
namespace {

constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

using Worker = HopWorker<int64_t>;  // An update is 100 * sender + iteration.
using Answer = Worker::Answer;

// Worker 0, which two neighbors send to and receive from.
HopOptions Two() {
  HopOptions options;
  options.in_neighbors = {1, 2};
  options.weights = {0.25, 0.25};
  options.out_neighbors = {1, 2};
  options.max_iteration_gap = 2;
  options.slots = 3;
  options.capacity = 9;
  return options;
}

// What a call came to, once it has.
struct Outcome {
  std::optional<Answer> answer;
  std::vector<int64_t> updates;

  Worker::Done Done() {
    return [this](Answer given) { answer = given; };
  }
  Worker::ReceiveDone ReceiveDone() {
    return [this](Answer given, std::vector<Worker::Received> received) {
      answer = given;
      for (const auto& item : received) updates.push_back(item.update);
    };
  }
  bool ok() const { return answer == Answer::kOk; }
};

// Enters an iteration, if there are tokens for it; else takes the wait back.
bool Go(Worker* worker, int64_t iteration) {
  Outcome tokens, entered;
  worker->BeginCall();
  worker->AcquireTokens(iteration, tokens.Done());
  if (!tokens.answer.has_value()) {
    worker->Interrupt();
    return false;
  }
  worker->Enter(iteration, iteration, entered.Done());
  return entered.ok();
}

int64_t NextNumber() {
  static int64_t number = 0;
  return ++number;
}

// An update in a parcel of its own.
Worker::Delivered Delivered(Worker* worker, int64_t sender, int64_t iteration) {
  return worker->Deliver(sender, NextNumber(), iteration,
                         100 * sender + iteration);
}

void Deliver(Worker* worker, int64_t sender, int64_t iteration) {
  EXPECT_EQ(Delivered(worker, sender, iteration), Worker::Delivered::kQueued);
}

// What there is for a neighbor.
Worker::Parcel Collect(Worker* worker, int64_t neighbor) {
  Worker::Parcel parcel;
  EXPECT_TRUE(worker->Collect(
      neighbor,
      [&parcel](Answer, Worker::Parcel given) { parcel = std::move(given); }));
  worker->CancelCollect(neighbor);
  worker->Carried(neighbor, parcel.number, parcel.iteration, 0);
  return parcel;
}

using Updates = std::vector<int64_t>;

TEST(HopWorkerTest, AWorkerJumpsOnlyIfItIsFurtherBehindThanTheTrigger) {
  HopOptions options = Two();
  options.max_iteration_gap = 5;
  options.max_jump = 10;
  options.jump_trigger = 2;
  Worker worker(options);
  ASSERT_TRUE(Go(&worker, 0));
  worker.Announce(1, 2);
  worker.Announce(2, 9);
  EXPECT_EQ(worker.PlanNext(), 1);  // Of worker 1 by two only.
  worker.Announce(1, 3);
  EXPECT_EQ(worker.PlanNext(), 3);
  EXPECT_TRUE(worker.IsJump(3));
  ASSERT_TRUE(Go(&worker, 3));
  EXPECT_EQ(worker.PlanNext(), 4);
  worker.Announce(1, 7);
  EXPECT_EQ(worker.PlanNext(), 7);
  EXPECT_EQ(worker.GetState().counts.jumps, 1);
  EXPECT_EQ(worker.GetState().counts.skipped, 2);
}

TEST(HopWorkerTest, AJumpHasItsLimit) {
  HopOptions options = Two();
  options.max_iteration_gap = 5;
  options.max_jump = 3;
  Worker worker(options);
  EXPECT_EQ(worker.PlanNext(), 0);  // Nobody jumps before the start.
  ASSERT_TRUE(Go(&worker, 0));
  worker.Announce(1, 6);
  worker.Announce(2, 9);
  EXPECT_EQ(worker.PlanNext(), 3);
}

TEST(HopWorkerTest, UpdatesOfOneThatHasLeftAreWaitedForUpToItsLast) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  EXPECT_EQ(worker.SetNeighbor(1, 0, /*until=*/1), 0);
  Deliver(&worker, 2, 0);
  Outcome zero, one, two;
  worker.Receive(0, zero.ReceiveDone());
  EXPECT_FALSE(zero.answer.has_value());
  Deliver(&worker, 1, 0);
  EXPECT_EQ(zero.updates, (Updates{200, 100}));
  worker.Reduced();
  // It grants no more tokens, and needs to grant none.
  worker.Announce(2, 2);
  ASSERT_TRUE(Go(&worker, 1));
  Deliver(&worker, 1, 1);
  Deliver(&worker, 2, 1);
  worker.Receive(1, one.ReceiveDone());
  EXPECT_EQ(one.updates, (Updates{101, 201}));
  ASSERT_TRUE(Go(&worker, 2));
  Deliver(&worker, 2, 2);
  worker.Receive(2, two.ReceiveDone());
  EXPECT_EQ(two.updates, (Updates{202}));
}

TEST(HopWorkerTest, ANeighborThatIsLostEndsTheWaitForIt) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  Deliver(&worker, 2, 0);
  Outcome received, tokens;
  worker.Receive(0, received.ReceiveDone());
  EXPECT_EQ(worker.GetState().missing, (Updates{1}));
  worker.SetNeighbor(1, 0, -1);
  EXPECT_EQ(received.updates, (Updates{200}));
  // Tokens of the other one count as before.
  worker.Announce(2, 5);
  for (const int64_t k : {1, 2, 3, 4, 5, 6, 7}) EXPECT_TRUE(Go(&worker, k));
  EXPECT_FALSE(Go(&worker, 8));
}

TEST(HopWorkerTest, ANeighborThatIsLostEndsTheWaitForItsTokens) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  ASSERT_TRUE(Go(&worker, 1));
  worker.Announce(2, 5);
  Outcome tokens;
  worker.AcquireTokens(2, tokens.Done());
  EXPECT_FALSE(tokens.answer.has_value());
  EXPECT_EQ(worker.GetState().missing, (Updates{1}));
  worker.SetNeighbor(1, 0, -1);
  EXPECT_TRUE(tokens.ok());
}

TEST(HopWorkerTest, OneThatIsBackTakesPartFromItsIterationOn) {
  Worker worker(Two());
  worker.Announce(2, 9);
  ASSERT_TRUE(Go(&worker, 0));
  Deliver(&worker, 1, 1);  // From its life before.
  worker.SetNeighbor(1, 0, -1);
  EXPECT_EQ(Collect(&worker, 1).iteration, -1) << "kept for one that is lost";
  ASSERT_TRUE(Go(&worker, 1));
  EXPECT_EQ(worker.SetNeighbor(1, /*since=*/3, kForever), 1);
  // It is told at once how far this worker is.
  const Worker::Parcel parcel = Collect(&worker, 1);
  EXPECT_EQ(parcel.progress, 1);
  EXPECT_FALSE(parcel.update.has_value());
  Outcome one, three;
  Deliver(&worker, 2, 1);
  worker.Receive(1, one.ReceiveDone());
  EXPECT_EQ(one.updates, (Updates{201})) << "without what it sent before";
  ASSERT_TRUE(Go(&worker, 2));
  EXPECT_EQ(Collect(&worker, 1).iteration, 2);
  ASSERT_TRUE(Go(&worker, 3));
  Deliver(&worker, 2, 3);
  worker.Receive(3, three.ReceiveDone());
  EXPECT_FALSE(three.answer.has_value());
  EXPECT_EQ(worker.GetState().missing, (Updates{1}));
  Deliver(&worker, 1, 3);
  EXPECT_EQ(three.updates, (Updates{203, 103}));
}

TEST(HopWorkerTest, TokensTakenWhileOneWasGoneStayTaken) {
  Worker worker(Two());
  worker.Announce(2, 20);
  ASSERT_TRUE(Go(&worker, 0));
  worker.SetNeighbor(1, 0, -1);
  Outcome tokens, entered;
  worker.AcquireTokens(1, tokens.Done());
  ASSERT_TRUE(tokens.ok());
  // It is back between the tokens and the iteration that they are for.
  worker.SetNeighbor(1, /*since=*/2, kForever);
  worker.Enter(1, 1, entered.Done());
  EXPECT_EQ(worker.GetState().tokens, (Updates{3, 21}));  // 2 - 1 + 2
  for (const int64_t k : {2, 3, 4}) EXPECT_TRUE(Go(&worker, k)) << k;
  EXPECT_FALSE(Go(&worker, 5)) << "more than 2 ahead of one that is at 2";
  worker.Announce(1, 3);
  EXPECT_TRUE(Go(&worker, 5));
}

TEST(HopWorkerTest, OneThatLeavesAfterItWasBackOwesNothingFromBefore) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  worker.SetNeighbor(1, 0, -1);
  worker.SetNeighbor(1, /*since=*/2, kForever);
  worker.SetNeighbor(1, 0, /*until=*/4);
  Deliver(&worker, 2, 0);
  Outcome received;
  worker.Receive(0, received.ReceiveDone());
  EXPECT_EQ(received.updates, (Updates{200}));
}

TEST(HopWorkerTest, AWorkerThatIsBackItselfTakesItsNeighborsAsTheyAre) {
  Worker worker(Two());
  worker.Begin(6);
  worker.SetNeighbor(1, /*since=*/5, kForever);
  worker.SetNeighbor(2, 0, -1);
  EXPECT_EQ(worker.PlanNext(), 6);
  ASSERT_TRUE(Go(&worker, 6));
  EXPECT_TRUE(worker.Wanted(1, NextNumber(), 6));
  EXPECT_FALSE(worker.Wanted(1, NextNumber(), 5));
  Deliver(&worker, 1, 6);
  Outcome received;
  worker.Receive(6, received.ReceiveDone());
  EXPECT_EQ(received.updates, (Updates{106}));
  // Worker 1 is at 5.
  EXPECT_TRUE(Go(&worker, 7));
  EXPECT_FALSE(Go(&worker, 8));
}

TEST(HopWorkerTest, WithBackupsALostNeighborIsOneOfThoseThatMayBeMissing) {
  HopOptions options = Two();
  options.in_neighbors = options.out_neighbors = {1, 2, 3};
  options.weights = {0.25, 0.25, 0.25};
  options.backup_workers = 1;
  Worker worker(options);
  ASSERT_TRUE(Go(&worker, 0));
  worker.SetNeighbor(1, 0, -1);
  Deliver(&worker, 2, 0);
  Outcome received;
  worker.Receive(0, received.ReceiveDone());
  EXPECT_FALSE(received.answer.has_value()) << "two lost ones are too many";
  Deliver(&worker, 3, 0);
  EXPECT_EQ(received.updates, (Updates{200, 300}));
}

TEST(HopWorkerTest, TheStateNamesTheIterationThatIsWaitedFor) {
  HopOptions options = Two();
  Worker worker(options);
  EXPECT_EQ(worker.GetState().awaited, -1);
  ASSERT_TRUE(Go(&worker, 0));
  ASSERT_TRUE(Go(&worker, 1));
  EXPECT_EQ(worker.GetState().awaited, -1);
  Outcome received, tokens;
  worker.Receive(1, received.ReceiveDone());
  EXPECT_EQ(worker.GetState().missing, (Updates{1, 2}));
  EXPECT_EQ(worker.GetState().awaited, 1);
  Deliver(&worker, 1, 1);
  Deliver(&worker, 2, 1);
  EXPECT_TRUE(received.ok());
  EXPECT_EQ(worker.GetState().awaited, -1);
  worker.Announce(1, 1);
  // Two ahead of one that has not begun is one too many.
  worker.AcquireTokens(2, tokens.Done());
  EXPECT_EQ(worker.GetState().missing, (Updates{2}));
  EXPECT_EQ(worker.GetState().awaited, 0);
  worker.Announce(2, 0);
  EXPECT_TRUE(tokens.ok());
  EXPECT_EQ(worker.GetState().awaited, -1);
}

TEST(HopWorkerTest, WithStalenessAnOlderIterationIsWaitedFor) {
  HopOptions options = Two();
  options.staleness_bound = 2;
  Worker worker(options);
  Outcome received;
  worker.Receive(7, received.ReceiveDone());
  EXPECT_EQ(worker.GetState().awaited, 5);
}

TEST(HopWorkerTest, AnAcknowledgementIsWaitedForOfTheIterationBefore) {
  HopOptions options = Two();
  options.max_iteration_gap = 0;
  options.notify_ack = true;
  Worker worker(options);
  Outcome first, second;
  worker.Enter(0, 0, first.Done());
  ASSERT_TRUE(first.ok());
  worker.Enter(1, 1, second.Done());
  EXPECT_EQ(worker.GetState().missing, (Updates{1}));
  EXPECT_EQ(worker.GetState().awaited, 0);
}

TEST(HopWorkerTest, AnUpdateIsReceivedFromWhenItWasAskedForUntilItIsThere) {
  Worker worker(Two());
  worker.TakeEvents();
  EXPECT_TRUE(worker.Wanted(1, NextNumber(), 0));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Deliver(&worker, 1, 0);
  Deliver(&worker, 2, 0);  // Nobody asked.
  const std::vector<Event> events = worker.TakeEvents();
  ASSERT_EQ(events.size(), 2);
  EXPECT_EQ(events[0].activity, Activity::kReceive);
  EXPECT_EQ(events[0].neighbor, 1);
  EXPECT_GE(events[0].end - events[0].begin, 4000);
  EXPECT_EQ(events[1].end, events[1].begin);
}

TEST(HopWorkerTest, AParcelThatComesTwiceCountsOnce) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  const int64_t zero = NextNumber(), one = NextNumber();
  EXPECT_TRUE(worker.Wanted(1, zero, 0));
  EXPECT_EQ(worker.Deliver(1, zero, 0, 100), Worker::Delivered::kQueued);
  EXPECT_FALSE(worker.Wanted(1, zero, 0));
  EXPECT_EQ(worker.Deliver(1, zero, 0, 100), Worker::Delivered::kRepeated);
  EXPECT_TRUE(worker.Wanted(1, one, 1));
  EXPECT_EQ(worker.Deliver(1, one, 1, 101), Worker::Delivered::kQueued);
  // A call that was given up comes to its end after the next one.
  EXPECT_EQ(worker.Deliver(1, zero, 0, 100), Worker::Delivered::kRepeated);
  Deliver(&worker, 2, 0);
  Outcome received;
  worker.Receive(0, received.ReceiveDone());
  EXPECT_EQ(received.updates, (Updates{100, 200}));
  EXPECT_EQ(worker.GetState().queued, 1);
  EXPECT_EQ(worker.GetState().updates.enqueued, 3);
  EXPECT_EQ(worker.GetState().declined, (Updates{0, 0}));
  int64_t receptions = 0;
  for (const Event& event : worker.TakeEvents()) {
    receptions += event.activity == Activity::kReceive;
  }
  EXPECT_EQ(receptions, 3);
}

TEST(HopWorkerTest, AnUpdateThatIsDeclinedTwiceCountsOnce) {
  Worker worker(Two());
  worker.Begin(4);
  const int64_t number = NextNumber();
  EXPECT_FALSE(worker.Wanted(1, number, 3));
  EXPECT_FALSE(worker.Wanted(1, number, 3));
  EXPECT_EQ(worker.GetState().declined, (Updates{1, 0}));
}

TEST(HopWorkerTest, AParcelThatIsCollectedTwiceIsSentOnce) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  std::vector<Worker::Parcel> parcels;
  for (int i = 0; i < 2; ++i) {
    worker.Collect(1, [&](Answer, Worker::Parcel parcel) {
      parcels.push_back(std::move(parcel));
    });
  }
  ASSERT_EQ(parcels.size(), 2);
  EXPECT_EQ(parcels[1].number, parcels[0].number);
  EXPECT_EQ(parcels[1].iteration, 0);
  EXPECT_EQ(parcels[1].update, 0);
  EXPECT_EQ(parcels[1].progress, 0);
  EXPECT_EQ(worker.GetState().counts.sent, 1);
  worker.Carried(1, parcels[1].number, 0, 0);
  EXPECT_EQ(Collect(&worker, 1).iteration, -1);
}

TEST(HopWorkerTest, OneThatIsBackMayNumberItsParcelsAnewAndBeginEarlier) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  EXPECT_EQ(worker.Deliver(1, /*number=*/50, 5, 105),
            Worker::Delivered::kQueued);
  worker.SetNeighbor(1, 0, -1);
  worker.SetNeighbor(1, /*since=*/1, kForever);
  EXPECT_EQ(worker.Deliver(1, /*number=*/1, 1, 101),
            Worker::Delivered::kQueued);
  EXPECT_EQ(worker.Deliver(1, /*number=*/1, 1, 101),
            Worker::Delivered::kRepeated);
}

TEST(HopWorkerTest, TheParcelsOfALaterLifeHaveHigherNumbers) {
  const auto number = [] {
    Worker worker(Two());
    EXPECT_TRUE(Go(&worker, 0));
    return Collect(&worker, 1).number;
  };
  const int64_t before = number();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_GT(number(), before);
}

// A worker that checks, and what it finds.
HopOptions Checking() {
  HopOptions options = Two();
  options.gap_bounds = {1, 1};
  return options;
}

using Rule = Worker::Violation::Rule;

void ExpectBroken(Worker* worker, Rule rule, int64_t neighbor,
                  int64_t iteration, int64_t progress, int64_t found,
                  int64_t bound) {
  ASSERT_TRUE(worker->violation().has_value());
  const Worker::Violation violation = *worker->violation();
  EXPECT_EQ(violation.rule, rule);
  EXPECT_EQ(violation.neighbor, neighbor);
  EXPECT_EQ(violation.iteration, iteration);
  EXPECT_EQ(violation.progress, progress);
  EXPECT_EQ(violation.found, found);
  EXPECT_EQ(violation.bound, bound);
}

Answer Enter(Worker* worker, int64_t iteration) {
  Outcome entered;
  worker->Enter(iteration, iteration, entered.Done());
  return *entered.answer;
}

TEST(HopWorkerTest, AnUpdateFromFurtherAheadThanTheBoundIsRefused) {
  Worker worker(Checking());
  Deliver(&worker, 1, 1);  // Before its first iteration it counts as in it.
  ASSERT_TRUE(Go(&worker, 0));
  EXPECT_EQ(Delivered(&worker, 2, 2), Worker::Delivered::kBroken);
  ExpectBroken(&worker, Rule::kGap, 2, 0, 2, 2, 1);
  EXPECT_EQ(Enter(&worker, 1), Answer::kBroken);
  EXPECT_EQ(worker.iteration(), 0);
  worker.Begin(0);
  EXPECT_FALSE(worker.violation().has_value());
  EXPECT_TRUE(Go(&worker, 0));
}

TEST(HopWorkerTest, ANeighborThatAnnouncesMoreThanItsBoundIsFound) {
  Worker worker(Checking());
  ASSERT_TRUE(Go(&worker, 0));
  EXPECT_TRUE(worker.Announce(1, 1));
  EXPECT_FALSE(worker.Announce(1, 2));
  ExpectBroken(&worker, Rule::kGap, 1, 0, 2, 2, 1);
  EXPECT_EQ(Enter(&worker, 1), Answer::kBroken);
}

TEST(HopWorkerTest, WithoutBoundsNothingIsChecked) {
  Worker worker(Two());
  ASSERT_TRUE(Go(&worker, 0));
  EXPECT_TRUE(worker.Announce(1, 9));
  EXPECT_EQ(Enter(&worker, 3), Answer::kOk);  // Without tokens.
  for (int i = 0; i < 5; ++i) Deliver(&worker, 1, 9);
  EXPECT_FALSE(worker.violation().has_value());
}

TEST(HopWorkerTest, ANeighborWithoutABoundIsNotCompared) {
  HopOptions options = Checking();
  options.gap_bounds = {-1, 1};
  Worker worker(options);
  ASSERT_TRUE(Go(&worker, 0));
  EXPECT_TRUE(worker.Announce(1, 9));
  for (int i = 0; i < 5; ++i) Deliver(&worker, 1, 9);
}

TEST(HopWorkerTest, EnteringWithoutTokensIsFound) {
  Worker worker(Checking());
  ASSERT_TRUE(Go(&worker, 0));
  EXPECT_TRUE(worker.Announce(1, 0));
  EXPECT_EQ(Enter(&worker, 1), Answer::kBroken);
  // One announced 0, so 2 more than that may be entered; none were taken.
  ExpectBroken(&worker, Rule::kTokens, 1, 1, 0, 2, 1);
}

TEST(HopWorkerTest, AJumpThatTakesTooFewTokensIsFound) {
  HopOptions options = Checking();
  options.gap_bounds = {9, 9};
  Worker worker(options);
  ASSERT_TRUE(Go(&worker, 0));
  worker.Announce(1, 4);
  worker.Announce(2, 4);
  Outcome tokens;
  worker.AcquireTokens(3, tokens.Done());
  ASSERT_TRUE(tokens.ok());
  EXPECT_EQ(Enter(&worker, 4), Answer::kBroken);
  ExpectBroken(&worker, Rule::kTokens, 1, 4, 4, 3, 2);
}

TEST(HopWorkerTest, AnIterationThatWasNotSentIsFoundByItsAcknowledgements) {
  HopOptions options = Checking();
  options.max_iteration_gap = 0;
  options.notify_ack = true;
  options.gap_bounds = {1, 1};
  Worker worker(options);
  EXPECT_EQ(Enter(&worker, 0), Answer::kOk);
  // It took one acknowledgement, for iteration 0, and needs two to be here.
  EXPECT_EQ(Enter(&worker, 2), Answer::kBroken);
  ExpectBroken(&worker, Rule::kTokens, 1, 2, -1, 0, -1);
}

TEST(HopWorkerTest, MoreUpdatesThanIterationsOfANeighborAreFound) {
  Worker worker(Checking());
  ASSERT_TRUE(Go(&worker, 0));
  Deliver(&worker, 1, 0);
  Deliver(&worker, 1, 1);
  Deliver(&worker, 2, 1);
  EXPECT_EQ(Delivered(&worker, 1, 1), Worker::Delivered::kBroken);
  ExpectBroken(&worker, Rule::kUpdates, 1, 0, 1, 3, 2);
}

TEST(HopWorkerTest, AFullQueueIsFoundWithoutBoundsToo) {
  HopOptions options = Two();
  options.capacity = 2;
  Worker worker(options);
  ASSERT_TRUE(Go(&worker, 0));
  Deliver(&worker, 1, 1);
  Deliver(&worker, 1, 2);
  EXPECT_EQ(Delivered(&worker, 2, 1), Worker::Delivered::kBroken);
  ExpectBroken(&worker, Rule::kCapacity, 2, 0, 1, 3, 2);
}

TEST(HopWorkerTest, WhenSomebodyIsGoneBoundsByPathsAreVoid) {
  HopOptions options = Checking();
  options.max_iteration_gap = 0;
  options.capacity = 1;
  Worker worker(options);
  ASSERT_TRUE(Go(&worker, 0));
  worker.SetNeighbor(/*neighbor=*/7, 0, -1);  // A stranger.
  for (const int64_t k : {1, 2, 3, 4}) Deliver(&worker, 1, k);
  EXPECT_TRUE(worker.Announce(1, 4));
  worker.Begin(0);
  ASSERT_TRUE(Go(&worker, 0));
  Deliver(&worker, 1, 1);
  EXPECT_EQ(Delivered(&worker, 1, 1), Worker::Delivered::kBroken);
}

TEST(HopWorkerTest, TokensAreCheckedWhenANeighborIsBackToo) {
  Worker worker(Checking());
  worker.Announce(2, 1);
  ASSERT_TRUE(Go(&worker, 0));
  worker.SetNeighbor(1, 0, -1);
  ASSERT_TRUE(Go(&worker, 1));
  worker.SetNeighbor(1, /*since=*/3, kForever);
  ASSERT_TRUE(Go(&worker, 2));
  EXPECT_EQ(Enter(&worker, 3), Answer::kBroken);
  ExpectBroken(&worker, Rule::kTokens, 1, 3, 3, 3, 2);
}

TEST(HopWorkerTest, NothingOfAWaitIsKeptWhenItHasEnded) {
  HopOptions options = Two();
  options.out_neighbors = {1};
  Worker worker(options);
  auto held = std::make_shared<int>(0);
  // At once, and after a while.
  worker.AcquireTokens(0, [held](Answer) {});
  Deliver(&worker, 1, 0);
  Deliver(&worker, 2, 0);
  worker.Receive(0, [held](Answer, auto) {});
  EXPECT_EQ(held.use_count(), 1);
  worker.Receive(1, [held](Answer, auto) { ++*held; });
  EXPECT_GT(held.use_count(), 1);
  Deliver(&worker, 1, 1);
  Deliver(&worker, 2, 1);
  EXPECT_EQ(*held, 1);
  EXPECT_EQ(held.use_count(), 1);
}

TEST(HopWorkerTest, AnInterruptionBeforeAWaitIsNotLost) {
  Worker with_tokens(Two());
  HopOptions options = Two();
  options.max_iteration_gap = 0;
  options.notify_ack = true;
  Worker with_acks(options);
  const auto ends = [](Worker* worker, auto wait) {
    worker->Interrupt(worker->BeginCall());
    Outcome outcome;
    wait(&outcome);
    EXPECT_EQ(outcome.answer, Answer::kCancelled);
  };
  ends(&with_tokens,
       [&](Outcome* o) { with_tokens.Receive(0, o->ReceiveDone()); });
  // Two iterations may be entered without a word from the neighbors.
  ASSERT_TRUE(Go(&with_tokens, 0));
  ASSERT_TRUE(Go(&with_tokens, 1));
  ends(&with_tokens,
       [&](Outcome* o) { with_tokens.AcquireTokens(2, o->Done()); });
  ASSERT_TRUE(Go(&with_acks, 0));
  Outcome sent;
  with_acks.Send(0, sent.Done());
  ends(&with_acks, [&](Outcome* o) { with_acks.Send(0, o->Done()); });
}

TEST(HopWorkerTest, TimesAreThoseOfTheClockThatItIsGiven) {
  int64_t now = 0;
  HopOptions options = Two();
  options.now = [&now] { return now; };
  Worker worker(options);
  ASSERT_TRUE(Go(&worker, 0));
  now = 30;
  Outcome received;
  worker.Receive(0, received.ReceiveDone());
  now = 100;
  ASSERT_EQ(worker.Deliver(1, 1, 0, 100), Worker::Delivered::kQueued);
  ASSERT_EQ(worker.Deliver(2, 1, 0, 200), Worker::Delivered::kQueued);
  ASSERT_TRUE(received.ok());
  now = 150;
  EXPECT_EQ(worker.GetState().counts.waiting_for_updates, 70);
  EXPECT_NEAR(worker.GetState().seconds, 50e-6, 1e-12);
  bool has_computed = false;
  for (const Event& event : worker.TakeEvents()) {
    if (event.activity != Activity::kCompute) continue;
    has_computed = true;
    EXPECT_EQ(event.begin, 0);
    EXPECT_EQ(event.end, 30);
  }
  EXPECT_TRUE(has_computed);
}

TEST(HopWorkerTest, WhatIsSentWhenItIsComputedWasComputedUntilThen) {
  for (const bool notify_ack : {false, true}) {
    int64_t now = 0;
    HopOptions options = Two();
    options.now = [&now] { return now; };
    options.notify_ack = notify_ack;
    if (notify_ack) options.max_iteration_gap = 0;
    Outcome entered[2], sent[2],
        received[2];  // The worker may tell them later.
    Worker worker(options);
    for (int64_t iteration = 0; iteration < 2; ++iteration) {
      now = 100 * iteration;
      worker.Enter(iteration, std::nullopt, entered[iteration].Done());
      ASSERT_TRUE(entered[iteration].ok());
      now += 30;
      worker.Send(iteration, sent[iteration].Done());
      now += 40;
      for (const int64_t neighbor : {1, 2}) {
        worker.Announce(neighbor, iteration - 1);
      }
      ASSERT_TRUE(sent[iteration].ok());
      worker.Receive(iteration, received[iteration].ReceiveDone());
    }
    std::vector<std::pair<int64_t, int64_t>> computed;
    for (const Event& event : worker.TakeEvents()) {
      if (event.activity == Activity::kCompute) {
        computed.emplace_back(event.begin, event.end);
      }
    }
    const std::vector<std::pair<int64_t, int64_t>> expected = {{0, 30},
                                                               {100, 130}};
    EXPECT_EQ(computed, expected);
  }
}

TEST(HopWorkerTest, ParcelsHaveNumbersFromOneOnWhereTimeBeginsAtZero) {
  HopOptions options = Two();
  options.now = [] { return 0; };
  Worker worker(options);
  worker.Enter(0, 1, [](Answer) {});
  int64_t number = 0;
  worker.Collect(
      1, [&](Answer, Worker::Parcel parcel) { number = parcel.number; });
  EXPECT_EQ(number, 1);
}

}  // namespace
}  // namespace recsync
