#include "cc/engine/free_list.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

TEST(FreeListTest, ObjectsInUseAreDifferentAndComeBackAsTheyWereLeft) {
  FreeList<std::vector<int>> list;
  const std::vector<int>* first;
  {
    FreeList<std::vector<int>>::Lease one(&list), other(&list);
    EXPECT_NE(&*one, &*other);
    EXPECT_TRUE(one->empty());
    one->assign(3, 7);
    other->assign(3, 7);
    first = &*one;
  }
  FreeList<std::vector<int>>::Lease again(&list);
  EXPECT_EQ(&*again, first) << "it was given back last";
  EXPECT_EQ(again->size(), 3u);
}

TEST(FreeListTest, ManyThreadsNeverShareAnObject) {
  FreeList<int> list;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&list] {
      for (int i = 0; i < 1000; ++i) {
        FreeList<int>::Lease lease(&list);
        const int before = ++*lease;
        std::this_thread::yield();
        EXPECT_EQ(++*lease, before + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace recsync
