#include "cc/engine/timer.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cc/engine/mutex.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kAnHour = 3600.0;

std::chrono::duration<double> Seconds(double seconds) {
  return std::chrono::duration<double>(seconds);
}

// Counts down; whoever waits goes on at 0. On a loaded machine a call may come
// late, so tests wait for events and never for a time to have been enough.
class Countdown {
 public:
  explicit Countdown(int count = 1) : count_(count) {}

  void Down() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    --count_;
    changed_.Signal();
  }

  void Wait() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (count_ > 0) changed_.Wait(&mu_);
  }

  // False if it did not get to 0 in time.
  bool WaitUntil(Clock::time_point deadline) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (count_ > 0) {
      if (Clock::now() >= deadline) return false;
      changed_.WaitUntil(&mu_, deadline);
    }
    return true;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  int count_ ABSL_GUARDED_BY(mu_);
};

// Returns once the timer has run all that was due when this was called.
void RunWhatIsDue(Timer* timer) {
  Countdown done;
  timer->CallAfter(0.0, [&done] { done.Down(); });
  done.Wait();
}

TEST(TimerTest, RunsACallOnceAndNotBeforeItIsDue) {
  Timer timer;
  for (double delay : {0.0, 0.001, 0.02, 0.1}) {
    Countdown done;
    std::atomic<int> runs{0};
    Clock::time_point ran;
    const Clock::time_point start = Clock::now();
    timer.CallAfter(delay, [&] {
      ran = Clock::now();
      ++runs;
      done.Down();
    });
    done.Wait();
    EXPECT_GE(ran - start, Seconds(delay));
    RunWhatIsDue(&timer);
    EXPECT_EQ(runs, 1);
  }
}

TEST(TimerTest, ANegativeDelayIsNone) {
  Timer timer;
  Countdown done;
  timer.CallAfter(-5.0, [&done] { done.Down(); });
  done.Wait();
}

TEST(TimerTest, ADelayBeyondTheClocksRangeNeverEnds) {
  Timer timer;
  for (double delay : {1e10, 1e300, std::numeric_limits<double>::infinity()}) {
    const int64_t id = timer.CallAfter(delay, [] { ADD_FAILURE(); });
    RunWhatIsDue(&timer);
    EXPECT_TRUE(timer.Cancel(id)) << delay << " seconds";
  }
}

TEST(TimerTest, IdsAreDifferent) {
  Timer timer;
  const int64_t first = timer.CallAfter(kAnHour, [] {});
  const int64_t second = timer.CallAfter(kAnHour, [] {});
  EXPECT_NE(first, second);
  EXPECT_TRUE(timer.Cancel(first));
  EXPECT_NE(timer.CallAfter(kAnHour, [] {}), second);
}

TEST(TimerTest, CallsRunInTheOrderInWhichTheyAreDue) {
  constexpr int kCalls = 200;
  struct Call {
    Clock::time_point not_due_before;
    Clock::time_point due_by;
    int rank = -1;
  };
  std::vector<Call> calls(kCalls);
  std::mt19937 random(24);
  std::uniform_real_distribution<double> delay(0.0, 0.05);
  Timer timer;
  Countdown done(kCalls);
  int runs = 0;  // on the timer's thread
  for (Call& call : calls) {
    const double seconds = delay(random);
    const auto wait =
        std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
    call.not_due_before = Clock::now() + wait;
    timer.CallAfter(seconds, [&call, &runs, &done] {
      call.rank = runs++;
      done.Down();
    });
    // Rounding, and the time that the call above took.
    call.due_by = Clock::now() + wait + std::chrono::nanoseconds(1);
  }
  done.Wait();
  int compared = 0;
  for (const Call& a : calls) {
    for (const Call& b : calls) {
      // Where the two spans overlap, the order is anybody's guess.
      if (a.due_by >= b.not_due_before) continue;
      ++compared;
      EXPECT_LT(a.rank, b.rank);
    }
  }
  EXPECT_GT(compared, kCalls);
}

TEST(TimerTest, AnEarlierCallDoesNotWaitForALaterOne) {
  Timer timer;
  timer.CallAfter(kAnHour, [] {});
  RunWhatIsDue(&timer);  // Now it sleeps until the hour is over.
  Countdown done;
  timer.CallAfter(0.005, [&done] { done.Down(); });
  EXPECT_TRUE(done.WaitUntil(Clock::now() + std::chrono::minutes(1)));
}

TEST(TimerTest, ACancelledCallNeverRuns) {
  Timer timer;
  std::atomic<bool> ran{false};
  const int64_t id = timer.CallAfter(0.02, [&ran] { ran = true; });
  const bool cancelled = timer.Cancel(id);
  Countdown done;
  timer.CallAfter(0.04, [&done] { done.Down(); });
  done.Wait();
  EXPECT_NE(cancelled, ran);
}

TEST(TimerTest, CancellingLeavesTheOtherCallsAlone) {
  Timer timer;
  Countdown done(2);
  timer.CallAfter(0.01, [&done] { done.Down(); });
  const int64_t id = timer.CallAfter(kAnHour, [] { ADD_FAILURE(); });
  timer.CallAfter(0.02, [&done] { done.Down(); });
  EXPECT_TRUE(timer.Cancel(id));
  done.Wait();
}

TEST(TimerTest, CancellingTwiceFailsTheSecondTime) {
  Timer timer;
  const int64_t id = timer.CallAfter(kAnHour, [] {});
  EXPECT_TRUE(timer.Cancel(id));
  EXPECT_FALSE(timer.Cancel(id));
}

TEST(TimerTest, CancellingWhatHasRunFails) {
  Timer timer;
  const int64_t id = timer.CallAfter(0.0, [] {});
  RunWhatIsDue(&timer);
  EXPECT_FALSE(timer.Cancel(id));
}

TEST(TimerTest, CancellingWhatNeverWasFails) {
  Timer timer;
  EXPECT_FALSE(timer.Cancel(0));
  EXPECT_FALSE(timer.Cancel(-1));
  EXPECT_FALSE(timer.Cancel(1));
  const int64_t id = timer.CallAfter(kAnHour, [] {});
  EXPECT_FALSE(timer.Cancel(id + 1));
}

TEST(TimerTest, ACallCannotCancelItself) {
  Timer timer;
  Countdown scheduled, done;
  int64_t id = 0;
  bool cancelled = true;
  id = timer.CallAfter(0.0, [&] {
    scheduled.Wait();  // for `id`
    cancelled = timer.Cancel(id);
    done.Down();
  });
  scheduled.Down();
  done.Wait();
  EXPECT_FALSE(cancelled);
}

TEST(TimerTest, ACallMayCancelAnother) {
  Timer timer;
  const int64_t other = timer.CallAfter(kAnHour, [] { ADD_FAILURE(); });
  bool cancelled = false;
  Countdown done;
  timer.CallAfter(0.0, [&] {
    cancelled = timer.Cancel(other);
    done.Down();
  });
  done.Wait();
  EXPECT_TRUE(cancelled);
}

TEST(TimerTest, ACallMayScheduleTheNext) {
  Timer timer;
  Countdown done(100);
  std::function<void()> again;
  int left = 100;  // on the timer's thread
  again = [&] {
    if (--left > 0) timer.CallAfter(0.0001, again);
    done.Down();
  };
  timer.CallAfter(0.0, again);
  done.Wait();
  EXPECT_EQ(left, 0);
}

TEST(TimerTest, WhatACallHoldsIsReleasedAfterItRan) {
  Timer timer;
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  timer.CallAfter(0.0, [held = std::move(held)] {});
  RunWhatIsDue(&timer);
  EXPECT_TRUE(watch.expired());
}

TEST(TimerTest, WhatACallHoldsIsReleasedWhenItIsCancelled) {
  Timer timer;
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  const int64_t id =
      timer.CallAfter(kAnHour, [held = std::move(held)] { ADD_FAILURE(); });
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(timer.Cancel(id));
  EXPECT_TRUE(watch.expired());
}

// Calls the timer back from its destructor.
struct CallsBack {
  explicit CallsBack(Timer* timer) : timer(timer) {}
  ~CallsBack() {
    timer->Cancel(timer->CallAfter(kAnHour, [] {}));
  }
  Timer* const timer;
};

TEST(TimerTest, WhatACallHoldsMayUseTheTimerWhenItIsReleased) {
  Timer timer;
  const int64_t id =
      timer.CallAfter(kAnHour, [held = std::make_shared<CallsBack>(&timer)] {});
  EXPECT_TRUE(timer.Cancel(id));
  timer.CallAfter(0.0, [held = std::make_shared<CallsBack>(&timer)] {});
  RunWhatIsDue(&timer);
}

TEST(TimerTest, DestructionDropsWaitingCallsWithoutRunningThem) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  const Clock::time_point start = Clock::now();
  {
    Timer timer;
    for (int i = 0; i < 100; ++i) {
      timer.CallAfter(kAnHour + i, [held] { ADD_FAILURE(); });
    }
    held.reset();
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
  EXPECT_LT(Clock::now() - start, std::chrono::minutes(10));
}

TEST(TimerTest, DestructionWaitsForTheCallThatRuns) {
  Countdown started;
  std::atomic<bool> finished{false};
  {
    Timer timer;
    timer.CallAfter(0.0, [&] {
      started.Down();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      finished = true;
    });
    started.Wait();
  }
  EXPECT_TRUE(finished);
}

TEST(TimerTest, TimersComeAndGoWithCallsAtAnyMoment) {
  std::atomic<int> runs{0};
  for (int i = 0; i < 300; ++i) {
    Timer timer;
    for (int j = 0; j < i % 5; ++j) {
      timer.CallAfter(j * 1e-5, [&runs] { ++runs; });
    }
    // Every third is destroyed at once, perhaps before its thread runs.
    if (i % 3 != 0) std::this_thread::yield();
  }
  EXPECT_LE(runs, 300 * 4);
}

TEST(TimerTest, EveryCallOfManyThreadsEitherRunsOnceOrIsCancelled) {
  constexpr int kThreads = 8;
  constexpr int kCalls = 400;
  struct Call {
    std::atomic<int> runs{0};
    bool cancelled = false;
  };
  std::vector<std::vector<Call>> calls(kThreads);
  for (auto& of_thread : calls) of_thread = std::vector<Call>(kCalls);
  Timer timer;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&timer, &mine = calls[t], t] {
      std::mt19937 random(25 + t);
      std::uniform_real_distribution<double> delay(0.0, 0.002);
      std::vector<int64_t> ids(kCalls);
      for (int i = 0; i < kCalls; ++i) {
        ids[i] = timer.CallAfter(delay(random), [&mine, i] { ++mine[i].runs; });
        // One that may be waiting, running or over.
        const int other = static_cast<int>(random() % (i + 1));
        if (random() % 2 == 0 && timer.Cancel(ids[other])) {
          mine[other].cancelled = true;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Due after all of the others.
  Countdown done;
  timer.CallAfter(0.003, [&done] { done.Down(); });
  done.Wait();
  int cancelled = 0;
  for (const auto& of_thread : calls) {
    for (const Call& call : of_thread) {
      ASSERT_EQ(call.runs + (call.cancelled ? 1 : 0), 1);
      cancelled += call.cancelled ? 1 : 0;
    }
  }
  EXPECT_GT(cancelled, 0);
  EXPECT_LT(cancelled, kThreads * kCalls);
}

TEST(TimerTest, TwoThreadsThatCancelTheSameCallDoNotBothSucceed) {
  Timer timer;
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> ended{0};
    const int64_t id = timer.CallAfter(round % 4 * 1e-5, [&ended] { ++ended; });
    const auto cancel = [&] {
      if (timer.Cancel(id)) ++ended;
    };
    std::thread first(cancel), second(cancel);
    first.join();
    second.join();
    RunWhatIsDue(&timer);
    // Run or cancelled, but one of them and once.
    EXPECT_EQ(ended, 1);
  }
}

}  // namespace
}  // namespace recsync
