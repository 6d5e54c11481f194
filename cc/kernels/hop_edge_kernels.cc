// Kernels of a worker of decentralized training that others use: the loops of
// its edges, which carry what it and its neighbors have to tell each other, and
// whoever watches over it.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/kernels/cancellable.h"
#include "cc/kernels/hop_resource.h"
#include "cc/kernels/inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

bool IsNeighbor(const std::vector<int64_t>& neighbors, int64_t neighbor) {
  return std::find(neighbors.begin(), neighbors.end(), neighbor) !=
         neighbors.end();
}

class HopCollectOp : public AsyncOpKernel {
 public:
  explicit HopCollectOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    WorkerPtr worker;
    int64_t neighbor;
    OP_REQUIRES_OK_ASYNC(ctx, LookupWorker(ctx, &worker), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadInteger(ctx, "neighbor", -1, &neighbor),
                         done);
    if (neighbor < 0) {
      ctx->SetStatus(Output(ctx, Worker::Answer::kOk, Worker::Parcel()));
      done();
      return;
    }
    static std::atomic<int64_t> callers{0};
    const int64_t caller = ++callers;
    const auto is_cancelled = std::make_shared<std::atomic<bool>>(false);
    const auto cancel = [ctx, worker, neighbor, caller, is_cancelled, done] {
      is_cancelled->store(true);
      if (!worker->CancelCollect(neighbor, caller)) return;
      ctx->SetStatus(Ended(Worker::Answer::kCancelled));
      done();
    };
    Cancellable cancellable;
    OP_REQUIRES_ASYNC(ctx, cancellable.Register(ctx, cancel),
                      Ended(Worker::Answer::kCancelled), done);
    const bool is_neighbor = worker->Collect(
        neighbor,
        [this, ctx, cancellable, done](Worker::Answer answer,
                                       Worker::Parcel parcel) {
          cancellable.Deregister();
          ctx->SetStatus(Output(ctx, answer, std::move(parcel)));
          done();
        },
        caller);
    if (is_neighbor) {
      // It may have been cancelled before it waited. The op may be over, too,
      // and ctx gone; then there is nothing to cancel.
      if (is_cancelled->load()) cancel();
      return;
    }
    cancellable.Deregister();
    ctx->SetStatus(absl::InvalidArgumentError(
        absl::StrCat("worker ", neighbor, " is no neighbor")));
    done();
  }

 private:
  absl::Status Output(OpKernelContext* ctx, Worker::Answer answer,
                      Worker::Parcel parcel) const {
    if (answer == Worker::Answer::kCancelled) return Ended(answer);
    TF_RETURN_IF_ERROR(WriteScalar<int64_t>(ctx, 0, parcel.progress));
    TF_RETURN_IF_ERROR(WriteScalar<int64_t>(ctx, 1, parcel.iteration));
    if (parcel.update.has_value()) {
      if (parcel.update->dtype() != dtype_) {
        return absl::InvalidArgumentError(
            absl::StrCat("dtype must be that of the updates, ",
                         tensorflow::DataTypeString(parcel.update->dtype()),
                         ", not ", tensorflow::DataTypeString(dtype_)));
      }
      ctx->set_output(2, *parcel.update);
    } else {
      Tensor* nothing;
      TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({0}), &nothing));
    }
    Tensor* open;
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, TensorShape({}), &open));
    open->scalar<bool>()() = answer == Worker::Answer::kOk;
    return WriteScalar<int64_t>(ctx, 4, parcel.number);
  }

  tensorflow::DataType dtype_;
};

class HopAskOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    int64_t neighbor;
    int64_t number;
    int64_t progress;
    int64_t iteration;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "neighbor", 0, &neighbor));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "number", 0, &number));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "progress", -1, &progress));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "iteration", -1, &iteration));
    OP_REQUIRES(ctx, progress < 0 || worker->Announce(neighbor, progress),
                Broken(ctx, worker.get()));
    Tensor* wanted;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &wanted));
    wanted->scalar<bool>()() =
        iteration >= 0 && worker->Wanted(neighbor, number, iteration);
  }
};

class HopDeliverOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    int64_t neighbor;
    int64_t number;
    int64_t iteration;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "neighbor", 0, &neighbor));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "number", 1, &number));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "iteration", 0, &iteration));
    OP_REQUIRES(ctx, IsNeighbor(worker->options().in_neighbors, neighbor),
                absl::InvalidArgumentError(absl::StrCat(
                    "neighbor ", neighbor, " is not an in-neighbor")));
    OP_REQUIRES_OK(ctx, CheckUpdate(ctx->input(4)));
    switch (worker->Deliver(neighbor, number, iteration, ctx->input(4))) {
      case Worker::Delivered::kQueued:
      case Worker::Delivered::kDropped:
      case Worker::Delivered::kRepeated:
        break;
      case Worker::Delivered::kBroken:
        ctx->SetStatus(Broken(ctx, worker.get()));
        return;
      case Worker::Delivered::kClosed:
        ctx->SetStatus(Ended(Worker::Answer::kClosed));
        return;
    }
    OP_REQUIRES_OK(ctx, WriteScalar<int64_t>(ctx, 0, iteration));
  }
};

class HopCarriedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    int64_t neighbor;
    int64_t number;
    int64_t iteration;
    int64_t began;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "neighbor", -1, &neighbor));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "number", 0, &number));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "iteration", -1, &iteration));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "began", 0, &began));
    worker->Carried(neighbor, number, iteration, began);
  }
};

class HopSetNeighborOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    int64_t neighbor;
    int64_t since;
    int64_t until;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "neighbor", 0, &neighbor));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "since", 0, &since));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "until", -1, &until,
                                    std::numeric_limits<int64_t>::max()));
    OP_REQUIRES_OK(
        ctx, WriteScalar<int64_t>(ctx, 0,
                                  worker->SetNeighbor(neighbor, since, until)));
  }
};

class HopCloseOutboxesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    worker->CloseOutboxes();
  }
};

class HopHoldOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    const Tensor& held = ctx->input(1);
    OP_REQUIRES(
        ctx, held.NumElements() == 1,
        absl::InvalidArgumentError(absl::StrCat("held must be a scalar, not ",
                                                held.shape().DebugString())));
    worker->HoldOutboxes(held.flat<bool>()(0));
  }
};

class HopInterruptOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    worker->Interrupt();
  }
};

class HopStateOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    const Worker::State state = worker->GetState();
    OP_REQUIRES_OK(ctx, WriteScalar<int64_t>(ctx, 0, state.iteration));
    OP_REQUIRES_OK(
        ctx, WriteScalar<int64_t>(ctx, 1, static_cast<int64_t>(state.phase)));
    Tensor* seconds;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({}), &seconds));
    seconds->scalar<double>()() = state.seconds;
    OP_REQUIRES_OK(ctx, WriteVector(ctx, 3, state.missing));
    OP_REQUIRES_OK(ctx, WriteVector(ctx, 4, state.tokens));
    OP_REQUIRES_OK(ctx, WriteVector(ctx, 5, state.declined));
    OP_REQUIRES_OK(ctx, WriteVector(ctx, 6, state.Numbers()));
  }
};

class HopEventsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, WriteEvents(ctx, 0, worker->TakeEvents()));
  }
};

#define REGISTER_HOP(name) \
  REGISTER_KERNEL_BUILDER( \
      Name("RecsyncHop" #name).Device(tensorflow::DEVICE_CPU), Hop##name##Op)
REGISTER_HOP(Collect);
REGISTER_HOP(Ask);
REGISTER_HOP(Deliver);
REGISTER_HOP(Carried);
REGISTER_HOP(SetNeighbor);
REGISTER_HOP(CloseOutboxes);
REGISTER_HOP(Hold);
REGISTER_HOP(Interrupt);
REGISTER_HOP(State);
REGISTER_HOP(Events);
#undef REGISTER_HOP

}  // namespace
}  // namespace recsync
