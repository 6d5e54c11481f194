// What a worker of decentralized training did and when, for a timeline, and how
// often, and how long it waited; see hop_worker.h.
//
// Thread compatible: the worker's lock guards it.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_
#define TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "cc/engine/hop_clock.h"
#include "cc/engine/hop_state.h"

namespace recsync {

// The phase that the worker is in, the events that nobody has taken yet, and
// what was counted.
class HopTimeline {
 public:
  explicit HopTimeline(HopClock now) : now_(std::move(now)) {}

  // `neighbor`: for whose tokens it waits, -1 if not for one neighbor's.
  // `awaited`: the iteration that those it waits for have to come to, or -1.
  void SetPhase(HopPhase phase, int64_t neighbor = -1, int64_t awaited = -1) {
    phase_ = phase;
    neighbor_ = neighbor;
    awaited_ = awaited;
    began_ = now_();
  }

  // An event; the oldest is lost where nobody takes them.
  void Note(HopSpan span, int64_t begin, int64_t end, int64_t iteration,
            int64_t neighbor) {
    if (events_.size() == kMaxEvents) {
      events_.pop_front();
      ++lost_events_;
    }
    events_.push_back({span, begin, end, iteration, neighbor});
  }

  // The worker enters an iteration; this is the one that it was in.
  void Enter(int64_t iteration, int64_t before) {
    if (iteration > before + 1) {
      ++counts_.jumps;
      counts_.skipped += iteration - before - 1;
      const int64_t now = now_();
      Note(HopSpan::kJump, now, now, iteration, -1);
    }
    ++counts_.iterations;
    SetPhase(HopPhase::kComputing);
  }

  // It begins at this time to wait for updates, of iterations from `awaited`
  // on.
  void BeginReceive(int64_t now, int64_t iteration, int64_t awaited) {
    if (phase_ == HopPhase::kComputing) {
      Note(HopSpan::kCompute, began_, now, iteration, -1);
    }
    SetPhase(HopPhase::kUpdates, -1, awaited);
  }

  // It has waited since `begin` for tokens, or for updates, and is idle now.
  void EndWait(HopSpan span, int64_t begin, int64_t iteration) {
    const int64_t end = now_();
    (span == HopSpan::kTokens ? counts_.waiting_for_tokens
                              : counts_.waiting_for_updates) += end - begin;
    Note(span, begin, end, iteration, -1);
    SetPhase(HopPhase::kIdle);
  }

  void CountUsed(int64_t updates) { counts_.used += updates; }

  // Takes the events that were noted since the last call.
  std::vector<HopEvent> TakeEvents() {
    std::vector<HopEvent> events(events_.begin(), events_.end());
    events_.clear();
    return events;
  }

  // What it knows of the worker's state.
  void Fill(HopState* state) const {
    state->phase = phase_;
    state->seconds = 1e-6 * static_cast<double>(now_() - began_);
    state->counts = counts_;
    state->lost_events = lost_events_;
    if (neighbor_ >= 0) state->missing.push_back(neighbor_);
    state->awaited = awaited_;
  }

 private:
  static constexpr size_t kMaxEvents = 1 << 16;

  const HopClock now_;
  HopPhase phase_ = HopPhase::kIdle;
  int64_t neighbor_ = -1;
  int64_t awaited_ = -1;
  int64_t began_ = 0;  // the phase
  std::deque<HopEvent> events_;
  int64_t lost_events_ = 0;
  HopCounts counts_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_
