#include "cc/simulation/hop_cluster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/hop_setting_testing.h"

namespace recsync {
namespace {

constexpr double kCompute = 0.010;

// Workers on machines of their own, with the times of equal steps and no links.
HopClusterOptions ClusterOf(const Setting& setting, int64_t steps) {
  HopClusterOptions options;
  const int64_t n = setting.graph.size();
  for (int64_t i = 0; i < n; ++i) {
    options.workers.push_back(OptionsOf(setting, i));
    options.machines.push_back(i);
  }
  options.serial = setting.serial;
  options.bytes_per_second.assign(n, 1e9);
  options.compute_seconds = [](int64_t, int64_t, double) { return kCompute; };
  options.steps = steps;
  return options;
}

// Has run to its end.
std::unique_ptr<HopCluster> HasRun(HopClusterOptions options) {
  auto cluster = std::make_unique<HopCluster>(std::move(options));
  const Result result = cluster->Run([] { return true; });
  EXPECT_TRUE(result.ok()) << result.error();
  return cluster;
}

// One worker takes so many times as long.
std::function<double(int64_t, int64_t, double)> SlowWorker(int64_t slow,
                                                           double multiple) {
  return [=](int64_t worker, int64_t, double) {
    return kCompute * (worker == slow ? multiple : 1.0);
  };
}

// Times from 0.5 to 2.5 times as long, some ten times that.
std::function<double(int64_t, int64_t, double)> RandomTimes(uint32_t seed) {
  auto random = std::make_shared<std::mt19937>(seed);
  return [random](int64_t, int64_t, double) {
    const double time = kCompute * (0.5 + (*random)() % 1000 / 500.0);
    return (*random)() % 10 == 0 ? 10 * time : time;
  };
}

TEST(HopClusterTest, SerialStepsOfEqualWorkersTakeComputingAndTheExchange) {
  HopClusterOptions options =
      ClusterOf(Setting("", OneWay(5)).Gap(5).Serial(), 100);
  options.latency = 0.001;
  options.update_bytes = 2'000'000;
  // All send to the next worker first: then the updates for those after that
  // pass the senders' cards. The question and the answer go before, and the
  // update is on its way once.
  const double exchange = 0.002 + 0.002 + 0.002 + 3 * 0.001;
  const auto cluster = HasRun(options);
  EXPECT_EQ(cluster->steps(), (std::vector<int64_t>(5, 20)));
  EXPECT_NEAR(cluster->seconds(), 20 * (kCompute + exchange), 1e-6);
  for (const HopState& state : cluster->States()) {
    EXPECT_NEAR(1e-6 * state.counts.waiting_for_updates, 20 * exchange, 1e-4);
    EXPECT_EQ(state.counts.waiting_for_tokens, 0);
  }
}

TEST(HopClusterTest, InParallelOrderTheExchangeHidesBehindComputing) {
  HopClusterOptions options = ClusterOf(Setting("", Ring(4)).Gap(5), 80);
  options.latency = 0.0001;
  options.update_bytes = 1'000'000;
  EXPECT_NEAR(HasRun(options)->seconds(), 20 * kCompute, 1e-6);
  // And computing behind the exchange.
  options.update_bytes = 20'000'000;
  EXPECT_GT(HasRun(options)->seconds(), 20 * 0.040);
}

TEST(HopClusterTest, WorkersOfAMachineShareItsLinksAndNeedNoneAmongThemselves) {
  // Four on each of two machines; each sends to one on the other machine.
  const Graph pairs = {{4}, {5}, {6}, {7}, {0}, {1}, {2}, {3}};
  HopClusterOptions options =
      ClusterOf(Setting("", pairs).Gap(5).Serial(), 8 * 10);
  options.update_bytes = 10'000'000;  // A hundredth of a second in each link.
  EXPECT_NEAR(HasRun(options)->seconds(), 10 * (kCompute + 0.020), 1e-6);
  options.machines = {0, 0, 0, 0, 1, 1, 1, 1};
  options.bytes_per_second = {1e9, 1e9};
  auto cluster = HasRun(options);
  // All four of an iteration pass one card, while others compute.
  EXPECT_NEAR(cluster->seconds(), kCompute + 10 * 4 * 0.010 + 0.010, 1e-6);
  for (const VirtualNetwork::Traffic& traffic : cluster->traffic()) {
    EXPECT_EQ(traffic.sent, 10 * 4 * 10'000'000);
    EXPECT_EQ(traffic.received, 10 * 4 * 10'000'000);
    EXPECT_NEAR(traffic.seconds, 2 * 0.4, 1e-6);
  }
  // In both directions together it takes twice as long.
  options.duplex = false;
  EXPECT_GT(HasRun(options)->seconds(), 10 * 8 * 0.010);
  options.duplex = true;
  options.machines.assign(8, 1);
  cluster = HasRun(options);
  EXPECT_NEAR(cluster->seconds(), 10 * kCompute, 1e-6);
  EXPECT_EQ(cluster->traffic()[1].sent, 0);
}

TEST(HopClusterTest, AllGoAtThePaceOfASlowWorkerWithoutBackupWorkers) {
  HopClusterOptions options = ClusterOf(Setting("", Ring(16)).Gap(5), 16 * 50);
  options.compute_seconds = SlowWorker(3, 6.0);
  const auto cluster = HasRun(options);
  const std::vector<int64_t>& steps = cluster->steps();
  // Those far from it are so many iterations ahead at the end as there are
  // edges between them.
  const int64_t slow = steps[3];
  EXPECT_EQ(*std::min_element(steps.begin(), steps.end()), slow);
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t distance = std::min<int64_t>((i + 13) % 16, (19 - i) % 16);
    EXPECT_LE(steps[i], slow + distance);
  }
  EXPECT_NEAR(cluster->seconds() / slow, 6 * kCompute, 1e-3);
}

TEST(HopClusterTest, WithBackupWorkersSlowStepsHoldUpFewerWorkers) {
  // A step of six times the time in 16, as in the paper's section 7.3.1.
  const auto now_and_then = [](int64_t worker, int64_t step, double) {
    std::seed_seq seed{worker, step};
    return std::mt19937(seed)() % 16 == 0 ? 6 * kCompute : kCompute;
  };
  const auto run = [&](Setting setting) {
    HopClusterOptions options = ClusterOf(setting, 16 * 100);
    options.compute_seconds = now_and_then;
    return HasRun(options);
  };
  const auto standard = run(Setting("", RingBased(16)).Gap(5));
  const auto backup = run(Setting("", RingBased(16)).Gap(5).Backups(1));
  const auto stale = run(Setting("", RingBased(16)).Gap(5).Staleness(4));
  EXPECT_GT(standard->seconds(), 1.25 * backup->seconds());
  EXPECT_GT(standard->seconds(), 1.25 * stale->seconds());
  // No better than steps whose slow ones are nobody else's.
  EXPECT_GT(backup->seconds(), 100 * kCompute * 21 / 16);
  int64_t dropped = 0;
  for (const HopState& state : backup->States()) {
    dropped += state.updates.unusable;
    for (const int64_t declined : state.declined) dropped += declined;
  }
  EXPECT_GT(dropped, 0);
}

TEST(HopClusterTest, TokensBoundHowFarOthersRunAheadOfASlowWorker) {
  HopClusterOptions options =
      ClusterOf(Setting("", RingBased(16)).Gap(3).Backups(1), 16 * 40);
  options.compute_seconds = SlowWorker(0, 6.0);
  const auto cluster = HasRun(options);
  EXPECT_EQ(cluster->largest_gaps()[1][0], 3);
  int64_t waited = 0;
  for (const HopState& state : cluster->States()) {
    waited += state.counts.waiting_for_tokens;
  }
  EXPECT_GT(waited, 0);
}

TEST(HopClusterTest, ASlowWorkerThatSkipsIterationsKeepsUp) {
  const auto run = [](Setting setting) {
    HopClusterOptions options = ClusterOf(setting, 16 * 100);
    options.compute_seconds = SlowWorker(5, 4.0);
    return HasRun(options);
  };
  const auto standard = run(Setting("", RingBased(16)).Gap(5));
  const auto backup = run(Setting("", RingBased(16)).Gap(5).Backups(1));
  const auto skipping =
      run(Setting("", RingBased(16)).Gap(5).Backups(1).Skip(10));
  // Section 7.3.5: the slowdown of 3.9 becomes one of about 1.1.
  EXPECT_GT(standard->seconds(), 3.5 * 100 * kCompute);
  EXPECT_GT(backup->seconds(), 2 * skipping->seconds());
  EXPECT_LT(skipping->seconds(), 1.3 * 100 * kCompute);
  EXPECT_GT(skipping->States()[5].counts.skipped, 0);
  EXPECT_EQ(backup->States()[5].counts.skipped, 0);
}

TEST(HopClusterTest, AcknowledgementsAreWaitedForWhereTokensAreNot) {
  const auto run = [](Setting setting) {
    HopClusterOptions options = ClusterOf(setting, 40);
    options.latency = 0.001;
    // The first one is slow to use updates that the others have sent.
    options.compute_seconds = [](int64_t worker, int64_t step, double) {
      return worker == 0 && step == 0 ? 0.1 : 0.0001;
    };
    return HasRun(options);
  };
  const auto waited = [](const HopCluster& cluster) {
    int64_t waited = 0;
    for (const HopState& state : cluster.States()) {
      waited += state.counts.waiting_for_tokens;
    }
    return waited;
  };
  const auto acknowledged = run(Setting("", Ring(4)).NotifyAck());
  const auto tokens = run(Setting("", Ring(4)).Gap(5));
  EXPECT_GT(waited(*acknowledged), 0);
  EXPECT_EQ(waited(*tokens), 0);
  EXPECT_GT(acknowledged->seconds(), tokens->seconds());
}

class HopClusterSettingsTest : public testing::TestWithParam<Setting> {};

TEST_P(HopClusterSettingsTest, RandomTimesKeepTheBoundsOfTable1AndLoseNothing) {
  const Setting& setting = GetParam();
  const Matrix bounds = BoundsOf(setting);
  const int64_t n = setting.graph.size();
  for (uint32_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(testing::Message() << setting << ", seed " << seed);
    HopClusterOptions options = ClusterOf(setting, 30 * n);
    options.compute_seconds = RandomTimes(seed);
    options.latency = 0.0005;
    options.update_bytes = 1'000'000;
    const auto cluster = HasRun(options);
    int64_t done = 0;
    for (const int64_t steps : cluster->steps()) done += steps;
    EXPECT_EQ(done, 30 * n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        EXPECT_LE(cluster->largest_gaps()[i][j], bounds[i][j])
            << "of " << i << " to " << j;
      }
    }
    int64_t sent = 0;
    int64_t come = 0;
    int64_t declined = 0;
    const auto states = cluster->States();
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(states[i].counts.iterations, cluster->steps()[i]);
      EXPECT_EQ(states[i].counts.iterations + states[i].counts.skipped,
                states[i].iteration + 1);
      sent += states[i].counts.sent;
      come += states[i].updates.enqueued;
      for (const int64_t count : states[i].declined) declined += count;
    }
    EXPECT_EQ(come + declined, sent);
    // And each that was not declined has passed both cards.
    int64_t out = 0;
    int64_t in = 0;
    for (const VirtualNetwork::Traffic& traffic : cluster->traffic()) {
      out += traffic.sent;
      in += traffic.received;
    }
    EXPECT_EQ(out, come * options.update_bytes);
    EXPECT_EQ(in, come * options.update_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, HopClusterSettingsTest,
    testing::Values(
        Setting("standard_without_tokens", Ring(5)),
        Setting("standard", RingBased(6)).Gap(3),
        Setting("serial_one_way", OneWay(5)).Gap(2).Serial(),
        Setting("backup", RingBased(6)).Gap(3).Backups(1),
        Setting("backup_mixed", RingBased(6))
            .Gap(3)
            .Backups({0, 2, 1, 0, 1, 2}),
        Setting("staleness", Ring(5)).Gap(4).Staleness(2),
        Setting("hybrid", RingBased(6)).Gap(4).Backups(1).Staleness(2),
        Setting("skip_backup", RingBased(6)).Gap(3).Backups(1).Skip(10),
        Setting("skip_hybrid_serial", OneWay(5))
            .Gap(4)
            .Backups(1)
            .Staleness(1)
            .Skip(3)
            .Serial(),
        Setting("notify_ack", Ring(5)).NotifyAck(),
        Setting("notify_ack_serial", Ring(4)).NotifyAck().Serial()),
    [](const auto& info) { return info.param.name; });

// A small problem and how a cluster of this setting learns it.
struct Learned {
  LogisticProblem problem;
  HopClusterOptions options;

  explicit Learned(const Setting& setting)
      : problem({/*examples=*/256, /*features=*/4, /*batch_size=*/16,
                 /*weight_decay=*/0.01, /*seed=*/3}),
        options(ClusterOf(setting, 100 * setting.graph.size())) {
    options.learning.emplace();
    options.learning->problem = &problem;
    options.learning->learning_rate = 0.2;
    options.learning->momentum = 0.5;
    options.learning->loss_seconds = 0.2;
  }

  // The smallest loss there is, by gradient descent on all examples.
  double Smallest() const {
    const int64_t features = problem.options().features;
    std::vector<double> w(features + 1, 0.0);
    double loss = 0.0;
    for (int round = 0; round < 300; ++round) {
      std::vector<double> gradient(w.size(), 0.0);
      loss = 0.0;
      for (size_t i = 0; i < problem.labels().size(); ++i) {
        double score = w[features];
        for (int64_t f = 0; f < features; ++f) {
          score += w[f] * problem.inputs()[i * features + f];
        }
        const double label = problem.labels()[i];
        loss += std::log(1 + std::exp(score)) - label * score;
        const double error = 1 / (1 + std::exp(-score)) - label;
        for (int64_t f = 0; f < features; ++f) {
          gradient[f] += error * problem.inputs()[i * features + f];
        }
        gradient[features] += error;
      }
      loss /= problem.labels().size();
      for (size_t p = 0; p < w.size(); ++p) {
        loss += 0.005 * w[p] * w[p];
        w[p] -= gradient[p] / problem.labels().size() + 0.01 * w[p];
      }
    }
    return loss;
  }
};

TEST(HopClusterTest, EveryProtocolLearnsToTheBestLossOfTheProblem) {
  for (const Setting& setting :
       {Setting("standard", RingBased(6)).Gap(5),
        Setting("serial", Ring(5)).Gap(5).Serial(),
        Setting("backup", RingBased(6)).Gap(5).Backups(1),
        Setting("hybrid", RingBased(6)).Gap(5).Backups(1).Staleness(3),
        Setting("skip", RingBased(6)).Gap(5).Backups(1).Skip(10),
        Setting("notify_ack", Ring(5)).NotifyAck()}) {
    SCOPED_TRACE(testing::Message() << setting);
    Learned learned(setting);
    learned.options.compute_seconds = SlowWorker(1, 4.0);
    const auto cluster = HasRun(learned.options);
    const auto& losses = cluster->losses();
    EXPECT_NEAR(losses.front().loss, std::log(2.0), 1e-6);
    // Batches are drawn by chance, so that it comes no closer.
    EXPECT_LT(losses.back().loss, learned.Smallest() + 0.01);
    EXPECT_GE(losses.back().loss, learned.Smallest() - 1e-6);
    EXPECT_EQ(losses.back().steps, learned.options.steps);
    EXPECT_EQ(losses.back().seconds, cluster->seconds());
  }
}

TEST(HopClusterTest, OneWorkerIsPlainGradientDescentWithMomentum) {
  Learned learned(Setting("", Graph(1)).Gap(5));
  learned.options.steps = 20;
  const auto cluster = HasRun(learned.options);
  const size_t size = learned.problem.parameters();
  std::vector<float> w(size, 0.0f), velocity(size, 0.0f), gradient(size);
  for (int64_t step = 0; step < 20; ++step) {
    learned.problem.Gradient(w.data(), 0, step, gradient.data());
    for (size_t p = 0; p < size; ++p) {
      velocity[p] = 0.5f * velocity[p] - 0.2f * gradient[p];
      w[p] += velocity[p];
    }
  }
  EXPECT_NEAR(cluster->losses().back().loss, learned.problem.Loss(w.data()),
              1e-6);
}

TEST(HopClusterTest, TrainingEndsWhenTheLossIsReachedOrTheTimeIsOver) {
  Learned learned(Setting("", Ring(4)).Gap(5));
  learned.options.learning->target_loss = 0.55;
  const auto reached = HasRun(learned.options);
  EXPECT_LE(reached->losses().back().loss, 0.55);
  EXPECT_LT(reached->losses().back().steps, learned.options.steps);
  EXPECT_EQ(reached->losses().back().seconds, reached->seconds());
  learned.options.seconds = 0.255;
  learned.options.learning->target_loss = 0.0;
  const auto over = HasRun(learned.options);
  EXPECT_EQ(over->seconds(), 0.255);
  EXPECT_EQ(over->steps(), (std::vector<int64_t>(4, 25)));
  EXPECT_EQ(over->losses().back().seconds, 0.255);
}

TEST(HopClusterTest, TheSameSeedGivesTheSameRun) {
  const auto run = [](uint32_t seed) {
    Learned learned(
        Setting("", RingBased(6)).Gap(4).Backups(1).Staleness(2).Skip(4));
    learned.options.compute_seconds = RandomTimes(seed);
    learned.options.latency = 0.001;
    learned.options.update_bytes = 100'000;
    std::vector<double> told;
    const auto cluster = HasRun(learned.options);
    for (const auto& loss : cluster->losses()) told.push_back(loss.loss);
    told.push_back(cluster->seconds());
    return told;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

TEST(HopClusterTest, EventsSayWhenWorkersComputedAndWaited) {
  HopClusterOptions options = ClusterOf(Setting("", Ring(4)).Gap(5), 40);
  options.compute_seconds = SlowWorker(2, 3.0);
  options.keeps_events = true;
  const auto cluster = HasRun(options);
  std::map<int64_t, int64_t> computed, waited;
  for (const auto& [worker, event] : cluster->events()) {
    EXPECT_LE(event.begin, event.end);
    if (event.activity == Activity::kCompute) {
      EXPECT_EQ(event.end - event.begin, worker == 2 ? 30'000 : 10'000);
      ++computed[worker];
    }
    if (event.activity == Activity::kUpdates) {
      waited[worker] += event.end - event.begin;
    }
  }
  const auto states = cluster->States();
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(computed[i], cluster->steps()[i]);
    EXPECT_EQ(waited[i], states[i].counts.waiting_for_updates);
  }
  EXPECT_EQ(waited[2], 0);
  EXPECT_GT(waited[0], 0);
}

TEST(HopClusterTest, TimesWithoutAnEndAreNoError) {
  HopClusterOptions options = ClusterOf(Setting("", Ring(3)).Gap(5), 9);
  options.update_bytes = 1000;
  options.compute_seconds = [](int64_t worker, int64_t, double) {
    return worker == 0 ? 1e300 : std::numeric_limits<double>::infinity();
  };
  EXPECT_EQ(HasRun(options)->steps(), (std::vector<int64_t>(3, 3)));
}

TEST(HopClusterTest, OptionsThatDoNotGoTogetherAreRefused) {
  const auto error = [](auto change) {
    HopClusterOptions options = ClusterOf(Setting("", Ring(4)).Gap(5), 8);
    change(&options);
    return HopCluster(options).Run([] { return true; }).error();
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(error([](auto* o) { o->machines.pop_back(); }), "machines"));
  EXPECT_TRUE(has(error([](auto* o) { o->machines[1] = 4; }), "not 4"));
  EXPECT_TRUE(has(error([](auto* o) { o->bytes_per_second[0] = 0; }),
                  "bytes_per_second"));
  EXPECT_TRUE(has(error([](auto* o) { o->latency = -1; }), "latency"));
  EXPECT_TRUE(has(error([](auto* o) { o->update_bytes = -1; }), "not -1"));
  EXPECT_TRUE(has(error([](auto* o) { o->seconds = std::nan(""); }), "nan"));
  EXPECT_TRUE(has(error([](auto* o) { o->workers[0].weights.clear(); }),
                  "weights of worker 0"));
  EXPECT_TRUE(
      has(error([](auto* o) { o->workers[0].out_neighbors.push_back(2); }),
          "same edges"));
  EXPECT_TRUE(has(error([](auto* o) {
                    o->workers.pop_back();
                    o->machines.pop_back();
                  }),
                  "same edges"));
}

}  // namespace
}  // namespace recsync
