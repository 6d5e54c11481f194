// Kernels that update rows of tables: check, join the writers, call the engine.

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/free_list.h"
#include "cc/engine/row_checks.h"
#include "cc/engine/row_partitions.h"
#include "cc/engine/row_update.h"
#include "cc/engine/update_rules.h"
#include "cc/kernels/log_decays.h"
#include "cc/kernels/packed_rows.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/row_roundings.h"
#include "cc/kernels/update_op.h"
#include "cc/kernels/write_session.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"

namespace recsync {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Gradients and row ids are converted where they are not what the engine takes:
// `values` as they are, or `buffer`.
template <typename From, typename To>
const To* Converted(const Tensor& tensor, std::vector<To>* buffer) {
  const auto values = tensor.flat<From>();
  buffer->resize(values.size());
  for (int64_t i = 0; i < values.size(); ++i) {
    (*buffer)[i] = static_cast<To>(values(i));
  }
  return buffer->data();
}

template <typename Rule>
class RowsUpdateOp : public UpdateOp<Rule> {
 public:
  explicit RowsUpdateOp(tensorflow::OpKernelConstruction* ctx)
      : UpdateOp<Rule>(ctx) {
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, ReadDecayed(ctx, &decayed_));
    OP_REQUIRES_OK(ctx, ReadRoundings(ctx, &roundings_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> held;
    std::vector<Target> targets;
    OP_REQUIRES_OK(ctx, this->LookupTargets(ctx, &held, &targets));
    OP_REQUIRES_OK(ctx, LookupDecays(ctx, &held, &targets));
    Rule rule;
    int64_t global_step;
    OP_REQUIRES_OK(ctx, this->ReadRuleInputs(ctx, &rule, &global_step));
    typename FreeList<Scratch>::Lease scratch(&scratch_);
    PackedRows rows;
    OP_REQUIRES_OK(ctx, ReadPush(ctx, targets, &rows, &*scratch));
    // Then there is nothing to update, and no table to be locked.
    const bool moves_all = RowUpdate<Rule>::MovesAll(rule);
    if (!moves_all && rows.size() == 0 && rows.bag_offsets.back() == 0 &&
        IsEmpty(ctx, "gradient")) {
      return;
    }
    const int64_t n = targets.size();
    std::vector<int64_t> widths(n, 0);
    // All is checked before anything is written, so that a push is not applied
    // by halves. The tables follow one another in this thread, and only the
    // rows of one are spread over the thread pool: a pool's thread that waited
    // for a table's lock could be the one that the lock's holder waits for.
    std::optional<WriteSession> session;
    for (int64_t i = 0; i < n; ++i) {
      session.reset();
      session.emplace(ctx, targets[i].All());
      OP_REQUIRES_OK(ctx, session->status());
      OP_REQUIRES_OK(ctx, CheckTable(targets[i], &widths[i]));
      OP_REQUIRES_OK(ctx, CheckRows(ctx, targets[i], &scratch->pushes[i]));
    }
    OP_REQUIRES_OK(ctx, PlaceGradients(ctx, rows, widths, &*scratch));
    for (int64_t i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, Partition(ctx, i, &scratch->pushes[i], widths[i]));
    }
    for (int64_t i = 0; i < n; ++i) {
      TablePush& push = scratch->pushes[i];
      if (n > 1) {  // else the session of the check goes on
        session.reset();
        if (push.n == 0 && !moves_all) continue;
        session.emplace(ctx, targets[i].All());
        OP_REQUIRES_OK(ctx, session->status());
        int64_t width;
        OP_REQUIRES_OK(ctx, CheckTable(targets[i], &width));
        OP_REQUIRES(ctx,
                    width == widths[i] &&
                        targets[i].variable->tensor()->dim_size(0) == push.rows,
                    absl::InvalidArgumentError(
                        "a table changed its shape while it was updated"));
      }
      const RowUpdate<Rule> update(rule, this->options_, global_step,
                                   ViewOf(i, targets[i], push.rows, widths[i]),
                                   push.push);
      const RowPartitions& partitions = push.partitions;
      const int64_t rows_each = push.n / partitions.count() + 1;
      ParallelFor(ctx, partitions.count(), rows_each * (200 + 4 * widths[i]),
                  [&](int64_t begin, int64_t end) {
                    update.Run(partitions, begin, end);
                  });
      if (!moves_all) continue;
      ParallelFor(
          ctx, push.rows, 50 + 4 * widths[i],
          [&](int64_t begin, int64_t end) { update.RunRest(begin, end); });
    }
  }

 private:
  // What is pushed to one table.
  struct TablePush {
    const int64_t* ids;
    int64_t n;     // of `ids`
    int64_t rows;  // of the table, when the ids were checked
    RowPush push;
    RowPartitions partitions;
  };
  // The buffers of a call, kept for the next one.
  struct Scratch {
    std::vector<int64_t> ids;
    std::vector<float> gradient;
    const float* floats;  // the gradient
    std::vector<TablePush> pushes;
  };

  // Looks up the log-decays of the tables that have some.
  absl::Status LookupDecays(OpKernelContext* ctx,
                            std::vector<VariablePtr>* held,
                            std::vector<Target>* targets) const {
    std::vector<VariablePtr> log_decays;
    TF_RETURN_IF_ERROR(
        LookupLogDecays(ctx, decayed_, targets->size(), &log_decays));
    for (const int64_t table : decayed_) {
      (*targets)[table].log_decays = log_decays[table].get();
      held->push_back(std::move(log_decays[table]));
    }
    return decayed_.empty() ? absl::OkStatus() : this->CheckTargets(*targets);
  }

  static bool IsEmpty(OpKernelContext* ctx, const char* name) {
    const Tensor* input;
    return ctx->input(name, &input).ok() && input->NumElements() == 0;
  }

  // Reads the inputs, all but what depends on the tables.
  static absl::Status ReadPush(OpKernelContext* ctx,
                               const std::vector<Target>& targets,
                               PackedRows* rows, Scratch* scratch) {
    const Tensor* gradient;
    const Tensor* pulled;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "gradient", &gradient));
    TF_RETURN_IF_ERROR(ReadVector(ctx, "pulled_versions", &pulled));
    const int64_t tables = targets.size();
    TF_RETURN_IF_ERROR(ReadPackedRows(ctx, tables, rows));
    const int64_t n = rows->size();
    if (n > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat("indices must hold less than 2^31 row ids, not ", n));
    }
    if (pulled->NumElements() != 0 && pulled->NumElements() != n) {
      return absl::InvalidArgumentError(
          absl::StrCat("pulled_versions must hold ", n,
                       " versions or none, not ", pulled->NumElements()));
    }
    const int64_t* ids = rows->indices->dtype() == tensorflow::DT_INT32
                             ? Converted<int32_t>(*rows->indices, &scratch->ids)
                             : rows->indices->flat<int64_t>().data();
    scratch->pushes.resize(tables);
    // Without rows, nothing says that a push is fresh.
    static constexpr int64_t kNone = 0;
    for (int64_t i = 0; i < tables; ++i) {
      TablePush& push = scratch->pushes[i];
      push.ids = ids + rows->offsets[i];
      push.n = rows->size(i);
      push.push.bags = rows->BagsOf(i);
      push.push.pulled =
          n == 0 ? &kNone
          : pulled->NumElements() == 0
              ? nullptr
              : pulled->flat<int64_t>().data() + rows->offsets[i];
    }
    return absl::OkStatus();
  }

  // Lock: the target's, by a session.
  static absl::Status CheckTable(const Target& target, int64_t* width) {
    TF_RETURN_IF_ERROR(RowWidth(*target.variable, width));
    const tensorflow::TensorShape& shape = target.variable->tensor()->shape();
    const tensorflow::TensorShape per_row({shape.dim_size(0)});
    RowDecay decay;
    TF_RETURN_IF_ERROR(
        RowDecayOf(target.log_decays, shape.dim_size(0), &decay));
    return CheckBeside(target, Rule::kOnePerRow ? per_row : shape, per_row,
                       tensorflow::DT_INT32);
  }

  // Checks the row ids and the versions pulled. Lock: the target's, by a
  // session; other pushes may raise versions meanwhile, which harms nothing.
  static absl::Status CheckRows(OpKernelContext* ctx, const Target& target,
                                TablePush* push) {
    push->rows = target.variable->tensor()->dim_size(0);
    const int64_t bad = FirstNotARow(push->ids, push->n, push->rows);
    if (bad >= 0) return NotARow(bad, push->ids[bad], push->rows);
    const int64_t* pulled = push->push.pulled;
    if (pulled == nullptr) return absl::OkStatus();
    const int64_t* versions = Data<int64_t>(target.versions);
    std::atomic<int64_t> wrong{-1};
    ParallelFor(ctx, push->n, /*cost=*/20, [&](int64_t begin, int64_t end) {
      const int64_t at =
          FirstNotAVersion(push->ids, pulled, versions, begin, end);
      if (at >= 0) wrong.store(at, std::memory_order_relaxed);
    });
    if (wrong < 0) return absl::OkStatus();
    // If the version has come up to it meanwhile, the push may go on as well.
    return UpdateOp<Rule>::CheckPulled(
        pulled[wrong],
        __atomic_load_n(versions + push->ids[wrong], __ATOMIC_RELAXED));
  }

  // Where each table's gradients start.
  static absl::Status PlaceGradients(OpKernelContext* ctx,
                                     const PackedRows& rows,
                                     const std::vector<int64_t>& widths,
                                     Scratch* scratch) {
    const Tensor* gradient;
    TF_RETURN_IF_ERROR(ctx->input("gradient", &gradient));
    std::vector<int64_t> starts;
    TF_RETURN_IF_ERROR(PackedStarts(rows, widths, &starts));
    if (gradient->NumElements() != starts.back()) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradient must hold the rows' ", starts.back(),
                       " elements, not ", gradient->NumElements()));
    }
    const float* floats;
    switch (gradient->dtype()) {
      case tensorflow::DT_HALF:
        floats = Converted<Eigen::half>(*gradient, &scratch->gradient);
        break;
      case tensorflow::DT_BFLOAT16:
        floats = Converted<Eigen::bfloat16>(*gradient, &scratch->gradient);
        break;
      default:
        floats = gradient->flat<float>().data();
    }
    for (size_t i = 0; i < scratch->pushes.size(); ++i) {
      scratch->pushes[i].push.gradient = floats + starts[i];
    }
    return absl::OkStatus();
  }

  // Needs no lock: it looks at the push alone.
  absl::Status Partition(OpKernelContext* ctx, int64_t i, TablePush* push,
                         int64_t width) {
    push->partitions.Build(push->ids, push->n,
                           [ctx](int64_t count, int64_t cost, const auto& f) {
                             ParallelFor(ctx, count, cost, f);
                           });
    if (this->options_.nonfinite != Nonfinite::kError) return absl::OkStatus();
    const int64_t row = FindNonfiniteRow(push->push, width, push->partitions);
    if (row < 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("gradient of ", this->options_.NameOf("table", i),
                     ", row ", row, " is not finite"));
  }

  // Lock: the target's, by a session.
  TableView ViewOf(int64_t number, const Target& target, int64_t rows,
                   int64_t width) const {
    TableView view;
    void* values = target.variable->tensor()->data();
    if (target.variable->tensor()->dtype() == tensorflow::DT_BFLOAT16) {
      view.narrow = static_cast<BFloat16*>(values);
    } else {
      view.values = static_cast<float*>(values);
    }
    for (size_t a = 0; a < target.accumulators.size(); ++a) {
      view.accumulators[a] = Data<float>(target.accumulators[a]);
    }
    view.versions = Data<int64_t>(target.versions);
    view.counters = Data<int64_t>(target.counters);
    view.last_periods = Data<int32_t>(target.last_periods);
    view.last_updates = Data<float>(target.last_updates);
    view.last_steps = Data<int32_t>(target.last_steps);
    // It was checked with the table.
    RowDecayOf(target.log_decays, rows, &view.decay).IgnoreError();
    view.rounding = &roundings_[number];
    view.rows = rows;
    view.width = width;
    return view;
  }

  std::vector<int64_t> decayed_;        // the tables that have log-decays
  std::vector<RowRounding> roundings_;  // of each table
  FreeList<Scratch> scratch_;
};

#define REGISTER_RULE(name, Rule)                                 \
  REGISTER_KERNEL_BUILDER(                                        \
      Name("Recsync" name "Rows").Device(tensorflow::DEVICE_CPU), \
      RowsUpdateOp<Rule>);

REGISTER_RULE("Sgd", SgdRule)
REGISTER_RULE("Adagrad", AdagradRule)
REGISTER_RULE("RowwiseAdagrad", RowwiseAdagradRule)
REGISTER_RULE("Adam", AdamRule)
REGISTER_RULE("Ftrl", FtrlRule)

#undef REGISTER_RULE

}  // namespace
}  // namespace recsync
