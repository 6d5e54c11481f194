// Groups of trainers with copies of their own, in virtual time: ShadowSync and
// hierarchical training.
//
// A group has some trainers, with some threads each, and perhaps servers, the
// group PSs, which hold the group's copy in shards of equal size and compute
// layers. Without servers a group is one trainer, which holds the copy itself.
// Copies are kept together by a CopySynchronizer.
//
// A step of a thread first computes by itself, for a time that somebody says.
// Then come its stages: in each of them it uses devices of its group, all at
// once, and the next one begins when all are done. A device does one thing
// after the other: the trainer itself, whose threads share it, or a server,
// which all trainers of the group share, and to and from which messages travel.
//
// What a step trains on: without servers the copy as it is when the step
// begins, and the update is applied at its end; with servers, each shard as it
// is when the first stage that reads it comes to the server, and the update is
// applied there when a stage that updates it is done. The staleness of an
// update is counted there: the updates that were applied since it was read, and
// itself.
//
// All threads take steps from one pool. When none are left and the last one is
// done, everything ends, whoever is being synchronized.
//
// Thread compatible: one thread has it.

#ifndef TF_RECSYNC_CC_SIMULATION_GROUP_CLUSTER_H_
#define TF_RECSYNC_CC_SIMULATION_GROUP_CLUSTER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "cc/engine/result.h"
#include "cc/simulation/copy_synchronizer.h"
#include "cc/simulation/event_queue.h"
#include "cc/simulation/logistic_problem.h"
#include "cc/simulation/steps_in_no_time.h"
#include "cc/simulation/virtual_link.h"
#include "cc/simulation/virtual_network.h"

namespace recsync {

// What a stage of a step has a device do.
struct GroupWork {
  static constexpr int64_t kTrainer = -1;

  int64_t device = kTrainer;  // or one of the group's servers, from 0 on
  int64_t amount = 0;         // floating-point operations
  int64_t bytes_to = 0;       // that travel to the server
  int64_t bytes_back = 0;     // that it answers
  bool reads = false;         // its shard
  bool updates = false;       // its shard
};

// What is learned, by plain gradient descent from a start of zeros.
struct GroupLearning {
  const LogisticProblem* problem = nullptr;  // Not owned; lives on.
  float learning_rate = 0.1f;
  // From one look at the loss, that of the first copy, to the next one.
  double loss_seconds = 1.0;
};

struct GroupClusterOptions {
  int64_t groups = 1;
  int64_t trainers = 1;  // of each group
  int64_t threads = 1;   // of each trainer
  int64_t servers = 0;   // of each group
  // How long a thread computes by itself, at least 0: of the trainer, the steps
  // that its threads have done, and the time now.
  std::function<double(int64_t trainer, int64_t step, double now)>
      compute_seconds;
  // By which all that a trainer does in a step is multiplied, what a thread
  // computes by itself and the work on the trainer; likewise, at least 0 and
  // finite. None: 1.
  std::function<double(int64_t trainer, int64_t step, double now)> factor;
  std::vector<std::vector<GroupWork>> stages;
  // What trainers and servers compute; positive.
  double trainer_per_second = std::numeric_limits<double>::infinity();
  double server_per_second = std::numeric_limits<double>::infinity();
  // Of network cards, as VirtualNetwork has them.
  double trainer_bytes_per_second = std::numeric_limits<double>::infinity();
  double server_bytes_per_second = std::numeric_limits<double>::infinity();
  double sync_ps_bytes_per_second = std::numeric_limits<double>::infinity();
  bool duplex = true;
  double latency = 0.0;
  int64_t sync_ps = 0;
  // Groups, threads, holders and the sync PSs' machines follow from the above.
  CopySyncOptions sync;
  int64_t steps = 0;  // of all threads together
  // When everything stops, whoever is in a step.
  double seconds = std::numeric_limits<double>::infinity();
  std::optional<GroupLearning> learning;
  bool keeps_log = false;
};

class GroupCluster {
 public:
  struct Loss {
    double seconds;
    int64_t steps;
    double loss;
  };

  // What happened to copies: what the synchronizer tells, or a thread's read or
  // update of a shard in its step.
  struct Entry {
    enum class Kind { kRead, kUpdate, kSyncRead, kExchange, kMove };
    Kind kind;
    int64_t group;
    int64_t shard;
    int64_t thread;  // or the part of kExchange, or -1
    int64_t step;    // of the thread, or the number of the synchronization
  };

  // How long a device was busy.
  struct Busy {
    std::vector<double> trainers;  // of all groups
    std::vector<double> servers;   // of all groups
  };

  explicit GroupCluster(GroupClusterOptions options);
  GroupCluster(const GroupCluster&) = delete;
  GroupCluster& operator=(const GroupCluster&) = delete;

  // Runs all of it, once. Asks every now and then whether it shall go on; an
  // error if not. Another error is one of the options, or steps or
  // synchronizations that would have no end, as they take no time.
  Result Run(const std::function<bool()>& goes_on);

  // When the last step ended, or everything stopped.
  double seconds() const { return seconds_; }
  // Finished steps, by trainer.
  const std::vector<int64_t>& steps() const { return steps_; }
  const CopySynchronizer& synchronizer() const { return *synchronizer_; }
  // StalenessCounters by group, then by shard.
  const std::vector<std::vector<int64_t>>& staleness() const {
    return staleness_;
  }
  // Of the trainers' machines, then the groups' servers', then the sync PSs'.
  std::vector<VirtualNetwork::Traffic> traffic() const {
    return network_->traffic();
  }
  Busy busy() const;
  const std::vector<Loss>& losses() const { return losses_; }
  const std::vector<Entry>& log() const { return log_; }
  // By group; empty without learning.
  const std::vector<std::vector<float>>& copies() const { return copies_; }

 private:
  struct Thread {
    int64_t group;
    int64_t trainer;              // of all
    int64_t step = 0;             // that it has done
    double factor = 1.0;          // of this step
    std::vector<float> snapshot;  // what it trains on
    std::vector<float> gradient;
    bool has_gradient = false;
    std::vector<int64_t> versions;  // by shard, that it has read
    std::vector<bool> has_read;     // by shard
  };

  Result Check() const;
  int64_t shards() const { return options_.servers > 0 ? options_.servers : 1; }
  int64_t trainers() const { return options_.groups * options_.trainers; }
  int64_t ServerOf(int64_t group, int64_t server) const {
    return trainers() + group * options_.servers + server;
  }

  void Begin(int64_t thread);
  void Compute(int64_t thread);
  void Stage(int64_t thread, size_t number);
  void Use(int64_t thread, const GroupWork& work, EventQueue::Event then);
  void Finish(int64_t thread);
  void Leave(int64_t thread);
  void Read(int64_t thread, int64_t shard);
  void Update(int64_t thread, int64_t shard);
  void LookAtLoss();
  void NoteLoss();
  void Stop();

  const GroupClusterOptions options_;
  EventQueue events_;
  std::unique_ptr<VirtualNetwork> network_;
  std::deque<VirtualLink> devices_;  // of trainers, then of servers
  std::vector<std::vector<float>> copies_;
  std::unique_ptr<CopySynchronizer> synchronizer_;
  std::vector<Thread> threads_;
  StepsInNoTime timeless_;
  std::vector<int64_t> steps_;
  std::vector<int64_t> begun_;  // steps, by trainer
  std::vector<int64_t> versions_;
  std::vector<std::vector<int64_t>> staleness_;
  std::vector<Loss> losses_;
  std::vector<Entry> log_;
  double seconds_ = 0.0;
  int64_t taken_ = 0;  // steps
  int64_t done_ = 0;   // steps
  int64_t there_ = 0;  // threads
  bool has_stopped_ = false;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_GROUP_CLUSTER_H_
