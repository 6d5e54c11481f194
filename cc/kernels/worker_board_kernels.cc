// Kernels of a board of workers.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/worker_board.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/message_pieces.h"
#include "cc/kernels/resource_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;

class BoardResource : public tensorflow::ResourceBase {
 public:
  WorkerBoard& board() { return board_; }
  std::string DebugString() const override { return "board of workers"; }

 private:
  WorkerBoard board_;
};

class RowResource : public tensorflow::ResourceBase {
 public:
  explicit RowResource(std::shared_ptr<WorkerBoard::Row> row)
      : row_(std::move(row)) {}

  WorkerBoard::Row& row() { return *row_; }
  std::string DebugString() const override { return "row of a worker"; }

 private:
  const std::shared_ptr<WorkerBoard::Row> row_;
};

using BoardPtr = tensorflow::core::RefCountPtr<BoardResource>;
using RowPtr = tensorflow::core::RefCountPtr<RowResource>;

template <typename Resource>
absl::Status WriteHandle(OpKernelContext* ctx, Resource* resource) {
  return WriteScalar(
      ctx, 0,
      ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name()));
}

class WorkerBoardOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, WriteHandle(ctx, new BoardResource));
  }
};

class BoardRowOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    BoardPtr resource;
    int64_t key;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "board", &resource));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "key", &key));
    OP_REQUIRES_OK(
        ctx, WriteHandle(ctx, new RowResource(resource->board().Add(key))));
  }
};

class CountStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* ctx) override {
    RowPtr resource;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "row", &resource));
    resource->row().Count();
  }
};

class ReadRowOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* ctx) override {
    RowPtr resource;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "row", &resource));
    int64_t* to;
    OP_REQUIRES_OK(ctx, MakeVector(ctx, 0, 2, &to));
    to[0] = resource->row().told();
    to[1] = resource->row().known();
  }
};

class ReportOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* ctx) override {
    RowPtr resource;
    const Tensor* message;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "row", &resource));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "message", &message));
    if (message->NumElements() == 0) return;
    const auto bytes = message->tensor_data();
    resource->row().Report(std::string(bytes.data(), bytes.size()));
  }
};

class ReadBoardOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    BoardPtr resource;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "board", &resource));
    const std::vector<WorkerBoard::Entry> entries = resource->board().Read();
    std::vector<int64_t> head = {static_cast<int64_t>(entries.size())};
    int64_t size = 0;
    for (const WorkerBoard::Entry& entry : entries) {
      const int64_t bytes = entry.report.size();
      head.insert(head.end(),
                  {entry.key, entry.applied, entry.has_report ? bytes : -1});
      size += PaddedBytes(bytes);
    }
    const int64_t head_bytes = head.size() * sizeof(int64_t);
    uint8_t* to;
    OP_REQUIRES_OK(ctx, MakeVector(ctx, 0, head_bytes + size, &to));
    std::memcpy(to, head.data(), head_bytes);
    to += head_bytes;
    for (const WorkerBoard::Entry& entry : entries) {
      to = CopyPadded(entry.report, PaddedBytes(entry.report.size()), to);
    }
  }
};

class TellWorkersOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    BoardPtr resource;
    const Tensor* keys;
    const Tensor* ends;
    const Tensor* known;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "board", &resource));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "keys", &keys));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "ends", &ends));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "known", &known));
    const int64_t n = keys->NumElements();
    OP_REQUIRES(ctx, ends->NumElements() == n && known->NumElements() == n,
                absl::InvalidArgumentError(absl::StrCat(
                    "ends and known must have ", n, " elements as keys, not ",
                    ends->NumElements(), " and ", known->NumElements())));
    for (int64_t i = 0; i < n; ++i) {
      resource->board().Tell(keys->vec<int64_t>()(i), ends->vec<int64_t>()(i),
                             known->vec<int64_t>()(i));
    }
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RecsyncWorkerBoard").Device(tensorflow::DEVICE_CPU), WorkerBoardOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncBoardRow").Device(tensorflow::DEVICE_CPU),
                        BoardRowOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncCountStep").Device(tensorflow::DEVICE_CPU),
                        CountStepOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncReadRow").Device(tensorflow::DEVICE_CPU),
                        ReadRowOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncReport").Device(tensorflow::DEVICE_CPU),
                        ReportOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncReadBoard").Device(tensorflow::DEVICE_CPU),
                        ReadBoardOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncTellWorkers").Device(tensorflow::DEVICE_CPU), TellWorkersOp);

}  // namespace
}  // namespace recsync
