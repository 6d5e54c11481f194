// Kernels of the gradient buffer: check the inputs and call the engine.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/gradient_buffer.h"
#include "cc/engine/limits.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/packed_rows.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/resource_op.h"
#include "cc/kernels/update_attributes.h"
#include "cc/kernels/update_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// What the engine says is wrong.
absl::Status AsStatus(const Result& result) {
  if (result.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(result.error());
}

class BufferResource : public tensorflow::ResourceBase {
 public:
  explicit BufferResource(const GradientBufferOptions& options)
      : buffer(options) {}

  std::string DebugString() const override {
    return absl::StrCat("gradient buffer: ", Describe(buffer.options()));
  }

  GradientBuffer buffer;
};

using BufferPtr = tensorflow::core::RefCountPtr<BufferResource>;

class GradientBufferOp : public ResourceOp<BufferResource> {
 public:
  explicit GradientBufferOp(OpKernelConstruction* ctx) : ResourceOp(ctx) {
    float divisor;
    std::vector<int64_t> rows, widths;
    if (shared_name_.empty()) shared_name_ = name();
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity", &options_.capacity));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("divisor", &divisor));
    OP_REQUIRES_OK(ctx, ReadStalenessWeight(ctx, &options_.weight));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("drop_late", &options_.drop_late));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dense_size", &options_.dense_size));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dense_count", &options_.dense_count));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_rows", &rows));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_widths", &widths));
    OP_REQUIRES(ctx, rows.size() == widths.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    "table_rows and table_widths must be of the same tables, "
                    "not ",
                    rows.size(), " and ", widths.size())));
    options_.divisor = divisor;
    for (size_t t = 0; t < rows.size(); ++t) {
      options_.tables.push_back({rows[t], widths[t]});
    }
    OP_REQUIRES_OK(ctx, AsStatus(CheckOptions(options_)));
  }

 protected:
  BufferPtr Make() const override {
    return BufferPtr(new BufferResource(options_));
  }

  absl::Status CheckSame(const BufferResource& resource) const override {
    const std::string wanted = Describe(options_);
    const std::string found = Describe(resource.buffer.options());
    if (found == wanted) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "shared_name = ", shared_name_,
        " is a gradient buffer of other options: ", found, "; not ", wanted));
  }

 private:
  GradientBufferOptions options_;
};

// A kernel whose input 0 is a gradient buffer.
class BufferOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    BufferPtr resource;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "buffer", &resource));
    OP_REQUIRES_OK(ctx, ComputeOn(ctx, &resource->buffer));
  }

 protected:
  virtual absl::Status ComputeOn(OpKernelContext* ctx,
                                 GradientBuffer* buffer) = 0;
};

// Writes a step that was given out, or that there is none (null), to the
// outputs of a push or flush.
absl::Status WriteAggregate(OpKernelContext* ctx, const GradientBuffer& buffer,
                            const Aggregate* aggregate) {
  const bool ready = aggregate != nullptr;
  const GradientBufferOptions& options = buffer.options();
  const int64_t tables = options.tables.size();
  TF_RETURN_IF_ERROR(WriteScalar(ctx, "ready", ready));
  TF_RETURN_IF_ERROR(WriteScalar<int64_t>(
      ctx, "step", ready ? aggregate->step() : buffer.step() + 1));
  const bool has_dense = ready && aggregate->has_dense();
  const int64_t size = has_dense ? options.dense_size : 0;
  float* dense;
  TF_RETURN_IF_ERROR(MakeVector(ctx, "dense_sum", size, &dense));
  if (has_dense) {
    ParallelFor(ctx, size, /*cost=*/2, [&](int64_t begin, int64_t end) {
      aggregate->WriteDense(begin, end, dense);
    });
  }
  const std::vector<int64_t> versions =
      has_dense ? aggregate->dense_versions() : std::vector<int64_t>();
  int64_t* to;
  TF_RETURN_IF_ERROR(
      MakeVector<int64_t>(ctx, "dense_sum_versions", versions.size(), &to));
  std::copy(versions.begin(), versions.end(), to);

  int64_t* counts;
  TF_RETURN_IF_ERROR(MakeVector(ctx, "row_counts", tables, &counts));
  int64_t rows = 0, floats = 0;
  for (int64_t t = 0; t < tables; ++t) {
    counts[t] = ready ? aggregate->rows(t).size() : 0;
    rows += counts[t];
    floats += counts[t] * options.tables[t].width;
  }
  float* sums;
  int64_t* ids;
  int64_t* row_versions;
  const bool versioned = ready && aggregate->has_row_versions();
  TF_RETURN_IF_ERROR(MakeVector(ctx, "row_sums", floats, &sums));
  TF_RETURN_IF_ERROR(MakeVector(ctx, "row_ids", rows, &ids));
  TF_RETURN_IF_ERROR(
      MakeVector(ctx, "row_versions", versioned ? rows : 0, &row_versions));
  for (int64_t t = 0; t < tables; ++t) {
    if (counts[t] == 0) continue;
    const RowSums& from = aggregate->rows(t);
    ParallelFor(ctx, counts[t], 20 + 2 * from.width(),
                [&](int64_t begin, int64_t end) {
                  aggregate->WriteRows(t, begin, end, sums);
                  for (int64_t i = begin; i < end; ++i) {
                    ids[i] = from.id(i);
                    if (versioned) row_versions[i] = from.oldest(i);
                  }
                });
    sums += counts[t] * from.width();
    ids += counts[t];
    if (versioned) row_versions += counts[t];
  }
  return absl::OkStatus();
}

std::vector<int64_t> Values(const Tensor& tensor) {
  const auto values = tensor.vec<int64_t>();
  return {values.data(), values.data() + values.size()};
}

class PushOp : public BufferOp {
 public:
  explicit PushOp(OpKernelConstruction* ctx) : BufferOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
  }

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    GradientPush push;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "token_index", &push.token_index));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "token_value", &push.token_value));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "ticket", &push.ticket));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "pulled_step", &push.pulled_step));
    TF_RETURN_IF_ERROR(ReadDense(ctx, buffer->options(), &push));
    TF_RETURN_IF_ERROR(ReadRows(ctx, buffer->options(), &push));
    std::unique_ptr<Aggregate> aggregate;
    TF_RETURN_IF_ERROR(AsStatus(buffer->Push(push, &aggregate)));
    return WriteAggregate(ctx, *buffer, aggregate.get());
  }

 private:
  // A vector of `expected` elements, or of none: then null.
  template <typename V>
  static absl::Status ReadOptional(OpKernelContext* ctx, const char* name,
                                   int64_t expected, const V** values) {
    const Tensor* input;
    TF_RETURN_IF_ERROR(ReadVector(ctx, name, &input));
    const int64_t n = input->NumElements();
    if (n != 0 && n != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, " must hold ", expected, " elements or none, not ", n));
    }
    *values = n == 0 ? nullptr : input->flat<V>().data();
    return absl::OkStatus();
  }

  static absl::Status ReadDense(OpKernelContext* ctx,
                                const GradientBufferOptions& options,
                                GradientPush* push) {
    TF_RETURN_IF_ERROR(
        ReadOptional(ctx, "dense", options.dense_size, &push->dense));
    return ReadOptional(ctx, "dense_versions", options.dense_count,
                        &push->dense_versions);
  }

  absl::Status ReadRows(OpKernelContext* ctx,
                        const GradientBufferOptions& options,
                        GradientPush* push) const {
    const int64_t known = options.tables.size();
    std::vector<int64_t> widths;
    for (size_t i = 0; i < tables_.size(); ++i) {
      if (tables_[i] < 0 || tables_[i] >= known) {
        return absl::InvalidArgumentError(
            absl::StrCat("tables[", i, "] = ", tables_[i],
                         " is not one of the buffer's ", known, " tables"));
      }
      widths.push_back(options.tables[tables_[i]].width);
    }
    PackedRows rows;
    TF_RETURN_IF_ERROR(ReadPackedRows(ctx, tables_.size(), &rows));
    if (rows.size() > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "indices must hold less than 2^31 row ids, not ", rows.size()));
    }
    std::vector<int64_t> starts;
    TF_RETURN_IF_ERROR(PackedStarts(rows, widths, &starts));
    const Tensor* gradient;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "gradient", &gradient));
    if (gradient->NumElements() != starts.back()) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradient must hold the rows' ", starts.back(),
                       " elements, not ", gradient->NumElements()));
    }
    const int64_t* pulled = nullptr;
    TF_RETURN_IF_ERROR(
        ReadOptional(ctx, "pulled_versions", rows.size(), &pulled));
    for (size_t i = 0; i < tables_.size(); ++i) {
      TableGradient table;
      table.table = tables_[i];
      table.ids = rows.indices->flat<int64_t>().data() + rows.offsets[i];
      table.n = rows.size(i);
      table.push.gradient = gradient->flat<float>().data() + starts[i];
      table.push.bags = rows.BagsOf(i);
      if (pulled != nullptr) table.push.pulled = pulled + rows.offsets[i];
      push->tables.push_back(table);
    }
    return absl::OkStatus();
  }

  std::vector<int64_t> tables_;
};

class FlushOp : public BufferOp {
 public:
  using BufferOp::BufferOp;

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    const std::unique_ptr<Aggregate> aggregate = buffer->Flush();
    return WriteAggregate(ctx, *buffer, aggregate.get());
  }
};

class StepOp : public BufferOp {
 public:
  using BufferOp::BufferOp;

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    // In this order, so that no more is applied than was given out.
    const int64_t applied = buffer->applied();
    TF_RETURN_IF_ERROR(WriteScalar<int64_t>(ctx, "step", buffer->step()));
    return WriteScalar<int64_t>(ctx, "applied", applied);
  }
};

class RevokeOp : public BufferOp {
 public:
  using BufferOp::BufferOp;

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    const Tensor* tickets;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "tickets", &tickets));
    const Revoked found = buffer->Revoke(Values(*tickets));
    TF_RETURN_IF_ERROR(WriteVector(ctx, "unapplied", found.unapplied));
    TF_RETURN_IF_ERROR(WriteVector(ctx, "taken", found.taken));
    return WriteScalar<int64_t>(ctx, "step", found.step);
  }
};

class SpendOp : public BufferOp {
 public:
  using BufferOp::BufferOp;

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    int64_t value, ticket;
    const Tensor* indices;
    TF_RETURN_IF_ERROR(ReadInteger(ctx, "token_value", 0, &value));
    TF_RETURN_IF_ERROR(ReadVector(ctx, "token_indices", &indices));
    TF_RETURN_IF_ERROR(ReadInteger(ctx, "ticket", 0, &ticket));
    std::unique_ptr<Aggregate> aggregate;
    TF_RETURN_IF_ERROR(
        AsStatus(buffer->Spend(value, Values(*indices), ticket, &aggregate)));
    return WriteAggregate(ctx, *buffer, aggregate.get());
  }
};

class AppliedOp : public BufferOp {
 public:
  using BufferOp::BufferOp;

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    bool ready;
    int64_t step;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "ready", &ready));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "step", &step));
    if (ready) TF_RETURN_IF_ERROR(AsStatus(buffer->Applied(step)));
    return WriteScalar<int64_t>(ctx, "applied", buffer->applied());
  }
};

class StateOp : public BufferOp {
 public:
  using BufferOp::BufferOp;

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    const GradientBufferState s = buffer->state();
    const std::vector<int64_t> counts = {
        s.step, s.applied,    s.pending, s.included,     s.decayed, s.excluded,
        s.late, s.duplicates, s.spent,   s.applications, s.age_sum, s.age_max};
    int64_t* to;
    TF_RETURN_IF_ERROR(MakeVector<int64_t>(
        ctx, "counters", counts.size() + s.staleness.size(), &to));
    to = std::copy(counts.begin(), counts.end(), to);
    std::copy(s.staleness.begin(), s.staleness.end(), to);
    return absl::OkStatus();
  }
};

class RestoreOp : public BufferOp {
 public:
  using BufferOp::BufferOp;

 protected:
  absl::Status ComputeOn(OpKernelContext* ctx,
                         GradientBuffer* buffer) override {
    int64_t step;
    TF_RETURN_IF_ERROR(ReadInteger(ctx, "step", 0, &step));
    buffer->Restore(step);
    return absl::OkStatus();
  }
};

#define REGISTER_BUFFER(name, Op)                                              \
  REGISTER_KERNEL_BUILDER(Name("Recsync" name).Device(tensorflow::DEVICE_CPU), \
                          Op);

REGISTER_BUFFER("GradientBuffer", GradientBufferOp)
REGISTER_BUFFER("GradientBufferStep", StepOp)
REGISTER_BUFFER("PushToBuffer", PushOp)
REGISTER_BUFFER("FlushBuffer", FlushOp)
REGISTER_BUFFER("RevokeTickets", RevokeOp)
REGISTER_BUFFER("SpendTokens", SpendOp)
REGISTER_BUFFER("BufferApplied", AppliedOp)
REGISTER_BUFFER("GradientBufferState", StateOp)
REGISTER_BUFFER("RestoreBuffer", RestoreOp)

#undef REGISTER_BUFFER

}  // namespace
}  // namespace recsync
