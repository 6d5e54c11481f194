// What has to hold of the protocol of decentralized training, as far as one
// worker can see it; see hop_worker.h. What does not hold is a bug.
//
// Thread compatible: the worker's lock guards it.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_INVARIANTS_H_
#define TF_RECSYNC_CC_ENGINE_HOP_INVARIANTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cc/engine/hop_options.h"
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
  void Begin(int64_t first) {
    first_ = first;
    all_live_ = true;
    violation_.reset();
    announced_.assign(options_.out_neighbors.size(), first - 1);
  }

  // Somebody has left, or is back: bounds by paths over others are void.
  void ForgetPaths() { all_live_ = false; }

  // An out-neighbor, by its place among them, is at least that far, or, when it
  // is back, just that far.
  void Announce(size_t i, int64_t progress) {
    announced_[i] = std::max(announced_[i], progress);
  }
  void Restart(size_t i, int64_t progress) { announced_[i] = progress; }

  // Between these, tokens may be on their way from what was announced.
  void BeginGranting() { ++granting_; }
  void EndGranting() { --granting_; }

  // Notes what does not hold, unless something did not before.
  void Break(const HopViolation& violation) {
    if (!violation_.has_value()) violation_ = violation;
  }

  // Table 1 of the paper, for a worker in `iteration`. Before its first
  // iteration it is in it already.
  bool CheckGap(int64_t neighbor, int64_t progress, int64_t iteration) {
    const std::optional<int64_t> bound = GapBound(neighbor);
    const int64_t gap = progress - std::max(iteration, first_);
    if (!bound.has_value() || gap <= *bound) return true;
    Break(
        {HopViolation::Rule::kGap, neighbor, iteration, progress, gap, *bound});
    return false;
  }

  // Of each iteration that a neighbor can be in there is one update at most;
  // `found` of them wait, and the last one's is `progress`.
  bool CheckUpdates(int64_t neighbor, int64_t progress, int64_t iteration,
                    int64_t found) {
    const std::optional<int64_t> bound = GapBound(neighbor);
    if (!bound.has_value() || found <= *bound + 1) return true;
    Break({HopViolation::Rule::kUpdates, neighbor, iteration, progress, found,
           *bound + 1});
    return false;
  }

  // Those of an out-neighbor j when iteration k is entered: Iter(j) - k +
  // max_iteration_gap (theorem 2), where Iter(j) is what j has announced; the
  // tokens since then are on their way.
  void CheckTokens(int64_t iteration,
                   const std::vector<std::unique_ptr<TokenQueue>>& tokens) {
    if (options_.gap_bounds.empty() || options_.Allowance() == 0) return;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const TokenQueue::Totals totals = tokens[i]->totals();
      if (totals.lifted) continue;
      const int64_t expected = announced_[i] + options_.Allowance();
      // While somebody grants, what was announced may not have come there.
      const int64_t granted = granting_ > 0 ? expected : totals.granted;
      if (granted - totals.taken == expected - iteration) continue;
      Break({HopViolation::Rule::kTokens, options_.out_neighbors[i], iteration,
             announced_[i], granted - totals.taken, expected - iteration});
    }
  }

  // The first violation since Begin, if there was one.
  const std::optional<HopViolation>& violation() const { return violation_; }

 private:
  // How far a neighbor may be ahead; none if that is not known, or not checked,
  // or not so while somebody is gone, whose neighbors, and theirs, go on.
  std::optional<int64_t> GapBound(int64_t neighbor) const {
    if (!all_live_) return std::nullopt;
    for (size_t i = 0; i < options_.gap_bounds.size(); ++i) {
      if (options_.in_neighbors[i] != neighbor) continue;
      const int64_t bound = options_.gap_bounds[i];
      return bound >= 0 ? std::optional(bound) : std::nullopt;
    }
    return std::nullopt;
  }

  const HopOptions options_;
  int64_t first_ = 0;
  bool all_live_ = true;
  std::vector<int64_t> announced_;  // by out-neighbor
  int64_t granting_ = 0;            // calls that change tokens
  std::optional<HopViolation> violation_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_INVARIANTS_H_
