// Waits that others cut short: no interruption is lost, and nothing is held on
// to for longer than a wait lasts.

#include "cc/engine/cancellable_wait.h"

#include <gtest/gtest.h>

#include <memory>

namespace recsync {
namespace {

TEST(CancellableWaitTest, AnInterruptionEndsTheWaitOnce) {
  CancellableWait waits;
  int cancelled = 0;
  waits.BeginCall();
  waits.Guard(waits.Begin(), [&] { ++cancelled; });
  EXPECT_EQ(cancelled, 0);
  waits.Interrupt();
  waits.Interrupt();
  EXPECT_EQ(cancelled, 1);
}

TEST(CancellableWaitTest, AnInterruptionBeforeAWaitEndsEveryWaitOfItsCall) {
  CancellableWait waits;
  int cancelled = 0;
  const int64_t call = waits.BeginCall();
  waits.Interrupt(call);
  for (int i = 0; i < 2; ++i) {
    waits.Guard(waits.Begin(), [&] { ++cancelled; });
  }
  EXPECT_EQ(cancelled, 2);
  waits.BeginCall();
  waits.Guard(waits.Begin(), [&] { ++cancelled; });
  EXPECT_EQ(cancelled, 2);
}

TEST(CancellableWaitTest, AnInterruptionThatComesLateSparesTheNextCall) {
  CancellableWait waits;
  bool cancelled = false;
  const int64_t before = waits.BeginCall();
  waits.BeginCall();
  waits.Interrupt(before);
  waits.Guard(waits.Begin(), [&] { cancelled = true; });
  waits.Interrupt(before);
  EXPECT_FALSE(cancelled);
}

TEST(CancellableWaitTest, AWaitThatHasEndedIsNeitherCancelledNorKept) {
  CancellableWait waits;
  auto held = std::make_shared<bool>(false);
  waits.BeginCall();
  for (const bool ends_first : {false, true}) {
    const int64_t wait = waits.Begin();
    if (ends_first) waits.End(wait);
    waits.Guard(wait, [held] { *held = true; });
    if (!ends_first) waits.End(wait);
    EXPECT_EQ(held.use_count(), 1);
  }
  waits.Interrupt();
  EXPECT_FALSE(*held);
}

TEST(CancellableWaitTest, TheEndOfAnEarlierWaitSparesTheNextOne) {
  CancellableWait waits;
  bool cancelled = false;
  waits.BeginCall();
  const int64_t before = waits.Begin();
  waits.Guard(waits.Begin(), [&] { cancelled = true; });
  waits.End(before);
  waits.Interrupt();
  EXPECT_TRUE(cancelled);
}

}  // namespace
}  // namespace recsync
