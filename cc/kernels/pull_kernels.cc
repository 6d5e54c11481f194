// Kernels of the pull ops.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/bags.h"
#include "cc/engine/hogwild.h"
#include "cc/engine/row_gather.h"
#include "cc/engine/row_locks.h"
#include "cc/kernels/log_decays.h"
#include "cc/kernels/message_pieces.h"
#include "cc/kernels/packed_rows.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/variable_access.h"
#include "cc/kernels/write_session.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"

namespace recsync {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tf_shared_lock;
using tensorflow::Var;

// Copies a variable's values, which Hogwild's updates may write meanwhile.
void CopyValues(const Tensor& value, const ReadSession& session, float* to) {
  const float* from = value.flat<float>().data();
  if (session.needs_row_locks()) {
    LoadHogwild(from, value.NumElements(), to);
  } else {
    std::copy_n(from, value.NumElements(), to);
  }
}

class PullDenseOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> variables;
    std::vector<VariablePtr> versions;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variables", &variables));
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "versions", &versions));
    const int64_t n = variables.size();
    OpInputList others;
    OP_REQUIRES_OK(ctx, ctx->input_list("others", &others));
    std::vector<int64_t> sizes(n);
    for (int64_t i = 0; i < n; ++i) {
      tf_shared_lock lock(*variables[i]->mu());
      OP_REQUIRES_OK(
          ctx, CheckVariable(*variables[i], "variables", tensorflow::DT_FLOAT));
      sizes[i] = variables[i]->tensor()->NumElements();
    }
    for (const Tensor& other : others) sizes.push_back(other.NumElements());
    const std::vector<int64_t> starts =
        MessageStarts<float>(sizes, std::vector<int64_t>(sizes.size(), 1));
    Tensor* packed;
    Tensor* pulled;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({starts.back()}), &packed));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({n}), &pulled));
    float* to = packed->flat<float>().data();
    for (int64_t i = 0; i < n; ++i) {
      const ReadSession session({variables[i].get(), versions[i].get()});
      const Tensor& value = *variables[i]->tensor();
      OP_REQUIRES(ctx, value.NumElements() == sizes[i],
                  absl::InvalidArgumentError(
                      "a variable changed its shape while it was pulled"));
      OP_REQUIRES_OK(
          ctx, CheckVariable(*versions[i], "versions", tensorflow::DT_INT64));
      const Tensor& version = *versions[i]->tensor();
      OP_REQUIRES(ctx, version.NumElements() == 1,
                  absl::InvalidArgumentError(
                      absl::StrCat("versions[", i, "] must be a scalar, not ",
                                   version.shape().DebugString())));
      {
        // Before the values: they may be newer than their version says.
        const RowLock lock(&RowLocks::Global().Of(versions[i].get(), 0));
        pulled->flat<int64_t>()(i) = version.flat<int64_t>()(0);
      }
      CopyValues(value, session, to + starts[i]);
    }
    for (int i = 0; i < others.size(); ++i) {
      CopyPiece(ctx, others[i].flat<float>().data(), sizes[n + i],
                to + starts[n + i]);
    }
    FillGaps(sizes, starts, to);
  }
};

template <typename Index>
class GatherRowsOp : public OpKernel {
 public:
  explicit GatherRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadDecayed(ctx, &decayed_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> tables;
    std::vector<VariablePtr> versions;
    PackedRows rows;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variables", &tables));
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "versions", &versions));
    const int64_t n = tables.size();
    const bool versioned = !versions.empty();
    OP_REQUIRES(ctx, !versioned || versions.size() == tables.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    "versions must be one for each of the ", n,
                    " variables, or none, not ", versions.size())));
    std::vector<VariablePtr> log_decays;
    OP_REQUIRES_OK(ctx, LookupLogDecays(ctx, decayed_, n, &log_decays));
    OP_REQUIRES_OK(ctx, ReadPackedRows(ctx, n, &rows));
    std::vector<int64_t> widths(n);
    for (int64_t i = 0; i < n; ++i) {
      if (versioned) {
        OP_REQUIRES_OK(ctx,
                       CheckDistinct({tables[i].get(), versions[i].get()}));
      }
      const ReadSession session({tables[i].get()});
      OP_REQUIRES_OK(ctx, RowWidth(*tables[i], &widths[i]));
    }
    std::vector<int64_t> starts;  // of each table in `packed`
    OP_REQUIRES_OK(ctx, PackedStarts(rows, widths, &starts));
    Tensor* packed;
    Tensor* pulled;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({starts[n]}), &packed));
    OP_REQUIRES_OK(
        ctx,
        ctx->allocate_output(
            1, versioned ? rows.indices->shape() : TensorShape({0}), &pulled));
    float* to = packed->flat<float>().data();
    if (rows.size() == 0) {
      std::fill_n(to, starts[n], 0.0f);  // bags without a row
      return;
    }
    // The tables follow one another in this thread, and only the rows of one
    // are spread over the thread pool: a pool's thread that waited for a
    // table's lock could be the one that the lock's holder waits for.
    for (int64_t i = 0; i < n; ++i) {
      Gathered gathered;
      gathered.ids = rows.indices->flat<Index>().data() + rows.offsets[i];
      gathered.n = rows.size(i);
      gathered.bags = rows.BagsOf(i);
      gathered.bag_count = rows.bag_count(i);
      gathered.width = widths[i];
      gathered.to = to + starts[i];
      if (versioned) {
        gathered.to_versions = pulled->flat<int64_t>().data() + rows.offsets[i];
      }
      OP_REQUIRES_OK(ctx, GatherTable(ctx, *tables[i],
                                      versioned ? versions[i].get() : nullptr,
                                      log_decays[i].get(), gathered));
    }
  }

 private:
  // What is gathered from one table, and where to.
  struct Gathered {
    const Index* ids;
    int64_t n;  // of `ids` and `to_versions`
    Bags bags;
    int64_t bag_count;
    int64_t width;
    float* to;                       // [bag_count, width]
    int64_t* to_versions = nullptr;  // without versions
  };

  static absl::Status GatherTable(OpKernelContext* ctx, Var& table,
                                  Var* table_versions, Var* log_decays,
                                  const Gathered& gathered) {
    std::vector<Var*> read = {&table};
    if (table_versions != nullptr) read.push_back(table_versions);
    if (log_decays != nullptr) read.push_back(log_decays);
    const ReadSession session(read);
    int64_t width;
    TF_RETURN_IF_ERROR(RowWidth(table, &width));
    if (width != gathered.width) {
      return absl::InvalidArgumentError(
          "a table changed its shape while it was pulled");
    }
    const int64_t rows = table.tensor()->dim_size(0);
    RowReader reader;
    if (table_versions != nullptr) {
      TF_RETURN_IF_ERROR(
          CheckVariable(*table_versions, "versions", tensorflow::DT_INT64));
      const Tensor& version = *table_versions->tensor();
      if (version.shape() != TensorShape({rows})) {
        return absl::InvalidArgumentError(
            absl::StrCat("versions must have shape [", rows, "], not ",
                         version.shape().DebugString()));
      }
      reader.versions = version.template flat<int64_t>().data();
    }
    TF_RETURN_IF_ERROR(RowDecayOf(log_decays, rows, &reader.decay));
    const void* values = table.tensor()->data();
    if (table.tensor()->dtype() == tensorflow::DT_BFLOAT16) {
      reader.narrow = static_cast<const BFloat16*>(values);
    } else {
      reader.values = static_cast<const float*>(values);
    }
    reader.rows = rows;
    reader.width = width;
    reader.locks = session.needs_row_locks();
    std::atomic<int64_t> bad{-1};
    const auto gather = [&](int64_t begin, int64_t end) {
      const int64_t at =
          GatherBags(reader, gathered.ids, gathered.n, gathered.bags, begin,
                     end, gathered.to, gathered.to_versions);
      if (at >= 0) bad.store(at, std::memory_order_relaxed);
    };
    const int64_t rows_per_bag =
        gathered.n / std::max<int64_t>(gathered.bag_count, 1) + 1;
    ParallelFor(ctx, gathered.bag_count, rows_per_bag * (50 + width), gather);
    if (bad >= 0) return NotARow(bad, gathered.ids[bad], rows);
    return absl::OkStatus();
  }

  std::vector<int64_t> decayed_;  // the tables that have log-decays
};

class PullTableOp : public OpKernel {
 public:
  explicit PullTableOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shape", &shape_));
    OP_REQUIRES_OK(ctx, ReadDecayed(ctx, &decayed_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> variable;
    std::vector<VariablePtr> versions;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variable", &variable));
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "versions", &versions));
    std::vector<VariablePtr> log_decays;
    OP_REQUIRES_OK(ctx, LookupLogDecays(ctx, decayed_, 1, &log_decays));
    std::vector<Var*> read = {variable[0].get(), versions[0].get()};
    if (log_decays[0] != nullptr) read.push_back(log_decays[0].get());
    OP_REQUIRES_OK(ctx, CheckDistinct(read));
    const SharedLocks locks(read);
    OP_REQUIRES_OK(
        ctx, CheckVariable(*variable[0], "variable", tensorflow::DT_FLOAT));
    OP_REQUIRES_OK(
        ctx, CheckVariable(*versions[0], "versions", tensorflow::DT_INT64));
    const Tensor& table = *variable[0]->tensor();
    const Tensor& version = *versions[0]->tensor();
    OP_REQUIRES(ctx,
                table.dims() >= 1 && shape_.IsCompatibleWith(table.shape()),
                absl::InvalidArgumentError(
                    absl::StrCat("shape must be ", table.shape().DebugString(),
                                 ", not ", shape_.DebugString())));
    OP_REQUIRES(ctx, version.shape() == TensorShape({table.dim_size(0)}),
                absl::InvalidArgumentError(absl::StrCat(
                    "versions must have shape [", table.dim_size(0), "], not ",
                    version.shape().DebugString())));
    RowDecay decay;
    OP_REQUIRES_OK(ctx,
                   RowDecayOf(log_decays[0].get(), table.dim_size(0), &decay));
    Tensor* values;
    Tensor* pulled;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, table.shape(), &values));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, version.shape(), &pulled));
    std::copy_n(table.flat<float>().data(), table.NumElements(),
                values->flat<float>().data());
    if (decay.enabled() && table.NumElements() > 0) {
      const int64_t width = table.NumElements() / table.dim_size(0);
      float* row = values->flat<float>().data();
      for (int64_t i = 0; i < table.dim_size(0); ++i, row += width) {
        Scale(decay.Factor(i), width, row);
      }
    }
    std::copy_n(version.flat<int64_t>().data(), version.NumElements(),
                pulled->flat<int64_t>().data());
  }

 private:
  PartialTensorShape shape_;
  std::vector<int64_t> decayed_;  // 0, if the table has log-decays
};

class NextGlobalStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> counter;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "global_step", &counter));
    Tensor* step;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &step));
    const ExclusiveLocks lock({counter[0].get()});
    OP_REQUIRES_OK(
        ctx, CheckVariable(*counter[0], "global_step", tensorflow::DT_INT64));
    OP_REQUIRES(ctx, counter[0]->tensor()->NumElements() == 1,
                absl::InvalidArgumentError(
                    absl::StrCat("global_step must be a scalar, not ",
                                 counter[0]->tensor()->shape().DebugString())));
    OP_REQUIRES_OK(ctx, MakeWritable(ctx, counter[0].get()));
    step->scalar<int64_t>()() = ++counter[0]->tensor()->flat<int64_t>()(0);
  }
};

REGISTER_KERNEL_BUILDER(Name("RecsyncPullTable").Device(tensorflow::DEVICE_CPU),
                        PullTableOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncNextGlobalStep").Device(tensorflow::DEVICE_CPU),
    NextGlobalStepOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncPullDense").Device(tensorflow::DEVICE_CPU),
                        PullDenseOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncGatherRows")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tindices"),
                        GatherRowsOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("RecsyncGatherRows")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tindices"),
                        GatherRowsOp<int64_t>);

}  // namespace
}  // namespace recsync
