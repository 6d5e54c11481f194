// The numbers of the batches that a worker has trained on, until the
// coordinator, which reads them now and then, has them.
//
//   BatchLog log;
//   log.Note(7);
//   std::vector<int64_t> numbers;
//   log.Read(0, &numbers);  // {7}
//   log.Read(1, &numbers);  // {}, and 7 is forgotten
//
// A reply may be lost on its way. So a reader says how many numbers it has, and
// those are forgotten only then.
//
// Thread safe; nothing blocks. Takes 8 bytes for each number that is not
// forgotten.

#ifndef TF_RECSYNC_CC_ENGINE_BATCH_LOG_H_
#define TF_RECSYNC_CC_ENGINE_BATCH_LOG_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

class BatchLog {
 public:
  BatchLog() = default;
  BatchLog(const BatchLog&) = delete;
  BatchLog& operator=(const BatchLog&) = delete;

  // Adds a number.
  void Note(int64_t number) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    numbers_.push_back(number);
  }

  // The numbers noted so far but for the first `known`, in their order; forgets
  // those first ones. False, and does nothing, if `known` is more than were
  // noted, or fewer than were known before.
  bool Read(int64_t known, std::vector<int64_t>* numbers)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (known < forgotten_) return false;
    const int64_t more = known - forgotten_;
    if (more > static_cast<int64_t>(numbers_.size())) return false;
    numbers_.erase(numbers_.begin(), numbers_.begin() + more);
    forgotten_ = known;
    *numbers = numbers_;
    return true;
  }

 private:
  Mutex mu_;
  int64_t forgotten_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<int64_t> numbers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_BATCH_LOG_H_
