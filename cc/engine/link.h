// A link of limited bandwidth that messages share, as machines share the cable
// of a server. They pass it one after the other, in the order in which they
// come: a message starts when the one before has passed.
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

  // Reserves the link for a message that is there at `now`; returns when its
  // last byte has passed. `bytes` is at least 0 and `bytes_per_second`
  // positive; it holds for this message, so that the bandwidth may change. What
  // would take longer than 31 years counts as that long.
  Time Reserve(int64_t bytes, double bytes_per_second, Time now)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  Time free_at_ ABSL_GUARDED_BY(mu_) = Time::min();
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_LINK_H_
