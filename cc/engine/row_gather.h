// Reads rows of a table, decayed up to now, with their versions and pools them
// into bags.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_GATHER_H_
#define TF_RECSYNC_CC_ENGINE_ROW_GATHER_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cc/engine/bags.h"
#include "cc/engine/bfloat16.h"
#include "cc/engine/prefetch.h"
#include "cc/engine/row_decay.h"
#include "cc/engine/row_locks.h"

namespace recsync {

// A table to read from; nothing is owned.
struct RowReader {
  const float* values = nullptr;      // [rows, width], or
  const BFloat16* narrow = nullptr;   // [rows, width], the other being null
  const int64_t* versions = nullptr;  // [rows], or null: not asked for
  RowDecay decay;                     // not enabled without weight decay
  int64_t rows = 0;
  int64_t width = 0;
  bool locks = false;  // whether rows may be written meanwhile

  bool Has(int64_t row) const { return row >= 0 && row < rows; }

  // Begins to fetch a row that exists.
  RECSYNC_PREFETCHING void Fetch(int64_t row) const {
    if (values != nullptr) {
      Prefetch(values + row * width, 4 * width);
    } else {
      Prefetch(narrow + row * width, 2 * width);
    }
    if (versions != nullptr) Prefetch(versions + row, 1);
    decay.Fetch(row);
  }

  // Reads a row into `to`, or adds `scale` times it; returns its version, or 0
  // without versions.
  int64_t Read(int64_t row, bool add, float scale, float* to) const {
    if (!locks) return ReadUnlocked(row, add, scale, to);
    const void* id = values != nullptr ? static_cast<const void*>(values)
                                       : static_cast<const void*>(narrow);
    RowLock lock(&RowLocks::Global().Of(id, row));
    return ReadUnlocked(row, add, scale, to);
  }

 private:
  int64_t ReadUnlocked(int64_t row, bool add, float scale, float* to) const {
    const double factor = decay.enabled() ? decay.Factor(row) : 1.0;
    if (values != nullptr && !add && factor == 1.0) {
      std::memcpy(to, values + row * width, 4 * width);
    } else {
      if (!add) std::fill_n(to, width, 0.0f);
      scale = static_cast<float>(scale * factor);
      if (values != nullptr) {
        AddScaled(values + row * width, scale, width, to);
      } else {
        AddScaled(narrow + row * width, scale, width, to);
      }
    }
    return versions != nullptr ? versions[row] : 0;
  }
};

// Gathers bags [begin, end) of `n` positions: `to` is [bags, width] of all
// bags, `versions` by position, or null as the
// table's are. Returns the position of an id that is no row of
// the table, at which it stopped, or -1.
template <typename Index>
int64_t GatherBags(const RowReader& table, const Index* ids, int64_t n,
                   const Bags& bags, int64_t begin, int64_t end, float* to,
                   int64_t* versions) {
  constexpr int64_t kAhead = 12;
  const bool add = bags.bags != nullptr || bags.scales != nullptr;
  const int64_t last = bags.FirstOf(end, n);
  int64_t position = bags.FirstOf(begin, n);
  int64_t fetched = position;
  for (int64_t bag = begin; bag < end; ++bag) {
    float* pooled = to + bag * table.width;
    if (add) std::fill_n(pooled, table.width, 0.0f);
    for (; position < last && bags.bag(position) == bag; ++position) {
      while (fetched < std::min(position + kAhead, last)) {
        const int64_t row = static_cast<int64_t>(ids[fetched]);
        if (!table.Has(row)) return fetched;
        table.Fetch(row);
        ++fetched;
      }
      const int64_t version = table.Read(static_cast<int64_t>(ids[position]),
                                         add, bags.scale(position), pooled);
      if (versions != nullptr) versions[position] = version;
    }
  }
  return -1;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_GATHER_H_
