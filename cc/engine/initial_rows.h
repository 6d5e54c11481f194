// The first values of rows of a table. Those of a row depend on the seed, the
// row's number in the table and the column alone: not on which rows of the
// table lie here, on threads, or on the processor.
//
// Thread safe; different rows may be filled side by side.

#ifndef TF_RECSYNC_CC_ENGINE_INITIAL_ROWS_H_
#define TF_RECSYNC_CC_ENGINE_INITIAL_ROWS_H_

#include <cstdint>

#include "cc/engine/bfloat16.h"
#include "cc/engine/result.h"

namespace recsync {

enum class Distribution {
  kConstant,         // `first`
  kUniform,          // From `first` to below `second`.
  kNormal,           // Of mean `first` and standard deviation `second`.
  kTruncatedNormal,  // The same, within two standard deviations of the mean.
};

// Rows of a table that lie one after the other, and their values.
struct InitialRows {
  int64_t rows = 0;
  // Numbers in the table, of the first row and from one row to the next.
  int64_t index = 0;
  int64_t count = 1;
  Distribution distribution = Distribution::kConstant;
  float first = 0.0f;
  float second = 0.0f;
  uint64_t seed = 0;
};

// What is wrong with them, if anything.
Result CheckInitialRows(const InitialRows& rows);

// Writes the rows `begin` to `end`, counted from 0, of those that
// CheckInitialRows found right. `values` is where row 0 is, or would be.
//
// A value is a function of 32 random bits. Uniform values are multiples of
// 2^-24 of the range, and normal ones off by less than 1e-5 of themselves and
// at most 6.4 standard deviations from the mean.
void FillRows(const InitialRows& rows, int64_t dimension, int64_t begin,
              int64_t end, float* values);
// The same values, rounded.
void FillRows(const InitialRows& rows, int64_t dimension, int64_t begin,
              int64_t end, BFloat16* values);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_INITIAL_ROWS_H_
