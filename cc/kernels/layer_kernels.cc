// Kernels of mean-normalization and of the artificial compute time.

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/engine/mean_normalization.h"
#include "cc/engine/mutex.h"
#include "cc/engine/timer.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"

namespace recsync {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status ReadEpsilon(OpKernelConstruction* ctx, float* epsilon) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("epsilon", epsilon));
  if (*epsilon > 0.0f) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("epsilon must be positive, not ", *epsilon));
}

absl::Status CheckInputs(const Tensor& x, const Tensor& first,
                         const char* first_name, const Tensor& second,
                         const char* second_name) {
  if (x.dims() != 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "x must be [rows, features], not ", x.shape().DebugString()));
  }
  const TensorShape per_feature({x.dim_size(1)});
  if (first.shape() != per_feature || second.shape() != per_feature) {
    return absl::InvalidArgumentError(absl::StrCat(
        first_name, " and ", second_name, " must have shape ",
        per_feature.DebugString(), ", not ", first.shape().DebugString(),
        " and ", second.shape().DebugString()));
  }
  return absl::OkStatus();
}

template <typename T>
class MeanNormalizeOp : public OpKernel {
 public:
  explicit MeanNormalizeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadEpsilon(ctx, &epsilon_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    const Tensor& alpha = ctx->input(1);
    const Tensor& beta = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckInputs(x, alpha, "alpha", beta, "beta"));
    Tensor* y;
    Tensor* mean;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x.shape(), &y));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, alpha.shape(), &mean));
    MeanNormalize(x.flat<T>().data(), alpha.flat<float>().data(),
                  beta.flat<float>().data(), epsilon_, x.dim_size(0),
                  x.dim_size(1), y->flat<T>().data(),
                  mean->flat<float>().data());
  }

 private:
  float epsilon_;
};

template <typename T>
class MeanNormalizeGradOp : public OpKernel {
 public:
  explicit MeanNormalizeGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadEpsilon(ctx, &epsilon_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& dy = ctx->input(0);
    const Tensor& x = ctx->input(1);
    const Tensor& alpha = ctx->input(2);
    const Tensor& mean = ctx->input(3);
    OP_REQUIRES_OK(ctx, CheckInputs(x, alpha, "alpha", mean, "mean"));
    OP_REQUIRES(ctx, dy.shape() == x.shape(),
                absl::InvalidArgumentError(absl::StrCat(
                    "dy must be shaped like x, ", x.shape().DebugString(),
                    ", not ", dy.shape().DebugString())));
    Tensor* dx;
    Tensor* dalpha;
    Tensor* dbeta;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x.shape(), &dx));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, alpha.shape(), &dalpha));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, alpha.shape(), &dbeta));
    MeanNormalizeGrad(dy.flat<T>().data(), x.flat<T>().data(),
                      alpha.flat<float>().data(), mean.flat<float>().data(),
                      epsilon_, x.dim_size(0), x.dim_size(1),
                      dx->flat<T>().data(), dalpha->flat<float>().data(),
                      dbeta->flat<float>().data());
  }

 private:
  float epsilon_;
};

// Ends its wait on the timer's thread, or at once when the step is cancelled.
class DelayOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Tensor& input = ctx->input(0);
    OP_REQUIRES_ASYNC(
        ctx, input.NumElements() == 1,
        absl::InvalidArgumentError(absl::StrCat(
            "seconds must be a scalar, not ", input.shape().DebugString())),
        done);
    const float seconds = input.flat<float>()(0);
    OP_REQUIRES_ASYNC(
        ctx, seconds >= 0.0f && std::isfinite(seconds),
        absl::InvalidArgumentError(absl::StrCat(
            "seconds must be finite and at least 0, not ", seconds)),
        done);
    // Whoever takes `done` out of the shared state ends the op.
    auto wait = std::make_shared<WaitState>();
    wait->done = std::move(done);
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    if (manager != nullptr) {
      wait->token = manager->get_cancellation_token();
      const bool registered =
          manager->RegisterCallback(wait->token, [ctx, wait] {
            DoneCallback end = wait->Take();
            if (end == nullptr) return;
            ctx->SetStatus(absl::CancelledError("the delay was cancelled"));
            end();
          });
      OP_REQUIRES_ASYNC(ctx, registered,
                        absl::CancelledError("the delay was cancelled"),
                        wait->Take());
    }
    timer_.CallAfter(seconds, [manager, wait] {
      DoneCallback end = wait->Take();
      // A cancelled op has ended already, and `manager` may be gone.
      if (end == nullptr) return;
      if (manager != nullptr) manager->TryDeregisterCallback(wait->token);
      end();
    });
  }

 private:
  struct WaitState {
    DoneCallback Take() ABSL_LOCKS_EXCLUDED(mu) {
      MutexLock lock(&mu);
      return std::exchange(done, nullptr);
    }
    Mutex mu;
    DoneCallback done ABSL_GUARDED_BY(mu);
    tensorflow::CancellationToken token;
  };

  Timer timer_;
};

#define REGISTER_LAYERS(T)                                    \
  REGISTER_KERNEL_BUILDER(Name("RecsyncMeanNormalize")        \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          MeanNormalizeOp<T>);                \
  REGISTER_KERNEL_BUILDER(Name("RecsyncMeanNormalizeGrad")    \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          MeanNormalizeGradOp<T>);
REGISTER_LAYERS(float)
REGISTER_LAYERS(Eigen::half)
REGISTER_LAYERS(Eigen::bfloat16)
#undef REGISTER_LAYERS

REGISTER_KERNEL_BUILDER(Name("RecsyncDelay").Device(tensorflow::DEVICE_CPU),
                        DelayOp);

}  // namespace
}  // namespace recsync
