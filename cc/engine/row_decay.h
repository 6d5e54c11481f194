// Weight decay of a table that costs a push no work on rows that it does not
// name.
//
// What decays do to every row is kept as one number, the table's log-decay: the
// sum of the logarithms of all factors so far, which may differ from step to
// step. Beside each row stands the log-decay up to which its value is decayed.
// Whoever needs a row multiplies it by exp of the difference:
//
//   RowDecay decay(logs, rows);
//   decay.Add(std::log1p(-weight_decay * learning_rate));  // a push
//   // With the row's lock:
//   decay.BringUpToDate(row, least, values + row * width, width);
//
// All are doubles: after a million steps of a large decay the difference of two
// sums is still exact to much less than a float shows. A value is rounded each
// time it is multiplied, and a factor close to 1 could round to no change at
// all, again and again. So an update leaves a small decay pending until it is
// large enough (`least`); until then it acts on that update's step as well,
// which is off by less than `least` of itself. Whoever brings all rows up to
// date leaves nothing pending that shows: so those of bfloat16 are rounded up
// or down at random there, by which small decays are applied on average.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_DECAY_H_
#define TF_RECSYNC_CC_ENGINE_ROW_DECAY_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/engine/bfloat16.h"
#include "cc/engine/prefetch.h"
#include "cc/engine/row_locks.h"
#include "cc/engine/row_rounding.h"

namespace recsync {

// Multiplies in double, so that a value is rounded once.
inline void Scale(double factor, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) {
    values[i] = static_cast<float>(factor * values[i]);
  }
}
inline void Scale(double factor, int64_t n, BFloat16* values) {
  for (int64_t i = 0; i < n; ++i) {
    values[i] =
        ToBFloat16(static_cast<float>(factor * static_cast<float>(values[i])));
  }
}

class RowDecay {
 public:
  // Decays that updates leave pending: some hundred roundings of a float, some
  // of a bfloat16.
  static constexpr double kLeastOfUpdate = 1.0 / (1 << 16);
  static constexpr double kLeastOfNarrowUpdate = 1.0 / (1 << 6);
  // And those that no float shows.
  static constexpr double kLeastShown = 1.0 / (1 << 24);

  // Of a table that does not decay.
  RowDecay() = default;
  // `logs`, which is not owned, has Size(rows) elements, all 0 at first: those
  // of the rows, then the table's, then what that was when all rows were
  // brought up to date.
  RowDecay(double* logs, int64_t rows) : logs_(logs), rows_(rows) {}

  static int64_t Size(int64_t rows) { return rows + 2; }

  bool enabled() const { return logs_ != nullptr; }

  // Begins to fetch what stands beside a row.
  RECSYNC_PREFETCHING void Fetch(int64_t row) const {
    if (enabled()) Prefetch(logs_ + row, 1);
  }

  // The table's log-decay.
  double total() const { return Load(logs_ + rows_); }

  // Decays all rows by exp(log), in any thread.
  void Add(double log) const {
    RowLock lock(&RowLocks::Global().Of(logs_, rows_));
    Store(logs_ + rows_, logs_[rows_] + log);
  }

  // What a row's value is to be multiplied by. Lock: the row's, unless nobody
  // writes.
  double Factor(int64_t row) const { return FactorUpTo(row, total()); }

  // The same up to a log-decay that the table has had; more than 1 if the row
  // is decayed further already.
  double FactorUpTo(int64_t row, double total) const {
    const double pending = total - logs_[row];
    return pending == 0.0 ? 1.0 : std::exp(pending);
  }

  // Decays the values of a row by what is pending, unless that is less than
  // `least`. Lock: the row's.
  template <typename V>
  void BringUpToDate(int64_t row, double least, V* values,
                     int64_t width) const {
    const double now = total();
    const double pending = now - logs_[row];
    if (pending == 0.0 || std::abs(pending) < least) return;
    Scale(std::exp(pending), width, values);
    logs_[row] = now;
  }

  // Decays the values of a row by all that is pending, and rounds them by
  // random numbers of the table's log-decay, of which no update has the same.
  // `wide` has room for the row. Lock: the row's.
  void BringUpToDate(int64_t row, const RowRounding& rounding, BFloat16* values,
                     int64_t width, float* wide) const {
    const double now = total();
    if (now == logs_[row]) return;
    const double factor = FactorUpTo(row, now);
    for (int64_t i = 0; i < width; ++i) {
      wide[i] = static_cast<float>(factor * static_cast<float>(values[i]));
    }
    int64_t bits;
    std::memcpy(&bits, &now, sizeof(bits));
    rounding.Round(row, bits, bits >> 32, wide, width, values);
    logs_[row] = now;
  }

  // A row has another value from now on, of which nothing is pending. Lock: the
  // row's.
  void BeginRow(int64_t row) const {
    if (enabled()) logs_[row] = total();
  }

  // Whether all rows are up to date.
  bool is_settled() const { return Load(logs_ + rows_ + 1) == total(); }

  // All rows were brought up to date when the table's log-decay was `total`.
  void Settled(double total) const { Store(logs_ + rows_ + 1, total); }

 private:
  static double Load(const double* from) {
    double value;
    __atomic_load(from, &value, __ATOMIC_RELAXED);
    return value;
  }
  static void Store(double* to, double value) {
    __atomic_store(to, &value, __ATOMIC_RELAXED);
  }

  double* logs_ = nullptr;
  int64_t rows_ = 0;
};

// Brings rows [begin, end) of a table up to date, as far as that shows; updates
// may go on meanwhile, under the locks that are the rows' by `values`.
inline void SettleRows(const RowDecay& decay, const RowRounding& /*rounding*/,
                       float* values, int64_t width, int64_t begin,
                       int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    RowLock lock(&RowLocks::Global().Of(values, row));
    decay.BringUpToDate(row, RowDecay::kLeastShown, values + row * width,
                        width);
  }
}
inline void SettleRows(const RowDecay& decay, const RowRounding& rounding,
                       BFloat16* values, int64_t width, int64_t begin,
                       int64_t end) {
  std::vector<float> wide(width);
  for (int64_t row = begin; row < end; ++row) {
    RowLock lock(&RowLocks::Global().Of(values, row));
    decay.BringUpToDate(row, rounding, values + row * width, width,
                        wide.data());
  }
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_DECAY_H_
