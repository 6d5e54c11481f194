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
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/cancellable_wait.h"
#include "cc/engine/mutex.h"
#include "cc/engine/outbox.h"
#include "cc/engine/tagged_queue.h"
#include "cc/engine/token_queue.h"

namespace recsync {

struct HopOptions {
  std::vector<int64_t> in_neighbors;   // without the worker itself
  std::vector<double> weights;         // of in_neighbors, in standard mode
  std::vector<int64_t> out_neighbors;  // without the worker itself
  int64_t max_iteration_gap = 0;       // of the token queues; 0: none
  int64_t slots = 1;                   // of the update queue
  int64_t capacity = 1;                // of the update queue
  int64_t backup_workers = 0;          // below 1 + in_neighbors.size()
  int64_t staleness_bound = -1;        // -1: none
  int64_t max_jump = 1;                // iterations; 1: never skips any
  int64_t jump_trigger = 0;            // jumps when further behind than this
  bool notify_ack = false;             // then without token queues
  // Of in_neighbors: how far each may be ahead, -1 for no bound. With them the
  // worker checks what it can see of the protocol's invariants; empty: it does
  // not.
  std::vector<int64_t> gap_bounds;
};

template <typename Update>
class HopWorker {
 public:
  enum class Answer { kOk, kCancelled, kClosed, kBroken };
  enum class Delivered { kQueued, kDropped, kRepeated, kBroken, kClosed };
  enum class Phase { kIdle, kComputing, kUpdates, kTokens, kAcknowledgements };
  enum class Span { kCompute, kUpdates, kTokens, kSend, kReceive, kJump };

  struct Received {
    int64_t sender;
    int64_t iteration;
    double weight;
    Update update;
  };

  // Something the worker did, for a timeline. Times are microseconds since the
  // Unix epoch.
  struct Event {
    Span span;
    int64_t begin;
    int64_t end;
    int64_t iteration;
    int64_t neighbor;  // -1 where there is none
  };

  // An invariant of the protocol that turned out not to hold, which is a bug.
  struct Violation {
    enum class Rule {
      kGap,       // `found` iterations ahead is the neighbor, at most `bound`
      kTokens,    // `found` tokens of the neighbor are there, not `bound`
      kUpdates,   // `found` updates of the neighbor wait, at most `bound`
      kCapacity,  // `found` updates of all wait as the neighbor's comes
    };
    Rule rule;
    int64_t neighbor;
    int64_t iteration;  // of this worker
    int64_t progress;   // of the neighbor, as far as it is known here
    int64_t found;
    int64_t bound;
  };

  struct Counts {
    int64_t iterations = 0;  // entered
    int64_t used = 0;        // updates that were averaged
    int64_t jumps = 0;
    int64_t skipped = 0;   // iterations that jumps left out
    int64_t sent = 0;      // updates that went to neighbors, or were on the way
    int64_t replaced = 0;  // updates not sent, as a newer one was there
    int64_t waiting_for_updates = 0;  // microseconds
    int64_t waiting_for_tokens = 0;   // or acknowledgements, microseconds
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
    TaggedQueueCounts updates;
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
                  /*newest_only=*/options.staleness_bound >= 0}) {
    for (const int64_t neighbor : options.in_neighbors) {
      senders_[neighbor] = Sender();
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
      all_live_ = true;
      violation_.reset();
      announced_.assign(tokens_.size(), first - 1);
      for (auto& item : senders_) {
        const int64_t declined = item.second.declined;
        item.second = Sender();
        item.second.last = first - 1;
        item.second.declined = declined;
      }
      SetPhase(Phase::kIdle, -1);
    }
    progress_.store(first - 1);
    updates_.Change([&](Entries* entries) { entries->Reset(Floor(first)); });
    // Before anybody has entered an iteration a worker may enter this one, and
    // max_iteration_gap - 1 more (figure 7); with acknowledgements it may send
    // one update.
    for (const auto& queue : tokens_) {
      queue->Reset(first + Allowance() - 1, first);
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
    Acquire(begin, tokens, Phase::kTokens, Now(), std::move(done));
  }

  // The worker enters an iteration. With its parameters it sends them, and
  // `done` is called when they are on their way. The answer is kBroken, and it
  // does not enter, if an invariant was found not to hold, here or before.
  void Enter(int64_t iteration, std::optional<Update> update, Done done)
      ABSL_LOCKS_EXCLUDED(mu_) {
    bool broken;
    {
      MutexLock lock(&mu_);
      CheckTokens(iteration);
      broken = violation_.has_value();
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
        Note(Span::kJump, Now(), Now(), iteration, -1);
      }
      iteration_ = iteration;
      ++counts_.iterations;
      SetPhase(Phase::kComputing, -1);
    }
    updates_.Change([&](Entries* e) { e->Raise(Floor(iteration)); });
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
    Acquire(0, 1, Phase::kAcknowledgements, Now(),
            [this, shared, done = std::move(done)](Answer answer) {
              if (answer == Answer::kOk) {
                Put(std::move(*shared));
                MutexLock lock(&mu_);
                SetPhase(Phase::kComputing, -1);
              }
              done(answer);
            });
  }

  // Waits for the updates of an iteration that the mode asks for.
  void Receive(int64_t iteration, ReceiveDone done) ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t begin = Now();
    {
      MutexLock lock(&mu_);
      if (phase_ == Phase::kComputing) {
        Note(Span::kCompute, phase_began_, begin, iteration_, -1);
      }
      receiving_ = iteration;
      SetPhase(Phase::kUpdates, -1);
      awaited_ = Floor(iteration);
    }
    const int64_t wait = waits_.Begin();
    auto shared = std::make_shared<ReceiveDone>(std::move(done));
    const auto ticket = updates_.Await(
        [this, iteration](Entries* entries, std::vector<Entry>* taken) {
          entries->Raise(Floor(iteration));
          if (!Enough(*entries, iteration)) return false;
          *taken = entries->Take(
              options_.capacity,
              {options_.staleness_bound >= 0 ? kAny : iteration, kAny});
          // Of this iteration nothing is of use any more.
          entries->Raise(Floor(iteration + 1));
          return true;
        },
        [this, iteration, begin, wait, shared](auto answer, auto entries) {
          waits_.End(wait);
          if (answer == TaggedQueue<Update>::Answer::kClosed) {
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
      SetPhase(Phase::kIdle, -1);
    }
    if (!options_.notify_ack) return;
    progress_.store(iteration);
    Tell();
  }

  // Begins a call of the trainer, an op with one wait or several, and forgets
  // what interrupted the one before. Returns its number.
  int64_t BeginCall() { return waits_.BeginCall(); }

  // Ends the wait of the trainer's call, or the one that it will begin, with
  // kCancelled.
  void Interrupt() { waits_.Interrupt(); }

  // The same, unless a later call has begun.
  void InterruptCall(int64_t call) { waits_.InterruptCall(call); }

  // A neighbor's progress: the iteration that it has entered, or of which it
  // has used the updates (notify_ack). An out-neighbor grants tokens by it.
  // False if it is further ahead than it may be.
  bool Announce(int64_t neighbor, int64_t progress) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      ++granting_;
      for (size_t i = 0; i < tokens_.size(); ++i) {
        if (options_.out_neighbors[i] != neighbor) continue;
        announced_[i] = std::max(announced_[i], progress);
      }
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (options_.out_neighbors[i] != neighbor) continue;
      if (Allowance() > 0) tokens_[i]->GrantUpTo(progress + Allowance());
    }
    MutexLock lock(&mu_);
    --granting_;
    return CheckGap(neighbor, progress);
  }

  // Whether an in-neighbor's update, in its parcel of this number, would be of
  // any use. One that has come is not.
  bool Wanted(int64_t neighbor, int64_t number, int64_t iteration)
      ABSL_LOCKS_EXCLUDED(mu_) {
    bool wanted = true;
    updates_.Change(
        [&](Entries* entries) { wanted = iteration >= entries->floor(); });
    MutexLock lock(&mu_);
    const auto found = senders_.find(neighbor);
    if (found == senders_.end()) return wanted;
    if (number <= found->second.settled) return false;
    if (wanted) {
      found->second.wanted = iteration;
      found->second.wanted_at = Now();
    } else {
      ++found->second.declined;
      found->second.settled = number;
    }
    return wanted;
  }

  // An in-neighbor's update has come, in its parcel of this number. kRepeated,
  // and nothing happens, if that has come before.
  Delivered Deliver(int64_t neighbor, int64_t number, int64_t iteration,
                    Update update) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      const int64_t now = Now();
      const auto found = senders_.find(neighbor);
      if (found != senders_.end()) {
        if (number <= found->second.settled) return Delivered::kRepeated;
        found->second.settled = number;
      }
      // It was on its way since it was asked for.
      const bool was_asked =
          found != senders_.end() && found->second.wanted == iteration;
      Note(Span::kReceive, was_asked ? found->second.wanted_at : now, now,
           iteration, neighbor);
      if (!CheckGap(neighbor, iteration)) return Delivered::kBroken;
    }
    switch (updates_.Enqueue(std::move(update), {iteration, neighbor})) {
      case TaggedQueue<Update>::Enqueued::kQueued:
        break;
      case TaggedQueue<Update>::Enqueued::kUnusable:
      case TaggedQueue<Update>::Enqueued::kSuperseded:
        return Delivered::kDropped;
      case TaggedQueue<Update>::Enqueued::kFull: {
        MutexLock lock(&mu_);
        Break({Violation::Rule::kCapacity, neighbor, iteration_, iteration,
               options_.capacity + 1, options_.capacity});
        return Delivered::kBroken;
      }
      case TaggedQueue<Update>::Enqueued::kClosed:
        return Delivered::kClosed;
    }
    return CheckUpdates(neighbor, iteration) ? Delivered::kQueued
                                             : Delivered::kBroken;
  }

  // The first violation since Begin, if there was one.
  std::optional<Violation> violation() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return violation_;
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
    Note(Span::kSend, begin, Now(), iteration, neighbor);
  }

  // A worker takes part from iteration `since` on, and until `until` at most:
  // one that has left ends with the last iteration that it entered, one that is
  // lost at once (-1). `since` counts for one that is back; what was known of
  // one that goes stays. Returns this worker's iteration. Whatever the number
  // is, a neighbor's or not, bounds by paths over others are void from now on.
  int64_t SetNeighbor(int64_t neighbor, int64_t since, int64_t until)
      ABSL_LOCKS_EXCLUDED(mu_) {
    const bool live = until == std::numeric_limits<int64_t>::max();
    const auto box = outboxes_.find(neighbor);
    int64_t iteration;
    {
      MutexLock lock(&mu_);
      iteration = iteration_;
      all_live_ = false;
      ++granting_;
      // With the lock: what is sent in later iterations is not thrown away.
      if (live && box != outboxes_.end()) box->second->Reset();
      const auto found = senders_.find(neighbor);
      if (found != senders_.end()) {
        found->second.until = until;
        if (live) {
          found->second.since = since;
          found->second.last = since - 1;
          found->second.settled = 0;
        }
      }
    }
    updates_.Change([&](Entries* entries) {
      if (live) entries->Forget(neighbor);
      // Neither tokens nor acknowledgements: nothing but paths was a bound.
      if (Allowance() == 0) entries->Unlimit();
    });
    if (!live && box != outboxes_.end()) box->second->Discard(true);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (options_.out_neighbors[i] != neighbor) continue;
      if (live) {
        const int64_t announced = options_.notify_ack ? iteration : since;
        {
          MutexLock lock(&mu_);
          announced_[i] = announced;
        }
        tokens_[i]->Restore(announced + Allowance());
      } else {
        tokens_[i]->Lift(true);
      }
    }
    if (live && box != outboxes_.end()) box->second->Tell(progress_.load());
    MutexLock lock(&mu_);
    --granting_;
    return iteration;
  }

  State GetState() ABSL_LOCKS_EXCLUDED(mu_) {
    State state;
    int64_t receiving;
    std::map<int64_t, Sender> senders;
    {
      MutexLock lock(&mu_);
      state.iteration = iteration_ < first_ ? -1 : iteration_;
      state.phase = phase_;
      state.seconds = 1e-6 * static_cast<double>(Now() - phase_began_);
      state.counts = counts_;
      state.lost_events = lost_events_;
      if (phase_neighbor_ >= 0) state.missing.push_back(phase_neighbor_);
      state.awaited = awaited_;
      receiving = receiving_;
      senders = senders_;
    }
    updates_.Change([&](Entries* entries) {
      state.queued = entries->Size({kAny, kAny});
      if (state.phase != Phase::kUpdates) return;
      for (const auto& item : senders) {
        if (item.second.Expected(receiving) &&
            !Has(*entries, item.first, item.second, receiving)) {
          state.missing.push_back(item.first);
        }
      }
    });
    for (const int64_t neighbor : options_.in_neighbors) {
      state.declined.push_back(senders[neighbor].declined);
    }
    for (const auto& queue : tokens_) state.tokens.push_back(queue->size());
    state.updates = updates_.counts();
    return state;
  }

  // Takes the events that were noted since the last call.
  std::vector<Event> TakeEvents() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    std::vector<Event> events(events_.begin(), events_.end());
    events_.clear();
    return events;
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
  using Entries = typename TaggedQueue<Update>::Entries;
  using Entry = typename TaggedQueue<Update>::Entry;

  static constexpr size_t kMaxEvents = 1 << 16;

  // What is known of an in-neighbor.
  struct Sender {
    int64_t since = 0;
    int64_t until = std::numeric_limits<int64_t>::max();
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

  static int64_t Now() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  }

  void AddOutbox(int64_t neighbor) {
    auto& box = outboxes_[neighbor];
    if (box != nullptr) return;
    // Its numbers are above those of this worker's life before.
    box = std::make_unique<Outbox<Update>>(
        /*newest_only=*/options_.staleness_bound >= 0, /*first_number=*/Now());
  }

  // How far the worker may be ahead of what an out-neighbor has announced.
  int64_t Allowance() const {
    return options_.notify_ack ? 2 : options_.max_iteration_gap;
  }

  // The oldest iteration whose updates are of use to the receiver of one.
  int64_t Floor(int64_t iteration) const {
    const int64_t floor =
        iteration - std::max<int64_t>(options_.staleness_bound, 0);
    return std::max<int64_t>(floor, 0);
  }

  int64_t first() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return first_;
  }

  bool Has(const Entries& entries, int64_t neighbor, const Sender& sender,
           int64_t iteration) const {
    if (options_.staleness_bound < 0) {
      return entries.Size({iteration, neighbor}) > 0;
    }
    return sender.last >= iteration - options_.staleness_bound ||
           entries.Size({kAny, neighbor}) > 0;
  }

  // Called with the queue's lock, which comes before this worker's.
  bool Enough(const Entries& entries, int64_t iteration)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    int64_t expected = 0;
    int64_t there = 0;
    for (const auto& item : senders_) {
      if (!item.second.Expected(iteration)) continue;
      ++expected;
      there += Has(entries, item.first, item.second, iteration);
    }
    const int64_t all = options_.in_neighbors.size();
    return there >= std::min(expected, all - options_.backup_workers);
  }

  std::vector<Received> Weigh(int64_t iteration, int64_t begin,
                              std::vector<Entry> entries)
      ABSL_LOCKS_EXCLUDED(mu_) {
    std::vector<Received> received;
    const int64_t bound = options_.staleness_bound;
    double sum = bound >= 0 ? static_cast<double>(bound + 1) : 1.0;
    MutexLock lock(&mu_);
    for (Entry& entry : entries) {
      double weight = 1.0;
      if (bound >= 0) {
        weight =
            static_cast<double>(entry.tag.iteration - iteration + bound + 1);
      } else if (options_.backup_workers == 0) {
        for (size_t i = 0; i < options_.in_neighbors.size(); ++i) {
          if (options_.in_neighbors[i] == entry.tag.sender) {
            weight = options_.weights[i];
          }
        }
      }
      sum += weight;
      Sender& sender = senders_[entry.tag.sender];
      sender.last = std::max(sender.last, entry.tag.iteration);
      received.push_back({entry.tag.sender, entry.tag.iteration, weight,
                          std::move(entry.update)});
    }
    // The topology's weights are final; the others are shares.
    if (bound >= 0 || options_.backup_workers > 0) {
      for (Received& item : received) item.weight /= sum;
    }
    counts_.used += received.size();
    const int64_t end = Now();
    counts_.waiting_for_updates += end - begin;
    Note(Span::kUpdates, begin, end, iteration, -1);
    SetPhase(Phase::kIdle, -1);
    return received;
  }

  // Takes tokens from the out-neighbors, beginning with number `i`.
  void Acquire(size_t i, int64_t tokens, Phase phase, int64_t begin, Done done)
      ABSL_LOCKS_EXCLUDED(mu_) {
    if (i == tokens_.size()) {
      {
        MutexLock lock(&mu_);
        const int64_t end = Now();
        counts_.waiting_for_tokens += end - begin;
        Note(Span::kTokens, begin, end, iteration_, -1);
        SetPhase(Phase::kIdle, -1);
      }
      done(Answer::kOk);
      return;
    }
    {
      MutexLock lock(&mu_);
      SetPhase(phase, options_.out_neighbors[i]);
      awaited_ = tokens_[i]->totals().taken + tokens - Allowance();
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
    if (Allowance() == 0) return;
    for (const int64_t neighbor : options_.in_neighbors) {
      outboxes_[neighbor]->Tell(progress_.load());
    }
  }

  // Notes what does not hold, unless something did not before.
  void Break(const Violation& violation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!violation_.has_value()) violation_ = violation;
  }

  // How far a neighbor may be ahead; none if that is not known, or not checked,
  // or not so while somebody is gone, whose neighbors, and theirs, go on.
  std::optional<int64_t> GapBound(int64_t neighbor)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!all_live_) return std::nullopt;
    for (size_t i = 0; i < options_.gap_bounds.size(); ++i) {
      if (options_.in_neighbors[i] != neighbor) continue;
      const int64_t bound = options_.gap_bounds[i];
      return bound >= 0 ? std::optional(bound) : std::nullopt;
    }
    return std::nullopt;
  }

  // Table 1 of the paper. Before its first iteration a worker is in it already.
  bool CheckGap(int64_t neighbor, int64_t progress)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::optional<int64_t> bound = GapBound(neighbor);
    const int64_t gap = progress - std::max(iteration_, first_);
    if (!bound.has_value() || gap <= *bound) return true;
    Break({Violation::Rule::kGap, neighbor, iteration_, progress, gap, *bound});
    return false;
  }

  // Of each iteration that a neighbor can be in there is one update at most.
  bool CheckUpdates(int64_t neighbor, int64_t iteration)
      ABSL_LOCKS_EXCLUDED(mu_) {
    if (options_.gap_bounds.empty()) return true;
    const int64_t found = updates_.Size({kAny, neighbor});
    MutexLock lock(&mu_);
    const std::optional<int64_t> bound = GapBound(neighbor);
    if (!bound.has_value() || found <= *bound + 1) return true;
    Break({Violation::Rule::kUpdates, neighbor, iteration_, iteration, found,
           *bound + 1});
    return false;
  }

  // Those of an out-neighbor j when iteration k is entered: Iter(j) - k +
  // max_iteration_gap (theorem 2), where Iter(j) is what j has announced; the
  // tokens since then are on their way.
  void CheckTokens(int64_t iteration) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (options_.gap_bounds.empty() || Allowance() == 0) return;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const TokenQueue::Totals totals = tokens_[i]->totals();
      if (totals.lifted) continue;
      const int64_t expected = announced_[i] + Allowance();
      // While somebody grants, what was announced may not have come there.
      const int64_t granted = granting_ > 0 ? expected : totals.granted;
      if (granted - totals.taken == expected - iteration) continue;
      Break({Violation::Rule::kTokens, options_.out_neighbors[i], iteration,
             announced_[i], granted - totals.taken, expected - iteration});
    }
  }

  void SetPhase(Phase phase, int64_t neighbor)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    phase_ = phase;
    awaited_ = -1;
    phase_neighbor_ = neighbor;
    phase_began_ = Now();
  }

  void Note(Span span, int64_t begin, int64_t end, int64_t iteration,
            int64_t neighbor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (events_.size() == kMaxEvents) {
      events_.pop_front();
      ++lost_events_;
    }
    events_.push_back({span, begin, end, iteration, neighbor});
  }

  const HopOptions options_;
  TaggedQueue<Update> updates_;  // Its lock comes before mu_.
  std::vector<std::unique_ptr<TokenQueue>> tokens_;  // by out-neighbor
  std::map<int64_t, std::unique_ptr<Outbox<Update>>> outboxes_;
  std::atomic<int64_t> progress_{-1};
  CancellableWait waits_;

  Mutex mu_;
  int64_t iteration_ ABSL_GUARDED_BY(mu_) = -1;
  int64_t first_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t receiving_ ABSL_GUARDED_BY(mu_) = -1;
  std::map<int64_t, Sender> senders_ ABSL_GUARDED_BY(mu_);
  bool all_live_ ABSL_GUARDED_BY(mu_) = true;
  std::vector<int64_t> announced_ ABSL_GUARDED_BY(mu_);  // by out-neighbor
  int64_t granting_ ABSL_GUARDED_BY(mu_) = 0;  // calls that change tokens
  std::optional<Violation> violation_ ABSL_GUARDED_BY(mu_);
  Phase phase_ ABSL_GUARDED_BY(mu_) = Phase::kIdle;
  int64_t phase_neighbor_ ABSL_GUARDED_BY(mu_) = -1;
  int64_t awaited_ ABSL_GUARDED_BY(mu_) = -1;
  int64_t phase_began_ ABSL_GUARDED_BY(mu_) = 0;
  Counts counts_ ABSL_GUARDED_BY(mu_);
  std::deque<Event> events_ ABSL_GUARDED_BY(mu_);
  int64_t lost_events_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_WORKER_H_
