// Kernels that update dense variables: check, lock, call the engine's rules.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/hogwild.h"
#include "cc/engine/mutex.h"
#include "cc/engine/nonfinite.h"
#include "cc/engine/row_locks.h"
#include "cc/engine/saturated.h"
#include "cc/engine/span_update.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/swap.h"
#include "cc/engine/update_rules.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/update_op.h"
#include "cc/kernels/write_session.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"

namespace recsync {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

template <typename Rule, typename T>
class DenseUpdateOp : public UpdateOp<Rule> {
 public:
  explicit DenseUpdateOp(tensorflow::OpKernelConstruction* ctx)
      : UpdateOp<Rule>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("hogwild", &hogwild_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> held;
    std::vector<Target> targets;
    OP_REQUIRES_OK(ctx, this->LookupTargets(ctx, &held, &targets));
    Rule rule;
    int64_t global_step;
    OP_REQUIRES_OK(ctx, this->ReadRuleInputs(ctx, &rule, &global_step));
    const Tensor* gradient;
    const Tensor* pulled;
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "gradient", &gradient));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "pulled_versions", &pulled));
    const int64_t n = targets.size();
    OP_REQUIRES(ctx, pulled->NumElements() == 0 || pulled->NumElements() == n,
                absl::InvalidArgumentError(absl::StrCat(
                    "pulled_versions must hold ", n, " versions or none, not ",
                    pulled->NumElements())));
    if (gradient->NumElements() == 0) return;  // nothing to update
    int64_t total = 0;
    for (const Target& target : targets) {
      tensorflow::tf_shared_lock lock(*target.variable->mu());
      OP_REQUIRES_OK(ctx, CheckVariable(*target.variable, "variable",
                                        tensorflow::DT_FLOAT));
      total += target.variable->tensor()->NumElements();
    }
    OP_REQUIRES(ctx, gradient->NumElements() == total,
                absl::InvalidArgumentError(
                    absl::StrCat("gradient must hold the variables' ", total,
                                 " elements, not ", gradient->NumElements())));
    const T* g = gradient->flat<T>().data();
    // All is checked before anything is written, so that a push is not applied
    // by halves.
    for (int64_t i = 0; i < n; ++i) {
      const WriteLocks locks(ctx, targets[i].All(), hogwild_);
      OP_REQUIRES_OK(ctx, locks.status());
      OP_REQUIRES_OK(ctx, CheckDense(targets[i]));
      if (pulled->NumElements() > 0) {
        const RowLock lock(LockOf(targets[i]));
        OP_REQUIRES_OK(ctx,
                       this->CheckPulled(pulled->flat<int64_t>()(i),
                                         *Data<int64_t>(targets[i].versions)));
      }
    }
    if (this->options_.nonfinite == Nonfinite::kError) {
      OP_REQUIRES_OK(ctx, CheckFinite(targets, g, total));
    }
    int64_t offset = 0;
    for (int64_t i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, UpdateOne(ctx, rule, global_step,
                                    pulled->NumElements() == 0
                                        ? nullptr
                                        : &pulled->flat<int64_t>()(i),
                                    g, total, targets[i], &offset));
    }
  }

 private:
  // Of what is counted for a variable, which Hogwild's updates share.
  static SpinLock* LockOf(const Target& target) {
    // Pulls take it, too.
    return &RowLocks::Global().Of(target.versions, 0);
  }

  // Whether the update would decay what SWAP's period before has left.
  bool EntersPeriod(const Target& target, int64_t global_step) const {
    const Swap& swap = this->options_.swap;
    if (!swap.enabled()) return false;
    const RowLock lock(LockOf(target));
    return swap.Enters(*Data<int64_t>(target.last_periods), global_step);
  }

  // Refuses a gradient that is not finite, naming its variable.
  absl::Status CheckFinite(const std::vector<Target>& targets, const T* g,
                           int64_t total) const {
    if (AllFinite(g, total)) return absl::OkStatus();
    int64_t element = 0;
    while (AllFinite(g + element, 1)) ++element;
    const float value = static_cast<float>(g[element]);
    size_t i = 0;
    for (; i + 1 < targets.size(); ++i) {
      tensorflow::tf_shared_lock lock(*targets[i].variable->mu());
      const int64_t size = targets[i].variable->tensor()->NumElements();
      if (element < size) break;
      element -= size;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("gradient of ", this->options_.NameOf("variable", i),
                     " is not finite: its element ", element, " is ", value));
  }

  absl::Status UpdateOne(OpKernelContext* ctx, const Rule& rule,
                         int64_t global_step, const int64_t* pulled, const T* g,
                         int64_t total, const Target& target, int64_t* offset) {
    std::optional<WriteLocks> locks;
    bool is_shared = hogwild_;
    locks.emplace(ctx, target.All(), is_shared);
    TF_RETURN_IF_ERROR(locks->status());
    TF_RETURN_IF_ERROR(CheckDense(target));
    if (is_shared && EntersPeriod(target, global_step)) {
      // Another update beside it could write back what it has read before the
      // decay. If one is faster to begin the period, nothing is left to decay.
      is_shared = false;
      locks.reset();
      locks.emplace(ctx, target.All(), is_shared);
      TF_RETURN_IF_ERROR(locks->status());
      TF_RETURN_IF_ERROR(CheckDense(target));
    }
    const int64_t size = target.variable->tensor()->NumElements();
    // The sizes were added up under another lock: a variable may have been
    // assigned a value of another shape since.
    if (*offset + size > total) {
      return absl::InvalidArgumentError(
          "a variable changed its shape while it was updated");
    }
    int64_t* version = Data<int64_t>(target.versions);
    float* last_update = Data<float>(target.last_updates);
    StalenessCounters counters(Data<int64_t>(target.counters));
    const bool is_skipped = this->options_.nonfinite == Nonfinite::kSkip &&
                            !AllFinite(g + *offset, size);
    const StalenessWeight& weight = this->options_.weight;
    const bool measure = weight.uses_last_update();
    int64_t tau = 1;
    float rho = 1.0f;
    float decay = 1.0f;
    Rule own = rule;
    {
      const RowLock lock(LockOf(target));
      if (pulled != nullptr) {
        // Where the version has been set back since it was checked, the
        // gradient counts as fresh: variables before this one are updated.
        tau = std::max<int64_t>(SaturatedSum(*version, 1 - *pulled), 1);
      }
      if (is_skipped) {
        counters.AddSkipped();
        *offset += size;
        return absl::OkStatus();
      }
      StalenessCounters::Moments measured;
      if (weight.rescales()) measured = counters.BeginPush(weight.window);
      rho = static_cast<float>(
          weight.Of(static_cast<double>(tau), measure ? *last_update : 0.0,
                    std::sqrt(measured.variance), measured.mean));
      if (rho == 0.0f) {
        counters.Add(tau);
        *offset += size;
        return absl::OkStatus();
      }
      const Swap& swap = this->options_.swap;
      if (swap.enabled()) {
        int64_t* last_period = Data<int64_t>(target.last_periods);
        // No fresh gradient is late.
        if (pulled == nullptr) swap.SetBack(last_period, global_step);
        decay = swap.DecaySince(last_period, global_step);
      }
      if constexpr (Rule::kKeepsSteps) {
        int64_t* last_step = Data<int64_t>(target.last_steps);
        if (pulled == nullptr) Rule::SetBack(global_step, last_step);
        own = rule.At(global_step, last_step);
      }
    }
    float* w = Data<float>(target.variable);
    std::vector<float*> accumulators;
    for (Var* accumulator : target.accumulators) {
      accumulators.push_back(Data<float>(accumulator));
    }
    const SpanUpdate<Rule> apply = measure ? ChooseSpanUpdate<Rule, true>()
                                           : ChooseSpanUpdate<Rule, false>();
    Mutex mu;
    double squares = 0.0;
    const auto update = [&](int64_t begin, int64_t end) {
      std::vector<float*> slots;
      for (float* accumulator : accumulators)
        slots.push_back(accumulator + begin);
      std::vector<float> converted;
      const float* piece =
          AsFloat(g + *offset + begin, end - begin, &converted);
      const double part =
          is_shared ? UpdateHogwild<Rule>(apply, own, w + begin, slots.data(),
                                          piece, end - begin, rho, decay)
                    : apply(own, w + begin, slots.data(), piece, end - begin,
                            rho, decay);
      if (measure) {
        MutexLock lock(&mu);
        squares += part;
      }
    };
    constexpr int64_t kCyclesPerElement = 8;
    ParallelFor(ctx, size, kCyclesPerElement, update);
    const RowLock lock(LockOf(target));
    if (measure) *last_update = static_cast<float>(std::sqrt(squares));
    counters.Add(tau);
    *version = SaturatedSum(*version, 1);
    *offset += size;
    return absl::OkStatus();
  }

  static const float* AsFloat(const float* values, int64_t,
                              std::vector<float>*) {
    return values;
  }
  template <typename H>
  static const float* AsFloat(const H* values, int64_t n,
                              std::vector<float>* converted) {
    converted->resize(n);
    for (int64_t i = 0; i < n; ++i) {
      (*converted)[i] = static_cast<float>(values[i]);
    }
    return converted->data();
  }

  bool hogwild_;
};

#define REGISTER_DENSE(name, Rule, T)                         \
  REGISTER_KERNEL_BUILDER(Name("Recsync" name "Dense")        \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          DenseUpdateOp<Rule, T>);
#define REGISTER_RULE(name, Rule)         \
  REGISTER_DENSE(name, Rule, float)       \
  REGISTER_DENSE(name, Rule, Eigen::half) \
  REGISTER_DENSE(name, Rule, Eigen::bfloat16)

REGISTER_RULE("Sgd", SgdRule)
REGISTER_RULE("Adagrad", AdagradRule)
REGISTER_RULE("Adam", AdamRule)
REGISTER_RULE("Ftrl", FtrlRule)

#undef REGISTER_RULE
#undef REGISTER_DENSE

}  // namespace
}  // namespace recsync
