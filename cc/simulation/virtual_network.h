// Machines in virtual time that send each other messages: each has a network
// card, whose links messages pass one after the other. A message passes the
// sender's, then the receiver's, and takes the latency besides. To itself a
// machine sends in no time.
//
// Thread compatible. The event queue lives on.

#ifndef TF_RECSYNC_CC_SIMULATION_VIRTUAL_NETWORK_H_
#define TF_RECSYNC_CC_SIMULATION_VIRTUAL_NETWORK_H_

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "cc/simulation/event_queue.h"
#include "cc/simulation/virtual_link.h"

namespace recsync {

class VirtualNetwork {
 public:
  // The bytes that a message has at most.
  static constexpr int64_t kMostBytes = int64_t{1} << 40;

  // What messages a machine has sent and received, and for how long they were
  // passing its network card by now.
  struct Traffic {
    int64_t sent = 0;  // bytes
    int64_t received = 0;
    double seconds = 0.0;
  };

  // Each machine's card has a bandwidth in each direction, positive; or, where
  // it is not duplex, for both together. The latency is that of one way, at
  // least 0.
  VirtualNetwork(const std::vector<double>& bytes_per_second, bool duplex,
                 double latency, EventQueue* events)
      : duplex_(duplex), latency_(latency), events_(events) {
    for (const double bandwidth : bytes_per_second) {
      machines_.emplace_back(bandwidth);
    }
  }
  VirtualNetwork(const VirtualNetwork&) = delete;
  VirtualNetwork& operator=(const VirtualNetwork&) = delete;

  // Of a message that needs no bandwidth.
  double Latency(int64_t from, int64_t to) const {
    return from == to ? 0.0 : latency_;
  }

  // Has something happen when so many bytes have come from one machine to
  // another; at once where both are the same.
  void Send(int64_t from, int64_t to, int64_t bytes, EventQueue::Event then) {
    if (from == to) {
      then();
      return;
    }
    Machine& sender = machines_[from];
    sender.sent += bytes;
    const double sent = sender.first.Reserve(bytes, events_->now());
    events_->At(sent, [this, to, bytes, then = std::move(then)]() mutable {
      Machine& receiver = machines_[to];
      receiver.received += bytes;
      VirtualLink& link = duplex_ ? receiver.second : receiver.first;
      const double received = link.Reserve(bytes, events_->now());
      events_->At(received + latency_, std::move(then));
    });
  }

  // By machine.
  std::vector<Traffic> traffic() const {
    std::vector<Traffic> traffic;
    for (const Machine& machine : machines_) {
      const double seconds = machine.first.Busy(events_->now()) +
                             machine.second.Busy(events_->now());
      traffic.push_back({machine.sent, machine.received, seconds});
    }
    return traffic;
  }

 private:
  struct Machine {
    explicit Machine(double bytes_per_second)
        : first(bytes_per_second), second(bytes_per_second) {}
    VirtualLink first;
    VirtualLink second;  // Nothing passes it if there is but one.
    int64_t sent = 0;    // bytes
    int64_t received = 0;
  };

  const bool duplex_;
  const double latency_;
  EventQueue* const events_;      // Not owned.
  std::deque<Machine> machines_;  // Links can't be moved.
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_VIRTUAL_NETWORK_H_
