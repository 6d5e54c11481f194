// Kernels of the log of the batches that a worker has trained on.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/batch_log.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/resource_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;

class BatchLogResource : public tensorflow::ResourceBase {
 public:
  BatchLog& log() { return log_; }

  std::string DebugString() const override { return "batch log"; }

 private:
  BatchLog log_;
};

using ResourcePtr = tensorflow::core::RefCountPtr<BatchLogResource>;

class BatchLogOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(
        ctx, WriteScalar(ctx, 0,
                         ResourceHandle::MakeRefCountingHandle(
                             new BatchLogResource, ctx->device()->name())));
  }
};

class NoteBatchOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    int64_t number;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "log", &resource));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "number", &number));
    resource->log().Note(number);
  }
};

class NotedBatchesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    int64_t known;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "log", &resource));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "known", &known));
    std::vector<int64_t> numbers;
    OP_REQUIRES(ctx, resource->log().Read(known, &numbers),
                absl::InvalidArgumentError(absl::StrCat(
                    "known must be from the last one to the number of batches "
                    "noted, not ",
                    known)));
    int64_t* to;
    OP_REQUIRES_OK(ctx, MakeVector(ctx, 0, numbers.size(), &to));
    std::copy(numbers.begin(), numbers.end(), to);
  }
};

REGISTER_KERNEL_BUILDER(Name("RecsyncBatchLog").Device(tensorflow::DEVICE_CPU),
                        BatchLogOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncNoteBatch").Device(tensorflow::DEVICE_CPU),
                        NoteBatchOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncNotedBatches").Device(tensorflow::DEVICE_CPU), NotedBatchesOp);

}  // namespace
}  // namespace recsync
