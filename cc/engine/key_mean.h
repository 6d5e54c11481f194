// The mean of the rows of an embedding table that have keys (key_table.h), as
// which keys without a row are looked up.
//
//   KeyMean mean(state, width);
//   mean.Advance(table, rows, tick, decay, values);
//
// Nobody computes it at once: each call goes on with a pass over all rows of a
// shard where the last one has stopped, and adds up those that have keys. The
// call that comes to the end of a pass writes the mean into all rows of the
// shard that are reserved for keys without one, raises their versions, so that
// a checkpoint's delta has them, and ends. So the mean is of each shard, a row
// is in it as it was when the pass came by, and a call never does more than its
// part. A row that has no key is soon passed by: many of them count as one.
//
// What is known of the pass lies in an array beside the table (`state`), so
// that it lives as long as the table.
//
// Thread safe, but for who sets the state. One thread at a time goes on with a
// pass; who finds another one at it does nothing. Rows are read and written
// under their row locks, so nobody may hold one, or be in a call of KeyTable.

#ifndef TF_RECSYNC_CC_ENGINE_KEY_MEAN_H_
#define TF_RECSYNC_CC_ENGINE_KEY_MEAN_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "cc/engine/bfloat16.h"
#include "cc/engine/key_table.h"
#include "cc/engine/prefetch.h"
#include "cc/engine/row_decay.h"
#include "cc/engine/row_locks.h"

namespace recsync {

class KeyMean {
 public:
  // Rows without keys that take as long as one with a key, about.
  static constexpr int64_t kFreeRows = 8;

  // Of rows of so many elements.
  static int64_t StateSize(int64_t width) { return kSums + width; }

  // `state`, which is not owned, has StateSize(width) elements, all 0 before
  // the first pass: the row that is next, how many rows were added up, and
  // their sums. No number in it does any harm.
  KeyMean(double* state, int64_t width) : state_(state), width_(width) {}

  // Goes on by `rows` rows that have keys, or up to kFreeRows times as many
  // that have none, at most to the end of the pass. Keys that have expired by
  // `tick` are none.
  template <typename V>
  void Advance(const KeyTable& table, int64_t rows, int64_t tick,
               const RowDecay& decay, V* values) const {
    SpinLock& lock = LockOf(state_);
    if (!lock.TryLock()) return;
    Pass(table, rows, tick, decay, values);
    lock.Unlock();
  }

 private:
  // What the state has, by index.
  static constexpr int kNext = 0;
  static constexpr int kAdded = 1;
  static constexpr int kSums = 2;

  // Tables may share one: then one of them goes on in another call.
  static SpinLock& LockOf(const double* state) {
    constexpr uint32_t kLocks = 256;
    static std::array<SpinLock, kLocks> locks;
    const auto address = reinterpret_cast<uintptr_t>(state);
    return locks[RowHash(static_cast<int64_t>(address >> 4)) % kLocks];
  }

  template <typename V>
  void Pass(const KeyTable& table, int64_t rows, int64_t tick,
            const RowDecay& decay, V* values) const {
    const int64_t end = table.rows();
    const bool is_right = state_[kNext] > static_cast<double>(table.reserved());
    int64_t row = table.reserved();
    if (is_right && state_[kNext] < static_cast<double>(end)) {
      row = static_cast<int64_t>(state_[kNext]);
    } else {
      Begin();
    }
    const int64_t most = end * kFreeRows;
    int64_t left = rows < end ? rows * kFreeRows : most;
    for (; row < end && left > 0; ++row) {
      left -= Add(table, row, tick, decay, values) ? kFreeRows : 1;
    }
    state_[kNext] = static_cast<double>(row);
    if (row < end) return;
    Write(table, decay, values);
    Begin();
  }

  void Begin() const { std::fill_n(state_, StateSize(width_), 0.0); }

  // Adds a row up if it has a key; says whether it has.
  template <typename V>
  bool Add(const KeyTable& table, int64_t row, int64_t tick,
           const RowDecay& decay, const V* values) const {
    if (!table.HasKey(row, tick)) return false;
    const V* const own = values + row * width_;
    const RowLock lock(&RowLocks::Global().Of(values, row));
    const double factor = decay.enabled() ? decay.Factor(row) : 1.0;
    for (int64_t i = 0; i < width_; ++i) {
      state_[kSums + i] += factor * static_cast<float>(own[i]);
    }
    state_[kAdded] += 1.0;
    return true;
  }

  // Without any keys, the mean is 0.
  template <typename V>
  void Write(const KeyTable& table, const RowDecay& decay, V* values) const {
    const double count = std::max(state_[kAdded], 1.0);
    for (int64_t row = 0; row < table.reserved(); ++row) {
      const RowLock lock(&RowLocks::Global().Of(values, row));
      for (int64_t i = 0; i < width_; ++i) {
        Store(static_cast<float>(state_[kSums + i] / count),
              values + row * width_ + i);
      }
      decay.BeginRow(row);
      table.RaiseReserved(row);
    }
  }

  static void Store(float value, float* to) { *to = value; }
  static void Store(float value, BFloat16* to) { *to = ToBFloat16(value); }

  double* const state_;
  const int64_t width_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_KEY_MEAN_H_
