// What workers learn in a simulation of servers, which says when: see
// ServerSimulation. A worker is in one step at a time, but for this: it may
// have begun, and pulled for, the next one while servers still apply the last.
//
// Thread compatible: one thread has it.

#ifndef TF_RECSYNC_CC_SIMULATION_LEARNER_H_
#define TF_RECSYNC_CC_SIMULATION_LEARNER_H_

#include <array>
#include <cstdint>
#include <vector>

#include "cc/engine/gradient_buffer.h"
#include "cc/engine/staleness_counters.h"

namespace recsync {

// The values of StalenessCounters.
using StalenessTotals = std::array<int64_t, StalenessCounters::kSize>;

class Learner {
 public:
  virtual ~Learner() = default;

  // What a server's gradient buffer is told of its tables.
  virtual std::vector<GradientBufferOptions::Table> TablesOf(
      int server) const = 0;

  // A worker begins the step of a batch; no two have the same.
  virtual void Begin(int worker, int64_t batch) = 0;
  // It reads what it needs from a server, as it is now.
  virtual void Pull(int worker, int server) = 0;
  // It has that from all servers: computes its gradients.
  virtual void Compute(int worker) = 0;
  // A server applies a worker's gradients.
  virtual void Apply(int worker, int server) = 0;
  // Or they come to the server's buffer: names them, until the next call.
  virtual void Collect(int worker, int server, GradientPush* push) = 0;
  // The server applies what the buffer gave out.
  virtual void ApplyStep(int server, const Aggregate& aggregate) = 0;

  // What was counted of the rows of a server's tables.
  virtual const StalenessTotals& RowsStaleness(int server) const = 0;

  // So many steps are done, at a time in seconds.
  virtual void Evaluate(int64_t steps, double seconds) = 0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_LEARNER_H_
