// One worker of decentralized training that tolerates slow workers (Hop,
// sections 4 and 5): which iteration it may enter, whom it waits for, what it
// averages, and what it has to tell its neighbors. The parameters themselves
// are somebody else's; here they are an opaque `Update`.
//
// The trainer of the worker repeats, one call after the other:
//
//   int64_t k = worker.PlanNext();
//   if (worker.IsJump(k)) {          // It skips iterations.
//     worker.Receive(k - 1, ...);    // Then average.
//   }
//   worker.AcquireTokens(k, ...);
//   worker.Enter(k, parameters);     // In parallel order, else without.
//   ...                              // Compute.
//   worker.Send(parameters, ...);    // In serial order.
//   worker.Receive(k, ...);          // Then average.
//   worker.Reduced();
//
// For every neighbor somebody carries parcels: Collect here, Announce and (if
// Wanted) Deliver there, Carried here. If something fails on the way he begins
// again: he gets the same parcel, and what has come by then counts once.
// Neighbors are named by their numbers.
//
// What Receive waits for and with which weights it averages:
//   standard           an update of this iteration from every in-neighbor; the
//                      topology's weights.
//   backup workers     from all but that many; equal weights of what came.
//   bounded staleness  from each in-neighbor an update of at most
//                      `staleness_bound` iterations ago, the newest, received
//                      now or before; those received now have the weight
//                      Iter(update) - (k - staleness_bound) + 1 (Eq. 2).
//   both               that from all but `backup_workers`.
// The worker's own parameters count as one of the updates, with the rest of the
// weight. A token queue for every out-neighbor bounds the iteration gap; with
// notify_ack acknowledgements do.
//
// Thread safe. Nothing blocks: waits end by callbacks, which are called without
// a lock. Only one of the trainer's calls may wait at a time. The destructor
// closes the worker.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_WORKER_H_
#define TF_RECSYNC_CC_ENGINE_HOP_WORKER_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/cancellable_wait.h"
#include "cc/engine/hop_invariants.h"
#include "cc/engine/hop_options.h"
#include "cc/engine/hop_senders.h"
#include "cc/engine/hop_timeline.h"
#include "cc/engine/mutex.h"
#include "cc/engine/outbox.h"
#include "cc/engine/token_queue.h"
#include "cc/engine/update_queue.h"

namespace recsync {

template <typename Update>
class HopWorker {
 public:
  enum class Answer { kOk, kCancelled, kClosed, kBroken };
  enum class Delivered { kQueued, kDropped, kRepeated, kBroken, kClosed };
  using Phase = HopPhase;
  using Span = HopSpan;
  using Event = HopEvent;
  using Counts = HopCounts;
  using Violation = HopViolation;

  struct Received {
    int64_t sender;
    int64_t iteration;
    double weight;
    Update update;
  };

  struct State {
    int64_t iteration;  // -1 before the first
    Phase phase;
    double seconds;                // in this phase
    std::vector<int64_t> missing;  // neighbors it waits for
    int64_t awaited;  // the iteration that they have to come to, or -1
    std::vector<int64_t> tokens;    // by out-neighbor
    std::vector<int64_t> declined;  // by in-neighbor, updates not wanted
    Counts counts;
    UpdateQueueCounts updates;
    int64_t queued;       // updates that are there
    int64_t lost_events;  // too many to be kept
  };

  using Done = std::function<void(Answer)>;
  using ReceiveDone = std::function<void(Answer, std::vector<Received>)>;
  using Parcel = typename Outbox<Update>::Parcel;
  using Collected = std::function<void(Answer, Parcel)>;

  explicit HopWorker(const HopOptions& options)
      : options_(options),
        updates_({options.slots, options.capacity,
                  /*newest_only=*/options.staleness_bound >= 0}),
        senders_(options),
        invariants_(options) {
    for (const int64_t neighbor : options.in_neighbors) {
      AddOutbox(neighbor);
    }
    for (const int64_t neighbor : options.out_neighbors) {
      tokens_.push_back(std::make_unique<TokenQueue>(0));
      AddOutbox(neighbor);
    }
    Begin(0);
  }
  ~HopWorker() { Close(); }
  HopWorker(const HopWorker&) = delete;
  HopWorker& operator=(const HopWorker&) = delete;

  const HopOptions& options() const { return options_; }

  // Starts anew with this iteration; nobody may be in a call but Collect.
  void Begin(int64_t first) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      iteration_ = first - 1;
      first_ = first;
      invariants_.Begin(first);
      senders_.Begin(first);
      timeline_.SetPhase(Phase::kIdle);
    }
    progress_.store(first - 1);
    updates_.Change(
        [&](Entries* entries) { entries->Reset(options_.Floor(first)); });
    // Before anybody has entered an iteration a worker may enter this one, and
    // max_iteration_gap - 1 more (figure 7); with acknowledgements it may send
    // one update.
    for (const auto& queue : tokens_) {
      queue->Reset(first + options_.Allowance() - 1, first);
    }
    for (const auto& item : outboxes_) {
      item.second->Reset();
      item.second->Reopen();
    }
  }

  // The iteration to enter next: the one after this one, or a later one if the
  // worker is behind all its out-neighbors (section 5).
  int64_t PlanNext() ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t iteration = this->iteration();
    if (options_.max_jump <= 1 || iteration < first()) return iteration + 1;
    int64_t behind = std::numeric_limits<int64_t>::max();
    for (const auto& queue : tokens_) {
      if (queue->lifted()) continue;
      behind = std::min(behind, queue->size() - options_.max_iteration_gap);
    }
    if (behind == std::numeric_limits<int64_t>::max() ||
        behind <= options_.jump_trigger) {
      return iteration + 1;
    }
    return iteration +
           std::max<int64_t>(1, std::min(behind, options_.max_jump));
  }

  bool IsJump(int64_t next) { return next > iteration() + 1; }

  // Waits for the tokens that entering `next` takes, from all out-neighbors.
  void AcquireTokens(int64_t next, Done done) ABSL_LOCKS_EXCLUDED(mu_) {
    int64_t tokens;
    {
      MutexLock lock(&mu_);
      tokens = iteration_ < first_ ? 0 : next - iteration_;
    }
    const size_t begin = options_.max_iteration_gap > 0 ? 0 : tokens_.size();
    Acquire(begin, tokens, Phase::kTokens, HopNow(), std::move(done));
  }

  // The worker enters an iteration. With its parameters it sends them, and
  // `done` is called when they are on their way. The answer is kBroken, and it
  // does not enter, if an invariant was found not to hold, here or before.
  void Enter(int64_t iteration, std::optional<Update> update, Done done)
      ABSL_LOCKS_EXCLUDED(mu_) {
    bool broken;
    {
      MutexLock lock(&mu_);
      invariants_.CheckTokens(iteration, tokens_);
      broken = invariants_.violation().has_value();
    }
    if (broken) {
      done(Answer::kBroken);
      return;
    }
    {
      MutexLock lock(&mu_);
      if (iteration > iteration_ + 1) {
        ++counts_.jumps;
        counts_.skipped += iteration - iteration_ - 1;
        Note(Span::kJump, HopNow(), HopNow(), iteration, -1);
      }
      iteration_ = iteration;
      ++counts_.iterations;
      timeline_.SetPhase(Phase::kComputing);
    }
    updates_.Change([&](Entries* e) { e->Raise(options_.Floor(iteration)); });
    if (!options_.notify_ack) progress_.store(iteration);
    if (update.has_value()) {
      Send(std::move(*update), std::move(done));
      // Those that only send to this worker want to know, too.
      Tell();
      return;
    }
    Tell();
    done(Answer::kOk);
  }

  // Sends the parameters of this iteration to the out-neighbors. With
  // notify_ack it first waits until all have used those of the one before.
  void Send(Update update, Done done) ABSL_LOCKS_EXCLUDED(mu_) {
    if (!options_.notify_ack) {
      Put(std::move(update));
      done(Answer::kOk);
      return;
    }
    auto shared = std::make_shared<Update>(std::move(update));
    Acquire(0, 1, Phase::kAcknowledgements, HopNow(),
            [this, shared, done = std::move(done)](Answer answer) {
              if (answer == Answer::kOk) {
                Put(std::move(*shared));
                MutexLock lock(&mu_);
                timeline_.SetPhase(Phase::kComputing);
              }
              done(answer);
            });
  }

  // Waits for the updates of an iteration that the mode asks for.
  void Receive(int64_t iteration, ReceiveDone done) ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t begin = HopNow();
    {
      MutexLock lock(&mu_);
      if (timeline_.phase() == Phase::kComputing) {
        Note(Span::kCompute, timeline_.began(), begin, iteration_, -1);
      }
      receiving_ = iteration;
      timeline_.SetPhase(Phase::kUpdates, -1, options_.Floor(iteration));
    }
    const int64_t wait = waits_.Begin();
    auto shared = std::make_shared<ReceiveDone>(std::move(done));
    const auto ticket = updates_.Await(
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
        [this, iteration, begin, wait, shared](auto answer, auto entries) {
          waits_.End(wait);
          if (answer == UpdateQueue<Update>::Answer::kClosed) {
            (*shared)(Answer::kClosed, {});
            return;
          }
          (*shared)(Answer::kOk, Weigh(iteration, begin, std::move(entries)));
        });
    waits_.Guard(wait, [this, ticket, shared] {
      if (updates_.Cancel(ticket)) (*shared)(Answer::kCancelled, {});
    });
  }

  // The average is made.
  void Reduced() ABSL_LOCKS_EXCLUDED(mu_) {
    int64_t iteration;
    {
      MutexLock lock(&mu_);
      iteration = iteration_;
      timeline_.SetPhase(Phase::kIdle);
    }
    if (!options_.notify_ack) return;
    progress_.store(iteration);
    Tell();
  }

  // Begins a call of the trainer, an op with one wait or several, and forgets
  // what interrupted the one before. Returns its number.
  int64_t BeginCall() { return waits_.BeginCall(); }

  // Ends the wait of the trainer's call, or the one that it will begin, with
  // kCancelled; of a call with a number, unless a later one has begun.
  void Interrupt(std::optional<int64_t> call = std::nullopt) {
    waits_.Interrupt(call);
  }

  // A neighbor's progress: the iteration that it has entered, or of which it
  // has used the updates (notify_ack). An out-neighbor grants tokens by it.
  // False if it is further ahead than it may be.
  bool Announce(int64_t neighbor, int64_t progress) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      invariants_.BeginGranting();
      for (size_t i = 0; i < tokens_.size(); ++i) {
        if (options_.out_neighbors[i] != neighbor) continue;
        invariants_.Announce(i, progress);
      }
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (options_.out_neighbors[i] != neighbor) continue;
      if (options_.Allowance() > 0)
        tokens_[i]->GrantUpTo(progress + options_.Allowance());
    }
    MutexLock lock(&mu_);
    invariants_.EndGranting();
    return invariants_.CheckGap(neighbor, progress, iteration_);
  }

  // Whether an in-neighbor's update, in its parcel of this number, would be of
  // any use. One that has come is not.
  bool Wanted(int64_t neighbor, int64_t number, int64_t iteration)
      ABSL_LOCKS_EXCLUDED(mu_) {
    bool wanted = true;
    updates_.Change(
        [&](Entries* entries) { wanted = iteration >= entries->floor(); });
    MutexLock lock(&mu_);
    return senders_.Ask(neighbor, number, iteration, wanted, HopNow());
  }

  // An in-neighbor's update has come, in its parcel of this number. kRepeated,
  // and nothing happens, if that has come before.
  Delivered Deliver(int64_t neighbor, int64_t number, int64_t iteration,
                    Update update) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      const int64_t now = HopNow();
      const std::optional<int64_t> begin =
          senders_.Arrive(neighbor, number, iteration, now);
      if (!begin.has_value()) return Delivered::kRepeated;
      Note(Span::kReceive, *begin, now, iteration, neighbor);
      if (!invariants_.CheckGap(neighbor, iteration, iteration_)) {
        return Delivered::kBroken;
      }
    }
    switch (updates_.Enqueue(std::move(update), {iteration, neighbor})) {
      case UpdateQueue<Update>::Enqueued::kQueued:
        break;
      case UpdateQueue<Update>::Enqueued::kUnusable:
      case UpdateQueue<Update>::Enqueued::kSuperseded:
        return Delivered::kDropped;
      case UpdateQueue<Update>::Enqueued::kFull: {
        MutexLock lock(&mu_);
        invariants_.Break({Violation::Rule::kCapacity, neighbor, iteration_,
                           iteration, options_.capacity + 1,
                           options_.capacity});
        return Delivered::kBroken;
      }
      case UpdateQueue<Update>::Enqueued::kClosed:
        return Delivered::kClosed;
    }
    return CheckUpdates(neighbor, iteration) ? Delivered::kQueued
                                             : Delivered::kBroken;
  }

  // The first violation since Begin, if there was one.
  std::optional<Violation> violation() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return invariants_.violation();
  }

  // Waits until there is something for a neighbor; until it was Carried it is
  // the same. Only one may wait for each: whoever did is answered kCancelled.
  // `caller` names the wait, for CancelCollect. False, and nothing happens, if
  // it is no neighbor.
  bool Collect(int64_t neighbor, Collected done, int64_t caller = 0) {
    const auto found = outboxes_.find(neighbor);
    if (found == outboxes_.end()) return false;
    using Told = typename Outbox<Update>::Answer;
    found->second->Collect(
        [this, done = std::move(done)](Told answer, Parcel parcel) {
          if (answer != Told::kParcel) {
            done(answer == Told::kClosed ? Answer::kClosed : Answer::kCancelled,
                 std::move(parcel));
            return;
          }
          if (parcel.update.has_value() && !parcel.repeated) {
            MutexLock lock(&mu_);
            ++counts_.sent;
          }
          done(Answer::kOk, std::move(parcel));
        },
        caller);
    return true;
  }

  // Takes a caller's Collect back: true if its callback was not called and
  // never will.
  bool CancelCollect(int64_t neighbor, int64_t caller = 0) {
    const auto found = outboxes_.find(neighbor);
    return found != outboxes_.end() && found->second->Cancel(caller);
  }

  // A parcel has been carried, since `begin`, with the update of an iteration
  // or without (-1).
  void Carried(int64_t neighbor, int64_t number, int64_t iteration,
               int64_t begin) ABSL_LOCKS_EXCLUDED(mu_) {
    const auto found = outboxes_.find(neighbor);
    if (found != outboxes_.end()) found->second->Acknowledge(number);
    if (iteration < 0) return;
    MutexLock lock(&mu_);
    Note(Span::kSend, begin, HopNow(), iteration, neighbor);
  }

  // A worker takes part from iteration `since` on, and until `until` at most:
  // one that has left ends with the last iteration that it entered, one that is
  // lost at once (-1). `since` counts for one that is back; what was known of
  // one that goes stays. Returns this worker's iteration. Whatever the number
  // is, a neighbor's or not, bounds by paths over others are void from now on.
  int64_t SetNeighbor(int64_t neighbor, int64_t since, int64_t until)
      ABSL_LOCKS_EXCLUDED(mu_) {
    const bool live = until == HopSenders::kForever;
    const auto box = outboxes_.find(neighbor);
    int64_t iteration;
    {
      MutexLock lock(&mu_);
      iteration = iteration_;
      invariants_.ForgetPaths();
      invariants_.BeginGranting();
      // With the lock: what is sent in later iterations is not thrown away.
      if (live && box != outboxes_.end()) box->second->Reset();
      senders_.Set(neighbor, since, until);
    }
    updates_.Change([&](Entries* entries) {
      if (live) entries->Forget(neighbor);
      // Neither tokens nor acknowledgements: nothing but paths was a bound.
      if (options_.Allowance() == 0) entries->Unlimit();
    });
    if (!live && box != outboxes_.end()) box->second->Discard(true);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (options_.out_neighbors[i] != neighbor) continue;
      if (live) {
        const int64_t announced = options_.notify_ack ? iteration : since;
        {
          MutexLock lock(&mu_);
          invariants_.Restart(i, announced);
        }
        tokens_[i]->Restore(announced + options_.Allowance());
      } else {
        tokens_[i]->Lift(true);
      }
    }
    if (live && box != outboxes_.end()) box->second->Tell(progress_.load());
    MutexLock lock(&mu_);
    invariants_.EndGranting();
    return iteration;
  }

  State GetState() ABSL_LOCKS_EXCLUDED(mu_) {
    State state;
    int64_t receiving;
    std::optional<HopSenders> senders;
    {
      MutexLock lock(&mu_);
      state.iteration = iteration_ < first_ ? -1 : iteration_;
      state.phase = timeline_.phase();
      state.seconds = 1e-6 * static_cast<double>(HopNow() - timeline_.began());
      state.counts = counts_;
      state.lost_events = timeline_.lost_events();
      if (timeline_.neighbor() >= 0) {
        state.missing.push_back(timeline_.neighbor());
      }
      state.awaited = timeline_.awaited();
      receiving = receiving_;
      senders.emplace(senders_);
    }
    updates_.Change([&](Entries* entries) {
      state.queued = entries->Size({kAny, kAny});
      if (state.phase != Phase::kUpdates) return;
      const std::vector<int64_t> missing =
          senders->Missing(receiving, HasIn(*entries));
      state.missing.insert(state.missing.end(), missing.begin(), missing.end());
    });
    state.declined = senders->declined();
    for (const auto& queue : tokens_) state.tokens.push_back(queue->size());
    state.updates = updates_.counts();
    return state;
  }

  // Takes the events that were noted since the last call.
  std::vector<Event> TakeEvents() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return timeline_.TakeEvents();
  }

  // Ends the loops of all edges once everything is told. Begin takes it back.
  void CloseOutboxes() {
    for (const auto& item : outboxes_) item.second->Close();
  }

  // While held, nothing is told to anybody; those that Collect get nothing, at
  // once.
  void HoldOutboxes(bool held) {
    for (const auto& item : outboxes_) item.second->Hold(held);
  }

  // Ends everything that waits.
  void Close() {
    updates_.Close();
    for (const auto& queue : tokens_) queue->Close();
    for (const auto& item : outboxes_) {
      item.second->Discard(true);
      item.second->Close();
    }
  }

  int64_t iteration() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return iteration_;
  }

 private:
  using Entries = typename UpdateQueue<Update>::Entries;
  using Entry = typename UpdateQueue<Update>::Entry;

  void AddOutbox(int64_t neighbor) {
    auto& box = outboxes_[neighbor];
    if (box != nullptr) return;
    // Its numbers are above those of this worker's life before.
    box = std::make_unique<Outbox<Update>>(
        /*newest_only=*/options_.staleness_bound >= 0,
        /*first_number=*/HopNow());
  }

  int64_t first() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return first_;
  }

  // Whether there are updates of an iteration and a neighbor.
  static auto HasIn(const Entries& entries) {
    return [&entries](int64_t iteration, int64_t neighbor) {
      return entries.Size({iteration, neighbor}) > 0;
    };
  }

  // Called with the queue's lock, which comes before this worker's.
  bool Enough(const Entries& entries, int64_t iteration)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return senders_.Enough(iteration, HasIn(entries));
  }

  std::vector<Received> Weigh(int64_t iteration, int64_t begin,
                              std::vector<Entry> entries)
      ABSL_LOCKS_EXCLUDED(mu_) {
    std::vector<Received> received;
    const int64_t bound = options_.staleness_bound;
    double sum = bound >= 0 ? static_cast<double>(bound + 1) : 1.0;
    MutexLock lock(&mu_);
    for (Entry& entry : entries) {
      const double weight =
          senders_.Take(entry.tag.sender, entry.tag.iteration, iteration);
      sum += weight;
      received.push_back({entry.tag.sender, entry.tag.iteration, weight,
                          std::move(entry.update)});
    }
    // The topology's weights are final; the others are shares.
    if (bound >= 0 || options_.backup_workers > 0) {
      for (Received& item : received) item.weight /= sum;
    }
    counts_.used += received.size();
    const int64_t end = HopNow();
    counts_.waiting_for_updates += end - begin;
    Note(Span::kUpdates, begin, end, iteration, -1);
    timeline_.SetPhase(Phase::kIdle);
    return received;
  }

  // Takes tokens from the out-neighbors, beginning with number `i`.
  void Acquire(size_t i, int64_t tokens, Phase phase, int64_t begin, Done done)
      ABSL_LOCKS_EXCLUDED(mu_) {
    if (i == tokens_.size()) {
      {
        MutexLock lock(&mu_);
        const int64_t end = HopNow();
        counts_.waiting_for_tokens += end - begin;
        Note(Span::kTokens, begin, end, iteration_, -1);
        timeline_.SetPhase(Phase::kIdle);
      }
      done(Answer::kOk);
      return;
    }
    {
      MutexLock lock(&mu_);
      timeline_.SetPhase(
          phase, options_.out_neighbors[i],
          tokens_[i]->totals().taken + tokens - options_.Allowance());
    }
    const int64_t wait = waits_.Begin();
    const auto ticket = tokens_[i]->Acquire(
        tokens, [this, i, tokens, phase, begin, wait, done](auto answer) {
          waits_.End(wait);
          if (answer == TokenQueue::Answer::kClosed) {
            done(Answer::kClosed);
            return;
          }
          Acquire(i + 1, tokens, phase, begin, done);
        });
    waits_.Guard(wait, [this, i, ticket, done] {
      if (tokens_[i]->Cancel(ticket)) done(Answer::kCancelled);
    });
  }

  void Put(Update update) ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t iteration = this->iteration();
    int64_t replaced = 0;
    for (const int64_t neighbor : options_.out_neighbors) {
      replaced += outboxes_[neighbor]->Put(iteration, update, progress_.load());
    }
    MutexLock lock(&mu_);
    counts_.replaced += replaced;
  }

  // Tells the in-neighbors, whose tokens it grants, how far this worker is.
  void Tell() {
    if (options_.Allowance() == 0) return;
    for (const int64_t neighbor : options_.in_neighbors) {
      outboxes_[neighbor]->Tell(progress_.load());
    }
  }

  bool CheckUpdates(int64_t neighbor, int64_t iteration)
      ABSL_LOCKS_EXCLUDED(mu_) {
    if (options_.gap_bounds.empty()) return true;
    const int64_t found = updates_.Size({kAny, neighbor});
    MutexLock lock(&mu_);
    return invariants_.CheckUpdates(neighbor, iteration, iteration_, found);
  }

  void Note(Span span, int64_t begin, int64_t end, int64_t iteration,
            int64_t neighbor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    timeline_.Note(span, begin, end, iteration, neighbor);
  }

  const HopOptions options_;
  UpdateQueue<Update> updates_;  // Its lock comes before mu_.
  std::vector<std::unique_ptr<TokenQueue>> tokens_;  // by out-neighbor
  std::map<int64_t, std::unique_ptr<Outbox<Update>>> outboxes_;
  std::atomic<int64_t> progress_{-1};
  CancellableWait waits_;

  Mutex mu_;
  int64_t iteration_ ABSL_GUARDED_BY(mu_) = -1;
  int64_t first_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t receiving_ ABSL_GUARDED_BY(mu_) = -1;
  HopSenders senders_ ABSL_GUARDED_BY(mu_);
  HopInvariants invariants_ ABSL_GUARDED_BY(mu_);
  HopTimeline timeline_ ABSL_GUARDED_BY(mu_);
  Counts counts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_WORKER_H_
