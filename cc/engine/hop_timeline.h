// What a worker of decentralized training did and when, for a timeline, and how
// often, and how long it waited; see hop_worker.h.
//
// Thread compatible: the worker's lock guards it.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_
#define TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/engine/event_log.h"
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

  void Note(const Event& event) { events_.Note(event); }

  // The worker enters an iteration; this is the one that it was in.
  void Enter(int64_t iteration, int64_t before) {
    if (iteration > before + 1) {
      ++counts_.jumps;
      counts_.skipped += iteration - before - 1;
      const int64_t now = now_();
      Note({Activity::kJump, now, now, iteration});
    }
    ++counts_.iterations;
    SetPhase(HopPhase::kComputing);
  }

  // It has computed until this time, if it was computing, and is idle now.
  void EndComputing(int64_t now, int64_t iteration) {
    if (phase_ == HopPhase::kComputing) {
      Note({Activity::kCompute, began_, now, iteration});
    }
    SetPhase(HopPhase::kIdle);
  }

  // It begins at this time to wait for updates, of iterations from `awaited`
  // on.
  void BeginReceive(int64_t now, int64_t iteration, int64_t awaited) {
    EndComputing(now, iteration);
    SetPhase(HopPhase::kUpdates, -1, awaited);
  }

  // It has waited since `begin` for tokens, or for updates, and is idle now.
  void EndWait(Activity activity, int64_t begin, int64_t iteration) {
    const int64_t end = now_();
    (activity == Activity::kTokens ? counts_.waiting_for_tokens
                                   : counts_.waiting_for_updates) +=
        end - begin;
    Note({activity, begin, end, iteration});
    SetPhase(HopPhase::kIdle);
  }

  void CountUsed(int64_t updates) { counts_.used += updates; }

  // Takes the events that were noted since the last call.
  std::vector<Event> TakeEvents() { return events_.Take(); }

  // What it knows of the worker's state.
  void Fill(HopState* state) const {
    state->phase = phase_;
    state->seconds = 1e-6 * static_cast<double>(now_() - began_);
    state->counts = counts_;
    state->lost_events = events_.lost();
    if (neighbor_ >= 0) state->missing.push_back(neighbor_);
    state->awaited = awaited_;
  }

 private:
  const HopClock now_;
  HopPhase phase_ = HopPhase::kIdle;
  int64_t neighbor_ = -1;
  int64_t awaited_ = -1;
  int64_t began_ = 0;  // the phase
  EventLog events_;
  HopCounts counts_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_
