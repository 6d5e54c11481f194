// The tokens that a worker holds of one of its out-neighbors: how many more
// iterations it may enter before that neighbor moves on (Hop, section 4.2).
//
// The neighbor grants by a total, which only rises: so a grant that is lost,
// late or repeated does no harm, and several become one. It is kept beside the
// worker that takes tokens, so that taking one needs no message.
//
//   TokenQueue tokens(/*granted=*/4);
//   tokens.Acquire(1, [](TokenQueue::Answer answer) { ... });
//   tokens.GrantUpTo(5);
//
// Thread safe. Nothing blocks: a wait ends by a callback, which is called
// without a lock by the thread whose call ended it. Callbacks may call the
// queue but must not block. The destructor closes the queue.

#ifndef TF_RECSYNC_CC_ENGINE_TOKEN_QUEUE_H_
#define TF_RECSYNC_CC_ENGINE_TOKEN_QUEUE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

class TokenQueue {
 public:
  enum class Answer { kTokens, kClosed };
  using Callback = std::function<void(Answer)>;
  using Ticket = int64_t;

  explicit TokenQueue(int64_t granted) : granted_(granted) {}
  ~TokenQueue() { Close(); }
  TokenQueue(const TokenQueue&) = delete;
  TokenQueue& operator=(const TokenQueue&) = delete;

  struct Totals {
    int64_t granted;
    int64_t taken;
    bool lifted;
  };

  // The tokens that are there; below 0 only after a Lift.
  int64_t size() ABSL_LOCKS_EXCLUDED(mu_);

  // Since the start.
  Totals totals() ABSL_LOCKS_EXCLUDED(mu_);

  // Adds `tokens`, at least 0.
  void Insert(int64_t tokens) ABSL_LOCKS_EXCLUDED(mu_);

  // As many as make `total` since the start; nothing if there were more.
  void GrantUpTo(int64_t total) ABSL_LOCKS_EXCLUDED(mu_);

  // Calls `done` once, when `tokens` (at least 0) are there and taken, perhaps
  // before Acquire returns. Who came first is served first.
  Ticket Acquire(int64_t tokens, Callback done) ABSL_LOCKS_EXCLUDED(mu_);

  // Takes a wait back: true if its callback was not called and never will be.
  bool Cancel(Ticket ticket) ABSL_LOCKS_EXCLUDED(mu_);

  // While lifted, every Acquire is served at once: the neighbor is gone.
  void Lift(bool lifted) ABSL_LOCKS_EXCLUDED(mu_);
  bool lifted() ABSL_LOCKS_EXCLUDED(mu_);

  // The neighbor is back: no longer lifted, with so many granted since the
  // start. What was taken, while lifted too, stays so. Waits go on.
  void Restore(int64_t granted) ABSL_LOCKS_EXCLUDED(mu_);

  // As a new queue with so many tokens granted and taken, and not lifted. Waits
  // go on.
  void Reset(int64_t granted, int64_t taken) ABSL_LOCKS_EXCLUDED(mu_);

  // Answers all that wait, and every later Acquire, with kClosed.
  void Close() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Wait {
    int64_t tokens;
    Callback done;
  };

  void Serve(std::vector<Callback>* served) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool lifted_ ABSL_GUARDED_BY(mu_) = false;
  int64_t granted_ ABSL_GUARDED_BY(mu_);
  int64_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  Ticket next_ticket_ ABSL_GUARDED_BY(mu_) = 1;
  // Tickets rise, so this is the order in which they came.
  std::map<Ticket, Wait> waits_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_TOKEN_QUEUE_H_
