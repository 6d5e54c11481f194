// The whole protocol of decentralized training (Hop) in random order, for
// tests: workers that compute for random times, edges that carry parcels after
// random times, and workers that are lost, return or leave. After every event
// it is compared with the paper's bounds.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_SIMULATION_TESTING_H_
#define TF_RECSYNC_CC_ENGINE_HOP_SIMULATION_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cc/engine/hop_setting_testing.h"
#include "cc/engine/hop_worker.h"

namespace recsync {

class HopSimulation {
 public:
  HopSimulation(const Setting& setting, uint32_t seed)
      : setting_(setting), random_(seed), n_(setting.graph.size()) {
    CheckBounds();
    members_.resize(n_);
    for (int64_t i = 0; i < n_; ++i) {
      workers_.push_back(std::make_unique<Worker>(OptionsOf(setting_, i)));
    }
  }

  // Everybody finishes `iterations` iterations, except who is gone by then.
  void Run(int64_t iterations) {
    iterations_ = iterations;
    for (int64_t i = 0; i < n_; ++i) {
      for (const int64_t j : Neighbors(i)) Collect(i, j);
      Begin(i);
    }
    if (setting_.losses + setting_.leaves > 0) {
      Later(-1, [this] { Disturb(); });
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
      if (members_[i].presence != Presence::kThere) continue;
      ASSERT_TRUE(members_[i].finished)
          << "worker " << i << " is stuck in iteration "
          << workers_[i]->iteration();
      EXPECT_GE(workers_[i]->iteration(), iterations - 1);
    }
    if (!has_departed_) CheckCounts();
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
  int64_t lost() const { return lost_; }
  int64_t returned() const { return returned_; }
  int64_t left() const { return left_; }
  int64_t repeated() const { return repeated_; }

 private:
  // An update is known by who made it and when.
  struct Update {
    int64_t sender;
    int64_t iteration;
  };
  using Worker = HopWorker<Update>;

  enum class Presence { kThere, kLost, kLeft };

  struct Event {
    int64_t worker;
    std::function<void()> run;
  };

  struct Span {
    int64_t since = 0;
    int64_t until = kForever;
  };

  struct Member {
    Presence presence = Presence::kThere;
    int64_t life = 0;   // how often it was lost
    int64_t first = 0;  // the iteration that it began with
    bool finished = false;
    bool leaving = false;  // instead of its next iteration
    bool between = false;  // tokens are taken, the iteration is not entered
    int64_t awaited = -1;  // the iteration whose updates it waited for last
    int64_t reduced = -1;  // the iteration whose updates came last
    std::map<int64_t, int64_t> announced;       // by in-neighbor that was told
    std::map<int64_t, int64_t> received;        // newest iteration by sender
    std::map<int64_t, Span> told;               // when a neighbor takes part
    std::map<int64_t, std::set<int64_t>> come;  // parcels' numbers by sender
  };

  // With the same backup workers everywhere the bounds are at least as strict
  // as the paper's table 1.
  void CheckBounds() {
    const std::set<int64_t> counts(setting_.backup_workers.begin(),
                                   setting_.backup_workers.end());
    if (counts.size() > 1) return;
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        const int64_t without_tokens =
            *counts.begin() > 0 ? kInfinity : Ahead() * lengths_[j][i];
        const int64_t by_tokens = setting_.Allowance() > 0
                                      ? setting_.Allowance() * lengths_[i][j]
                                      : kInfinity;
        ASSERT_LE(bounds_[i][j], std::min(without_tokens, by_tokens));
      }
    }
  }

  int64_t Ahead() const { return setting_.Ahead(); }
  bool Sends(int64_t i, int64_t j) const { return setting_.Sends(i, j); }

  std::vector<int64_t> Neighbors(int64_t i) const {
    std::vector<int64_t> neighbors;
    for (int64_t j = 0; j < n_; ++j) {
      if (Sends(i, j) || Sends(j, i)) neighbors.push_back(j);
    }
    return neighbors;
  }

  bool IsThere(int64_t i) const {
    return members_[i].presence == Presence::kThere;
  }
  bool IsLost(int64_t i) const {
    return members_[i].presence == Presence::kLost;
  }

  // Runs, unless the worker is lost until then.
  void Later(int64_t worker, std::function<void()> run) {
    if (worker < 0) {
      events_.push_back({worker, std::move(run)});
      return;
    }
    const int64_t life = members_[worker].life;
    events_.push_back({worker, [this, worker, life, run = std::move(run)] {
                         if (members_[worker].life == life) run();
                       }});
  }

  // Edges.

  void Collect(int64_t from, int64_t to) {
    const int64_t sender_life = members_[from].life;
    const int64_t receiver_life = members_[to].life;
    // A call that was given up may be waiting still.
    if (Fails()) workers_[from]->Collect(to, [](auto, auto) {});
    workers_[from]->Collect(
        to, [=, this_ = this](Worker::Answer answer, Worker::Parcel parcel) {
          if (answer != Worker::Answer::kOk) return;
          auto shared = std::make_shared<Worker::Parcel>(std::move(parcel));
          this_->Later(-1, [=] {
            // What goes to one that was lost is lost, and perhaps what comes
            // from it; there is no loop for its next life yet.
            if (this_->members_[to].life != receiver_life) return;
            const bool alive = this_->members_[from].life == sender_life;
            if (!alive && (!this_->IsLost(from) || this_->random_() % 2))
              return;
            // A call may fail before it gets there, or after that.
            const bool arrives = !this_->Fails();
            if (arrives) this_->Carry(from, to, *shared);
            if (!alive) return;
            if (arrives && !this_->Fails()) {
              this_->workers_[from]->Carried(to, shared->number,
                                             shared->iteration, 0);
            }
            this_->Collect(from, to);
          });
        });
  }

  bool Fails() {
    return setting_.failing_calls > 0 &&
           static_cast<int64_t>(random_() % 100) < setting_.failing_calls;
  }

  void Carry(int64_t from, int64_t to, const Worker::Parcel& parcel) {
    if (parcel.progress >= 0) {
      auto& announced = members_[from].announced;
      announced.try_emplace(to, -1);
      announced[to] = std::max(announced[to], parcel.progress);
      ASSERT_TRUE(workers_[to]->Announce(from, parcel.progress));
    }
    if (!parcel.update.has_value()) return;
    ASSERT_EQ(parcel.iteration, parcel.update->iteration);
    repeated_ += parcel.repeated;
    const bool is_new = members_[to].come[from].insert(parcel.number).second;
    if (workers_[to]->Wanted(from, parcel.number, parcel.iteration)) {
      ASSERT_TRUE(is_new);
      const auto delivered = workers_[to]->Deliver(
          from, parcel.number, parcel.iteration, *parcel.update);
      ASSERT_TRUE(delivered == Worker::Delivered::kQueued ||
                  delivered == Worker::Delivered::kDropped)
          << static_cast<int>(delivered) << " from " << from << " to " << to;
    } else if (is_new) {
      // Only what nobody can use stays away: one that jumps waits for updates
      // that are newer than the next.
      const Member& member = members_[to];
      ASSERT_LE(parcel.iteration + Ahead() - 1,
                std::max(member.reduced, member.awaited - 1));
    }
  }

  // A worker's life.

  void Begin(int64_t i) {
    if (members_[i].leaving) {
      Leave(i);
      return;
    }
    const int64_t next = workers_[i]->PlanNext();
    const auto acquire = [this, i, next] {
      workers_[i]->AcquireTokens(next, [this, i, next](Worker::Answer answer) {
        if (answer == Worker::Answer::kClosed) return;
        ASSERT_EQ(answer, Worker::Answer::kOk);
        members_[i].between = true;
        Later(i, [this, i, next] { Enter(i, next); });
      });
    };
    if (!workers_[i]->IsJump(next)) {
      acquire();
      return;
    }
    ASSERT_LE(next - workers_[i]->iteration(), setting_.max_jump);
    int64_t slowest = kInfinity;
    for (const int64_t j : setting_.graph[i]) {
      const Span& span = members_[i].told[j];
      if (IsLost(j) || span.until != kForever) continue;
      slowest = std::min(slowest, std::max(At(j), span.since));
    }
    ASSERT_LE(next, slowest) << "it passes a neighbor";
    ASSERT_GT(slowest - At(i), setting_.jump_trigger) << "no reason to jump";
    Receive(i, next - 1, acquire);
  }

  void Enter(int64_t i, int64_t k) {
    members_[i].between = false;
    std::optional<Update> update;
    if (!setting_.serial) update = Update{i, k};
    workers_[i]->Enter(k, update, [this, i, k](Worker::Answer answer) {
      if (answer == Worker::Answer::kClosed) return;
      ASSERT_EQ(answer, Worker::Answer::kOk);
      Later(i, [this, i, k] { Computed(i, k); });
    });
  }

  void Computed(int64_t i, int64_t k) {
    const auto receive = [this, i, k](Worker::Answer answer) {
      if (answer == Worker::Answer::kClosed) return;
      ASSERT_EQ(answer, Worker::Answer::kOk);
      Receive(i, k, [this, i, k] {
        workers_[i]->Reduced();
        if (k + 1 >= iterations_) {
          members_[i].finished = true;
        } else {
          Begin(i);
        }
      });
    };
    if (setting_.serial) {
      workers_[i]->Send(Update{i, k}, receive);
    } else {
      receive(Worker::Answer::kOk);
    }
  }

  void Receive(int64_t i, int64_t k, std::function<void()> then) {
    members_[i].awaited = k;
    workers_[i]->Receive(
        k, [this, i, k, then](Worker::Answer answer, auto received) {
          if (answer == Worker::Answer::kClosed) return;
          ASSERT_EQ(answer, Worker::Answer::kOk);
          CheckReceived(i, k, received);
          Later(i, then);
        });
  }

  // Departures. One at a time; meanwhile the others go on.

  void Disturb() {
    if (events_.empty()) return;  // Everybody else is done, or stuck.
    Later(-1, [this] { Disturb(); });
    if (is_disturbed_ || random_() % 3 != 0) return;
    const int64_t i = random_() % n_;
    if (IsLost(i)) {
      is_disturbed_ = true;
      Return(i, /*margin=*/2);
    } else if (!IsThere(i) || members_[i].finished) {
      return;
    } else if (lost_ < setting_.losses && MayLose(i) && random_() % 2 == 0) {
      Lose(i);
    } else if (left_ < setting_.leaves && !members_[i].leaving) {
      ++left_;
      members_[i].leaving = true;
    }
  }

  // Whether enough of everybody's in-neighbors remain.
  bool MayLose(int64_t i) const {
    for (const int64_t receiver : setting_.graph[i]) {
      if (IsLost(receiver)) continue;
      int64_t lost = 1;
      for (int64_t j = 0; j < n_; ++j) {
        lost += Sends(j, receiver) && IsLost(j);
      }
      if (lost > setting_.backup_workers[receiver]) return false;
    }
    return true;
  }

  void Lose(int64_t i) {
    ++lost_;
    is_disturbed_ = true;
    has_departed_ = true;
    graveyard_.push_back(std::move(workers_[i]));
    Member next;
    next.presence = Presence::kLost;
    next.life = members_[i].life + 1;
    members_[i] = next;
    // Until it is back nothing is asked of it.
    workers_[i] = std::make_unique<Worker>(OptionsOf(setting_, i));
    for (const int64_t j : Neighbors(i)) workers_[j]->CancelCollect(i);
    Depart(i, {0, -1});
  }

  void Leave(int64_t i) {
    if (is_disturbed_) {
      Later(i, [this, i] { Leave(i); });
      return;
    }
    is_disturbed_ = true;
    has_departed_ = true;
    members_[i].presence = Presence::kLeft;
    Depart(i, {0, workers_[i]->iteration()});
  }

  // Everybody has to know that bounds by paths are void before neighbors go on
  // without the worker; for that they are told of themselves.
  void Depart(int64_t i, Span span, int64_t next = 0) {
    if (next < n_) {
      if (!IsLost(next)) workers_[next]->SetNeighbor(next, 0, -1);
      Later(-1, [this, i, span, next] { Depart(i, span, next + 1); });
      return;
    }
    Tell(i, Neighbors(i), span, [this](const auto&) { is_disturbed_ = false; });
  }

  void Return(int64_t i, int64_t margin) {
    int64_t latest = -1;
    for (const int64_t j : Neighbors(i)) {
      if (!IsLost(j)) latest = std::max(latest, workers_[j]->iteration());
    }
    const int64_t first = latest + margin;
    if (latest < 0 || first >= iterations_) {
      // Too late; some may wait for it already.
      Depart(i, {0, -1});
      return;
    }
    workers_[i] = std::make_unique<Worker>(OptionsOf(setting_, i));
    workers_[i]->Begin(first);
    members_[i].first = first;
    members_[i].reduced = first - 1;
    Tell(i, Neighbors(i), {first, kForever},
         [this, i, first, margin](const std::map<int64_t, int64_t>& now) {
           for (const auto& item : now) {
             if (item.second < first) continue;
             // It has been faster.
             Return(i, 2 * margin);
             return;
           }
           for (const int64_t j : Neighbors(i)) {
             Span span = {0, -1};
             if (members_[j].presence == Presence::kLeft) {
               span.until = workers_[j]->iteration();
             } else if (IsThere(j)) {
               span = {std::max<int64_t>(now.at(j), 0), kForever};
             }
             TellOne(j, i, span);
           }
           ++returned_;
           is_disturbed_ = false;
           members_[i].presence = Presence::kThere;
           for (const int64_t j : Neighbors(i)) {
             if (IsLost(j)) continue;
             Collect(i, j);
             Collect(j, i);
           }
           Begin(i);
         });
  }

  // Tells `others` one after another; `then` gets their iterations.
  void Tell(int64_t about, std::vector<int64_t> others, Span span,
            std::function<void(const std::map<int64_t, int64_t>&)> then,
            std::map<int64_t, int64_t> now = {}) {
    if (others.empty()) {
      then(now);
      return;
    }
    const int64_t other = others.front();
    others.erase(others.begin());
    if (!IsLost(other)) now[other] = TellOne(about, other, span);
    Later(-1, [this, about, others, span, then, now] {
      Tell(about, others, span, then, now);
    });
  }

  int64_t TellOne(int64_t about, int64_t other, Span span) {
    Member& member = members_[other];
    member.told[about].until = span.until;
    if (span.until == kForever) {
      member.told[about].since = span.since;
      member.received[about] = span.since - 1;
      member.come[about].clear();
      members_[about].announced[other] = span.since;
    }
    return workers_[other]->SetNeighbor(about, span.since, span.until);
  }

  // What must hold.

  void CheckReceived(int64_t i, int64_t k,
                     const std::vector<Worker::Received>& got) {
    const int64_t in = workers_[i]->options().in_neighbors.size();
    const int64_t backups = setting_.backup_workers[i];
    const int64_t s = setting_.staleness_bound;
    members_[i].reduced = k;
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
      members_[i].received[item.sender] = item.iteration;
      const double share =
          s >= 0 ? static_cast<double>(item.iteration - (k - s) + 1) : 1.0;
      const double expected =
          s < 0 && backups == 0 ? 1.0 / (1.0 + in) : share / shares;
      EXPECT_NEAR(item.weight, expected, 1e-12);
    }
    EXPECT_LT(weights, 1.0);
    int64_t expected = 0;
    int64_t satisfied = 0;
    for (const int64_t j : workers_[i]->options().in_neighbors) {
      const Span& span = members_[i].told[j];
      if (k < span.since || k > span.until) continue;
      ++expected;
      satisfied += s < 0 ? senders.count(j) : Newest(i, j) >= k - s;
    }
    EXPECT_GE(satisfied, std::min(expected, in - backups));
  }

  int64_t Newest(int64_t i, int64_t sender) {
    const auto found = members_[i].received.find(sender);
    return found == members_[i].received.end() ? -1 : found->second;
  }

  void Check() {
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        if (i == j || !IsThere(i) || !IsThere(j)) continue;
        largest_gap_ = std::max(largest_gap_, At(i) - At(j));
        if (!has_departed_) {
          ASSERT_LE(At(i) - At(j), bounds_[i][j]) << "of " << i << " to " << j;
        }
        // Paths end where somebody is gone; what neighbors keep between them
        // holds on. One that returns is ahead of some at first.
        if (steps_[i][j] < kInfinity) {
          ASSERT_LE(At(i), std::max(members_[i].first, At(j) + steps_[i][j]))
              << "of " << i << " to " << j;
        }
      }
    }
    if (setting_.max_iteration_gap > 0) CheckTokens();
  }

  void CheckTokens() {
    for (int64_t j = 0; j < n_; ++j) {
      if (!IsThere(j) || members_[j].between || IsNew(j)) continue;
      const auto state = workers_[j]->GetState();
      if (state.phase == Worker::Phase::kTokens) continue;
      for (size_t o = 0; o < setting_.graph[j].size(); ++o) {
        const int64_t i = setting_.graph[j][o];
        if (!IsThere(i) || IsNew(i)) continue;
        const auto told = members_[i].announced.find(j);
        const int64_t announced =
            told == members_[i].announced.end() ? -1 : told->second;
        const int64_t in_flight = At(i) - announced;
        ASSERT_EQ(state.tokens[o] + in_flight,
                  At(i) - At(j) + setting_.max_iteration_gap)
            << "of " << i << " for " << j;
        if (has_departed_) continue;
        ASSERT_LE(state.tokens[o],
                  setting_.max_iteration_gap * (lengths_[i][j] + 1));
      }
    }
  }

  // Every update that was sent came once.
  void CheckCounts() {
    int64_t sent = 0;
    int64_t come = 0;
    for (const auto& worker : workers_) {
      const auto state = worker->GetState();
      sent += state.counts.sent;
      come += state.updates.enqueued;
      for (const int64_t count : state.declined) come += count;
    }
    EXPECT_EQ(come, sent);
  }

  // Before the first iteration of all, tokens are one less than the paper says.
  bool IsNew(int64_t i) {
    return members_[i].life == 0 && workers_[i]->iteration() < 0;
  }

  // Before its first iteration, a worker is in it already for the paper.
  int64_t At(int64_t i) {
    return std::max<int64_t>(workers_[i]->iteration(), members_[i].first);
  }

  const Setting setting_;
  std::mt19937 random_;
  const int64_t n_;
  int64_t iterations_ = 0;
  int64_t largest_gap_ = 0;
  int64_t lost_ = 0;
  int64_t returned_ = 0;
  int64_t left_ = 0;
  int64_t repeated_ = 0;       // parcels with updates that came, perhaps again
  bool is_disturbed_ = false;  // somebody is about to be gone, or back
  bool has_departed_ = false;
  const Matrix lengths_ = ShortestPaths(EdgesOf(setting_));
  const Matrix steps_ = StepsOf(setting_);  // the bounds between neighbors
  const Matrix bounds_ = BoundsOf(setting_);
  std::vector<Member> members_;
  std::vector<Event> events_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::unique_ptr<Worker>> graveyard_;  // Their waits never end.
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_SIMULATION_TESTING_H_
