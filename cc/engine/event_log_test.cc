#include "cc/engine/event_log.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

TEST(EventLog, GivesEachEventOnceInOrder) {
  EventLog log;
  log.Note({Activity::kPull, 10, 20, 0});
  log.Note({Activity::kSend, 15, 40, 1, 3});
  const std::vector<Event> events = log.Take();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].activity, Activity::kPull);
  EXPECT_EQ(events[0].neighbor, -1);
  EXPECT_EQ(events[1].end, 40);
  EXPECT_EQ(events[1].neighbor, 3);
  EXPECT_TRUE(log.Take().empty());
  EXPECT_EQ(log.lost(), 0);
}

TEST(EventLog, KeepsTheLatestAndCountsTheOthers) {
  EventLog log;
  constexpr int64_t kMore = 5;
  const int64_t most = EventLog::kMost;
  for (int64_t i = 0; i < most + kMore; ++i) {
    log.Note({Activity::kCompute, i, i + 1, i});
  }
  const std::vector<Event> events = log.Take();
  ASSERT_EQ(events.size(), EventLog::kMost);
  EXPECT_EQ(events.front().iteration, kMore);
  EXPECT_EQ(events.back().iteration, most + kMore - 1);
  EXPECT_EQ(log.lost(), kMore);
  log.Note({Activity::kJump, 1, 1, 7});
  EXPECT_EQ(log.Take().size(), 1u);
  EXPECT_EQ(log.lost(), kMore);
}

}  // namespace
}  // namespace recsync
