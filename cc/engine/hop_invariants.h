// What has to hold of the protocol of decentralized training, as far as one
// worker can see it; see hop_worker.h. What does not hold is a bug.
//
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_INVARIANTS_H_
#define TF_RECSYNC_CC_ENGINE_HOP_INVARIANTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "cc/engine/hop_options.h"
#include "cc/engine/hop_tokens.h"
#include "cc/engine/mutex.h"
#include "cc/engine/token_queue.h"

namespace recsync {

// An invariant of the protocol that turned out not to hold.
struct HopViolation {
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

class HopInvariants {
 public:
  explicit HopInvariants(const HopOptions& options) : options_(options) {}

  // The worker begins anew with this iteration, and everybody takes part.
  void Begin(int64_t first) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    iteration_ = first - 1;
    first_ = first;
    all_live_ = true;
    violation_.reset();
    for (const int64_t neighbor : options_.out_neighbors) {
      announced_[neighbor] = first - 1;
    }
  }

  // The worker enters an iteration, for which it has taken tokens. False, and
  // it must not, if something does not hold, here or before.
  bool Enter(int64_t iteration, HopTokens* tokens) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    CheckTokens(iteration, tokens);
    if (violation_.has_value()) return false;
    iteration_ = iteration;
    return true;
  }

  // Somebody has left, or is back: bounds by paths over others are void.
  void ForgetPaths() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    all_live_ = false;
  }

  // An out-neighbor is at least that far, or, when it is back, just that far.
  // `grant`, called without a lock, grants the tokens that follow from it.
  template <typename Grant>
  void Announce(int64_t neighbor, int64_t progress, bool is_back,
                const Grant& grant) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      ++granting_;
      int64_t& announced = announced_[neighbor];
      announced = is_back ? progress : std::max(announced, progress);
    }
    grant();
    MutexLock lock(&mu_);
    --granting_;
  }

  // Table 1 of the paper. Before its first iteration a worker is in it already.
  bool CheckGap(int64_t neighbor, int64_t progress) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    const int64_t gap = progress - std::max(iteration_, first_);
    return Check(HopViolation::Rule::kGap, neighbor, progress, gap,
                 GapBound(neighbor));
  }

  // Of each iteration that a neighbor can be in there is one update at most;
  // `found` of them wait, and the last one's is `progress`.
  bool CheckUpdates(int64_t neighbor, int64_t progress, int64_t found)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    std::optional<int64_t> bound = GapBound(neighbor);
    if (bound.has_value()) ++*bound;
    return Check(HopViolation::Rule::kUpdates, neighbor, progress, found,
                 bound);
  }

  // The capacity is for what the bounds allow; the neighbor's update is beyond.
  void BreakCapacity(int64_t neighbor, int64_t progress)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    Check(HopViolation::Rule::kCapacity, neighbor, progress,
          options_.capacity + 1, options_.capacity);
  }

  // The first violation since Begin, if there was one.
  std::optional<HopViolation> violation() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return violation_;
  }

 private:
  // Notes what does not hold, unless something did not before.
  void Break(const HopViolation& violation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!violation_.has_value()) violation_ = violation;
  }

  bool Check(HopViolation::Rule rule, int64_t neighbor, int64_t progress,
             int64_t found, std::optional<int64_t> bound)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!bound.has_value() || found <= *bound) return true;
    Break({rule, neighbor, iteration_, progress, found, *bound});
    return false;
  }

  // Those of an out-neighbor j when iteration k is entered: Iter(j) - k +
  // max_iteration_gap (theorem 2), where Iter(j) is what j has announced; the
  // tokens since then are on their way.
  void CheckTokens(int64_t iteration, HopTokens* tokens)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (options_.gap_bounds.empty() || options_.Allowance() == 0) return;
    for (const int64_t neighbor : options_.out_neighbors) {
      const TokenQueue::Totals totals = tokens->Of(neighbor)->totals();
      if (totals.lifted) continue;
      const int64_t announced = announced_[neighbor];
      const int64_t expected = announced + options_.Allowance();
      // While somebody grants, what was announced may not have come there.
      const int64_t granted = granting_ > 0 ? expected : totals.granted;
      if (granted - totals.taken == expected - iteration) continue;
      Break({HopViolation::Rule::kTokens, neighbor, iteration, announced,
             granted - totals.taken, expected - iteration});
    }
  }

  // How far a neighbor may be ahead; none if that is not known, or not checked,
  // or not so while somebody is gone, whose neighbors, and theirs, go on.
  std::optional<int64_t> GapBound(int64_t neighbor) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!all_live_) return std::nullopt;
    for (size_t i = 0; i < options_.gap_bounds.size(); ++i) {
      if (options_.in_neighbors[i] != neighbor) continue;
      const int64_t bound = options_.gap_bounds[i];
      return bound >= 0 ? std::optional(bound) : std::nullopt;
    }
    return std::nullopt;
  }

  const HopOptions options_;
  Mutex mu_;  // Comes before the token queues'.
  int64_t iteration_ ABSL_GUARDED_BY(mu_) = -1;
  int64_t first_ ABSL_GUARDED_BY(mu_) = 0;
  bool all_live_ ABSL_GUARDED_BY(mu_) = true;
  // By out-neighbor.
  std::map<int64_t, int64_t> announced_ ABSL_GUARDED_BY(mu_);
  // Calls that grant tokens.
  int64_t granting_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<HopViolation> violation_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_INVARIANTS_H_
