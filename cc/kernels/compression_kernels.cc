// Kernels of compressed activations and gradients.

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "cc/engine/compression.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/parallel_for.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::core::RefCountPtr;

// Cycles for a value.
constexpr int64_t kQuantizeCost = 2;
constexpr int64_t kDequantizeCost = 1;

absl::Status CheckHasColumns(const char* name, const Tensor& tensor) {
  if (tensor.dims() >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be [..., columns], not a scalar"));
}

TensorShape ShapeOfScales(TensorShape shape) {
  shape.RemoveLastDims(1);
  return shape;
}

class EncodeInt8Op : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckHasColumns("x", x));
    Tensor* codes;
    Tensor* scales;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x.shape(), &codes));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(1, ShapeOfScales(x.shape()), &scales));
    const int64_t columns = x.dim_size(x.dims() - 1);
    const float* from = x.flat<float>().data();
    int8_t* to = codes->flat<int8_t>().data();
    float* scale = scales->flat<float>().data();
    ParallelFor(ctx, scales->NumElements(), kQuantizeCost * (columns + 8),
                [=](int64_t begin, int64_t end) {
                  for (int64_t r = begin; r < end; ++r) {
                    scale[r] = QuantizeRow(from + r * columns, columns,
                                           to + r * columns);
                  }
                });
  }
};

class DecodeInt8Op : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& codes = ctx->input(0);
    const Tensor& scales = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckHasColumns("codes", codes));
    const TensorShape expected = ShapeOfScales(codes.shape());
    OP_REQUIRES(ctx, scales.shape() == expected,
                absl::InvalidArgumentError(absl::StrCat(
                    "scales must have shape ", expected.DebugString(),
                    ", one for each row of codes, not ",
                    scales.shape().DebugString())));
    Tensor* x;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, codes.shape(), &x));
    const int64_t columns = codes.dim_size(codes.dims() - 1);
    const int8_t* from = codes.flat<int8_t>().data();
    const float* scale = scales.flat<float>().data();
    float* to = x->flat<float>().data();
    ParallelFor(ctx, scales.NumElements(), kDequantizeCost * (columns + 8),
                [=](int64_t begin, int64_t end) {
                  for (int64_t r = begin; r < end; ++r) {
                    DequantizeRow(from + r * columns, columns, scale[r],
                                  to + r * columns);
                  }
                });
  }
};

class ErrorFeedbackResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override {
    return "gradients that were not sent yet";
  }
  ErrorFeedback feedback;
};

// TensorFlow's bfloat16 has the bits of ours.
template <typename T>
using EngineType =
    std::conditional_t<std::is_same_v<T, float>, float, BFloat16>;
static_assert(sizeof(Eigen::bfloat16) == sizeof(BFloat16));

template <typename T>
class CompressGradientOp : public OpKernel {
 public:
  explicit CompressGradientOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sparsify", &sparsify_));
    OP_REQUIRES(
        ctx, sparsify_ >= 0.0f && sparsify_ < 1.0f,
        absl::InvalidArgumentError(absl::StrCat(
            "sparsify must be at least 0 and below 1, not ", sparsify_)));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feedback", &feedback_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& gradient = ctx->input(0);
    RefCountPtr<ErrorFeedbackResource> resource;
    if (!feedback_.empty()) {
      OP_REQUIRES_OK(ctx, FindFeedback(ctx, &resource));
    }
    const int64_t count = gradient.NumElements();
    const int64_t kept = KeptCount(count, sparsify_);
    uint8_t* mask;
    T* values;
    OP_REQUIRES_OK(
        ctx, MakeVector<uint8_t>(ctx, 0, kept == count ? 0 : MaskBytes(count),
                                 &mask));
    OP_REQUIRES_OK(ctx, MakeVector<T>(ctx, 1, kept, &values));
    auto* to = reinterpret_cast<EngineType<T>*>(values);
    const float* from = gradient.flat<float>().data();
    if (resource != nullptr) {
      resource->feedback.CompressWith(from, count, kept, mask, to);
    } else {
      Compress(from, count, kept, mask, to, nullptr);
    }
  }

 private:
  // Makes what is not there yet.
  absl::Status FindFeedback(OpKernelContext* ctx,
                            RefCountPtr<ErrorFeedbackResource>* resource) {
    const Tensor& net = ctx->input(1);
    if (net.NumElements() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "net must be one number, not ", net.shape().DebugString()));
    }
    const auto handle = tensorflow::MakeResourceHandle<ErrorFeedbackResource>(
        ctx, "", absl::StrCat(feedback_, "/", net.flat<int64_t>()(0)));
    return tensorflow::LookupOrCreateResource<ErrorFeedbackResource>(
        ctx, handle, resource, [](ErrorFeedbackResource** made) {
          *made = new ErrorFeedbackResource;
          return absl::OkStatus();
        });
  }

  float sparsify_;
  std::string feedback_;
};

template <typename T>
class RestoreGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor *mask, *values, *shape;
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "mask", &mask));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "values", &values));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "shape", &shape));
    TensorShape whole;
    OP_REQUIRES_OK(
        ctx, TensorShape::BuildTensorShape(shape->flat<int64_t>(), &whole));
    const int64_t count = whole.num_elements();
    const int64_t kept = values->NumElements();
    // Before anything is allocated: a mask is an eighth of a byte for each.
    const bool all = mask->NumElements() == 0 && kept == count;
    OP_REQUIRES(ctx, all || mask->NumElements() == MaskBytes(count),
                absl::InvalidArgumentError(absl::StrCat(
                    "mask must have ", MaskBytes(count), " bytes for ", count,
                    " gradients of shape ", whole.DebugString(),
                    ", or none if values has all of them, not ",
                    mask->NumElements(), " with ", kept, " values")));
    const uint8_t* bits = all ? nullptr : mask->flat<uint8_t>().data();
    OP_REQUIRES(ctx, all || MaskFits(bits, count, kept),
                absl::InvalidArgumentError(
                    absl::StrCat("mask must name as many of ", count,
                                 " gradients as there are values, ", kept)));
    Tensor* gradient;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, whole, &gradient));
    Restore(bits,
            reinterpret_cast<const EngineType<T>*>(values->flat<T>().data()),
            count, gradient->flat<float>().data());
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RecsyncEncodeInt8").Device(tensorflow::DEVICE_CPU), EncodeInt8Op);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncDecodeInt8").Device(tensorflow::DEVICE_CPU), DecodeInt8Op);
#define REGISTER_COMPRESSION(T)                               \
  REGISTER_KERNEL_BUILDER(Name("RecsyncCompressGradient")     \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          CompressGradientOp<T>);             \
  REGISTER_KERNEL_BUILDER(Name("RecsyncRestoreGradient")      \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          RestoreGradientOp<T>);
REGISTER_COMPRESSION(float)
REGISTER_COMPRESSION(Eigen::bfloat16)
#undef REGISTER_COMPRESSION

}  // namespace
}  // namespace recsync
