// Workers and edges in threads of their own: everybody comes to the end, and
// averages what it should.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "cc/engine/hop_worker.h"

namespace recsync {
namespace {

using Worker = HopWorker<std::shared_ptr<int64_t>>;

// Calls something that ends by a callback, and waits for it.
template <typename Call>
Worker::Answer Wait(Call call) {
  std::promise<Worker::Answer> done;
  call([&done](Worker::Answer answer) { done.set_value(answer); });
  return done.get_future().get();
}

void RunEdge(Worker* from, Worker* to, int64_t sender, int64_t receiver) {
  for (int calls = 0;;) {
    Worker::Parcel parcel;
    const Worker::Answer answer = Wait([&](auto done) {
      from->Collect(receiver, [&parcel, done](Worker::Answer given,
                                              Worker::Parcel collected) {
        parcel = std::move(collected);
        done(given);
      });
    });
    if (answer != Worker::Answer::kOk) return;
    EXPECT_TRUE(to->Announce(sender, parcel.progress));
    // Every few calls fail, before they come to the neighbor or after that.
    ++calls;
    if (calls % 7 == 3) continue;
    if (parcel.iteration >= 0 &&
        to->Wanted(sender, parcel.number, parcel.iteration)) {
      EXPECT_NE(to->Deliver(sender, parcel.number, parcel.iteration,
                            std::move(*parcel.update)),
                Worker::Delivered::kBroken);
    }
    if (calls % 7 == 5) continue;
    from->Carried(receiver, parcel.number, parcel.iteration, 0);
  }
}

void Train(Worker* worker, int64_t iterations, std::atomic<int64_t>* used) {
  for (int64_t k = worker->PlanNext(); k < iterations; k = worker->PlanNext()) {
    const auto receive = [&](int64_t iteration) {
      ASSERT_EQ(Wait([&](auto done) {
                  worker->Receive(iteration, [&, done](Worker::Answer answer,
                                                       auto received) {
                    for (const auto& item : received) {
                      EXPECT_EQ(*item.update, item.iteration);
                      ++*used;
                    }
                    done(answer);
                  });
                }),
                Worker::Answer::kOk);
    };
    if (worker->IsJump(k)) receive(k - 1);
    ASSERT_EQ(Wait([&](auto done) { worker->AcquireTokens(k, done); }),
              Worker::Answer::kOk);
    ASSERT_EQ(Wait([&](auto done) {
                worker->Enter(k, std::make_shared<int64_t>(k), done);
              }),
              Worker::Answer::kOk);
    receive(k);
    worker->Reduced();
    worker->GetState();
  }
}

// The last worker may leave before the others come to their ends.
int64_t TrainAll(HopOptions options, int64_t iterations,
                 std::optional<int64_t> last_leaves_after = std::nullopt) {
  constexpr int64_t kWorkers = 4;  // everybody to everybody
  std::vector<std::unique_ptr<Worker>> workers;
  for (int64_t i = 0; i < kWorkers; ++i) {
    options.in_neighbors.clear();
    for (int64_t j = 0; j < kWorkers; ++j) {
      if (j != i) options.in_neighbors.push_back(j);
    }
    options.out_neighbors = options.in_neighbors;
    options.weights.assign(kWorkers - 1, 1.0 / kWorkers);
    options.slots = options.max_iteration_gap + 1;
    options.capacity = options.slots * kWorkers;
    workers.push_back(std::make_unique<Worker>(options));
  }
  std::atomic<int64_t> used{0};
  std::vector<std::thread> edges;
  for (int64_t i = 0; i < kWorkers; ++i) {
    for (int64_t j = 0; j < kWorkers; ++j) {
      if (i == j) continue;
      edges.emplace_back(RunEdge, workers[i].get(), workers[j].get(), i, j);
    }
  }
  std::vector<std::thread> trainers;
  for (const auto& worker : workers) {
    const bool leaves = worker == workers.back() && last_leaves_after;
    const int64_t own = leaves ? *last_leaves_after : iterations;
    trainers.emplace_back([&, own, leaves] {
      Train(worker.get(), own, &used);
      for (const auto& other : workers) {
        if (leaves && other != worker) {
          other->SetNeighbor(kWorkers - 1, 0, /*until=*/own - 1);
        }
      }
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  for (const auto& worker : workers) worker->CloseOutboxes();
  for (std::thread& edge : edges) edge.join();
  return used;
}

TEST(HopThreadsTest, StandardTrainingUsesEveryUpdate) {
  HopOptions options;
  options.max_iteration_gap = 3;
  options.gap_bounds = {1, 1, 1};
  EXPECT_EQ(TrainAll(options, 500), 500 * 4 * 3);
}

TEST(HopThreadsTest, BackupWorkersStalenessAndSkippingComeToTheEnd) {
  HopOptions options;
  options.max_iteration_gap = 4;
  options.backup_workers = 1;
  options.gap_bounds = {4, 4, 4};
  EXPECT_GT(TrainAll(options, 500), 0);
  options.staleness_bound = 2;
  EXPECT_GT(TrainAll(options, 500), 0);
  options.max_jump = 4;
  EXPECT_GT(TrainAll(options, 500), 0);
}

TEST(HopThreadsTest, EverythingOfOneThatLeavesIsUsed) {
  HopOptions options;
  options.max_iteration_gap = 3;
  EXPECT_EQ(TrainAll(options, 500, /*last_leaves_after=*/250),
            3 * (500 * 2 + 250) + 250 * 3);
}

TEST(HopThreadsTest, AnInterruptEndsTheWaitAndNothingElse) {
  HopOptions options;
  options.in_neighbors = {1};
  options.weights = {0.5};
  options.out_neighbors = {1};
  options.max_iteration_gap = 1;
  options.slots = 2;
  options.capacity = 4;
  for (int round = 0; round < 200; ++round) {
    Worker worker(options);
    const int64_t call = worker.BeginCall();
    std::thread interrupter([&worker, call] { worker.Interrupt(call); });
    std::promise<Worker::Answer> done;
    worker.Receive(
        0, [&done](Worker::Answer answer, auto) { done.set_value(answer); });
    interrupter.join();
    EXPECT_EQ(done.get_future().get(), Worker::Answer::kCancelled);
    // It goes on as if nothing had been, also where that comes late.
    worker.BeginCall();
    worker.Interrupt(call);
    worker.Deliver(1, /*number=*/1, 0, std::make_shared<int64_t>(0));
    EXPECT_EQ(Wait([&](auto then) {
                worker.Receive(0, [then](Worker::Answer answer, auto received) {
                  EXPECT_EQ(received.size(), 1);
                  then(answer);
                });
              }),
              Worker::Answer::kOk);
  }
}

}  // namespace
}  // namespace recsync
