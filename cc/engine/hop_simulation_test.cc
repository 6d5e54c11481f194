// Random interleavings of the whole protocol against the paper's bounds (Hop,
// table 1), for each setting: workers that compute for random times, edges that
// carry parcels after random times.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/hop_worker.h"

namespace recsync {
namespace {

constexpr int64_t kInfinity = std::numeric_limits<int64_t>::max() / 4;

// An update is known by who made it and when.
struct Update {
  int64_t sender;
  int64_t iteration;
};
using Worker = HopWorker<Update>;
using Graph = std::vector<std::vector<int64_t>>;  // out-neighbors by worker

struct Setting {
  std::string name;
  Graph graph;
  int64_t max_iteration_gap;
  int64_t backup_workers;
  int64_t staleness_bound;
  int64_t max_jump;
  bool notify_ack;
  bool serial;
  int64_t slow = -1;  // a worker that computes for long
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << setting.name;
}

Graph Ring(int64_t n) {
  Graph graph(n);
  for (int64_t i = 0; i < n; ++i) {
    graph[i] = {(i + 1) % n, (i + n - 1) % n};
    std::sort(graph[i].begin(), graph[i].end());
  }
  return graph;
}

Graph RingBased(int64_t n) {
  Graph graph = Ring(n);
  for (int64_t i = 0; i < n; ++i) graph[i].push_back((i + n / 2) % n);
  return graph;
}

// Each worker sends to the next one and to the one after that, only.
Graph OneWay(int64_t n) {
  Graph graph(n);
  for (int64_t i = 0; i < n; ++i) graph[i] = {(i + 1) % n, (i + 2) % n};
  return graph;
}

std::vector<int64_t> Distances(const Graph& graph, int64_t from) {
  std::vector<int64_t> lengths(graph.size(), kInfinity);
  std::vector<int64_t> front = {from};
  lengths[from] = 0;
  while (!front.empty()) {
    std::vector<int64_t> next;
    for (const int64_t i : front) {
      for (const int64_t j : graph[i]) {
        if (lengths[j] < kInfinity) continue;
        lengths[j] = lengths[i] + 1;
        next.push_back(j);
      }
    }
    front = next;
  }
  return lengths;
}

class Simulation {
 public:
  Simulation(const Setting& setting, uint32_t seed)
      : setting_(setting), random_(seed), n_(setting.graph.size()) {
    for (int64_t i = 0; i < n_; ++i) {
      lengths_.push_back(Distances(setting.graph, i));
    }
    for (int64_t i = 0; i < n_; ++i) {
      HopOptions options;
      for (int64_t j = 0; j < n_; ++j) {
        if (Sends(j, i)) options.in_neighbors.push_back(j);
      }
      const int64_t in = options.in_neighbors.size();
      options.weights.assign(in, 1.0 / (1.0 + in));
      options.out_neighbors = setting.graph[i];
      options.max_iteration_gap = setting.max_iteration_gap;
      options.backup_workers = setting.backup_workers;
      options.staleness_bound = setting.staleness_bound;
      options.max_jump = setting.max_jump;
      options.notify_ack = setting.notify_ack;
      // Section 4.1 without token queues, 4.2 with them.
      int64_t gap = setting.max_iteration_gap;
      for (int64_t j = 0; j < n_; ++j) {
        if (setting.max_iteration_gap == 0) {
          gap = std::max(gap, Bound(j, i));
        }
      }
      options.slots = gap + 1;
      options.capacity = (gap + 1) * (in + 1);
      for (const int64_t j : options.in_neighbors) {
        options.gap_bounds.push_back(Bound(j, i) < kInfinity ? Bound(j, i)
                                                             : -1);
      }
      workers_.push_back(std::make_unique<Worker>(options));
      states_.push_back(State());
    }
  }

  // Everybody finishes `iterations` iterations.
  void Run(int64_t iterations) {
    iterations_ = iterations;
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        if (Sends(i, j) || Sends(j, i)) Collect(i, j);
      }
      Begin(i);
    }
    while (!events_.empty() && !testing::Test::HasFailure()) {
      // Slow workers' events come late.
      size_t chosen = random_() % events_.size();
      if (events_[chosen].worker == setting_.slow && random_() % 8 != 0) {
        chosen = random_() % events_.size();
      }
      std::function<void()> run = std::move(events_[chosen].run);
      events_.erase(events_.begin() + chosen);
      run();
      Check();
    }
    for (int64_t i = 0; i < n_; ++i) {
      ASSERT_TRUE(states_[i].finished)
          << "worker " << i << " is stuck in iteration "
          << workers_[i]->iteration();
      EXPECT_GE(workers_[i]->iteration(), iterations - 1);
    }
  }

  int64_t jumps() const {
    int64_t jumps = 0;
    for (const auto& worker : workers_)
      jumps += worker->GetState().counts.jumps;
    return jumps;
  }
  int64_t declined() const {
    int64_t declined = 0;
    for (const auto& worker : workers_) {
      for (const int64_t count : worker->GetState().declined) declined += count;
    }
    return declined;
  }
  int64_t largest_gap() const { return largest_gap_; }

 private:
  struct Event {
    int64_t worker;
    std::function<void()> run;
  };
  struct State {
    bool finished = false;
    bool between = false;  // tokens are taken, the iteration is not entered
    int64_t reduced = -1;  // the iteration whose updates came last
    std::map<int64_t, int64_t> announced;  // by in-neighbor that was told
    std::map<int64_t, int64_t> received;   // newest iteration by sender
  };

  bool Sends(int64_t i, int64_t j) const {
    const auto& out = setting_.graph[i];
    return std::find(out.begin(), out.end(), j) != out.end();
  }

  // Table 1: the largest Iter(i) - Iter(j).
  int64_t Bound(int64_t i, int64_t j) const {
    const int64_t there = lengths_[i][j];
    const int64_t back = lengths_[j][i];
    if (setting_.notify_ack) {
      const int64_t ahead = std::max<int64_t>(setting_.staleness_bound, 0) + 1;
      return std::min(ahead * back, 2 * there);
    }
    int64_t bound = (std::max<int64_t>(setting_.staleness_bound, 0) + 1) * back;
    if (setting_.backup_workers > 0) bound = kInfinity;
    if (setting_.max_iteration_gap > 0) {
      bound = std::min(bound, setting_.max_iteration_gap * there);
    }
    return bound;
  }

  void Later(int64_t worker, std::function<void()> run) {
    events_.push_back({worker, std::move(run)});
  }

  void Collect(int64_t from, int64_t to) {
    workers_[from]->Collect(
        to, [this, from, to](Worker::Answer answer, Worker::Parcel parcel) {
          if (answer != Worker::Answer::kOk) return;
          auto shared = std::make_shared<Worker::Parcel>(std::move(parcel));
          Later(-1, [this, from, to, shared] { Carry(from, to, *shared); });
        });
  }

  void Carry(int64_t from, int64_t to, const Worker::Parcel& parcel) {
    if (parcel.progress >= 0) {
      states_[from].announced[to] =
          std::max(states_[from].announced[to], parcel.progress);
      workers_[to]->Announce(from, parcel.progress);
    }
    if (parcel.update.has_value()) {
      ASSERT_EQ(parcel.iteration, parcel.update->iteration);
      if (workers_[to]->Wanted(from, parcel.iteration)) {
        const auto delivered =
            workers_[to]->Deliver(from, parcel.iteration, *parcel.update);
        ASSERT_TRUE(delivered == Worker::Delivered::kQueued ||
                    delivered == Worker::Delivered::kDropped)
            << static_cast<int>(delivered);
      } else {
        // Only what nobody can use stays away.
        const int64_t stale = std::max<int64_t>(setting_.staleness_bound, 0);
        ASSERT_LE(parcel.iteration + stale, states_[to].reduced);
      }
    }
    Collect(from, to);
  }

  void Begin(int64_t i) {
    const int64_t next = workers_[i]->PlanNext();
    const auto acquire = [this, i, next] {
      workers_[i]->AcquireTokens(next, [this, i, next](Worker::Answer answer) {
        ASSERT_EQ(answer, Worker::Answer::kOk);
        states_[i].between = true;
        Later(i, [this, i, next] { Enter(i, next); });
      });
    };
    if (!workers_[i]->IsJump(next)) {
      acquire();
      return;
    }
    ASSERT_LE(next - workers_[i]->iteration(), setting_.max_jump);
    for (const int64_t j : setting_.graph[i]) {
      ASSERT_LE(next, workers_[j]->iteration()) << "it passes a neighbor";
    }
    workers_[i]->Receive(
        next - 1, [this, i, next, acquire](Worker::Answer answer, auto got) {
          ASSERT_EQ(answer, Worker::Answer::kOk);
          CheckReceived(i, next - 1, got);
          Later(i, acquire);
        });
  }

  void Enter(int64_t i, int64_t k) {
    states_[i].between = false;
    std::optional<Update> update;
    if (!setting_.serial) update = Update{i, k};
    workers_[i]->Enter(k, update, [this, i, k](Worker::Answer answer) {
      ASSERT_EQ(answer, Worker::Answer::kOk);
      Later(i, [this, i, k] { Computed(i, k); });
    });
  }

  void Computed(int64_t i, int64_t k) {
    const auto receive = [this, i, k](Worker::Answer answer) {
      ASSERT_EQ(answer, Worker::Answer::kOk);
      workers_[i]->Receive(k, [this, i, k](Worker::Answer given, auto got) {
        ASSERT_EQ(given, Worker::Answer::kOk);
        CheckReceived(i, k, got);
        Later(i, [this, i, k] {
          workers_[i]->Reduced();
          if (k + 1 >= iterations_) {
            states_[i].finished = true;
          } else {
            Begin(i);
          }
        });
      });
    };
    if (setting_.serial) {
      workers_[i]->Send(Update{i, k}, receive);
    } else {
      receive(Worker::Answer::kOk);
    }
  }

  void CheckReceived(int64_t i, int64_t k,
                     const std::vector<Worker::Received>& got) {
    const int64_t in = workers_[i]->options().in_neighbors.size();
    const int64_t s = setting_.staleness_bound;
    states_[i].reduced = k;
    std::set<int64_t> senders;
    double weights = 0;
    double shares = s >= 0 ? static_cast<double>(s + 1) : 1.0;  // its own
    for (const auto& item : got) {
      EXPECT_TRUE(Sends(item.sender, i));
      EXPECT_TRUE(senders.insert(item.sender).second) << "twice from one";
      EXPECT_EQ(item.update.sender, item.sender);
      EXPECT_EQ(item.update.iteration, item.iteration);
      if (s < 0) {
        EXPECT_EQ(item.iteration, k);
      } else {
        EXPECT_GE(item.iteration, k - s);
        EXPECT_GT(item.iteration, Newest(i, item.sender)) << "not new";
      }
      shares +=
          s >= 0 ? static_cast<double>(item.iteration - (k - s) + 1) : 1.0;
      weights += item.weight;
    }
    for (const auto& item : got) {
      states_[i].received[item.sender] = item.iteration;
      const double share =
          s >= 0 ? static_cast<double>(item.iteration - (k - s) + 1) : 1.0;
      const double expected = s < 0 && setting_.backup_workers == 0
                                  ? 1.0 / (1.0 + in)
                                  : share / shares;
      EXPECT_NEAR(item.weight, expected, 1e-12);
    }
    EXPECT_LT(weights, 1.0);
    int64_t satisfied = 0;
    for (const int64_t j : workers_[i]->options().in_neighbors) {
      satisfied += s < 0 ? senders.count(j) : Newest(i, j) >= k - s;
    }
    EXPECT_GE(satisfied, in - setting_.backup_workers);
  }

  int64_t Newest(int64_t i, int64_t sender) {
    const auto found = states_[i].received.find(sender);
    return found == states_[i].received.end() ? -1 : found->second;
  }

  void Check() {
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        if (i == j) continue;
        // Before the first iteration, a worker is in it already for the paper.
        const int64_t gap = At(i) - At(j);
        largest_gap_ = std::max(largest_gap_, gap);
        ASSERT_LE(gap, Bound(i, j)) << "of " << i << " to " << j;
      }
    }
    if (setting_.max_iteration_gap == 0) return;
    for (int64_t j = 0; j < n_; ++j) {
      if (states_[j].between || workers_[j]->iteration() < 0) continue;
      const auto state = workers_[j]->GetState();
      if (state.phase == Worker::Phase::kTokens) continue;
      for (size_t o = 0; o < setting_.graph[j].size(); ++o) {
        const int64_t i = setting_.graph[j][o];
        if (workers_[i]->iteration() < 0) continue;
        const auto told = states_[i].announced.find(j);
        const int64_t announced =
            told == states_[i].announced.end() ? -1 : told->second;
        const int64_t in_flight = workers_[i]->iteration() - announced;
        ASSERT_EQ(state.tokens[o] + in_flight,
                  At(i) - At(j) + setting_.max_iteration_gap);
        ASSERT_LE(state.tokens[o],
                  setting_.max_iteration_gap * (lengths_[i][j] + 1));
      }
    }
  }

  int64_t At(int64_t i) {
    return std::max<int64_t>(workers_[i]->iteration(), 0);
  }

  const Setting setting_;
  std::mt19937 random_;
  const int64_t n_;
  int64_t iterations_ = 0;
  int64_t largest_gap_ = 0;
  std::vector<std::vector<int64_t>> lengths_;  // of shortest paths
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<State> states_;
  std::vector<Event> events_;
};

class HopSimulationTest : public testing::TestWithParam<Setting> {};

// Sanitizers slow it down, and find what they look for in fewer.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kInterleavings = 300;
#else
constexpr uint32_t kInterleavings = 10000;
#endif

TEST_P(HopSimulationTest, EveryInterleavingKeepsTheBoundsAndComesToItsEnd) {
  const Setting& setting = GetParam();
  int64_t jumps = 0;
  int64_t declined = 0;
  int64_t largest_gap = 0;
  for (uint32_t seed = 0; seed < kInterleavings && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << setting << ", seed " << seed);
    Simulation simulation(setting, seed);
    simulation.Run(/*iterations=*/9);
    jumps += simulation.jumps();
    declined += simulation.declined();
    largest_gap = std::max(largest_gap, simulation.largest_gap());
  }
  // The simulation is worth something only if it gets where it should.
  EXPECT_EQ(jumps > 0, setting.max_jump > 1);
  if (setting.backup_workers > 0) {
    EXPECT_GT(declined, 0);
    EXPECT_GT(largest_gap, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, HopSimulationTest,
    testing::Values(
        Setting{"standard_without_tokens", Ring(5), 0, 0, -1, 1, false, false},
        Setting{"standard", RingBased(4), 3, 0, -1, 1, false, false},
        Setting{"standard_serial", Ring(4), 2, 0, -1, 1, false, true},
        Setting{"standard_one_way", OneWay(5), 2, 0, -1, 1, false, false},
        Setting{"backup", RingBased(6), 3, 1, -1, 1, false, false, 2},
        Setting{"backup_serial", Ring(4), 4, 1, -1, 1, false, true},
        Setting{"backup_two", OneWay(5), 2, 2, -1, 1, false, false},
        Setting{"staleness", Ring(5), 4, 0, 2, 1, false, false, 1},
        Setting{"staleness_without_tokens", Ring(4), 0, 0, 3, 1, false, false},
        Setting{"hybrid", RingBased(6), 4, 1, 2, 1, false, false, 0},
        Setting{"skip_backup", RingBased(6), 3, 1, -1, 10, false, false, 3},
        Setting{"skip_two", Ring(4), 4, 1, -1, 2, false, false, 0},
        Setting{"skip_staleness", Ring(5), 5, 0, 3, 10, false, false, 4},
        Setting{"skip_hybrid", OneWay(5), 4, 1, 1, 3, false, false, 2},
        Setting{"notify_ack", Ring(5), 0, 0, -1, 1, true, false},
        Setting{"notify_ack_serial", Ring(4), 0, 0, -1, 1, true, true},
        Setting{"notify_ack_stale", Ring(4), 0, 0, 1, 1, true, false}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace recsync
