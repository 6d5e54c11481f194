// Hogwild's updates: alone they are the plain rule's, to the last bit.

#include "cc/engine/hogwild.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "cc/engine/update_rules.h"

namespace recsync {
namespace {

std::vector<float> Random(int64_t size, int seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(0.1f, 1.0f);
  std::vector<float> values(size);
  for (float& value : values) value = uniform(generator);
  return values;
}

template <typename Rule>
void ExpectThePlainUpdate(const Rule& rule, int64_t size) {
  const auto g = Random(size, 1);
  std::vector<std::vector<float>> plain, own;
  for (int k = 0; k <= Rule::kAccumulators; ++k) {
    plain.push_back(Random(size, 2 + k));
    own.push_back(plain.back());
  }
  const auto slots = [](std::vector<std::vector<float>>& all) {
    std::vector<float*> pointers;
    for (size_t k = 1; k < all.size(); ++k) pointers.push_back(all[k].data());
    return pointers;
  };
  const SpanUpdate<Rule> apply = ChooseSpanUpdate<Rule, true>();
  const double expected = apply(rule, plain[0].data(), slots(plain).data(),
                                g.data(), size, 0.5f, 0.8f);
  const double squares =
      UpdateHogwild<Rule>(apply, rule, own[0].data(), slots(own).data(),
                          g.data(), size, 0.5f, 0.8f);
  EXPECT_EQ(own, plain) << size;
  EXPECT_NEAR(squares, expected, 1e-9 * std::max(1.0, expected)) << size;
}

TEST(HogwildTest, OneThreadsUpdateIsThePlainRules) {
  for (const int64_t size : {1, 255, 256, 257, 4000}) {
    SgdRule sgd;
    sgd.learning_rate = 0.1f;
    ExpectThePlainUpdate(sgd, size);
    AdagradRule adagrad;
    adagrad.learning_rate = 0.1f;
    adagrad.epsilon = 1e-7f;
    ExpectThePlainUpdate(adagrad, size);
    FtrlRule ftrl;
    ftrl.learning_rate = 0.1f;
    ExpectThePlainUpdate(ftrl, size);
  }
}

// Without losing more than races of single elements: threads that each own a
// part of the elements lose none.
TEST(HogwildTest, ThreadsOnElementsOfTheirOwnLoseNothing) {
  constexpr int64_t kPart = 501;  // Odd: parts begin anywhere.
  constexpr int kThreads = 4, kSteps = 50;
  std::vector<float> w(kThreads * kPart, 0.0f);
  const std::vector<float> g(kPart, 1.0f);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      SgdRule rule;
      rule.learning_rate = 1.0f;
      for (int step = 0; step < kSteps; ++step) {
        UpdateHogwild<SgdRule>(ChooseSpanUpdate<SgdRule, false>(), rule,
                               w.data() + t * kPart, nullptr, g.data(), kPart,
                               1.0f, 1.0f);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const float value : w) ASSERT_EQ(value, -kSteps);
}

}  // namespace
}  // namespace recsync
