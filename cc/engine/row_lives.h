// The lives of rows that are given to one key after the other (key_table.h).
//
// A row's version has the number of its life in the high bits. A row that is
// given to another key begins its next life, and a gradient that was computed
// on an earlier one is not applied any more. Rows that are never given anew,
// those of tables without keys, are in life 0.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_LIVES_H_
#define TF_RECSYNC_CC_ENGINE_ROW_LIVES_H_

#include <algorithm>
#include <cstdint>

namespace recsync {

// Bits of a version below its life: updates in a life.
constexpr int kLifeBits = 40;

inline int64_t LifeOf(int64_t version) { return version >> kLifeBits; }

inline int64_t FirstOfNextLife(int64_t version) {
  // Versions come from files: any number may.
  return static_cast<int64_t>(static_cast<uint64_t>(LifeOf(version) + 1)
                              << kLifeBits);
}

// The version of a row that stands for keys that have none. Nobody pulls it:
// their gradients come with kNoLife, unless the row is to be trained.
constexpr int64_t kVersionOfUnknown = int64_t{1} << 62;
constexpr int64_t kNoLife = 0;

// Whether a gradient of version `pulled` is to be added to the sum of a row's
// gradients, which are those of the latest life of them. `oldest` is the oldest
// version of these, and becomes so again; the sum is cleared where another life
// begins.
inline bool JoinSum(int64_t pulled, int64_t width, float* sum,
                    int64_t* oldest) {
  if (LifeOf(pulled) < LifeOf(*oldest)) return false;
  if (LifeOf(pulled) > LifeOf(*oldest)) {
    std::fill_n(sum, width, 0.0f);
    *oldest = pulled;
  }
  *oldest = std::min(*oldest, pulled);
  return true;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_LIVES_H_
