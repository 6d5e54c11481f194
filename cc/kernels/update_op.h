// What the update kernels for dense variables and for rows of tables share:
// inputs, look-up of a variable with all that lives beside it, checks.

#ifndef TF_RECSYNC_CC_KERNELS_UPDATE_OP_H_
#define TF_RECSYNC_CC_KERNELS_UPDATE_OP_H_

#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/row_checks.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/update_options.h"
#include "cc/engine/update_rules.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/update_attributes.h"
#include "cc/kernels/variable_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

// What the kernels must know of a rule: its attributes, and the inputs that
// hold its accumulators.
inline std::vector<const char*> AccumulatorInputs(const SgdRule&) { return {}; }
inline std::vector<const char*> AccumulatorInputs(const AdagradRule&) {
  return {"accumulators"};
}
inline std::vector<const char*> AccumulatorInputs(const RowwiseAdagradRule&) {
  return {"accumulators"};
}
inline std::vector<const char*> AccumulatorInputs(const AdamRule&) {
  return {"momentums", "velocities"};
}
inline std::vector<const char*> AccumulatorInputs(const FtrlRule&) {
  return {"accumulators", "linears"};
}

absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx, SgdRule* rule);
absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx, AdagradRule* rule);
absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx,
                      RowwiseAdagradRule* rule);
absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx, AdamRule* rule);
absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx, FtrlRule* rule);

// One updated variable with everything that lives beside it. Pointers into
// buffers stay valid while the locks are held.
struct Target {
  tensorflow::Var* variable = nullptr;
  std::vector<tensorflow::Var*> accumulators;
  tensorflow::Var* versions = nullptr;
  tensorflow::Var* counters = nullptr;
  tensorflow::Var* last_periods = nullptr;  // null without SWAP
  tensorflow::Var* last_updates = nullptr;  // null without update_sensitivity
  tensorflow::Var* last_steps = nullptr;    // null unless the rule keeps them
  tensorflow::Var* log_decays = nullptr;    // null unless a table's decay

  std::vector<tensorflow::Var*> All() const {
    std::vector<tensorflow::Var*> all = {variable};
    all.insert(all.end(), accumulators.begin(), accumulators.end());
    all.push_back(versions);
    all.push_back(counters);
    if (last_periods != nullptr) all.push_back(last_periods);
    if (last_updates != nullptr) all.push_back(last_updates);
    if (last_steps != nullptr) all.push_back(last_steps);
    if (log_decays != nullptr) all.push_back(log_decays);
    return all;
  }
};

inline absl::Status CheckShape(const char* name,
                               const tensorflow::Var& variable,
                               const tensorflow::TensorShape& expected) {
  const tensorflow::TensorShape& shape =
      const_cast<tensorflow::Var&>(variable).tensor()->shape();
  if (shape == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must have shape ", expected.DebugString(), ", not ",
                   shape.DebugString()));
}

// Checks the types and shapes of what lives beside a variable, which has been
// checked itself: accumulators look like `shape`, and versions, last_periods
// and last_updates like `slots_shape`. Periods and steps are of type `counted`.
// Lock: the target's, exclusive or by a session.
inline absl::Status CheckBeside(const Target& target,
                                const tensorflow::TensorShape& shape,
                                const tensorflow::TensorShape& slots_shape,
                                tensorflow::DataType counted) {
  for (tensorflow::Var* accumulator : target.accumulators) {
    TF_RETURN_IF_ERROR(
        CheckVariable(*accumulator, "accumulator", tensorflow::DT_FLOAT));
    TF_RETURN_IF_ERROR(CheckShape("accumulator", *accumulator, shape));
  }
  TF_RETURN_IF_ERROR(
      CheckVariable(*target.versions, "versions", tensorflow::DT_INT64));
  TF_RETURN_IF_ERROR(CheckShape("versions", *target.versions, slots_shape));
  TF_RETURN_IF_ERROR(
      CheckVariable(*target.counters, "counters", tensorflow::DT_INT64));
  TF_RETURN_IF_ERROR(
      CheckShape("counters", *target.counters,
                 tensorflow::TensorShape({StalenessCounters::kSize})));
  if (target.last_periods != nullptr) {
    TF_RETURN_IF_ERROR(
        CheckVariable(*target.last_periods, "last_periods", counted));
    TF_RETURN_IF_ERROR(
        CheckShape("last_periods", *target.last_periods, slots_shape));
  }
  if (target.last_updates != nullptr) {
    TF_RETURN_IF_ERROR(CheckVariable(*target.last_updates, "last_updates",
                                     tensorflow::DT_FLOAT));
    TF_RETURN_IF_ERROR(
        CheckShape("last_updates", *target.last_updates, slots_shape));
  }
  if (target.last_steps != nullptr) {
    TF_RETURN_IF_ERROR(
        CheckVariable(*target.last_steps, "last_steps", counted));
    TF_RETURN_IF_ERROR(
        CheckShape("last_steps", *target.last_steps, slots_shape));
  }
  return absl::OkStatus();
}

// Checks a dense variable and what lives beside it.
// Lock: the target's, exclusive or by a session.
inline absl::Status CheckDense(const Target& target) {
  TF_RETURN_IF_ERROR(
      CheckVariable(*target.variable, "variable", tensorflow::DT_FLOAT));
  return CheckBeside(target, target.variable->tensor()->shape(),
                     tensorflow::TensorShape({}), tensorflow::DT_INT64);
}

template <typename V>
V* Data(tensorflow::Var* variable) {
  return variable == nullptr ? nullptr : variable->tensor()->flat<V>().data();
}

// What Dense and Rows updates share.
template <typename Rule>
class UpdateOp : public tensorflow::OpKernel {
 public:
  explicit UpdateOp(tensorflow::OpKernelConstruction* ctx)
      : tensorflow::OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadUpdateAttributes(ctx, &options_));
    OP_REQUIRES_OK(ctx, ReadRule(ctx, &rule_));
  }

 protected:
  // Looks up the variables behind the op's resource inputs; `held` keeps them
  // alive.
  absl::Status LookupTargets(tensorflow::OpKernelContext* ctx,
                             std::vector<VariablePtr>* held,
                             std::vector<Target>* targets) {
    std::vector<VariablePtr> found;
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "variables", &found));
    const size_t n = found.size();
    targets->assign(n, Target());
    const auto place = [&](auto&& set) {
      for (size_t i = 0; i < found.size(); ++i)
        set((*targets)[i], found[i].get());
      for (VariablePtr& variable : found) held->push_back(std::move(variable));
    };
    place([](Target& t, tensorflow::Var* v) { t.variable = v; });
    for (const char* name : AccumulatorInputs(rule_)) {
      TF_RETURN_IF_ERROR(LookupVariables(ctx, name, &found));
      place([](Target& t, tensorflow::Var* v) { t.accumulators.push_back(v); });
    }
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "versions", &found));
    place([](Target& t, tensorflow::Var* v) { t.versions = v; });
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "counters", &found));
    place([](Target& t, tensorflow::Var* v) { t.counters = v; });
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "last_periods", &found));
    TF_RETURN_IF_ERROR(CheckOptional("last_periods", "swap_period",
                                     options_.swap.enabled(), n, found));
    place([](Target& t, tensorflow::Var* v) { t.last_periods = v; });
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "last_updates", &found));
    TF_RETURN_IF_ERROR(CheckOptional("last_updates", "update_sensitivity",
                                     options_.weight.uses_last_update(), n,
                                     found));
    place([](Target& t, tensorflow::Var* v) { t.last_updates = v; });
    if (Rule::kKeepsSteps) {
      TF_RETURN_IF_ERROR(LookupVariables(ctx, "last_steps", &found));
      place([](Target& t, tensorflow::Var* v) { t.last_steps = v; });
    }
    return CheckTargets(*targets);
  }

  static absl::Status CheckTargets(const std::vector<Target>& targets) {
    std::vector<tensorflow::Var*> all;
    for (const Target& target : targets) {
      for (tensorflow::Var* variable : target.All()) all.push_back(variable);
    }
    return CheckDistinct(all);
  }

  absl::Status ReadRuleInputs(tensorflow::OpKernelContext* ctx, Rule* rule,
                              int64_t* global_step) {
    *rule = rule_;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "learning_rate", &rule->learning_rate));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "global_step", global_step));
    if (*global_step < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "global_step is counted from 1, it can't be ", *global_step));
    }
    if (options_.swap.enabled() && options_.swap.offset < -*global_step) {
      return absl::InvalidArgumentError(
          absl::StrCat("global_step + swap_offset must be at least 0, not ",
                       *global_step, " + ", options_.swap.offset));
    }
    if constexpr (Rule::kKeepsSteps) rule->Begin(*global_step);
    if constexpr (std::is_same_v<Rule, FtrlRule>) {
      if (!(rule->learning_rate > 0.0f)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "learning_rate must be positive, not ", rule->learning_rate));
      }
    }
    return absl::OkStatus();
  }

  static absl::Status CheckOptional(const char* name, const char* attribute,
                                    bool wanted, size_t n,
                                    const std::vector<VariablePtr>& found) {
    const size_t expected = wanted ? n : 0;
    if (found.size() == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must hold ", expected, " variables with this ",
                     attribute, ", not ", found.size()));
  }

  // A version that was pulled is one of 0 .. `now`.
  static absl::Status CheckPulled(int64_t pulled, int64_t now) {
    if (WasAVersion(pulled, now)) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("pulled_versions holds ", pulled, ", which is not in [0, ",
                     now, "], the versions up to now"));
  }

  UpdateOptions options_;
  Rule rule_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_UPDATE_OP_H_
