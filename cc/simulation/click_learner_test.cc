#include "cc/simulation/click_learner.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cc/simulation/server_simulation.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

ClickDataOptions SmallData(int dimension) {
  ClickDataOptions data;
  data.features = 3;
  data.vocabulary = 5;
  data.numbers = 2;
  data.dimension = dimension;
  data.seed = 7;
  return data;
}

TEST(ClickDataTest, ClicksAreAsFrequentAsTheirLogitsSay) {
  for (const int dimension : {0, 4}) {
    ClickDataOptions options;
    options.dimension = dimension;
    const ClickData data(options);
    ClickExamples examples;
    data.Draw(3, false, 20000, &examples);
    // Of examples of about the same logit, about so many click.
    std::map<int, std::pair<double, double>> sums;
    double squares = 0.0, mean = 0.0;
    for (int e = 0; e < examples.count; ++e) {
      const double logit = examples.logits[e];
      auto& [expected, clicks] = sums[static_cast<int>(std::floor(logit))];
      expected += 1.0 / (1.0 + std::exp(-logit));
      clicks += examples.labels[e];
      mean += logit / examples.count;
      squares += logit * logit / examples.count;
    }
    for (const auto& [logit, sum] : sums) {
      EXPECT_NEAR(sum.second, sum.first, 5.0 * std::sqrt(sum.first + 1.0));
    }
    const double deviation = std::sqrt(squares - mean * mean);
    EXPECT_GT(deviation, 0.5);
    EXPECT_LT(deviation, 2.5);
  }
}

TEST(ClickDataTest, ABatchIsAFunctionOfTheSeedAndItsNumber) {
  ClickDataOptions options = SmallData(2);
  ClickExamples one, same, other, test;
  ClickData(options).Draw(4, false, 50, &one);
  ClickData(options).Draw(4, false, 50, &same);
  ClickData(options).Draw(5, false, 50, &other);
  ClickData(options).Draw(4, true, 50, &test);
  EXPECT_EQ(one.rows, same.rows);
  EXPECT_EQ(one.labels, same.labels);
  EXPECT_NE(one.rows, other.rows);
  EXPECT_NE(one.rows, test.rows);
  for (size_t i = 0; i < one.rows.size(); ++i) {
    EXPECT_EQ(one.rows[i] / options.vocabulary, static_cast<int>(i % 3));
  }
}

TEST(ClickDataTest, TheAreaUnderTheCurveCountsPairs) {
  const std::vector<float> labels{1, 0, 1, 0, 0, 1};
  const std::vector<double> scores{0.3, 0.3, 0.9, 0.1, 0.5, 0.1};
  double wins = 0.0;
  for (const int click : {0, 2, 5}) {
    for (const int none : {1, 3, 4}) {
      wins += scores[click] > scores[none]    ? 1.0
              : scores[click] == scores[none] ? 0.5
                                              : 0.0;
    }
  }
  EXPECT_DOUBLE_EQ(AreaUnderCurve(labels, scores), wins / 9);
  EXPECT_EQ(AreaUnderCurve({1, 1}, {0.1, 0.2}), 0.5);
}

// The model in doubles, by definition: one logit after the other, all pairs of
// features, and SGD on differences of the loss.
class Reference {
 public:
  Reference(const ClickLearnerOptions& options, const ClickData& data)
      : options_(options),
        rows_(data.rows(), std::vector<double>(1 + options.data.dimension)),
        dense_(1 + options.data.numbers) {}

  std::vector<std::vector<double>>& rows() { return rows_; }

  double Loss(const ClickExamples& examples) const {
    double loss = 0.0;
    for (int e = 0; e < examples.count; ++e) {
      const double logit = Logit(examples, e);
      const double sign = examples.labels[e] > 0.5f ? -1.0 : 1.0;
      loss += std::log1p(std::exp(sign * logit)) / examples.count;
    }
    return loss;
  }

  double Logit(const ClickExamples& examples, int e) const {
    const int features = options_.data.features;
    const int32_t* rows = examples.rows.data() + e * features;
    double logit = dense_[0];
    for (int i = 0; i < options_.data.numbers; ++i) {
      logit += dense_[1 + i] * examples.numbers[e * options_.data.numbers + i];
    }
    for (int f = 0; f < features; ++f) {
      logit += rows_[rows[f]][0];
      for (int g = 0; g < f; ++g) {
        for (int k = 1; k <= options_.data.dimension; ++k) {
          logit += rows_[rows[f]][k] * rows_[rows[g]][k];
        }
      }
    }
    return logit;
  }

  void Descend(const ClickExamples& examples) {
    std::vector<double*> parameters;
    for (auto& row : rows_) {
      for (double& value : row) parameters.push_back(&value);
    }
    for (double& value : dense_) parameters.push_back(&value);
    std::vector<double> slopes;
    constexpr double kSmall = 1e-5;
    for (double* parameter : parameters) {
      const double value = *parameter;
      *parameter = value + kSmall;
      const double above = Loss(examples);
      *parameter = value - kSmall;
      slopes.push_back((above - Loss(examples)) / (2 * kSmall));
      *parameter = value;
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      *parameters[i] -= options_.rows.learning_rate * slopes[i];
    }
  }

 private:
  const ClickLearnerOptions options_;
  std::vector<std::vector<double>> rows_;
  std::vector<double> dense_;
};

ServerSimulationOptions OfLearner(const ClickLearnerOptions& options,
                                  int64_t steps) {
  ServerSimulationOptions simulated;
  simulated.workers = options.workers;
  simulated.servers = options.servers;
  simulated.steps = steps;
  simulated.compute_seconds.assign(options.workers, 1.0);
  return simulated;
}

void Train(const ServerSimulationOptions& options, ClickLearner* learner) {
  ServerSimulation simulation(options, learner);
  const Result done = simulation.Run([] { return true; });
  ASSERT_TRUE(done.ok()) << done.error();
}

TEST(ClickLearnerTest, AWorkerAloneDescendsAlongTheSlopeOfTheLoss) {
  for (const int dimension : {0, 2}) {
    for (const int servers : {1, 3}) {
      ClickLearnerOptions options;
      options.servers = servers;
      options.data = SmallData(dimension);
      options.batch_size = 8;
      options.test_examples = 300;
      const ClickData data(options.data);
      Reference reference(options, data);
      // Both begin with the same factors.
      ClickLearner learner(options);
      for (int row = 0; row < data.rows(); ++row) {
        for (int k = 1; k <= dimension; ++k) {
          reference.rows()[row][k] = learner.value(row, k);
        }
      }
      Train(OfLearner(options, 20), &learner);
      ClickExamples examples;
      for (int batch = 0; batch < 20; ++batch) {
        data.Draw(batch, false, 8, &examples);
        reference.Descend(examples);
      }
      for (int row = 0; row < data.rows(); ++row) {
        for (int k = 0; k <= dimension; ++k) {
          EXPECT_NEAR(learner.value(row, k), reference.rows()[row][k], 2e-5);
        }
      }
      data.Draw(0, true, 300, &examples);
      std::vector<double> scores;
      for (int e = 0; e < 300; ++e) {
        scores.push_back(reference.Logit(examples, e));
      }
      EXPECT_NEAR(learner.Auc(), AreaUnderCurve(examples.labels, scores), 1e-3);
    }
  }
}

TEST(ClickLearnerTest, TheModelBecomesAlmostAsGoodAsTheTruth) {
  for (const int dimension : {0, 4}) {
    ClickLearnerOptions options;
    options.data.vocabulary = 10;
    options.test_examples = 5000;
    options.data.dimension = dimension;
    options.dense.rule = options.rows.rule = LearnerUpdate::Rule::kAdagrad;
    options.dense.learning_rate = options.rows.learning_rate = 0.1f;
    options.rows.initial_accumulator = options.dense.initial_accumulator =
        1e-5f;
    ClickLearner learner(options);
    EXPECT_GT(learner.bayes_auc(), 0.65);
    Train(OfLearner(options, 1500), &learner);
    EXPECT_GT(learner.Auc(), learner.bayes_auc() - 0.02);
    EXPECT_LT(learner.Auc(), learner.bayes_auc() + 0.005);
  }
}

TEST(ClickLearnerTest, TheDensePartIsAsStaleAsPushesToItsServer) {
  ClickLearnerOptions options;
  options.workers = 12;
  options.servers = 2;
  options.data = SmallData(2);
  options.test_examples = 100;
  ClickLearner learner(options);
  ServerSimulationOptions simulated = OfLearner(options, 300);
  simulated.noise = 0.4;
  ServerSimulation simulation(simulated, &learner);
  ASSERT_TRUE(simulation.Run([] { return true; }).ok());
  EXPECT_EQ(learner.dense_staleness(), simulation.after().staleness[0]);
  // Rows that not every batch names are less stale.
  StalenessTotals rows = learner.RowsStaleness(0);
  StalenessTotals dense = learner.dense_staleness();
  EXPECT_GT(StalenessCounters(rows.data()).Mean(), 1.0);
  EXPECT_LT(StalenessCounters(rows.data()).Mean(),
            StalenessCounters(dense.data()).Mean());
}

TEST(ClickLearnerTest, SynchronousWorkersLearnAsOneWithAllTheirBatches) {
  ClickLearnerOptions options;
  options.data = SmallData(2);
  options.test_examples = 100;
  options.batch_size = 8;
  options.servers = 2;
  options.workers = 4;
  options.rows.rule = options.dense.rule = LearnerUpdate::Rule::kAdagrad;
  ClickLearner together(options);
  ServerSimulationOptions simulated = OfLearner(options, 4 * 50);
  simulated.uses_tokens = simulated.uses_buffers = true;
  simulated.repeats = simulated.capacity = 4;
  simulated.gate = TokenList::Gate::kStep;
  simulated.drop_late = true;
  simulated.noise = 0.5;
  Train(simulated, &together);
  // One worker whose pushes are collected, four at a time, on the parameters
  // that they have in common.
  options.workers = 1;
  ClickLearner alone(options);
  simulated.workers = 1;
  simulated.compute_seconds = {1.0};
  Train(simulated, &alone);
  const int rows = ClickData(options.data).rows();
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k <= 2; ++k) {
      EXPECT_NEAR(together.value(row, k), alone.value(row, k), 1e-5);
    }
  }
}

TEST(ClickLearnerTest, SwapAndStalenessWeightsMakeADifference) {
  ClickLearnerOptions options;
  options.workers = 20;
  options.data = SmallData(0);
  options.test_examples = 100;
  options.rows.rule = options.dense.rule = LearnerUpdate::Rule::kAdagrad;
  const auto first_value = [&] {
    ClickLearner learner(options);
    Train(OfLearner(options, 400), &learner);
    return learner.value(0, 0);
  };
  const float plain = first_value();
  options.rows.options.swap = {50, 0.5, 0};
  const float swapped = first_value();
  EXPECT_GT(std::abs(swapped), std::abs(plain));
  options.rows.options.swap = {};
  options.rows.options.weight.decay = StalenessDecay::kThreshold;
  options.rows.options.weight.iota = 0.0;
  EXPECT_NE(first_value(), plain);
}

TEST(ClickLearnerTest, InEachModeEachPushIsAppliedOnceOrInAGlobalBatch) {
  for (int run = 0; run < 40; ++run) {
    SCOPED_TRACE(run);
    ClickLearnerOptions options;
    options.workers = 1 + run % 7;
    options.servers = 1 + run % 3;
    options.data = SmallData(run % 2);
    options.test_examples = 10;
    options.batch_size = 4;
    ClickLearner learner(options);
    ServerSimulationOptions simulated = OfLearner(options, 60 + run);
    simulated.noise = 0.5;
    simulated.latency = 0.1 * (run % 4);
    simulated.seconds_per_application = 0.05 * (run % 2);
    simulated.reader_ahead = run % 3;
    simulated.uses_tokens = run % 4 > 0;
    simulated.uses_buffers = run % 4 > 1;
    if (run % 4 == 1) simulated.gate = TokenList::Gate::kClock;
    if (simulated.uses_buffers) {
      simulated.repeats = simulated.capacity = 1 + run % 5;
      if (run % 4 == 3) {
        simulated.gate = TokenList::Gate::kStep;
        simulated.drop_late = true;
      }
    }
    ServerSimulation simulation(simulated, &learner);
    const Result done = simulation.Run([] { return true; });
    ASSERT_TRUE(done.ok()) << done.error();
    const int64_t updates = simulated.uses_buffers
                                ? simulation.after().buffers[0].applications
                                : simulated.steps;
    EXPECT_EQ(learner.dense_staleness()[StalenessCounters::kCount], updates);
  }
}

TEST(ClickLearnerTest, WrongOptionsAreNamed) {
  ClickLearnerOptions options;
  EXPECT_TRUE(CheckOptions(options).ok());
  options.batch_size = 0;
  EXPECT_EQ(CheckOptions(options).error(),
            "batch_size must be from 1 to 65536, not 0");
  options = {};
  options.data.vocabulary = 1 << 24;
  options.data.features = 1 << 10;
  EXPECT_NE(CheckOptions(options).error().find("features * vocabulary"),
            std::string::npos);
  options = {};
  options.data.signal = -1.0;
  EXPECT_EQ(CheckOptions(options).error(),
            "signal must be at least 0 and finite, not -1");
}

TEST(ClickLearnerTest, ItIsEvaluatedAsOftenAsItShallBe) {
  ClickLearnerOptions options;
  options.workers = 3;
  options.data = SmallData(0);
  ClickLearner learner(options);
  ServerSimulationOptions simulated = OfLearner(options, 30);
  simulated.evaluate_every = 10;
  Train(simulated, &learner);
  ASSERT_EQ(learner.evaluations().size(), 3u);
  EXPECT_EQ(learner.evaluations()[1].steps, 20);
  EXPECT_EQ(learner.evaluations()[1].seconds, 7.0);
  EXPECT_EQ(learner.evaluations()[2].auc, learner.Auc());
}

}  // namespace
}  // namespace recsync
