// The token list under many threads.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cc/engine/gradient_buffer.h"
#include "cc/engine/mutex.h"
#include "cc/engine/token_list.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Answer = TokenList::Answer;
using Gate = TokenList::Gate;
using Token = TokenList::Token;

constexpr int kThreads = 16;

void InThreads(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int w = 0; w < kThreads; ++w) threads.emplace_back(body, w);
  for (std::thread& thread : threads) thread.join();
}

// Takes a token and waits for it; -1 where there is none.
class Waiter {
 public:
  Token Take(TokenList* list, int worker) {
    MutexLock lock(&mu_);
    answered_ = false;
    mu_.Unlock();
    list->Take(worker, [this](Answer answer, Token token) {
      MutexLock lock(&mu_);
      answered_ = true;
      token_ = token;
      EXPECT_EQ(answer == Answer::kToken, token.index >= 0);
      changed_.Signal();
    });
    mu_.Lock();
    while (!answered_) changed_.Wait(&mu_);
    return token_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
  Token token_ ABSL_GUARDED_BY(mu_);
};

TEST(TokenListThreadsTest, ManyThreadsGetEveryTokenOnce) {
  constexpr int kTakes = 3000;
  TokenList list({kThreads, Gate::kNone, 0, 1, kThreads});
  std::vector<std::vector<int64_t>> taken(kThreads);
  InThreads([&](int w) {
    Waiter waiter;
    for (int i = 0; i < kTakes; ++i) {
      taken[w].push_back(waiter.Take(&list, w).index);
    }
  });
  std::vector<int64_t> all;
  for (const auto& of_worker : taken) {
    EXPECT_TRUE(std::is_sorted(of_worker.begin(), of_worker.end()));
    all.insert(all.end(), of_worker.begin(), of_worker.end());
  }
  std::sort(all.begin(), all.end());
  ASSERT_EQ(all.size(), kThreads * kTakes);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i);
}

// Servers with gradient buffers that report to the list, and whoever hands on
// what lost workers had.
class Servers {
 public:
  Servers(TokenList* list, int servers, int64_t needed) : list_(list) {
    GradientBufferOptions options;
    options.capacity = needed;
    options.drop_late = true;
    for (int s = 0; s < servers; ++s) {
      buffers_.push_back(std::make_unique<GradientBuffer>(options));
    }
  }

  void Push(int server, Token token) {
    GradientPush push;
    push.token_index = token.index;
    push.token_value = token.value;
    push.ticket = token.ticket;
    std::unique_ptr<Aggregate> aggregate;
    EXPECT_EQ(buffers_[server]->Push(push, &aggregate).error(), "");
    Apply(server, aggregate.get());
  }

  void HandOn(const TokenList::Loss& loss) {
    MutexLock lock(&mu_);  // One after the other, as in training.
    std::set<int64_t> taken;
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
    for (const auto& buffer : buffers_) {
      const Revoked revoked = buffer->Revoke(loss.tickets);
      taken.insert(revoked.taken.begin(), revoked.taken.end());
      first = std::min(first, revoked.step);
      last = std::max(last, revoked.step);
    }
    std::vector<int64_t> again;
    for (const int64_t index : loss.withheld) {
      if (index / kThreads >= last && taken.count(index) == 0) {
        again.push_back(index);
      }
    }
    for (size_t s = 0; s < buffers_.size(); ++s) {
      std::vector<int64_t> spent;
      for (const int64_t index : taken) {
        if (index / kThreads == first) spent.push_back(index);
      }
      std::unique_ptr<Aggregate> aggregate;
      const int64_t ticket = loss.tickets.empty() ? 0 : loss.tickets[0];
      EXPECT_EQ(buffers_[s]->Spend(first, spent, ticket, &aggregate).error(),
                "");
      Apply(static_cast<int>(s), aggregate.get());
    }
    list_->Reissue(again);
  }

  // Pushes that were left out.
  int64_t left_out() const {
    int64_t count = 0;
    for (const auto& buffer : buffers_) {
      count += buffer->state().late + buffer->state().duplicates;
    }
    return count;
  }
  int64_t spent() const {
    int64_t count = 0;
    for (const auto& buffer : buffers_) count += buffer->state().spent;
    return count;
  }

 private:
  void Apply(int server, const Aggregate* aggregate) {
    if (aggregate == nullptr) return;
    EXPECT_EQ(buffers_[server]->Applied(aggregate->step()).error(), "");
    list_->ReportStep(server, aggregate->step());
  }

  TokenList* const list_;
  std::vector<std::unique_ptr<GradientBuffer>> buffers_;
  Mutex mu_;
};

void TrainInStep(int64_t backups) {
  constexpr int64_t kSteps = 150;
  constexpr int kServers = 3;
  TokenList list({kThreads, Gate::kStep, 0, kServers, kThreads});
  Servers servers(&list, kServers, kThreads - backups);
  std::atomic<int64_t> deaths{0};
  InThreads([&](int w) {
    std::mt19937 random(w);
    Waiter waiter;
    int64_t last_value = 0;
    while (true) {
      const Token token = waiter.Take(&list, w);
      if (token.index < 0 || token.value >= kSteps) break;
      EXPECT_GE(token.value, last_value);
      last_value = token.value;
      // It dies before it has pushed to all servers, and comes back.
      const bool dies = random() % 10 == 0;
      const int reached =
          dies ? static_cast<int>(random() % kServers) : kServers;
      for (int s = 0; s < reached; ++s) servers.Push(s, token);
      if (reached < kServers) {
        ++deaths;
        servers.HandOn(list.Lose(w));
      }
    }
    list.Close();  // One has seen the last step: all are done.
  });
  EXPECT_GE(list.GetState().smallest_step, kSteps);
  EXPECT_GT(deaths, 0);
  EXPECT_GT(servers.spent(), 0);
  // Who dies pushes before that, and all others are waited for.
  if (backups == 0) {
    EXPECT_EQ(servers.left_out(), 0);
  }
}

TEST(TokenListThreadsTest, WorkersThatDieInMidStepLeaveNobodyWaiting) {
  TrainInStep(0);
}

TEST(TokenListThreadsTest, NobodyWaitsForBackupWorkersThatDie) {
  TrainInStep(3);
}

TEST(TokenListThreadsTest, NoThreadGetsFartherAheadThanTheClockBound) {
  constexpr int kTakes = 400;
  for (const int64_t bound : {0, 1, 5}) {
    TokenList list({1, Gate::kClock, bound, 1, kThreads});
    std::atomic<int64_t> started[kThreads] = {};
    std::atomic<int64_t> total{0};
    InThreads([&](int w) {
      Waiter waiter;
      for (int64_t clock = 0; clock < kTakes; ++clock) {
        // Counted before it is taken: never below the list's own clock.
        ++started[w];
        ASSERT_GE(waiter.Take(&list, w).index, 0);
        ++total;
        for (const auto& other : started) ASSERT_LE(clock - bound, other);
      }
    });
    EXPECT_EQ(total, kThreads * kTakes);
    EXPECT_EQ(list.GetState().position, kThreads * kTakes);
  }
}

TEST(TokenListThreadsTest, ATakeThatIsCancelledFromAnotherThreadEndsOnce) {
  constexpr int kRounds = 2000;
  TokenList list({1, Gate::kStep, 0, 1, 2});
  Waiter waiter;
  ASSERT_EQ(waiter.Take(&list, 1).index, 0);
  int64_t expected = 1;
  int cancelled = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> calls{0};
    std::atomic<int64_t> index{-1};
    const TokenList::Ticket ticket =
        list.Take(0, [&](Answer answer, Token token) {
          EXPECT_EQ(answer, Answer::kToken);
          index = token.index;
          ++calls;
        });
    std::thread reporter([&] { list.ReportStep(0, expected); });
    const bool won = list.Cancel(ticket);
    reporter.join();
    ASSERT_EQ(calls, won ? 0 : 1);
    cancelled += won ? 1 : 0;
    if (won) {
      ASSERT_EQ(waiter.Take(&list, 1).index, expected);  // Still there.
    } else {
      ASSERT_EQ(index, expected);
    }
    ++expected;
  }
  EXPECT_GT(cancelled, 0);
}

}  // namespace
}  // namespace recsync
