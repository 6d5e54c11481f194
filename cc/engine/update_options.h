// What every update is told besides its rule: SWAP, the staleness weight, and
// what happens to gradients that are not finite.

#ifndef TF_RECSYNC_CC_ENGINE_UPDATE_OPTIONS_H_
#define TF_RECSYNC_CC_ENGINE_UPDATE_OPTIONS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "cc/engine/nonfinite.h"
#include "cc/engine/staleness_weight.h"
#include "cc/engine/swap.h"

namespace recsync {

struct UpdateOptions {
  Swap swap;
  StalenessWeight weight;
  Nonfinite nonfinite = Nonfinite::kApply;
  std::vector<std::string> names;  // Of the variables, or none.

  // What an error calls variable i, a `kind` such as "table".
  std::string NameOf(const char* kind, size_t i) const {
    if (i < names.size()) return names[i];
    return std::string(kind) + " " + std::to_string(i);
  }
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_UPDATE_OPTIONS_H_
