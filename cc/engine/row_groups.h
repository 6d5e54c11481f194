// Groups the positions of a list of row ids by row, so that a push which names
// a row several times updates it once, with the sum of its gradients.
//
//   RowGroups groups;
//   groups.Build(ids, n);
//   for (int64_t g = 0; g < groups.size(); ++g) {
//     for (int64_t p = groups.first(g); p >= 0; p = groups.next(p)) { ... }
//   }
//
// One pass with an open-addressing table, no sorting; positions of a row come
// in the order in which they were given, so that sums are reproducible.
// Thread compatible: Build from one thread, then read from many.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_GROUPS_H_
#define TF_RECSYNC_CC_ENGINE_ROW_GROUPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/engine/row_locks.h"

namespace recsync {

class RowGroups {
 public:
  // `Index` is int32_t or int64_t; ids are not negative; `n` is less than 2^31.
  // Reuses its memory.
  template <typename Index>
  void Build(const Index* ids, int64_t n) {
    rows_.clear();
    first_.clear();
    last_.clear();
    next_.assign(static_cast<size_t>(n), -1);
    size_t capacity = 16;
    while (capacity < static_cast<size_t>(n) * 2) capacity *= 2;
    slots_.assign(capacity, -1);
    const size_t mask = capacity - 1;
    for (int32_t position = 0; position < static_cast<int32_t>(n); ++position) {
      const int64_t row = static_cast<int64_t>(ids[position]);
      // Not the high bits of the hash, which are alike within a partition.
      size_t slot = RowHash(row) & mask;
      while (slots_[slot] >= 0 && rows_[slots_[slot]] != row) {
        slot = (slot + 1) & mask;
      }
      const int32_t group = slots_[slot];
      if (group < 0) {
        slots_[slot] = static_cast<int32_t>(rows_.size());
        rows_.push_back(row);
        first_.push_back(position);
        last_.push_back(position);
      } else {
        next_[last_[group]] = position;
        last_[group] = position;
      }
    }
  }

  // The number of different rows.
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  int64_t row(int64_t group) const { return rows_[group]; }
  // The first position that names the group's row.
  int64_t first(int64_t group) const { return first_[group]; }
  // The position after `position` that names the same row, or -1.
  int64_t next(int64_t position) const { return next_[position]; }

 private:
  std::vector<int64_t> rows_;   // by group
  std::vector<int32_t> first_;  // by group
  std::vector<int32_t> last_;   // by group
  std::vector<int32_t> next_;   // by position
  std::vector<int32_t> slots_;  // the hash table: a group or -1
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_GROUPS_H_
