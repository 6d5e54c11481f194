// Finds steps that take no time. Where a simulation ends at a time, and not
// after a number of steps, there would be no end of them.
//
//   StepsInNoTime timeless(workers, steps);
//   timeless.Add(events.now());  // at the end of each
//   if (timeless.are_endless()) return timeless.Error(seconds);
//
// Thread compatible.

#ifndef TF_RECSYNC_CC_SIMULATION_STEPS_IN_NO_TIME_H_
#define TF_RECSYNC_CC_SIMULATION_STEPS_IN_NO_TIME_H_

#include <cstdint>

#include "cc/engine/result.h"

namespace recsync {

class StepsInNoTime {
 public:
  // From which number of steps on they would have no end, whatever they take;
  // as in tf_recsync/simulation/_learning.py.
  static constexpr int64_t kNoEnd = int64_t{1} << 62;

  // Of so many workers, who do so many steps together.
  StepsInNoTime(int64_t workers, int64_t steps)
      : most_(steps < kNoEnd ? steps : kMost * workers) {}

  // A step has ended.
  void Add(double now) {
    if (now > since_) at_once_ = 0;
    since_ = now;
    ++at_once_;
  }

  bool are_endless() const { return at_once_ > most_; }

  // Of what is to end at a time.
  Result Error(double seconds) const {
    return Result::Error(
        "seconds=", seconds,
        " would never come, as steps take no time from second ", since_,
        " on: give steps, or times that are positive");
  }

 private:
  // Of each worker: a few steps may well take no time.
  static constexpr int64_t kMost = 1000;

  const int64_t most_;
  double since_ = 0.0;
  int64_t at_once_ = 0;  // have ended then
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_STEPS_IN_NO_TIME_H_
