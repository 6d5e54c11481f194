#include "cc/kernels/variable_access.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

absl::Status LookupVariables(OpKernelContext* ctx, absl::string_view name,
                             std::vector<VariablePtr>* variables) {
  int start = 0;
  int stop = 0;
  TF_RETURN_IF_ERROR(
      ctx->op_kernel().InputRange(std::string(name), &start, &stop));
  variables->clear();
  for (int i = start; i < stop; ++i) {
    const Tensor& input = ctx->input(i);
    if (input.dtype() != tensorflow::DT_RESOURCE || input.NumElements() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, "[", i - start, "] must be one resource handle, not ",
          input.DebugString()));
    }
    const tensorflow::ResourceHandle& handle =
        input.flat<tensorflow::ResourceHandle>()(0);
    VariablePtr variable;
    const absl::Status found =
        tensorflow::LookupResource(ctx, handle, &variable);
    if (!found.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "[", i - start, "] (", handle.name(),
                       ") is not an initialized variable on ",
                       ctx->device()->name(), ": ", found.message()));
    }
    variables->push_back(std::move(variable));
  }
  return absl::OkStatus();
}

absl::Status CheckVariable(const Var& variable, absl::string_view name,
                           tensorflow::DataType dtype) {
  const Tensor& value = *const_cast<Var&>(variable).tensor();
  if (!value.IsInitialized()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " (", variable.DebugString(), ") is uninitialized"));
  }
  if (value.dtype() != dtype) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a variable of ", tensorflow::DataTypeString(dtype),
        ", not ", tensorflow::DataTypeString(value.dtype())));
  }
  return absl::OkStatus();
}

std::vector<Var*> LockOrder(std::vector<Var*> variables) {
  std::sort(variables.begin(), variables.end(), [](Var* a, Var* b) {
    return std::less<void*>()(a->mu(), b->mu());
  });
  variables.erase(std::unique(variables.begin(), variables.end()),
                  variables.end());
  return variables;
}

absl::Status CheckDistinct(const std::vector<Var*>& variables) {
  if (LockOrder(variables).size() != variables.size()) {
    return absl::InvalidArgumentError(
        "the same variable is passed twice to one update");
  }
  return absl::OkStatus();
}

absl::Status RowWidth(const Var& variable, int64_t* width) {
  const tensorflow::DataType dtype =
      const_cast<Var&>(variable).tensor()->dtype();
  if (dtype != tensorflow::DT_FLOAT && dtype != tensorflow::DT_BFLOAT16) {
    return absl::InvalidArgumentError(
        absl::StrCat("variables must be a variable of float or bfloat16, not ",
                     tensorflow::DataTypeString(dtype)));
  }
  TF_RETURN_IF_ERROR(CheckVariable(variable, "variables", dtype));
  const tensorflow::TensorShape& shape =
      const_cast<Var&>(variable).tensor()->shape();
  if (shape.dims() < 1) {
    return absl::InvalidArgumentError("a table must have rows, not shape []");
  }
  *width = 1;
  for (int d = 1; d < shape.dims(); ++d) {
    // A table without rows may have any other dimensions.
    if (__builtin_mul_overflow(*width, shape.dim_size(d), width)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rows of a table of shape ", shape.DebugString(), " are too large"));
    }
  }
  return absl::OkStatus();
}

absl::Status MakeWritable(OpKernelContext* ctx, Var* variable) {
  Tensor* value = variable->tensor();
  if (value->IsInitialized() && !value->RefCountIsOne()) {
    if (!tensorflow::DataTypeCanUseMemcpy(value->dtype())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a variable of ", tensorflow::DataTypeString(value->dtype()),
          " can't be updated"));
    }
    Tensor copy;
    TF_RETURN_IF_ERROR(
        ctx->allocate_temp(value->dtype(), value->shape(), &copy));
    std::memcpy(copy.data(), value->data(), value->TotalBytes());
    *value = copy;
  }
  return absl::OkStatus();
}

}  // namespace recsync
