// A link of limited bandwidth in virtual time: that of a network card in one
// direction, which all share whose messages pass it. It is the product's own
// Link, with seconds in place of a clock.
//
// Thread compatible.

#ifndef TF_RECSYNC_CC_SIMULATION_VIRTUAL_LINK_H_
#define TF_RECSYNC_CC_SIMULATION_VIRTUAL_LINK_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "cc/engine/link.h"

namespace recsync {

class VirtualLink {
 public:
  // `per_second` is positive, perhaps infinite: bytes, or what else passes.
  explicit VirtualLink(double per_second) : per_second_(per_second) {}

  // Reserves the link for a message that is there at `now`, at least 0; returns
  // when its last byte has passed. That takes `factor` times as long as it else
  // would, at least 0 and finite.
  double Reserve(int64_t amount, double now, double factor = 1.0) {
    const Link::Time time = TimeOf(now);
    const Link::Time passed = link_.Reserve(amount, per_second_ / factor, time);
    // Where nothing is to wait for, not even the rounding of the link's time.
    if (passed == time) return now;
    return Seconds(passed.time_since_epoch()).count();
  }

  // For how many seconds something was passing until `now`, when the last
  // reservation, if any, has been made.
  double Busy(double now) const { return link_.Busy(TimeOf(now)).count(); }

 private:
  using Seconds = std::chrono::duration<double>;
  static constexpr double kLatest = 4e9;

  // What comes after more than a century comes then: the clock has an end.
  static Link::Time TimeOf(double now) {
    const Seconds since_begin(std::min(now, kLatest));
    return Link::Time(
        std::chrono::duration_cast<Link::Time::duration>(since_begin));
  }

  const double per_second_;
  Link link_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_VIRTUAL_LINK_H_
