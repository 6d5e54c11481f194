// The tokens that a worker of decentralized training takes from its
// out-neighbors, a queue for each; with notify_ack their acknowledgements,
// which are taken in the same way. See hop_worker.h.
//
// Thread safe. Nothing blocks: waits end by callbacks, which are called without
// a lock. What interrupts `waits` ends them, too.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_TOKENS_H_
#define TF_RECSYNC_CC_ENGINE_HOP_TOKENS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "cc/engine/cancellable_wait.h"
#include "cc/engine/hop_options.h"
#include "cc/engine/hop_state.h"
#include "cc/engine/token_queue.h"

namespace recsync {

class HopTokens {
 public:
  using Done = std::function<void(HopAnswer)>;
  // Called with each neighbor that is waited for, and the iteration that it has
  // to come to.
  using Waiting = std::function<void(int64_t neighbor, int64_t awaited)>;

  HopTokens(const HopOptions& options, CancellableWait* waits)
      : options_(options), waits_(waits) {
    for (size_t i = 0; i < options.out_neighbors.size(); ++i) {
      queues_.push_back(std::make_unique<TokenQueue>(0));
    }
  }

  // Before anybody has entered an iteration a worker may enter this one, and
  // max_iteration_gap - 1 more (figure 7); with acknowledgements it may send
  // one update.
  void Begin(int64_t first) {
    for (const auto& queue : queues_) {
      queue->Reset(first + options_.Allowance() - 1, first);
    }
  }

  // How many iterations the worker moves on by: more than one if it is behind
  // all its out-neighbors (section 5). Before it enters iteration k it averages
  // updates of k - 1, or of up to staleness_bound iterations less. In-neighbors
  // that are not its out-neighbors, too, send them no earlier than its tokens
  // allow, max_iteration_gap iterations ahead of it: it does not jump further.
  int64_t Stride() {
    if (options_.max_jump <= 1) return 1;
    int64_t behind = std::numeric_limits<int64_t>::max();
    for (const auto& queue : queues_) {
      if (queue->lifted()) continue;
      behind = std::min(behind, queue->size() - options_.max_iteration_gap);
    }
    if (behind == std::numeric_limits<int64_t>::max() ||
        behind <= options_.jump_trigger) {
      return 1;
    }
    const int64_t sent = options_.max_iteration_gap +
                         std::max<int64_t>(options_.staleness_bound, 0);
    return std::max<int64_t>(1,
                             std::min({behind, options_.max_jump, sent + 1}));
  }

  // Takes so many tokens from each out-neighbor, one after the other.
  void Acquire(int64_t tokens, Waiting waiting, Done done) {
    AcquireFrom(0, tokens, waiting, done);
  }

  // The queue of a neighbor; null if it is no out-neighbor.
  TokenQueue* Of(int64_t neighbor) {
    for (size_t i = 0; i < queues_.size(); ++i) {
      if (options_.out_neighbors[i] == neighbor) return queues_[i].get();
    }
    return nullptr;
  }

  void Fill(HopState* state) {
    for (const auto& queue : queues_) state->tokens.push_back(queue->size());
  }

  void Close() {
    for (const auto& queue : queues_) queue->Close();
  }

 private:
  void AcquireFrom(size_t i, int64_t tokens, const Waiting& waiting,
                   const Done& done) {
    if (i == queues_.size()) {
      done(HopAnswer::kOk);
      return;
    }
    waiting(options_.out_neighbors[i],
            queues_[i]->totals().taken + tokens - options_.Allowance());
    const int64_t wait = waits_->Begin();
    const auto ticket = queues_[i]->Acquire(
        tokens, [this, i, tokens, waiting, wait, done](auto answer) {
          waits_->End(wait);
          if (answer == TokenQueue::Answer::kClosed) {
            done(HopAnswer::kClosed);
            return;
          }
          AcquireFrom(i + 1, tokens, waiting, done);
        });
    waits_->Guard(wait, [this, i, ticket, done] {
      if (queues_[i]->Cancel(ticket)) done(HopAnswer::kCancelled);
    });
  }

  const HopOptions options_;
  CancellableWait* const waits_;                     // Not owned.
  std::vector<std::unique_ptr<TokenQueue>> queues_;  // by out-neighbor
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_TOKENS_H_
