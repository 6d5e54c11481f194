// What a push brings for the rows of one table.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_PUSH_H_
#define TF_RECSYNC_CC_ENGINE_ROW_PUSH_H_

#include <cstdint>

#include "cc/engine/bags.h"

namespace recsync {

// What is pushed to a table; nothing is owned.
struct RowPush {
  const float* gradient = nullptr;  // [bags, width]
  Bags bags;
  const int64_t* pulled = nullptr;  // by position; null for fresh gradients
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_PUSH_H_
