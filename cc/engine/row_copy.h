// Copies rows of a table, together with what lies beside each of them.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_COPY_H_
#define TF_RECSYNC_CC_ENGINE_ROW_COPY_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/prefetch.h"
#include "cc/engine/row_decay.h"
#include "cc/engine/row_locks.h"

namespace recsync {

// One of the arrays that have something for each row; nothing is owned.
struct RowField {
  const char* from = nullptr;  // [rows, bytes]
  char* to = nullptr;          // [rows that are copied, bytes]
  int64_t bytes = 0;           // of a row
};

// The weight decay of the rows of the first array, floats or bfloat16.
struct CopiedDecay {
  RowDecay decay;      // not enabled without weight decay
  double total = 0.0;  // the table's log-decay that they are copied with
  bool is_narrow = false;
  int64_t width = 0;

  // Decays a copied row by what was pending for it.
  void Scale(double factor, char* row) const {
    if (factor == 1.0) return;
    if (is_narrow) {
      recsync::Scale(factor, width, reinterpret_cast<BFloat16*>(row));
    } else {
      recsync::Scale(factor, width, reinterpret_cast<float*>(row));
    }
  }
};

// Copies the rows `ids` of positions [begin, end), all of which exist, to these
// positions. What is copied of a row is of one moment: if `table` is not null,
// rows are written meanwhile, under the locks that are the rows' by `table`.
inline void CopyRows(const std::vector<RowField>& fields, const int64_t* ids,
                     int64_t begin, int64_t end, const void* table,
                     const CopiedDecay& decayed = {})
    ABSL_NO_THREAD_SAFETY_ANALYSIS {
  constexpr int64_t kAhead = 8;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      for (const RowField& field : fields) {
        Prefetch(field.from + ids[i + kAhead] * field.bytes, field.bytes);
      }
    }
    SpinLock* const lock =
        table == nullptr ? nullptr : &RowLocks::Global().Of(table, ids[i]);
    double factor = 1.0;
    if (lock != nullptr) lock->Lock();
    if (decayed.decay.enabled()) {
      factor = decayed.decay.FactorUpTo(ids[i], decayed.total);
    }
    for (const RowField& field : fields) {
      std::memcpy(field.to + i * field.bytes, field.from + ids[i] * field.bytes,
                  field.bytes);
    }
    if (lock != nullptr) lock->Unlock();
    decayed.Scale(factor, fields[0].to + i * fields[0].bytes);
  }
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_COPY_H_
