// The token list against a brute-force simulation of random interleavings.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cc/engine/token_list.h"
#include "cc/engine/token_list_testing.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Gate = TokenList::Gate;

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
    if (options_.gate != Gate::kStep) {
      Release(worker);
      Forget(worker);
    }
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
      if (entry.holder == worker) {
        entry.holder = -1;
        entry.gone_with = worker;
        if (options_.gate != Gate::kStep) ++lost_;
      }
      if (entry.gone_with != worker) continue;
      if (options_.gate != Gate::kStep) {
        ++loss.lost;
      } else if (!IsUseless(entry)) {
        loss.withheld.push_back(entry.index);
      }
    }
    Go(worker);
    return loss;
  }

  int64_t Reissue(const std::vector<int64_t>& indices) {
    int64_t reissued = 0;
    for (Entry& entry : tokens_) {
      const bool named =
          std::count(indices.begin(), indices.end(), entry.index);
      if (!named || entry.gone_with < 0 || IsUseless(entry)) continue;
      entry.gone_with = -1;
      entry.free = true;
      ++reissued;
    }
    Settle();
    return reissued;
  }

  void Leave(int worker) {
    Release(worker);
    // What is withheld stays so: servers may wait for it.
    if (options_.gate != Gate::kStep) Forget(worker);
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
  int64_t lost() const { return lost_; }

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
    int gone_with = -1;  // The worker that it was lost with, and not reissued.
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
  void Forget(int worker) {
    for (Entry& entry : tokens_) {
      if (entry.gone_with == worker) entry.gone_with = -1;
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
  int64_t lost_ = 0;
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
  std::vector<int64_t> withheld;  // At any time.
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
      ASSERT_EQ(loss.withheld, expected.withheld);
      withheld.insert(withheld.end(), loss.withheld.begin(),
                      loss.withheld.end());
    } else if (kind < 77 && !withheld.empty()) {
      std::vector<int64_t> indices;
      for (int n = below(3); n >= 0; --n) {
        indices.push_back(
            withheld[below(static_cast<int64_t>(withheld.size()))]);
      }
      const int64_t reissued = list.Reissue(indices);
      ASSERT_EQ(reissued, simulation.Reissue(indices));
      counts.reissued += reissued;
    } else if (kind < 80) {
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
    ASSERT_EQ(state.counts.lost, simulation.lost());
    ASSERT_EQ(state.counts.reissued, counts.reissued);
    for (int w = 0; w < options.workers; ++w) {
      ASSERT_EQ(state.workers[w].live, simulation.live(w));
      ASSERT_EQ(state.workers[w].clock, simulation.clock(w));
      std::set<int64_t> held;
      for (const auto& [index, ticket] : state.workers[w].held) {
        held.insert(index);
      }
      ASSERT_EQ(held, simulation.Held(w));
    }
  }
}

TEST(TokenListSimulationTest, RandomInterleavingsAreThoseOfTheSimulation) {
  for (int seed = 0; seed < 60; ++seed) {
    CompareWithTheSimulation({1 + seed % 5, Gate::kNone, 0, 1, 3}, seed);
    CompareWithTheSimulation({1 + seed % 5, Gate::kStep, 0, 1 + seed % 3, 4},
                             seed);
    CompareWithTheSimulation({1, Gate::kClock, seed % 4, 1, 2 + seed % 4},
                             seed);
  }
}

TEST(TokenListSimulationTest,
     EveryTokenIsTakenOrSkippedOrWillBeHandedOutAgain) {
  std::mt19937 random(5);
  TokenList list({4, Gate::kStep, 0, 1, 4});
  for (int event = 0; event < 3000; ++event) {
    const int worker = static_cast<int>(random() % 4);
    const int kind = static_cast<int>(random() % 10);
    if (kind < 7) {
      Take(&list, worker);
    } else if (kind < 8) {
      list.Reissue(list.Lose(worker).withheld);
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

}  // namespace
}  // namespace recsync
