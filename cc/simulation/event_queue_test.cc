#include "cc/simulation/event_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace recsync {
namespace {

void RunAll(EventQueue* events) {
  while (events->RunNext()) {
  }
}

TEST(EventQueueTest, EventsHappenInTheOrderOfTheirTimes) {
  EventQueue events;
  std::mt19937 random(1);
  std::vector<double> times;
  for (int i = 0; i < 1000; ++i) {
    events.At(random() % 50, [&] { times.push_back(events.now()); });
  }
  RunAll(&events);
  EXPECT_EQ(times.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
}

TEST(EventQueueTest, ThoseOfOneTimeHappenInTheOrderInWhichTheyWereAdded) {
  EventQueue events;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    events.At(i % 2, [&order, i] { order.push_back(i); });
  }
  RunAll(&events);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(order[i], 2 * i);
    EXPECT_EQ(order[50 + i], 2 * i + 1);
  }
}

TEST(EventQueueTest, EventsThatComeAndGoHappenAsInASortedList) {
  std::mt19937 random(7);
  EventQueue events;
  // By time and number, all that is still to happen.
  std::vector<std::pair<double, int>> expected;
  int added = 0, happened = 0;
  bool in_order = true;
  std::function<void(int)> happen = [&](int number) {
    const auto first = std::min_element(expected.begin(), expected.end());
    in_order &= first->second == number && first->first == events.now();
    expected.erase(first);
    ++happened;
    for (int more = random() % 3; more > 0 && added < 5000; --more) {
      const double time = events.now() + random() % 4;
      expected.emplace_back(time, added);
      events.At(time, [&happen, added] { happen(added); });
      ++added;
    }
  };
  for (; added < 200; ++added) {
    const double time = random() % 10;
    expected.emplace_back(time, added);
    events.At(time, [&happen, added] { happen(added); });
  }
  RunAll(&events);
  EXPECT_TRUE(in_order);
  EXPECT_EQ(happened, added);
  EXPECT_GT(added, 200);
}

TEST(EventQueueTest, AnEventAddsOthersAndThePastIsNow) {
  EventQueue events;
  std::vector<std::pair<int, double>> happened;
  events.At(2.0, [&] {
    events.At(1.0, [&] { happened.emplace_back(1, events.now()); });
    events.At(std::nan(""), [&] { happened.emplace_back(2, events.now()); });
    events.After(0.5, [&] { happened.emplace_back(3, events.now()); });
  });
  RunAll(&events);
  EXPECT_EQ(happened, (std::vector<std::pair<int, double>>{
                          {1, 2.0}, {2, 2.0}, {3, 2.5}}));
  EXPECT_TRUE(events.empty());
}

}  // namespace
}  // namespace recsync
