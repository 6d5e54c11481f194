// How one worker of decentralized training takes part; see hop_worker.h.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_OPTIONS_H_
#define TF_RECSYNC_CC_ENGINE_HOP_OPTIONS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/engine/hop_clock.h"

namespace recsync {

struct HopOptions {
  std::vector<int64_t> in_neighbors;   // without the worker itself
  std::vector<double> weights;         // of in_neighbors, in standard mode
  std::vector<int64_t> out_neighbors;  // without the worker itself
  int64_t max_iteration_gap = 0;       // of the token queues; 0: none
  int64_t slots = 1;                   // of the update queue
  int64_t capacity = 1;                // of the update queue
  int64_t backup_workers = 0;          // below 1 + in_neighbors.size()
  int64_t staleness_bound = -1;        // -1: none
  int64_t max_jump = 1;                // iterations; 1: never skips any
  int64_t jump_trigger = 0;            // jumps when further behind than this
  bool notify_ack = false;             // then without token queues
  // Of in_neighbors: how far each may be ahead, -1 for no bound. With them the
  // worker checks what it can see of the protocol's invariants; empty: it does
  // not.
  std::vector<int64_t> gap_bounds;
  HopClock now = HopNow;  // what events and waits are timed by

  // How far the worker may be ahead of what an out-neighbor has announced.
  int64_t Allowance() const { return notify_ack ? 2 : max_iteration_gap; }

  // The oldest iteration whose updates are of use to the receiver of one.
  int64_t Floor(int64_t iteration) const {
    const int64_t floor = iteration - std::max<int64_t>(staleness_bound, 0);
    return std::max<int64_t>(floor, 0);
  }
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_OPTIONS_H_
