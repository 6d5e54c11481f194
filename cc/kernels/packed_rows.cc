#include "cc/kernels/packed_rows.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "cc/engine/limits.h"

namespace recsync {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status ReadCounts(OpKernelContext* ctx, int64_t tables,
                        PackedRows* rows) {
  const Tensor* counts;
  TF_RETURN_IF_ERROR(ctx->input("indices", &rows->indices));
  TF_RETURN_IF_ERROR(ctx->input("counts", &counts));
  const Tensor& indices = *rows->indices;
  if (indices.dims() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "indices must be a vector, not ", indices.shape().DebugString()));
  }
  if (counts->shape() != TensorShape({tables})) {
    return absl::InvalidArgumentError(
        absl::StrCat("counts must have shape [", tables, "], not ",
                     counts->shape().DebugString()));
  }
  std::vector<int64_t>& offsets = rows->offsets;
  offsets.assign(1, 0);
  for (int64_t i = 0; i < tables; ++i) {
    const int64_t count = counts->flat<int64_t>()(i);
    if (count < 0 || count > indices.NumElements() - offsets.back()) break;
    offsets.push_back(offsets.back() + count);
  }
  if (static_cast<int64_t>(offsets.size()) != tables + 1 ||
      offsets.back() != indices.NumElements()) {
    return absl::InvalidArgumentError(
        absl::StrCat("counts must add up to the ", indices.NumElements(),
                     " indices, not ", counts->SummarizeValue(8)));
  }
  return absl::OkStatus();
}

absl::Status ReadBags(OpKernelContext* ctx, PackedRows* rows) {
  const Tensor* bags;
  const Tensor* counts;
  TF_RETURN_IF_ERROR(ctx->input("bags", &bags));
  TF_RETURN_IF_ERROR(ctx->input("bag_counts", &counts));
  const int64_t n = rows->size();
  const int64_t tables = rows->tables();
  if (counts->dims() != 1 ||
      (counts->NumElements() != 0 && counts->NumElements() != tables)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bag_counts must have shape [", tables, "] or [0], not ",
                     counts->shape().DebugString()));
  }
  const bool pooled = counts->NumElements() > 0;
  if (bags->shape() != TensorShape({pooled ? n : 0})) {
    return absl::InvalidArgumentError(
        absl::StrCat("bags must have shape [", pooled ? n : 0, "] with ",
                     pooled ? "these" : "empty", " bag_counts, not ",
                     bags->shape().DebugString()));
  }
  if (!pooled) {
    rows->bag_offsets = rows->offsets;
    return absl::OkStatus();
  }
  rows->bags.bags = bags->flat<int32_t>().data();
  rows->bag_offsets.assign(1, 0);
  for (int64_t i = 0; i < tables; ++i) {
    const int64_t count = counts->flat<int64_t>()(i);
    // Bags are numbered by int32.
    if (count < 0 || count > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat("bag_counts[", i, "] = ", count, " is not in [0, ",
                       std::numeric_limits<int32_t>::max(), "]"));
    }
    const int32_t* own = rows->bags.bags + rows->offsets[i];
    const int64_t bad = FirstBadBag(own, rows->size(i), count);
    if (bad >= 0) {
      const int64_t least = bad == 0 ? 0 : own[bad - 1];
      return absl::InvalidArgumentError(
          absl::StrCat("bags[", rows->offsets[i] + bad, "] = ", own[bad],
                       " is not in [", least, ", ", count,
                       "): the bags of a table do not decrease and are less "
                       "than its bag_counts"));
    }
    rows->bag_offsets.push_back(rows->bag_offsets.back() + count);
  }
  return absl::OkStatus();
}

}  // namespace

Bags PackedRows::BagsOf(int64_t table) const {
  Bags own;
  if (bags.bags != nullptr) own.bags = bags.bags + offsets[table];
  if (bags.scales != nullptr) own.scales = bags.scales + offsets[table];
  return own;
}

absl::Status ReadPackedRows(OpKernelContext* ctx, int64_t tables,
                            PackedRows* rows) {
  TF_RETURN_IF_ERROR(ReadCounts(ctx, tables, rows));
  TF_RETURN_IF_ERROR(ReadBags(ctx, rows));
  const Tensor* scales;
  TF_RETURN_IF_ERROR(ctx->input("scales", &scales));
  if (scales->dims() != 1 ||
      (scales->NumElements() != 0 && scales->NumElements() != rows->size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("scales must have shape [", rows->size(), "] or [0], not ",
                     scales->shape().DebugString()));
  }
  if (scales->NumElements() > 0) {
    rows->bags.scales = scales->flat<float>().data();
  }
  return absl::OkStatus();
}

absl::Status PackedStarts(const PackedRows& rows,
                          const std::vector<int64_t>& widths,
                          std::vector<int64_t>* starts) {
  starts->assign(1, 0);
  for (int64_t i = 0; i < rows.tables(); ++i) {
    int64_t size, end;
    if (__builtin_mul_overflow(widths[i], rows.bag_count(i), &size) ||
        __builtin_add_overflow(starts->back(), size, &end) ||
        end > kMostElements) {
      return absl::InvalidArgumentError(absl::StrCat(
          rows.bags.bags == nullptr ? "counts[" : "bag_counts[", i,
          "] = ", rows.bag_count(i), " vectors of ", widths[i],
          " floats are too many: all tables' together must be at most ",
          kMostElements, " floats"));
    }
    starts->push_back(end);
  }
  return absl::OkStatus();
}

absl::Status NotARow(int64_t position, int64_t id, int64_t rows) {
  return absl::InvalidArgumentError(absl::StrCat(
      "indices[", position, "] = ", id, " is not a row of [0, ", rows, ")"));
}

}  // namespace recsync
