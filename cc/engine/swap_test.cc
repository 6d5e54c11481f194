#include "cc/engine/swap.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

TEST(SwapTest, LazyDecayEqualsTheEagerRuleOver5000RandomTouches) {
  constexpr int kRows = 40;
  constexpr int64_t kSteps = 5000;
  const Swap swap{/*period=*/13, /*decay=*/0.8};
  std::mt19937 random(1);
  std::uniform_int_distribution<int> any_row(0, kRows - 1);
  std::normal_distribution<float> any_gradient;
  // The eager rule as the paper states it, in double precision.
  std::vector<double> eager(kRows, 0.1);
  std::vector<float> lazy(kRows, 0.1f);
  std::vector<int64_t> last_period(kRows, 0);
  for (int64_t step = 1; step <= kSteps; ++step) {
    if (step % 13 == 0) {
      for (double& v : eager) v *= 0.8;
    }
    // Rows of higher numbers are touched rarely and miss several periods.
    const int row = std::min(any_row(random), any_row(random));
    const float g = any_gradient(random);
    eager[row] += static_cast<double>(g) * g;
    const float factor = swap.DecaySince(&last_period[row], step);
    lazy[row] = factor * lazy[row] + g * g;
    ASSERT_NEAR(lazy[row], eager[row], 1e-5 * eager[row]) << "step " << step;
  }
  for (int row = 0; row < kRows; ++row) {
    lazy[row] *= swap.DecaySince(&last_period[row], kSteps);
    EXPECT_NEAR(lazy[row], eager[row], 1e-5 * eager[row]) << "row " << row;
  }
}

TEST(SwapTest, ThePeriodIsTheNumberOfMultiplesUpToTheStep) {
  for (int64_t period : {1, 2, 7, 100}) {
    const Swap swap{period, 0.5};
    int64_t multiples = 0;
    for (int64_t step = 1; step <= 500; ++step) {
      if (step % period == 0) ++multiples;
      ASSERT_EQ(swap.PeriodOf(step), multiples)
          << "period " << period << ", step " << step;
    }
  }
}

TEST(SwapTest, APeriodIsEnteredExactlyWhenThereIsSomethingToDecay) {
  const Swap swap{/*period=*/10, /*decay=*/0.25, /*offset=*/3};
  for (int64_t step = 0; step <= 50; ++step) {
    for (int64_t last = 0; last <= 6; ++last) {
      int64_t last_period = last;
      const bool decays = swap.DecaySince(&last_period, step) != 1.0f;
      EXPECT_EQ(swap.Enters(last, step), decays) << step << ", " << last;
    }
  }
}

TEST(SwapTest, DecaysOnceAtTheStepThatCompletesAPeriod) {
  const Swap swap{/*period=*/10, /*decay=*/0.25};
  int64_t last_period = 0;
  for (int64_t step = 1; step <= 9; ++step) {
    EXPECT_EQ(swap.DecaySince(&last_period, step), 1.0f) << "step " << step;
  }
  EXPECT_EQ(swap.DecaySince(&last_period, 10), 0.25f);
  EXPECT_EQ(last_period, 1);
  // A second push with the same step, from another worker.
  EXPECT_EQ(swap.DecaySince(&last_period, 10), 1.0f);
  EXPECT_EQ(swap.DecaySince(&last_period, 19), 1.0f);
  EXPECT_EQ(swap.DecaySince(&last_period, 20), 0.25f);
}

TEST(SwapTest, APeriodOfOneStepDecaysAtEveryStep) {
  const Swap swap{/*period=*/1, /*decay=*/0.5};
  int64_t last_period = 0;
  for (int64_t step = 1; step <= 20; ++step) {
    EXPECT_EQ(swap.DecaySince(&last_period, step), 0.5f) << "step " << step;
  }
}

TEST(SwapTest, NumbersBeyondAnyStepMakeNoMoreOfIt) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const Swap swap{/*period=*/2, /*decay=*/0.5, /*offset=*/kMost};
  EXPECT_EQ(swap.PeriodOf(kMost), kMost / 2);
  int64_t last_period = kMost / 2;
  EXPECT_EQ(swap.DecaySince(&last_period, kMost), 1.0f);
  last_period = kMost / 2 - 1;
  EXPECT_EQ(swap.DecaySince(&last_period, kMost), 0.5f);
  last_period = kLeast;
  EXPECT_EQ(swap.DecaySince(&last_period, kMost), 0.0f);
  EXPECT_EQ(last_period, kMost / 2);
}

TEST(SwapTest, MissedPeriodsMultiply) {
  const Swap swap{/*period=*/10, /*decay=*/0.9};
  for (int missed = 0; missed <= 60; ++missed) {
    double expected = 1.0;
    for (int i = 0; i < missed; ++i) expected *= 0.9;
    int64_t last_period = 5;
    EXPECT_NEAR(swap.DecaySince(&last_period, 59 + 10 * missed), expected,
                1e-6 * expected);
    EXPECT_EQ(last_period, 5 + missed);
  }
}

TEST(SwapTest, APushOfAnOlderPeriodDecaysNothingAndDoesNotTurnThePeriodBack) {
  const Swap swap{/*period=*/10, /*decay=*/0.5};
  int64_t last_period = 0;
  EXPECT_EQ(swap.DecaySince(&last_period, 35), 0.125f);
  EXPECT_EQ(swap.DecaySince(&last_period, 12), 1.0f);
  EXPECT_EQ(last_period, 3);
  EXPECT_EQ(swap.DecaySince(&last_period, 36), 1.0f);
  EXPECT_EQ(swap.DecaySince(&last_period, 40), 0.5f);
}

TEST(SwapTest, PushesInAnyOrderDecayEachPeriodOnceInTotal) {
  const Swap swap{/*period=*/8, /*decay=*/0.75};
  std::mt19937 random(2);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<int64_t> steps;
    for (int64_t step = 1; step <= 100; ++step) steps.push_back(step);
    // Workers push up to 30 steps late.
    for (size_t i = 0; i < steps.size(); ++i) {
      const size_t j = std::min(steps.size() - 1, i + random() % 30);
      std::swap(steps[i], steps[j]);
    }
    int64_t last_period = 0;
    double product = 1.0;
    for (int64_t step : steps) product *= swap.DecaySince(&last_period, step);
    // 8, 16 .. 96 are twelve multiples.
    double expected = 1.0;
    for (int i = 0; i < 12; ++i) expected *= 0.75;
    EXPECT_NEAR(product, expected, 1e-6 * expected);
  }
}

TEST(SwapTest, WithAnOffsetPeriodsGoOnWhereTheyWere) {
  // 7 periods of 10 steps and 4 steps, as 18 of 25 steps (the step of a batch 4
  // times as large); a period takes 2.5 of those, rounded to 3.
  const Swap before{/*period=*/10, /*decay=*/0.5};
  const Swap after{/*period=*/3, /*decay=*/0.5, /*offset=*/7 * 3 + 1 - 18};
  int64_t last_period = 0;
  before.DecaySince(&last_period, 74);
  EXPECT_EQ(last_period, 7);
  EXPECT_EQ(after.DecaySince(&last_period, 18), 1.0f);
  EXPECT_EQ(after.DecaySince(&last_period, 19), 1.0f);
  EXPECT_EQ(after.DecaySince(&last_period, 20), 0.5f);
  EXPECT_EQ(last_period, 8);
}

TEST(SwapTest, AfterTheStepWasSetBackPeriodsGoOnFromThere) {
  const Swap swap{/*period=*/10, /*decay=*/0.5};
  int32_t ahead = 7, behind = 1, first = Swap::kNoPeriod;
  for (int32_t* last_period : {&ahead, &behind, &first}) {
    swap.SetBack(last_period, 30);
  }
  EXPECT_EQ(ahead, 2);
  EXPECT_EQ(behind, 1);
  EXPECT_EQ(first, Swap::kNoPeriod);
  EXPECT_EQ(swap.DecaySince(&ahead, 30), 0.5f);
  EXPECT_EQ(swap.DecaySince(&behind, 30), 0.25f);
  EXPECT_EQ(swap.DecaySince(&first, 30), 1.0f);
}

TEST(SwapTest, ADecayOfOneChangesNothing) {
  const Swap swap{/*period=*/3, /*decay=*/1.0};
  int64_t last_period = 0;
  for (int64_t step = 1; step <= 1000; step += 7) {
    EXPECT_EQ(swap.DecaySince(&last_period, step), 1.0f);
  }
}

TEST(SwapTest, ARowThatWasNotTouchedForVeryLongFadesToZero) {
  const Swap swap{/*period=*/1, /*decay=*/0.5};
  int64_t last_period = 0;
  EXPECT_EQ(swap.DecaySince(&last_period, std::numeric_limits<int64_t>::max()),
            0.0f);
  EXPECT_EQ(last_period, std::numeric_limits<int64_t>::max());
}

TEST(SwapTest, StepsBeyond32BitsAreCounted) {
  const Swap swap{/*period=*/10000, /*decay=*/0.5};
  const int64_t step = int64_t{10000} * 3000000000;
  int64_t last_period = 2999999998;
  EXPECT_EQ(swap.DecaySince(&last_period, step - 1), 0.5f);
  EXPECT_EQ(swap.DecaySince(&last_period, step), 0.5f);
  EXPECT_EQ(last_period, 3000000000);
}

TEST(SwapTest, BesideARowPeriodsAreAppliedUpToTheLargestThatInt32Has) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const Swap swap{/*period=*/3, /*decay=*/0.75};
  std::mt19937 random(4);
  for (int trial = 0; trial < 50; ++trial) {
    // The eager rule beside it, each step of which that is a multiple decays,
    // until there have been as many.
    int64_t step = 3 * kMost - 150;
    int32_t last_period = Saturated<int32_t>(step / 3);
    double eager = 1.0, lazy = 1.0;
    for (int touch = 0; touch < 40; ++touch) {
      const int64_t to = step + 1 + static_cast<int64_t>(random() % 10);
      while (step < to) {
        if (++step % 3 == 0 && step <= 3 * kMost) eager *= 0.75;
      }
      lazy *= swap.DecaySince(&last_period, step);
      ASSERT_NEAR(lazy, eager, 1e-5 * eager) << step;
      ASSERT_EQ(last_period, std::min(step / 3, kMost));
    }
    ASSERT_GT(step, 3 * kMost);
  }
}

TEST(SwapTest, IsOffUnlessAPeriodIsSet) {
  EXPECT_FALSE(Swap().enabled());
  EXPECT_FALSE((Swap{/*period=*/0, /*decay=*/0.8}).enabled());
  EXPECT_TRUE((Swap{/*period=*/1, /*decay=*/0.8}).enabled());
}

}  // namespace
}  // namespace recsync
