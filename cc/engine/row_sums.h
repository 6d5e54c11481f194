// Sums gradients of rows over several pushes, by row id.
//
//   RowSums sums;
//   sums.set_width(16);
//   sums.Add(ids, n, push, weight);     // any number of times
//   sums.id(i), sums.sum(i), sums.oldest(i)  // i < sums.size()
//   sums.Clear();
//
// The rows come in the order in which they were first named. A hash table finds
// a row's place; the sums lie one after the other in one block of memory, which
// keeps its size when it is cleared. Clearing takes no time: entries of the
// hash table carry the number of the clearing after which they were made.
//
// Thread compatible.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_SUMS_H_
#define TF_RECSYNC_CC_ENGINE_ROW_SUMS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "cc/engine/bags.h"
#include "cc/engine/prefetch.h"
#include "cc/engine/row_lives.h"
#include "cc/engine/row_locks.h"
#include "cc/engine/row_push.h"

namespace recsync {

class RowSums {
 public:
  // The most rows that it can hold.
  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  // Stands for the oldest version of a row that was pulled with none.
  static constexpr int64_t kNoVersion = std::numeric_limits<int64_t>::max();

  // The floats of a row; only while it is empty.
  void set_width(int64_t width) { width_ = width; }

  // Adds `weight` times the gradients of `n` positions, which name rows `ids`.
  // Of a row that was given to another key meanwhile (row_lives.h) those of its
  // latest life are summed.
  // size() + n must not exceed kMost.
  void Add(const int64_t* ids, int64_t n, const RowPush& push, float weight) {
    Reserve(n);
    places_.resize(static_cast<size_t>(n));
    for (int64_t p = 0; p < n; ++p) {
      if (p + kAhead < n) {
        __builtin_prefetch(entries_.data() + Slot(ids[p + kAhead]), 1);
      }
      places_[p] = Place(ids[p]);
    }
    sums_.resize(ids_.size() * width_, 0.0f);
    oldest_.resize(ids_.size(), kNoVersion);
    for (int64_t p = 0; p < n; ++p) {
      if (p + kAhead < n) {
        Prefetch(sums_.data() + places_[p + kAhead] * width_, 4 * width_);
      }
      float* sum = sums_.data() + places_[p] * width_;
      if (push.pulled != nullptr) {
        int64_t& oldest = oldest_[places_[p]];
        if (oldest == kNoVersion) oldest = push.pulled[p];
        if (!JoinSum(push.pulled[p], width_, sum, &oldest)) continue;
      }
      AddScaled(push.gradient + push.bags.bag(p) * width_,
                weight * push.bags.scale(p), width_, sum);
    }
  }

  // Forgets all rows and keeps the memory.
  void Clear() {
    ids_.clear();
    sums_.clear();
    oldest_.clear();
    if (++clearings_ == 0) {  // the numbers start again
      std::fill(entries_.begin(), entries_.end(), Entry());
      clearings_ = 1;
    }
  }

  // The number of different rows.
  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  int64_t width() const { return width_; }
  int64_t id(int64_t i) const { return ids_[i]; }
  const float* sum(int64_t i) const { return sums_.data() + i * width_; }
  // The oldest version that the row was pulled at, or kNoVersion.
  int64_t oldest(int64_t i) const { return oldest_[i]; }

 private:
  // Positions that are fetched ahead.
  static constexpr int64_t kAhead = 8;

  struct Entry {
    int64_t row = 0;
    int32_t place = 0;
    uint32_t clearings = 0;  // at which it was made; another: it is free
  };

  size_t Slot(int64_t row) const { return RowHash(row) & mask_; }

  // Makes room for `n` new rows.
  void Reserve(int64_t n) {
    const size_t rows = ids_.size() + static_cast<size_t>(n);
    if (rows * 2 <= entries_.size()) return;
    size_t capacity = std::max<size_t>(entries_.size(), 16);
    while (capacity < rows * 2) capacity *= 2;
    entries_.assign(capacity, Entry());
    mask_ = capacity - 1;
    for (size_t i = 0; i < ids_.size(); ++i) {
      size_t slot = Slot(ids_[i]);
      while (entries_[slot].clearings == clearings_) slot = (slot + 1) & mask_;
      entries_[slot] = {ids_[i], static_cast<int32_t>(i), clearings_};
    }
  }

  // Where the row is summed; a new row is placed last.
  int32_t Place(int64_t row) {
    size_t slot = Slot(row);
    while (entries_[slot].clearings == clearings_) {
      if (entries_[slot].row == row) return entries_[slot].place;
      slot = (slot + 1) & mask_;
    }
    const int32_t place = static_cast<int32_t>(ids_.size());
    entries_[slot] = {row, place, clearings_};
    ids_.push_back(row);
    return place;
  }

  int64_t width_ = 0;
  std::vector<int64_t> ids_;     // by place
  std::vector<float> sums_;      // by place, `width_` each
  std::vector<int64_t> oldest_;  // by place
  std::vector<Entry> entries_;   // the hash table
  size_t mask_ = 0;
  uint32_t clearings_ = 1;
  std::vector<int32_t> places_;  // by position, while adding
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_SUMS_H_
