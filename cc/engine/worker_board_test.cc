#include "cc/engine/worker_board.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

TEST(WorkerBoardTest, AllRowsAreReadByTheirKeysAndEachReportOnce) {
  WorkerBoard board;
  const auto second = board.Add(9), first = board.Add(4);
  second->Count();
  second->Count();
  first->Report("old");
  first->Report("new");
  const std::vector<WorkerBoard::Entry> read = board.Read();
  ASSERT_EQ(read.size(), 2);
  EXPECT_EQ(read[0].key, 4);
  EXPECT_EQ(read[0].applied, 0);
  EXPECT_TRUE(read[0].has_report);
  EXPECT_EQ(read[0].report, "new");
  EXPECT_EQ(read[1].key, 9);
  EXPECT_EQ(read[1].applied, 2);
  EXPECT_FALSE(read[1].has_report);
  EXPECT_FALSE(board.Read()[0].has_report);
  first->Report("");
  EXPECT_TRUE(board.Read()[0].has_report);
}

TEST(WorkerBoardTest, AWorkerIsToldToEndAndWhatIsKnownOfIt) {
  WorkerBoard board;
  const auto row = board.Add(1), other = board.Add(2);
  board.Tell(1, 1, 5);
  board.Tell(1, 1, 3);  // A late one.
  board.Tell(7, 1, 1);  // Nobody's.
  EXPECT_EQ(row->told(), 2);
  EXPECT_EQ(row->known(), 5);
  EXPECT_EQ(other->told(), 0);
  EXPECT_EQ(other->known(), 0);
}

TEST(WorkerBoardTest, HowOftenAWorkerWasToldStopsAtTheMostThatIsCounted) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  WorkerBoard board;
  const auto row = board.Add(1);
  for (const int64_t ends : {kMost - 1, int64_t{1}, kMost}) {
    board.Tell(1, ends, 0);
  }
  EXPECT_EQ(row->told(), kMost);
}

TEST(WorkerBoardTest, ARowGoesWithWhoHasItAndTheBoardMayGoFirst) {
  auto board = std::make_unique<WorkerBoard>();
  auto row = board->Add(1);
  const auto again = board->Add(1);
  row->Count();
  ASSERT_EQ(board->Read().size(), 1);
  EXPECT_EQ(board->Read()[0].applied, 0);
  row = board->Add(2);
  EXPECT_EQ(board->Read().size(), 2);
  row.reset();
  EXPECT_EQ(board->Read().size(), 1);
  board->Tell(2, 1, 1);
  board.reset();
  again->Count();
}

TEST(WorkerBoardTest, RowsThatAreGoneAreForgottenThoughNobodyReads) {
  WorkerBoard board;
  const auto kept = board.Add(0);
  for (int64_t key = 1; key < 10000; ++key) board.Add(key);
  EXPECT_LT(board.size(), 200);
  EXPECT_EQ(board.Read().size(), 1);
}

TEST(WorkerBoardTest, RowsMayBeUsedWhileTheyAreReadAndTold) {
  WorkerBoard board;
  const auto row = board.Add(1);
  constexpr int kSteps = 2000;
  std::thread worker([&] {
    for (int i = 0; i < kSteps; ++i) {
      row->Count();
      row->Report(std::to_string(i));
    }
  });
  std::thread others([&] {
    for (int i = 0; i < 200; ++i) {
      board.Add(2);
      board.Tell(1, 1, i);
    }
  });
  std::string last;
  int64_t applied = 0;
  while (applied < kSteps || last != std::to_string(kSteps - 1)) {
    const WorkerBoard::Entry entry = board.Read().front();
    EXPECT_GE(entry.applied, applied);
    applied = entry.applied;
    if (entry.has_report) last = entry.report;
  }
  worker.join();
  others.join();
  EXPECT_EQ(row->told(), 200);
  EXPECT_EQ(row->known(), 199);
}

}  // namespace
}  // namespace recsync
