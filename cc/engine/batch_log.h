// The numbers of the batches that a worker has trained on, until the
// coordinator, which reads them now and then, has them.
//
//   BatchLog log;
//   log.Note(7);
//   std::vector<int64_t> numbers;
//   int64_t first;
//   log.Read(0, &first, &numbers);  // 0, {7}
//   log.Read(1, &first, &numbers);  // 1, {}, and 7 is forgotten
//
// A reply may be lost on its way, or be late. So a reader says how many numbers
// it has, and those are forgotten only then; a reply says how many come before
// it.
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

  // The numbers noted so far but for the first `known`, or for those that are
  // forgotten if these are more, in their order; forgets the ones left out.
  // `first` is how many that are. False, and does nothing, if `known` is
  // negative or more than were noted.
  bool Read(int64_t known, int64_t* first, std::vector<int64_t>* numbers)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    const int64_t size = numbers_.size();
    if (known < 0 || known - forgotten_ > size) return false;
    if (known > forgotten_) {
      numbers_.erase(numbers_.begin(), numbers_.begin() + (known - forgotten_));
      forgotten_ = known;
    }
    *first = forgotten_;
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
