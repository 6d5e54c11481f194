#include "cc/engine/row_rounding.h"

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

// Whether each of `n` elements halfway between two numbers is rounded up.
std::vector<bool> Ups(const RowRounding& rounding, int64_t row, int64_t version,
                      int64_t step, int64_t n) {
  const std::vector<float> halfway(n, 1.0f + 1.0f / 256);
  std::vector<BFloat16> rounded(n);
  rounding.Round(row, version, step, halfway.data(), n, rounded.data());
  std::vector<bool> ups;
  for (const BFloat16 one : rounded) {
    ups.push_back(static_cast<float>(one) > 1.0f);
  }
  return ups;
}

TEST(RowRoundingTest, ARowIsRoundedAlikeWhereverItLies) {
  constexpr int64_t kRows = 60;
  const RowRounding whole({{0, 0, 1, 7}});
  for (int64_t count : {2, 3, 7}) {
    // All pieces of the table one after the other, behind one of another table.
    std::vector<RoundedPiece> pieces = {{0, 0, 1, 8}};
    int64_t offset = 5;
    for (int64_t index = 0; index < count; ++index) {
      pieces.push_back({offset, index, count, 7});
      offset += (kRows - index + count - 1) / count;
    }
    ASSERT_TRUE(RowRounding::Check(pieces).ok());
    const RowRounding divided(pieces);
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t here = pieces[1 + row % count].offset + row / count;
      EXPECT_EQ(Ups(divided, here, 3, 4, 70), Ups(whole, row, 3, 4, 70));
    }
    EXPECT_NE(Ups(divided, 0, 3, 4, 70), Ups(whole, 0, 3, 4, 70));
  }
}

TEST(RowRoundingTest, EachRowVersionStepAndSeedHasNumbersOfItsOwn) {
  constexpr int64_t kColumns = 96;  // all alike by chance: once in 2^96
  std::set<std::vector<bool>> seen;
  size_t count = 0;
  for (uint64_t seed : {0, 1, -1}) {
    const RowRounding rounding({{0, 0, 1, seed}});
    for (int64_t row : {int64_t{0}, int64_t{1}, int64_t{1} << 32}) {
      for (int64_t version : {0, 1, 1000}) {
        for (int64_t step : {0, 1, 1000}) {
          seen.insert(Ups(rounding, row, version, step, kColumns));
          EXPECT_EQ(seen.size(), ++count);
        }
      }
    }
  }
  EXPECT_EQ(Ups(RowRounding(), 1, 2, 3, kColumns),
            Ups(RowRounding({{0, 0, 1, 0}}), 1, 2, 3, kColumns));
}

TEST(RowRoundingTest, HalfOfTheElementsHalfwayAreRoundedUpInEachColumn) {
  constexpr int64_t kVersions = 4000, kColumns = 19;
  std::vector<int> ups(kColumns, 0), pairs(kColumns, 0);
  for (int64_t version = 0; version < kVersions; ++version) {
    const std::vector<bool> now = Ups(RowRounding(), 5, version, 0, kColumns);
    for (int64_t i = 0; i < kColumns; ++i) {
      ups[i] += now[i];
      pairs[i] += now[i] == now[(i + 1) % kColumns];
    }
  }
  // Within five standard deviations, whose numbers are always the same ones.
  const double most = 5 * std::sqrt(kVersions / 4.0);
  for (int64_t i = 0; i < kColumns; ++i) {
    EXPECT_NEAR(ups[i], kVersions / 2, most) << i;
    EXPECT_NEAR(pairs[i], kVersions / 2, most) << i;
  }
}

TEST(RowRoundingTest, PiecesThatCannotBeAreRefused) {
  using Pieces = std::vector<RoundedPiece>;
  for (const Pieces& wrong :
       {Pieces(), Pieces{{1, 0, 1, 0}}, Pieces{{0, 0, 1, 0}, {0, 0, 1, 0}},
        Pieces{{0, 0, 0, 0}}, Pieces{{0, 2, 2, 0}}, Pieces{{0, -1, 2, 0}},
        Pieces{{0, 0, 1, 0}, {5, 0, 1, 0}, {4, 0, 1, 0}}}) {
    EXPECT_FALSE(RowRounding::Check(wrong).ok());
  }
  EXPECT_TRUE(RowRounding::Check({{0, 1, 2, 0}, {1, 0, 1, 9}}).ok());
}

}  // namespace
}  // namespace recsync
