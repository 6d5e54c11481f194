// How groups of trainers keep their copies of the parameters together, in
// virtual time (ShadowSync): in loops beside training or as a part of it, with
// sync PSs or with each other. The rules are those of
// tf_recsync/synchronization/shadow.py, and the arithmetic is the engine's
// Interpolate.
//
// A group's copy lies in shards, on machines of its own, and each shard is
// synchronized by itself with those of the same number.
//
//   EASGD           a trainer's shard travels to the sync PSs, each of which
//                   has a part of it; each moves its part, and sends that back;
//                   the shard moves when all parts are there (algorithm 2).
//   MA and BMUF     all groups at once, by all-reduce: each sends a piece to
//                   each other one, which sends back the mean of it
//                   (algorithms 3 and 4).
//
// Threads are numbers, those of a group one after the other. Each calls Enter
// before a step and Done after it; both may keep it waiting.
//
// Thread compatible. What it is given by pointers lives on.

#ifndef TF_RECSYNC_CC_SIMULATION_COPY_SYNCHRONIZER_H_
#define TF_RECSYNC_CC_SIMULATION_COPY_SYNCHRONIZER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "cc/simulation/event_queue.h"
#include "cc/simulation/virtual_network.h"

namespace recsync {

struct CopySyncOptions {
  enum class Algorithm { kNone, kEasgd, kModelAveraging, kBmuf };
  enum class Schedule {
    kBackground,  // a loop for each group, or one for all
    kGap,         // each thread after so many steps, alone or with all others
    kInterval,    // one thread of each group every so many seconds, or a loop
                  // that stops all threads
  };

  Algorithm algorithm = Algorithm::kNone;
  float alpha = 0.5f;
  float eta = 1.0f;
  float momentum = 0.0f;
  bool nesterov = false;
  Schedule schedule = Schedule::kBackground;
  int64_t gap = 1;        // steps
  double interval = 0.0;  // seconds; in the background the least
  int64_t groups = 1;
  int64_t threads = 1;  // of each group
  // On which machine each shard of each group is.
  std::vector<std::vector<int64_t>> holders;
  std::vector<int64_t> sync_ps;  // their machines; none without EASGD
  int64_t bytes = 0;             // of a copy

  bool is_central() const { return algorithm == Algorithm::kEasgd; }
  int64_t shards() const { return holders.front().size(); }
};

class CopySynchronizer {
 public:
  // What it does to copies, which a listener is told.
  struct Entry {
    enum class Kind {
      kRead,      // a shard of a group, to send it
      kExchange,  // a part of a shard has come to a sync PS, which answers
      kMove,      // the shard of a group moves
    };
    Kind kind;
    int64_t group;
    int64_t shard;
    int64_t part;    // of kExchange, else -1
    int64_t number;  // of the synchronization, from 1 on
  };
  using Listener = std::function<void(const Entry&)>;
  using Copies = std::vector<std::vector<float>>;

  // `copies` are by group, all of one size, perhaps 0. `listener` may be null.
  CopySynchronizer(const CopySyncOptions& options, EventQueue* events,
                   VirtualNetwork* network, Copies* copies, Listener listener);
  CopySynchronizer(const CopySynchronizer&) = delete;
  CopySynchronizer& operator=(const CopySynchronizer&) = delete;

  // Starts the loops. The sync PSs begin with the first copy, as does the
  // global one of BMUF.
  void Begin();

  // A thread is about to train: goes on when it may.
  void Enter(int64_t thread, EventQueue::Event then);
  // It has done a step: goes on when it may, synchronized if that was its turn.
  void Done(int64_t thread, EventQueue::Event then);
  // It has nothing to do any more. Loops end with the last one.
  void Leave(int64_t thread);

  // How often each group was synchronized: shards, one by one.
  const std::vector<int64_t>& syncs() const { return syncs_; }
  // And how long that took.
  const std::vector<double>& seconds() const { return seconds_; }
  // What the sync PSs have received and sent.
  int64_t sync_ps_bytes() const { return sync_ps_bytes_; }
  // The sync PSs' copy; empty without learning.
  const std::vector<float>& center() const { return center_; }
  // Whether synchronizations take no time, one after the other without end.
  bool is_endless() const { return is_endless_; }

 private:
  using Then = std::function<void()>;
  using Vector = std::vector<float>;
  using Shared = std::shared_ptr<Vector>;

  // Elements, or bytes, from the first to behind the last one.
  struct Range {
    int64_t begin;
    int64_t end;
    int64_t size() const { return end - begin; }
  };
  static Range Part(Range whole, int64_t part, int64_t parts);
  Range Elements(int64_t shard) const;
  Range Bytes(int64_t shard) const;

  // Synchronizations.
  void SyncCentral(int64_t group, int64_t shard, Then then);
  void SyncAll(int64_t shard, Then then);
  // All shards, one after the other; group -1: all groups at once.
  void SyncShards(int64_t group, int64_t shard, Then then);
  void Count(int64_t group, double began);
  Shared Read(int64_t group, int64_t shard, int64_t number);
  void Move(int64_t group, int64_t shard, int64_t number, const Vector& target);
  Vector Target(int64_t group, int64_t shard, const Vector& mean);

  // Loops.
  void Loop(int64_t group, int64_t shard);
  void LoopAtOnce(double due);
  bool IsDue(int64_t group);
  bool IsOver() const { return away_ == options_.groups * options_.threads; }

  // The gate, which stops all threads while all are synchronized.
  bool HasGate() const;
  void LookAtGate();
  void Open();

  void Tell(Entry::Kind kind, int64_t group, int64_t shard, int64_t number,
            int64_t part = -1) {
    if (listener_ != nullptr) listener_({kind, group, shard, part, number});
  }

  const CopySyncOptions options_;
  EventQueue* const events_;
  VirtualNetwork* const network_;
  Copies* const copies_;
  const Listener listener_;

  Vector center_;
  Copies global_;  // by group: of BMUF
  Copies update_;
  std::vector<int64_t> since_;  // steps since the last one, by thread
  // The next one, by group; nothing before the first step.
  std::vector<std::optional<double>> due_;
  std::vector<int64_t> syncs_;
  std::vector<double> seconds_;
  int64_t sync_ps_bytes_ = 0;
  int64_t begun_ = 0;  // synchronizations
  int64_t away_ = 0;   // threads
  bool is_endless_ = false;

  bool is_closed_ = false;
  std::set<int64_t> members_;         // threads that take part
  std::set<int64_t> inside_;          // that are in a step
  std::map<int64_t, Then> waiting_;   // for all others
  std::map<int64_t, Then> entering_;  // until the gate opens
  Then when_empty_;                   // when nobody is inside
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_COPY_SYNCHRONIZER_H_
