#include "cc/engine/huge_pages.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

TEST(HugePagesTest, OnlyWholePagesInsideTheBufferAreTaken) {
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  size_t size;
  void* const odd = reinterpret_cast<void*>(10 * kPage + 64);
  EXPECT_EQ(HugePagesOf(odd, 5 * kPage, &size),
            reinterpret_cast<void*>(11 * kPage));
  EXPECT_EQ(size, 4 * kPage);
  void* const even = reinterpret_cast<void*>(10 * kPage);
  EXPECT_EQ(HugePagesOf(even, 2 * kPage, &size), even);
  EXPECT_EQ(size, 2 * kPage);
  HugePagesOf(odd, kPage, &size);
  EXPECT_EQ(size, 0u);
}

TEST(HugePagesTest, ABufferKeepsItsContents) {
  std::vector<int64_t> buffer(3 << 20);
  for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = 3 * i + 1;
  for (int i = 0; i < 2; ++i) {
    AdviseHugePages(buffer.data(), buffer.size() * sizeof(int64_t));
  }
  AdviseHugePages(buffer.data(), 100);
  PreferHugePages(buffer.data(), buffer.size() * sizeof(int64_t));
  PreferHugePages(buffer.data(), 100);
  for (size_t i = 0; i < buffer.size(); ++i) {
    ASSERT_EQ(buffer[i], static_cast<int64_t>(3 * i + 1));
  }
}

}  // namespace
}  // namespace recsync
