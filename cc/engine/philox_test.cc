// Philox against the values that its authors publish for it (Random123).

#include "cc/engine/philox.h"

#include <gtest/gtest.h>

namespace recsync {
namespace {

TEST(PhiloxTest, GivesThePublishedWords) {
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(Philox(0, {0, 0, 0, 0}),
            (PhiloxWords{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(Philox(~uint64_t{0}, {kOnes, kOnes, kOnes, kOnes}),
            (PhiloxWords{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(Philox(0x299F31D0A4093822,
                   {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}),
            (PhiloxWords{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

}  // namespace
}  // namespace recsync
