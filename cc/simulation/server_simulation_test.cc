#include "cc/simulation/server_simulation.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

using Gate = TokenList::Gate;
using Options = ServerSimulationOptions;
using State = ServerSimulationState;

Options OfWorkers(int workers, int64_t steps, double compute_seconds = 1.0) {
  Options options;
  options.workers = workers;
  options.steps = steps;
  options.compute_seconds.assign(workers, compute_seconds);
  return options;
}

// Workers take part in global batches of `capacity` of `repeats` pushes.
Options InBuffers(Options options, int64_t repeats, int64_t capacity,
                  bool waits) {
  options.uses_tokens = options.uses_buffers = true;
  options.repeats = repeats;
  options.capacity = capacity;
  options.gate = waits ? Gate::kStep : Gate::kNone;
  options.drop_late = waits;
  return options;
}

class Simulated {
 public:
  explicit Simulated(const Options& options) : simulation_(options) {
    const Result checked = CheckOptions(options);
    EXPECT_TRUE(checked.ok()) << checked.error();
    const Result done = simulation_.Run([] { return true; });
    EXPECT_TRUE(done.ok()) << done.error();
  }
  const State& before() const { return simulation_.before(); }
  const State& after() const { return simulation_.after(); }
  double seconds() const { return after().seconds; }
  // The mean staleness that a server has counted since `before`.
  double MeanStaleness(int server = 0) const {
    const auto since = [&](int i) {
      return static_cast<double>(after().staleness[server][i] -
                                 before().staleness[server][i]);
    };
    return since(StalenessCounters::kSum) / since(StalenessCounters::kCount);
  }

 private:
  ServerSimulation simulation_;
};

TEST(ServerSimulationTest, AStepOfASingleWorkerTakesTheSumOfItsParts) {
  Options options = OfWorkers(1, 10, 3.0);
  options.latency = 0.25;
  options.worker_bandwidth = 8.0;
  options.server_bandwidth = 4.0;
  options.pull_bytes = 16;
  options.push_bytes = 8;
  options.seconds_per_pull = 0.5;
  options.seconds_per_application = 0.75;
  options.seconds_per_byte = 0.125;
  const double pull = 0.5 + 16 * 0.125 + 16 / 4.0 + 0.25 + 16 / 8.0;
  const double push = 8 / 8.0 + 0.25 + 8 / 4.0 + 0.75 + 8 * 0.125;
  const Simulated simulated(options);
  // The first request is the only one that is waited for.
  EXPECT_NEAR(simulated.seconds(), 0.25 + 10 * (pull + 3.0 + push), 1e-6);
  const State::Times& times = simulated.after().workers[0];
  EXPECT_EQ(times.steps, 10);
  EXPECT_NEAR(times.compute, 10 * 3.0, 1e-6);
  EXPECT_NEAR(times.pull, 0.25 + 10 * pull, 1e-6);
  EXPECT_NEAR(times.push, 10 * push, 1e-6);
  EXPECT_EQ(times.data, 0.0);
  EXPECT_EQ(simulated.MeanStaleness(), 1.0);
  EXPECT_NEAR(simulated.after().processor[0], 10 * (0.5 + 0.75 + 24 * 0.125),
              1e-6);
  EXPECT_NEAR(simulated.after().server_out[0], 10 * 16 / 4.0, 1e-6);
  EXPECT_NEAR(simulated.after().worker_out[0], 10 * 8 / 8.0, 1e-6);
}

TEST(ServerSimulationTest, WithTokensAStepTakesThreeMoreMessages) {
  Options options = InBuffers(OfWorkers(1, 10, 3.0), 1, 1, true);
  options.servers = 2;
  options.latency = 0.25;
  // To the token list, from there to the other server, the answer, the push;
  // the report of the step, and the list's answer.
  EXPECT_NEAR(Simulated(options).seconds(), 10 * (3.0 + 6 * 0.25), 1e-6);
  options.gate = Gate::kNone;  // Without a report, the servers' own answers.
  options.drop_late = false;
  EXPECT_NEAR(Simulated(options).seconds(), 10 * (3.0 + 5 * 0.25), 1e-6);
}

TEST(ServerSimulationTest, WorkersOfAMachineShareItsLink) {
  Options options = OfWorkers(2, 100, 0.0);
  options.push_bytes = 10;
  options.worker_bandwidth = 20.0;
  EXPECT_NEAR(Simulated(options).seconds(), 50 * 0.5, 1e-6);
  options.workers_per_machine = 2;
  const Simulated shared(options);
  EXPECT_NEAR(shared.seconds(), 100 * 0.5, 1e-6);
  EXPECT_NEAR(shared.after().worker_out[0], 100 * 0.5, 1e-6);
}

TEST(ServerSimulationTest, AServerDoesAsMuchSideBySideAsItHasThreads) {
  Options options = OfWorkers(8, 80, 0.001);
  options.seconds_per_application = 1.0;
  EXPECT_NEAR(Simulated(options).seconds(), 80.0, 0.05);
  options.threads = 4;
  EXPECT_NEAR(Simulated(options).seconds(), 20.0, 0.05);
}

TEST(ServerSimulationTest, SynchronousWorkersAreAsFastAsTheSlowest) {
  Options options = InBuffers(OfWorkers(4, 40, 1.0), 4, 4, true);
  options.compute_seconds = {1.0, 2.0, 5.0, 3.0};
  const Simulated simulated(options);
  EXPECT_NEAR(simulated.seconds(), 10 * 5.0, 1e-6);
  EXPECT_NEAR(simulated.after().workers[1].token, 9 * 3.0, 1e-6);
  const GradientBufferState& buffer = simulated.after().buffers[0];
  EXPECT_EQ(buffer.applications, 10);
  EXPECT_EQ(buffer.included, 40);
  EXPECT_EQ(buffer.staleness[StalenessCounters::kMax], 1);
}

TEST(ServerSimulationTest, OneBackupWorkerHidesTheSlowest) {
  Options options = InBuffers(OfWorkers(4, 400, 1.0), 4, 3, true);
  options.compute_seconds = {1.0, 1.0, 1.0, 5.0};
  const Simulated simulated(options);
  // Whoever is first in a step takes the slowest one's token, too, and is late
  // with that: a step takes up to two seconds.
  const GradientBufferState& buffer = simulated.after().buffers[0];
  EXPECT_LE(simulated.seconds() / static_cast<double>(buffer.applications),
            2.0);
  EXPECT_GE(buffer.late, simulated.after().workers[3].steps);
  EXPECT_EQ(buffer.included + buffer.late, 400);
}

TEST(ServerSimulationTest, TheStalenessOfEqualWorkersIsTheirNumber) {
  for (const int workers : {1, 2, 7, 50}) {
    Options options = OfWorkers(workers, 40 * workers);
    options.servers = 3;
    options.warmup_steps = workers;
    const Simulated equal(options);
    for (int s = 0; s < 3; ++s) {
      EXPECT_EQ(equal.MeanStaleness(s), workers);
      EXPECT_EQ(equal.after().staleness[s][StalenessCounters::kMax], workers);
    }
    // By chance, it is so on average.
    options.noise = 0.5;
    options.warmup_steps = 10 * workers;
    EXPECT_NEAR(Simulated(options).MeanStaleness(), workers, 0.03 * workers);
  }
}

TEST(ServerSimulationTest, StalenessIsLessByTheShareThatAWorkerSpendsReading) {
  Options options = OfWorkers(100, 10000, 3.0);
  options.reader_ahead = 0;
  options.reader_seconds = 1.0;
  options.noise = 0.1;
  options.warmup_steps = 2000;
  const Simulated simulated(options);
  EXPECT_NEAR(simulated.MeanStaleness(), 1 + 99 * 0.75, 1.0);
  EXPECT_NEAR(simulated.seconds(), 100 * 4.0, 12.0);
  const State::Times& times = simulated.after().workers[0];
  EXPECT_NEAR(times.data, static_cast<double>(times.steps), 1e-6);
}

TEST(ServerSimulationTest, AReaderThatKeepsBatchesAheadHidesItsTime) {
  Options options = OfWorkers(1, 100, 2.0);
  options.reader_seconds = 1.5;
  EXPECT_NEAR(Simulated(options).seconds(), 1.5 + 100 * 2.0, 1e-6);
  options.reader_seconds = 2.5;  // The first batch, and one after the other.
  EXPECT_NEAR(Simulated(options).seconds(), 100 * 2.5 + 2.0, 1e-6);
  options.reader_ahead = 0;
  EXPECT_NEAR(Simulated(options).seconds(), 100 * 4.5, 1e-6);
}

TEST(ServerSimulationTest, WithBoundedStalenessNobodyIsFurtherAhead) {
  Options options = OfWorkers(6, 600, 1.0);
  options.uses_tokens = true;
  options.gate = Gate::kClock;
  options.clock_bound = 3;
  options.noise = 1.0;
  std::vector<int64_t> begun(6, 0);
  int64_t furthest = 0, all = 0;
  options.factor = [&](int worker, int64_t step, double) {
    begun[worker] = step;
    if (++all < 500) {  // Nobody has left.
      furthest = std::max(furthest,
                          step - *std::min_element(begun.begin(), begun.end()));
    }
    return 1.0;
  };
  const Simulated simulated(options);
  // The slowest is in its step: who is 3 batches ahead of it may begin one.
  EXPECT_GE(furthest, 3);
  EXPECT_LE(furthest, 4);
  EXPECT_GT(simulated.after().workers[0].token, 0.0);
}

TEST(ServerSimulationTest, TheSameSeedGivesTheSameAndAnotherAnother) {
  Options options = OfWorkers(10, 500, 1.0);
  options.servers = 3;
  options.noise = 0.3;
  options.push_bytes = 1000;
  options.server_bandwidth = 2000.0;
  options.seed = 5;
  const Simulated one(options), same(options);
  EXPECT_EQ(one.seconds(), same.seconds());
  EXPECT_EQ(one.after().staleness, same.after().staleness);
  options.seed = 6;
  EXPECT_NE(Simulated(options).seconds(), one.seconds());
}

TEST(ServerSimulationTest, EveryPushIsCountedOnceOnEachServer) {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int run = 0; run < 150; ++run) {
    SCOPED_TRACE(run);
    const int workers = 1 + below(9);
    Options options = OfWorkers(workers, 1 + below(200), 0.1 * below(3));
    options.servers = 1 + below(4);
    options.seed = run;
    options.noise = 0.5 * below(3);
    options.latency = 0.05 * below(3);
    options.reader_seconds = 0.05 * below(3);
    options.reader_ahead = below(3);
    options.threads = 1 + below(2);
    options.seconds_per_application = 0.01 * below(3);
    options.seconds_per_pull = 0.01 * below(2);
    options.workers_per_machine = 1 + below(3);
    options.pull_bytes = below(100);
    options.push_bytes = below(100);
    if (below(2)) options.server_bandwidth = 1000.0;
    if (below(2)) options.worker_bandwidth = 500.0;
    options.warmup_steps = below(static_cast<int>(options.steps));
    const int mode = below(6);
    if (mode == 1) {
      options.uses_tokens = true;
      options.gate = Gate::kClock;
      options.clock_bound = below(4);
    } else if (mode == 2) {  // BSP and GBA
      const int64_t batches = 1 + below(12);
      options = InBuffers(options, batches, batches, false);
      options.weight.decay = StalenessDecay::kThreshold;
      options.weight.iota = below(3);
      options.flush = below(2) > 0;
    } else if (mode == 3) {  // synchronous
      const int64_t batches = 1 + below(12);
      options = InBuffers(options, batches, batches, true);
    } else if (mode == 4) {  // backup workers
      options = InBuffers(options, workers, workers - below(workers), true);
    }
    const Simulated simulated(options);
    const State& after = simulated.after();
    EXPECT_EQ(after.steps, options.steps);
    EXPECT_EQ(simulated.before().steps, options.warmup_steps);
    int64_t of_workers = 0;
    for (const State::Times& times : after.workers) {
      of_workers += times.steps;
      const double all =
          times.data + times.token + times.pull + times.compute + times.push;
      EXPECT_LE(all, after.seconds + 1e-6);
    }
    EXPECT_EQ(of_workers, options.steps);
    EXPECT_EQ(after.tokens.taken, options.uses_tokens ? options.steps : 0);
    for (int s = 0; s < options.servers; ++s) {
      if (!options.uses_buffers) {
        EXPECT_EQ(after.staleness[s][StalenessCounters::kCount], options.steps);
        continue;
      }
      const GradientBufferState& buffer = after.buffers[s];
      EXPECT_EQ(buffer.included + buffer.excluded + buffer.late, options.steps);
      EXPECT_EQ(buffer.duplicates, 0);
      EXPECT_EQ(buffer.applied, buffer.step);
      EXPECT_EQ(buffer.pending > 0,
                !options.flush &&
                    (buffer.included + buffer.excluded) % options.capacity);
    }
  }
}

TEST(ServerSimulationTest, TheBeginningAndTheEndCanBeLeftOut) {
  Options options = OfWorkers(2, 100, 1.0);
  options.compute_seconds = {1.0, 3.0};
  options.warmup_steps = 20;
  options.cooldown_steps = 30;
  ServerSimulation simulation(options);
  ASSERT_TRUE(simulation.Run([] { return true; }).ok());
  EXPECT_EQ(simulation.before().steps, 20);
  EXPECT_EQ(simulation.after().steps, 70);
  // Four steps in three seconds.
  EXPECT_NEAR(simulation.before().seconds, 15.0, 1.0);
  EXPECT_NEAR(simulation.after().seconds, 52.0, 1.0);
  EXPECT_GT(simulation.seconds(), 74.0);
}

TEST(ServerSimulationTest, ItEndsWhenItIsToldToAndWhenAFactorIsNoNumber) {
  Options options = OfWorkers(4, 100000);
  ServerSimulation ended(options);
  EXPECT_FALSE(ended.Run([] { return false; }).ok());
  options.factor = [](int, int64_t step, double) {
    return step == 3 ? -1.0 : 1.0;
  };
  ServerSimulation wrong(options);
  const Result done = wrong.Run([] { return true; });
  EXPECT_NE(done.error().find("not -1 of worker 0 in step 3"),
            std::string::npos)
      << done.error();
}

TEST(ServerSimulationTest, WrongOptionsAreNamed) {
  const auto error_of = [](auto change) {
    Options options = OfWorkers(2, 10);
    change(&options);
    return CheckOptions(options).error();
  };
  EXPECT_EQ(error_of([](Options*) {}), "");
  EXPECT_EQ(error_of([](Options* o) { o->workers = 0; }),
            "workers must be from 1 to 1048576, not 0");
  EXPECT_EQ(error_of([](Options* o) { o->warmup_steps = 10; }),
            "warmup_steps must be from 0 to 9, not 10");
  EXPECT_EQ(error_of([](Options* o) { o->compute_seconds = {1.0}; }),
            "compute_seconds must be of 2 workers, not 1");
  EXPECT_EQ(error_of([](Options* o) { o->compute_seconds[1] = -1.0; }),
            "compute_seconds must be from 0 to 1e+06, not -1");
  EXPECT_EQ(error_of([](Options* o) { o->server_bandwidth = 0.0; }),
            "server_bandwidth must be positive, not 0");
  EXPECT_EQ(error_of([](Options* o) { o->uses_buffers = true; }),
            "uses_buffers needs uses_tokens");
}

}  // namespace
}  // namespace recsync
