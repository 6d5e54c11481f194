// The gradient buffer agrees with a simulation that keeps all pushes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cc/engine/gradient_buffer.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

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

  void ExpectEqual(const Aggregate& aggregate) {
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
      Floats got(options_.dense_size);
      aggregate.WriteDense(0, options_.dense_size, got.data());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i], dense[i] / options_.divisor, 1e-4);
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
          EXPECT_NEAR(values[i * width + j], row.sum[j] / options_.divisor,
                      1e-4);
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
  ASSERT_EQ(CheckOptions(options).error(), "");
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
    ASSERT_EQ(buffer.Push(push.View(), &aggregate).error(), "");
    const bool ready = simulation.Push(push);
    ASSERT_EQ(aggregate != nullptr, ready);
    if (!ready && random() % 50 == 0) {
      aggregate = buffer.Flush();
      ASSERT_EQ(aggregate != nullptr, simulation.pending() > 0);
    }
    EXPECT_EQ(buffer.state().pending,
              aggregate == nullptr ? simulation.pending() : 0);
    if (aggregate == nullptr) continue;
    ++given_out;
    simulation.ExpectEqual(*aggregate);
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

TEST(GradientBufferSimulationTest, AgreesWithASimulationThatKeepsAllPushes) {
  uint32_t seed = 1;
  for (const StalenessDecay decay :
       {StalenessDecay::kConstant, StalenessDecay::kThreshold,
        StalenessDecay::kInversePower}) {
    for (const bool drop_late : {false, true}) {
      for (const bool versioned : {false, true}) {
        for (const int64_t capacity : {1, 3, 8}) {
          SCOPED_TRACE(seed);
          GradientBufferOptions options;
          options.capacity = capacity;
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

}  // namespace
}  // namespace recsync
