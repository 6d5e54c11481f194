#include "cc/engine/gradient_buffer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

GradientBufferOptions Options(int64_t capacity, int64_t dense_size = 1) {
  GradientBufferOptions options;
  options.capacity = capacity;
  options.divisor = capacity;
  options.dense_size = dense_size;
  options.dense_count = 1;
  return options;
}

Floats DenseOf(const Aggregate& aggregate, int64_t size) {
  Floats dense(size);
  aggregate.WriteDense(0, size, dense.data());
  return dense;
}

// Pushes one number; what a step gives out, or null.
std::unique_ptr<Aggregate> PushNumber(GradientBuffer* buffer, float number,
                                      int64_t token_value,
                                      int64_t token_index = 0) {
  GradientPush push;
  push.token_index = token_index;
  push.token_value = token_value;
  push.dense = &number;
  std::unique_ptr<Aggregate> aggregate;
  EXPECT_EQ(buffer->Push(push, &aggregate), "");
  return aggregate;
}

// What was pushed to a table, owned.
struct OwnedRows {
  int64_t table;
  Ids ids;
  std::vector<int32_t> bags;  // empty: each its own
  Floats scales;              // empty: 1
  Floats gradient;
  Ids versions;  // empty: fresh
};

struct OwnedPush {
  int64_t token_index, token_value, pulled_step;
  Floats dense;  // empty: none
  Ids dense_versions;
  std::vector<OwnedRows> rows;

  GradientPush View() const {
    const auto or_null = [](const auto& v) {
      return v.empty() ? nullptr : v.data();
    };
    GradientPush push;
    push.token_index = token_index;
    push.token_value = token_value;
    push.pulled_step = pulled_step;
    push.dense = or_null(dense);
    push.dense_versions = or_null(dense_versions);
    for (const OwnedRows& r : rows) {
      TableGradient table;
      table.table = r.table;
      table.ids = r.ids.data();
      table.n = r.ids.size();
      table.push.gradient = r.gradient.data();
      table.push.bags.bags = or_null(r.bags);
      table.push.bags.scales = or_null(r.scales);
      table.push.pulled = or_null(r.versions);
      push.tables.push_back(table);
    }
    return push;
  }
};

// Keeps all pushes of a step, and adds them up at its end.
class Simulation {
 public:
  explicit Simulation(const GradientBufferOptions& options)
      : options_(options) {}

  // Whether the push completes a step.
  bool Push(const OwnedPush& push) {
    if (options_.drop_late && push.token_value < step) {
      ++late;
      return false;
    }
    if (options_.drop_late &&
        std::any_of(kept_.begin(), kept_.end(), [&](const Kept& k) {
          return k.push.token_index == push.token_index;
        })) {
      ++duplicates;
      return false;
    }
    const int64_t age = std::max<int64_t>(step - push.token_value, 0);
    const double weight = WeightOf(age);
    if (weight == 0.0) ++excluded;
    if (weight > 0.0) ++included;
    if (weight > 0.0 && weight < 1.0) ++decayed;
    ages.push_back(age);
    taus.push_back(step - push.pulled_step + 1);
    kept_.push_back({push, weight});
    return static_cast<int64_t>(kept_.size()) == options_.capacity;
  }

  int64_t pending() const { return kept_.size(); }

  void ExpectEqual(const Aggregate& aggregate, double divisor) {
    EXPECT_EQ(aggregate.step(), ++step);
    std::vector<double> dense(options_.dense_size, 0.0);
    Ids dense_versions;
    bool has_dense = false;
    struct Row {
      std::vector<double> sum;
      int64_t oldest;
    };
    std::vector<std::map<int64_t, Row>> rows(options_.tables.size());
    std::vector<Ids> order(options_.tables.size());
    for (const auto& [push, weight] : kept_) {
      if (weight == 0.0) continue;
      if (!push.dense.empty()) has_dense = true;
      for (size_t i = 0; i < push.dense.size(); ++i) {
        dense[i] += weight * push.dense[i];
      }
      if (dense_versions.empty()) dense_versions = push.dense_versions;
      for (size_t i = 0; i < push.dense_versions.size(); ++i) {
        dense_versions[i] = std::min(dense_versions[i], push.dense_versions[i]);
      }
      for (const OwnedRows& r : push.rows) {
        const int64_t width = options_.tables[r.table].width;
        for (size_t p = 0; p < r.ids.size(); ++p) {
          const int64_t version = r.versions.empty() ? -1 : r.versions[p];
          const auto [at, is_new] = rows[r.table].emplace(
              r.ids[p], Row{std::vector<double>(width, 0.0), version});
          if (is_new) order[r.table].push_back(r.ids[p]);
          at->second.oldest = std::min(at->second.oldest, version);
          const int64_t bag = r.bags.empty() ? p : r.bags[p];
          const double scale = r.scales.empty() ? 1.0 : r.scales[p];
          for (int64_t j = 0; j < width; ++j) {
            at->second.sum[j] += weight * scale * r.gradient[bag * width + j];
          }
        }
      }
    }
    kept_.clear();
    ASSERT_EQ(aggregate.has_dense(), has_dense);
    if (has_dense) {
      const Floats got = DenseOf(aggregate, options_.dense_size);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i], dense[i] / divisor, 1e-4);
      }
      EXPECT_EQ(aggregate.dense_versions(), dense_versions);
    }
    for (size_t t = 0; t < rows.size(); ++t) {
      const RowSums& sums = aggregate.rows(t);
      ASSERT_EQ(sums.size(), static_cast<int64_t>(order[t].size()));
      const int64_t width = options_.tables[t].width;
      Floats values(sums.size() * width);
      aggregate.WriteRows(t, 0, sums.size(), values.data());
      for (int64_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(sums.id(i), order[t][i]);
        const Row& row = rows[t].at(sums.id(i));
        if (aggregate.has_row_versions()) {
          EXPECT_EQ(sums.oldest(i), row.oldest);
        } else {
          EXPECT_EQ(row.oldest, -1);
        }
        for (int64_t j = 0; j < width; ++j) {
          EXPECT_NEAR(values[i * width + j], row.sum[j] / divisor, 1e-4);
        }
      }
    }
  }

  int64_t step = 0, included = 0, decayed = 0, excluded = 0, late = 0,
          duplicates = 0;
  Ids ages, taus;

 private:
  struct Kept {
    OwnedPush push;
    double weight;
  };

  double WeightOf(int64_t age) const {
    const StalenessWeight& w = options_.weight;
    switch (w.decay) {
      case StalenessDecay::kThreshold:
        return age <= w.iota ? 1.0 : 0.0;
      case StalenessDecay::kInversePower:
        return age + 1 <= w.baseline
                   ? 1.0
                   : std::pow(w.baseline / (age + 1.0), w.power);
      default:
        return 1.0;
    }
  }

  const GradientBufferOptions options_;
  std::vector<Kept> kept_;
};

OwnedPush RandomPush(const GradientBufferOptions& options, int64_t step,
                     bool versioned, std::mt19937* random) {
  const auto below = [random](int64_t n) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n));
  };
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  OwnedPush push;
  push.token_index = below(12);
  push.token_value = std::max<int64_t>(step - below(5), 0);
  if (!options.drop_late) push.token_value += below(3);  // even ahead of it
  push.pulled_step = below(step + 1);
  if (below(4) > 0) {
    push.dense.resize(options.dense_size);
    for (float& g : push.dense) g = uniform(*random);
    for (int64_t i = 0; versioned && i < options.dense_count; ++i) {
      push.dense_versions.push_back(below(1000));
    }
  }
  for (int64_t r = below(4); r > 0; --r) {
    OwnedRows rows;
    rows.table = below(options.tables.size());
    const GradientBufferOptions::Table& table = options.tables[rows.table];
    const int64_t n = below(30);
    int64_t bags = n;
    for (int64_t p = 0; p < n; ++p) {
      rows.ids.push_back(below(table.rows));
      if (versioned) rows.versions.push_back(below(1000));
    }
    if (below(2) > 0) {
      bags = 1 + below(10);
      for (int64_t p = 0; p < n; ++p) rows.bags.push_back(below(bags));
      std::sort(rows.bags.begin(), rows.bags.end());
    }
    if (below(2) > 0) {
      for (int64_t p = 0; p < n; ++p) rows.scales.push_back(uniform(*random));
    }
    rows.gradient.resize(bags * table.width);
    for (float& g : rows.gradient) g = uniform(*random);
    push.rows.push_back(rows);
  }
  return push;
}

void CompareWithSimulation(GradientBufferOptions options, bool versioned,
                           uint32_t seed) {
  options.dense_size = 7;
  options.dense_count = 3;
  options.tables = {{20, 4}, {1000, 1}, {1, 3}};
  ASSERT_EQ(CheckOptions(options), "");
  std::mt19937 random(seed);
  GradientBuffer buffer(options);
  Simulation simulation(options);
  // Aggregates outlive the steps after them, and may end in any order.
  std::vector<std::unique_ptr<Aggregate>> held;
  int64_t given_out = 0;
  for (int i = 0; i < 600; ++i) {
    const OwnedPush push =
        RandomPush(options, simulation.step, versioned, &random);
    std::unique_ptr<Aggregate> aggregate;
    ASSERT_EQ(buffer.Push(push.View(), &aggregate), "");
    const bool ready = simulation.Push(push);
    ASSERT_EQ(aggregate != nullptr, ready);
    double divisor = options.divisor;
    if (!ready && random() % 50 == 0) {
      divisor = simulation.pending();
      aggregate = buffer.Flush();
      ASSERT_EQ(aggregate != nullptr, divisor > 0);
    }
    EXPECT_EQ(buffer.state().pending,
              aggregate == nullptr ? simulation.pending() : 0);
    if (aggregate == nullptr) continue;
    ++given_out;
    simulation.ExpectEqual(*aggregate, divisor);
    held.push_back(std::move(aggregate));
    if (random() % 2 == 0) held.clear();
  }
  ASSERT_GT(given_out, 10);
  const GradientBufferState state = buffer.state();
  EXPECT_EQ(state.step, given_out);
  EXPECT_EQ(state.applications, given_out);
  EXPECT_EQ(state.included, simulation.included);
  EXPECT_EQ(state.decayed, simulation.decayed);
  EXPECT_EQ(state.excluded, simulation.excluded);
  EXPECT_EQ(state.late, simulation.late);
  EXPECT_EQ(state.duplicates, simulation.duplicates);
  const Ids& ages = simulation.ages;
  EXPECT_EQ(state.age_sum,
            std::accumulate(ages.begin(), ages.end(), int64_t{0}));
  EXPECT_EQ(state.age_max, *std::max_element(ages.begin(), ages.end()));
  LocalStalenessCounters expected;
  for (const int64_t tau : simulation.taus) expected.Add(tau);
  EXPECT_TRUE(std::equal(state.staleness.begin(), state.staleness.end(),
                         expected.data()));
}

TEST(GradientBufferTest, AgreesWithASimulationThatKeepsAllPushes) {
  uint32_t seed = 1;
  for (const StalenessDecay decay :
       {StalenessDecay::kConstant, StalenessDecay::kThreshold,
        StalenessDecay::kInversePower}) {
    for (const bool drop_late : {false, true}) {
      for (const bool versioned : {false, true}) {
        for (const int64_t capacity : {1, 3, 8}) {
          SCOPED_TRACE(seed);
          GradientBufferOptions options = Options(capacity);
          options.divisor = capacity == 8 ? 2.5 : capacity;
          options.weight.decay = decay;
          options.weight.iota = 1;
          options.weight.baseline = 2;
          options.weight.power = 1.5;
          options.drop_late = drop_late;
          CompareWithSimulation(options, versioned, seed++);
        }
      }
    }
  }
}

TEST(GradientBufferTest, AStepIsGivenOutOnceWhenItsPushesAreThere) {
  GradientBuffer buffer(Options(3));
  EXPECT_EQ(PushNumber(&buffer, 1, 0), nullptr);
  EXPECT_EQ(PushNumber(&buffer, 2, 0), nullptr);
  EXPECT_EQ(buffer.step(), 0);
  const std::unique_ptr<Aggregate> aggregate = PushNumber(&buffer, 6, 0);
  ASSERT_NE(aggregate, nullptr);
  EXPECT_EQ(aggregate->step(), 1);
  EXPECT_EQ(DenseOf(*aggregate, 1), Floats{3});
  EXPECT_TRUE(aggregate->dense_versions().empty());
  EXPECT_EQ(buffer.step(), 1);
  EXPECT_EQ(buffer.Flush(), nullptr);
  EXPECT_EQ(buffer.step(), 1);
}

TEST(GradientBufferTest, AnExcludedPushCountsAndItsNanDoesNotReachTheSum) {
  GradientBufferOptions options = Options(2);
  options.weight.decay = StalenessDecay::kThreshold;
  options.weight.iota = 1;
  options.tables = {{4, 1}};
  GradientBuffer buffer(options);
  buffer.Restore(5);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Ids ids = {1}, versions = {0};
  GradientPush push;
  push.token_value = 3;  // of age 2
  push.dense = &nan;
  push.tables.resize(1);
  push.tables[0].ids = ids.data();
  push.tables[0].n = 1;
  push.tables[0].push.gradient = &nan;
  std::unique_ptr<Aggregate> aggregate;
  ASSERT_EQ(buffer.Push(push, &aggregate), "");
  EXPECT_EQ(aggregate, nullptr);
  aggregate = PushNumber(&buffer, 4, 4);
  ASSERT_NE(aggregate, nullptr);
  EXPECT_EQ(DenseOf(*aggregate, 1), Floats{2});  // divided by 2 all the same
  EXPECT_EQ(aggregate->rows(0).size(), 0);
  EXPECT_EQ(buffer.state().excluded, 1);
  EXPECT_EQ(buffer.state().included, 1);
  EXPECT_EQ(buffer.state().age_max, 2);
}

TEST(GradientBufferTest, AStepOfExcludedPushesHasNothingToApply) {
  GradientBufferOptions options = Options(1);
  options.weight.decay = StalenessDecay::kThreshold;
  GradientBuffer buffer(options);
  buffer.Restore(2);
  const std::unique_ptr<Aggregate> aggregate = PushNumber(&buffer, 1, 1);
  ASSERT_NE(aggregate, nullptr);
  EXPECT_EQ(aggregate->step(), 3);
  EXPECT_FALSE(aggregate->has_dense());
}

TEST(GradientBufferTest, ANanOfAnIncludedPushDoes) {
  GradientBuffer buffer(Options(1));
  const auto aggregate =
      PushNumber(&buffer, std::numeric_limits<float>::quiet_NaN(), 0);
  EXPECT_TRUE(std::isnan(DenseOf(*aggregate, 1)[0]));
  // And stays in its step.
  EXPECT_EQ(DenseOf(*PushNumber(&buffer, 1, 0), 1), Floats{1});
}

TEST(GradientBufferTest, LatePushesAndTokensTakenTwiceAreDroppedIfAsked) {
  GradientBufferOptions options = Options(2);
  options.drop_late = true;
  GradientBuffer buffer(options);
  EXPECT_EQ(PushNumber(&buffer, 1, 0, /*token_index=*/0), nullptr);
  EXPECT_EQ(PushNumber(&buffer, 1, 0, 0), nullptr);  // a duplicate
  auto aggregate = PushNumber(&buffer, 3, 0, 1);
  ASSERT_NE(aggregate, nullptr);
  EXPECT_EQ(DenseOf(*aggregate, 1), Floats{2});
  EXPECT_EQ(PushNumber(&buffer, 9, 0, 1), nullptr);  // late
  EXPECT_EQ(PushNumber(&buffer, 5, 1, 1), nullptr);  // of another step: taken
  const GradientBufferState state = buffer.state();
  EXPECT_EQ(state.late, 1);
  EXPECT_EQ(state.duplicates, 1);
  EXPECT_EQ(state.included, 3);
  EXPECT_EQ(state.pending, 1);
}

TEST(GradientBufferTest, AppliedIsTheStepUpToWhichAllAreDone) {
  GradientBuffer buffer(Options(1));
  for (int i = 0; i < 3; ++i) PushNumber(&buffer, 1, 0);
  EXPECT_EQ(buffer.applied(), 0);
  EXPECT_EQ(buffer.Applied(2), "");
  EXPECT_EQ(buffer.applied(), 0);
  EXPECT_EQ(buffer.Applied(1), "");
  EXPECT_EQ(buffer.applied(), 2);
  EXPECT_EQ(buffer.Applied(4),
            "step = 4 is not in [1, 3], the steps given out");
  EXPECT_NE(buffer.Applied(0), "");
  EXPECT_EQ(buffer.Applied(3), "");
  EXPECT_EQ(buffer.applied(), 3);
}

TEST(GradientBufferTest, WhatIsAppliedAlreadyMayBeMarkedAgain) {
  GradientBuffer buffer(Options(1));
  for (int i = 0; i < 3; ++i) PushNumber(&buffer, 1, 0);
  // Ahead of its turn, and behind.
  for (const int64_t step : {2, 2, 1, 1, 2}) {
    EXPECT_EQ(buffer.Applied(step), "");
  }
  EXPECT_EQ(buffer.applied(), 2);
  EXPECT_EQ(buffer.Applied(3), "");
  EXPECT_EQ(buffer.applied(), 3);
  // What was marked before does not count for the steps to come.
  PushNumber(&buffer, 1, 0);
  EXPECT_EQ(buffer.applied(), 3);
}

TEST(GradientBufferTest, RestoringSetsTheStepAndDropsWhatIsPending) {
  GradientBuffer buffer(Options(2));
  PushNumber(&buffer, 100, 0);
  buffer.Restore(40);
  EXPECT_EQ(buffer.step(), 40);
  EXPECT_EQ(buffer.applied(), 40);
  EXPECT_EQ(buffer.state().pending, 0);
  PushNumber(&buffer, 1, 40);
  const auto aggregate = PushNumber(&buffer, 3, 40);
  ASSERT_NE(aggregate, nullptr);
  EXPECT_EQ(aggregate->step(), 41);
  EXPECT_EQ(DenseOf(*aggregate, 1), Floats{2});
  EXPECT_EQ(buffer.Applied(41), "");
}

TEST(GradientBufferTest, WhatIsWrongIsNamedAndChangesNothing) {
  GradientBufferOptions options = Options(4);
  options.drop_late = true;
  options.tables = {{4, 1}};
  GradientBuffer buffer(options);
  buffer.Restore(3);
  const Ids version = {2}, negative = {-2};
  const float number = 1;
  const auto push_with = [&](const auto& change) {
    const Ids ids = {3};
    GradientPush push;
    push.token_index = 8;
    push.token_value = 3;
    push.dense = &number;
    push.tables.resize(1);
    push.tables[0].ids = ids.data();
    push.tables[0].n = 1;
    push.tables[0].push.gradient = &number;
    change(&push);
    std::unique_ptr<Aggregate> aggregate;
    return buffer.Push(push, &aggregate);
  };
  EXPECT_EQ(push_with([](GradientPush* p) { p->token_index = -1; }),
            "token_index must be at least 0, not -1");
  EXPECT_EQ(push_with([](GradientPush* p) { p->token_value = -2; }),
            "token_value must be at least 0, not -2");
  EXPECT_EQ(push_with([](GradientPush* p) { p->pulled_step = -3; }),
            "pulled_step must be at least 0, not -3");
  EXPECT_EQ(push_with([](GradientPush* p) { p->pulled_step = 4; }),
            "pulled_step = 4 is not in [0, 3], the steps up to now");
  EXPECT_EQ(push_with([](GradientPush* p) { p->token_value = 4; }),
            "token_value = 4 is ahead of step = 3: a buffer that drops late "
            "pushes takes those of its own step only");
  EXPECT_EQ(push_with([](GradientPush* p) { p->tables[0].table = 1; }),
            "table 1 is not in [0, 1)");
  const Ids bad = {4};
  EXPECT_EQ(push_with([&](GradientPush* p) { p->tables[0].ids = bad.data(); }),
            "row id 4 of table 0, at its position 0, is not in [0, 4)");
  EXPECT_EQ(push_with([&](GradientPush* p) {
              p->tables[0].push.pulled = negative.data();
            }),
            "the version -2 pulled of a row of table 0, at its position 0, is "
            "negative");
  EXPECT_EQ(
      push_with([&](GradientPush* p) { p->dense_versions = negative.data(); }),
      "dense_versions[0] = -2 is negative");
  EXPECT_EQ(buffer.state().pending, 0);
  // The token was not taken by what failed.
  EXPECT_EQ(push_with([](GradientPush*) {}), "");
  EXPECT_EQ(push_with([&](GradientPush* p) {
              p->token_index = 9;
              p->dense_versions = version.data();
            }),
            "dense_versions must hold 0 versions, like those of the other "
            "pushes of this step");
  EXPECT_EQ(push_with([&](GradientPush* p) {
              p->token_index = 9;
              p->tables[0].push.pulled = version.data();
            }),
            "the gradients of rows must come with no versions, like those of "
            "the other pushes of this step");
  EXPECT_EQ(buffer.state().pending, 1);
}

TEST(GradientBufferTest, BadOptionsAreNamed) {
  const auto check_with = [](const auto& change) {
    GradientBufferOptions options = Options(2);
    change(&options);
    return CheckOptions(options);
  };
  using O = GradientBufferOptions;
  EXPECT_EQ(check_with([](O*) {}), "");
  EXPECT_EQ(check_with([](O* o) { o->capacity = 0; }),
            "capacity must be at least 1, not 0");
  EXPECT_EQ(check_with([](O* o) { o->divisor = 0; }),
            "divisor must be positive and finite, not 0");
  EXPECT_EQ(check_with([](O* o) { o->divisor = std::nan(""); }),
            "divisor must be positive and finite, not nan");
  EXPECT_EQ(check_with([](O* o) { o->dense_size = -1; }),
            "dense_size must be at least 0, not -1");
  EXPECT_EQ(check_with([](O* o) { o->dense_count = -1; }),
            "dense_count must be at least 0, not -1");
  EXPECT_EQ(check_with([](O* o) {
              o->tables = {{5, 2}, {-1, 2}};
            }),
            "table 1 must have at least 0 rows and floats, not -1 rows of 2");
  EXPECT_NE(check_with([](O* o) { o->weight.update_sensitivity = 0; }), "");
  EXPECT_NE(check_with([](O* o) { o->weight.target_deviation = 1; }), "");
}

TEST(GradientBufferTest, OptionsThatDifferHaveOtherDescriptions) {
  std::set<std::string> descriptions;
  const auto describe = [&](const auto& change) {
    GradientBufferOptions options = Options(2);
    options.weight.decay = StalenessDecay::kInversePower;
    change(&options);
    return descriptions.insert(Describe(options)).second;
  };
  using O = GradientBufferOptions;
  EXPECT_TRUE(describe([](O*) {}));
  EXPECT_FALSE(describe([](O*) {}));
  EXPECT_TRUE(describe([](O* o) { o->capacity = 3; }));
  EXPECT_TRUE(describe([](O* o) { o->divisor = 2.0000001; }));
  EXPECT_TRUE(describe([](O* o) { o->weight.power = 3; }));
  EXPECT_TRUE(describe([](O* o) { o->weight.baseline = 3; }));
  EXPECT_TRUE(describe([](O* o) { o->weight.normalized = false; }));
  EXPECT_TRUE(
      describe([](O* o) { o->weight.decay = StalenessDecay::kThreshold; }));
  EXPECT_TRUE(describe([](O* o) {
    o->weight.decay = StalenessDecay::kThreshold;
    o->weight.iota = 2;
  }));
  EXPECT_TRUE(
      describe([](O* o) { o->weight.decay = StalenessDecay::kConstant; }));
  EXPECT_TRUE(describe([](O* o) { o->drop_late = true; }));
  EXPECT_TRUE(describe([](O* o) { o->dense_size = 9; }));
  EXPECT_TRUE(describe([](O* o) { o->dense_count = 9; }));
  EXPECT_TRUE(describe([](O* o) { o->tables = {{1, 2}}; }));
  EXPECT_TRUE(describe([](O* o) { o->tables = {{2, 1}}; }));
}

// What a thread was given out.
struct Received {
  double dense = 0;
  std::map<int64_t, double> rows;
  Ids steps;

  void Add(const Aggregate& aggregate) {
    steps.push_back(aggregate.step());
    if (aggregate.has_dense()) dense += DenseOf(aggregate, 1)[0];
    const RowSums& sums = aggregate.rows(0);
    Floats values(sums.size());
    aggregate.WriteRows(0, 0, sums.size(), values.data());
    for (int64_t i = 0; i < sums.size(); ++i) rows[sums.id(i)] += values[i];
  }
  void Add(const Received& other) {
    dense += other.dense;
    for (const auto& [row, sum] : other.rows) rows[row] += sum;
    steps.insert(steps.end(), other.steps.begin(), other.steps.end());
  }
};

TEST(GradientBufferTest, AMillionPushesOfSixteenThreadsAreEachAppliedOnce) {
  constexpr int kThreads = 16;
  constexpr int kPushes = 62500;  // of a thread
  constexpr int64_t kRows = 40;
  GradientBufferOptions options = Options(/*capacity=*/7);
  options.divisor = 1;
  options.tables = {{kRows, 1}};
  GradientBuffer buffer(options);
  std::vector<Received> received(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&buffer, &received, t] {
      for (int i = 0; i < kPushes; ++i) {
        // Integers, so that all sums are exact.
        const float dense = t + 1;
        const int64_t ids[] = {(i + t) % kRows, i % 3, i % 3};
        const float gradient[] = {1, 2, 3};
        GradientPush push;
        push.token_index = t * kPushes + i;
        push.pulled_step = buffer.applied();
        push.token_value = push.pulled_step;
        push.dense = &dense;
        push.tables.resize(1);
        push.tables[0].ids = ids;
        push.tables[0].n = 3;
        push.tables[0].push.gradient = gradient;
        std::unique_ptr<Aggregate> aggregate;
        if (!buffer.Push(push, &aggregate).empty()) return;
        if (aggregate == nullptr) continue;
        received[t].Add(*aggregate);
        if (!buffer.Applied(aggregate->step()).empty()) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Received all;
  for (const Received& one : received) all.Add(one);
  constexpr int64_t kAll = int64_t{kThreads} * kPushes;
  EXPECT_EQ(static_cast<int64_t>(all.steps.size()), kAll / 7);
  const std::unique_ptr<Aggregate> last = buffer.Flush();
  ASSERT_EQ(last != nullptr, kAll % 7 != 0);
  // The flush divides by the number of pushes.
  Received rest;
  rest.Add(*last);
  all.steps.push_back(last->step());
  all.dense += rest.dense * (kAll % 7);
  for (const auto& [row, sum] : rest.rows) {
    all.rows[row] += std::round(sum * (kAll % 7));
  }
  std::sort(all.steps.begin(), all.steps.end());
  for (size_t i = 0; i < all.steps.size(); ++i) {
    ASSERT_EQ(all.steps[i], static_cast<int64_t>(i) + 1);
  }
  EXPECT_NEAR(all.dense, kPushes * (kThreads * (kThreads + 1) / 2), 1e-3);
  std::map<int64_t, double> expected;
  for (int t = 0; t < kThreads; ++t) {
    for (int i = 0; i < kPushes; ++i) {
      expected[(i + t) % kRows] += 1;
      expected[i % 3] += 5;
    }
  }
  EXPECT_EQ(all.rows, expected);
  const GradientBufferState state = buffer.state();
  EXPECT_EQ(state.included, kAll);
  EXPECT_EQ(state.applied, state.step - 1);  // all but the flush
  EXPECT_EQ(state.staleness[StalenessCounters::kCount], kAll);
}

TEST(GradientBufferTest, ATokenThatTwoThreadsPushIsTakenOnce) {
  constexpr int kThreads = 8;
  constexpr int kSteps = 1000;
  GradientBufferOptions options = Options(/*capacity=*/kThreads);
  options.divisor = 1;
  options.drop_late = true;
  GradientBuffer buffer(options);
  std::vector<Floats> sums(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&buffer, &sums, t] {
      for (int step = 0; step < kSteps; ++step) {
        for (const int token : {t, (t + 1) % kThreads}) {
          const float dense = 1 << token;
          GradientPush push;
          push.token_index = step * kThreads + token;
          push.token_value = step;
          push.dense = &dense;
          std::unique_ptr<Aggregate> aggregate;
          if (!buffer.Push(push, &aggregate).empty()) return;
          if (aggregate == nullptr) continue;
          sums[t].push_back(DenseOf(*aggregate, 1)[0]);
          buffer.Applied(aggregate->step());
        }
        while (buffer.applied() <= step) std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t given_out = 0;
  for (const Floats& own : sums) {
    for (const float sum : own) {
      ++given_out;
      ASSERT_EQ(sum, (1 << kThreads) - 1);
    }
  }
  EXPECT_EQ(given_out, kSteps);
  const GradientBufferState state = buffer.state();
  EXPECT_EQ(state.included, kSteps * kThreads);
  EXPECT_EQ(state.late + state.duplicates, kSteps * kThreads);
}

}  // namespace
}  // namespace recsync
