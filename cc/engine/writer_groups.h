// Lets writers that keep out of each other's way (row by row) share an
// exclusive lock that was made for one: while a variable's own mutex keeps
// everybody else out, a group of pushes works on the variable at once.
//
//   bool leads = groups.Enter(key, [&] { mu.lock(); });
//   ...                                  // at the same time as other members
//   groups.Leave(key, leads, [&] { mu.unlock(); });
//
// The first writer to come leads the group: it takes the mutex, which may wait,
// before anybody joins, and gives it back after the last member has left. Who
// comes after the leader has finished waits for the next group, so that a group
// ends in about the time of two writers, however many come, and readers that
// wait for the mutex have their turn.
//
// Keys that one thread enters together must be entered in the same order by
// all, and left in the reverse order: then nobody waits in a circle.
//
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_WRITER_GROUPS_H_
#define TF_RECSYNC_CC_ENGINE_WRITER_GROUPS_H_

#include <array>
#include <cstdint>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"
#include "cc/engine/row_locks.h"

namespace recsync {

class WriterGroups {
 public:
  static WriterGroups& Global() {
    static WriterGroups groups;
    return groups;
  }

  // Blocks until the caller is a member of the group of `key`; true if it
  // leads, after calling `lock`.
  template <typename Lock>
  bool Enter(const void* key, Lock&& lock) {
    Shard& shard = ShardOf(key);
    {
      MutexLock guard(&shard.mu);
      if (JoinOrWait(&shard, key)) return false;
      shard.groups[key] = Group{State::kOpening, 1};
    }
    lock();
    MutexLock guard(&shard.mu);
    shard.groups[key].state = State::kOpen;
    shard.changed.SignalAll();
    return true;
  }

  // Becomes a member of the group if there is one, else returns false: for
  // those who can do without one.
  bool Join(const void* key) {
    Shard& shard = ShardOf(key);
    MutexLock guard(&shard.mu);
    return JoinOrWait(&shard, key);
  }

  // Ends the membership. The leader blocks until the others have left too, and
  // calls `unlock`, which must not block.
  template <typename Unlock>
  void Leave(const void* key, bool leads, Unlock&& unlock) {
    Shard& shard = ShardOf(key);
    MutexLock guard(&shard.mu);
    // References to elements outlive insertions of others.
    Group& group = shard.groups[key];
    --group.members;
    if (!leads) {
      if (group.members == 0) shard.changed.SignalAll();
      return;
    }
    group.state = State::kClosing;
    while (group.members > 0) shard.changed.Wait(&shard.mu);
    unlock();
    shard.groups.erase(key);
    shard.changed.SignalAll();
  }

 private:
  enum class State { kOpening, kOpen, kClosing };
  struct Group {
    State state;
    int64_t members;
  };
  struct Shard {
    Mutex mu;
    CondVar changed;
    std::unordered_map<const void*, Group> groups ABSL_GUARDED_BY(mu);
  };

  static bool JoinOrWait(Shard* shard, const void* key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard->mu) {
    for (;;) {
      const auto found = shard->groups.find(key);
      if (found == shard->groups.end()) return false;
      if (found->second.state == State::kOpen) {
        ++found->second.members;
        return true;
      }
      shard->changed.Wait(&shard->mu);
    }
  }

  Shard& ShardOf(const void* key) {
    const auto address = reinterpret_cast<uintptr_t>(key);
    return shards_[RowHash(static_cast<int64_t>(address >> 4)) >> (32 - 5)];
  }

  std::array<Shard, 32> shards_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_WRITER_GROUPS_H_
