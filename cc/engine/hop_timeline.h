// What a worker of decentralized training did and when, for a timeline, and how
// often, and how long it waited; see hop_worker.h.
//
// Thread compatible: the worker's lock guards it.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_
#define TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace recsync {

enum class HopPhase { kIdle, kComputing, kUpdates, kTokens, kAcknowledgements };

enum class HopSpan { kCompute, kUpdates, kTokens, kSend, kReceive, kJump };

// Something that the worker did. Times are microseconds since the Unix epoch.
struct HopEvent {
  HopSpan span;
  int64_t begin;
  int64_t end;
  int64_t iteration;
  int64_t neighbor;  // -1 where there is none
};

struct HopCounts {
  int64_t iterations = 0;  // entered
  int64_t used = 0;        // updates that were averaged
  int64_t jumps = 0;
  int64_t skipped = 0;   // iterations that jumps left out
  int64_t sent = 0;      // updates that went to neighbors, or were on the way
  int64_t replaced = 0;  // updates not sent, as a newer one was there
  int64_t waiting_for_updates = 0;  // microseconds
  int64_t waiting_for_tokens = 0;   // or acknowledgements, microseconds
};

// Now, in microseconds since the Unix epoch.
inline int64_t HopNow() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

// The phase that the worker is in, and the events that nobody has taken yet.
class HopTimeline {
 public:
  // `neighbor`: for whose tokens it waits, -1 if not for one neighbor's.
  // `awaited`: the iteration that those it waits for have to come to, or -1.
  void SetPhase(HopPhase phase, int64_t neighbor = -1, int64_t awaited = -1) {
    phase_ = phase;
    neighbor_ = neighbor;
    awaited_ = awaited;
    began_ = HopNow();
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

  // Takes the events that were noted since the last call.
  std::vector<HopEvent> TakeEvents() {
    std::vector<HopEvent> events(events_.begin(), events_.end());
    events_.clear();
    return events;
  }

  HopPhase phase() const { return phase_; }
  int64_t began() const { return began_; }
  int64_t neighbor() const { return neighbor_; }
  int64_t awaited() const { return awaited_; }
  int64_t lost_events() const { return lost_events_; }

 private:
  static constexpr size_t kMaxEvents = 1 << 16;

  HopPhase phase_ = HopPhase::kIdle;
  int64_t neighbor_ = -1;
  int64_t awaited_ = -1;
  int64_t began_ = 0;  // the phase
  std::deque<HopEvent> events_;
  int64_t lost_events_ = 0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_TIMELINE_H_
