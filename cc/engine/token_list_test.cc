#include "cc/engine/token_list.h"

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "cc/engine/token_list_testing.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Answer = TokenList::Answer;
using Gate = TokenList::Gate;
using Indices = std::vector<int64_t>;
using Token = TokenList::Token;

// The index that a Take gets at once, or one of the above.
int64_t Index(TokenList* list, int worker) {
  return Take(list, worker)->outcome;
}

TEST(TokenListTest, WithoutAGateTokensComeAtOnceInAscendingOrder) {
  TokenList list({3, Gate::kNone, 0, 2, 2});
  for (int64_t i = 0; i < 20; ++i) {
    const auto taking = Take(&list, i % 2);
    EXPECT_EQ(taking->outcome, i);
    EXPECT_EQ(taking->value, i / 3);
    EXPECT_FALSE(list.Cancel(taking->ticket));
  }
}

TEST(TokenListTest, TheStepGateOpensWhenAllServersHaveReachedTheStep) {
  TokenList list({2, Gate::kStep, 0, 2, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  const auto first = Take(&list, 2);
  const auto second = Take(&list, 0);
  const auto third = Take(&list, 1);
  list.ReportStep(0, 1);
  EXPECT_EQ(first->outcome, kWaits);
  list.ReportStep(1, 1);
  EXPECT_EQ(first->outcome, 2);
  EXPECT_EQ(second->outcome, 3);
  EXPECT_EQ(third->outcome, kWaits);
  list.ReportStep(0, 2);
  list.ReportStep(0, 1);  // late, ignored
  list.ReportStep(1, 2);
  EXPECT_EQ(third->outcome, 4);
  EXPECT_EQ(third->value, 2);
}

TEST(TokenListTest, TokensBelowTheSmallestStepAreSkipped) {
  TokenList list({4, Gate::kStep, 0, 1, 4});
  EXPECT_EQ(Index(&list, 0), 0);
  list.ReportStep(0, 1);  // without tokens 1 to 3: backup workers
  EXPECT_EQ(list.GetState().counts.skipped, 3);
  EXPECT_EQ(Index(&list, 1), 4);
  list.ReportStep(0, 3);
  EXPECT_EQ(list.GetState().counts.skipped, 3 + 7);
  EXPECT_EQ(list.GetState().position, 12);
  EXPECT_EQ(Index(&list, 2), 12);
}

TEST(TokenListTest, TheClockGateHoldsBackWhoIsTooFarAhead) {
  TokenList list({1, Gate::kClock, 2, 1, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 0), 1);
  EXPECT_EQ(Index(&list, 0), 2);  // clock 2, 2 ahead of worker 1
  const auto ahead = Take(&list, 0);
  EXPECT_EQ(ahead->outcome, kWaits);
  EXPECT_EQ(Index(&list, 1), 3);
  EXPECT_EQ(ahead->outcome, 4);
  EXPECT_EQ(list.GetState().workers[0].clock, 4);
}

TEST(TokenListTest, AWorkerThatComesBackHasTheSlowestLiveClock) {
  TokenList list({1, Gate::kClock, 0, 1, 3});
  for (int w = 0; w < 3; ++w) EXPECT_EQ(Index(&list, w), w);
  list.Leave(2);
  for (int64_t i = 3; i < 9; ++i) EXPECT_EQ(Index(&list, i % 2), i);
  EXPECT_EQ(list.GetState().workers[2].clock, 1);
  EXPECT_FALSE(list.GetState().workers[2].live);
  EXPECT_EQ(Index(&list, 2), 9);
  EXPECT_EQ(list.GetState().workers[2].clock, 5);
  EXPECT_TRUE(list.GetState().workers[2].live);
}

TEST(TokenListTest, AWorkerThatComesBackAloneGoesOnWithItsClock) {
  TokenList list({1, Gate::kClock, 0, 1, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  list.Leave(0);
  list.Leave(1);
  EXPECT_EQ(Index(&list, 0), 1);
  EXPECT_EQ(Index(&list, 0), 2);
  EXPECT_EQ(Index(&list, 1), 3);
  EXPECT_EQ(list.GetState().workers[0].clock, 3);
  EXPECT_EQ(list.GetState().workers[1].clock, 4);
}

TEST(TokenListTest, LosingOrLeavingOpensTheGateOfThoseWhoWaitForTheClock) {
  for (const bool lose : {false, true}) {
    TokenList list({1, Gate::kClock, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    const auto ahead = Take(&list, 0);
    EXPECT_EQ(ahead->outcome, kWaits);
    if (lose) {
      list.Lose(1);
    } else {
      list.Leave(1);
    }
    EXPECT_EQ(ahead->outcome, 1);
  }
}

TEST(TokenListTest, ALostWorkersTokensAreWithheldUntilTheyAreReissuedInOrder) {
  TokenList list({4, Gate::kStep, 0, 2, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  EXPECT_EQ(Index(&list, 0), 2);
  // It holds both: that the first was sent does not say that it arrived.
  const TokenList::Loss loss = list.Lose(0);
  EXPECT_EQ(loss.withheld, (Indices{0, 2}));
  EXPECT_EQ(loss.lost, 0);
  EXPECT_EQ(loss.tickets, (Indices{1, 3}));
  EXPECT_EQ(list.GetState().withheld, (Indices{0, 2}));
  EXPECT_TRUE(list.GetState().reissues.empty());
  // Its answer may be lost: whoever asks again gets the same.
  EXPECT_EQ(list.Lose(0).withheld, (Indices{0, 2}));
  EXPECT_EQ(list.Lose(0).tickets, (Indices{1, 3}));
  // One that others hold, and one that nobody has had, are not withheld.
  EXPECT_EQ(list.Reissue({2, 1, 0, 3, 2}), 2);
  EXPECT_EQ(list.Reissue({0, 2}), 0);
  EXPECT_EQ(list.GetState().reissues, (Indices{0, 2}));
  EXPECT_TRUE(list.GetState().withheld.empty());
  EXPECT_TRUE(list.Lose(0).tickets.empty());
  for (const int64_t expected : {0, 2, 3}) {
    EXPECT_EQ(Index(&list, 1), expected);
  }
  EXPECT_EQ(Index(&list, 1), kWaits);
  EXPECT_EQ(list.GetState().counts.reissued, 2);
  EXPECT_EQ(list.GetState().counts.taken, 6);
  // With other tickets than the lost worker had for them.
  EXPECT_EQ(list.Lose(1).tickets, (Indices{4, 2, 5, 6}));
}

TEST(TokenListTest, WhatAWorkerLostBeforeItCameBackIsInItsNextLossAsWell) {
  TokenList list({4, Gate::kStep, 0, 1, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  list.Lose(0);  // Nobody gets the answer.
  EXPECT_EQ(Index(&list, 0), 2);
  EXPECT_EQ(list.Lose(1).withheld, Indices{1});
  const TokenList::Loss loss = list.Lose(0);
  EXPECT_EQ(loss.withheld, (Indices{0, 2}));
  EXPECT_EQ(loss.tickets, (Indices{1, 3}));
}

TEST(TokenListTest, AWithheldTokenIsHandedToNobody) {
  TokenList list({2, Gate::kStep, 0, 1, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(list.Lose(0).withheld, Indices{0});
  EXPECT_EQ(Index(&list, 1), 1);
  const auto waits = Take(&list, 2);
  EXPECT_EQ(waits->outcome, kWaits);
  list.ReportStep(0, 1);  // A server had it.
  EXPECT_EQ(waits->outcome, 2);
  EXPECT_TRUE(list.GetState().withheld.empty());
  EXPECT_EQ(list.Reissue({0}), 0);
  EXPECT_EQ(Index(&list, 1), 3);
}

TEST(TokenListTest, AReissuedTokenGoesToWhoWaitsFirst) {
  TokenList list({2, Gate::kStep, 0, 1, 4});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  const auto first = Take(&list, 2);
  const auto second = Take(&list, 3);
  EXPECT_EQ(list.Reissue(list.Lose(1).withheld), 1);
  EXPECT_EQ(first->outcome, 1);
  EXPECT_EQ(second->outcome, kWaits);
}

TEST(TokenListTest, TokensThatTheStepHasPassedAreNotReissued) {
  TokenList list({2, Gate::kStep, 0, 2, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  list.ReportStep(0, 1);
  EXPECT_EQ(list.GetState().workers[0].held.size(), 1);  // for server 1
  list.ReportStep(1, 1);
  EXPECT_TRUE(list.GetState().workers[0].held.empty());
  EXPECT_TRUE(list.Lose(0).withheld.empty());
  // A reissued one that becomes useless is not handed out either.
  EXPECT_EQ(Index(&list, 1), 2);
  EXPECT_EQ(list.Reissue(list.Lose(1).withheld), 1);
  list.ReportStep(0, 2);
  list.ReportStep(1, 2);
  EXPECT_EQ(list.GetState().counts.skipped, 2);
  EXPECT_EQ(Index(&list, 0), 4);
}

TEST(TokenListTest, WithoutTheStepGateALostWorkersLastTokenIsLost) {
  for (const Gate gate : {Gate::kNone, Gate::kClock}) {
    TokenList list({2, gate, gate == Gate::kClock ? 9 : 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    EXPECT_EQ(Index(&list, 0), 1);
    // The second token, which the second Take has got.
    const std::map<int64_t, TokenList::Ticket> held = {{1, 2}};
    EXPECT_EQ(list.GetState().workers[0].held, held);
    const TokenList::Loss loss = list.Lose(0);
    EXPECT_EQ(loss.lost, 1);
    EXPECT_TRUE(loss.withheld.empty());
    EXPECT_EQ(loss.tickets, Indices{2});
    // Asked again, as the answer may be lost, until the worker is back.
    EXPECT_EQ(list.Lose(0).tickets, Indices{2});
    EXPECT_EQ(list.GetState().counts.lost, 1);
    EXPECT_EQ(Index(&list, 1), 2);
    list.Take(0, [](TokenList::Answer, TokenList::Token) {});
    list.Leave(0);
    EXPECT_EQ(list.Lose(0).lost, 0);
    EXPECT_EQ(list.GetState().counts.lost, 1);
  }
}

TEST(TokenListTest, AWorkerThatLeftHoldsNothing) {
  for (const Gate gate : {Gate::kNone, Gate::kStep, Gate::kClock}) {
    TokenList list({2, gate, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    list.Leave(0);
    const TokenList::Loss loss = list.Lose(0);
    EXPECT_EQ(loss.lost, 0);
    EXPECT_TRUE(loss.withheld.empty());
    EXPECT_EQ(Index(&list, 1), 1);
  }
}

TEST(TokenListTest, TheWaitingTakesOfAWorkerThatIsGoneAreAnswered) {
  TokenList list({1, Gate::kStep, 0, 1, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  const auto lost = Take(&list, 1);
  const auto left = Take(&list, 2);
  const auto stays = Take(&list, 0);
  list.Lose(1);
  EXPECT_EQ(lost->outcome, kGone);
  list.Leave(2);
  EXPECT_EQ(left->outcome, kGone);
  EXPECT_EQ(stays->outcome, kWaits);
  EXPECT_FALSE(list.Cancel(lost->ticket));
  EXPECT_EQ(lost->calls, 1);
}

TEST(TokenListTest, ACancelledTakeGetsNothingAndTheNextGetsItsToken) {
  TokenList list({1, Gate::kStep, 0, 1, 3});
  EXPECT_EQ(Index(&list, 0), 0);
  const auto first = Take(&list, 1);
  const auto second = Take(&list, 2);
  EXPECT_TRUE(list.Cancel(first->ticket));
  EXPECT_FALSE(list.Cancel(first->ticket));
  EXPECT_EQ(first.use_count(), 1);  // Its callback is gone.
  list.ReportStep(0, 1);
  EXPECT_EQ(first->calls, 0);
  EXPECT_EQ(second->outcome, 1);
  EXPECT_FALSE(list.Cancel(second->ticket));
  EXPECT_FALSE(list.Cancel(12345));
}

TEST(TokenListTest, SeekGoesOnAsANewList) {
  TokenList list({2, Gate::kStep, 0, 2, 2});
  EXPECT_EQ(Index(&list, 0), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  list.Lose(1);
  EXPECT_TRUE(list.Seek(7));
  EXPECT_EQ(list.Reissue({1}), 0);
  TokenList::State state = list.GetState();
  EXPECT_EQ(state.position, 14);
  EXPECT_EQ(state.steps, (std::vector<int64_t>{7, 7}));
  EXPECT_TRUE(state.reissues.empty());
  EXPECT_TRUE(state.workers[1].live);
  EXPECT_EQ(state.workers[0].clock, 0);
  EXPECT_TRUE(state.workers[0].held.empty());
  EXPECT_EQ(state.counts.taken, 2);
  EXPECT_EQ(Index(&list, 0), 14);
  EXPECT_EQ(Index(&list, 0), 15);
  const auto waits = Take(&list, 0);
  EXPECT_FALSE(list.Seek(3));
  EXPECT_EQ(list.GetState().smallest_step, 7);
  EXPECT_TRUE(list.Cancel(waits->ticket));
  EXPECT_TRUE(list.Seek(3));  // back, too
  EXPECT_EQ(Index(&list, 1), 6);
}

TEST(TokenListTest, TheLargestStepDoesNotOverflow) {
  for (const int64_t repeats : {int64_t{1}, int64_t{3}, int64_t{1} << 40,
                                std::numeric_limits<int64_t>::max()}) {
    TokenList list({repeats, Gate::kStep, 0, 1, 1});
    ASSERT_TRUE(list.Seek(list.max_step()));
    const auto taking = Take(&list, 0);
    EXPECT_EQ(taking->value, list.max_step());
    EXPECT_EQ(taking->outcome, list.max_step() * repeats);
  }
}

TEST(TokenListTest, StateTellsWhoWaits) {
  TokenList list({1, Gate::kClock, 0, 1, 3});
  EXPECT_EQ(Index(&list, 2), 0);
  EXPECT_EQ(Index(&list, 1), 1);
  const auto first = Take(&list, 2);
  const auto second = Take(&list, 1);
  const TokenList::State state = list.GetState();
  ASSERT_EQ(state.waiting.size(), 2);
  EXPECT_EQ(state.waiting[0].worker, 2);
  EXPECT_EQ(state.waiting[1].worker, 1);
  EXPECT_GE(state.waiting[1].seconds, 0.0);
  EXPECT_GE(state.waiting[0].seconds, state.waiting[1].seconds);
  EXPECT_TRUE(state.workers[1].held.empty());  // It asks for the next.
  EXPECT_EQ(state.workers[1].clock, 1);
}

TEST(TokenListTest, ClosingAnswersAllThatWaitAndAllLaterTakes) {
  std::shared_ptr<Taking> waits;
  {
    TokenList list({1, Gate::kStep, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    waits = Take(&list, 1);
    list.Close();
    EXPECT_EQ(waits->outcome, kClosed);
    EXPECT_EQ(Index(&list, 0), kClosed);
    list.ReportStep(0, 1);
    list.Lose(0);
    list.Close();
  }
  EXPECT_EQ(waits->calls, 1);
  {
    TokenList list({1, Gate::kStep, 0, 1, 2});
    EXPECT_EQ(Index(&list, 0), 0);
    waits = Take(&list, 1);
  }
  EXPECT_EQ(waits->outcome, kClosed);
}

TEST(TokenListTest, ACallbackMayCallTheList) {
  TokenList list({1, Gate::kStep, 0, 1, 1});
  std::vector<int64_t> taken;
  TokenList::Callback next = [&](Answer answer, Token token) {
    if (answer != Answer::kToken) return;
    taken.push_back(token.index);
    if (token.index < 50) list.ReportStep(0, token.value + 1);
    list.GetState();
    list.Take(0, next);
  };
  list.Take(0, next);
  EXPECT_EQ(taken.size(), 51);
  list.Close();
}

TEST(TokenListTest, WaitsLastAsLongAsTheGivenTimeSays) {
  TokenList::Time now{};
  TokenList list({1, Gate::kStep, 0, 1, 2}, [&now] { return now; });
  Take(&list, 0);
  now += std::chrono::hours(1);
  Take(&list, 1);
  now += std::chrono::seconds(5);
  const std::vector<TokenList::Waiting> waiting = list.GetState().waiting;
  ASSERT_EQ(waiting.size(), 1u);
  EXPECT_EQ(waiting[0].worker, 1);
  EXPECT_EQ(waiting[0].seconds, 5.0);
}

TEST(TokenListTest, SeveralCallsOfAWorkerWaitInTheOrderTheyCame) {
  TokenList list({1, Gate::kClock, 0, 1, 3});
  const auto first = Take(&list, 0);
  const auto ahead = Take(&list, 0);
  const auto further = Take(&list, 0);
  EXPECT_EQ(first->outcome, 0);
  const auto second = Take(&list, 1);
  EXPECT_EQ(second->outcome, 1);
  const auto other = Take(&list, 1);
  EXPECT_EQ(ahead->outcome, kWaits);
  // Now all clocks are 1: who came first is first, but once only.
  const auto third = Take(&list, 2);
  EXPECT_EQ(third->outcome, 2);
  EXPECT_EQ(ahead->outcome, 3);
  EXPECT_EQ(other->outcome, 4);
  EXPECT_EQ(further->outcome, kWaits);
  EXPECT_TRUE(list.Cancel(further->ticket));
  Take(&list, 2);
  EXPECT_EQ(further->outcome, kWaits);
}

}  // namespace
}  // namespace recsync
