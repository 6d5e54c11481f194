// What the calls of a worker of decentralized training answer, and what it says
// of itself; see hop_worker.h.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_STATE_H_
#define TF_RECSYNC_CC_ENGINE_HOP_STATE_H_

#include <cstdint>
#include <vector>

#include "cc/engine/update_queue.h"

namespace recsync {

// How a wait has ended; kBroken: an invariant of the protocol does not hold.
enum class HopAnswer { kOk, kCancelled, kClosed, kBroken };

// What has become of an update that came.
enum class HopDelivered { kQueued, kDropped, kRepeated, kBroken, kClosed };

enum class HopPhase { kIdle, kComputing, kUpdates, kTokens, kAcknowledgements };

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

struct HopState {
  int64_t iteration;  // -1 before the first
  HopPhase phase;
  double seconds;                // in this phase
  std::vector<int64_t> missing;  // neighbors it waits for
  int64_t awaited;  // the iteration that they have to come to, or -1
  std::vector<int64_t> tokens;    // by out-neighbor
  std::vector<int64_t> declined;  // by in-neighbor, updates not wanted
  HopCounts counts;
  UpdateQueueCounts updates;
  int64_t queued;       // updates that are there
  int64_t lost_events;  // too many to be kept

  // All numbers that are no lists, but for the iteration and the phase, in the
  // order in which they are told to Python (hop_reports.py).
  std::vector<int64_t> Numbers() const {
    return {counts.iterations,
            counts.used,
            counts.jumps,
            counts.skipped,
            counts.sent,
            counts.replaced,
            counts.waiting_for_updates,
            counts.waiting_for_tokens,
            updates.unusable,
            updates.superseded,
            queued,
            lost_events,
            awaited};
  }
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_STATE_H_
