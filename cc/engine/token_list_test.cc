#include "cc/engine/token_list.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/engine/mutex.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Answer = TokenList::Answer;
using Gate = TokenList::Gate;
using Token = TokenList::Token;

// What became of a Take: nothing yet, a token's index, or one of the below.
constexpr int64_t kWaits = -1;
constexpr int64_t kGone = -2;
constexpr int64_t kClosed = -3;
constexpr int64_t kCancelled = -4;

// A Take whose callback counts its calls and keeps the answer.
struct Taking {
  TokenList::Ticket ticket = 0;
  int calls = 0;
  int64_t outcome = kWaits;
  int64_t value = -1;
};

std::shared_ptr<Taking> Take(TokenList* list, int worker) {
  auto taking = std::make_shared<Taking>();
  taking->ticket = list->Take(worker, [taking](Answer answer, Token token) {
    ++taking->calls;
    taking->value = token.value;
    taking->outcome = answer == Answer::kToken  ? token.index
                      : answer == Answer::kGone ? kGone
                                                : kClosed;
  });
  return taking;
}

// The index that a Take gets at once, or one of the above.
int64_t Index(TokenList* list, int worker) {
  return Take(list, worker)->outcome;
}

TEST(TokenListTest, WithoutAGateTokensComeAtOnceInAscendingOrder) {
  TokenList list({3, Gate::kNone, 0, 2, 2});
  for (int64_t i = 0; i < 20; ++i) {
    const auto taking = Take(&list, i % 2);
    EXPECT_EQ(taking->outcome, i);
    EXPECT_EQ(taking->value, i / 3);
    EXPECT_FALSE(list.Cancel(taking->ticket));
  }
}

TEST(TokenListTest, TheStepGateOpensWhenAllServersHaveReachedTheStep) {
  TokenList list({2, Gate::kStep, 0, 2, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  const auto first = Take(&list, 2);
  const auto second = Take(&list, 0);
  const auto third = Take(&list, 1);
  list.ReportStep(0, 1);
  EXPECT_EQ(first->outcome, kWaits);
  list.ReportStep(1, 1);
  EXPECT_EQ(first->outcome, 2);
  EXPECT_EQ(second->outcome, 3);
  EXPECT_EQ(third->outcome, kWaits);
  list.ReportStep(0, 2);
  list.ReportStep(0, 1);  // late, ignored
  list.ReportStep(1, 2);
  EXPECT_EQ(third->outcome, 4);
  EXPECT_EQ(third->value, 2);
}

TEST(TokenListTest, TokensBelowTheSmallestStepAreSkipped) {
  TokenList list({4, Gate::kStep, 0, 1, 4});
  EXPECT_EQ(Index(&list, 0), 0);
  list.ReportStep(0, 1);  // without tokens 1 to 3: backup workers
  EXPECT_EQ(list.GetState().counts.skipped, 3);
  EXPECT_EQ(Index(&list, 1), 4);
  list.ReportStep(0, 3);
  EXPECT_EQ(list.GetState().counts.skipped, 3 + 7);
  EXPECT_EQ(list.GetState().position, 12);
  EXPECT_EQ(Index(&list, 2), 12);
}

TEST(TokenListTest, TheClockGateHoldsBackWhoIsTooFarAhead) {
  TokenList list({1, Gate::kClock, 2, 1, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 0), 1);
  EXPECT_EQ(Index(&list, 0), 2);  // clock 2, 2 ahead of worker 1
  const auto ahead = Take(&list, 0);
  EXPECT_EQ(ahead->outcome, kWaits);
  EXPECT_EQ(Index(&list, 1), 3);
  EXPECT_EQ(ahead->outcome, 4);
  EXPECT_EQ(list.GetState().workers[0].clock, 4);
}

TEST(TokenListTest, AWorkerThatComesBackHasTheSlowestLiveClock) {
  TokenList list({1, Gate::kClock, 0, 1, 3});
  for (int w = 0; w < 3; ++w) EXPECT_EQ(Index(&list, w), w);
  list.Leave(2);
  for (int64_t i = 3; i < 9; ++i) EXPECT_EQ(Index(&list, i % 2), i);
  EXPECT_EQ(list.GetState().workers[2].clock, 1);
  EXPECT_FALSE(list.GetState().workers[2].live);
  EXPECT_EQ(Index(&list, 2), 9);
  EXPECT_EQ(list.GetState().workers[2].clock, 5);
  EXPECT_TRUE(list.GetState().workers[2].live);
}

TEST(TokenListTest, AWorkerThatComesBackAloneGoesOnWithItsClock) {
  TokenList list({1, Gate::kClock, 0, 1, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  list.Leave(0);
  list.Leave(1);
  EXPECT_EQ(Index(&list, 0), 1);
  EXPECT_EQ(Index(&list, 0), 2);
  EXPECT_EQ(Index(&list, 1), 3);
  EXPECT_EQ(list.GetState().workers[0].clock, 3);
  EXPECT_EQ(list.GetState().workers[1].clock, 4);
}

TEST(TokenListTest, LosingOrLeavingOpensTheGateOfThoseWhoWaitForTheClock) {
  for (const bool lose : {false, true}) {
    TokenList list({1, Gate::kClock, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    const auto ahead = Take(&list, 0);
    EXPECT_EQ(ahead->outcome, kWaits);
    if (lose) {
      list.Lose(1);
    } else {
      list.Leave(1);
    }
    EXPECT_EQ(ahead->outcome, 1);
  }
}

TEST(TokenListTest, ALostWorkersTokensAreReissuedFirstAndInOrder) {
  TokenList list({4, Gate::kStep, 0, 2, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  EXPECT_EQ(Index(&list, 0), 2);
  // It holds both: that the first was sent does not say that it arrived.
  const TokenList::Loss loss = list.Lose(0);
  EXPECT_EQ(loss.reissued, 2);
  EXPECT_EQ(loss.lost, 0);
  EXPECT_EQ(list.GetState().reissues, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(list.Lose(0).reissued, 0);
  for (const int64_t expected : {0, 2, 3}) {
    EXPECT_EQ(Index(&list, 1), expected);
  }
  EXPECT_EQ(Index(&list, 1), kWaits);
  EXPECT_EQ(list.GetState().counts.reissued, 2);
  EXPECT_EQ(list.GetState().counts.taken, 6);
}

TEST(TokenListTest, AReissuedTokenGoesToWhoWaitsFirst) {
  TokenList list({2, Gate::kStep, 0, 1, 4});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  const auto first = Take(&list, 2);
  const auto second = Take(&list, 3);
  EXPECT_EQ(list.Lose(1).reissued, 1);
  EXPECT_EQ(first->outcome, 1);
  EXPECT_EQ(second->outcome, kWaits);
}

TEST(TokenListTest, TokensThatTheStepHasPassedAreNotReissued) {
  TokenList list({2, Gate::kStep, 0, 2, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  list.ReportStep(0, 1);
  EXPECT_EQ(list.GetState().workers[0].held.size(), 1);  // for server 1
  list.ReportStep(1, 1);
  EXPECT_TRUE(list.GetState().workers[0].held.empty());
  EXPECT_EQ(list.Lose(0).reissued, 0);
  // A reissued one that becomes useless is not handed out either.
  EXPECT_EQ(Index(&list, 1), 2);
  EXPECT_EQ(list.Lose(1).reissued, 1);
  list.ReportStep(0, 2);
  list.ReportStep(1, 2);
  EXPECT_EQ(list.GetState().counts.skipped, 2);
  EXPECT_EQ(Index(&list, 0), 4);
}

TEST(TokenListTest, WithoutTheStepGateALostWorkersLastTokenIsLost) {
  for (const Gate gate : {Gate::kNone, Gate::kClock}) {
    TokenList list({2, gate, gate == Gate::kClock ? 9 : 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    EXPECT_EQ(Index(&list, 0), 1);
    EXPECT_EQ(list.GetState().workers[0].held, (std::set<int64_t>{1}));
    const TokenList::Loss loss = list.Lose(0);
    EXPECT_EQ(loss.lost, 1);
    EXPECT_EQ(loss.reissued, 0);
    EXPECT_EQ(list.Lose(0).lost, 0);
    EXPECT_EQ(list.GetState().counts.lost, 1);
    EXPECT_EQ(Index(&list, 1), 2);
  }
}

TEST(TokenListTest, AWorkerThatLeftHoldsNothing) {
  for (const Gate gate : {Gate::kNone, Gate::kStep, Gate::kClock}) {
    TokenList list({2, gate, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    list.Leave(0);
    const TokenList::Loss loss = list.Lose(0);
    EXPECT_EQ(loss.lost + loss.reissued, 0);
    EXPECT_EQ(Index(&list, 1), 1);
  }
}

TEST(TokenListTest, TheWaitingTakesOfAWorkerThatIsGoneAreAnswered) {
  TokenList list({1, Gate::kStep, 0, 1, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  const auto lost = Take(&list, 1);
  const auto left = Take(&list, 2);
  const auto stays = Take(&list, 0);
  list.Lose(1);
  EXPECT_EQ(lost->outcome, kGone);
  list.Leave(2);
  EXPECT_EQ(left->outcome, kGone);
  EXPECT_EQ(stays->outcome, kWaits);
  EXPECT_FALSE(list.Cancel(lost->ticket));
  EXPECT_EQ(lost->calls, 1);
}

TEST(TokenListTest, ACancelledTakeGetsNothingAndTheNextGetsItsToken) {
  TokenList list({1, Gate::kStep, 0, 1, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  const auto first = Take(&list, 1);
  const auto second = Take(&list, 2);
  EXPECT_TRUE(list.Cancel(first->ticket));
  EXPECT_FALSE(list.Cancel(first->ticket));
  EXPECT_EQ(first.use_count(), 1);  // Its callback is gone.
  list.ReportStep(0, 1);
  EXPECT_EQ(first->calls, 0);
  EXPECT_EQ(second->outcome, 1);
  EXPECT_FALSE(list.Cancel(second->ticket));
  EXPECT_FALSE(list.Cancel(12345));
}

TEST(TokenListTest, SeekGoesOnAsANewList) {
  TokenList list({2, Gate::kStep, 0, 2, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  list.Lose(1);
  EXPECT_TRUE(list.Seek(7));
  TokenList::State state = list.GetState();
  EXPECT_EQ(state.position, 14);
  EXPECT_EQ(state.steps, (std::vector<int64_t>{7, 7}));
  EXPECT_TRUE(state.reissues.empty());
  EXPECT_TRUE(state.workers[1].live);
  EXPECT_EQ(state.workers[0].clock, 0);
  EXPECT_TRUE(state.workers[0].held.empty());
  EXPECT_EQ(state.counts.taken, 2);
  EXPECT_EQ(Index(&list, 0), 14);
  EXPECT_EQ(Index(&list, 0), 15);
  const auto waits = Take(&list, 0);
  EXPECT_FALSE(list.Seek(3));
  EXPECT_EQ(list.GetState().smallest_step, 7);
  EXPECT_TRUE(list.Cancel(waits->ticket));
  EXPECT_TRUE(list.Seek(3));  // back, too
  EXPECT_EQ(Index(&list, 1), 6);
}

TEST(TokenListTest, TheLargestStepDoesNotOverflow) {
  for (const int64_t repeats : {int64_t{1}, int64_t{3}, int64_t{1} << 40,
                                std::numeric_limits<int64_t>::max()}) {
    TokenList list({repeats, Gate::kStep, 0, 1, 1});
    ASSERT_TRUE(list.Seek(list.max_step()));
    const auto taking = Take(&list, 0);
    EXPECT_EQ(taking->value, list.max_step());
    EXPECT_EQ(taking->outcome, list.max_step() * repeats);
  }
}

TEST(TokenListTest, StateTellsWhoWaits) {
  TokenList list({1, Gate::kClock, 0, 1, 3});
  EXPECT_EQ(Index(&list, 2), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  const auto first = Take(&list, 2);
  const auto second = Take(&list, 1);
  const TokenList::State state = list.GetState();
  ASSERT_EQ(state.waiting.size(), 2);
  EXPECT_EQ(state.waiting[0].worker, 2);
  EXPECT_EQ(state.waiting[1].worker, 1);
  EXPECT_GE(state.waiting[1].seconds, 0.0);
  EXPECT_GE(state.waiting[0].seconds, state.waiting[1].seconds);
  EXPECT_TRUE(state.workers[1].held.empty());  // It asks for the next.
  EXPECT_EQ(state.workers[1].clock, 1);
}

TEST(TokenListTest, ClosingAnswersAllThatWaitAndAllLaterTakes) {
  std::shared_ptr<Taking> waits;
  {
    TokenList list({1, Gate::kStep, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    waits = Take(&list, 1);
    list.Close();
    EXPECT_EQ(waits->outcome, kClosed);
    EXPECT_EQ(Index(&list, 0), kClosed);
    list.ReportStep(0, 1);
    list.Lose(0);
    list.Close();
  }
  EXPECT_EQ(waits->calls, 1);
  {
    TokenList list({1, Gate::kStep, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    waits = Take(&list, 1);
  }
  EXPECT_EQ(waits->outcome, kClosed);
}

TEST(TokenListTest, ACallbackMayCallTheList) {
  TokenList list({1, Gate::kStep, 0, 1, 1});
  std::vector<int64_t> taken;
  TokenList::Callback next = [&](Answer answer, Token token) {
    if (answer != Answer::kToken) return;
    taken.push_back(token.index);
    if (token.index < 50) list.ReportStep(0, token.value + 1);
    list.GetState();
    list.Take(0, next);
  };
  list.Take(0, next);
  EXPECT_EQ(taken.size(), 51);
  list.Close();
}

// The rules, by brute force: every token has an entry, and every question is
// answered by looking at all of them.
class Simulation {
 public:
  explicit Simulation(const TokenList::Options& options)
      : options_(options),
        steps_(options.servers, 0),
        live_(options.workers, true),
        clocks_(options.workers, 0) {}

  int Take(int worker) {
    if (!live_[worker]) {
      std::optional<int64_t> slowest = Slowest();
      if (slowest) clocks_[worker] = *slowest;
      live_[worker] = true;
    }
    if (options_.gate != Gate::kStep) Release(worker);
    takes_.push_back({worker, kWaits});
    Settle();
    return static_cast<int>(takes_.size()) - 1;
  }

  bool Cancel(int take) {
    if (takes_[take].outcome != kWaits) return false;
    takes_[take].outcome = kCancelled;
    return true;
  }

  TokenList::Loss Lose(int worker) {
    TokenList::Loss loss;
    for (Entry& entry : tokens_) {
      if (entry.holder != worker) continue;
      entry.holder = -1;
      if (options_.gate != Gate::kStep) {
        ++loss.lost;
      } else if (!IsUseless(entry)) {
        ++loss.reissued;
        entry.free = true;
      }
    }
    Go(worker);
    return loss;
  }

  void Leave(int worker) {
    Release(worker);
    Go(worker);
  }

  void ReportStep(int server, int64_t step) {
    steps_[server] = std::max(steps_[server], step);
    Settle();
  }

  bool Seek(int64_t step) {
    for (const auto& take : takes_) {
      if (take.outcome == kWaits) return false;
    }
    tokens_.clear();
    first_ = step * options_.repeats;
    std::fill(steps_.begin(), steps_.end(), step);
    live_.assign(live_.size(), true);
    clocks_.assign(clocks_.size(), 0);
    return true;
  }

  int64_t outcome(int take) const { return takes_[take].outcome; }
  bool live(int worker) const { return live_[worker]; }
  int64_t clock(int worker) const { return clocks_[worker]; }

  std::set<int64_t> Held(int worker) const {
    std::set<int64_t> held;
    for (const Entry& entry : tokens_) {
      if (entry.holder != worker) continue;
      if (options_.gate == Gate::kStep && IsUseless(entry)) continue;
      held.insert(entry.index);
    }
    return held;
  }

 private:
  struct Entry {
    int64_t index;
    bool free;
    int holder;
  };
  struct Waiter {
    int worker;
    int64_t outcome;
  };

  int64_t Smallest() const {
    return *std::min_element(steps_.begin(), steps_.end());
  }
  bool IsUseless(const Entry& entry) const {
    return entry.index / options_.repeats < Smallest();
  }
  std::optional<int64_t> Slowest() const {
    std::optional<int64_t> slowest;
    for (size_t w = 0; w < live_.size(); ++w) {
      if (live_[w] && (!slowest || clocks_[w] < *slowest)) {
        slowest = clocks_[w];
      }
    }
    return slowest;
  }
  void Release(int worker) {
    for (Entry& entry : tokens_) {
      if (entry.holder == worker) entry.holder = -1;
    }
  }
  void Go(int worker) {
    live_[worker] = false;
    for (auto& take : takes_) {
      if (take.worker == worker && take.outcome == kWaits) {
        take.outcome = kGone;
      }
    }
    Settle();
  }
  // The first token that may still be handed out.
  Entry* Next() {
    while (true) {
      for (Entry& entry : tokens_) {
        const bool useless = options_.gate == Gate::kStep && IsUseless(entry);
        if (entry.free && !useless) return &entry;
      }
      tokens_.push_back(
          {first_ + static_cast<int64_t>(tokens_.size()), true, -1});
    }
  }
  bool IsOpen(int worker) {
    if (options_.gate == Gate::kStep) {
      return Next()->index / options_.repeats <= Smallest();
    }
    if (options_.gate == Gate::kClock) {
      return clocks_[worker] - *Slowest() <= options_.clock_bound;
    }
    return true;
  }
  void Settle() {
    for (bool changed = true; changed;) {
      changed = false;
      for (auto& take : takes_) {
        if (take.outcome != kWaits || !IsOpen(take.worker)) continue;
        Entry* entry = Next();
        entry->free = false;
        entry->holder = take.worker;
        take.outcome = entry->index;
        ++clocks_[take.worker];
        changed = true;
        break;
      }
    }
  }

  const TokenList::Options options_;
  int64_t first_ = 0;
  std::vector<Entry> tokens_;  // from first_ on
  std::vector<int64_t> steps_;
  std::vector<bool> live_;
  std::vector<int64_t> clocks_;
  std::vector<Waiter> takes_;
};

void CompareWithTheSimulation(const TokenList::Options& options, int seed) {
  SCOPED_TRACE("gate " + std::to_string(static_cast<int>(options.gate)) +
               ", seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&random](int64_t n) {
    return static_cast<int>(random() % static_cast<uint64_t>(n));
  };
  TokenList list(options);
  Simulation simulation(options);
  std::vector<std::shared_ptr<Taking>> takes;
  TokenList::Counts counts;
  for (int event = 0; event < 150; ++event) {
    const int worker = below(options.workers);
    const int kind = below(100);
    if (kind < 60) {
      takes.push_back(Take(&list, worker));
      ASSERT_EQ(simulation.Take(worker) + 1, static_cast<int>(takes.size()));
    } else if (kind < 68 && !takes.empty()) {
      const int take = below(static_cast<int64_t>(takes.size()));
      const bool cancelled = list.Cancel(takes[take]->ticket);
      ASSERT_EQ(cancelled, simulation.Cancel(take));
      if (cancelled) takes[take]->outcome = kCancelled;
    } else if (kind < 74) {
      const TokenList::Loss loss = list.Lose(worker);
      const TokenList::Loss expected = simulation.Lose(worker);
      ASSERT_EQ(loss.lost, expected.lost);
      ASSERT_EQ(loss.reissued, expected.reissued);
      counts.lost += loss.lost;
      counts.reissued += loss.reissued;
    } else if (kind < 78) {
      list.Leave(worker);
      simulation.Leave(worker);
    } else if (kind < 98) {
      const int server = below(options.servers);
      const int64_t step =
          std::max<int64_t>(0, list.GetState().steps[server] + below(4) - 1);
      list.ReportStep(server, step);
      simulation.ReportStep(server, step);
    } else {
      const int64_t step = below(20);
      ASSERT_EQ(list.Seek(step), simulation.Seek(step));
    }
    const TokenList::State state = list.GetState();
    int64_t waiting = 0;
    counts.taken = 0;
    for (size_t i = 0; i < takes.size(); ++i) {
      ASSERT_EQ(takes[i]->outcome, simulation.outcome(i)) << "take " << i;
      const int64_t outcome = takes[i]->outcome;
      const bool answered = outcome != kWaits && outcome != kCancelled;
      ASSERT_EQ(takes[i]->calls, answered ? 1 : 0);
      if (outcome == kWaits) ++waiting;
      if (outcome < 0) continue;
      ++counts.taken;
      ASSERT_EQ(takes[i]->value, outcome / options.repeats);
    }
    ASSERT_EQ(static_cast<int64_t>(state.waiting.size()), waiting);
    ASSERT_EQ(state.counts.taken, counts.taken);
    ASSERT_EQ(state.counts.lost, counts.lost);
    ASSERT_EQ(state.counts.reissued, counts.reissued);
    for (int w = 0; w < options.workers; ++w) {
      ASSERT_EQ(state.workers[w].live, simulation.live(w));
      ASSERT_EQ(state.workers[w].clock, simulation.clock(w));
      ASSERT_EQ(state.workers[w].held, simulation.Held(w));
    }
  }
}

TEST(TokenListTest, RandomInterleavingsAreThoseOfTheSimulation) {
  for (int seed = 0; seed < 60; ++seed) {
    CompareWithTheSimulation({1 + seed % 5, Gate::kNone, 0, 1, 3}, seed);
    CompareWithTheSimulation({1 + seed % 5, Gate::kStep, 0, 1 + seed % 3, 4},
                             seed);
    CompareWithTheSimulation({1, Gate::kClock, seed % 4, 1, 2 + seed % 4},
                             seed);
  }
}

TEST(TokenListTest, EveryTokenIsTakenOrSkippedOrWillBeHandedOutAgain) {
  std::mt19937 random(5);
  TokenList list({4, Gate::kStep, 0, 1, 4});
  for (int event = 0; event < 3000; ++event) {
    const int worker = static_cast<int>(random() % 4);
    const int kind = static_cast<int>(random() % 10);
    if (kind < 7) {
      Take(&list, worker);
    } else if (kind < 8) {
      list.Lose(worker);
    } else {
      list.ReportStep(0, list.GetState().smallest_step + random() % 2);
    }
    const TokenList::State state = list.GetState();
    ASSERT_EQ(state.position + state.counts.reissued,
              state.counts.taken + state.counts.skipped +
                  static_cast<int64_t>(state.reissues.size()));
  }
  EXPECT_GT(list.GetState().counts.skipped, 10);
  EXPECT_GT(list.GetState().counts.reissued, 10);
}

constexpr int kThreads = 16;

void InThreads(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int w = 0; w < kThreads; ++w) threads.emplace_back(body, w);
  for (std::thread& thread : threads) thread.join();
}

// Takes a token and waits for it; -1 where there is none.
class Waiter {
 public:
  Token Take(TokenList* list, int worker) {
    MutexLock lock(&mu_);
    answered_ = false;
    mu_.Unlock();
    list->Take(worker, [this](Answer answer, Token token) {
      MutexLock lock(&mu_);
      answered_ = true;
      token_ = token;
      EXPECT_EQ(answer == Answer::kToken, token.index >= 0);
      changed_.Signal();
    });
    mu_.Lock();
    while (!answered_) changed_.Wait(&mu_);
    return token_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
  Token token_ ABSL_GUARDED_BY(mu_);
};

TEST(TokenListTest, ManyThreadsGetEveryTokenOnce) {
  constexpr int kTakes = 3000;
  TokenList list({kThreads, Gate::kNone, 0, 1, kThreads});
  std::vector<std::vector<int64_t>> taken(kThreads);
  InThreads([&](int w) {
    Waiter waiter;
    for (int i = 0; i < kTakes; ++i) {
      taken[w].push_back(waiter.Take(&list, w).index);
    }
  });
  std::vector<int64_t> all;
  for (const auto& of_worker : taken) {
    EXPECT_TRUE(std::is_sorted(of_worker.begin(), of_worker.end()));
    all.insert(all.end(), of_worker.begin(), of_worker.end());
  }
  std::sort(all.begin(), all.end());
  ASSERT_EQ(all.size(), kThreads * kTakes);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i);
}

// Servers that count different pushes of their step, as a gradient buffer does,
// and report to the list.
class Servers {
 public:
  Servers(TokenList* list, int servers, int64_t needed)
      : list_(list), needed_(needed), steps_(servers, 0), arrived_(servers) {}

  void Push(int server, Token token) {
    int64_t step;
    {
      MutexLock lock(&mu_);
      if (token.value < steps_[server]) return;  // late, or a second time
      EXPECT_EQ(token.value, steps_[server]);
      arrived_[server].insert(token.index);
      if (static_cast<int64_t>(arrived_[server].size()) < needed_) return;
      arrived_[server].clear();
      step = ++steps_[server];
    }
    list_->ReportStep(server, step);
  }

 private:
  TokenList* const list_;
  const int64_t needed_;
  Mutex mu_;
  std::vector<int64_t> steps_ ABSL_GUARDED_BY(mu_);
  std::vector<std::set<int64_t>> arrived_ ABSL_GUARDED_BY(mu_);
};

void TrainInStep(int64_t backups) {
  constexpr int64_t kSteps = 150;
  constexpr int kServers = 3;
  TokenList list({kThreads, Gate::kStep, 0, kServers, kThreads});
  Servers servers(&list, kServers, kThreads - backups);
  std::atomic<int64_t> deaths{0};
  InThreads([&](int w) {
    std::mt19937 random(w);
    Waiter waiter;
    int64_t last_value = 0;
    while (true) {
      const Token token = waiter.Take(&list, w);
      if (token.index < 0 || token.value >= kSteps) break;
      EXPECT_GE(token.value, last_value);
      last_value = token.value;
      // It dies before it has pushed to all servers, and comes back.
      const bool dies = random() % 10 == 0;
      const int reached =
          dies ? static_cast<int>(random() % kServers) : kServers;
      for (int s = 0; s < reached; ++s) servers.Push(s, token);
      if (reached < kServers) {
        ++deaths;
        list.Lose(w);
      }
    }
    list.Close();  // One has seen the last step: all are done.
  });
  EXPECT_GE(list.GetState().smallest_step, kSteps);
  EXPECT_GT(deaths, 0);
}

TEST(TokenListTest, WorkersThatDieInMidStepLeaveNobodyWaiting) {
  TrainInStep(0);
}

TEST(TokenListTest, NobodyWaitsForBackupWorkersThatDie) { TrainInStep(3); }

TEST(TokenListTest, NoThreadGetsFartherAheadThanTheClockBound) {
  constexpr int kTakes = 400;
  for (const int64_t bound : {0, 1, 5}) {
    TokenList list({1, Gate::kClock, bound, 1, kThreads});
    std::atomic<int64_t> started[kThreads] = {};
    std::atomic<int64_t> total{0};
    InThreads([&](int w) {
      Waiter waiter;
      for (int64_t clock = 0; clock < kTakes; ++clock) {
        // Counted before it is taken: never below the list's own clock.
        ++started[w];
        ASSERT_GE(waiter.Take(&list, w).index, 0);
        ++total;
        for (const auto& other : started) ASSERT_LE(clock - bound, other);
      }
    });
    EXPECT_EQ(total, kThreads * kTakes);
    EXPECT_EQ(list.GetState().position, kThreads * kTakes);
  }
}

TEST(TokenListTest, ATakeThatIsCancelledFromAnotherThreadEndsOnce) {
  constexpr int kRounds = 2000;
  TokenList list({1, Gate::kStep, 0, 1, 2});
  ASSERT_EQ(Index(&list, 1), 0);
  int64_t expected = 1;
  int cancelled = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> calls{0};
    std::atomic<int64_t> index{-1};
    const TokenList::Ticket ticket =
        list.Take(0, [&](Answer answer, Token token) {
          EXPECT_EQ(answer, Answer::kToken);
          index = token.index;
          ++calls;
        });
    std::thread reporter([&] { list.ReportStep(0, expected); });
    const bool won = list.Cancel(ticket);
    reporter.join();
    ASSERT_EQ(calls, won ? 0 : 1);
    cancelled += won ? 1 : 0;
    if (won) {
      ASSERT_EQ(Index(&list, 1), expected);  // Still there.
    } else {
      ASSERT_EQ(index, expected);
    }
    ++expected;
  }
  EXPECT_GT(cancelled, 0);
}

}  // namespace
}  // namespace recsync
