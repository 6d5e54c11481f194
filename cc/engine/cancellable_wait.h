// The waits of somebody who has one at a time, which others may cut short. A
// call, which may be interrupted as a whole, has any number of them, one after
// the other.
//
//   CancellableWait waits;
//   const int64_t call = waits.BeginCall();
//   const int64_t wait = waits.Begin();
//   const auto ticket = queue.Await([&] { waits.End(wait); ... });
//   waits.Guard(wait, [&, ticket] { if (queue.Cancel(ticket)) ... });
//   // and elsewhere
//   waits.Interrupt(call);
//
// What interrupts a call between its beginning and a wait ends that wait as
// soon as it is guarded: an interruption is never lost. What a wait holds, it
// holds no longer than it lasts.
//
// Thread safe. Nothing blocks; what cancels a wait is called, and destroyed,
// without a lock.

#ifndef TF_RECSYNC_CC_ENGINE_CANCELLABLE_WAIT_H_
#define TF_RECSYNC_CC_ENGINE_CANCELLABLE_WAIT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

class CancellableWait {
 public:
  CancellableWait() = default;
  CancellableWait(const CancellableWait&) = delete;
  CancellableWait& operator=(const CancellableWait&) = delete;

  // Begins a call, which nobody has interrupted yet. Returns its number.
  int64_t BeginCall() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    is_interrupted_ = false;
    return ++call_;
  }

  // Begins a wait of the call. Returns its number.
  int64_t Begin() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return ++wait_;
  }

  // Whoever interrupts the call from now on calls `cancel`, once; this call
  // does, if somebody has already. Nobody does if the wait has ended.
  void Guard(int64_t wait, std::function<void()> cancel)
      ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      if (wait != wait_ || wait == ended_) return;
      if (!is_interrupted_) {
        cancel_ = std::move(cancel);
        return;
      }
    }
    cancel();
  }

  // The wait has ended.
  void End(int64_t wait) ABSL_LOCKS_EXCLUDED(mu_) {
    std::function<void()> dropped;  // Destroyed without the lock.
    MutexLock lock(&mu_);
    if (wait != wait_) return;
    ended_ = wait;
    dropped = std::exchange(cancel_, nullptr);
  }

  // Ends the wait that there is, or the next one of the call; of a call with a
  // number, unless a later one has begun.
  void Interrupt(std::optional<int64_t> call = std::nullopt)
      ABSL_LOCKS_EXCLUDED(mu_) {
    std::function<void()> cancel;
    {
      MutexLock lock(&mu_);
      if (call.has_value() && *call != call_) return;
      is_interrupted_ = true;
      cancel = std::exchange(cancel_, nullptr);
    }
    if (cancel != nullptr) cancel();
  }

 private:
  Mutex mu_;
  int64_t call_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_interrupted_ ABSL_GUARDED_BY(mu_) = false;
  int64_t wait_ ABSL_GUARDED_BY(mu_) = 0;   // the last one that has begun
  int64_t ended_ ABSL_GUARDED_BY(mu_) = 0;  // the last one that has ended
  std::function<void()> cancel_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_CANCELLABLE_WAIT_H_
