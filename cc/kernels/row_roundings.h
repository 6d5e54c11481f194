// How kernels find how rows of their bfloat16 tables are rounded.

#ifndef TF_RECSYNC_CC_KERNELS_ROW_ROUNDINGS_H_
#define TF_RECSYNC_CC_KERNELS_ROW_ROUNDINGS_H_

#include <vector>

#include "absl/status/status.h"
#include "cc/engine/row_rounding.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

// Reads an op's attribute `rounding`, five numbers for each piece of a table:
// the table's number, and offset, index, count and seed of a RoundedPiece.
// `roundings` gets one for each of the op's N tables. InvalidArgument if the
// pieces of a table can't be.
absl::Status ReadRoundings(tensorflow::OpKernelConstruction* ctx,
                           std::vector<RowRounding>* roundings);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_ROW_ROUNDINGS_H_
