#include "cc/engine/aligned_pieces.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Numbers = std::vector<int64_t>;

TEST(AlignedStarts, EachGroupBeginsAlignedAndItsPiecesFollowOneAnother) {
  EXPECT_EQ(AlignedStarts({1, 5, 2, 16, 3}, {1, 2, 1, 1}, 16),
            Numbers({0, 16, 21, 32, 48, 51}));
}

TEST(AlignedStarts, TheMessageEndsWithTheLastPieceAndNotAligned) {
  EXPECT_EQ(AlignedStarts({3}, {1}, 8), Numbers({0, 3}));
  EXPECT_EQ(AlignedStarts({8, 1}, {1, 1}, 8), Numbers({0, 8, 9}));
}

TEST(AlignedStarts, GroupsWithoutElementsTakeNoPlace) {
  EXPECT_EQ(AlignedStarts({3, 4}, {0, 1, 0, 1, 0}, 8), Numbers({0, 8, 12}));
  EXPECT_EQ(AlignedStarts({3, 0, 4, 0}, {1, 1, 1, 1}, 8),
            Numbers({0, 3, 8, 12, 12}));
  EXPECT_EQ(AlignedStarts({}, {}, 8), Numbers({0}));
}

TEST(AlignedStarts, EmptyPiecesLieWhereTheNextOneOfTheirGroupBegins) {
  EXPECT_EQ(AlignedStarts({1, 0, 2, 0}, {1, 3}, 4), Numbers({0, 4, 4, 6, 6}));
}

}  // namespace
}  // namespace recsync
