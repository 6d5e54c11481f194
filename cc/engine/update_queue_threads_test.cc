// The tagged queue under threads that send and threads that wait.

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "cc/engine/update_queue.h"

namespace recsync {
namespace {

using Queue = UpdateQueue<std::string>;

TEST(UpdateQueueThreadsTest, ThreadsLoseNothingAndGetNothingTwice) {
  constexpr int kSenders = 4;
  constexpr int kIterations = 2000;
  Queue queue({8, kSenders * kIterations});
  std::vector<std::thread> threads;
  for (int sender = 0; sender < kSenders; ++sender) {
    threads.emplace_back([&queue, sender] {
      for (int k = 0; k < kIterations; ++k) queue.Enqueue("x", {k, sender});
    });
  }
  std::atomic<int> complete{0};
  for (int reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&queue, &complete, reader] {
      for (int k = reader; k < kIterations; k += 2) {
        queue.Dequeue(kSenders, {k, kAny}, [&complete](auto, auto entries) {
          if (entries.size() == kSenders) ++complete;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(complete, kIterations);
  EXPECT_EQ(queue.Size({kAny, kAny}), 0);
}

}  // namespace
}  // namespace recsync
