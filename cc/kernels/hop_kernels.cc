// Kernels of decentralized training: one resource for each worker, beside its
// parameters, which its own steps and the loops of its edges use.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/engine/hop_worker.h"
#include "cc/engine/limits.h"
#include "cc/engine/weighted_average.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/variable_access.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace recsync {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;

using Worker = HopWorker<Tensor>;
using WorkerPtr = std::shared_ptr<Worker>;

// What the device's resource manager holds. Ops that wait share the worker but
// not this, so that destroying the resource ends them.
class HopWorkerResource : public tensorflow::ResourceBase {
 public:
  explicit HopWorkerResource(const HopOptions& options)
      : worker_(std::make_shared<Worker>(options)) {}
  ~HopWorkerResource() override { worker_->Close(); }

  const WorkerPtr& worker() const { return worker_; }

  std::string DebugString() const override {
    const HopOptions& options = worker_->options();
    return absl::StrCat("worker of decentralized training with in-neighbors ",
                        absl::StrJoin(options.in_neighbors, ", "),
                        " and out-neighbors ",
                        absl::StrJoin(options.out_neighbors, ", "));
  }

 private:
  const WorkerPtr worker_;
};

absl::Status LookupWorker(OpKernelContext* ctx, WorkerPtr* worker) {
  const Tensor& input = ctx->input(0);
  if (input.NumElements() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker must be one resource handle, not ",
                     input.shape().DebugString()));
  }
  tensorflow::core::RefCountPtr<HopWorkerResource> resource;
  TF_RETURN_IF_ERROR(tensorflow::LookupResource(
      ctx, input.flat<tensorflow::ResourceHandle>()(0), &resource));
  *worker = resource->worker();
  return absl::OkStatus();
}

// Reads input `i`, a scalar from `least` to `most`.
absl::Status ReadScalar(OpKernelContext* ctx, int i, const char* name,
                        int64_t least, int64_t* value,
                        int64_t most = kMostSteps) {
  const Tensor& input = ctx->input(i);
  if (input.dims() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a scalar, not ", input.shape().DebugString()));
  }
  *value = input.scalar<int64_t>()();
  if (*value >= least && *value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " must be from ", least, " to ", most, ", not ", *value));
}

absl::Status SetScalar(OpKernelContext* ctx, int i, int64_t value) {
  Tensor* output;
  TF_RETURN_IF_ERROR(ctx->allocate_output(i, TensorShape({}), &output));
  output->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

absl::Status SetVector(OpKernelContext* ctx, int i,
                       const std::vector<int64_t>& values) {
  Tensor* output;
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      i, TensorShape({static_cast<int64_t>(values.size())}), &output));
  std::copy(values.begin(), values.end(), output->flat<int64_t>().data());
  return absl::OkStatus();
}

// The error that an invariant of the protocol does not hold. Not Internal, as
// TensorFlow's own errors between workers: calls with those are made again.
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

// The error of a wait that ended without what it was for.
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

bool IsNeighbor(const std::vector<int64_t>& neighbors, int64_t neighbor) {
  return std::find(neighbors.begin(), neighbors.end(), neighbor) !=
         neighbors.end();
}

// An op of the trainer that may wait; cancelling it ends the wait.
class TrainerOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final {
    WorkerPtr worker;
    OP_REQUIRES_OK_ASYNC(ctx, LookupWorker(ctx, &worker), done);
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    // Before the registration: a cancellation counts from there on, also before
    // anything waits.
    const int64_t call = worker->BeginCall();
    DoneCallback end = done;
    if (manager != nullptr) {
      const tensorflow::CancellationToken token =
          manager->get_cancellation_token();
      const bool registered = manager->RegisterCallback(
          token, [worker, call] { worker->InterruptCall(call); });
      OP_REQUIRES_ASYNC(ctx, registered, Ended(Worker::Answer::kCancelled),
                        done);
      end = [manager, token, done] {
        manager->TryDeregisterCallback(token);
        done();
      };
    }
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

class HopWorkerOp : public OpKernel {
 public:
  explicit HopWorkerOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<float> weights;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &name_));
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
    OP_REQUIRES(ctx, !name_.empty(),
                absl::InvalidArgumentError("shared_name must not be empty"));
    OP_REQUIRES_OK(ctx, Check());
  }

  void Compute(OpKernelContext* ctx) override {
    const auto handle = tensorflow::MakeResourceHandle<HopWorkerResource>(
        ctx, container_, name_);
    tensorflow::core::RefCountPtr<HopWorkerResource> resource;
    OP_REQUIRES_OK(
        ctx, tensorflow::LookupOrCreateResource<HopWorkerResource>(
                 ctx, handle, &resource, [this](HopWorkerResource** made) {
                   *made = new HopWorkerResource(options_);
                   return absl::OkStatus();
                 }));
    OP_REQUIRES_OK(ctx, CheckSame(resource->worker()->options()));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    output->scalar<tensorflow::ResourceHandle>()() = handle;
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

  // Refuses a worker that was made with other options than these.
  absl::Status CheckSame(const HopOptions& found) const {
    const auto theirs = Named(found);
    const auto wanted = Named(options_);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (theirs[i] == wanted[i]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "shared_name ", name_, " is a worker with ", theirs[i].first, "=",
          theirs[i].second, ", not ", wanted[i].second));
    }
    return absl::OkStatus();
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

  std::string container_;
  std::string name_;
  HopOptions options_;
};

class HopBeginOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    int64_t first;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 1, "first", 0, &first));
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
        if (ctx->status().ok()) ctx->SetStatus(SetScalar(ctx, 0, next));
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
    OP_REQUIRES_OK_ASYNC(ctx, ReadScalar(ctx, 1, "iteration", 0, &iteration),
                         done);
    std::optional<Tensor> update;
    if (send_) update = ctx->input(2);
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
    OP_REQUIRES_OK_ASYNC(ctx, ReadScalar(ctx, 1, "iteration", 0, &iteration),
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

class HopCollectOp : public AsyncOpKernel {
 public:
  explicit HopCollectOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    WorkerPtr worker;
    int64_t neighbor;
    OP_REQUIRES_OK_ASYNC(ctx, LookupWorker(ctx, &worker), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadScalar(ctx, 1, "neighbor", -1, &neighbor),
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
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    tensorflow::CancellationToken token = 0;
    if (manager != nullptr) {
      token = manager->get_cancellation_token();
      OP_REQUIRES_ASYNC(ctx, manager->RegisterCallback(token, cancel),
                        Ended(Worker::Answer::kCancelled), done);
    }
    const bool is_neighbor = worker->Collect(
        neighbor,
        [this, ctx, manager, token, done](Worker::Answer answer,
                                          Worker::Parcel parcel) {
          if (manager != nullptr) manager->TryDeregisterCallback(token);
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
    if (manager != nullptr) manager->TryDeregisterCallback(token);
    ctx->SetStatus(absl::InvalidArgumentError(
        absl::StrCat("worker ", neighbor, " is no neighbor")));
    done();
  }

 private:
  absl::Status Output(OpKernelContext* ctx, Worker::Answer answer,
                      Worker::Parcel parcel) const {
    if (answer == Worker::Answer::kCancelled) return Ended(answer);
    TF_RETURN_IF_ERROR(SetScalar(ctx, 0, parcel.progress));
    TF_RETURN_IF_ERROR(SetScalar(ctx, 1, parcel.iteration));
    if (parcel.update.has_value()) {
      ctx->set_output(2, *parcel.update);
    } else {
      Tensor* nothing;
      TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({0}), &nothing));
    }
    Tensor* open;
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, TensorShape({}), &open));
    open->scalar<bool>()() = answer == Worker::Answer::kOk;
    return SetScalar(ctx, 4, parcel.number);
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
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 1, "neighbor", 0, &neighbor));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 2, "number", 0, &number));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 3, "progress", -1, &progress));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 4, "iteration", -1, &iteration));
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
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 1, "neighbor", 0, &neighbor));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 2, "number", 1, &number));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 3, "iteration", 0, &iteration));
    OP_REQUIRES(ctx, IsNeighbor(worker->options().in_neighbors, neighbor),
                absl::InvalidArgumentError(absl::StrCat(
                    "neighbor ", neighbor, " is not an in-neighbor")));
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
    OP_REQUIRES_OK(ctx, SetScalar(ctx, 0, iteration));
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
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 1, "neighbor", -1, &neighbor));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 2, "number", 0, &number));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 3, "iteration", -1, &iteration));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 4, "began", 0, &began));
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
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 1, "neighbor", 0, &neighbor));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 2, "since", 0, &since));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 3, "until", -1, &until,
                                   std::numeric_limits<int64_t>::max()));
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, 0, worker->SetNeighbor(neighbor, since, until)));
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
    const Worker::Counts& counts = state.counts;
    OP_REQUIRES_OK(ctx, SetScalar(ctx, 0, state.iteration));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, 1, static_cast<int64_t>(state.phase)));
    Tensor* seconds;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({}), &seconds));
    seconds->scalar<double>()() = state.seconds;
    OP_REQUIRES_OK(ctx, SetVector(ctx, 3, state.missing));
    OP_REQUIRES_OK(ctx, SetVector(ctx, 4, state.tokens));
    OP_REQUIRES_OK(ctx, SetVector(ctx, 5, state.declined));
    OP_REQUIRES_OK(
        ctx, SetVector(ctx, 6,
                       {counts.iterations, counts.used, counts.jumps,
                        counts.skipped, counts.sent, counts.replaced,
                        counts.waiting_for_updates, counts.waiting_for_tokens,
                        state.updates.unusable, state.updates.superseded,
                        state.queued, state.lost_events, state.awaited}));
  }
};

class HopEventsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    WorkerPtr worker;
    OP_REQUIRES_OK(ctx, LookupWorker(ctx, &worker));
    const std::vector<Worker::Event> events = worker->TakeEvents();
    Tensor* output;
    OP_REQUIRES_OK(
        ctx,
        ctx->allocate_output(
            0, TensorShape({static_cast<int64_t>(events.size()), 5}), &output));
    auto rows = output->matrix<int64_t>();
    for (size_t i = 0; i < events.size(); ++i) {
      rows(i, 0) = static_cast<int64_t>(events[i].span);
      rows(i, 1) = events[i].begin;
      rows(i, 2) = events[i].end;
      rows(i, 3) = events[i].iteration;
      rows(i, 4) = events[i].neighbor;
    }
  }
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
