#include "cc/engine/gradient_buffer.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
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
  EXPECT_EQ(buffer->Push(push, &aggregate).error(), "");
  return aggregate;
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
  ASSERT_EQ(buffer.Push(push, &aggregate).error(), "");
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
  EXPECT_EQ(buffer.Applied(2).error(), "");
  EXPECT_EQ(buffer.applied(), 0);
  EXPECT_EQ(buffer.Applied(1).error(), "");
  EXPECT_EQ(buffer.applied(), 2);
  EXPECT_EQ(buffer.Applied(4).error(),
            "step = 4 is not in [1, 3], the steps given out");
  EXPECT_NE(buffer.Applied(0).error(), "");
  EXPECT_EQ(buffer.Applied(3).error(), "");
  EXPECT_EQ(buffer.applied(), 3);
}

TEST(GradientBufferTest, WhatIsAppliedAlreadyMayBeMarkedAgain) {
  GradientBuffer buffer(Options(1));
  for (int i = 0; i < 3; ++i) PushNumber(&buffer, 1, 0);
  // Ahead of its turn, and behind.
  for (const int64_t step : {2, 2, 1, 1, 2}) {
    EXPECT_EQ(buffer.Applied(step).error(), "");
  }
  EXPECT_EQ(buffer.applied(), 2);
  EXPECT_EQ(buffer.Applied(3).error(), "");
  EXPECT_EQ(buffer.applied(), 3);
  // What was marked before does not count for the steps to come.
  PushNumber(&buffer, 1, 0);
  EXPECT_EQ(buffer.applied(), 3);
}

TEST(GradientBufferTest, RevokedAreLaterPushesAndToldAreStepsInProgress) {
  GradientBuffer buffer(Options(2));
  const auto push = [&](int64_t ticket) {
    GradientPush push;
    const float one = 1;
    push.dense = &one;
    push.ticket = ticket;
    std::unique_ptr<Aggregate> aggregate;
    EXPECT_EQ(buffer.Push(push, &aggregate).error(), "");
    return aggregate != nullptr;
  };
  // Step 1 by ticket 7, 2 by 9, 3 by 8, 4 by nobody's.
  for (const int64_t ticket : {5, 7, 6, 9, 4, 8, 3, 0}) push(ticket);
  EXPECT_EQ(buffer.step(), 4);
  EXPECT_EQ(buffer.Revoke({8, 7}).unapplied, (Ids{1, 3}));
  EXPECT_EQ(buffer.Revoke({5, 0}).unapplied, Ids{});
  EXPECT_EQ(buffer.Revoke({}).unapplied, Ids{});
  // Not in turn: what is applied is not in progress, whoever waits for others.
  EXPECT_EQ(buffer.Applied(3).error(), "");
  EXPECT_EQ(buffer.Revoke({7, 8}).unapplied, Ids{1});
  // Those that come later have no effect, and others have theirs.
  for (const int64_t ticket : {7, 8, 5}) EXPECT_FALSE(push(ticket));
  EXPECT_EQ(buffer.state().late, 3);
  EXPECT_EQ(buffer.state().pending, 0);
  EXPECT_FALSE(push(0));
  EXPECT_TRUE(push(10));
  buffer.Restore(2);
  EXPECT_EQ(buffer.Revoke({9, 10}).unapplied, Ids{});
}

// A push of token `index`, whose gradient is 1.
GradientPush Of(int64_t index, int64_t value, int64_t ticket) {
  static const float one = 1;
  GradientPush push;
  push.dense = &one;
  push.token_index = index;
  push.token_value = value;
  push.ticket = ticket;
  return push;
}

TEST(GradientBufferTest, ItTellsWhichTokensItHasTakenOfThoseWhoAreGone) {
  GradientBufferOptions options = Options(2);
  options.drop_late = true;
  GradientBuffer buffer(options);
  std::unique_ptr<Aggregate> aggregate;
  const auto push = [&](int64_t index, int64_t value, int64_t ticket) {
    EXPECT_EQ(buffer.Push(Of(index, value, ticket), &aggregate).error(), "");
  };
  push(1, 0, 11);
  EXPECT_EQ(buffer.Revoke({10, 12}).taken, Ids{});
  EXPECT_EQ(buffer.Revoke({10, 11}).taken, Ids{1});
  EXPECT_EQ(buffer.Revoke({11}).step, 0);
  push(0, 0, 10);  // Too late: it has been said that the token is not there.
  EXPECT_EQ(buffer.step(), 0);
  push(0, 0, 13);
  EXPECT_EQ(buffer.step(), 1);
  push(3, 1, 14);
  // Of the step before, too: whoever pushed may not have said that it is over.
  EXPECT_EQ(buffer.Revoke({11, 13, 14}).taken, (Ids{0, 1, 3}));
  EXPECT_EQ(buffer.Revoke({11}).step, 1);
  push(2, 1, 15);
  EXPECT_EQ(buffer.Revoke({11, 13, 14, 15, 0}).taken, (Ids{2, 3}));
  buffer.Restore(5);
  EXPECT_EQ(buffer.Revoke({14, 15}).taken, Ids{});
}

TEST(GradientBufferTest, SpentTokensCountAsPushesWithoutGradients) {
  GradientBufferOptions options = Options(4);
  options.drop_late = true;
  GradientBuffer buffer(options);
  std::unique_ptr<Aggregate> aggregate;
  EXPECT_EQ(buffer.Push(Of(0, 0, 10), &aggregate).error(), "");
  // Of another step, and what is there already.
  EXPECT_EQ(buffer.Spend(1, {5}, 0, &aggregate).error(), "");
  EXPECT_EQ(buffer.Spend(0, {0}, 0, &aggregate).error(), "");
  EXPECT_EQ(buffer.state().pending, 1);
  EXPECT_EQ(buffer.Spend(0, {0, 1, 1}, 0, &aggregate).error(), "");
  EXPECT_EQ(aggregate, nullptr);
  EXPECT_EQ(buffer.state().pending, 2);
  // Whoever pushes it all the same comes second.
  EXPECT_EQ(buffer.Push(Of(1, 0, 12), &aggregate).error(), "");
  EXPECT_EQ(buffer.state().duplicates, 1);
  EXPECT_EQ(buffer.Push(Of(2, 0, 13), &aggregate).error(), "");
  // It completes the step; what is more is of no use.
  EXPECT_EQ(buffer.Spend(0, {3, 7}, 0, &aggregate).error(), "");
  ASSERT_NE(aggregate, nullptr);
  float sum;
  aggregate->WriteDense(0, 1, &sum);
  EXPECT_EQ(sum, 2.0f / 4);
  EXPECT_EQ(aggregate->step(), 1);
  const GradientBufferState state = buffer.state();
  EXPECT_EQ(state.step, 1);
  EXPECT_EQ(state.pending, 0);
  EXPECT_EQ(state.spent, 2);
  EXPECT_EQ(state.included, 2);
  EXPECT_EQ(buffer.Spend(0, {3}, 0, &aggregate).error(), "");
  EXPECT_EQ(aggregate, nullptr);
  EXPECT_EQ(buffer.Applied(1).error(), "");
  // A step may have nothing else.
  EXPECT_EQ(buffer.Spend(1, {4, 5, 6, 7}, 0, &aggregate).error(), "");
  ASSERT_NE(aggregate, nullptr);
  EXPECT_FALSE(aggregate->has_dense());
}

TEST(GradientBufferTest, AStepThatSpentTokensCompletedIsFoundUntilItIsApplied) {
  GradientBufferOptions options = Options(2);
  options.drop_late = true;
  GradientBuffer buffer(options);
  std::unique_ptr<Aggregate> aggregate;
  EXPECT_EQ(buffer.Revoke({7}).unapplied, Ids{});
  EXPECT_EQ(buffer.Push(Of(0, 0, 10), &aggregate).error(), "");
  EXPECT_EQ(buffer.Spend(0, {1}, 7, &aggregate).error(), "");
  ASSERT_NE(aggregate, nullptr);
  EXPECT_EQ(buffer.Revoke({7}).unapplied, Ids{1});
  // Asked once more, after whoever did it has failed: it has the token.
  EXPECT_EQ(buffer.Revoke({7}).taken, Ids{1});
  EXPECT_EQ(buffer.Applied(1).error(), "");
  EXPECT_EQ(buffer.Revoke({7}).unapplied, Ids{});
  EXPECT_NE(buffer.Spend(1, {2}, -1, &aggregate).error(), "");
}

TEST(GradientBufferTest, ABufferThatCountsLatePushesSpendsNoTokens) {
  GradientBuffer buffer(Options(2));
  std::unique_ptr<Aggregate> aggregate;
  EXPECT_NE(buffer.Spend(0, {0}, 0, &aggregate).error(), "");
  EXPECT_EQ(buffer.state().pending, 0);
}

TEST(GradientBufferTest, AgesAreAddedUpToTheMostThatIsCounted) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  GradientBuffer buffer(Options(9));
  buffer.Restore(kMost);
  for (int push = 0; push < 2; ++push) PushNumber(&buffer, 1, 0);
  EXPECT_EQ(buffer.state().age_sum, kMost);
  EXPECT_EQ(buffer.state().staleness[StalenessCounters::kMax], kMost);
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
  EXPECT_EQ(buffer.Applied(41).error(), "");
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
    return buffer.Push(push, &aggregate).error();
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
    return CheckOptions(options).error();
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
            "dense_size must be from 0 to 2147483647, not -1");
  EXPECT_EQ(check_with([](O* o) { o->dense_count = -1; }),
            "dense_count must be from 0 to 2147483647, not -1");
  EXPECT_EQ(
      check_with([](O* o) {
        o->tables = {{5, 2}, {-1, 2}};
      }),
      "table 1 must have at least 0 rows, of 0 to 2147483647 floats, not -1 "
      "rows of 2");
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

TEST(GradientBufferTest, SizesThatNoTensorHasAreRefused) {
  GradientBufferOptions options;
  options.dense_size = int64_t{1} << 40;
  EXPECT_EQ(CheckOptions(options).error(),
            "dense_size must be from 0 to 2147483647, not 1099511627776");
  options.dense_size = 1;
  options.tables = {{5, int64_t{1} << 31}};
  EXPECT_EQ(CheckOptions(options).error(),
            "table 0 must have at least 0 rows, of 0 to 2147483647 floats, not "
            "5 rows of 2147483648");
}

TEST(GradientBufferTest, RowsThatShareAGradientCantAddUpToMoreThanATensor) {
  GradientBufferOptions options;
  const int64_t width = int64_t{1} << 20;
  options.tables = {{int64_t{1} << 20, width}};
  GradientBuffer buffer(options);
  const std::vector<float> gradient(width, 1.0f);
  std::vector<int64_t> ids(2048);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<int32_t> bags(ids.size(), 0);
  GradientPush push;
  push.tables.emplace_back();
  push.tables[0].ids = ids.data();
  push.tables[0].n = ids.size();
  push.tables[0].push.gradient = gradient.data();
  push.tables[0].push.bags.bags = bags.data();
  std::unique_ptr<Aggregate> aggregate;
  EXPECT_EQ(buffer.Push(push, &aggregate).error(),
            "indices must name at most 2147483647 floats of table 0 in a push, "
            "not 2048 rows of 1048576");
  push.tables[0].n = 2;
  EXPECT_EQ(buffer.Push(push, &aggregate).error(), "");
  ASSERT_NE(aggregate, nullptr);
  EXPECT_EQ(aggregate->rows(0).size(), 2);
}

}  // namespace
}  // namespace recsync
