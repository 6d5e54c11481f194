// What a server that counts steps knows of the workers whose steps it counts:
// how many were applied, what each has reported of itself, and what it is to be
// told. The coordinator reads and tells all of them in one call.
//
//   WorkerBoard board;
//   std::shared_ptr<WorkerBoard::Row> row = board.Add(7);
//   row->Count();
//   row->Report("...");
//   board.Read();     // {7, 1, true, "..."}: a report is read once
//   board.Tell(7, 1, 0);
//   row->told();      // 1
//
// A row is there as long as somebody has it. Thread safe; nothing blocks.

#ifndef TF_RECSYNC_CC_ENGINE_WORKER_BOARD_H_
#define TF_RECSYNC_CC_ENGINE_WORKER_BOARD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"
#include "cc/engine/saturated.h"

namespace recsync {

class WorkerBoard {
 public:
  // How far a worker is, which may be read while it reports.
  struct Entry {
    int64_t key;
    int64_t applied;
    bool has_report;  // since the last reading
    std::string report;
  };

  class Row {
   public:
    // A step of the worker was applied.
    void Count() ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      ++applied_;
    }

    // Takes the place of what it has reported before.
    void Report(std::string report) ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      report_.swap(report);
      has_report_ = true;
    }

    // How often it was told to end the call that it is in.
    int64_t told() ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      return told_;
    }

    // How many of the numbers that it has reported are known, and may be
    // forgotten.
    int64_t known() ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      return known_;
    }

   private:
    friend class WorkerBoard;

    Entry Read(int64_t key) ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      Entry entry = {key, applied_, std::exchange(has_report_, false), {}};
      entry.report.swap(report_);
      return entry;
    }

    void Tell(int64_t ends, int64_t known) ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      told_ = SaturatedSum(told_, ends);
      known_ = std::max(known_, known);
    }

    Mutex mu_;
    int64_t applied_ ABSL_GUARDED_BY(mu_) = 0;
    int64_t told_ ABSL_GUARDED_BY(mu_) = 0;
    int64_t known_ ABSL_GUARDED_BY(mu_) = 0;
    bool has_report_ ABSL_GUARDED_BY(mu_) = false;
    std::string report_ ABSL_GUARDED_BY(mu_);
  };

  // A new row; one of the same key is not read any more.
  std::shared_ptr<Row> Add(int64_t key) ABSL_LOCKS_EXCLUDED(mu_) {
    // Not by make_shared, where who knows of a row keeps its memory.
    std::shared_ptr<Row> row(new Row);
    MutexLock lock(&mu_);
    // Nobody may ever read.
    if (rows_.size() >= forget_at_) {
      ForgetThoseGone();
      forget_at_ = std::max(kForgetAt, 2 * rows_.size());
    }
    rows_[key] = row;
    return row;
  }

  // All rows that somebody has, by their keys.
  std::vector<Entry> Read() ABSL_LOCKS_EXCLUDED(mu_) {
    std::vector<std::pair<int64_t, std::shared_ptr<Row>>> found;
    {
      MutexLock lock(&mu_);
      ForgetThoseGone();
      for (const auto& [key, row] : rows_) {
        auto held = row.lock();
        if (held != nullptr) found.emplace_back(key, std::move(held));
      }
    }
    std::vector<Entry> entries;
    entries.reserve(found.size());
    for (const auto& [key, row] : found) entries.push_back(row->Read(key));
    return entries;
  }

  // Has a row's worker know: `ends` is added to how often it was told to end
  // its call, and so many of its numbers are known at least. Of a row that
  // nobody has any more, nothing happens.
  void Tell(int64_t key, int64_t ends, int64_t known) ABSL_LOCKS_EXCLUDED(mu_) {
    std::shared_ptr<Row> row;
    {
      MutexLock lock(&mu_);
      const auto found = rows_.find(key);
      if (found != rows_.end()) row = found->second.lock();
    }
    if (row != nullptr) row->Tell(ends, known);
  }

  // How many rows it knows, those included that nobody has any more.
  size_t size() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return rows_.size();
  }

 private:
  static constexpr size_t kForgetAt = 64;

  void ForgetThoseGone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (auto row = rows_.begin(); row != rows_.end();) {
      row = row->second.expired() ? rows_.erase(row) : std::next(row);
    }
  }

  Mutex mu_;
  std::map<int64_t, std::weak_ptr<Row>> rows_ ABSL_GUARDED_BY(mu_);
  size_t forget_at_ ABSL_GUARDED_BY(mu_) = kForgetAt;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_WORKER_BOARD_H_
