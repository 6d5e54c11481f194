// Kernels that wait: artificial compute time, artificial bandwidth and speed of
// devices, and what was reserved of those. And the threads that kernels have:
// the pool that the servers of this process share, and how many of a pool one
// kernel uses; and the memory of the process.

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/no_destructor.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/limits.h"
#include "cc/engine/link.h"
#include "cc/engine/memory.h"
#include "cc/engine/mutex.h"
#include "cc/engine/timer.h"
#include "cc/kernels/cancellable.h"
#include "tensorflow/core/common_runtime/process_util.h"
#include "tensorflow/core/framework/log_memory.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/threadpool.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/util/work_sharder.h"

namespace recsync {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// One thread waits for all ops of the process. It is never ended: an op that
// waits may be the last thing that holds on to its own kernel.
Timer& SharedTimer() {
  static absl::NoDestructor<Timer> timer;
  return *timer;
}

struct Wait {
  // Whoever takes `done` ends the op.
  AsyncOpKernel::DoneCallback Take() ABSL_LOCKS_EXCLUDED(mu) {
    MutexLock lock(&mu);
    return std::exchange(done, nullptr);
  }
  Mutex mu;
  AsyncOpKernel::DoneCallback done ABSL_GUARDED_BY(mu);
  int64_t timer_id ABSL_GUARDED_BY(mu) = 0;  // 0: not known yet.
};

// Ends an op after a time, or at once when its step is cancelled; returns
// without waiting. `what` is named in the error of a cancelled op.
void EndAfter(double seconds, const char* what, OpKernelContext* ctx,
              AsyncOpKernel::DoneCallback done) {
  auto wait = std::make_shared<Wait>();
  {
    MutexLock lock(&wait->mu);
    wait->done = std::move(done);
  }
  Cancellable cancellable;
  const bool registered = cancellable.Register(ctx, [ctx, wait, what] {
    AsyncOpKernel::DoneCallback end = wait->Take();
    if (end == nullptr) return;
    int64_t id;
    {
      MutexLock lock(&wait->mu);
      id = wait->timer_id;
    }
    if (id != 0) SharedTimer().Cancel(id);
    ctx->SetStatus(absl::CancelledError(absl::StrCat(what, " was cancelled")));
    end();
  });
  OP_REQUIRES_ASYNC(ctx, registered,
                    absl::CancelledError(absl::StrCat(what, " was cancelled")),
                    wait->Take());
  const int64_t id = SharedTimer().CallAfter(seconds, [cancellable, wait] {
    AsyncOpKernel::DoneCallback end = wait->Take();
    // A cancelled op has ended already, and what cancels it may be gone.
    if (end == nullptr) return;
    cancellable.Deregister();
    end();
  });
  bool has_ended;
  {
    MutexLock lock(&wait->mu);
    wait->timer_id = id;
    has_ended = wait->done == nullptr;
  }
  // It may have been cancelled when there was no number to cancel.
  if (has_ended) SharedTimer().Cancel(id);
}

// Reads an input, one number.
template <typename V>
absl::Status ReadNumber(OpKernelContext* ctx, int index, const char* name,
                        V* value) {
  const Tensor& input = ctx->input(index);
  if (input.NumElements() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a scalar, not ", input.shape().DebugString()));
  }
  *value = input.flat<V>()(0);
  return absl::OkStatus();
}

class DelayOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    float seconds;
    OP_REQUIRES_OK_ASYNC(ctx, ReadNumber(ctx, 0, "seconds", &seconds), done);
    OP_REQUIRES_ASYNC(
        ctx, seconds >= 0.0f && std::isfinite(seconds),
        absl::InvalidArgumentError(absl::StrCat(
            "seconds must be finite and at least 0, not ", seconds)),
        done);
    EndAfter(seconds, "the delay", ctx, std::move(done));
  }
};

// Whether TensorFlow does not run a step, but computes constants while it
// optimizes a graph, be it in Grappler, where nothing can be cancelled, or when
// a function is built. If that fails, it leaves the op where it is.
bool ComputesAhead(const OpKernelContext& ctx) {
  return ctx.cancellation_manager() == nullptr ||
         ctx.step_id() == tensorflow::LogMemory::CONSTANT_FOLDING_STEP_ID;
}

// The link of a device, or its processor.
class LinkResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "artificial link"; }
  Link link;
};

constexpr char kLink[] = "recsync_link";
constexpr char kProcessor[] = "recsync_processor";

// What a device has of that name; made when somebody asks first.
absl::Status FindLink(OpKernelContext* ctx, const char* name,
                      tensorflow::core::RefCountPtr<LinkResource>* resource) {
  tensorflow::ResourceMgr* resources = ctx->resource_manager();
  LinkResource* found = nullptr;
  const absl::Status status = resources->LookupOrCreate<LinkResource>(
      resources->default_container(), name, &found, [](LinkResource** made) {
        *made = new LinkResource;  // The manager owns it.
        return absl::OkStatus();
      });
  if (status.ok()) resource->reset(found);
  return status;
}

// Ends an op when an amount of something has passed the link.
void EndWhenPassed(const char* name, int64_t amount, double per_second,
                   const char* what, OpKernelContext* ctx,
                   AsyncOpKernel::DoneCallback done) {
  tensorflow::core::RefCountPtr<LinkResource> resource;
  OP_REQUIRES_OK_ASYNC(ctx, FindLink(ctx, name, &resource), done);
  const Link::Time now = std::chrono::steady_clock::now();
  const Link::Time passed = resource->link.Reserve(amount, per_second, now);
  EndAfter(std::chrono::duration<double>(passed - now).count(), what, ctx,
           std::move(done));
}

class TransferOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    OP_REQUIRES_ASYNC(ctx, !ComputesAhead(*ctx),
                      absl::UnimplementedError(
                          "a message passes its link when a step is run"),
                      done);
    const Tensor& message = ctx->input(0);
    double bytes_per_second;
    OP_REQUIRES_OK_ASYNC(
        ctx, ReadNumber(ctx, 1, "bytes_per_second", &bytes_per_second), done);
    OP_REQUIRES_ASYNC(
        ctx, bytes_per_second > 0.0,
        absl::InvalidArgumentError(absl::StrCat(
            "bytes_per_second must be positive, not ", bytes_per_second)),
        done);
    ctx->set_output(0, message);
    EndWhenPassed(kLink, message.TotalBytes(), bytes_per_second, "the transfer",
                  ctx, std::move(done));
  }
};

class ComputedOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    OP_REQUIRES_ASYNC(ctx, !ComputesAhead(*ctx),
                      absl::UnimplementedError(
                          "what a device computes takes its time when a step "
                          "is run"),
                      done);
    const int results = ctx->num_outputs();
    double flop, flops_per_second;
    OP_REQUIRES_OK_ASYNC(ctx, ReadNumber(ctx, results, "flop", &flop), done);
    OP_REQUIRES_OK_ASYNC(
        ctx,
        ReadNumber(ctx, results + 1, "flops_per_second", &flops_per_second),
        done);
    // More would be no integer of 64 bits.
    OP_REQUIRES_ASYNC(
        ctx, flop >= 0.0 && flop < 9.2e18,
        absl::InvalidArgumentError(absl::StrCat(
            "flop must be at least 0 and below 9.2e18, not ", flop)),
        done);
    OP_REQUIRES_ASYNC(
        ctx, flops_per_second > 0.0,
        absl::InvalidArgumentError(absl::StrCat(
            "flops_per_second must be positive, not ", flops_per_second)),
        done);
    for (int i = 0; i < results; ++i) ctx->set_output(i, ctx->input(i));
    EndWhenPassed(kProcessor, std::llround(flop), flops_per_second,
                  "the computing", ctx, std::move(done));
  }
};

class ReservedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* amounts;
    Tensor* seconds;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {2}, &amounts));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {2}, &seconds));
    const char* const names[] = {kProcessor, kLink};
    for (int i = 0; i < 2; ++i) {
      tensorflow::core::RefCountPtr<LinkResource> resource;
      OP_REQUIRES_OK(ctx, FindLink(ctx, names[i], &resource));
      const Link::Total total = resource->link.Reserved();
      amounts->vec<int64_t>()(i) = total.amount;
      seconds->vec<double>()(i) = total.seconds.count();
    }
  }
};

class ResidentMemoryOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    output->scalar<int64_t>()() = ResidentMemory().value_or(-1);
  }
};

class ServerThreadsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    OP_REQUIRES(
        ctx, input.NumElements() == 1,
        absl::InvalidArgumentError(absl::StrCat(
            "threads must be a scalar, not ", input.shape().DebugString())));
    const int32_t threads = input.flat<int32_t>()(0);
    OP_REQUIRES(
        ctx, threads >= 1 && threads <= kMostThreads,
        absl::InvalidArgumentError(absl::StrCat(
            "threads must be from 1 to ", kMostThreads, ", not ", threads)));
    tensorflow::SessionOptions options;
    options.config.set_inter_op_parallelism_threads(threads);
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    output->scalar<int32_t>()() =
        tensorflow::ComputePool(options)->NumThreads();
  }
};

// An eager op runs in the thread that calls it, which the limit is for.
class LimitParallelismOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    OP_REQUIRES(
        ctx, input.NumElements() == 1,
        absl::InvalidArgumentError(absl::StrCat("limit must be a scalar, not ",
                                                input.shape().DebugString())));
    const int32_t limit = input.flat<int32_t>()(0);
    OP_REQUIRES(ctx, limit >= 1,
                absl::InvalidArgumentError(
                    absl::StrCat("limit must be at least 1, not ", limit)));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    output->scalar<int32_t>()() = tensorflow::GetPerThreadMaxParallelism();
    tensorflow::SetPerThreadMaxParallelism(limit);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RecsyncLimitParallelism").Device(tensorflow::DEVICE_CPU),
    LimitParallelismOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncResidentMemory").Device(tensorflow::DEVICE_CPU),
    ResidentMemoryOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncServerThreads").Device(tensorflow::DEVICE_CPU),
    ServerThreadsOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncDelay").Device(tensorflow::DEVICE_CPU),
                        DelayOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncTransfer").Device(tensorflow::DEVICE_CPU),
                        TransferOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncComputed").Device(tensorflow::DEVICE_CPU),
                        ComputedOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncReserved").Device(tensorflow::DEVICE_CPU),
                        ReservedOp);

}  // namespace
}  // namespace recsync
