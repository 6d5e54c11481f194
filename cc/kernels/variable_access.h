// How the kernels reach TensorFlow's resource variables: look-up with checks
// that name the input, locks, and buffers that are safe to write in place.

#ifndef TF_RECSYNC_CC_KERNELS_VARIABLE_ACCESS_H_
#define TF_RECSYNC_CC_KERNELS_VARIABLE_ACCESS_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"

namespace recsync {

using VariablePtr = tensorflow::core::RefCountPtr<tensorflow::Var>;

// Looks up every variable of the (list) input `name`. InvalidArgument where one
// is not initialized. Call CheckVariable with the variable's lock held.
absl::Status LookupVariables(tensorflow::OpKernelContext* ctx,
                             absl::string_view name,
                             std::vector<VariablePtr>* variables);

// InvalidArgument unless the variable holds a value of type `dtype`.
// Lock: the variable's, shared or exclusive.
absl::Status CheckVariable(const tensorflow::Var& variable,
                           absl::string_view name, tensorflow::DataType dtype);

// InvalidArgument if one variable stands in the list twice: what is written to
// it for one of its parts would be overwritten for the other.
absl::Status CheckDistinct(const std::vector<tensorflow::Var*>& variables);

// The number of elements in a row of a table, a variable of float or bfloat16.
// Lock: the variable's, shared or exclusive.
absl::Status RowWidth(const tensorflow::Var& variable, int64_t* width);

// The order in which every kernel takes the locks of these variables, each
// once. It does not depend on the order in which a caller names them, so that
// two calls never wait for each other. It is that of the mutexes' addresses, as
// in TensorFlow's own updates of several variables.
std::vector<tensorflow::Var*> LockOrder(
    std::vector<tensorflow::Var*> variables);

// Holds the locks of several variables, in any order, also named twice; shared
// with others that only read, or exclusive.
template <bool is_shared>
class VariableLocks {
 public:
  explicit VariableLocks(const std::vector<tensorflow::Var*>& variables)
      ABSL_NO_THREAD_SAFETY_ANALYSIS : variables_(LockOrder(variables)) {
    for (tensorflow::Var* variable : variables_) {
      if (is_shared) {
        variable->mu()->lock_shared();
      } else {
        variable->mu()->lock();
      }
    }
  }
  ~VariableLocks() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (auto it = variables_.rbegin(); it != variables_.rend(); ++it) {
      if (is_shared) {
        (*it)->mu()->unlock_shared();
      } else {
        (*it)->mu()->unlock();
      }
    }
  }
  VariableLocks(const VariableLocks&) = delete;
  VariableLocks& operator=(const VariableLocks&) = delete;

 private:
  const std::vector<tensorflow::Var*> variables_;  // Not owned.
};

using SharedLocks = VariableLocks</*is_shared=*/true>;
using ExclusiveLocks = VariableLocks</*is_shared=*/false>;

// Makes the variable's buffer, if it has one, its own, so that it may be
// written in place: a reader that still holds the old buffer keeps what it
// read. Lock: exclusive. (Stock sparse updates let every later read copy
// instead: a local Keras step, which reads whole tables to gather from them,
// would copy all of them.)
absl::Status MakeWritable(tensorflow::OpKernelContext* ctx,
                          tensorflow::Var* variable);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_VARIABLE_ACCESS_H_
