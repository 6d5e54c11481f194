// Virtual time: events that happen one after the other, as fast as they can be
// computed, in the order of their times.
//
//   EventQueue events;
//   events.After(0.1, [&] { ... });
//   while (events.RunNext()) {
//   }
//
// Two of the same time happen in the order in which they were added, so that a
// simulation is the same each time. Thread compatible: one thread has it.

#ifndef TF_RECSYNC_CC_SIMULATION_EVENT_QUEUE_H_
#define TF_RECSYNC_CC_SIMULATION_EVENT_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace recsync {

class EventQueue {
 public:
  using Event = std::function<void()>;

  EventQueue() = default;
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  // Seconds since the simulation began.
  double now() const { return now_; }

  // Whether nothing is going to happen any more.
  bool empty() const { return heap_.empty(); }

  // Has an event happen at a time, at once if that is in the past or no number.
  void At(double time, Event event) {
    heap_.push_back({time > now_ ? time : now_, next_++, std::move(event)});
    std::push_heap(heap_.begin(), heap_.end(), IsLater);
  }

  // Has it happen so many seconds from now.
  void After(double seconds, Event event) {
    At(now_ + seconds, std::move(event));
  }

  // Goes on to the next event's time and has it happen. False if there is none.
  bool RunNext() {
    if (heap_.empty()) return false;
    std::pop_heap(heap_.begin(), heap_.end(), IsLater);
    const Entry entry = std::move(heap_.back());
    heap_.pop_back();
    now_ = entry.time;
    entry.event();
    return true;
  }

 private:
  struct Entry {
    double time;
    int64_t number;  // keeps those of one time in order
    Event event;
  };

  static bool IsLater(const Entry& a, const Entry& b) {
    return a.time != b.time ? a.time > b.time : a.number > b.number;
  }

  double now_ = 0.0;
  int64_t next_ = 0;
  std::vector<Entry> heap_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_EVENT_QUEUE_H_
