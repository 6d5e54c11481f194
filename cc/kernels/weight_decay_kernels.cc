// Kernels of weight decay: of whole variables at once, of tables' rows when
// they are needed.

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/row_decay.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/log_decays.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/row_roundings.h"
#include "cc/kernels/variable_access.h"
#include "cc/kernels/write_session.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

// Calls f with the values of a variable of float or bfloat16, which are to be
// written. Lock: the variable's, exclusive or by a session.
template <typename F>
void WithValues(Var* variable, const F& f) {
  void* values = variable->tensor()->data();
  if (variable->tensor()->dtype() == tensorflow::DT_BFLOAT16) {
    f(static_cast<BFloat16*>(values));
  } else {
    f(static_cast<float*>(values));
  }
}

absl::Status CheckDecays(const Var& variable) {
  const Tensor& value = *const_cast<Var&>(variable).tensor();
  const bool is_narrow = value.dtype() == tensorflow::DT_BFLOAT16;
  return CheckVariable(
      variable, "variables",
      is_narrow ? tensorflow::DT_BFLOAT16 : tensorflow::DT_FLOAT);
}

class DecayWeightsOp : public OpKernel {
 public:
  explicit DecayWeightsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weight_decay", &weight_decay_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> variables, log_decays;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variables", &variables));
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "log_decays", &log_decays));
    float learning_rate;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "learning_rate", &learning_rate));
    const double rate = static_cast<double>(weight_decay_) * learning_rate;
    // Not a number, too.
    OP_REQUIRES(ctx, rate >= 0.0 && rate < 1.0,
                absl::InvalidArgumentError(absl::StrCat(
                    "weight_decay * learning_rate must be in [0, 1), not ",
                    weight_decay_, " * ", learning_rate)));
    if (rate == 0.0) return;
    for (const VariablePtr& variable : variables) {
      const ExclusiveLocks lock({variable.get()});
      OP_REQUIRES_OK(ctx, CheckDecays(*variable));
      OP_REQUIRES_OK(ctx, MakeWritable(ctx, variable.get()));
      WithValues(variable.get(), [&](auto* values) {
        ParallelFor(ctx, variable->tensor()->NumElements(), /*cost=*/2,
                    [&](int64_t begin, int64_t end) {
                      Scale(1.0 - rate, end - begin, values + begin);
                    });
      });
    }
    for (const VariablePtr& variable : log_decays) {
      // Beside pushes, not after them.
      const WriteSession session(ctx, {variable.get()});
      OP_REQUIRES_OK(ctx, session.status());
      OP_REQUIRES_OK(
          ctx, CheckVariable(*variable, "log_decays", tensorflow::DT_DOUBLE));
      const Tensor& logs = *variable->tensor();
      OP_REQUIRES(
          ctx, logs.dims() == 1 && logs.NumElements() >= RowDecay::Size(0),
          absl::InvalidArgumentError(absl::StrCat(
              "log_decays must be vectors of at least ", RowDecay::Size(0),
              " elements, not ", logs.shape().DebugString())));
      RowDecay decay;
      const int64_t rows = logs.NumElements() - RowDecay::Size(0);
      OP_REQUIRES_OK(ctx, RowDecayOf(variable.get(), rows, &decay));
      decay.Add(std::log1p(-rate));
    }
  }

 private:
  float weight_decay_;
};

class SettleDecayOp : public OpKernel {
 public:
  explicit SettleDecayOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadRoundings(ctx, &roundings_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> tables, log_decays;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variables", &tables));
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "log_decays", &log_decays));
    for (size_t i = 0; i < tables.size(); ++i) {
      OP_REQUIRES_OK(ctx, Settle(ctx, roundings_[i], tables[i].get(),
                                 log_decays[i].get()));
    }
  }

 private:
  static absl::Status Settle(OpKernelContext* ctx, const RowRounding& rounding,
                             Var* table, Var* log_decays) {
    TF_RETURN_IF_ERROR(CheckDistinct({table, log_decays}));
    const WriteSession session(ctx, {table, log_decays});
    TF_RETURN_IF_ERROR(session.status());
    int64_t width;
    TF_RETURN_IF_ERROR(RowWidth(*table, &width));
    const int64_t rows = table->tensor()->dim_size(0);
    RowDecay decay;
    TF_RETURN_IF_ERROR(RowDecayOf(log_decays, rows, &decay));
    if (decay.is_settled()) return absl::OkStatus();
    const double total = decay.total();
    WithValues(table, [&](auto* values) {
      ParallelFor(ctx, rows, 50 + 2 * width, [&](int64_t begin, int64_t end) {
        SettleRows(decay, rounding, values, width, begin, end);
      });
    });
    decay.Settled(total);
    return absl::OkStatus();
  }

  std::vector<RowRounding> roundings_;  // of each table
};

REGISTER_KERNEL_BUILDER(
    Name("RecsyncDecayWeights").Device(tensorflow::DEVICE_CPU), DecayWeightsOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncSettleDecay").Device(tensorflow::DEVICE_CPU), SettleDecayOp);

}  // namespace
}  // namespace recsync
