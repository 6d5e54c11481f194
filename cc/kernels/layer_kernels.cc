// Kernels of mean-normalization.

#include "absl/strings/str_cat.h"
#include "cc/engine/mean_normalization.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"

namespace recsync {
namespace {

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

}  // namespace
}  // namespace recsync
