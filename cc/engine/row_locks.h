// Spin locks over the rows of all tables of a process, striped: rows share a
// lock by their hash, so that their number does not depend on the tables'.
//
//   { RowLock lock(&RowLocks::Global().Of(table, row)); /* read or write */ }
//
// A lock is held for the few nanoseconds that one row takes, and never two by
// one thread, so that nobody can wait in a circle. Rows that lie in different
// partitions (row_partitions.h) have locks in different cache lines: threads
// that share out a push by partition don't slow each other down.
//
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_LOCKS_H_
#define TF_RECSYNC_CC_ENGINE_ROW_LOCKS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/base/thread_annotations.h"

namespace recsync {

// Spreads rows evenly; the high bits are the good ones.
inline uint32_t RowHash(int64_t row) {
  return static_cast<uint32_t>(
      (static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ull) >> 32);
}

class ABSL_LOCKABLE SpinLock {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    while (held_.exchange(true, std::memory_order_acquire)) {
      // The holder may have lost its core: with fewer cores than threads,
      // spinning on would keep it from ending.
      int spins = 0;
      while (held_.load(std::memory_order_relaxed)) {
        if (++spins == 256) {
          std::this_thread::yield();
          spins = 0;
        }
      }
    }
  }
  // Whether it is the caller's now; does not block.
  bool TryLock() ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(true) {
    return !held_.exchange(true, std::memory_order_acquire);
  }
  void Unlock() ABSL_UNLOCK_FUNCTION() {
    held_.store(false, std::memory_order_release);
  }

 private:
  std::atomic<bool> held_{false};
};

class RowLocks {
 public:
  static RowLocks& Global() {
    static RowLocks locks;
    return locks;
  }

  // The lock of a row of `table`, any address that stands for the table.
  SpinLock& Of(const void* table, int64_t row) {
    const uint32_t salt =
        RowHash(static_cast<int64_t>(reinterpret_cast<uintptr_t>(table) >> 4));
    return locks_[(RowHash(row) ^ salt) >> (32 - kBits)];
  }

 private:
  static constexpr int kBits = 14;
  std::array<SpinLock, 1 << kBits> locks_;
};

class ABSL_SCOPED_LOCKABLE RowLock {
 public:
  explicit RowLock(SpinLock* lock) ABSL_EXCLUSIVE_LOCK_FUNCTION(lock)
      : lock_(lock) {
    lock_->Lock();
  }
  ~RowLock() ABSL_UNLOCK_FUNCTION() { lock_->Unlock(); }
  RowLock(const RowLock&) = delete;
  RowLock& operator=(const RowLock&) = delete;

 private:
  SpinLock* const lock_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_LOCKS_H_
