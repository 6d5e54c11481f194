#include "cc/simulation/group_cluster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/staleness_counters.h"
#include "cc/simulation/steps_in_no_time.h"

namespace recsync {
namespace {

using Algorithm = CopySyncOptions::Algorithm;
using Schedule = CopySyncOptions::Schedule;

constexpr double kCompute = 0.010;
constexpr double kBandwidth = 1e9;
constexpr int64_t kBytes = 5'000'000;  // 5 ms in each link.

// Trainers that hold their copies.
GroupClusterOptions Trainers(int64_t trainers, int64_t threads, int64_t steps,
                             Algorithm algorithm) {
  GroupClusterOptions options;
  options.groups = trainers;
  options.threads = threads;
  options.compute_seconds = [](int64_t, int64_t, double) { return kCompute; };
  options.trainer_bytes_per_second = kBandwidth;
  options.sync_ps_bytes_per_second = kBandwidth;
  options.sync_ps = algorithm == Algorithm::kEasgd;
  options.sync.algorithm = algorithm;
  options.sync.bytes = kBytes;
  options.steps = steps;
  return options;
}

std::unique_ptr<GroupCluster> HasRun(GroupClusterOptions options) {
  auto cluster = std::make_unique<GroupCluster>(std::move(options));
  const Result result = cluster->Run([] { return true; });
  EXPECT_TRUE(result.ok()) << result.error();
  return cluster;
}

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

double StepsPerSecond(const GroupCluster& cluster) {
  return static_cast<double>(Sum(cluster.steps())) / cluster.seconds();
}

TEST(GroupClusterTest, TheBackgroundTakesNoTimeOfTraining) {
  GroupClusterOptions options = Trainers(3, 4, 1200, Algorithm::kEasgd);
  options.latency = 0.001;
  options.sync.bytes = 1'000'000;
  auto cluster = HasRun(options);
  EXPECT_NEAR(cluster->seconds(), 100 * kCompute, 1e-9);
  EXPECT_EQ(cluster->steps(), (std::vector<int64_t>(3, 400)));
  // There and back, through two links each, and a rest. Three of them come to
  // the sync PS one after the other, once.
  for (const int64_t syncs : cluster->synchronizer().syncs()) {
    EXPECT_NEAR(syncs, 1.0 / (0.006 + 0.010), 1);
  }
  EXPECT_NEAR(cluster->synchronizer().seconds()[0], 0.006 / 0.016, 0.01);
  EXPECT_NEAR(cluster->synchronizer().sync_ps_bytes(),
              2e6 * Sum(cluster->synchronizer().syncs()), 1e7);
  // Or at an interval, from begin to begin.
  options.sync.interval = 0.050;
  cluster = HasRun(options);
  EXPECT_EQ(cluster->synchronizer().syncs(), (std::vector<int64_t>(3, 20)));
}

TEST(GroupClusterTest, AFactorMultipliesAllThatATrainerDoes) {
  GroupClusterOptions options = Trainers(2, 1, 20, Algorithm::kNone);
  options.trainer_per_second = 1e9;
  options.stages = {{GroupWork{GroupWork::kTrainer, 30'000'000}}};
  // The second one is three times as slow, from its second step on.
  options.factor = [](int64_t trainer, int64_t step, double) {
    return trainer == 1 && step > 0 ? 3.0 : 1.0;
  };
  options.steps = StepsInNoTime::kNoEnd;
  options.seconds = 1.01;
  // 40 ms a step, or 120 ms.
  EXPECT_EQ(HasRun(options)->steps(), (std::vector<int64_t>{25, 9}));
}

TEST(GroupClusterTest, StepsThatTakeNoTimeEndByTheirNumberOnly) {
  GroupClusterOptions options = Trainers(2, 2, 100'000, Algorithm::kNone);
  options.compute_seconds = [](int64_t, int64_t, double now) {
    return now < 2.5 * kCompute ? kCompute : 0.0;
  };
  EXPECT_NEAR(HasRun(options)->seconds(), 3 * kCompute, 1e-9);
  options.steps = StepsInNoTime::kNoEnd;
  options.seconds = 5.0;
  GroupCluster cluster(options);
  const std::string error = cluster.Run([] { return true; }).error();
  EXPECT_NE(error.find("seconds=5 would never come"), std::string::npos);
  EXPECT_NE(error.find("from second 0.03"), std::string::npos) << error;
}

TEST(GroupClusterTest, InTheForegroundAThreadWaitsForItsOwnOnly) {
  GroupClusterOptions options = Trainers(1, 2, 200, Algorithm::kEasgd);
  options.sync.schedule = Schedule::kGap;
  options.sync.gap = 5;
  // Both threads come at once; one of them is second in each of the links only
  // the first time.
  const auto cluster = HasRun(options);
  EXPECT_NEAR(cluster->seconds(), 20 * (5 * kCompute + 0.020) + 0.005, 1e-6);
  EXPECT_EQ(cluster->synchronizer().syncs()[0], 40);
}

TEST(GroupClusterTest, SyncPsAreTheLimitOfManyTrainersInTheForegroundOnly) {
  // As FR-EASGD-5 and S-EASGD with 24 threads in figure 5 of the paper.
  const auto run = [](int64_t trainers, Schedule schedule) {
    GroupClusterOptions options =
        Trainers(trainers, 24, trainers * 24 * 50, Algorithm::kEasgd);
    options.sync_ps = 2;
    options.sync.schedule = schedule;
    options.sync.gap = 5;
    options.sync.bytes = 300'000;
    options.trainer_bytes_per_second = 1e12;
    return StepsPerSecond(*HasRun(options));
  };
  // A step's share of a synchronization takes each of the two 30 us.
  const double most = 5 * 2 * kBandwidth / 300'000;
  const double alone = 24 / kCompute;
  // 14 trainers is where they meet.
  EXPECT_NEAR(most / alone, 13.9, 0.1);
  EXPECT_NEAR(run(5, Schedule::kGap), 5 * alone, 0.05 * 5 * alone);
  EXPECT_NEAR(run(10, Schedule::kGap), 10 * alone, 0.1 * 10 * alone);
  EXPECT_NEAR(run(17, Schedule::kGap), most, 0.05 * most);
  EXPECT_NEAR(run(20, Schedule::kGap), most, 0.05 * most);
  EXPECT_NEAR(run(20, Schedule::kBackground), 20 * alone, 1e-6 * alone);
}

TEST(GroupClusterTest, AllReduceTakesEachLinkTwoVectors) {
  GroupClusterOptions options = Trainers(2, 1, 200, Algorithm::kModelAveraging);
  // Two halves pass two links each, one after the other.
  auto cluster = HasRun(options);
  EXPECT_EQ(cluster->synchronizer().syncs(), (std::vector<int64_t>(2, 100)));
  EXPECT_NEAR(cluster->seconds(), 100 * kCompute, 1e-6);
  for (const VirtualNetwork::Traffic& traffic : cluster->traffic()) {
    EXPECT_NEAR(traffic.sent, 100 * kBytes, kBytes);
  }
  options = Trainers(10, 1, 2000, Algorithm::kModelAveraging);
  cluster = HasRun(options);
  const double cycle = cluster->seconds() / cluster->synchronizer().syncs()[0];
  EXPECT_GT(cycle, 2 * 0.9 * 0.005);
  EXPECT_LT(cycle, 4 * 0.005);
}

TEST(GroupClusterTest, AllThreadsMeetInTheForegroundWithAllReduce) {
  GroupClusterOptions options = Trainers(2, 2, 160, Algorithm::kModelAveraging);
  options.sync.schedule = Schedule::kGap;
  options.sync.gap = 4;
  options.compute_seconds = [](int64_t trainer, int64_t, double) {
    return trainer == 1 ? 3 * kCompute : kCompute;
  };
  const auto cluster = HasRun(options);
  // 40 steps of each thread, at the pace of the slower trainer.
  EXPECT_EQ(cluster->steps(), (std::vector<int64_t>(2, 80)));
  EXPECT_NEAR(cluster->seconds(), 10 * (4 * 3 * kCompute + 0.010), 1e-6);
  EXPECT_EQ(cluster->synchronizer().syncs(), (std::vector<int64_t>(2, 10)));
}

TEST(GroupClusterTest, AtAnIntervalTheForegroundStopsAllOrOneThread) {
  GroupClusterOptions options = Trainers(2, 2, 400, Algorithm::kModelAveraging);
  options.sync.schedule = Schedule::kInterval;
  options.sync.interval = 0.1;
  auto cluster = HasRun(options);
  // Each time all threads end their step first, and then wait.
  const int64_t syncs = cluster->synchronizer().syncs()[0];
  EXPECT_NEAR(cluster->seconds(), 100 * kCompute + syncs * 0.010, 1e-6);
  EXPECT_NEAR(cluster->seconds() / syncs, 0.1, 0.015);
  // Of one that takes longer than the interval, threads train a tenth.
  options.sync.bytes = 500'000'000;
  options.steps = 80;
  cluster = HasRun(options);
  EXPECT_NEAR(cluster->seconds() / cluster->synchronizer().syncs()[0], 1.1,
              0.1);
  options = Trainers(2, 2, 400, Algorithm::kEasgd);
  options.sync.schedule = Schedule::kInterval;
  options.sync.interval = 0.1;
  cluster = HasRun(options);
  for (const int64_t count : cluster->synchronizer().syncs()) {
    // The first one comes so long after the first step.
    EXPECT_NEAR(count, (cluster->seconds() - kCompute) / 0.1, 1);
  }
}

TEST(GroupClusterTest, ThreadsOfATrainerShareItsMemory) {
  // Figure 8: more threads than it serves bring nothing.
  const auto run = [](int64_t threads) {
    GroupClusterOptions options =
        Trainers(1, threads, threads * 100, Algorithm::kNone);
    options.stages = {{{GroupWork::kTrainer, /*amount=*/1000}}};
    options.trainer_per_second = 2e6;  // Half a millisecond a step.
    return StepsPerSecond(*HasRun(options));
  };
  EXPECT_NEAR(run(1), 1 / 0.0105, 1e-3);
  EXPECT_NEAR(run(10), 10 / 0.0105, 5);
  EXPECT_NEAR(run(24), 2000, 20);
  EXPECT_NEAR(run(64), 2000, 20);
}

TEST(GroupClusterTest, StalenessAmongThreadsIsTheirNumberOfSteps) {
  const auto cluster = HasRun(Trainers(2, 8, 1600, Algorithm::kNone));
  for (const std::vector<int64_t>& counted : cluster->staleness()) {
    std::vector<int64_t> counters = counted;
    const StalenessCounters staleness(counters.data());
    EXPECT_EQ(staleness.count(), 800);
    // They begin and end together: the first one's update is fresh.
    EXPECT_EQ(staleness.max(), 8);
  }
}

TEST(GroupClusterTest, TimesWithoutAnEndAreNoError) {
  GroupClusterOptions options = Trainers(2, 1, 6, Algorithm::kEasgd);
  options.sync.schedule = Schedule::kGap;
  options.compute_seconds = [](int64_t trainer, int64_t, double) {
    return trainer == 0 ? 1e300 : std::numeric_limits<double>::infinity();
  };
  EXPECT_EQ(Sum(HasRun(options)->steps()), 6);
}

// Hierarchical training: a forward and a backward part on each group PS, what
// trainers do between.
GroupClusterOptions Hierarchical(int64_t groups, int64_t trainers, int64_t nets,
                                 int64_t servers) {
  GroupClusterOptions options;
  options.groups = groups;
  options.trainers = trainers;
  options.threads = nets;
  options.servers = servers;
  options.compute_seconds = [](int64_t, int64_t, double) { return 0.0; };
  std::vector<GroupWork> forward, backward;
  for (int64_t server = 0; server < servers; ++server) {
    forward.push_back({server, /*amount=*/1'000'000, /*bytes_to=*/100'000,
                       /*bytes_back=*/100'000, /*reads=*/true,
                       /*updates=*/false});
    backward.push_back({server, /*amount=*/2'000'000, /*bytes_to=*/100'000,
                        /*bytes_back=*/100'000, /*reads=*/false,
                        /*updates=*/true});
  }
  options.stages = {
      forward, {{GroupWork::kTrainer, /*amount=*/3'000'000}}, backward};
  options.trainer_per_second = 1e9;
  options.server_per_second = 1e9;
  options.trainer_bytes_per_second = 1e9;
  options.server_bytes_per_second = 1e9;
  options.steps = groups * trainers * nets * 50;
  return options;
}

TEST(GroupClusterTest, AStepAloneTakesItsStagesOneAfterTheOther) {
  GroupClusterOptions options = Hierarchical(1, 1, 1, 1);
  options.latency = 0.0005;
  const auto cluster = HasRun(options);
  const double step = 0.001 + 0.003 + 0.002 + 4 * (2 * 0.0001 + 0.0005);
  EXPECT_NEAR(cluster->seconds(), 50 * step, 1e-6);
  EXPECT_NEAR(cluster->busy().servers[0], 50 * 0.003, 1e-6);
  EXPECT_NEAR(cluster->busy().trainers[0], 50 * 0.003, 1e-6);
  EXPECT_EQ(cluster->traffic()[0].sent, 50 * 200'000);
}

TEST(GroupClusterTest, TheBusiestDeviceOrLinkOfAGroupIsItsSpeed) {
  // With enough nets. Alone, a trainer's step takes it 3 ms, and a server 3 ms
  // of each of all trainers.
  const auto speed = [](GroupClusterOptions options) {
    return StepsPerSecond(*HasRun(std::move(options)));
  };
  EXPECT_NEAR(speed(Hierarchical(1, 1, 8, 1)), 1 / 0.003, 10);
  EXPECT_NEAR(speed(Hierarchical(1, 4, 8, 1)), 1 / 0.003, 10);
  EXPECT_NEAR(speed(Hierarchical(3, 4, 8, 1)), 3 / 0.003, 30);
  GroupClusterOptions fast = Hierarchical(1, 4, 8, 1);
  fast.server_per_second = 1e10;
  EXPECT_NEAR(speed(fast), 4 / 0.003, 40);
  // 200 kB go each way for a step.
  GroupClusterOptions thin = Hierarchical(1, 4, 8, 1);
  thin.server_per_second = 1e10;
  thin.server_bytes_per_second = 1e8;
  EXPECT_NEAR(speed(thin), 1e8 / 200'000, 10);
  thin.duplex = false;
  EXPECT_NEAR(speed(thin), 1e8 / 400'000, 5);
}

TEST(GroupClusterTest, StalenessInAGroupIsFromOneToItsNets) {
  for (const auto& [trainers, nets] :
       {std::pair<int64_t, int64_t>(1, 1), {1, 4}, {3, 2}, {4, 8}}) {
    const auto cluster = HasRun(Hierarchical(2, trainers, nets, 3));
    for (const std::vector<int64_t>& counted : cluster->staleness()) {
      std::vector<int64_t> counters = counted;
      const StalenessCounters staleness(counters.data());
      EXPECT_EQ(staleness.count(), Sum(cluster->steps()) / 2);
      EXPECT_LE(staleness.max(), trainers * nets);
      EXPECT_GE(staleness.Mean(), 1.0);
      // Where servers are the limit, all nets but a few are on their way.
      EXPECT_GE(staleness.max(), (trainers * nets + 1) / 2);
    }
  }
}

TEST(GroupClusterTest, ShardsOfAGroupAreSynchronizedByThemselves) {
  GroupClusterOptions options = Hierarchical(2, 2, 2, 2);
  options.sync_ps = 1;
  options.sync_ps_bytes_per_second = 1e9;
  options.sync.algorithm = Algorithm::kEasgd;
  options.sync.bytes = 2'000'000;
  options.sync.interval = 0.050;
  const auto cluster = HasRun(options);
  const int64_t times =
      static_cast<int64_t>(std::ceil(cluster->seconds() / 0.050));
  for (const int64_t syncs : cluster->synchronizer().syncs()) {
    EXPECT_NEAR(syncs, 2 * times, 2);
  }
  EXPECT_NEAR(cluster->synchronizer().sync_ps_bytes(),
              2e6 * Sum(cluster->synchronizer().syncs()), 8e6);
}

TEST(GroupClusterTest, EveryAlgorithmLearns) {
  const LogisticProblem problem({/*examples=*/256, /*features=*/4,
                                 /*batch_size=*/16, /*weight_decay=*/0.01,
                                 /*seed=*/3});
  const auto run = [&](GroupClusterOptions options) {
    options.learning.emplace();
    options.learning->problem = &problem;
    options.learning->learning_rate = 0.1f;
    options.learning->loss_seconds = 0.5;
    return HasRun(std::move(options));
  };
  // One thread alone, for longer.
  const double alone =
      run(Trainers(1, 1, 1000, Algorithm::kNone))->losses().back().loss;
  EXPECT_LT(alone, 0.6);
  for (const Algorithm algorithm :
       {Algorithm::kEasgd, Algorithm::kModelAveraging, Algorithm::kBmuf}) {
    for (const Schedule schedule :
         {Schedule::kBackground, Schedule::kGap, Schedule::kInterval}) {
      GroupClusterOptions options = Trainers(3, 2, 6 * 200, algorithm);
      options.sync.schedule = schedule;
      options.sync.gap = 4;
      options.sync.interval = schedule == Schedule::kInterval ? 0.05 : 0.0;
      const auto cluster = run(options);
      EXPECT_NEAR(cluster->losses().front().loss, std::log(2.0), 1e-6);
      EXPECT_NEAR(cluster->losses().back().loss, alone, 0.02);
      // What copies have learned, all have.
      for (const std::vector<float>& copy : cluster->copies()) {
        EXPECT_NEAR(problem.Loss(copy.data()), alone, 0.03);
      }
      EXPECT_EQ(run(options)->copies(), cluster->copies());
    }
  }
  GroupClusterOptions options = Hierarchical(3, 2, 2, 2);
  options.steps = 3 * 4 * 200;
  options.sync.algorithm = Algorithm::kBmuf;
  options.sync.momentum = 0.5f;
  options.sync.nesterov = true;
  options.sync.eta = 0.5f;
  options.sync.bytes = 100'000;
  options.sync.interval = 0.02;
  EXPECT_NEAR(run(options)->losses().back().loss, alone, 0.02);
}

TEST(GroupClusterTest, EverythingStopsAtItsTime) {
  GroupClusterOptions options = Trainers(2, 2, 1'000'000, Algorithm::kEasgd);
  options.seconds = 0.255;
  const auto cluster = HasRun(options);
  EXPECT_EQ(cluster->seconds(), 0.255);
  EXPECT_EQ(cluster->steps(), (std::vector<int64_t>(2, 50)));
}

TEST(GroupClusterTest, OptionsThatDoNotGoTogetherAreRefused) {
  const auto error = [](auto change) {
    GroupClusterOptions options = Hierarchical(1, 2, 1, 1);
    change(&options);
    return GroupCluster(options).Run([] { return true; }).error();
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(error([](auto* o) { o->groups = 0; }), "groups"));
  EXPECT_TRUE(has(error([](auto* o) { o->groups = 20'000; }), "20000"));
  EXPECT_TRUE(has(error([](auto* o) { o->trainers = o->threads = 10'000; }),
                  "threads"));
  EXPECT_TRUE(
      has(error([](auto* o) { o->sync.bytes = int64_t{1} << 41; }), "bytes"));
  EXPECT_TRUE(has(error([](auto* o) { o->servers = 0; }), "one trainer"));
  EXPECT_TRUE(has(error([](auto* o) { o->sync_ps = 1; }), "sync_ps"));
  EXPECT_TRUE(has(error([](auto* o) { o->sync.algorithm = Algorithm::kEasgd; }),
                  "sync_ps"));
  EXPECT_TRUE(
      has(error([](auto* o) { o->stages[0][0].device = 1; }), "device"));
  EXPECT_TRUE(has(error([](auto* o) { o->stages[1][0].reads = true; }),
                  "only servers"));
  EXPECT_TRUE(has(error([](auto* o) { o->stages[0][0].amount = -1; }), "-1"));
  EXPECT_TRUE(has(error([](auto* o) { o->server_per_second = 0; }),
                  "server_per_second"));
  EXPECT_TRUE(
      has(error([](auto* o) { o->latency = std::nan(""); }), "latency"));
  EXPECT_TRUE(
      has(error([](auto* o) { o->sync.schedule = Schedule::kInterval; }),
          "interval"));
  // One group alone: nothing has to travel.
  EXPECT_TRUE(has(
      error([](auto* o) { o->sync.algorithm = Algorithm::kModelAveraging; }),
      "must take time"));
}

}  // namespace
}  // namespace recsync
