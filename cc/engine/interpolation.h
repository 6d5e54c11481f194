// Moves parameters towards others, in place and in one pass over memory: what
// ShadowSync's synchronization comes to (Zheng et al. 2021, algorithms 2 to 4).

#ifndef TF_RECSYNC_CC_ENGINE_INTERPOLATION_H_
#define TF_RECSYNC_CC_ENGINE_INTERPOLATION_H_

#include <cstdint>
#include <cstring>

#include "cc/engine/hogwild.h"

namespace recsync {

// own <- (1 - alpha) own + alpha target, elementwise over `size`, of what `own`
// is at that time: what other threads have made of it since `target` was
// computed is kept, times 1 - alpha. Each element as in hogwild.h.
//
// `after`, unless null, gets the new values. No two may overlap.
inline void Interpolate(const float* target, float alpha, int64_t size,
                        float* own, float* after) {
  const float rest = 1.0f - alpha;
  ChangeHogwild(own, size, [=](auto value, int64_t i) {
    decltype(value) other;  // A float, or four of them.
    std::memcpy(&other, target + i, sizeof(other));
    value = rest * value + alpha * other;
    if (after != nullptr) std::memcpy(after + i, &value, sizeof(value));
    return value;
  });
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_INTERPOLATION_H_
