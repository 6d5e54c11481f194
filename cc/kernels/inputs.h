// Reads inputs and lists of attributes, with errors that name them, what they
// are and what they may be, and writes small outputs.

#ifndef TF_RECSYNC_CC_KERNELS_INPUTS_H_
#define TF_RECSYNC_CC_KERNELS_INPUTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/event_log.h"
#include "cc/engine/limits.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

// Reads an attribute, a list of so many values.
template <typename V>
absl::Status ReadList(tensorflow::OpKernelConstruction* ctx, const char* name,
                      size_t expected, std::vector<V>* values) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, values));
  if (values->size() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " must have ", expected, " values, not ", values->size()));
}

// Reads an input, a scalar.
template <typename V>
absl::Status ReadScalar(tensorflow::OpKernelContext* ctx, const char* name,
                        V* value) {
  const tensorflow::Tensor* input;
  TF_RETURN_IF_ERROR(ctx->input(name, &input));
  if (!tensorflow::TensorShapeUtils::IsScalar(input->shape())) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a scalar, not ", input->shape().DebugString()));
  }
  *value = input->scalar<V>()();
  return absl::OkStatus();
}

// Reads an input, a scalar from `least` to `most`.
inline absl::Status ReadInteger(tensorflow::OpKernelContext* ctx,
                                const char* name, int64_t least, int64_t* value,
                                int64_t most = kMostSteps) {
  TF_RETURN_IF_ERROR(ReadScalar(ctx, name, value));
  if (*value >= least && *value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " must be from ", least, " to ", most, ", not ", *value));
}

// Reads an input, a vector.
inline absl::Status ReadVector(tensorflow::OpKernelContext* ctx,
                               const char* name,
                               const tensorflow::Tensor** input) {
  TF_RETURN_IF_ERROR(ctx->input(name, input));
  if (!tensorflow::TensorShapeUtils::IsVector((*input)->shape())) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a vector, not ", (*input)->shape().DebugString()));
  }
  return absl::OkStatus();
}

// Writes an output, which is named, or numbered, by `output`.
template <typename V, typename Output>
absl::Status WriteScalar(tensorflow::OpKernelContext* ctx, Output output,
                         V value) {
  tensorflow::Tensor* to;
  TF_RETURN_IF_ERROR(
      ctx->allocate_output(output, tensorflow::TensorShape({}), &to));
  to->scalar<V>()() = value;
  return absl::OkStatus();
}

// Allocates a vector of outputs; `values` may be written.
template <typename V, typename Output>
absl::Status MakeVector(tensorflow::OpKernelContext* ctx, Output output,
                        int64_t size, V** values) {
  tensorflow::Tensor* to;
  TF_RETURN_IF_ERROR(
      ctx->allocate_output(output, tensorflow::TensorShape({size}), &to));
  *values = to->flat<V>().data();
  return absl::OkStatus();
}

template <typename Output>
absl::Status WriteVector(tensorflow::OpKernelContext* ctx, Output output,
                         const std::vector<int64_t>& values) {
  int64_t* to;
  TF_RETURN_IF_ERROR(MakeVector<int64_t>(ctx, output, values.size(), &to));
  std::copy(values.begin(), values.end(), to);
  return absl::OkStatus();
}

// Events as rows [n, 5]: activity, begin, end, iteration, neighbor.
inline absl::Status WriteEvents(tensorflow::OpKernelContext* ctx, int output,
                                const std::vector<Event>& events) {
  tensorflow::Tensor* to;
  const int64_t count = events.size();
  TF_RETURN_IF_ERROR(
      ctx->allocate_output(output, tensorflow::TensorShape({count, 5}), &to));
  auto rows = to->matrix<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    rows(i, 0) = static_cast<int64_t>(events[i].activity);
    rows(i, 1) = events[i].begin;
    rows(i, 2) = events[i].end;
    rows(i, 3) = events[i].iteration;
    rows(i, 4) = events[i].neighbor;
  }
  return absl::OkStatus();
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_INPUTS_H_
