// Averaging against a plain loop.

#include "cc/engine/weighted_average.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace recsync {
namespace {

template <typename T>
class WeightedAverageTest : public testing::Test {
 protected:
  static std::vector<T> Random(int64_t size, int seed) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<T> uniform(-1, 1);
    std::vector<T> values(size);
    for (T& value : values) value = uniform(generator);
    return values;
  }
};

using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(WeightedAverageTest, Types);

TYPED_TEST(WeightedAverageTest, IsTheSumOfWeightedDifferencesForAnySize) {
  for (const int64_t size : {0, 1, 7, 1023, 1024, 1025, 5000}) {
    const auto a = this->Random(size, 1);
    const auto b = this->Random(size, 2);
    const auto base = this->Random(size, 3);
    const auto before = this->Random(size, 4);
    auto own = before;
    AverageInto<TypeParam>({a.data(), b.data()}, {0.25, 0.5}, base.data(),
                           own.data(), size);
    for (int64_t i = 0; i < size; ++i) {
      const double expected = before[i] + 0.25 * (double{a[i]} - base[i]) +
                              0.5 * (double{b[i]} - base[i]);
      ASSERT_NEAR(own[i], expected, 1e-6) << i << " of " << size;
    }
  }
}

TYPED_TEST(WeightedAverageTest, WithItselfAsBaseItIsTheWeightedMean) {
  const auto a = this->Random(3000, 1);
  const auto before = this->Random(3000, 2);
  auto own = before;
  AverageInto<TypeParam>({a.data()}, {0.25}, own.data(), own.data(), 3000);
  for (int64_t i = 0; i < 3000; ++i) {
    ASSERT_NEAR(own[i], 0.75 * before[i] + 0.25 * a[i], 1e-6);
  }
}

}  // namespace
}  // namespace recsync
