#include "cc/engine/compression.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::nanf("");

std::vector<float> RandomValues(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

struct Row {
  explicit Row(const std::vector<float>& x) : codes(x.size()), back(x.size()) {
    const auto columns = static_cast<int64_t>(x.size());
    scale = QuantizeRow(x.data(), columns, codes.data());
    DequantizeRow(codes.data(), columns, scale, back.data());
  }
  std::vector<int8_t> codes;
  float scale;
  std::vector<float> back;
};

TEST(QuantizeTest, EachValueIsWithinHalfAStep) {
  for (int64_t columns : {1, 7, 16, 1000}) {
    const std::vector<float> x = RandomValues(columns, 3);
    const Row row(x);
    float largest = 0.0f;
    for (float value : x) largest = std::max(largest, std::fabs(value));
    EXPECT_EQ(row.scale, largest / 127.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_LE(std::fabs(row.back[i] - x[i]), 0.5001f * row.scale);
    }
  }
}

TEST(QuantizeTest, RoundsToTheNearestWithTiesToEven) {
  const Row row(
      {127.0f, 0.49f, 0.5f, 0.51f, 1.5f, 2.5f, -0.5f, -1.5f, -127.0f});
  EXPECT_EQ(row.scale, 1.0f);
  EXPECT_EQ(row.codes, (std::vector<int8_t>{127, 0, 0, 1, 2, 2, 0, -2, -127}));
}

TEST(QuantizeTest, ExtremeRowsHaveTheirOwnScales) {
  const float most = std::numeric_limits<float>::max();
  EXPECT_EQ(Row({most, -most, 0.0f}).codes,
            (std::vector<int8_t>{127, -127, 0}));
  EXPECT_EQ(Row({0.0f, -0.0f}).scale, 0.0f);
  // 127 / |x| would overflow.
  EXPECT_EQ(Row({1e-38f, -1e-40f}).back, (std::vector<float>{0.0f, 0.0f}));
  EXPECT_EQ(Row({1e-36f, 0.0f}).codes, (std::vector<int8_t>{127, 0}));
  EXPECT_TRUE(Row(std::vector<float>{}).codes.empty());
}

TEST(QuantizeTest, ARowThatIsNotFiniteComesOutAsNaN) {
  for (float odd : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    const Row row({1.0f, odd, 2.0f});
    EXPECT_TRUE(std::isnan(row.scale));
    for (float value : row.back) EXPECT_TRUE(std::isnan(value));
  }
}

TEST(KeptCountTest, LeavesOutAPartButNeverAll) {
  EXPECT_EQ(KeptCount(10, 0.0), 10);
  EXPECT_EQ(KeptCount(10, 0.25), 8);
  EXPECT_EQ(KeptCount(10, 0.999), 1);
  EXPECT_EQ(KeptCount(1, 0.999), 1);
  EXPECT_EQ(KeptCount(0, 0.5), 0);
}

// Compresses and restores.
template <typename V>
std::vector<float> ThereAndBack(const std::vector<float>& x, int64_t kept,
                                std::vector<float>* error = nullptr) {
  const auto count = static_cast<int64_t>(x.size());
  std::vector<uint8_t> mask(static_cast<size_t>(MaskBytes(count)), 0xFF);
  std::vector<V> values(static_cast<size_t>(kept));
  if (error != nullptr) error->resize(x.size());
  const bool all = kept == count;
  Compress(x.data(), count, kept, all ? nullptr : mask.data(), values.data(),
           error == nullptr ? nullptr : error->data());
  EXPECT_TRUE(all || MaskFits(mask.data(), count, kept));
  std::vector<float> back(x.size(), -1.0f);
  Restore(all ? nullptr : mask.data(), values.data(), count, back.data());
  return back;
}

TEST(SparsifyTest, KeepsTheLargestAndLeavesOutTheOthers) {
  for (int64_t count : {1, 8, 9, 63, 5000}) {
    const std::vector<float> x = RandomValues(count, 5);
    for (int64_t kept : {int64_t{1}, count / 2, count - 1, count}) {
      if (kept < 1) continue;
      std::vector<float> sorted = x;
      std::sort(sorted.begin(), sorted.end(),
                [](float a, float b) { return std::fabs(a) > std::fabs(b); });
      const float least = std::fabs(sorted[static_cast<size_t>(kept - 1)]);
      const std::vector<float> back = ThereAndBack<float>(x, kept);
      for (size_t i = 0; i < x.size(); ++i) {
        EXPECT_EQ(back[i], std::fabs(x[i]) >= least ? x[i] : 0.0f);
      }
    }
  }
}

TEST(SparsifyTest, OfEqualGradientsTheFirstAreKept) {
  EXPECT_EQ(ThereAndBack<float>({1.0f, -2.0f, 2.0f, 2.0f, 1.0f, -2.0f}, 3),
            (std::vector<float>{0.0f, -2.0f, 2.0f, 2.0f, 0.0f, 0.0f}));
  EXPECT_EQ(ThereAndBack<float>({0.0f, 0.0f, 0.0f}, 2),
            (std::vector<float>{0.0f, 0.0f, 0.0f}));
}

TEST(SparsifyTest, WhatIsNotFiniteIsSentAndLeavesNoError) {
  std::vector<float> error;
  const std::vector<float> back =
      ThereAndBack<float>({1.0f, kNaN, 5.0f, -kInfinity}, 2, &error);
  EXPECT_EQ(back[0], 0.0f);
  EXPECT_TRUE(std::isnan(back[1]));
  EXPECT_EQ(back[3], -kInfinity);
  EXPECT_EQ(error, (std::vector<float>{1.0f, 0.0f, 5.0f, 0.0f}));
  // One of them is left out.
  ThereAndBack<float>({kNaN, kInfinity, 5.0f}, 1, &error);
  EXPECT_EQ(error, (std::vector<float>{0.0f, 0.0f, 5.0f}));
}

TEST(SparsifyTest, TheErrorIsWhatWasLeftOutAndWhatBFloat16RoundedOff) {
  const std::vector<float> x = RandomValues(1000, 7);
  for (int64_t kept : {1000, 100}) {
    std::vector<float> error;
    const std::vector<float> back = ThereAndBack<BFloat16>(x, kept, &error);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(back[i] + error[i], x[i]);
      EXPECT_TRUE(back[i] == 0.0f ||
                  std::fabs(error[i]) <= std::fabs(x[i]) / 256);
    }
  }
}

TEST(MaskTest, FitsOnlyItsNumberOfGradients) {
  const uint8_t mask[2] = {0x81, 0x02};
  EXPECT_TRUE(MaskFits(mask, 10, 3));
  EXPECT_FALSE(MaskFits(mask, 10, 2));
  EXPECT_FALSE(MaskFits(mask, 9, 3));  // A bit beyond the last one.
  EXPECT_TRUE(MaskFits(mask, 0, 0));
}

TEST(ErrorFeedbackTest, NothingIsLostInTheLongRun) {
  constexpr int64_t kCount = 100;
  ErrorFeedback feedback;
  std::vector<double> given(kCount, 0.0), sent(kCount, 0.0);
  std::vector<uint8_t> mask(static_cast<size_t>(MaskBytes(kCount)));
  std::vector<BFloat16> values(10);
  std::vector<float> back(kCount);
  for (uint32_t step = 0; step < 50; ++step) {
    const std::vector<float> g = RandomValues(kCount, step);
    feedback.CompressWith(g.data(), kCount, 10, mask.data(), values.data());
    Restore(mask.data(), values.data(), kCount, back.data());
    for (size_t i = 0; i < g.size(); ++i) {
      given[i] += g[i];
      sent[i] += back[i];
    }
  }
  const std::vector<float> error = feedback.error();
  for (size_t i = 0; i < given.size(); ++i) {
    EXPECT_NEAR(given[i], sent[i] + error[i], 1e-4);
  }
}

TEST(ErrorFeedbackTest, BeginsAnewWithAnotherNumberOfGradients) {
  ErrorFeedback feedback;
  std::vector<uint8_t> mask(1);
  std::vector<float> values(1);
  const float g[3] = {3.0f, 2.0f, 1.0f};
  feedback.CompressWith(g, 3, 1, mask.data(), values.data());
  EXPECT_EQ(feedback.error(), (std::vector<float>{0.0f, 2.0f, 1.0f}));
  feedback.CompressWith(g, 2, 1, mask.data(), values.data());
  EXPECT_EQ(feedback.error(), (std::vector<float>{0.0f, 2.0f}));
  EXPECT_EQ(values[0], 3.0f);
}

}  // namespace
}  // namespace recsync
