// The time that decentralized training goes by; see hop_options.h.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_CLOCK_H_
#define TF_RECSYNC_CC_ENGINE_HOP_CLOCK_H_

#include <chrono>
#include <cstdint>
#include <functional>

namespace recsync {

// Gives the time now, in microseconds since the Unix epoch, or since a
// simulation began. Any thread may call it.
using HopClock = std::function<int64_t()>;

// Now, in microseconds since the Unix epoch.
inline int64_t HopNow() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_CLOCK_H_
