// Kernels that update rows of tables: check, lock, call the engine's rules.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/bags.h"
#include "cc/engine/mutex.h"
#include "cc/engine/nonfinite.h"
#include "cc/engine/row_groups.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/update_rules.h"
#include "cc/kernels/packed_rows.h"
#include "cc/kernels/update_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/util/work_sharder.h"

namespace recsync {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

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
    const Tensor* pulled;
    PackedRows rows;
    const int64_t n = targets.size();
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "gradient", &gradient));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "pulled_versions", &pulled));
    OP_REQUIRES_OK(ctx, ReadPackedRows(ctx, n, &rows));
    OP_REQUIRES(
        ctx, pulled->NumElements() == 0 || pulled->NumElements() == rows.size(),
        absl::InvalidArgumentError(
            absl::StrCat("pulled_versions must hold ", rows.size(),
                         " versions or none, not ", pulled->NumElements())));
    std::vector<int64_t> widths(n);
    for (int64_t i = 0; i < n; ++i) {
      tensorflow::tf_shared_lock lock(*targets[i].variable->mu());
      OP_REQUIRES_OK(ctx, RowWidth(*targets[i].variable, &widths[i]));
    }
    std::vector<int64_t> starts;  // of each table in `gradient`
    OP_REQUIRES_OK(ctx, PackedStarts(rows, widths, &starts));
    OP_REQUIRES(ctx, gradient->NumElements() == starts[n],
                absl::InvalidArgumentError(
                    absl::StrCat("gradient must hold the rows' ", starts[n],
                                 " elements, not ", gradient->NumElements())));
    std::vector<Push> pushes(n);
    for (int64_t i = 0; i < n; ++i) {
      Push& push = pushes[i];
      push.table = i;
      push.gradient = gradient->flat<T>().data() + starts[i];
      push.width = widths[i];
      push.ids = rows.indices->flat<Index>().data() + rows.offsets[i];
      push.bags = rows.BagsOf(i);
      if (pulled->NumElements() > 0) {
        push.pulled = pulled->flat<int64_t>().data() + rows.offsets[i];
      }
      push.n = rows.size(i);
    }
    // All is checked before anything is written, so that a push is not applied
    // by halves. The tables follow one another in this thread, and only the
    // rows of one are spread over the thread pool: a pool's thread that waited
    // for a table's lock could be the one that the lock's holder waits for.
    for (const bool write : {false, true}) {
      for (int64_t i = 0; i < n; ++i) {
        Push& push = pushes[i];
        if (push.n == 0) continue;
        const ExclusiveLocks locks(targets[i].All());
        OP_REQUIRES_OK(ctx, CheckPush(ctx, targets[i], push));
        if (write) {
          UpdateRows(ctx, rule, global_step, targets[i], push);
        } else {
          push.groups.Build(push.ids, push.n);
          OP_REQUIRES_OK(ctx, CheckFinite(push));
        }
      }
    }
  }

 private:
  // What is pushed to one table.
  struct Push {
    int64_t table;
    const T* gradient;  // [bags, width]
    int64_t width;
    const Index* ids;
    Bags bags;
    const int64_t* pulled = nullptr;  // null for fresh gradients
    int64_t n;                        // of `ids` and `pulled`
    RowGroups groups;                 // of `ids`
  };

  // Lock: the target's, exclusive.
  absl::Status CheckPush(OpKernelContext* ctx, const Target& target,
                         const Push& push) {
    TF_RETURN_IF_ERROR(Prepare(ctx, target, /*sparse=*/true));
    int64_t width;
    TF_RETURN_IF_ERROR(RowWidth(*target.variable, &width));
    if (width != push.width) {
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

  // With nonfinite = error: refuses a row whose gradient is not finite.
  absl::Status CheckFinite(const Push& push) const {
    if (this->attributes_.nonfinite != Nonfinite::kError) {
      return absl::OkStatus();
    }
    std::vector<float> sum(static_cast<size_t>(push.width));
    for (int64_t group = 0; group < push.groups.size(); ++group) {
      int64_t oldest = 0;
      if (!AllFinite(SumOfGroup(push, group, &oldest, &sum), push.width)) {
        return absl::InvalidArgumentError(
            absl::StrCat("gradient of table ", push.table, ", row ",
                         push.groups.row(group), " is not finite"));
      }
    }
    return absl::OkStatus();
  }

  // Lock: the target's, exclusive. The push has been checked.
  void UpdateRows(OpKernelContext* ctx, const Rule& rule, int64_t global_step,
                  const Target& target, const Push& push) {
    const RowGroups& groups = push.groups;
    const int64_t* pulled = push.pulled;
    const int64_t width = push.width;
    const StalenessWeight& weight = this->attributes_.weight;
    const Swap& swap = this->attributes_.swap;
    const bool measure = weight.uses_last_update();
    const bool skips = this->attributes_.nonfinite == Nonfinite::kSkip;
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
        const float* g = SumOfGroup(push, group, &oldest, &sum);
        if (skips && !AllFinite(g, width)) {
          counted.AddSkipped();
          continue;
        }
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
  static const float* SumOfGroup(const Push& push, int64_t group,
                                 int64_t* oldest, std::vector<float>* sum) {
    const RowGroups& groups = push.groups;
    const Bags& bags = push.bags;
    int64_t position = groups.first(group);
    if constexpr (std::is_same_v<T, float>) {
      if (groups.next(position) < 0 && bags.scales == nullptr) {
        return push.gradient + bags.bag(position) * push.width;
      }
    }
    std::fill(sum->begin(), sum->end(), 0.0f);
    for (; position >= 0; position = groups.next(position)) {
      AddScaled(push.gradient + bags.bag(position) * push.width,
                bags.scale(position), push.width, sum->data());
      if (push.pulled != nullptr) {
        *oldest = std::min(*oldest, push.pulled[position]);
      }
    }
    return sum->data();
  }
};

#define REGISTER_ROWS(name, Rule, T, Index)                       \
  REGISTER_KERNEL_BUILDER(Name("Recsync" name "Rows")             \
                              .Device(tensorflow::DEVICE_CPU)     \
                              .TypeConstraint<T>("T")             \
                              .TypeConstraint<Index>("Tindices"), \
                          RowsUpdateOp<Rule, T, Index>);
#define REGISTER_RULE(name, Rule)                     \
  REGISTER_ROWS(name, Rule, float, int32_t)           \
  REGISTER_ROWS(name, Rule, float, int64_t)           \
  REGISTER_ROWS(name, Rule, Eigen::half, int32_t)     \
  REGISTER_ROWS(name, Rule, Eigen::half, int64_t)     \
  REGISTER_ROWS(name, Rule, Eigen::bfloat16, int32_t) \
  REGISTER_ROWS(name, Rule, Eigen::bfloat16, int64_t)

REGISTER_RULE("Sgd", SgdRule)
REGISTER_RULE("Adagrad", AdagradRule)

#undef REGISTER_RULE
#undef REGISTER_ROWS

}  // namespace
}  // namespace recsync
