// Virtual time: events that happen one after the other, as fast as they can be
// computed, in the order of their times.
//
//   EventQueue events;
//   events.After(0.1, [&] { ... });
//   Result done = events.RunWhile([&] { return !is_over; }, goes_on);
//
// Two of the same time happen in the order in which they were added, so that a
// simulation is the same each time. Thread compatible: one thread has it.

#ifndef TF_RECSYNC_CC_SIMULATION_EVENT_QUEUE_H_
#define TF_RECSYNC_CC_SIMULATION_EVENT_QUEUE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "cc/engine/result.h"

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
    uint32_t place;
    if (free_.empty()) {
      place = static_cast<uint32_t>(events_.size());
      events_.push_back(std::move(event));
    } else {
      place = free_.back();
      free_.pop_back();
      events_[place] = std::move(event);
    }
    heap_.emplace_back();
    Rise(heap_.size() - 1, {time > now_ ? time : now_, next_++, place});
  }

  // Has it happen so many seconds from now.
  void After(double seconds, Event event) {
    At(now_ + seconds, std::move(event));
  }

  // Goes on to the next event's time and has it happen. False if there is none.
  bool RunNext() {
    if (heap_.empty()) return false;
    const Entry first = heap_.front();
    const Entry last = heap_.back();
    heap_.pop_back();
    if (!heap_.empty()) Sink(last);
    now_ = first.time;
    // It may add others, which may take its place.
    const Event event = std::move(events_[first.place]);
    events_[first.place] = nullptr;
    free_.push_back(first.place);
    event();
    return true;
  }

  // Has events happen for as long as there are any and `more()`. Asks every now
  // and then, however long they take, whether to go on; an error if not.
  template <typename More>
  Result RunWhile(const More& more, const std::function<bool()>& goes_on) {
    for (int64_t happened = 1; more() && RunNext(); ++happened) {
      if (happened % kEventsAtOnce == 0 && !goes_on()) {
        return Result::Error("the simulation was ended");
      }
    }
    return Result::Ok();
  }

 private:
  // How many events pass before somebody is asked whether to go on.
  static constexpr int64_t kEventsAtOnce = 1 << 14;
  // Of so many children each: with many events, a heap of two would be twice as
  // deep, and each level is a cache miss.
  static constexpr size_t kChildren = 4;

  struct Entry {
    double time;
    int64_t number;  // keeps those of one time in order
    uint32_t place;  // in events_

    bool operator<(const Entry& other) const {
      return time != other.time ? time < other.time : number < other.number;
    }
  };

  // Puts an entry where there is room at `i`, or above it.
  void Rise(size_t i, const Entry& entry) {
    while (i > 0) {
      const size_t parent = (i - 1) / kChildren;
      if (!(entry < heap_[parent])) break;
      heap_[i] = heap_[parent];
      i = parent;
    }
    heap_[i] = entry;
  }

  // Puts it where there is room at the top, or below.
  void Sink(const Entry& entry) {
    size_t i = 0;
    while (true) {
      const size_t begin = i * kChildren + 1;
      const size_t end = std::min(begin + kChildren, heap_.size());
      if (begin >= end) break;
      size_t least = begin;
      for (size_t child = begin + 1; child < end; ++child) {
        if (heap_[child] < heap_[least]) least = child;
      }
      if (!(heap_[least] < entry)) break;
      heap_[i] = heap_[least];
      i = least;
    }
    heap_[i] = entry;
  }

  double now_ = 0.0;
  int64_t next_ = 0;
  std::vector<Entry> heap_;
  // What is to happen, in places that are used again.
  std::vector<Event> events_;
  std::vector<uint32_t> free_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_EVENT_QUEUE_H_
