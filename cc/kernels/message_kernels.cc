// Kernels that put messages together and take them apart.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/message_pieces.h"
#include "cc/kernels/variable_access.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_util.h"

namespace recsync {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

// Reads the attribute `groups`, the sizes of groups of N pieces.
absl::Status ReadGroups(OpKernelConstruction* ctx,
                        std::vector<int64_t>* groups) {
  int64_t n;
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(ctx->GetAttr("groups", groups));
  int64_t total = 0;
  for (const int64_t pieces : *groups) {
    if (pieces < 0 || pieces > n) total = -1;
    if (total < 0) break;
    total += pieces;
  }
  if (total == n) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("groups must be counts of pieces that add up to ", n,
                   ", not [", absl::StrJoin(*groups, ", "), "]"));
}

template <typename T>
class PackOp : public OpKernel {
 public:
  explicit PackOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadGroups(ctx, &groups_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList pieces;
    OP_REQUIRES_OK(ctx, ctx->input_list("pieces", &pieces));
    std::vector<int64_t> sizes;
    sizes.reserve(pieces.size());
    for (const Tensor& piece : pieces) sizes.push_back(piece.NumElements());
    const std::vector<int64_t> starts = MessageStarts<T>(sizes, groups_);
    Tensor* packed;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({starts.back()}), &packed));
    T* to = packed->flat<T>().data();
    for (int64_t i = 0; i < pieces.size(); ++i) {
      CopyPiece(ctx, pieces[i].template flat<T>().data(), sizes[i],
                to + starts[i]);
    }
    FillGaps(sizes, starts, to);
  }

 private:
  std::vector<int64_t> groups_;
};

template <typename T>
class UnpackOp : public OpKernel {
 public:
  explicit UnpackOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadGroups(ctx, &groups_));
  }

  // In most messages hardly anything is copied, and no thread need be woken.
  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& packed = ctx->input(0);
    const Tensor& given = ctx->input(1);
    OpOutputList pieces;
    OP_REQUIRES_OK(ctx, ctx->output_list("pieces", &pieces));
    const int64_t n = pieces.size();
    OP_REQUIRES(
        ctx, TensorShapeUtils::IsVector(packed.shape()),
        absl::InvalidArgumentError(absl::StrCat("packed must be a vector, not ",
                                                packed.shape().DebugString())));
    OP_REQUIRES(ctx, given.shape() == TensorShape({n}),
                absl::InvalidArgumentError(
                    absl::StrCat("sizes must have shape [", n, "], not ",
                                 given.shape().DebugString())));
    const int64_t total = packed.NumElements();
    std::vector<int64_t> sizes(given.flat<int64_t>().data(),
                               given.flat<int64_t>().data() + n);
    const bool rest = sizes.back() == -1;
    if (rest) sizes.back() = 0;
    for (const int64_t size : sizes) {
      OP_REQUIRES(ctx, 0 <= size && size <= total,
                  absl::InvalidArgumentError(absl::StrCat(
                      "sizes must be sizes of pieces of ", total,
                      " elements, the last one -1 for the rest, not ", size)));
    }
    std::vector<int64_t> starts = MessageStarts<T>(sizes, groups_);
    if (rest && starts.back() < total) {
      sizes.back() = 1;  // At least: there may be a gap before it.
      starts = MessageStarts<T>(sizes, groups_);
      sizes.back() = std::max<int64_t>(total - starts[n - 1], 1);
      starts.back() = starts[n - 1] + sizes.back();
    }
    OP_REQUIRES(ctx, starts.back() == total,
                absl::InvalidArgumentError(
                    absl::StrCat("sizes must be those of the pieces of ", total,
                                 " elements, not of ", starts.back())));
    for (int64_t i = 0; i < n; ++i) {
      Tensor piece = packed.Slice(starts[i], starts[i] + sizes[i]);
      if (sizes[i] > 0 && piece.IsAligned()) {
        pieces.set(i, piece);
        continue;
      }
      Tensor* copy;
      OP_REQUIRES_OK(ctx, pieces.allocate(i, TensorShape({sizes[i]}), &copy));
      CopyPiece(ctx, packed.flat<T>().data() + starts[i], sizes[i],
                copy->flat<T>().data());
    }
  }

 private:
  std::vector<int64_t> groups_;
};

// The values of variables of any types, as bytes.
class ReadPackedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> owned;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "resources", &owned));
    OpInputList tails;
    OP_REQUIRES_OK(ctx, ctx->input_list("tails", &tails));
    // As a stock read does: who writes meanwhile writes elsewhere.
    std::vector<Tensor> values;
    values.reserve(owned.size());
    int64_t size = 0;
    for (const Tensor& tail : tails) size += tail.TotalBytes();
    for (const VariablePtr& variable : owned) {
      const tensorflow::tf_shared_lock lock(*variable->mu());
      const Tensor& value = *variable->tensor();
      OP_REQUIRES(ctx, tensorflow::DataTypeCanUseMemcpy(value.dtype()),
                  absl::InvalidArgumentError(absl::StrCat(
                      "resources must be variables of numbers, not of ",
                      tensorflow::DataTypeString(value.dtype()))));
      // After a stock scatter, others write to the buffer itself.
      values.push_back(variable->copy_on_read_mode.load()
                           ? tensorflow::tensor::DeepCopy(value)
                           : value);
      size += PaddedBytes(values.back().TotalBytes());
    }
    uint8_t* to;
    OP_REQUIRES_OK(ctx, MakeVector(ctx, 0, size, &to));
    for (const Tensor& value : values) {
      to = CopyPadded(value.tensor_data(), PaddedBytes(value.TotalBytes()), to);
    }
    for (const Tensor& tail : tails) {
      to = CopyPadded(tail.tensor_data(), tail.TotalBytes(), to);
    }
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RecsyncReadPacked").Device(tensorflow::DEVICE_CPU), ReadPackedOp);

#define REGISTER_MESSAGES(T)                                  \
  REGISTER_KERNEL_BUILDER(Name("RecsyncPack")                 \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          PackOp<T>);                         \
  REGISTER_KERNEL_BUILDER(Name("RecsyncUnpack")               \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          UnpackOp<T>);
REGISTER_MESSAGES(float)
REGISTER_MESSAGES(int64_t)
#undef REGISTER_MESSAGES

}  // namespace
}  // namespace recsync
