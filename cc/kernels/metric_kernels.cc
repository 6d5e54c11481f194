// Kernels of the metrics.

#include <algorithm>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/click_metrics.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

template <typename T>
absl::Span<const T> SpanOf(const Tensor& tensor) {
  return {tensor.flat<T>().data(), static_cast<size_t>(tensor.NumElements())};
}

// Reads labels, predictions and weights, from an input on.
template <typename T>
absl::Status ReadExamples(OpKernelContext* ctx, int first,
                          Examples<T>* examples) {
  const Tensor& labels = ctx->input(first);
  const Tensor& predictions = ctx->input(first + 1);
  const Tensor& weights = ctx->input(first + 2);
  if (!TensorShapeUtils::IsVector(labels.shape())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "labels must be a vector, not ", labels.shape().DebugString()));
  }
  if (predictions.shape() != labels.shape()) {
    return absl::InvalidArgumentError(
        absl::StrCat("predictions must be shaped like labels, ",
                     labels.shape().DebugString(), ", not ",
                     predictions.shape().DebugString()));
  }
  if (weights.shape() != labels.shape() &&
      weights.shape() != TensorShape({1})) {
    return absl::InvalidArgumentError(absl::StrCat(
        "weights must be shaped like labels, ", labels.shape().DebugString(),
        ", or [1], not ", weights.shape().DebugString()));
  }
  *examples = {SpanOf<T>(labels), SpanOf<T>(predictions), SpanOf<T>(weights)};
  return absl::OkStatus();
}

// The number of buckets, of each label.
absl::StatusOr<size_t> CountBuckets(const Tensor& buckets) {
  if (buckets.dims() != 2 || buckets.dim_size(0) != 2 ||
      buckets.dim_size(1) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("buckets must be [2, at least 1], not ",
                     buckets.shape().DebugString()));
  }
  return static_cast<size_t>(buckets.dim_size(1));
}

template <typename T>
class AddLogLossOp : public OpKernel {
 public:
  explicit AddLogLossOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("from_logits", &from_logits_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &epsilon_));
    OP_REQUIRES(ctx, epsilon_ > 0.0f && epsilon_ < 0.5f,
                absl::InvalidArgumentError(absl::StrCat(
                    "epsilon must be between 0 and 0.5, not ", epsilon_)));
  }

  void Compute(OpKernelContext* ctx) override {
    LogLossSums sums;
    double* parts[] = {&sums.loss, &sums.label, &sums.weight};
    const char* names[] = {"loss_sum", "label_sum", "weight_sum"};
    for (int i = 0; i < 3; ++i) {
      const Tensor& sum = ctx->input(i);
      OP_REQUIRES(
          ctx, TensorShapeUtils::IsScalar(sum.shape()),
          absl::InvalidArgumentError(absl::StrCat(
              names[i], " must be a scalar, not ", sum.shape().DebugString())));
      *parts[i] = sum.scalar<double>()();
    }
    Examples<T> examples;
    OP_REQUIRES_OK(ctx, ReadExamples(ctx, 3, &examples));
    AddLogLoss(examples, from_logits_, epsilon_, sums);
    for (int i = 0; i < 3; ++i) {
      Tensor* sum;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, TensorShape({}), &sum));
      sum->scalar<double>()() = *parts[i];
    }
  }

 private:
  bool from_logits_;
  float epsilon_;
};

template <typename T>
class AddScoresOp : public OpKernel {
 public:
  explicit AddScoresOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("from_logits", &from_logits_));
    std::string spacing;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spacing", &spacing));
    spacing_ = spacing == "logit" ? Spacing::kLogit : Spacing::kLinear;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& buckets = ctx->input(0);
    const absl::StatusOr<size_t> count = CountBuckets(buckets);
    OP_REQUIRES_OK(ctx, count.status());
    Examples<T> examples;
    OP_REQUIRES_OK(ctx, ReadExamples(ctx, 1, &examples));
    Tensor* sums;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, buckets.shape(), &sums));
    const absl::Span<const double> before = SpanOf<double>(buckets);
    const absl::Span<double> after(sums->flat<double>().data(), before.size());
    std::copy(before.begin(), before.end(), after.begin());
    AddScores(examples, from_logits_, spacing_, after.subspan(*count),
              after.subspan(0, *count));
  }

 private:
  bool from_logits_;
  Spacing spacing_;
};

class AreaUnderCurveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& buckets = ctx->input(0);
    const absl::StatusOr<size_t> count = CountBuckets(buckets);
    OP_REQUIRES_OK(ctx, count.status());
    Tensor* area;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &area));
    const absl::Span<const double> sums = SpanOf<double>(buckets);
    area->scalar<double>()() =
        AreaUnderCurve(sums.subspan(*count), sums.subspan(0, *count));
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RecsyncAreaUnderCurve").Device(tensorflow::DEVICE_CPU),
    AreaUnderCurveOp);

#define REGISTER_METRICS(T)                                   \
  REGISTER_KERNEL_BUILDER(Name("RecsyncAddLogLoss")           \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          AddLogLossOp<T>);                   \
  REGISTER_KERNEL_BUILDER(Name("RecsyncAddScores")            \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          AddScoresOp<T>);
REGISTER_METRICS(float)
REGISTER_METRICS(double)
#undef REGISTER_METRICS

}  // namespace
}  // namespace recsync
