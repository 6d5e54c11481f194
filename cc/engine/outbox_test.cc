// The outbox of an edge: what is told, in which order, and when it ends.

#include "cc/engine/outbox.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace recsync {
namespace {

using Box = Outbox<std::string>;

// The parcel as a word: "progress/iteration/update", or "closed".
std::string HandedOut(Box* box, int64_t* number = nullptr) {
  std::string word = "nothing";
  box->Collect([&](Box::Answer answer, Box::Parcel parcel) {
    if (number != nullptr) *number = parcel.number;
    word = answer == Box::Answer::kClosed
               ? "closed"
               : std::to_string(parcel.progress) + "/" +
                     std::to_string(parcel.iteration) + "/" +
                     parcel.update.value_or("none");
  });
  box->Cancel();
  return word;
}

// The same of one that has got where it should.
std::string Collected(Box* box) {
  int64_t number = 0;
  const std::string word = HandedOut(box, &number);
  box->Acknowledge(number);
  return word;
}

TEST(OutboxTest, UpdatesComeInOrderWithTheLatestProgress) {
  Box box(/*newest_only=*/false);
  EXPECT_EQ(Collected(&box), "nothing");
  EXPECT_EQ(box.Put(3, "a", 3), 0);
  EXPECT_EQ(box.Put(4, "b", 4), 0);
  EXPECT_EQ(Collected(&box), "4/3/a");
  EXPECT_EQ(Collected(&box), "4/4/b");
  EXPECT_EQ(Collected(&box), "nothing");
}

TEST(OutboxTest, ProgressIsToldOnce) {
  Box box(false);
  box.Tell(1);
  box.Tell(2);
  box.Tell(2);
  EXPECT_EQ(Collected(&box), "2/-1/none");
  EXPECT_EQ(Collected(&box), "nothing");
  box.Tell(1);
  EXPECT_EQ(Collected(&box), "nothing");
}

TEST(OutboxTest, WhileHeldNothingIsToldAndNothingIsLost) {
  Box box(false);
  std::string got;
  box.Collect([&](Box::Answer answer, Box::Parcel parcel) {
    EXPECT_EQ(answer, Box::Answer::kParcel);
    EXPECT_FALSE(parcel.update.has_value());
    got = std::to_string(parcel.progress) + "/" +
          std::to_string(parcel.iteration);
  });
  EXPECT_EQ(got, "");
  box.Hold(true);
  EXPECT_EQ(got, "-1/-1");
  box.Put(1, "a", 1);
  box.Put(2, "b", 2);
  EXPECT_EQ(Collected(&box), "-1/-1/none");
  box.Close();  // Not before all is told.
  EXPECT_EQ(Collected(&box), "-1/-1/none");
  box.Hold(false);
  EXPECT_EQ(Collected(&box), "2/1/a");
  EXPECT_EQ(Collected(&box), "2/2/b");
  EXPECT_EQ(Collected(&box), "closed");
}

TEST(OutboxTest, AResetOutboxIsNotHeld) {
  Box box(false);
  box.Hold(true);
  box.Reset();
  EXPECT_EQ(Collected(&box), "nothing");
}

TEST(OutboxTest, NewestOnlyReplacesWhatWaits) {
  Box box(/*newest_only=*/true);
  EXPECT_EQ(box.Put(1, "a", -1), 0);
  EXPECT_EQ(box.Put(2, "b", -1), 1);
  EXPECT_EQ(box.size(), 1);
  EXPECT_EQ(Collected(&box), "-1/2/b");
}

TEST(OutboxTest, AWaitIsEndedByWhatComes) {
  Box box(false);
  std::string got;
  box.Collect([&](Box::Answer, Box::Parcel parcel) { got = *parcel.update; });
  box.Put(1, "a", 1);
  EXPECT_EQ(got, "a");
}

TEST(OutboxTest, TheNextCallTakesThePlaceOfOneThatWaits) {
  Box box(false);
  std::vector<Box::Answer> answers;
  const auto note = [&](Box::Answer answer, Box::Parcel) {
    answers.push_back(answer);
  };
  box.Collect(note, /*caller=*/1);
  std::string got;
  box.Collect([&](Box::Answer, Box::Parcel parcel) { got = *parcel.update; },
              /*caller=*/2);
  EXPECT_EQ(answers, std::vector<Box::Answer>({Box::Answer::kReplaced}));
  EXPECT_FALSE(box.Cancel(1)) << "it is the other one's turn";
  box.Put(1, "a", 1);
  EXPECT_EQ(got, "a");
  // And one that was handed a parcel is handed it again.
  box.Collect(note, 3);
  EXPECT_EQ(answers.back(), Box::Answer::kParcel);
}

TEST(OutboxTest, CloseLetsEverythingBeToldFirst) {
  Box box(false);
  box.Put(1, "a", 1);
  box.Close();
  box.Put(2, "b", 2);
  EXPECT_EQ(Collected(&box), "1/1/a");
  EXPECT_EQ(Collected(&box), "closed");
  EXPECT_EQ(Collected(&box), "closed");
  box.Reset();
  box.Reopen();
  box.Put(3, "c", 3);
  EXPECT_EQ(Collected(&box), "3/3/c");
}

TEST(OutboxTest, NothingIsKeptForANeighborThatIsGone) {
  Box box(false);
  box.Put(1, "a", 1);
  box.Discard(true);
  box.Put(2, "b", 2);
  EXPECT_EQ(Collected(&box), "nothing");
  box.Reset();
  box.Put(3, "c", 3);
  EXPECT_EQ(Collected(&box), "3/3/c");
}

TEST(OutboxTest, AParcelIsHandedOutUntilItIsAcknowledged) {
  Box box(false);
  int64_t first = 0, again = 0, second = 0;
  box.Put(1, "a", 1);
  EXPECT_EQ(HandedOut(&box, &first), "1/1/a");
  box.Put(2, "b", 2);
  EXPECT_EQ(HandedOut(&box, &again), "1/1/a");
  EXPECT_EQ(again, first);
  EXPECT_EQ(box.size(), 1) << "b alone was not handed out";
  box.Acknowledge(first);
  EXPECT_EQ(HandedOut(&box, &second), "2/2/b");
  EXPECT_GT(second, first);
  box.Acknowledge(first);  // A call that was given up ends late.
  EXPECT_EQ(HandedOut(&box), "2/2/b");
  box.Acknowledge(second);
  EXPECT_EQ(HandedOut(&box), "nothing");
}

TEST(OutboxTest, AParcelSaysWhetherItWasHandedOutBefore) {
  Box box(false);
  std::vector<bool> repeated;
  const auto collect = [&] {
    box.Collect([&](Box::Answer, Box::Parcel parcel) {
      repeated.push_back(parcel.repeated);
      if (repeated.size() == 3) box.Acknowledge(parcel.number);
    });
  };
  box.Put(1, "a", 1);
  for (int i = 0; i < 3; ++i) collect();
  box.Put(2, "b", 2);
  collect();
  EXPECT_EQ(repeated, (std::vector<bool>{false, true, true, false}));
}

TEST(OutboxTest, ProgressAloneIsHandedOutUntilItIsAcknowledgedToo) {
  Box box(false);
  box.Tell(4);
  EXPECT_EQ(HandedOut(&box), "4/-1/none");
  EXPECT_EQ(Collected(&box), "4/-1/none");
  EXPECT_EQ(Collected(&box), "nothing");
}

TEST(OutboxTest, ANewerUpdateDoesNotReplaceOneThatIsOnItsWay) {
  Box box(/*newest_only=*/true);
  box.Put(1, "a", 1);
  EXPECT_EQ(HandedOut(&box), "1/1/a");
  EXPECT_EQ(box.Put(2, "b", 2), 0);
  EXPECT_EQ(box.Put(3, "c", 3), 1);
  EXPECT_EQ(Collected(&box), "1/1/a");
  EXPECT_EQ(Collected(&box), "3/3/c");
}

TEST(OutboxTest, WhileHeldNothingIsHandedOutAgain) {
  Box box(false);
  int64_t number = -1;
  box.Put(1, "a", 1);
  HandedOut(&box);
  box.Hold(true);
  EXPECT_EQ(HandedOut(&box, &number), "-1/-1/none");
  EXPECT_EQ(number, 0);
  box.Acknowledge(number);
  box.Hold(false);
  EXPECT_EQ(Collected(&box), "1/1/a");
}

TEST(OutboxTest, AnOutboxIsClosedWhenAllIsAcknowledged) {
  Box box(false);
  box.Put(1, "a", 1);
  box.Close();
  EXPECT_EQ(HandedOut(&box), "1/1/a");
  EXPECT_EQ(Collected(&box), "1/1/a");
  EXPECT_EQ(HandedOut(&box), "closed");
}

TEST(OutboxTest, WhatIsOnItsWayToANeighborThatIsGoneIsForgotten) {
  Box box(false);
  int64_t before = 0, after = 0;
  box.Put(1, "a", 1);
  EXPECT_EQ(HandedOut(&box, &before), "1/1/a");
  box.Discard(true);
  EXPECT_EQ(HandedOut(&box), "nothing");
  box.Reset();
  box.Put(3, "c", 3);
  EXPECT_EQ(HandedOut(&box, &after), "3/3/c");
  EXPECT_GT(after, before);
  box.Reset();
  EXPECT_EQ(HandedOut(&box), "nothing");
}

TEST(OutboxTest, ACallThatIsCancelledTakesNothingAlong) {
  Box box(false);
  box.Collect([](Box::Answer, Box::Parcel) { FAIL(); });
  EXPECT_TRUE(box.Cancel());
  box.Put(1, "a", 1);
  EXPECT_EQ(HandedOut(&box), "1/1/a");
  EXPECT_FALSE(box.Cancel()) << "too late, and it is handed out again";
  EXPECT_EQ(Collected(&box), "1/1/a");
}

}  // namespace
}  // namespace recsync
