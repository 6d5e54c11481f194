// Checks of the row ids and versions of a push, before any of it is applied.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_CHECKS_H_
#define TF_RECSYNC_CC_ENGINE_ROW_CHECKS_H_

#include <cstdint>

namespace recsync {

// The first of `n` row ids that is not in [0, `rows`), or -1.
inline int64_t FirstNotARow(const int64_t* ids, int64_t n, int64_t rows) {
  int bad = 0;  // without a branch, so that it vectorizes
  for (int64_t i = 0; i < n; ++i) {
    bad |= static_cast<uint64_t>(ids[i]) >= static_cast<uint64_t>(rows);
  }
  if (!bad) return -1;
  int64_t first = 0;
  while (ids[first] >= 0 && ids[first] < rows) ++first;
  return first;
}

// Whether `pulled` is a version up to `now`.
inline bool WasAVersion(int64_t pulled, int64_t now) {
  return pulled >= 0 && pulled <= now;
}

// A position in [begin, end) whose pulled version its row has never had, or -1.
// `ids` have been checked; other pushes may raise versions meanwhile.
inline int64_t FirstNotAVersion(const int64_t* ids, const int64_t* pulled,
                                const int64_t* versions, int64_t begin,
                                int64_t end) {
  constexpr int64_t kAhead = 16;  // rows lie anywhere in a large table
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(versions + ids[i + kAhead]);
    const int64_t now = __atomic_load_n(versions + ids[i], __ATOMIC_RELAXED);
    if (!WasAVersion(pulled[i], now)) return i;
  }
  return -1;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_CHECKS_H_
