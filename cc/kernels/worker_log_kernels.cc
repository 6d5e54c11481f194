// Kernels of the log of what a worker has done: batches, and events.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/batch_log.h"
#include "cc/engine/event_log.h"
#include "cc/engine/mutex.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/resource_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;

class WorkerLogResource : public tensorflow::ResourceBase {
 public:
  BatchLog& batches() { return batches_; }

  void Note(const std::vector<Event>& events) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    for (const Event& event : events) events_.Note(event);
  }

  // Whether it was not for so many seconds; from now on it was.
  bool IsDue(double seconds) ABSL_LOCKS_EXCLUDED(mu_) {
    const auto now = std::chrono::steady_clock::now();
    MutexLock lock(&mu_);
    const std::chrono::duration<double> since = now - due_;
    if (was_due_ && since.count() < seconds) return false;
    was_due_ = true;
    due_ = now;
    return true;
  }

  // The events since the last call, and how many of them are missing.
  std::vector<Event> Take(int64_t* lost) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    *lost = events_.lost() - known_lost_;
    known_lost_ = events_.lost();
    return events_.Take();
  }

  std::string DebugString() const override { return "worker log"; }

 private:
  BatchLog batches_;
  Mutex mu_;
  EventLog events_ ABSL_GUARDED_BY(mu_);
  int64_t known_lost_ ABSL_GUARDED_BY(mu_) = 0;
  bool was_due_ ABSL_GUARDED_BY(mu_) = false;
  std::chrono::steady_clock::time_point due_ ABSL_GUARDED_BY(mu_);
};

using ResourcePtr = tensorflow::core::RefCountPtr<WorkerLogResource>;

class WorkerLogOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(
        ctx, WriteScalar(ctx, 0,
                         ResourceHandle::MakeRefCountingHandle(
                             new WorkerLogResource, ctx->device()->name())));
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
    resource->batches().Note(number);
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
    int64_t first;
    std::vector<int64_t> numbers;
    OP_REQUIRES(ctx, resource->batches().Read(known, &first, &numbers),
                absl::InvalidArgumentError(absl::StrCat(
                    "known must be from 0 to the number of batches noted, not ",
                    known)));
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, 1, first));
    int64_t* to;
    OP_REQUIRES_OK(ctx, MakeVector(ctx, 0, numbers.size(), &to));
    std::copy(numbers.begin(), numbers.end(), to);
  }
};

class ReportIsDueOp : public OpKernel {
 public:
  explicit ReportIsDueOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seconds", &seconds_));
    OP_REQUIRES(ctx, seconds_ >= 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "seconds must be at least 0, not ", seconds_)));
  }

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "log", &resource));
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, 0, resource->IsDue(seconds_)));
  }

 private:
  float seconds_ = 0;
};

class NoteEventsOp : public OpKernel {
 public:
  explicit NoteEventsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int> activities;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("activities", &activities));
    for (int activity : activities) {
      OP_REQUIRES(ctx, activity >= 0 && activity < kActivities,
                  absl::InvalidArgumentError(
                      absl::StrCat("activities must be from 0 to ",
                                   kActivities - 1, ", not ", activity)));
      activities_.push_back(static_cast<Activity>(activity));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    int64_t iteration;
    const tensorflow::Tensor* input;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "log", &resource));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "iteration", &iteration));
    OP_REQUIRES_OK(ctx, ctx->input("times", &input));
    const int64_t count = activities_.size();
    OP_REQUIRES(ctx, input->shape() == tensorflow::TensorShape({count, 2}),
                absl::InvalidArgumentError(
                    absl::StrCat("times must be [", count, ", 2], not ",
                                 input->shape().DebugString())));
    const auto times = input->matrix<double>();
    std::vector<Event> events;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j : {0, 1}) {
        OP_REQUIRES(ctx, std::abs(times(i, j)) <= kMostSeconds,
                    absl::InvalidArgumentError(absl::StrCat(
                        "times must be from -", kMostSeconds, " to ",
                        kMostSeconds, ", not ", times(i, j))));
      }
      const auto begin = static_cast<int64_t>(1e6 * times(i, 0));
      const auto end = static_cast<int64_t>(1e6 * times(i, 1));
      // A machine's clock may be set back.
      events.push_back(
          {activities_[i], begin, std::max(begin, end), iteration});
    }
    resource->Note(events);
  }

 private:
  static constexpr double kMostSeconds = 1e11;  // 3,000 years

  std::vector<Activity> activities_;
};

class TakeEventsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "log", &resource));
    int64_t lost;
    OP_REQUIRES_OK(ctx, WriteEvents(ctx, 0, resource->Take(&lost)));
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, 1, lost));
  }
};

REGISTER_KERNEL_BUILDER(Name("RecsyncWorkerLog").Device(tensorflow::DEVICE_CPU),
                        WorkerLogOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncReportIsDue").Device(tensorflow::DEVICE_CPU), ReportIsDueOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncNoteEvents").Device(tensorflow::DEVICE_CPU), NoteEventsOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncTakeEvents").Device(tensorflow::DEVICE_CPU), TakeEventsOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncNoteBatch").Device(tensorflow::DEVICE_CPU),
                        NoteBatchOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncNotedBatches").Device(tensorflow::DEVICE_CPU), NotedBatchesOp);

}  // namespace
}  // namespace recsync
