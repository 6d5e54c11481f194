// A link of limited bandwidth: messages pass it one after the other, in the
// order in which they come: a message starts when the one before has passed.
// And a processor of limited speed, which computes one thing after the other:
// then amounts are floating-point operations in place of bytes.
//
//   Link link;
//   Link::Time passed = link.Reserve(1000, 1e6, now);  // now + 1 ms
//   passed = link.Reserve(1000, 1e6, now);             // now + 2 ms
//
// It only tells the time; whoever sends a message waits until then (see Timer).
// Thread safe; never blocks. Time is passed in, so that it need not be the
// clock's.

#ifndef TF_RECSYNC_CC_ENGINE_LINK_H_
#define TF_RECSYNC_CC_ENGINE_LINK_H_

#include <chrono>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

class Link {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // What was reserved in all: how much, and how long that takes.
  struct Total {
    int64_t amount = 0;
    std::chrono::duration<double> seconds{0.0};
  };

  // Reserves the link for a message that is there at `now`; returns when its
  // last byte has passed. `amount` is at least 0, in bytes, and `per_second`
  // positive; it holds for this message, so that the bandwidth may change. With
  // infinity it passes when those before it have. What would take longer than
  // 31 years counts as that long.
  Time Reserve(int64_t amount, double per_second, Time now)
      ABSL_LOCKS_EXCLUDED(mu_);

  // All reservations so far, those that are still to pass included.
  Total Reserved() const ABSL_LOCKS_EXCLUDED(mu_);

  // How long something was passing until `now`, when the last reservation, if
  // any, has been made.
  std::chrono::duration<double> Busy(Time now) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable Mutex mu_;
  Time free_at_ ABSL_GUARDED_BY(mu_) = Time::min();
  Total reserved_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_LINK_H_
