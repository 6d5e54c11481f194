#include "cc/engine/batch_log.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "cc/engine/mutex.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Numbers = std::vector<int64_t>;

TEST(BatchLog, GivesWhatIsNotKnownAgainUntilItIs) {
  BatchLog log;
  Numbers numbers = {9};
  int64_t first = -1;
  EXPECT_TRUE(log.Read(0, &first, &numbers));
  EXPECT_EQ(numbers, Numbers());
  for (int64_t number : {4, 2, 7}) log.Note(number);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(log.Read(0, &first, &numbers));
    EXPECT_EQ(first, 0);
    EXPECT_EQ(numbers, (Numbers{4, 2, 7}));
  }
  log.Note(1);
  EXPECT_TRUE(log.Read(3, &first, &numbers));
  EXPECT_EQ(first, 3);
  EXPECT_EQ(numbers, Numbers{1});
  EXPECT_TRUE(log.Read(4, &first, &numbers));
  EXPECT_EQ(first, 4);
  EXPECT_EQ(numbers, Numbers());
}

TEST(BatchLog, AnswersAReaderThatIsLateFromWhatIsLeft) {
  BatchLog log;
  Numbers numbers;
  int64_t first;
  for (int64_t number : {4, 2, 7}) log.Note(number);
  EXPECT_TRUE(log.Read(2, &first, &numbers));
  EXPECT_TRUE(log.Read(0, &first, &numbers));
  EXPECT_EQ(first, 2);
  EXPECT_EQ(numbers, Numbers{7});
  EXPECT_TRUE(log.Read(3, &first, &numbers));
  EXPECT_EQ(first, 3);
  EXPECT_EQ(numbers, Numbers());
}

TEST(BatchLog, RefusesToKnowMoreThanThereWas) {
  BatchLog log;
  Numbers numbers;
  int64_t first = -1;
  log.Note(5);
  log.Note(6);
  EXPECT_FALSE(log.Read(3, &first, &numbers));
  EXPECT_FALSE(log.Read(-1, &first, &numbers));
  EXPECT_FALSE(log.Read(std::numeric_limits<int64_t>::max(), &first, &numbers));
  EXPECT_FALSE(log.Read(std::numeric_limits<int64_t>::min(), &first, &numbers));
  EXPECT_EQ(first, -1);
  EXPECT_TRUE(log.Read(1, &first, &numbers));
  EXPECT_EQ(numbers, Numbers{6});
}

TEST(BatchLog, LosesNothingWhileItIsReadByTwo) {
  constexpr int64_t kNotes = 20000;
  BatchLog log;
  Mutex mu;
  Numbers all;
  const auto read = [&](int64_t behind) {
    int64_t first;
    Numbers numbers;
    while (true) {
      int64_t known;
      {
        MutexLock lock(&mu);
        known = all.size();
        if (known == kNotes) return;
      }
      ASSERT_TRUE(
          log.Read(std::max<int64_t>(known - behind, 0), &first, &numbers));
      MutexLock lock(&mu);
      const int64_t have = all.size();
      ASSERT_LE(first, have);
      const int64_t old = have - first;
      if (old < static_cast<int64_t>(numbers.size())) {
        all.insert(all.end(), numbers.begin() + old, numbers.end());
      }
    }
  };
  std::thread writer([&log] {
    for (int64_t i = 0; i < kNotes; ++i) log.Note(i);
  });
  std::thread late(read, 100);
  read(0);
  late.join();
  writer.join();
  for (int64_t i = 0; i < kNotes; ++i) ASSERT_EQ(all[i], i);
}

}  // namespace
}  // namespace recsync
