#include "cc/kernels/hop_resource.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/kernels/resource_op.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace recsync {

using tensorflow::OpKernelContext;

std::string HopWorkerResource::DebugString() const {
  const HopOptions& options = worker_->options();
  return absl::StrCat("worker of decentralized training with in-neighbors ",
                      absl::StrJoin(options.in_neighbors, ", "),
                      " and out-neighbors ",
                      absl::StrJoin(options.out_neighbors, ", "));
}

absl::Status LookupWorker(OpKernelContext* ctx, WorkerPtr* worker) {
  tensorflow::core::RefCountPtr<HopWorkerResource> resource;
  TF_RETURN_IF_ERROR(LookupInput(ctx, "worker", &resource));
  *worker = resource->worker();
  return absl::OkStatus();
}

absl::Status CheckUpdate(const tensorflow::Tensor& update) {
  if (tensorflow::TensorShapeUtils::IsVector(update.shape())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "update must be a vector, not ", update.shape().DebugString()));
}

absl::Status Broken(OpKernelContext* ctx, Worker* worker) {
  const auto violation = worker->violation();
  if (!violation.has_value()) {
    return absl::FailedPreconditionError(
        "an invariant of the protocol did not hold");
  }
  // Workers are numbered like the tasks that they run on.
  tensorflow::DeviceNameUtils::ParsedName device;
  tensorflow::DeviceNameUtils::ParseFullName(ctx->device()->name(), &device);
  const auto& [rule, neighbor, iteration, progress, found, bound] = *violation;
  const std::string where =
      absl::StrCat("worker ", device.task, ", in iteration ", iteration, ", ");
  const std::string whose = absl::StrCat("of worker ", neighbor,
                                         ", which is in iteration ", progress);
  using Rule = Worker::Violation::Rule;
  switch (rule) {
    case Rule::kGap:
      return absl::FailedPreconditionError(absl::StrCat(
          where, "hears ", whose, ": ", found, " iterations ahead, and ", bound,
          " is the bound, which is a bug"));
    case Rule::kTokens:
      return absl::FailedPreconditionError(absl::StrCat(
          where, "has ", found, " tokens ", whose, " as far as it was told; ",
          bound, " would be right, which is a bug"));
    case Rule::kUpdates:
      return absl::FailedPreconditionError(
          absl::StrCat(where, "has ", found, " updates in its queue ", whose,
                       "; ", bound, " is the bound, which is a bug"));
    case Rule::kCapacity:
      return absl::ResourceExhaustedError(absl::StrCat(
          where, "has a full queue: ", bound, " updates wait when that ", whose,
          ", comes; the protocol's bounds are broken, which is a bug"));
  }
  return absl::InternalError("unknown invariant of the protocol");
}

absl::Status Ended(Worker::Answer answer) {
  switch (answer) {
    case Worker::Answer::kOk:
      return absl::OkStatus();
    case Worker::Answer::kCancelled:
      return absl::CancelledError(
          "a worker's wait for its neighbors was "
          "cancelled");
    case Worker::Answer::kClosed:
      return absl::CancelledError("the worker's queues were destroyed");
    case Worker::Answer::kBroken:
      return absl::FailedPreconditionError(
          "an invariant of the protocol did not hold");
  }
  return absl::InternalError("unknown answer of a worker");
}

}  // namespace recsync
