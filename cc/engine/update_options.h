// What every update is told besides its rule: SWAP, the staleness weight, and
// what happens to gradients that are not finite.

#ifndef TF_RECSYNC_CC_ENGINE_UPDATE_OPTIONS_H_
#define TF_RECSYNC_CC_ENGINE_UPDATE_OPTIONS_H_

#include "cc/engine/nonfinite.h"
#include "cc/engine/staleness_weight.h"
#include "cc/engine/swap.h"

namespace recsync {

struct UpdateOptions {
  Swap swap;
  StalenessWeight weight;
  Nonfinite nonfinite = Nonfinite::kApply;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_UPDATE_OPTIONS_H_
