// The updates that a worker of decentralized training receives: who takes part,
// which updates are wanted, when they are enough for an average, and what they
// weigh.
//
//   standard           an update of this iteration from every in-neighbor; the
//                      topology's weights.
//   backup workers     from all but that many; equal weights of what came.
//   bounded staleness  from each in-neighbor an update of at most
//                      `staleness_bound` iterations ago, the newest, received
//                      now or before; those received now have the weight
//                      Iter(update) - (k - staleness_bound) + 1 (Eq. 2).
//   both               that from all but `backup_workers`.
// The worker's own parameters count as one of the updates, with the rest of the
// weight.
//
// Thread safe. Nothing blocks: waits end by callbacks, which are called without
// a lock.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_UPDATES_H_
#define TF_RECSYNC_CC_ENGINE_HOP_UPDATES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/hop_invariants.h"
#include "cc/engine/hop_options.h"
#include "cc/engine/hop_state.h"
#include "cc/engine/mutex.h"
#include "cc/engine/update_queue.h"

namespace recsync {

template <typename Update>
class HopUpdates {
 public:
  // `until` of a neighbor that has not gone.
  static constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

  struct Received {
    int64_t sender;
    int64_t iteration;
    double weight;
    Update update;
  };

  // Called with nothing if it was closed.
  using Done = std::function<void(std::optional<std::vector<Received>>)>;
  using Ticket = typename UpdateQueue<Update>::Ticket;

  // What does not hold of the updates is told to `invariants`.
  HopUpdates(const HopOptions& options, HopInvariants* invariants)
      : options_(options),
        invariants_(invariants),
        queue_({options.slots, options.capacity,
                /*newest_only=*/options.staleness_bound >= 0}) {
    for (const int64_t neighbor : options.in_neighbors) senders_[neighbor];
  }

  // There are none, and all take part from this iteration on.
  void Begin(int64_t first) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      for (auto& [neighbor, sender] : senders_) {
        const int64_t declined = sender.declined;
        sender = Sender();
        sender.last = first - 1;
        sender.declined = declined;
      }
    }
    queue_.Change(
        [&](Entries* entries) { entries->Reset(options_.Floor(first)); });
  }

  // The worker enters an iteration: older ones' may be of no use any more.
  void Enter(int64_t iteration) {
    queue_.Change(
        [&](Entries* entries) { entries->Raise(options_.Floor(iteration)); });
  }

  // Calls `done` once with the updates for the average of an iteration, as soon
  // as they are enough.
  Ticket Await(int64_t iteration, Done done) ABSL_LOCKS_EXCLUDED(mu_) {
    return queue_.Await(
        [this, iteration](Entries* entries, std::vector<Entry>* taken) {
          entries->Raise(options_.Floor(iteration));
          if (!Enough(*entries, iteration)) return false;
          *taken = entries->Take(
              options_.capacity,
              {options_.staleness_bound >= 0 ? kAny : iteration, kAny});
          // Of this iteration nothing is of use any more.
          entries->Raise(options_.Floor(iteration + 1));
          return true;
        },
        [this, iteration, done = std::move(done)](auto answer, auto entries) {
          if (answer == UpdateQueue<Update>::Answer::kClosed) {
            done(std::nullopt);
          } else {
            done(Weigh(iteration, std::move(entries)));
          }
        });
  }

  // Takes a wait back: true if its callback was not called and never will be.
  bool Cancel(Ticket ticket) { return queue_.Cancel(ticket); }

  // A neighbor takes part from iteration `since` on, which counts for one that
  // is back, and until `until` at most; none of its updates are left from
  // before. Of whoever is no in-neighbor nothing is known.
  void SetNeighbor(int64_t neighbor, int64_t since, int64_t until)
      ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      if (Sender* const sender = Find(neighbor)) {
        sender->until = until;
        if (until == kForever) {
          sender->since = since;
          sender->last = since - 1;
          sender->settled = 0;
        }
      }
    }
    queue_.Change([&](Entries* entries) {
      if (until == kForever) entries->Forget(neighbor);
      // Neither tokens nor acknowledgements: nothing but paths was a bound.
      if (options_.Allowance() == 0) entries->Unlimit();
    });
  }

  // A neighbor asks at this time if an update, in its parcel of this number, is
  // wanted. One that is of no use, or has come, is not.
  bool Wanted(int64_t neighbor, int64_t number, int64_t iteration, int64_t now)
      ABSL_LOCKS_EXCLUDED(mu_) {
    bool is_of_use = true;
    queue_.Change(
        [&](Entries* entries) { is_of_use = iteration >= entries->floor(); });
    MutexLock lock(&mu_);
    Sender* const sender = Find(neighbor);
    if (sender == nullptr) return is_of_use;
    if (number <= sender->settled) return false;
    if (is_of_use) {
      sender->wanted = iteration;
      sender->wanted_at = now;
    } else {
      ++sender->declined;
      sender->settled = number;
    }
    return is_of_use;
  }

  // An update has come, in its parcel of this number. Returns since when it was
  // on its way, which is since it was asked for; nothing if it has come before.
  std::optional<int64_t> Arrive(int64_t neighbor, int64_t number,
                                int64_t iteration, int64_t now)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    Sender* const sender = Find(neighbor);
    if (sender == nullptr) return now;
    if (number <= sender->settled) return std::nullopt;
    sender->settled = number;
    return sender->wanted == iteration ? sender->wanted_at : now;
  }

  // Keeps an update that has come.
  HopDelivered Add(int64_t neighbor, int64_t iteration, Update update) {
    using Enqueued = typename UpdateQueue<Update>::Enqueued;
    switch (queue_.Enqueue(std::move(update), {iteration, neighbor})) {
      case Enqueued::kQueued:
        return options_.gap_bounds.empty() ||
                       invariants_->CheckUpdates(neighbor, iteration,
                                                 Size(neighbor))
                   ? HopDelivered::kQueued
                   : HopDelivered::kBroken;
      case Enqueued::kUnusable:
      case Enqueued::kSuperseded:
        return HopDelivered::kDropped;
      case Enqueued::kFull:
        invariants_->BreakCapacity(neighbor, iteration);
        return HopDelivered::kBroken;
      case Enqueued::kClosed:
        break;
    }
    return HopDelivered::kClosed;
  }

  // How many are there of a neighbor.
  int64_t Size(int64_t neighbor) { return queue_.Size({kAny, neighbor}); }

  // What is known of the worker's state here; it waits for the updates of an
  // iteration, if for updates.
  void Fill(int64_t iteration, HopState* state) ABSL_LOCKS_EXCLUDED(mu_) {
    state->updates = queue_.counts();
    queue_.Change([&](Entries* entries) {
      state->queued = entries->Size({kAny, kAny});
      MutexLock lock(&mu_);
      for (const int64_t neighbor : options_.in_neighbors) {
        state->declined.push_back(senders_[neighbor].declined);
      }
      if (state->phase == HopPhase::kUpdates) {
        state->missing = Missing(*entries, iteration);
      }
    });
  }

  // Ends what waits.
  void Close() { queue_.Close(); }

 private:
  using Entries = typename UpdateQueue<Update>::Entries;
  using Entry = typename UpdateQueue<Update>::Entry;

  // What is known of an in-neighbor.
  struct Sender {
    int64_t since = 0;
    int64_t until = kForever;
    int64_t last = -1;  // the iteration of its last update that was taken
    int64_t declined = 0;
    int64_t settled = 0;    // the number of its last parcel that came, or was
                            // declined
    int64_t wanted = -1;    // the iteration of the update that may come next
    int64_t wanted_at = 0;  // since when
    bool Expected(int64_t iteration) const {
      return since <= iteration && iteration <= until;
    }
  };

  Sender* Find(int64_t neighbor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto found = senders_.find(neighbor);
    return found == senders_.end() ? nullptr : &found->second;
  }

  // The neighbors without whose updates the average of an iteration can't be
  // complete.
  std::vector<int64_t> Missing(const Entries& entries, int64_t iteration)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<int64_t> missing;
    const int64_t bound = options_.staleness_bound;
    for (const auto& [neighbor, sender] : senders_) {
      if (!sender.Expected(iteration)) continue;
      if (bound >= 0 && sender.last >= iteration - bound) continue;
      const Tag tag = {bound < 0 ? iteration : kAny, neighbor};
      if (entries.Size(tag) == 0) missing.push_back(neighbor);
    }
    return missing;
  }

  // Whether the mode can do without those that are missing. Called with the
  // queue's lock.
  bool Enough(const Entries& entries, int64_t iteration)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    int64_t expected = 0;
    for (const auto& [neighbor, sender] : senders_) {
      expected += sender.Expected(iteration);
    }
    const int64_t all = options_.in_neighbors.size();
    const int64_t missing = Missing(entries, iteration).size();
    return expected - missing >=
           std::min(expected, all - options_.backup_workers);
  }

  // What is taken for the average of an iteration, with its weights.
  std::vector<Received> Weigh(int64_t iteration, std::vector<Entry> entries)
      ABSL_LOCKS_EXCLUDED(mu_) {
    std::vector<Received> received;
    const int64_t bound = options_.staleness_bound;
    double sum = bound >= 0 ? static_cast<double>(bound + 1) : 1.0;
    MutexLock lock(&mu_);
    for (Entry& entry : entries) {
      const auto [from, sender] = entry.tag;
      senders_[sender].last = std::max(senders_[sender].last, from);
      const double weight = Weight(sender, from, iteration);
      sum += weight;
      received.push_back({sender, from, weight, std::move(entry.update)});
    }
    // The topology's weights are final; the others are shares.
    if (bound >= 0 || options_.backup_workers > 0) {
      for (Received& item : received) item.weight /= sum;
    }
    return received;
  }

  // Of a sender's update, beside those of the others.
  double Weight(int64_t sender, int64_t iteration, int64_t now) const {
    if (options_.staleness_bound >= 0) {
      return static_cast<double>(iteration - now + options_.staleness_bound +
                                 1);
    }
    if (options_.backup_workers == 0) {
      for (size_t i = 0; i < options_.in_neighbors.size(); ++i) {
        if (options_.in_neighbors[i] == sender) return options_.weights[i];
      }
    }
    return 1.0;
  }

  const HopOptions options_;
  HopInvariants* const invariants_;  // Not owned.
  UpdateQueue<Update> queue_;        // Its lock comes before mu_.
  Mutex mu_;
  std::map<int64_t, Sender> senders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_UPDATES_H_
