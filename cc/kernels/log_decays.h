// How kernels find the log-decays of tables whose weights decay (row_decay.h).

#ifndef TF_RECSYNC_CC_KERNELS_LOG_DECAYS_H_
#define TF_RECSYNC_CC_KERNELS_LOG_DECAYS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/row_decay.h"
#include "cc/kernels/variable_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

// Which of an op's tables have log-decays: its attribute `decayed`, numbers of
// tables in ascending order.
absl::Status ReadDecayed(tensorflow::OpKernelConstruction* ctx,
                         std::vector<int64_t>* decayed);

// Looks up the variables of the input `log_decays`; `by_table` gets one for
// each of the op's `tables`, null for those that have none.
absl::Status LookupLogDecays(tensorflow::OpKernelContext* ctx,
                             const std::vector<int64_t>& decayed,
                             int64_t tables,
                             std::vector<VariablePtr>* by_table);

// The decay of a table of so many rows; not enabled if there are no log-decays
// (null). InvalidArgument if they are of another type or shape.
// Lock: the variable's, shared, exclusive or by a session.
absl::Status RowDecayOf(tensorflow::Var* log_decays, int64_t rows,
                        RowDecay* decay);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_LOG_DECAYS_H_
