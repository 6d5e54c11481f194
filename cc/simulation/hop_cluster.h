// Decentralized training (Hop) in virtual time: the engine's own HopWorkers,
// whose steps take so long as they are said to take, and whose parcels pass
// links, as the loops of the edges carry them in a real cluster.
//
//   HopCluster cluster(options);
//   Result result = cluster.Run([] { return true; });
//   cluster.seconds();
//
// A step is that of HopStrategy: PlanNext, AcquireTokens, Enter, compute, Send
// in serial order, Receive, average. In parallel order a worker computes while
// what it entered with is on its way; with notify_ack also while it waits until
// it may send that.
//
// A parcel asks the receiver, which takes a message in each direction, whether
// its update is wanted. If so, the update passes the sending side of the
// sender's network card, then the receiving side of the receiver's, each of
// them shared by all workers of the machine, and is acknowledged. Only then the
// next parcel on the same edge sets out. Within a machine messages take no
// time.
//
// All workers take steps from one pool. One that finds none left leaves, which
// its neighbors know at once.
//
// Thread compatible: one thread has it.

#ifndef TF_RECSYNC_CC_SIMULATION_HOP_CLUSTER_H_
#define TF_RECSYNC_CC_SIMULATION_HOP_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/hop_options.h"
#include "cc/engine/hop_state.h"
#include "cc/engine/hop_worker.h"
#include "cc/engine/result.h"
#include "cc/simulation/event_queue.h"
#include "cc/simulation/logistic_problem.h"
#include "cc/simulation/steps_in_no_time.h"
#include "cc/simulation/virtual_network.h"

namespace recsync {

// What a cluster learns: with Keras's SGD, from a start of zeros.
struct HopLearning {
  const LogisticProblem* problem = nullptr;  // Not owned; lives on.
  double learning_rate = 0.1;
  double momentum = 0.0;
  // From one look at the loss, that of the mean of all copies, to the next one.
  double loss_seconds = 1.0;
  // Training ends when the loss is at most this.
  double target_loss = -std::numeric_limits<double>::infinity();
};

struct HopClusterOptions {
  // By worker, all of them consistent. `now` is replaced by virtual time.
  std::vector<HopOptions> workers;
  // Whether a worker sends what it has computed, not what it computes on.
  bool serial = false;
  // How long a worker computes in a step, at least 0: of the worker, the steps
  // that it has done, and the time now.
  std::function<double(int64_t worker, int64_t step, double now)>
      compute_seconds;
  // On which machine each worker is, from 0 on.
  std::vector<int64_t> machines;
  // Of each machine's network card, in each direction; positive.
  std::vector<double> bytes_per_second;
  // Whether a card sends and receives at the same time; if not, both pass one
  // link, one after the other.
  bool duplex = true;
  // Of a message from one machine to another, at least 0.
  double latency = 0.0;
  int64_t update_bytes = 0;
  // Of all workers together.
  int64_t steps = 0;
  // When everything stops, whoever is in a step.
  double seconds = std::numeric_limits<double>::infinity();
  bool keeps_events = false;
  std::optional<HopLearning> learning;
};

class HopCluster {
 public:
  struct Event {
    int64_t worker;
    recsync::Event event;
  };

  struct Loss {
    double seconds;
    int64_t steps;  // of all workers, that were done by then
    double loss;
  };

  // The parameters that travel, where there are any.
  using Update = std::shared_ptr<const std::vector<float>>;

  explicit HopCluster(HopClusterOptions options);
  HopCluster(const HopCluster&) = delete;
  HopCluster& operator=(const HopCluster&) = delete;

  // Runs all of it, once. Asks every now and then whether it shall go on; an
  // error if not. Another error is one of the options, such as steps that take
  // no time and would have no end, or of the protocol: an invariant that does
  // not hold, or workers that wait for each other for good.
  Result Run(const std::function<bool()>& goes_on);

  // What has become of it.

  // When the last step ended, or everything stopped.
  double seconds() const { return seconds_; }
  // Finished steps, by worker.
  const std::vector<int64_t>& steps() const { return steps_; }
  // By worker.
  std::vector<HopState> States() const;
  // [i][j]: how far worker i was ahead of worker j, at most, before the first
  // worker left.
  const std::vector<std::vector<int64_t>>& largest_gaps() const {
    return largest_gaps_;
  }
  // What workers did, if it was to be kept; of each in the order of time.
  const std::vector<Event>& events() const { return kept_events_; }
  const std::vector<Loss>& losses() const { return losses_; }
  // By machine.
  std::vector<VirtualNetwork::Traffic> traffic() const {
    return network_.traffic();
  }

 private:
  using Worker = HopWorker<Update>;
  using Parcel = Worker::Parcel;

  struct Member {
    std::unique_ptr<Worker> worker;
    bool has_left = false;
    std::vector<float> parameters;
    std::vector<float> velocity;  // of the momentum
    Update base;  // what it sent of this iteration, or nothing in serial order
  };

  Result Check() const;

  // Workers.
  void Begin(int64_t i);
  void Acquire(int64_t i, int64_t next);
  void Enter(int64_t i, int64_t next);
  void Learn(int64_t i);
  void Computed(int64_t i, int64_t iteration);
  void Receive(int64_t i, int64_t iteration);
  void Finish(int64_t i);
  void Leave(int64_t i);
  void NoteGaps(int64_t i);
  void Average(int64_t i, const std::vector<Worker::Received>& received,
               const Update& base);

  // Edges.
  void Collect(int64_t from, int64_t to);
  void Ask(int64_t from, int64_t to, std::shared_ptr<Parcel> parcel);
  void Transfer(int64_t from, int64_t to, std::shared_ptr<Parcel> parcel,
                int64_t began);
  void Deliver(int64_t from, int64_t to, std::shared_ptr<Parcel> parcel,
               int64_t began);
  double Latency(int64_t from, int64_t to) const {
    return network_.Latency(options_.machines[from], options_.machines[to]);
  }

  // Has something happen now, but not inside of whoever calls.
  void Soon(EventQueue::Event event) { events_.After(0.0, std::move(event)); }
  int64_t Microseconds() const;
  // Nothing goes on.
  void Stop();
  void Fail(int64_t i);
  bool IsOk(int64_t i, HopAnswer answer);
  void LookAtLoss();
  void NoteLoss();
  void KeepEvents(int64_t i);
  std::string Standstill() const;

  const HopClusterOptions options_;
  const int64_t n_;
  EventQueue events_;
  VirtualNetwork network_;
  std::vector<Member> members_;
  StepsInNoTime timeless_;
  std::vector<int64_t> steps_;
  std::vector<std::vector<int64_t>> largest_gaps_;
  std::vector<Event> kept_events_;
  std::vector<Loss> losses_;
  double seconds_ = 0.0;
  int64_t taken_ = 0;  // steps
  int64_t done_ = 0;   // steps
  int64_t there_ = 0;  // workers
  bool has_stopped_ = false;
  std::string error_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_HOP_CLUSTER_H_
