#include "cc/engine/writer_groups.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

TEST(WriterGroupsTest, MembersWorkAtTheSameTimeAndTheLeaderLeavesLast) {
  WriterGroups groups;
  int key = 0;
  std::atomic<bool> locked{false}, leader_left{false};
  ASSERT_TRUE(groups.Enter(&key, [&] { locked = true; }));
  EXPECT_TRUE(locked);
  // A second member enters while the first is there.
  ASSERT_FALSE(groups.Enter(&key, [] { FAIL() << "it does not lead"; }));
  std::thread leader([&] {
    groups.Leave(&key, true, [&] { locked = false; });
    leader_left = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(locked);
  EXPECT_FALSE(leader_left);
  groups.Leave(&key, false, [] { FAIL() << "it does not lead"; });
  leader.join();
  EXPECT_FALSE(locked);
}

TEST(WriterGroupsTest, WhoComesWhileTheGroupClosesLeadsTheNext) {
  WriterGroups groups;
  int key = 0;
  ASSERT_TRUE(groups.Enter(&key, [] {}));
  ASSERT_FALSE(groups.Enter(&key, [] {}));
  std::thread leader([&] { groups.Leave(&key, true, [] {}); });
  // Becomes a member again and again as long as the leader has not come to
  // leave, which may take any time.
  std::atomic<int64_t> joined{0};
  std::atomic<bool> member_leaves{false};
  std::thread late([&] {
    while (!groups.Enter(&key, [] {})) {
      ++joined;
      groups.Leave(&key, false, [] {});
    }
    EXPECT_TRUE(member_leaves);
    groups.Leave(&key, true, [] {});
  });
  // When the group closes, it waits. On a busy machine it may only seem to, and
  // then it leads all the same.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (int64_t before = -1; joined != before;) {
    before = joined;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (std::chrono::steady_clock::now() < limit) continue;
    ADD_FAILURE() << "it joins a group that closes";
    break;
  }
  member_leaves = true;
  groups.Leave(&key, false, [] {});
  leader.join();
  late.join();
}

TEST(WriterGroupsTest, JoiningNeedsAGroup) {
  WriterGroups groups;
  int key = 0, other = 0;
  EXPECT_FALSE(groups.Join(&key));
  ASSERT_TRUE(groups.Enter(&key, [] {}));
  EXPECT_FALSE(groups.Join(&other));
  ASSERT_TRUE(groups.Join(&key));
  groups.Leave(&key, false, [] {});
  groups.Leave(&key, true, [] {});
  EXPECT_FALSE(groups.Join(&key));
}

TEST(WriterGroupsTest, ReadersOfTheMutexSeeNoWriterAndGetTheirTurn) {
  WriterGroups groups;
  std::shared_mutex mu[2];  // entered in this order
  std::atomic<int> writing{0}, reads{0};
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!end) {
        bool leads[2];
        for (int i : {0, 1}) {
          leads[i] = groups.Enter(&mu[i], [&] { mu[i].lock(); });
        }
        ++writing;
        std::this_thread::yield();
        --writing;
        for (int i : {1, 0}) {
          groups.Leave(&mu[i], leads[i], [&] { mu[i].unlock(); });
        }
      }
    });
  }
  threads.emplace_back([&] {
    while (reads < 200) {
      std::shared_lock<std::shared_mutex> lock(mu[reads % 2]);
      EXPECT_EQ(writing, 0);
      ++reads;
    }
    end = true;
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(reads, 200);
}

}  // namespace
}  // namespace recsync
