// How rows of a bfloat16 table are rounded after an update: stochastically, up
// or down with probabilities that leave the value what it was on average. So
// updates much smaller than a value's last place, which the nearest would lose
// one by one, move it as they move a float.
//
// The random numbers are Philox's, of a table's seed, the row's number in the
// table, what tells the update from the row's others, and the column. So they
// depend neither on threads nor on which rows of the table lie here.
//
//   RowRounding rounding({{/*offset=*/0, /*index=*/1, /*count=*/4, seed}});
//   rounding.Round(row, version, /*step=*/0, wide, width, narrow);
//
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_ROUNDING_H_
#define TF_RECSYNC_CC_ENGINE_ROW_ROUNDING_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc/engine/bfloat16.h"
#include "cc/engine/philox.h"
#include "cc/engine/result.h"

namespace recsync {

// Rows that follow one another here and belong to one table.
struct RoundedPiece {
  int64_t offset = 0;  // the first of them
  // Numbers in the table, of the first row and from one row to the next.
  int64_t index = 0;
  int64_t count = 1;
  uint64_t seed = 0;
};

class RowRounding {
 public:
  // Of a table that lies here as a whole, with the seed 0.
  RowRounding() : pieces_(1) {}
  // Of pieces that Check finds right.
  explicit RowRounding(std::vector<RoundedPiece> pieces)
      : pieces_(std::move(pieces)) {}

  // What is wrong with pieces, if anything: the first has to begin with row 0,
  // and each other one further on than the one before.
  static Result Check(const std::vector<RoundedPiece>& pieces) {
    if (pieces.empty()) return Result::Error("there must be a piece");
    for (size_t i = 0; i < pieces.size(); ++i) {
      const RoundedPiece& piece = pieces[i];
      if (i == 0 ? piece.offset != 0 : piece.offset <= pieces[i - 1].offset) {
        return Result::Error("offsets must rise from 0, piece ", i, " has ",
                             piece.offset);
      }
      if (piece.count < 1 || piece.index < 0 || piece.index >= piece.count) {
        return Result::Error("index must be from 0 to below count, not ",
                             piece.index, " with count ", piece.count);
      }
    }
    return Result::Ok();
  }

  // Rounds the elements of a row. No other update of the row has the same
  // `version` and `step`, of which the lower halves count.
  void Round(int64_t row, int64_t version, int64_t step, const float* values,
             int64_t n, BFloat16* to) const {
    const RoundedPiece& piece = PieceOf(row);
    // Any number may be said of a table; a wrong one does no more than to round
    // by other random numbers.
    const uint64_t number =
        static_cast<uint64_t>(piece.index) +
        static_cast<uint64_t>(piece.count) *
            (static_cast<uint64_t>(row) - static_cast<uint64_t>(piece.offset));
    // A counter has room for the lower half of the row's number.
    const uint64_t key = piece.seed + (number >> 32) * 0x9E3779B97F4A7C15;
    for (int64_t i = 0; i < n; i += kOfBlock) {
      const PhiloxWords words = Philox(
          key,
          {static_cast<uint32_t>(number), static_cast<uint32_t>(i / kOfBlock),
           static_cast<uint32_t>(version), static_cast<uint32_t>(step)});
      const int64_t count = std::min(kOfBlock, n - i);
      for (int64_t k = 0; k < count; ++k) {
        const uint32_t word = words[k / 2];
        to[i + k] =
            ToBFloat16(values[i + k],
                       static_cast<uint16_t>(k % 2 == 0 ? word : word >> 16));
      }
    }
  }

 private:
  static constexpr int64_t kOfBlock = 8;  // elements by 16 bits of 4 words

  const RoundedPiece& PieceOf(int64_t row) const {
    const auto after = std::upper_bound(
        pieces_.begin(), pieces_.end(), row,
        [](int64_t r, const RoundedPiece& piece) { return r < piece.offset; });
    return *(after - 1);
  }

  std::vector<RoundedPiece> pieces_;  // never empty; the first begins with 0
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_ROUNDING_H_
