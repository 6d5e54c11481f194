#include "cc/engine/memory.h"

#include <gtest/gtest.h>

#include <vector>

namespace recsync {
namespace {

TEST(MemoryTest, AvailableIsSomethingThatAMachineMayHave) {
  const auto bytes = AvailableMemory();
#ifdef __linux__
  ASSERT_TRUE(bytes.has_value());
  EXPECT_GT(*bytes, int64_t{1} << 20);
  EXPECT_LT(*bytes, int64_t{1} << 50);
#else
  EXPECT_FALSE(bytes.has_value());
#endif
}

TEST(MemoryTest, ResidentIsMoreWithMemoryThatHasBeenWritten) {
#ifdef __linux__
  const auto before = ResidentMemory();
  ASSERT_TRUE(before.has_value());
  const std::vector<char> written(64 << 20, 1);
  const auto after = ResidentMemory();
  ASSERT_TRUE(after.has_value());
  EXPECT_GT(*after, *before + (48 << 20)) << written[12345];
#else
  EXPECT_FALSE(ResidentMemory().has_value());
#endif
}

}  // namespace
}  // namespace recsync
