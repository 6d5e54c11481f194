#include "cc/kernels/log_decays.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/engine/limits.h"

namespace recsync {

absl::Status ReadDecayed(tensorflow::OpKernelConstruction* ctx,
                         std::vector<int64_t>* decayed) {
  int count;
  TF_RETURN_IF_ERROR(ctx->GetAttr("num_decayed", &count));
  TF_RETURN_IF_ERROR(ctx->GetAttr("decayed", decayed));
  bool rises = decayed->empty() || decayed->front() >= 0;
  for (size_t i = 1; i < decayed->size(); ++i) {
    rises = rises && (*decayed)[i - 1] < (*decayed)[i];
  }
  if (rises && decayed->size() == static_cast<size_t>(count)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("decayed must name the tables of the ", count,
                   " log_decays by rising numbers, not [",
                   absl::StrJoin(*decayed, ", "), "]"));
}

absl::Status LookupLogDecays(tensorflow::OpKernelContext* ctx,
                             const std::vector<int64_t>& decayed,
                             int64_t tables,
                             std::vector<VariablePtr>* by_table) {
  by_table->clear();
  by_table->resize(tables);
  if (decayed.empty()) return absl::OkStatus();
  if (decayed.back() >= tables) {
    return absl::InvalidArgumentError(
        absl::StrCat("decayed must be below ", tables,
                     ", the number of variables, not ", decayed.back()));
  }
  std::vector<VariablePtr> found;
  TF_RETURN_IF_ERROR(LookupVariables(ctx, "log_decays", &found));
  for (size_t i = 0; i < decayed.size(); ++i) {
    (*by_table)[decayed[i]] = std::move(found[i]);
  }
  return absl::OkStatus();
}

absl::Status RowDecayOf(tensorflow::Var* log_decays, int64_t rows,
                        RowDecay* decay) {
  *decay = RowDecay();
  if (log_decays == nullptr) return absl::OkStatus();
  TF_RETURN_IF_ERROR(
      CheckVariable(*log_decays, "log_decays", tensorflow::DT_DOUBLE));
  const tensorflow::TensorShape& shape = log_decays->tensor()->shape();
  // A table without elements may have any number of rows.
  if (rows > kMostTableElements) {
    return absl::InvalidArgumentError(
        absl::StrCat("a table with log_decays must have at most ",
                     kMostTableElements, " rows, not ", rows));
  }
  if (shape.dims() != 1 || shape.dim_size(0) != RowDecay::Size(rows)) {
    return absl::InvalidArgumentError(
        absl::StrCat("log_decays must have shape [", RowDecay::Size(rows),
                     "] for ", rows, " rows, not ", shape.DebugString()));
  }
  *decay = RowDecay(log_decays->tensor()->flat<double>().data(), rows);
  return absl::OkStatus();
}

}  // namespace recsync
