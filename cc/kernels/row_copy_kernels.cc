// Kernels that find and read rows of tables as they are, to save them.

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/changed_rows.h"
#include "cc/engine/row_checks.h"
#include "cc/engine/row_copy.h"
#include "cc/kernels/checked_shape.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/log_decays.h"
#include "cc/kernels/packed_rows.h"
#include "cc/kernels/page_allocator.h"
#include "cc/kernels/parallel_for.h"
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
using tensorflow::Var;

class CopyRowsOp : public OpKernel {
 public:
  explicit CopyRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int n;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &dtypes_));
    OP_REQUIRES(ctx, static_cast<int>(dtypes_.size()) == n,
                absl::InvalidArgumentError(
                    absl::StrCat("dtypes must be one for each of the ", n,
                                 " variables, not ", dtypes_.size())));
    OP_REQUIRES_OK(ctx, ReadDecayed(ctx, &decayed_));
    for (const tensorflow::DataType dtype : dtypes_) {
      OP_REQUIRES(ctx, tensorflow::DataTypeCanUseMemcpy(dtype),
                  absl::InvalidArgumentError(absl::StrCat(
                      "dtypes can't be ", tensorflow::DataTypeString(dtype))));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> held;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "variables", &held));
    const Tensor* rows;
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "rows", &rows));
    std::vector<Var*> variables;
    for (const VariablePtr& variable : held) {
      variables.push_back(variable.get());
    }
    std::vector<VariablePtr> log_decays;
    OP_REQUIRES_OK(ctx, LookupLogDecays(ctx, decayed_, 1, &log_decays));
    std::vector<Var*> read = variables;
    if (log_decays[0] != nullptr) read.push_back(log_decays[0].get());
    OP_REQUIRES_OK(ctx, CheckDistinct(read));
    const ReadSession session(read);
    std::vector<RowField> fields(variables.size());
    const int64_t n = rows->NumElements();
    int64_t count = 0;  // rows that there are
    int64_t bytes = 0;  // of what is copied of a row
    for (size_t i = 0; i < variables.size(); ++i) {
      OP_REQUIRES_OK(ctx,
                     CheckVariable(*variables[i], "variables", dtypes_[i]));
      const Tensor& value = *variables[i]->tensor();
      if (i == 0 && value.dims() > 0) count = value.dim_size(0);
      OP_REQUIRES(
          ctx, value.dims() > 0 && value.dim_size(0) == count,
          absl::InvalidArgumentError(absl::StrCat(
              "variables[", i, "] must have as many rows as the first one, ",
              count, ", not the shape ", value.shape().DebugString())));
      const int64_t elements = count == 0 ? 0 : value.NumElements() / count;
      TensorShape shape;
      // Rows may be named more than once.
      OP_REQUIRES_OK(
          ctx,
          MakeShape({{"rows", n}, {"elements of a row", elements}}, &shape));
      shape = value.shape();
      // Without elements, other dimensions may be of any size.
      OP_REQUIRES_OK(ctx, shape.SetDimWithStatus(0, n));
      const Tensor copied(PageAllocator::Global(), dtypes_[i], shape);
      OP_REQUIRES(ctx, copied.IsInitialized(),
                  absl::ResourceExhaustedError(absl::StrCat(
                      "there is no memory left for ", n, " rows")));
      ctx->set_output(i, copied);
      fields[i].from = static_cast<const char*>(value.data());
      fields[i].to = static_cast<char*>(copied.data());
      fields[i].bytes = elements * tensorflow::DataTypeSize(dtypes_[i]);
      bytes += fields[i].bytes;
    }
    const int64_t* ids = rows->flat<int64_t>().data();
    const int64_t bad = FirstNotARow(ids, n, count);
    OP_REQUIRES(ctx, bad < 0, NotARow(bad, ids[bad], count));
    CopiedDecay decayed;
    if (log_decays[0] != nullptr) {
      OP_REQUIRES_OK(ctx, RowWidth(*variables[0], &decayed.width));
      OP_REQUIRES_OK(ctx,
                     RowDecayOf(log_decays[0].get(), count, &decayed.decay));
      decayed.total = decayed.decay.total();
      decayed.is_narrow = dtypes_[0] == tensorflow::DT_BFLOAT16;
    }
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, "log_decay", decayed.total));
    // The locks of the table's rows are those by its values, as for updates.
    const void* const table =
        session.needs_row_locks() ? variables[0]->tensor()->data() : nullptr;
    ParallelFor(ctx, n, 20 + bytes, [&](int64_t begin, int64_t end) {
      CopyRows(fields, ids, begin, end, table, decayed);
    });
  }

 private:
  std::vector<tensorflow::DataType> dtypes_;
  std::vector<int64_t> decayed_;  // 0, if the first one has log-decays
};

class ChangedRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> versions, saved;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "versions", &versions));
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "saved", &saved));
    const ReadSession session({versions[0].get(), saved[0].get()});
    OP_REQUIRES_OK(
        ctx, CheckVariable(*versions[0], "versions", tensorflow::DT_INT64));
    OP_REQUIRES_OK(ctx,
                   CheckVariable(*saved[0], "saved", tensorflow::DT_INT64));
    const Tensor& now = *versions[0]->tensor();
    const Tensor& then = *saved[0]->tensor();
    OP_REQUIRES(
        ctx, now.dims() == 1,
        absl::InvalidArgumentError(absl::StrCat(
            "versions must be a vector, not ", now.shape().DebugString())));
    OP_REQUIRES(ctx, then.shape() == now.shape(),
                absl::InvalidArgumentError(absl::StrCat(
                    "saved must have shape ", now.shape().DebugString(),
                    ", not ", then.shape().DebugString())));
    int64_t begin, end;
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "end", 0, &end, now.NumElements()));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "begin", 0, &begin, end));
    // Memory that is not written is not taken: as much as rows have changed.
    Tensor rows(PageAllocator::Global(), tensorflow::DT_INT64,
                TensorShape({end - begin}));
    OP_REQUIRES(ctx, rows.IsInitialized(),
                absl::ResourceExhaustedError(absl::StrCat(
                    "there is no memory left for ", end - begin, " rows")));
    const int64_t count =
        ChangedRows(now.flat<int64_t>().data(), then.flat<int64_t>().data(),
                    begin, end, rows.flat<int64_t>().data());
    ctx->set_output(0, rows.Slice(0, count));
  }
};

REGISTER_KERNEL_BUILDER(Name("RecsyncCopyRows").Device(tensorflow::DEVICE_CPU),
                        CopyRowsOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncChangedRows").Device(tensorflow::DEVICE_CPU), ChangedRowsOp);

}  // namespace
}  // namespace recsync
