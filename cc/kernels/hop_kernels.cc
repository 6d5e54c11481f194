// Kernels of a worker of decentralized training that its own steps use: they
// make it, enter iterations, send, wait and average.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/engine/limits.h"
#include "cc/engine/weighted_average.h"
#include "cc/kernels/cancellable.h"
#include "cc/kernels/hop_resource.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/resource_op.h"
#include "cc/kernels/variable_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

// An op of the trainer that may wait; cancelling it ends the wait.
class TrainerOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final {
    WorkerPtr worker;
    OP_REQUIRES_OK_ASYNC(ctx, LookupWorker(ctx, &worker), done);
    // Before the registration: a cancellation counts from there on, also before
    // anything waits.
    const int64_t call = worker->BeginCall();
    Cancellable cancellable;
    const bool registered =
        cancellable.Register(ctx, [worker, call] { worker->Interrupt(call); });
    OP_REQUIRES_ASYNC(ctx, registered, Ended(Worker::Answer::kCancelled), done);
    DoneCallback end = [cancellable, done] {
      cancellable.Deregister();
      done();
    };
    Run(ctx, std::move(worker), std::move(end));
  }

 protected:
  virtual void Run(OpKernelContext* ctx, WorkerPtr worker,
                   DoneCallback done) = 0;
};

// Goes on in a thread of the op's own executor, not in that of whoever ended
// the wait, which has its own work.
void Continue(OpKernelContext* ctx, std::function<void()> rest) {
  (*ctx->runner())(std::move(rest));
}

// Averages what was received into the variables, which follow one another in a
// packed update. `base` is null for the variables' own values.
template <typename T>
absl::Status Average(OpKernelContext* ctx,
                     const std::vector<Worker::Received>& received,
                     const Tensor* base) {
  if (received.empty()) return absl::OkStatus();
  std::vector<VariablePtr> variables;
  TF_RETURN_IF_ERROR(LookupVariables(ctx, "variables", &variables));
  std::vector<Var*> locked;
  for (const VariablePtr& variable : variables)
    locked.push_back(variable.get());
  TF_RETURN_IF_ERROR(CheckDistinct(locked));
  const ExclusiveLocks locks(locked);
  int64_t size = 0;
  std::vector<int64_t> starts;
  for (Var* variable : locked) {
    TF_RETURN_IF_ERROR(CheckVariable(*variable, "variables",
                                     tensorflow::DataTypeToEnum<T>::value));
    starts.push_back(size);
    size += variable->tensor()->NumElements();
  }
  std::vector<const T*> copies;
  std::vector<double> weights;
  for (const Worker::Received& item : received) {
    if (item.update.dtype() != tensorflow::DataTypeToEnum<T>::value ||
        item.update.NumElements() != size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "worker ", item.sender, " sent ", item.update.DebugString(0),
          ", the variables have ", size, " elements"));
    }
    copies.push_back(item.update.flat<T>().data());
    weights.push_back(item.weight);
  }
  if (base != nullptr && base->NumElements() != size) {
    return absl::InvalidArgumentError(
        absl::StrCat("base must have the ", size,
                     " elements of the variables, not ", base->NumElements()));
  }
  for (size_t v = 0; v < locked.size(); ++v) {
    TF_RETURN_IF_ERROR(MakeWritable(ctx, locked[v]));
    Tensor* value = locked[v]->tensor();
    T* own = value->flat<T>().data();
    const T* from = base == nullptr ? own : base->flat<T>().data() + starts[v];
    // A cycle for every few bytes that are read.
    const int64_t cost = sizeof(T) * (copies.size() + 2) / 4 + 1;
    ParallelFor(ctx, value->NumElements(), cost,
                [&](int64_t begin, int64_t end) {
                  std::vector<const T*> parts;
                  for (const T* copy : copies)
                    parts.push_back(copy + starts[v] + begin);
                  AverageInto<T>(parts, weights, from + begin, own + begin,
                                 end - begin);
                });
  }
  return absl::OkStatus();
}

absl::Status AverageAny(OpKernelContext* ctx, tensorflow::DataType dtype,
                        const std::vector<Worker::Received>& received,
                        const Tensor* base) {
  return dtype == tensorflow::DT_DOUBLE ? Average<double>(ctx, received, base)
                                        : Average<float>(ctx, received, base);
}

class HopWorkerOp : public ResourceOp<HopWorkerResource> {
 public:
  explicit HopWorkerOp(OpKernelConstruction* ctx) : ResourceOp(ctx) {
    std::vector<float> weights;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("in_neighbors", &options_.in_neighbors));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weights", &weights));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("out_neighbors", &options_.out_neighbors));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("max_iteration_gap", &options_.max_iteration_gap));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slots", &options_.slots));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity", &options_.capacity));
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("backup_workers", &options_.backup_workers));
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("staleness_bound", &options_.staleness_bound));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_jump", &options_.max_jump));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("jump_trigger", &options_.jump_trigger));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("notify_ack", &options_.notify_ack));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gap_bounds", &options_.gap_bounds));
    options_.weights.assign(weights.begin(), weights.end());
    OP_REQUIRES(ctx, !shared_name_.empty(),
                absl::InvalidArgumentError("shared_name must not be empty"));
    OP_REQUIRES_OK(ctx, Check());
  }

 protected:
  tensorflow::core::RefCountPtr<HopWorkerResource> Make() const override {
    return tensorflow::core::RefCountPtr<HopWorkerResource>(
        new HopWorkerResource(options_));
  }

  // Refuses a worker that was made with other options than these.
  absl::Status CheckSame(const HopWorkerResource& resource) const override {
    const auto theirs = Named(resource.worker()->options());
    const auto wanted = Named(options_);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (theirs[i] == wanted[i]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "shared_name ", shared_name_, " is a worker with ", theirs[i].first,
          "=", theirs[i].second, ", not ", wanted[i].second));
    }
    return absl::OkStatus();
  }

 private:
  // The options by their names, as text.
  static std::vector<std::pair<const char*, std::string>> Named(
      const HopOptions& options) {
    const auto list = [](const auto& values) {
      return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
    };
    return {{"in_neighbors", list(options.in_neighbors)},
            {"weights", list(options.weights)},
            {"out_neighbors", list(options.out_neighbors)},
            {"max_iteration_gap", absl::StrCat(options.max_iteration_gap)},
            {"slots", absl::StrCat(options.slots)},
            {"capacity", absl::StrCat(options.capacity)},
            {"backup_workers", absl::StrCat(options.backup_workers)},
            {"staleness_bound", absl::StrCat(options.staleness_bound)},
            {"max_jump", absl::StrCat(options.max_jump)},
            {"jump_trigger", absl::StrCat(options.jump_trigger)},
            {"notify_ack", options.notify_ack ? "true" : "false"},
            {"gap_bounds", list(options.gap_bounds)}};
  }

  absl::Status Check() const {
    const int64_t in = options_.in_neighbors.size();
    if (options_.weights.size() != options_.in_neighbors.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("weights must be one for each of the ", in,
                       " in-neighbors, not ", options_.weights.size()));
    }
    if (!options_.gap_bounds.empty() &&
        options_.gap_bounds.size() != options_.in_neighbors.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "gap_bounds must be one for each of the ", in,
          " in-neighbors, or none, not ", options_.gap_bounds.size()));
    }
    std::set<int64_t> neighbors;
    for (const auto* list : {&options_.in_neighbors, &options_.out_neighbors}) {
      neighbors.clear();
      for (const int64_t neighbor : *list) {
        if (neighbor < 0 || !neighbors.insert(neighbor).second) {
          return absl::InvalidArgumentError(absl::StrCat(
              "neighbors must be different numbers from 0 on, not ",
              absl::StrJoin(*list, ", ")));
        }
      }
    }
    for (const auto& [name, value] :
         {std::pair("max_iteration_gap", options_.max_iteration_gap),
          std::pair("slots", options_.slots),
          std::pair("capacity", options_.capacity),
          std::pair("staleness_bound", options_.staleness_bound),
          std::pair("max_jump", options_.max_jump),
          std::pair("jump_trigger", options_.jump_trigger)}) {
      if (value > kMostEntries) {
        return absl::InvalidArgumentError(absl::StrCat(
            name, " must be at most ", kMostEntries, ", not ", value));
      }
    }
    if (options_.backup_workers > in) {
      return absl::InvalidArgumentError(
          absl::StrCat("backup_workers must be less than the in-neighbors, "
                       "itself included, ",
                       in + 1, ", not ", options_.backup_workers));
    }
    const bool queues = options_.max_iteration_gap > 0;
    if (!queues && (options_.backup_workers > 0 || options_.max_jump > 1)) {
      return absl::InvalidArgumentError(
          "backup workers and skipping need token queues, a max_iteration_gap "
          "of at least 1");
    }
    if (options_.notify_ack && (queues || options_.backup_workers > 0 ||
                                options_.staleness_bound > 1)) {
      return absl::InvalidArgumentError(
          "notify_ack excludes token queues, backup workers and a "
          "staleness_bound above 1");
    }
    return absl::OkStatus();
  }

  HopOptions options_;
};

class HopBeginOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    int64_t first;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "first", 0, &first));
    worker->Begin(first);
  }
};

class HopNextOp : public TrainerOp {
 public:
  explicit HopNextOp(OpKernelConstruction* ctx) : TrainerOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

 protected:
  void Run(OpKernelContext* ctx, WorkerPtr worker, DoneCallback done) override {
    const int64_t next = worker->PlanNext();
    const auto acquire = [ctx, worker, next, done] {
      worker->AcquireTokens(next, [ctx, next, done](Worker::Answer answer) {
        ctx->SetStatus(Ended(answer));
        if (ctx->status().ok())
          ctx->SetStatus(WriteScalar<int64_t>(ctx, 0, next));
        done();
      });
    };
    if (!worker->IsJump(next)) {
      acquire();
      return;
    }
    // Before it jumps the worker renews its parameters.
    worker->Receive(next - 1, [this, ctx, acquire, done](
                                  Worker::Answer answer,
                                  std::vector<Worker::Received> received) {
      Continue(ctx, [this, ctx, acquire, done, answer,
                     received = std::move(received)] {
        absl::Status status = Ended(answer);
        if (status.ok()) status = AverageAny(ctx, dtype_, received, nullptr);
        if (!status.ok()) {
          ctx->SetStatus(status);
          done();
          return;
        }
        acquire();
      });
    });
  }

 private:
  tensorflow::DataType dtype_;
};

class HopEnterOp : public TrainerOp {
 public:
  explicit HopEnterOp(OpKernelConstruction* ctx) : TrainerOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("send", &send_));
  }

 protected:
  void Run(OpKernelContext* ctx, WorkerPtr worker, DoneCallback done) override {
    int64_t iteration;
    OP_REQUIRES_OK_ASYNC(ctx, ReadInteger(ctx, "iteration", 0, &iteration),
                         done);
    std::optional<Tensor> update;
    if (send_) {
      OP_REQUIRES_OK_ASYNC(ctx, CheckUpdate(ctx->input(2)), done);
      update = ctx->input(2);
    }
    worker->Enter(iteration, std::move(update),
                  [ctx, worker, done](Worker::Answer answer) {
                    ctx->SetStatus(answer == Worker::Answer::kBroken
                                       ? Broken(ctx, worker.get())
                                       : Ended(answer));
                    done();
                  });
  }

 private:
  bool send_;
};

class HopSendOp : public TrainerOp {
 public:
  using TrainerOp::TrainerOp;

 protected:
  void Run(OpKernelContext* ctx, WorkerPtr worker, DoneCallback done) override {
    OP_REQUIRES_OK_ASYNC(ctx, CheckUpdate(ctx->input(1)), done);
    worker->Send(ctx->input(1), [ctx, done](Worker::Answer answer) {
      ctx->SetStatus(Ended(answer));
      done();
    });
  }
};

class HopReceiveOp : public TrainerOp {
 public:
  explicit HopReceiveOp(OpKernelConstruction* ctx) : TrainerOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("relative", &relative_));
  }

 protected:
  void Run(OpKernelContext* ctx, WorkerPtr worker, DoneCallback done) override {
    int64_t iteration;
    OP_REQUIRES_OK_ASYNC(ctx, ReadInteger(ctx, "iteration", 0, &iteration),
                         done);
    worker->Receive(iteration, [this, ctx, worker, done](
                                   Worker::Answer answer,
                                   std::vector<Worker::Received> received) {
      Continue(ctx, [this, ctx, worker, done, answer,
                     received = std::move(received)] {
        absl::Status status = Ended(answer);
        if (status.ok()) {
          status = AverageAny(ctx, dtype_, received,
                              relative_ ? &ctx->input(2) : nullptr);
        }
        if (status.ok()) worker->Reduced();
        ctx->SetStatus(status);
        done();
      });
    });
  }

 private:
  tensorflow::DataType dtype_;
  bool relative_;
};

#define REGISTER_HOP(name) \
  REGISTER_KERNEL_BUILDER( \
      Name("RecsyncHop" #name).Device(tensorflow::DEVICE_CPU), Hop##name##Op)
REGISTER_HOP(Worker);
REGISTER_HOP(Begin);
REGISTER_HOP(Next);
REGISTER_HOP(Enter);
REGISTER_HOP(Send);
REGISTER_HOP(Receive);
#undef REGISTER_HOP

}  // namespace
}  // namespace recsync
