// Which row of an embedding table belongs to which key, for tables whose ids
// are any int64: finds the rows of keys, gives rows to new keys, and takes them
// from the keys that are of least use when there are no more.
//
//   KeyTable table(options, view);
//   const int64_t tick = table.NextTick();  // of a batch
//   table.FindOrInsert(keys, n, tick, rows, versions,
//                      [&](int64_t row, int64_t key) {
//     RowLock lock(&RowLocks::Global().Of(values, row));
//     /* write the first values of the key's row */
//     table.Own(row, key, tick);
//   });
//
// All that is known lies in arrays beside the table (KeyView), so that it can
// be a variable's value, saved and moved with the rows. A KeyTable is a view of
// them, cheap to make: each call of an op makes its own.
//
// Partitions. The keys of the whole table are spread over its partitions by
// PartitionOfKey, and partition p owns the table's rows r with
// r % partitions == p. Shard s of S has the rows with r % S == s, at its row
// r / S. So it has the partitions p with p % S == s, and of its
// L = partitions / S partitions number q = p / S has its rows q, q + L, ...:
// whatever the number of shards is, a partition keeps its rows. The first row
// of a partition is reserved: it is the row of those of its keys that have
// none. Its entry stays 0, and it is never given to a key.
//
// Which rows lookups read and write meanwhile. A row's entry, its version and
// its values change together, under its row lock, when it is given to a key
// (Own); so who copies a row under its lock sees them as of one moment. The
// usage of an entry alone also changes without the row's lock, each time that
// its key is looked up in training. Words that somebody may read without a
// partition's lock are read and written by relaxed atomic operations.
//
// The index of a partition is a hash table with linear probing and without
// tombstones, at most half full. A slot has a part of the key's hash beside the
// row's number, so that nearly only the entry of the key itself is read.
//
// Admission. With `min_count` above 1 a count-min sketch with conservative
// update counts the lookups of keys that have no row. Of each partition it has
// four arrays of `width` counters, the least power of two that is at least 4
// times its rows and 16; the four counters of a key lie in one cache line.
// After `width` such lookups all counters of the partition are halved. Up to
// then no count is too low, and few are too high, the most where all keys
// differ: just before the halving that of a key that was never seen is 1
// instead of 0 with a probability of 0.18, 2 or more with 0.0002. Halving is
// also what makes lookups long ago count less.
//
// Eviction. When a partition has no free row, the one of least use of 32 that
// are picked pseudo-randomly is taken: an expired one if there is any, else
// that whose key was looked up least recently, or least often. Rows that were
// looked up in the same tick are spared; if there are none but such, the new
// key is refused.
//
// Thread safe, but for who sets the arrays. A partition has a spin lock, in an
// array apart from RowLocks, within which `give` may take row locks; nobody may
// take it the other way round, or call a KeyTable from within `give`, but for
// Own.

#ifndef TF_RECSYNC_CC_ENGINE_KEY_TABLE_H_
#define TF_RECSYNC_CC_ENGINE_KEY_TABLE_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "cc/engine/key_hash.h"
#include "cc/engine/prefetch.h"
#include "cc/engine/result.h"
#include "cc/engine/row_lives.h"
#include "cc/engine/row_locks.h"

namespace recsync {

struct KeyOptions {
  enum class Eviction { kLeastRecent, kLeastFrequent };
  int64_t partitions = 1;  // of the whole table, a power of two
  int64_t shard = 0;       // which shard of the table this is
  int64_t shards = 1;      // a power of two, at most `partitions`
  Eviction eviction = Eviction::kLeastRecent;
  // With kLeastFrequent: ticks without use after which a row's uses count half;
  // 0: they always count.
  int64_t half_life = 0;
  // Ticks without use after which a key is as if it had never been there; 0:
  // for ever.
  int64_t max_idle = 0;
  // How often a key must have shown up (counted by the sketch) to be admitted,
  // 1..255.
  int64_t min_count = 1;
  // With which probability one is then, at each call, above 0.
  double probability = 1.0;
};

// What `counts` has, by index.
enum KeyCount {
  kTick = 0,  // how many calls of FindOrInsert there were
  kAdmitted,  // keys that were given a row
  kRefused,  // lookups in training of keys that were not admitted, or for which
             // no row could be freed
  kEvicted,  // keys whose row was given to another one
  kExpired,  // keys that were looked up in training after more than max_idle
  kUnknown,  // lookups by Find of keys that are not there
  kKeyCounts = 8
};

// What lies beside a table; nothing is owned.
struct KeyView {
  // [rows, 2]: a row's key, and its usage: (last tick << 24) | uses, 0 if the
  // row has no key. (Uses are 0 of a key that was found expired and not
  // admitted again.)
  int64_t* entries = nullptr;
  int64_t rows = 0;  // of this shard
  // [IndexSize(rows, options)]; all zero: not built yet.
  uint32_t* index = nullptr;
  // [SketchSize(rows, options)], zeros at first; null if min_count is 1.
  uint8_t* sketch = nullptr;
  int64_t* counts = nullptr;    // [kKeyCounts]
  int64_t* versions = nullptr;  // [rows], or null
};

class KeyTable {
 public:
  // Ticks, and uses of a row, are counted up to this number.
  static constexpr int kUsesBits = 24;
  static constexpr int64_t kMostUses = (int64_t{1} << kUsesBits) - 1;
  static constexpr int64_t kMostTicks = (int64_t{1} << (64 - kUsesBits)) - 1;
  // By which ticks may be ahead of the time that they stand for.
  static constexpr int64_t kMostLead = 1024;
  // Rows of one partition in one shard.
  static constexpr int64_t kMostPartitionRows = int64_t{1} << 28;
  static constexpr int64_t kMostPartitions = int64_t{1} << 20;
  // Rows among which the one of least use is looked for.
  static constexpr int64_t kSample = 32;

  // What is wrong with them, if anything. All else is for what it found right.
  static Result Check(int64_t rows, const KeyOptions& options);
  static int64_t IndexSize(int64_t rows, const KeyOptions& options);
  // 0 with min_count 1.
  static int64_t SketchSize(int64_t rows, const KeyOptions& options);

  KeyTable(const KeyOptions& options, const KeyView& view);

  // Builds the index from the entries where that has not been done. Any thread
  // may call it, and all calls below do; others' calls for the same table block
  // until it is done. Frees rows whose entries can't be: those of keys of other
  // partitions, of reserved rows, and all but the first of a key that is there
  // twice. Sets counts[kTick] to the largest tick of the entries. Has the
  // versions of reserved rows be those of kVersionOfUnknown's life, and rows
  // that have keys be in a life.
  void Prepare();

  // Begins a call of FindOrInsert, returns its tick: 1 for the first, and then
  // one more than the last. Where ticks stand for time, `now` is the least that
  // it may be. From kMostLead ahead of it on, calls share ticks, so that there
  // are no more of them than `now` goes through.
  int64_t NextTick(int64_t now = 0);

  // Gives for each key its row, and the row's version at that moment (0 for
  // rows of unknown keys, and without versions in the view; nothing is written
  // if `versions` is null). A key without a row gets one if it is admitted: a
  // free one, or one that is taken from another key. `give(row, key)` is
  // called, before anybody can find the row, for each row that is given to a
  // key. It may not throw, and under the row's lock it must call Own once.
  //
  // Several threads may call it for parts of one call's keys, with the same
  // tick. Keys of other shards have no row here.
  template <typename Give>
  void FindOrInsert(const int64_t* keys, int64_t n, int64_t tick, int64_t* rows,
                    int64_t* versions, const Give& give);

  // Writes the entry of a row that is given to a key, and begins the row's next
  // life. For `give` alone.
  void Own(int64_t row, int64_t key, int64_t tick);

  // The same without inserting, counting uses or the sketch. Keys without a row
  // are counted as unknown, unless `counts` is false.
  void Find(const int64_t* keys, int64_t n, int64_t* rows, int64_t* versions,
            int64_t now = 0, bool counts = true);

  // How many rows have a key. Goes through all entries.
  int64_t Used() const;

  // The tick of calls that do not insert: that of the last one that did, or
  // `now` if that is later.
  int64_t Now(int64_t now) const {
    return RightTick(std::max(now, Load(view_.counts + kTick)));
  }

  int64_t rows() const { return view_.rows; }
  // How many rows are reserved: the first ones.
  int64_t reserved() const { return layout_.partitions; }

  // Whether a row has a key, which has not expired by `tick`.
  bool HasKey(int64_t row, int64_t tick) const {
    const uint64_t usage = UsageOf(row);
    return usage != 0 && !IsExpired(usage, tick);
  }

  // Raises the version of a reserved row whose value has changed. Lock: the
  // row's. After Prepare.
  void RaiseReserved(int64_t row) const {
    if (view_.versions == nullptr) return;
    Store(VersionOf(row) + 1, view_.versions + row);
  }

 private:
  // How the arrays are divided. The index has a line for the whole table, whose
  // first word has the marks, and a segment for each partition: a word with the
  // first of its rows that may be free, and the slots. The sketch has a segment
  // for each partition: a line whose first 8 bytes count what was added since
  // the last halving, and the counters.
  struct Layout {
    Layout(int64_t rows, const KeyOptions& options);

    int64_t partitions;  // of the shard
    int partition_bits;
    int shard_bits;
    int64_t segment;    // words of the index
    int64_t slots;      // of these
    uint32_t row_mask;  // the bits of a slot that are a row's number
    int64_t width;      // of the sketch, 0 without
    int64_t sketch_segment;
  };

  // The counts of one call.
  using Tally = std::array<int64_t, kKeyCounts>;

  // Whether the versions are those of lives.
  bool HasLives() const;
  void BeginLives();

  // Locks one partition at a time.
  class Lock;

  static constexpr int64_t kLine = kCacheLine / sizeof(uint32_t);
  static constexpr int64_t kNoSlot = -1;
  // How many keys ahead are fetched, first their slots and then their entries.
  static constexpr int64_t kAhead = 12;
  // For how many keys in a row a lock is kept at most.
  static constexpr int64_t kMostLocked = 32;

  template <typename T>
  static T Load(const T* from) {
    return __atomic_load_n(from, __ATOMIC_RELAXED);
  }
  template <typename T>
  static void Store(T value, T* to) {
    __atomic_store_n(to, value, __ATOMIC_RELAXED);
  }

  int64_t KeyOf(int64_t row) const { return Load(view_.entries + 2 * row); }
  uint64_t UsageOf(int64_t row) const {
    return static_cast<uint64_t>(Load(view_.entries + 2 * row + 1));
  }
  void SetUsage(int64_t row, int64_t tick, int64_t uses) {
    Store(static_cast<int64_t>(static_cast<uint64_t>(tick) << kUsesBits |
                               static_cast<uint64_t>(uses)),
          view_.entries + 2 * row + 1);
  }
  int64_t VersionOf(int64_t row) const {
    return view_.versions == nullptr ? 0 : Load(view_.versions + row);
  }
  static int64_t TickOf(uint64_t usage) {
    return static_cast<int64_t>(usage >> kUsesBits);
  }
  static int64_t UsesOf(uint64_t usage) {
    return static_cast<int64_t>(usage & kMostUses);
  }
  static int64_t RightTick(int64_t tick) {
    return std::clamp<int64_t>(tick, 1, kMostTicks);
  }
  bool IsExpired(uint64_t usage, int64_t tick) const {
    return options_.max_idle > 0 && tick - TickOf(usage) > options_.max_idle;
  }

  // The number within the shard of the partition of a hash, also if it is the
  // partition of that number of another shard.
  int64_t PartitionOf(uint64_t hash) const {
    return static_cast<int64_t>(
               hash & static_cast<uint64_t>(options_.partitions - 1)) >>
           layout_.shard_bits;
  }
  bool IsOwn(uint64_t hash) const {
    return static_cast<int64_t>(hash &
                                static_cast<uint64_t>(options_.shards - 1)) ==
           options_.shard;
  }
  // The rows of a partition are numbered from its reserved row, 0.
  int64_t RowsOf(int64_t partition) const {
    return (view_.rows - partition + layout_.partitions - 1) >>
           layout_.partition_bits;
  }
  int64_t RowAt(int64_t partition, int64_t number) const {
    return partition + (number << layout_.partition_bits);
  }

  uint32_t* NextFree(int64_t partition) const {
    return view_.index + kLine + partition * layout_.segment;
  }
  uint32_t* Slots(int64_t partition) const { return NextFree(partition) + 1; }
  // Where a hash is looked for first.
  int64_t HomeOf(uint64_t hash) const {
    return static_cast<int64_t>(
        ((hash >> 32) * static_cast<uint64_t>(layout_.slots)) >> 32);
  }
  int64_t NextSlot(int64_t slot) const {
    return slot + 1 == layout_.slots ? 0 : slot + 1;
  }
  uint32_t TagOf(uint64_t hash) const {
    return static_cast<uint32_t>(hash) & ~layout_.row_mask;
  }
  bool HasTag(uint32_t word, uint64_t hash) const {
    return ((word ^ static_cast<uint32_t>(hash)) & ~layout_.row_mask) == 0;
  }
  // The row that a slot's word names. The index is nothing that others write,
  // but if they did, this would still be a row.
  int64_t RowOfWord(int64_t partition, uint32_t word) const {
    const int64_t number = word & layout_.row_mask;
    return RowAt(partition, number < RowsOf(partition) ? number : 0);
  }

  // The slot of a key, or kNoSlot. Lock: the partition's, as for all that has
  // one below.
  int64_t FindSlot(int64_t partition, int64_t key, uint64_t hash) const {
    const uint32_t* slots = Slots(partition);
    int64_t slot = HomeOf(hash);
    for (int64_t probes = 0; probes < layout_.slots; ++probes) {
      const uint32_t word = Load(slots + slot);
      if (word == 0) break;
      if (HasTag(word, hash) && KeyOf(RowOfWord(partition, word)) == key) {
        return slot;
      }
      slot = NextSlot(slot);
    }
    return kNoSlot;
  }
  int64_t RowInSlot(int64_t partition, int64_t slot) const {
    return RowOfWord(partition, Load(Slots(partition) + slot));
  }

  RECSYNC_PREFETCHING void FetchSlots(uint64_t hash) const {
    Prefetch(Slots(PartitionOf(hash)) + HomeOf(hash), 1);
  }
  RECSYNC_PREFETCHING void FetchEntry(uint64_t hash) const {
    const int64_t partition = PartitionOf(hash);
    const uint32_t* slots = Slots(partition);
    int64_t slot = HomeOf(hash);
    for (int64_t probes = 0; probes < kLine; ++probes) {
      const uint32_t word = Load(slots + slot);
      if (word == 0) return;
      if (HasTag(word, hash)) {
        const int64_t row = RowOfWord(partition, word);
        Prefetch(view_.entries + 2 * row, 1);
        if (view_.versions != nullptr) Prefetch(view_.versions + row, 1);
        return;
      }
      slot = NextSlot(slot);
    }
  }

  // Calls visit(position, hash, partition) for all keys in their order, under
  // the partition's lock.
  template <typename Visit>
  void ForEach(const int64_t* keys, int64_t n, const Visit& visit) const;

  // The row of a key in training. If *is_new, it is to be given to the key and
  // then linked; else it is the key's already, or the reserved one.
  int64_t UseOrTake(int64_t partition, int64_t key, uint64_t hash, int64_t tick,
                    bool* is_new, Tally* tally);
  // A row that has no key, or none any more; -1 if there is none.
  int64_t TakeRow(int64_t partition, uint64_t hash, int64_t tick, Tally* tally);
  // The row that is of least use, or -1.
  int64_t LeastUseful(int64_t partition, uint64_t hash, int64_t tick) const;
  // A row's uses as they count now.
  int64_t UsesAt(uint64_t usage, int64_t tick) const;
  // Whether a key without a row gets one: counts it.
  bool IsAdmitted(int64_t partition, uint64_t hash, int64_t tick);
  // Counts a lookup of a key that has no row, and returns how often it came.
  int64_t CountLookup(int64_t partition, uint64_t hash);

  void Link(int64_t partition, int64_t row, uint64_t hash);
  void Unlink(int64_t partition, int64_t slot);
  void BuildIndex();
  void AddToCounts(const Tally& tally);

  const KeyOptions options_;
  const KeyView view_;
  const Layout layout_;
};

class KeyTable::Lock {
 public:
  explicit Lock(const KeyTable& table);
  ~Lock() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (held_ != nullptr) held_->Unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void Take(int64_t partition) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Padded& wanted =
        locks_[(salt_ + static_cast<uint64_t>(partition)) % kLocks];
    if (&wanted.lock == held_ && ++keys_ < kMostLocked) return;
    if (held_ != nullptr) held_->Unlock();
    held_ = &wanted.lock;
    held_->Lock();
    keys_ = 0;
  }

 private:
  static constexpr uint64_t kLocks = 1024;
  struct alignas(kCacheLine) Padded {
    SpinLock lock;
  };
  // Of all tables of the process.
  static Padded* All();

  Padded* const locks_;
  const uint64_t salt_;
  SpinLock* held_ = nullptr;
  int64_t keys_ = 0;  // for how many it was kept
};

template <typename Visit>
void KeyTable::ForEach(const int64_t* keys, int64_t n,
                       const Visit& visit) const {
  constexpr int64_t kHashes = 32;
  static_assert(kHashes > 2 * kAhead && (kHashes & (kHashes - 1)) == 0);
  std::array<uint64_t, kHashes> hashes;  // by position, modulo their number
  Lock lock(*this);
  for (int64_t i = -2 * kAhead; i < n; ++i) {
    const int64_t far = i + 2 * kAhead, near = i + kAhead;
    if (far < n) {
      hashes[far % kHashes] = KeyHash(keys[far]);
      FetchSlots(hashes[far % kHashes]);
    }
    if (near >= 0 && near < n) FetchEntry(hashes[near % kHashes]);
    if (i < 0) continue;
    const uint64_t hash = hashes[i % kHashes];
    const int64_t partition = PartitionOf(hash);
    lock.Take(partition);
    visit(i, hash, partition);
  }
}

template <typename Give>
void KeyTable::FindOrInsert(const int64_t* keys, int64_t n, int64_t tick,
                            int64_t* rows, int64_t* versions,
                            const Give& give) {
  Prepare();
  tick = RightTick(tick);
  Tally tally{};
  ForEach(keys, n, [&](int64_t i, uint64_t hash, int64_t partition) {
    bool is_new = false;
    const int64_t row =
        UseOrTake(partition, keys[i], hash, tick, &is_new, &tally);
    if (is_new) {
      give(row, keys[i]);
      Link(partition, row, hash);
    }
    rows[i] = row;
    if (versions != nullptr) {
      versions[i] = row == partition ? 0 : VersionOf(row);
    }
  });
  AddToCounts(tally);
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_KEY_TABLE_H_
