#include "cc/simulation/click_learner.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
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

// The model in doubles, by definition: all pairs of features or a hidden layer,
// and SGD on differences of the loss.
class Reference {
 public:
  Reference(const ClickLearnerOptions& options, const ClickData& data)
      : options_(options),
        rows_(data.rows(), std::vector<double>(1 + options.data.dimension)),
        dense_(1 + options.data.numbers) {
    if (options.hidden.units.empty()) return;
    inputs_ =
        options.data.features * options.data.dimension + options.data.numbers;
    const int units = options.hidden.units[0];
    const int each = inputs_ + (options.hidden.mean_normalization ? 4 : 2);
    dense_.resize(dense_.size() + units * each + 1);
  }

  std::vector<std::vector<double>>& rows() { return rows_; }
  std::vector<double>& dense() { return dense_; }

  double Loss(const ClickExamples& examples) const {
    double loss = 0.0;
    std::vector<double> deep(examples.count);
    if (inputs_ > 0) deep = Deep(examples);
    for (int e = 0; e < examples.count; ++e) {
      const double logit = Logit(examples, e) + deep[e];
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
      for (int g = 0; g < f && inputs_ == 0; ++g) {
        for (int k = 1; k <= options_.data.dimension; ++k) {
          logit += rows_[rows[f]][k] * rows_[rows[g]][k];
        }
      }
    }
    return logit;
  }

  // What a hidden layer adds to logits.
  std::vector<double> Deep(const ClickExamples& examples) const {
    const HiddenLayersOptions& hidden = options_.hidden;
    const int units = hidden.units[0], numbers = options_.data.numbers;
    const double* kernel = dense_.data() + 1 + numbers;
    const double* bias = kernel + inputs_ * units;
    const double* alpha = bias + units;
    const double* output = alpha + (hidden.mean_normalization ? 2 * units : 0);
    std::vector<double> logits(examples.count, output[units]);
    for (int u = 0; u < units; ++u) {
      std::vector<double> values;
      double mean = 0.0;
      for (int e = 0; e < examples.count; ++e) {
        double value = bias[u];
        int i = 0;
        for (int f = 0; f < options_.data.features; ++f) {
          const auto& row =
              rows_[examples.rows[e * options_.data.features + f]];
          for (size_t k = 1; k < row.size(); ++k) {
            value += row[k] * kernel[i++ * units + u];
          }
        }
        for (int x = 0; x < numbers; ++x) {
          value += examples.numbers[e * numbers + x] * kernel[i++ * units + u];
        }
        values.push_back(value);
        mean += value / examples.count;
      }
      if (std::abs(mean) < hidden.epsilon) {
        mean = mean < 0.0 ? -hidden.epsilon : hidden.epsilon;
      }
      for (int e = 0; e < examples.count; ++e) {
        double value = values[e];
        if (hidden.mean_normalization) {
          value = alpha[u] * value / mean - alpha[units + u];
        }
        logits[e] += std::max(value, 0.0) * output[u];
      }
    }
    return logits;
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
  int inputs_ = 0;  // of a hidden layer
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

TEST(ClickLearnerTest, HiddenLayersDescendAlongTheSlopeOfTheLoss) {
  for (const bool normalizes : {false, true}) {
    ClickLearnerOptions options;
    options.servers = 2;
    options.data = SmallData(2);
    options.data.number_pairs = 1.0;
    options.hidden.units = {4};
    options.hidden.mean_normalization = normalizes;
    options.hidden.epsilon = 0.3f;
    options.batch_size = 8;
    options.test_examples = 300;
    const ClickData data(options.data);
    Reference reference(options, data);
    ClickLearner learner(options);
    for (int row = 0; row < data.rows(); ++row) {
      for (int k = 1; k <= 2; ++k) {
        reference.rows()[row][k] = learner.value(row, k);
      }
    }
    std::copy_n(learner.dense(), reference.dense().size(),
                reference.dense().begin());
    Train(OfLearner(options, 20), &learner);
    ClickExamples examples;
    for (int batch = 0; batch < 20; ++batch) {
      data.Draw(batch, false, 8, &examples);
      reference.Descend(examples);
    }
    for (int row = 0; row < data.rows(); ++row) {
      for (int k = 0; k <= 2; ++k) {
        EXPECT_NEAR(learner.value(row, k), reference.rows()[row][k], 5e-5);
      }
    }
    for (size_t i = 0; i < reference.dense().size(); ++i) {
      EXPECT_NEAR(learner.dense()[i], reference.dense()[i], 5e-5) << i;
    }
  }
}

TEST(ClickLearnerTest, HiddenLayersLearnProductsOfNumbers) {
  ClickLearnerOptions options;
  options.data = SmallData(0);
  options.data.numbers = 4;
  options.data.number_pairs = 1.5;
  options.test_examples = 5000;
  options.dense.rule = options.rows.rule = LearnerUpdate::Rule::kAdagrad;
  const auto auc_with = [&](std::vector<int> units, bool normalizes) {
    options.hidden.units = std::move(units);
    options.hidden.mean_normalization = normalizes;
    options.hidden.momentum = 0.9f;
    options.hidden.epsilon = 0.1f;
    ClickLearner learner(options);
    Train(OfLearner(options, 3000), &learner);
    EXPECT_LT(learner.Auc(), learner.bayes_auc());
    return learner.Auc();
  };
  const double linear = auc_with({}, false);
  EXPECT_GT(auc_with({16}, false), linear + 0.05);
  EXPECT_GT(auc_with({16, 8}, false), linear + 0.05);
  EXPECT_GT(auc_with({16}, true), linear + 0.05);
}

TEST(ClickLearnerTest, ADriftingModelIsTestedOnTheDayAfterThatOfItsLastBatch) {
  const auto evaluations = [](double drift) {
    ClickLearnerOptions options;
    options.data = SmallData(0);
    options.data.signal = 2.0;
    options.data.drift = drift;
    options.data.day_batches = 300;
    options.test_examples = 3000;
    ClickLearner learner(options);
    ServerSimulationOptions simulated = OfLearner(options, 600);
    simulated.evaluate_every = 150;
    Train(simulated, &learner);
    return learner.evaluations();
  };
  constexpr double kTurn = 6.283185307179586;
  const auto same = evaluations(kTurn);
  // A day says nothing of the next one.
  const auto others = evaluations(kTurn / 4);
  ASSERT_EQ(others.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_GT(same[i].auc, same[i].bayes_auc - 0.05);
    EXPECT_LT(others[i].auc, others[i].bayes_auc - 0.1);
  }
  // Within a day, and at its end, on the same clicks.
  EXPECT_EQ(others[0].bayes_auc, others[1].bayes_auc);
  EXPECT_NE(others[1].bayes_auc, others[2].bayes_auc);
  EXPECT_EQ(others[2].bayes_auc, others[3].bayes_auc);
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
  options = {};
  options.hidden.units = {3, 0};
  EXPECT_EQ(CheckOptions(options).error(),
            "hidden_units must be from 1 to 16384, not 0");
  options = {};
  options.data.drift = -0.5;
  EXPECT_EQ(CheckOptions(options).error(),
            "drift must be at least 0 and finite, not -0.5");
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
