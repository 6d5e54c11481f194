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
// What Receive waits for and with which weights it averages, hop_updates.h
// says. A token queue for every out-neighbor bounds the iteration gap; with
// notify_ack acknowledgements do.
//
// Thread safe. Nothing blocks: waits end by callbacks, which are called without
// a lock. Only one of the trainer's calls may wait at a time. The destructor
// closes the worker.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_WORKER_H_
#define TF_RECSYNC_CC_ENGINE_HOP_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/cancellable_wait.h"
#include "cc/engine/event_log.h"
#include "cc/engine/hop_invariants.h"
#include "cc/engine/hop_options.h"
#include "cc/engine/hop_outboxes.h"
#include "cc/engine/hop_state.h"
#include "cc/engine/hop_timeline.h"
#include "cc/engine/hop_tokens.h"
#include "cc/engine/hop_updates.h"
#include "cc/engine/mutex.h"
#include "cc/engine/outbox.h"
#include "cc/engine/token_queue.h"

namespace recsync {

template <typename Update>
class HopWorker {
 public:
  using Answer = HopAnswer;
  using Delivered = HopDelivered;
  using State = HopState;
  using Phase = HopPhase;
  using Counts = HopCounts;
  using Violation = HopViolation;
  using Received = typename HopUpdates<Update>::Received;

  using Done = HopTokens::Done;
  using ReceiveDone = std::function<void(Answer, std::vector<Received>)>;
  using Parcel = typename HopOutboxes<Update>::Parcel;
  using Collected = typename HopOutboxes<Update>::Collected;

  explicit HopWorker(const HopOptions& options)
      : options_(options),
        invariants_(options),
        updates_(options, &invariants_),
        tokens_(options, &waits_),
        outboxes_(options),
        timeline_(options.now) {
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
      timeline_.SetPhase(Phase::kIdle);
    }
    invariants_.Begin(first);
    updates_.Begin(first);
    tokens_.Begin(first);
    outboxes_.Begin(first);
  }

  // The iteration to enter next: the one after this one, or a later one if the
  // worker is behind all its out-neighbors (section 5).
  int64_t PlanNext() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return iteration_ + (iteration_ < first_ ? 1 : tokens_.Stride());
  }

  bool IsJump(int64_t next) { return next > iteration() + 1; }

  // Waits for the tokens that entering `next` takes, from all out-neighbors.
  void AcquireTokens(int64_t next, Done done) ABSL_LOCKS_EXCLUDED(mu_) {
    int64_t tokens;
    {
      MutexLock lock(&mu_);
      tokens = iteration_ < first_ ? 0 : next - iteration_;
    }
    Acquire(Phase::kTokens, tokens, std::move(done));
  }

  // The worker enters an iteration. With its parameters it sends them, and
  // `done` is called when they are on their way. The answer is kBroken, and it
  // does not enter, if an invariant was found not to hold, here or before.
  void Enter(int64_t iteration, std::optional<Update> update, Done done)
      ABSL_LOCKS_EXCLUDED(mu_) {
    if (!invariants_.Enter(iteration, &tokens_)) {
      done(Answer::kBroken);
      return;
    }
    {
      MutexLock lock(&mu_);
      timeline_.Enter(iteration, iteration_);
      iteration_ = iteration;
    }
    updates_.Enter(iteration);
    if (!options_.notify_ack) outboxes_.SetProgress(iteration);
    if (update.has_value()) {
      SendAndGoOn(Phase::kComputing, std::move(*update), std::move(done));
      // Those that only send to this worker want to know, too.
      outboxes_.Tell();
      return;
    }
    outboxes_.Tell();
    done(Answer::kOk);
  }

  // Sends the parameters of this iteration to the out-neighbors. With
  // notify_ack it first waits until all have used those of the one before.
  void Send(Update update, Done done) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      timeline_.EndComputing(options_.now(), iteration_);
    }
    SendAndGoOn(Phase::kIdle, std::move(update), std::move(done));
  }

  // Waits for the updates of an iteration that the mode asks for.
  void Receive(int64_t iteration, ReceiveDone done) ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t begin = options_.now();
    {
      MutexLock lock(&mu_);
      receiving_ = iteration;
      timeline_.BeginReceive(begin, iteration_, options_.Floor(iteration));
    }
    const int64_t wait = waits_.Begin();
    auto shared = std::make_shared<ReceiveDone>(std::move(done));
    const auto ticket = updates_.Await(
        iteration, [this, iteration, begin, wait, shared](auto received) {
          waits_.End(wait);
          if (!received.has_value()) {
            (*shared)(Answer::kClosed, {});
            return;
          }
          {
            MutexLock lock(&mu_);
            timeline_.CountUsed(received->size());
            timeline_.EndWait(Activity::kUpdates, begin, iteration);
          }
          (*shared)(Answer::kOk, std::move(*received));
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
    outboxes_.SetProgress(iteration);
    outboxes_.Tell();
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
  bool Announce(int64_t neighbor, int64_t progress) {
    TokenQueue* const tokens = tokens_.Of(neighbor);
    if (tokens != nullptr && options_.Allowance() > 0) {
      invariants_.Announce(neighbor, progress, /*is_back=*/false, [&] {
        tokens->GrantUpTo(progress + options_.Allowance());
      });
    }
    return invariants_.CheckGap(neighbor, progress);
  }

  // Whether an in-neighbor's update, in its parcel of this number, would be of
  // any use. One that has come is not.
  bool Wanted(int64_t neighbor, int64_t number, int64_t iteration) {
    return updates_.Wanted(neighbor, number, iteration, options_.now());
  }

  // An in-neighbor's update has come, in its parcel of this number. kRepeated,
  // and nothing happens, if that has come before.
  Delivered Deliver(int64_t neighbor, int64_t number, int64_t iteration,
                    Update update) ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t now = options_.now();
    const std::optional<int64_t> begin =
        updates_.Arrive(neighbor, number, iteration, now);
    if (!begin.has_value()) return Delivered::kRepeated;
    {
      MutexLock lock(&mu_);
      timeline_.Note({Activity::kReceive, *begin, now, iteration, neighbor});
    }
    if (!invariants_.CheckGap(neighbor, iteration)) return Delivered::kBroken;
    return updates_.Add(neighbor, iteration, std::move(update));
  }

  // The first violation since Begin, if there was one.
  std::optional<Violation> violation() { return invariants_.violation(); }

  // Waits until there is something for a neighbor; until it was Carried it is
  // the same. Only one may wait for each: whoever did is answered kCancelled.
  // `caller` names the wait, for CancelCollect. False, and nothing happens, if
  // it is no neighbor.
  bool Collect(int64_t neighbor, Collected done, int64_t caller = 0) {
    return outboxes_.Collect(neighbor, std::move(done), caller);
  }

  // Takes a caller's Collect back: true if its callback was not called and
  // never will.
  bool CancelCollect(int64_t neighbor, int64_t caller = 0) {
    Outbox<Update>* const box = outboxes_.Of(neighbor);
    return box != nullptr && box->Cancel(caller);
  }

  // A parcel has been carried, since `begin`, with the update of an iteration
  // or without (-1).
  void Carried(int64_t neighbor, int64_t number, int64_t iteration,
               int64_t begin) ABSL_LOCKS_EXCLUDED(mu_) {
    Outbox<Update>* const box = outboxes_.Of(neighbor);
    if (box != nullptr) box->Acknowledge(number);
    if (iteration < 0) return;
    MutexLock lock(&mu_);
    timeline_.Note(
        {Activity::kSend, begin, options_.now(), iteration, neighbor});
  }

  // A worker takes part from iteration `since` on, and until `until` at most:
  // one that has left ends with the last iteration that it entered, one that is
  // lost at once (-1). `since` counts for one that is back; what was known of
  // one that goes stays. Returns this worker's iteration. Whatever the number
  // is, a neighbor's or not, bounds by paths over others are void from now on.
  int64_t SetNeighbor(int64_t neighbor, int64_t since, int64_t until)
      ABSL_LOCKS_EXCLUDED(mu_) {
    const bool live = until == HopUpdates<Update>::kForever;
    Outbox<Update>* const box = outboxes_.Of(neighbor);
    TokenQueue* const tokens = tokens_.Of(neighbor);
    invariants_.ForgetPaths();
    int64_t iteration;
    {
      MutexLock lock(&mu_);
      iteration = iteration_;
      // With the lock: what is sent in later iterations is not thrown away.
      if (live && box != nullptr) box->Reset();
    }
    updates_.SetNeighbor(neighbor, since, until);
    if (!live && box != nullptr) box->Discard(true);
    if (live && tokens != nullptr) {
      const int64_t announced = options_.notify_ack ? iteration : since;
      invariants_.Announce(neighbor, announced, /*is_back=*/true, [&] {
        tokens->Restore(announced + options_.Allowance());
      });
    } else if (tokens != nullptr) {
      tokens->Lift(true);
    }
    if (live && box != nullptr) box->Tell(outboxes_.progress());
    return iteration;
  }

  State GetState() ABSL_LOCKS_EXCLUDED(mu_) {
    State state;
    int64_t receiving;
    {
      MutexLock lock(&mu_);
      state.iteration = iteration_ < first_ ? -1 : iteration_;
      timeline_.Fill(&state);
      receiving = receiving_;
    }
    updates_.Fill(receiving, &state);
    tokens_.Fill(&state);
    outboxes_.Fill(&state);
    return state;
  }

  // Takes the events that were noted since the last call.
  std::vector<Event> TakeEvents() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return timeline_.TakeEvents();
  }

  // Ends the loops of all edges once everything is told. Begin takes it back.
  void CloseOutboxes() { outboxes_.Close(); }

  // While held, nothing is told to anybody; those that Collect get nothing, at
  // once.
  void HoldOutboxes(bool held) { outboxes_.Hold(held); }

  // Ends everything that waits.
  void Close() {
    updates_.Close();
    tokens_.Close();
    outboxes_.Discard();
  }

  int64_t iteration() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return iteration_;
  }

 private:
  // Sends parameters; `next` is the phase that the worker is in afterwards, if
  // it waits.
  void SendAndGoOn(Phase next, Update update, Done done)
      ABSL_LOCKS_EXCLUDED(mu_) {
    if (!options_.notify_ack) {
      outboxes_.Put(iteration(), update);
      done(Answer::kOk);
      return;
    }
    auto shared = std::make_shared<std::optional<Update>>(std::move(update));
    Acquire(Phase::kAcknowledgements, 1,
            [this, next, shared, done = std::move(done)](Answer answer) {
              if (answer == Answer::kOk) {
                outboxes_.Put(iteration(), **shared);
                shared->reset();
                MutexLock lock(&mu_);
                timeline_.SetPhase(next);
              }
              done(answer);
            });
  }

  // Takes tokens, or acknowledgements, from all out-neighbors.
  void Acquire(Phase phase, int64_t tokens, Done done)
      ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t begin = options_.now();
    Done acquired = [this, begin, done = std::move(done)](Answer answer) {
      if (answer == Answer::kOk) {
        MutexLock lock(&mu_);
        timeline_.EndWait(Activity::kTokens, begin, iteration_);
      }
      done(answer);
    };
    // Without token queues there are acknowledgements to wait for, or nothing.
    if (phase == Phase::kTokens && options_.max_iteration_gap == 0) {
      acquired(Answer::kOk);
      return;
    }
    tokens_.Acquire(
        tokens,
        [this, phase](int64_t neighbor, int64_t awaited) {
          MutexLock lock(&mu_);
          timeline_.SetPhase(phase, neighbor, awaited);
        },
        std::move(acquired));
  }

  const HopOptions options_;
  CancellableWait waits_;
  HopInvariants invariants_;
  HopUpdates<Update> updates_;
  HopTokens tokens_;
  HopOutboxes<Update> outboxes_;

  Mutex mu_;  // Comes before those of the token queues and of the outboxes.
  int64_t iteration_ ABSL_GUARDED_BY(mu_) = -1;
  int64_t first_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t receiving_ ABSL_GUARDED_BY(mu_) = -1;
  HopTimeline timeline_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_WORKER_H_
