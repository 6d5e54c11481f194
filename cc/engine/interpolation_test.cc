// Interpolation against its formula, and beside threads that train.

#include "cc/engine/interpolation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "cc/engine/update_rules.h"

namespace recsync {
namespace {

std::vector<float> Random(int64_t size, int seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(size);
  for (float& value : values) value = uniform(generator);
  return values;
}

TEST(InterpolationTest, IsTheFormulaForAnySizeAndPlace) {
  for (const int64_t size : {0, 1, 2, 3, 4, 7, 255, 256, 257, 5000}) {
    for (const int64_t start : {0, 1, 2, 3, 4}) {
      const auto target = Random(size, 1);
      const auto before = Random(start + size + 1, 2);
      auto own = before;
      std::vector<float> after(size, -7.0f);
      Interpolate(target.data(), 0.3f, size, own.data() + start, after.data());
      for (int64_t i = 0; i < size; ++i) {
        const float value = own[start + i];
        ASSERT_NEAR(value, 0.7 * before[start + i] + 0.3 * target[i], 1e-6);
        EXPECT_EQ(after[i], value);
      }
      if (start > 0) {
        EXPECT_EQ(own[0], before[0]);
      }
      EXPECT_EQ(own.back(), before.back());
    }
  }
}

TEST(InterpolationTest, AlphaOfZeroKeepsAndOfOneTakesTheTarget) {
  const auto target = Random(700, 1);
  const auto before = Random(700, 2);
  auto own = before;
  Interpolate(target.data(), 0.0f, 700, own.data(), nullptr);
  EXPECT_EQ(own, before);
  Interpolate(target.data(), 1.0f, 700, own.data(), nullptr);
  EXPECT_EQ(own, target);
}

TEST(InterpolationTest, WhatWasLearnedSinceTheSnapshotSurvives) {
  // Snapshot; an update by 1; interpolation with what came of the snapshot.
  auto own = Random(1000, 1);
  const std::vector<float> snapshot = own;
  for (float& value : own) value += 1.0f;
  Interpolate(snapshot.data(), 0.25f, 1000, own.data(), nullptr);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_NEAR(own[i], snapshot[i] + 0.75f, 1e-6);
  }
}

// One thread moves the parameters towards 0 while others train them to 1: all
// of it may happen at once, and no element ever is anything but in between.
TEST(InterpolationTest, RunsBesideHogwildUpdates) {
  constexpr int64_t kSize = 3000;
  std::vector<float> w(kSize, 0.5f);
  const std::vector<float> zero(kSize, 0.0f);
  std::atomic<bool> done{false};
  std::thread shadow([&] {
    while (!done) {
      Interpolate(zero.data(), 0.1f, kSize, w.data(), nullptr);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> trainers;
  for (int t = 0; t < 3; ++t) {
    trainers.emplace_back([&] {
      SgdRule rule;
      rule.learning_rate = 0.1f;
      std::vector<float> pulled(kSize), gradient(kSize);
      for (int step = 0; step < 100; ++step) {
        LoadHogwild(w.data(), kSize, pulled.data());
        for (int64_t i = 0; i < kSize; ++i) gradient[i] = pulled[i] - 1.0f;
        UpdateHogwild<SgdRule>(ChooseSpanUpdate<SgdRule, false>(), rule,
                               w.data(), nullptr, gradient.data(), kSize, 1.0f,
                               1.0f);
      }
    });
  }
  for (std::thread& thread : trainers) thread.join();
  done = true;
  shadow.join();
  for (const float value : w) {
    ASSERT_GE(value, 0.0f);
    ASSERT_LE(value, 1.5f);
  }
}

}  // namespace
}  // namespace recsync
