// Kernels that copy parameters and move them towards others.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/interpolation.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/update_op.h"
#include "cc/kernels/variable_access.h"
#include "cc/kernels/write_session.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The elements of variables, which are checked to be float.
absl::Status ReadSizes(const std::vector<VariablePtr>& variables,
                       std::vector<int64_t>* sizes, int64_t* total) {
  *total = 0;
  for (const VariablePtr& variable : variables) {
    const ReadSession session({variable.get()});
    TF_RETURN_IF_ERROR(
        CheckVariable(*variable, "variables", tensorflow::DT_FLOAT));
    sizes->push_back(variable->tensor()->NumElements());
    *total += sizes->back();
  }
  return absl::OkStatus();
}

absl::Status CheckSize(const VariablePtr& variable, int64_t size) {
  if (variable->tensor()->NumElements() == size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a variable changed its shape while it was synchronized");
}

class SnapshotOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> variables;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variables", &variables));
    std::vector<int64_t> sizes;
    int64_t total;
    OP_REQUIRES_OK(ctx, ReadSizes(variables, &sizes, &total));
    Tensor* packed;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({total}), &packed));
    float* to = packed->flat<float>().data();
    for (size_t i = 0; i < variables.size(); ++i) {
      const ReadSession session({variables[i].get()});
      OP_REQUIRES_OK(ctx, CheckSize(variables[i], sizes[i]));
      LoadHogwild(Data<float>(variables[i].get()), sizes[i], to);
      to += sizes[i];
    }
  }
};

class InterpolateOp : public OpKernel {
 public:
  explicit InterpolateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("hogwild", &hogwild_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("answer", &answer_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> variables;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variables", &variables));
    const Tensor* target;
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "target", &target));
    float alpha;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "alpha", &alpha));
    OP_REQUIRES(ctx, alpha >= 0.0f && alpha <= 1.0f,
                absl::InvalidArgumentError(
                    absl::StrCat("alpha must be in [0, 1], not ", alpha)));
    std::vector<int64_t> sizes;
    int64_t total;
    OP_REQUIRES_OK(ctx, ReadSizes(variables, &sizes, &total));
    OP_REQUIRES(ctx, target->NumElements() == total,
                absl::InvalidArgumentError(
                    absl::StrCat("target must hold the variables' ", total,
                                 " elements, not ", target->NumElements())));
    Tensor* after;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            0, TensorShape({answer_ ? total : 0}), &after));
    std::vector<tensorflow::Var*> vars;
    for (const VariablePtr& variable : variables) {
      vars.push_back(variable.get());
    }
    OP_REQUIRES_OK(ctx, CheckDistinct(vars));
    const WriteLocks locks(ctx, vars, hogwild_);
    OP_REQUIRES_OK(ctx, locks.status());
    std::vector<Part> parts;
    int64_t first = 0;
    for (size_t i = 0; i < variables.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckSize(variables[i], sizes[i]));
      parts.push_back({Data<float>(vars[i]), first, first + sizes[i]});
      first += sizes[i];
    }
    Move(ctx, parts, alpha, target->flat<float>().data(),
         answer_ ? after->flat<float>().data() : nullptr);
  }

 private:
  // A variable, and which of the packed elements it has.
  struct Part {
    float* own;
    int64_t begin;
    int64_t end;
  };

  // All variables at once: threads meet but once.
  static void Move(OpKernelContext* ctx, const std::vector<Part>& parts,
                   float alpha, const float* from, float* to) {
    const int64_t total = parts.empty() ? 0 : parts.back().end;
    constexpr int64_t kCyclesPerElement = 3;
    ParallelFor(ctx, total, kCyclesPerElement, [&](int64_t begin, int64_t end) {
      for (const Part& part : parts) {
        const int64_t start = std::max(begin, part.begin);
        const int64_t size = std::min(end, part.end) - start;
        if (size <= 0) continue;
        Interpolate(from + start, alpha, size, part.own + (start - part.begin),
                    to == nullptr ? nullptr : to + start);
      }
    });
  }

  bool hogwild_;
  bool answer_;
};

REGISTER_KERNEL_BUILDER(Name("RecsyncSnapshot").Device(tensorflow::DEVICE_CPU),
                        SnapshotOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncInterpolate").Device(tensorflow::DEVICE_CPU), InterpolateOp);

}  // namespace
}  // namespace recsync
