// Finds the rows of a table that were updated since they were saved.

#ifndef TF_RECSYNC_CC_ENGINE_CHANGED_ROWS_H_
#define TF_RECSYNC_CC_ENGINE_CHANGED_ROWS_H_

#include <cstdint>

namespace recsync {

// Writes the rows of [begin, end) whose version is another one than the saved
// one to `rows`, in ascending order, and returns how many they are. There must
// be room for end - begin of them. Updates may raise versions meanwhile.
inline int64_t ChangedRows(const int64_t* versions, const int64_t* saved,
                           int64_t begin, int64_t end, int64_t* rows) {
  int64_t count = 0;
  for (int64_t row = begin; row < end; ++row) {
    // Without a branch: the place is written again if the row is not one.
    rows[count] = row;
    const int64_t now = __atomic_load_n(versions + row, __ATOMIC_RELAXED);
    // A table that was restored has lower ones, too.
    count += now != saved[row];
  }
  return count;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_CHANGED_ROWS_H_
