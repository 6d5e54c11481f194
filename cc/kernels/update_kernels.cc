// Kernels of the update ops: check the inputs, lock, call the engine's rules.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/mutex.h"
#include "cc/engine/row_groups.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/update_rules.h"
#include "cc/kernels/update_attributes.h"
#include "cc/kernels/variable_access.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/util/work_sharder.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;
using tensorflow::Var;

absl::Status ReadRule(OpKernelConstruction* ctx, SgdRule* rule) {
  return absl::OkStatus();
}

absl::Status ReadRule(OpKernelConstruction* ctx, AdagradRule* rule) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("epsilon", &rule->epsilon));
  if (!(rule->epsilon > 0.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("epsilon must be positive, not ", rule->epsilon));
  }
  return absl::OkStatus();
}

template <typename V>
absl::Status ReadScalar(OpKernelContext* ctx, const char* name, V* value) {
  const Tensor* input;
  TF_RETURN_IF_ERROR(ctx->input(name, &input));
  if (!TensorShapeUtils::IsScalar(input->shape())) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a scalar, not ", input->shape().DebugString()));
  }
  *value = input->scalar<V>()();
  return absl::OkStatus();
}

absl::Status ReadVector(OpKernelContext* ctx, const char* name,
                        const Tensor** input) {
  TF_RETURN_IF_ERROR(ctx->input(name, input));
  if (!TensorShapeUtils::IsVector((*input)->shape())) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a vector, not ", (*input)->shape().DebugString()));
  }
  return absl::OkStatus();
}

// One updated variable with everything that lives beside it. Pointers into
// buffers stay valid while the locks are held.
struct Target {
  Var* variable = nullptr;
  std::vector<Var*> accumulators;
  Var* versions = nullptr;
  Var* counters = nullptr;
  Var* last_periods = nullptr;  // null without SWAP
  Var* last_updates = nullptr;  // null without update_sensitivity

  // In the order in which they are locked.
  std::vector<Var*> All() const {
    std::vector<Var*> all = {variable};
    all.insert(all.end(), accumulators.begin(), accumulators.end());
    all.push_back(versions);
    all.push_back(counters);
    if (last_periods != nullptr) all.push_back(last_periods);
    if (last_updates != nullptr) all.push_back(last_updates);
    return all;
  }
};

absl::Status CheckShape(const char* name, const Var& variable,
                        const TensorShape& expected) {
  const TensorShape& shape = const_cast<Var&>(variable).tensor()->shape();
  if (shape == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must have shape ", expected.DebugString(), ", not ",
                   shape.DebugString()));
}

// Checks types and shapes of a locked target and makes its buffers writable.
// `slots_shape` is what versions, last_periods and last_updates look like.
absl::Status Prepare(OpKernelContext* ctx, const Target& target, bool sparse) {
  TF_RETURN_IF_ERROR(
      CheckVariable(*target.variable, "variable", tensorflow::DT_FLOAT));
  const TensorShape& shape = target.variable->tensor()->shape();
  TensorShape slots_shape;
  if (sparse) {
    if (shape.dims() < 1) {
      return absl::InvalidArgumentError("a table must have rows, not shape []");
    }
    slots_shape.AddDim(shape.dim_size(0));
  }
  for (Var* accumulator : target.accumulators) {
    TF_RETURN_IF_ERROR(
        CheckVariable(*accumulator, "accumulator", tensorflow::DT_FLOAT));
    TF_RETURN_IF_ERROR(CheckShape("accumulator", *accumulator, shape));
  }
  TF_RETURN_IF_ERROR(
      CheckVariable(*target.versions, "versions", tensorflow::DT_INT64));
  TF_RETURN_IF_ERROR(CheckShape("versions", *target.versions, slots_shape));
  TF_RETURN_IF_ERROR(
      CheckVariable(*target.counters, "counters", tensorflow::DT_INT64));
  TF_RETURN_IF_ERROR(CheckShape("counters", *target.counters,
                                TensorShape({StalenessCounters::kSize})));
  if (target.last_periods != nullptr) {
    TF_RETURN_IF_ERROR(CheckVariable(*target.last_periods, "last_periods",
                                     tensorflow::DT_INT64));
    TF_RETURN_IF_ERROR(
        CheckShape("last_periods", *target.last_periods, slots_shape));
  }
  if (target.last_updates != nullptr) {
    TF_RETURN_IF_ERROR(CheckVariable(*target.last_updates, "last_updates",
                                     tensorflow::DT_FLOAT));
    TF_RETURN_IF_ERROR(
        CheckShape("last_updates", *target.last_updates, slots_shape));
  }
  for (Var* variable : target.All()) {
    TF_RETURN_IF_ERROR(
        MakeWritable(ctx, sparse && variable != target.counters, variable));
  }
  return absl::OkStatus();
}

template <typename V>
V* Data(Var* variable) {
  return variable == nullptr ? nullptr : variable->tensor()->flat<V>().data();
}

// What Dense and Rows updates share.
template <typename Rule>
class UpdateOp : public OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadUpdateAttributes(ctx, &attributes_));
    OP_REQUIRES_OK(ctx, ReadRule(ctx, &rule_));
  }

 protected:
  // Looks up the variables behind the op's resource inputs; `variables_` etc.
  // of `held` keep them alive.
  absl::Status LookupTargets(OpKernelContext* ctx,
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
    place([](Target& t, Var* v) { t.variable = v; });
    if (Rule::kAccumulators > 0) {
      TF_RETURN_IF_ERROR(LookupVariables(ctx, "accumulators", &found));
      place([](Target& t, Var* v) { t.accumulators.push_back(v); });
    }
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "versions", &found));
    place([](Target& t, Var* v) { t.versions = v; });
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "counters", &found));
    place([](Target& t, Var* v) { t.counters = v; });
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "last_periods", &found));
    TF_RETURN_IF_ERROR(CheckOptional("last_periods", "swap_period",
                                     attributes_.swap.enabled(), n, found));
    place([](Target& t, Var* v) { t.last_periods = v; });
    TF_RETURN_IF_ERROR(LookupVariables(ctx, "last_updates", &found));
    TF_RETURN_IF_ERROR(CheckOptional("last_updates", "update_sensitivity",
                                     attributes_.weight.uses_last_update(), n,
                                     found));
    place([](Target& t, Var* v) { t.last_updates = v; });
    std::vector<Var*> all;
    for (const Target& target : *targets) {
      for (Var* variable : target.All()) all.push_back(variable);
    }
    return CheckDistinct(all);
  }

  absl::Status ReadRuleInputs(OpKernelContext* ctx, Rule* rule,
                              int64_t* global_step) {
    *rule = rule_;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "learning_rate", &rule->learning_rate));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "global_step", global_step));
    if (*global_step < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "global_step is counted from 1, it can't be ", *global_step));
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
    if (pulled >= 0 && pulled <= now) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("pulled_versions holds ", pulled, ", which is not in [0, ",
                     now, "], the versions up to now"));
  }

  UpdateAttributes attributes_;
  Rule rule_;
};

template <typename Rule, typename T>
class DenseUpdateOp : public UpdateOp<Rule> {
 public:
  using UpdateOp<Rule>::UpdateOp;

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
      const ExclusiveLocks locks(targets[i].All());
      OP_REQUIRES_OK(ctx, Prepare(ctx, targets[i], /*sparse=*/false));
      if (pulled->NumElements() > 0) {
        OP_REQUIRES_OK(ctx,
                       this->CheckPulled(pulled->flat<int64_t>()(i),
                                         *Data<int64_t>(targets[i].versions)));
      }
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
  absl::Status UpdateOne(OpKernelContext* ctx, const Rule& rule,
                         int64_t global_step, const int64_t* pulled, const T* g,
                         int64_t total, const Target& target, int64_t* offset) {
    ExclusiveLocks locks(target.All());
    TF_RETURN_IF_ERROR(Prepare(ctx, target, /*sparse=*/false));
    const int64_t size = target.variable->tensor()->NumElements();
    // The sizes were added up under another lock: a variable may have been
    // assigned a value of another shape since.
    if (*offset + size > total) {
      return absl::InvalidArgumentError(
          "a variable changed its shape while it was updated");
    }
    int64_t* version = Data<int64_t>(target.versions);
    if (pulled != nullptr) {
      TF_RETURN_IF_ERROR(this->CheckPulled(*pulled, *version));
    }
    const int64_t tau = pulled == nullptr ? 1 : *version - *pulled + 1;
    const StalenessWeight& weight = this->attributes_.weight;
    const bool measure = weight.uses_last_update();
    float* last_update = Data<float>(target.last_updates);
    StalenessCounters counters(Data<int64_t>(target.counters));
    const float rho = static_cast<float>(
        weight.Of(static_cast<double>(tau), measure ? *last_update : 0.0,
                  weight.rescales() ? std::sqrt(counters.Variance()) : 0.0,
                  counters.Mean()));
    const float decay =
        this->attributes_.swap.enabled()
            ? this->attributes_.swap.DecaySince(
                  Data<int64_t>(target.last_periods), global_step)
            : 1.0f;
    float* w = Data<float>(target.variable);
    std::vector<float*> accumulators;
    for (Var* accumulator : target.accumulators) {
      accumulators.push_back(Data<float>(accumulator));
    }
    Mutex mu;
    double squares = 0.0;
    const auto update = [&](int64_t begin, int64_t end) {
      std::vector<float*> slots;
      for (float* accumulator : accumulators)
        slots.push_back(accumulator + begin);
      std::vector<float> converted;
      const float* piece =
          AsFloat(g + *offset + begin, end - begin, &converted);
      if (measure) {
        const double part = rule.template Apply<true>(
            w + begin, slots.data(), piece, end - begin, rho, decay);
        MutexLock lock(&mu);
        squares += part;
      } else {
        rule.template Apply<false>(w + begin, slots.data(), piece, end - begin,
                                   rho, decay);
      }
    };
    constexpr int64_t kCyclesPerElement = 8;
    const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(workers->num_threads, workers->workers, size,
                      kCyclesPerElement, update);
    if (measure) *last_update = static_cast<float>(std::sqrt(squares));
    counters.Add(tau);
    ++*version;
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
};

template <typename Rule, typename T, typename Index>
class RowsUpdateOp : public UpdateOp<Rule> {
 public:
  using UpdateOp<Rule>::UpdateOp;

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> held;
    std::vector<Target> targets;
    OP_REQUIRES_OK(ctx, this->LookupTargets(ctx, &held, &targets));
    Rule rule;
    int64_t global_step;
    OP_REQUIRES_OK(ctx, this->ReadRuleInputs(ctx, &rule, &global_step));
    const Tensor* gradient;
    const Tensor* indices;
    const Tensor* pulled;
    std::vector<int64_t> offsets;
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "gradient", &gradient));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "indices", &indices));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "pulled_versions", &pulled));
    OP_REQUIRES_OK(ctx, ReadCounts(ctx, *indices, targets.size(), &offsets));
    const int64_t rows = indices->NumElements();
    OP_REQUIRES(
        ctx, pulled->NumElements() == 0 || pulled->NumElements() == rows,
        absl::InvalidArgumentError(absl::StrCat("pulled_versions must hold ",
                                                rows, " versions or none, not ",
                                                pulled->NumElements())));
    const int64_t n = targets.size();
    std::vector<int64_t> starts(n + 1, 0);  // of each table in `gradient`
    for (int64_t i = 0; i < n; ++i) {
      tensorflow::tf_shared_lock lock(*targets[i].variable->mu());
      int64_t width;
      OP_REQUIRES_OK(ctx, RowWidth(*targets[i].variable, &width));
      starts[i + 1] = starts[i] + width * (offsets[i + 1] - offsets[i]);
    }
    OP_REQUIRES(ctx, gradient->NumElements() == starts[n],
                absl::InvalidArgumentError(
                    absl::StrCat("gradient must hold the rows' ", starts[n],
                                 " elements, not ", gradient->NumElements())));
    const T* gradients = gradient->flat<T>().data();
    const Index* ids = indices->flat<Index>().data();
    const int64_t* versions =
        pulled->NumElements() == 0 ? nullptr : pulled->flat<int64_t>().data();
    // All is checked before anything is written, so that a push is not applied
    // by halves. The tables follow one another in this thread, and only the
    // rows of one are spread over the thread pool: a pool's thread that waited
    // for a table's lock could be the one that the lock's holder waits for.
    for (const bool write : {false, true}) {
      for (int64_t i = 0; i < n; ++i) {
        const Push push = {
            gradients + starts[i], starts[i + 1] - starts[i], ids + offsets[i],
            versions == nullptr ? nullptr : versions + offsets[i],
            offsets[i + 1] - offsets[i]};
        if (push.n == 0) continue;
        const ExclusiveLocks locks(targets[i].All());
        OP_REQUIRES_OK(ctx, CheckPush(ctx, targets[i], push));
        if (write) UpdateRows(ctx, rule, global_step, targets[i], push);
      }
    }
  }

 private:
  // What is pushed to one table.
  struct Push {
    const T* gradient;
    int64_t elements;  // of `gradient`
    const Index* ids;
    const int64_t* pulled;  // null for fresh gradients
    int64_t n;              // of `ids` and `pulled`
  };

  // Lock: the target's, exclusive.
  absl::Status CheckPush(OpKernelContext* ctx, const Target& target,
                         const Push& push) {
    TF_RETURN_IF_ERROR(Prepare(ctx, target, /*sparse=*/true));
    int64_t width;
    TF_RETURN_IF_ERROR(RowWidth(*target.variable, &width));
    if (width * push.n != push.elements) {
      return absl::InvalidArgumentError(
          "a table changed its shape while it was updated");
    }
    const int64_t rows = target.variable->tensor()->dim_size(0);
    const int64_t* versions = Data<int64_t>(target.versions);
    for (int64_t i = 0; i < push.n; ++i) {
      const int64_t row = static_cast<int64_t>(push.ids[i]);
      if (row < 0 || row >= rows) return NotARow(i, row, rows);
      if (push.pulled != nullptr) {
        TF_RETURN_IF_ERROR(this->CheckPulled(push.pulled[i], versions[row]));
      }
    }
    return absl::OkStatus();
  }

  // Lock: the target's, exclusive. The push has been checked.
  void UpdateRows(OpKernelContext* ctx, const Rule& rule, int64_t global_step,
                  const Target& target, const Push& push) {
    RowGroups groups;
    groups.Build(push.ids, push.n);
    const int64_t* pulled = push.pulled;
    const int64_t width = push.elements / push.n;
    const StalenessWeight& weight = this->attributes_.weight;
    const Swap& swap = this->attributes_.swap;
    const bool measure = weight.uses_last_update();
    float* w = Data<float>(target.variable);
    int64_t* versions = Data<int64_t>(target.versions);
    int64_t* last_periods = Data<int64_t>(target.last_periods);
    float* last_updates = Data<float>(target.last_updates);
    std::vector<float*> accumulators;
    for (Var* accumulator : target.accumulators) {
      accumulators.push_back(Data<float>(accumulator));
    }
    StalenessCounters counters(Data<int64_t>(target.counters));
    const double mean = counters.Mean();
    const double deviation =
        weight.rescales() ? std::sqrt(counters.Variance()) : 0.0;
    Mutex mu;  // guards counters

    const auto update = [&](int64_t begin, int64_t end) {
      LocalStalenessCounters counted;
      std::vector<float> sum(static_cast<size_t>(width));
      std::vector<float*> slots(accumulators.size());
      for (int64_t group = begin; group < end; ++group) {
        const int64_t row = groups.row(group);
        int64_t oldest =
            pulled == nullptr ? versions[row] : pulled[groups.first(group)];
        const float* g = SumOfGroup(groups, group, push.gradient, width, pulled,
                                    &oldest, &sum);
        const int64_t tau = versions[row] - oldest + 1;
        const float rho = static_cast<float>(
            weight.Of(static_cast<double>(tau),
                      measure ? last_updates[row] : 0.0, deviation, mean));
        const float decay =
            swap.enabled() ? swap.DecaySince(&last_periods[row], global_step)
                           : 1.0f;
        for (size_t a = 0; a < slots.size(); ++a) {
          slots[a] = accumulators[a] + row * width;
        }
        if (measure) {
          last_updates[row] =
              static_cast<float>(std::sqrt(rule.template Apply<true>(
                  w + row * width, slots.data(), g, width, rho, decay)));
        } else {
          rule.template Apply<false>(w + row * width, slots.data(), g, width,
                                     rho, decay);
        }
        counted.Add(tau);
        ++versions[row];
      }
      MutexLock lock(&mu);
      counters.Merge(counted.data());
    };
    const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(workers->num_threads, workers->workers, groups.size(),
                      /*cost_per_unit=*/200 + 8 * width, update);
  }

  // The gradient of a group's row, summed into `sum` unless it stands alone in
  // floats; `oldest` becomes the oldest version it was pulled at.
  static const float* SumOfGroup(const RowGroups& groups, int64_t group,
                                 const T* gradient, int64_t width,
                                 const int64_t* pulled, int64_t* oldest,
                                 std::vector<float>* sum) {
    int64_t position = groups.first(group);
    if constexpr (std::is_same_v<T, float>) {
      if (groups.next(position) < 0) return gradient + position * width;
    }
    std::fill(sum->begin(), sum->end(), 0.0f);
    for (; position >= 0; position = groups.next(position)) {
      const T* g = gradient + position * width;
      for (int64_t i = 0; i < width; ++i) {
        (*sum)[i] += static_cast<float>(g[i]);
      }
      if (pulled != nullptr) *oldest = std::min(*oldest, pulled[position]);
    }
    return sum->data();
  }
};

#define REGISTER_UPDATE(name, Rule, T)                              \
  REGISTER_KERNEL_BUILDER(Name("Recsync" name "Dense")              \
                              .Device(tensorflow::DEVICE_CPU)       \
                              .TypeConstraint<T>("T"),              \
                          DenseUpdateOp<Rule, T>);                  \
  REGISTER_KERNEL_BUILDER(Name("Recsync" name "Rows")               \
                              .Device(tensorflow::DEVICE_CPU)       \
                              .TypeConstraint<T>("T")               \
                              .TypeConstraint<int32_t>("Tindices"), \
                          RowsUpdateOp<Rule, T, int32_t>);          \
  REGISTER_KERNEL_BUILDER(Name("Recsync" name "Rows")               \
                              .Device(tensorflow::DEVICE_CPU)       \
                              .TypeConstraint<T>("T")               \
                              .TypeConstraint<int64_t>("Tindices"), \
                          RowsUpdateOp<Rule, T, int64_t>);
#define REGISTER_RULE(name, Rule)          \
  REGISTER_UPDATE(name, Rule, float)       \
  REGISTER_UPDATE(name, Rule, Eigen::half) \
  REGISTER_UPDATE(name, Rule, Eigen::bfloat16)

REGISTER_RULE("Sgd", SgdRule)
REGISTER_RULE("Adagrad", AdagradRule)

#undef REGISTER_RULE
#undef REGISTER_UPDATE

}  // namespace
}  // namespace recsync
