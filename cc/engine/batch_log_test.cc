#include "cc/engine/batch_log.h"

#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Numbers = std::vector<int64_t>;

TEST(BatchLog, GivesWhatIsNotKnownAgainUntilItIs) {
  BatchLog log;
  Numbers numbers = {9};
  EXPECT_TRUE(log.Read(0, &numbers));
  EXPECT_EQ(numbers, Numbers());
  for (int64_t number : {4, 2, 7}) log.Note(number);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(log.Read(0, &numbers));
    EXPECT_EQ(numbers, (Numbers{4, 2, 7}));
  }
  log.Note(1);
  EXPECT_TRUE(log.Read(3, &numbers));
  EXPECT_EQ(numbers, Numbers{1});
  EXPECT_TRUE(log.Read(4, &numbers));
  EXPECT_EQ(numbers, Numbers());
}

TEST(BatchLog, RefusesToKnowMoreThanThereWasOrLessThanBefore) {
  BatchLog log;
  Numbers numbers;
  log.Note(5);
  log.Note(6);
  EXPECT_FALSE(log.Read(3, &numbers));
  EXPECT_FALSE(log.Read(-1, &numbers));
  EXPECT_FALSE(log.Read(std::numeric_limits<int64_t>::max(), &numbers));
  EXPECT_TRUE(log.Read(1, &numbers));
  EXPECT_EQ(numbers, Numbers{6});
  EXPECT_FALSE(log.Read(0, &numbers));
  EXPECT_FALSE(log.Read(std::numeric_limits<int64_t>::min(), &numbers));
  EXPECT_TRUE(log.Read(1, &numbers));
  EXPECT_EQ(numbers, Numbers{6});
}

TEST(BatchLog, LosesNothingWhileItIsRead) {
  constexpr int64_t kNotes = 20000;
  BatchLog log;
  std::thread writer([&log] {
    for (int64_t i = 0; i < kNotes; ++i) log.Note(i);
  });
  Numbers all, numbers;
  while (static_cast<int64_t>(all.size()) < kNotes) {
    ASSERT_TRUE(log.Read(static_cast<int64_t>(all.size()), &numbers));
    all.insert(all.end(), numbers.begin(), numbers.end());
  }
  writer.join();
  for (int64_t i = 0; i < kNotes; ++i) ASSERT_EQ(all[i], i);
}

}  // namespace
}  // namespace recsync
