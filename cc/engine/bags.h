// Bags: how a list of looked-up rows is pooled into fewer vectors, and how the
// gradient of a pooled vector reaches the rows it was made of.
//
// Position p of the list belongs to bag(p) with weight scale(p):
//
//   pooled[b] = sum over p with bag(p) = b of scale(p) * row[p]
//   gradient of position p = scale(p) * gradient[bag(p)]
//
// Bags do not decrease along the list, so that those of a bag are neighbours;
// a bag may have no position. Without bags every position is one of its own.
//
// Thread compatible: a view of arrays that outlive it.

#ifndef TF_RECSYNC_CC_ENGINE_BAGS_H_
#define TF_RECSYNC_CC_ENGINE_BAGS_H_

#include <algorithm>
#include <cstdint>

namespace recsync {

struct Bags {
  const int32_t* bags = nullptr;  // by position; null: each its own
  const float* scales = nullptr;  // by position; null: all 1

  int64_t bag(int64_t position) const {
    return bags == nullptr ? position : bags[position];
  }
  float scale(int64_t position) const {
    return scales == nullptr ? 1.0f : scales[position];
  }
  // The first of `n` positions whose bag is `bag` or a later one.
  int64_t FirstOf(int64_t bag, int64_t n) const {
    if (bags == nullptr) return std::min(bag, n);
    return std::lower_bound(bags, bags + n, bag) - bags;
  }
};

// The first of `n` positions whose bag is outside [0, `count`) or less than the
// one before; -1 if there is none.
inline int64_t FirstBadBag(const int32_t* bags, int64_t n, int64_t count) {
  int64_t last = 0;
  for (int64_t position = 0; position < n; ++position) {
    const int64_t bag = bags[position];
    if (bag < last || bag >= count) return position;
    last = bag;
  }
  return -1;
}

// to += scale * from, elementwise; `V` converts to float.
template <typename V>
inline void AddScaled(const V* __restrict from, float scale, int64_t n,
                      float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] += scale * static_cast<float>(from[i]);
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_BAGS_H_
