// What a worker did and when, for a timeline, until somebody takes it.
//
//   EventLog log;
//   log.Note({Activity::kCompute, begin, end, /*iteration=*/3});
//   std::vector<Event> events = log.Take();
//
// Thread compatible. Nothing is kept for ever: of more than kMost events, the
// oldest are lost, and counted.

#ifndef TF_RECSYNC_CC_ENGINE_EVENT_LOG_H_
#define TF_RECSYNC_CC_ENGINE_EVENT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace recsync {

// Python knows them by their numbers (tf_recsync/ops/events.py).
enum class Activity {
  kCompute,
  kUpdates,      // waits for neighbors' updates
  kTokens,       // waits for a token
  kSend,         // an update, to a neighbor
  kReceive,      // an update, from a neighbor
  kJump,         // leaves iterations out
  kBatch,        // waits for a batch
  kPull,         // waits for the servers' parameters
  kPush,         // waits until servers have applied its gradients
  kPushAndPull,  // both, in one round trip
  kSynchronize,  // copies of groups
};
constexpr int kActivities = 11;

struct Event {
  Activity activity;
  int64_t begin;  // microseconds
  int64_t end;
  int64_t iteration;
  int64_t neighbor = -1;  // -1 where there is none
};

class EventLog {
 public:
  static constexpr size_t kMost = 1 << 16;

  void Note(const Event& event) {
    if (events_.size() == kMost) {
      events_.pop_front();
      ++lost_;
    }
    events_.push_back(event);
  }

  // The events that were noted since the last call.
  std::vector<Event> Take() {
    std::vector<Event> events(events_.begin(), events_.end());
    events_.clear();
    return events;
  }

  // How many could not be kept, since it was made.
  int64_t lost() const { return lost_; }

 private:
  std::deque<Event> events_;
  int64_t lost_ = 0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_EVENT_LOG_H_
