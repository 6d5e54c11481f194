// Calls functions after a delay, from one thread of its own, so that a wait
// needs no sleeping thread.
//
//   Timer timer;
//   int64_t id = timer.CallAfter(0.03, [] { ... });
//   timer.Cancel(id);  // true: it has not run and never will
//
// Thread safe. The destructor drops what is still waiting, without calling it,
// and joins the thread. A callback must not block and must not destroy the
// timer.

#ifndef TF_RECSYNC_CC_ENGINE_TIMER_H_
#define TF_RECSYNC_CC_ENGINE_TIMER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

class Timer {
 public:
  Timer();
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Calls `callback` once, `seconds` from now or as soon after as possible.
  // Returns an id for Cancel.
  int64_t CallAfter(double seconds, std::function<void()> callback)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Drops a call. False when it has run already, or is about to.
  bool Cancel(int64_t id) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  using Time = std::chrono::steady_clock::time_point;

  void Loop() ABSL_LOCKS_EXCLUDED(mu_);

  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  // Ordered by due time; the id keeps equal times apart.
  std::map<std::pair<Time, int64_t>, std::function<void()>> calls_
      ABSL_GUARDED_BY(mu_);
  std::map<int64_t, Time> due_ ABSL_GUARDED_BY(mu_);  // by id
  std::thread thread_;  // started last, joined by the destructor
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_TIMER_H_
