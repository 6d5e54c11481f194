#include "cc/kernels/row_roundings.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/engine/result.h"

namespace recsync {

absl::Status ReadRoundings(tensorflow::OpKernelConstruction* ctx,
                           std::vector<RowRounding>* roundings) {
  constexpr size_t kOfPiece = 5;
  int tables;
  std::vector<int64_t> numbers;
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &tables));
  TF_RETURN_IF_ERROR(ctx->GetAttr("rounding", &numbers));
  if (numbers.size() % kOfPiece != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rounding must have ", kOfPiece,
                     " numbers for each piece, not ", numbers.size()));
  }
  std::vector<std::vector<RoundedPiece>> pieces(tables);
  for (size_t i = 0; i < numbers.size(); i += kOfPiece) {
    if (numbers[i] < 0 || numbers[i] >= tables) {
      return absl::InvalidArgumentError(
          absl::StrCat("rounding must name tables from 0 to below ", tables,
                       ", not ", numbers[i]));
    }
    pieces[numbers[i]].push_back({numbers[i + 1], numbers[i + 2],
                                  numbers[i + 3],
                                  static_cast<uint64_t>(numbers[i + 4])});
  }
  roundings->assign(tables, RowRounding());
  for (int i = 0; i < tables; ++i) {
    if (pieces[i].empty()) continue;
    const Result result = RowRounding::Check(pieces[i]);
    if (!result.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rounding of table ", i, ": ", result.error()));
    }
    (*roundings)[i] = RowRounding(std::move(pieces[i]));
  }
  return absl::OkStatus();
}

}  // namespace recsync
