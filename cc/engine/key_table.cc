#include "cc/engine/key_table.h"

#include <cstring>
#include <limits>
#include <utility>

#include "cc/engine/mutex.h"

namespace recsync {
namespace {

bool IsPowerOfTwo(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

int Log2(int64_t power) {
  return 63 - __builtin_clzll(static_cast<uint64_t>(power));
}

// The least power of two that is at least n, which is positive.
int64_t PowerOfTwoFrom(int64_t n) {
  return n == 1 ? 1 : int64_t{2} << Log2(n - 1);
}

// In which the index of a table is built. Building is rare, so tables may share
// one.
Mutex& BuildMutex(const void* index) {
  static std::array<Mutex, 16> mutexes;
  const auto address = reinterpret_cast<uintptr_t>(index);
  return mutexes[RowHash(static_cast<int64_t>(address >> 6)) % mutexes.size()];
}

}  // namespace

KeyTable::Layout::Layout(int64_t rows, const KeyOptions& options)
    : partitions(options.partitions / options.shards),
      partition_bits(Log2(partitions)),
      shard_bits(Log2(options.shards)) {
  const int64_t most = (rows + partitions - 1) / partitions;
  row_mask = static_cast<uint32_t>(PowerOfTwoFrom(most) - 1);
  segment = (1 + 2 * most + kLine - 1) / kLine * kLine;
  slots = segment - 1;
  width = options.min_count == 1
              ? 0
              : std::max<int64_t>(PowerOfTwoFrom(4 * most), 16);
  sketch_segment = width == 0 ? 0 : kCacheLine + 4 * width;
}

Result KeyTable::Check(int64_t rows, const KeyOptions& options) {
  if (!IsPowerOfTwo(options.partitions) ||
      options.partitions > kMostPartitions) {
    return Result::Error("partitions is ", options.partitions,
                         "; it must be a power of two from 1 to ",
                         kMostPartitions);
  }
  if (!IsPowerOfTwo(options.shards) || options.shards > options.partitions) {
    return Result::Error("shards is ", options.shards,
                         "; it must be a power of two from 1 to partitions, ",
                         options.partitions);
  }
  if (options.shard < 0 || options.shard >= options.shards) {
    return Result::Error("shard is ", options.shard,
                         "; it must be from 0 to shards - 1, ",
                         options.shards - 1);
  }
  if (options.eviction != KeyOptions::Eviction::kLeastRecent &&
      options.eviction != KeyOptions::Eviction::kLeastFrequent) {
    return Result::Error("eviction is ", static_cast<int>(options.eviction),
                         "; it must be kLeastRecent or kLeastFrequent");
  }
  if (options.half_life < 0) {
    return Result::Error("half_life is ", options.half_life,
                         "; it must be 0 or more ticks");
  }
  if (options.max_idle < 0) {
    return Result::Error("max_idle is ", options.max_idle,
                         "; it must be 0 or more ticks");
  }
  if (options.min_count < 1 || options.min_count > 255) {
    return Result::Error("min_count is ", options.min_count,
                         "; it must be from 1 to 255");
  }
  if (!(options.probability > 0.0) || options.probability > 1.0) {
    return Result::Error("probability is ", options.probability,
                         "; it must be above 0 and at most 1");
  }
  const int64_t partitions = options.partitions / options.shards;
  if (rows < 2 * partitions || rows > kMostPartitionRows * partitions) {
    return Result::Error("rows is ", rows, "; it must be from ", 2 * partitions,
                         " to ", kMostPartitionRows * partitions, " with ",
                         partitions, " partitions in this shard");
  }
  return Result::Ok();
}

int64_t KeyTable::IndexSize(int64_t rows, const KeyOptions& options) {
  const Layout layout(rows, options);
  return kLine + layout.partitions * layout.segment;
}

int64_t KeyTable::SketchSize(int64_t rows, const KeyOptions& options) {
  const Layout layout(rows, options);
  return layout.partitions * layout.sketch_segment;
}

KeyTable::KeyTable(const KeyOptions& options, const KeyView& view)
    : options_(options), view_(view), layout_(view.rows, options) {}

KeyTable::Lock::Lock(const KeyTable& table)
    : locks_(All()),
      salt_(RowHash(static_cast<int64_t>(
          reinterpret_cast<uintptr_t>(table.view_.index) >> 4))) {}

KeyTable::Lock::Padded* KeyTable::Lock::All() {
  static std::array<Padded, kLocks> locks;
  return locks.data();
}

bool KeyTable::HasLives() const {
  // The first row's version is set last.
  return view_.versions == nullptr ||
         LifeOf(__atomic_load_n(view_.versions, __ATOMIC_ACQUIRE)) ==
             LifeOf(kVersionOfUnknown);
}

void KeyTable::Prepare() {
  uint32_t* const built = view_.index;
  if (__atomic_load_n(built, __ATOMIC_ACQUIRE) != 0 && HasLives()) return;
  MutexLock lock(&BuildMutex(view_.index));
  const bool is_new = Load(built) == 0;
  if (is_new) BuildIndex();
  if (view_.versions != nullptr && (is_new || !HasLives())) BeginLives();
  __atomic_store_n(built, uint32_t{1}, __ATOMIC_RELEASE);
}

void KeyTable::BeginLives() {
  // Keys may have been read from a file without versions.
  for (int64_t row = view_.rows - 1; row >= layout_.partitions; --row) {
    if (UsageOf(row) != 0 && LifeOf(VersionOf(row)) == 0) {
      Store(FirstOfNextLife(0), view_.versions + row);
    }
  }
  for (int64_t row = layout_.partitions - 1; row >= 0; --row) {
    if (LifeOf(VersionOf(row)) != LifeOf(kVersionOfUnknown)) {
      __atomic_store_n(view_.versions + row, kVersionOfUnknown,
                       __ATOMIC_RELEASE);
    }
  }
}

void KeyTable::BuildIndex() {
  // Of rows, as most slots are not in the cache.
  constexpr int64_t kRowsAhead = 16;
  for (int64_t partition = 0; partition < layout_.partitions; ++partition) {
    for (int64_t i = 0; i < layout_.segment; ++i) {
      Store(uint32_t{0}, NextFree(partition) + i);
    }
  }
  int64_t last_tick = 0;
  for (int64_t row = 0; row < view_.rows; ++row) {
    if (row + kRowsAhead < view_.rows) {
      FetchSlots(KeyHash(KeyOf(row + kRowsAhead)));
    }
    const int64_t partition = row & (layout_.partitions - 1);
    const uint64_t usage = UsageOf(row);
    const int64_t key = KeyOf(row);
    const uint64_t hash = KeyHash(key);
    if (row != partition && usage != 0 && IsOwn(hash) &&
        PartitionOf(hash) == partition &&
        FindSlot(partition, key, hash) == kNoSlot) {
      Link(partition, row, hash);
      last_tick = std::max(last_tick, TickOf(usage));
      continue;
    }
    Store(int64_t{0}, view_.entries + 2 * row);
    Store(int64_t{0}, view_.entries + 2 * row + 1);
    if (row != partition && Load(NextFree(partition)) == 0) {
      Store(static_cast<uint32_t>(row >> layout_.partition_bits),
            NextFree(partition));
    }
  }
  for (int64_t partition = 0; partition < layout_.partitions; ++partition) {
    if (Load(NextFree(partition)) != 0) continue;
    Store(static_cast<uint32_t>(RowsOf(partition)), NextFree(partition));
  }
  // Time goes on where it was when the entries were written.
  Store(last_tick, view_.counts + kTick);
}

int64_t KeyTable::NextTick(int64_t now_at_least) {
  Prepare();
  int64_t* const now = view_.counts + kTick;
  int64_t before = Load(now);
  int64_t next;
  do {
    const int64_t last = std::clamp<int64_t>(before, 0, kMostTicks);
    // Far ahead of the clock, a tick begins only while the last one and the
    // clock's are both even or both odd: once in a tick of the clock, and for
    // every other call if the clock was set back and calls are rare.
    const bool waits = now_at_least > 0 && last >= now_at_least + kMostLead &&
                       (last - now_at_least) % 2 != 0;
    next = std::max(last + (waits ? 0 : 1), now_at_least);
    next = std::min(next, kMostTicks);
  } while (!__atomic_compare_exchange_n(now, &before, next, /*weak=*/true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return next;
}

void KeyTable::Own(int64_t row, int64_t key, int64_t tick) {
  Store(key, view_.entries + 2 * row);
  SetUsage(row, RightTick(tick), 1);
  if (view_.versions == nullptr) return;
  const int64_t next = FirstOfNextLife(Load(view_.versions + row));
  const bool is_right = next > 0 && next < kVersionOfUnknown;
  Store(is_right ? next : FirstOfNextLife(0), view_.versions + row);
}

void KeyTable::Find(const int64_t* keys, int64_t n, int64_t* rows,
                    int64_t* versions, int64_t now, bool counts) {
  Prepare();
  const int64_t tick = Now(now);
  Tally tally{};
  ForEach(keys, n, [&](int64_t i, uint64_t hash, int64_t partition) {
    // Keys of other shards are in no index here.
    const int64_t slot =
        IsOwn(hash) ? FindSlot(partition, keys[i], hash) : kNoSlot;
    int64_t row = partition;
    if (slot != kNoSlot) {
      const int64_t found = RowInSlot(partition, slot);
      if (!IsExpired(UsageOf(found), tick)) row = found;
    }
    if (row == partition) ++tally[kUnknown];
    rows[i] = row;
    if (versions != nullptr) {
      versions[i] = row == partition ? 0 : VersionOf(row);
    }
  });
  if (counts) AddToCounts(tally);
}

int64_t KeyTable::Used() const {
  int64_t used = 0;
  for (int64_t row = 0; row < view_.rows; ++row) used += UsageOf(row) != 0;
  return used;
}

int64_t KeyTable::UseOrTake(int64_t partition, int64_t key, uint64_t hash,
                            int64_t tick, bool* is_new, Tally* tally) {
  *is_new = false;
  if (!IsOwn(hash)) {
    ++(*tally)[kRefused];
    return partition;
  }
  const int64_t slot = FindSlot(partition, key, hash);
  int64_t row = -1;
  if (slot != kNoSlot) {
    row = RowInSlot(partition, slot);
    const uint64_t usage = UsageOf(row);
    if (!IsExpired(usage, tick)) {
      SetUsage(row, std::max(tick, TickOf(usage)),
               std::min(UsesAt(usage, tick) + 1, kMostUses));
      return row;
    }
    // Each key expires once, however often it is looked up then.
    if (UsesOf(usage) != 0) {
      ++(*tally)[kExpired];
      SetUsage(row, TickOf(usage), 0);
    }
  }
  if (IsAdmitted(partition, hash, tick)) {
    if (slot != kNoSlot) {
      Unlink(partition, slot);
    } else {
      row = TakeRow(partition, hash, tick, tally);
    }
    if (row >= 0) {
      ++(*tally)[kAdmitted];
      *is_new = true;
      return row;
    }
  }
  ++(*tally)[kRefused];
  return partition;
}

int64_t KeyTable::TakeRow(int64_t partition, uint64_t hash, int64_t tick,
                          Tally* tally) {
  uint32_t* const next_free = NextFree(partition);
  const int64_t rows = RowsOf(partition);
  int64_t number = std::max<int64_t>(Load(next_free), 1);
  while (number < rows && UsageOf(RowAt(partition, number)) != 0) ++number;
  if (number < rows) {
    Store(static_cast<uint32_t>(number + 1), next_free);
    return RowAt(partition, number);
  }
  Store(static_cast<uint32_t>(rows), next_free);
  const int64_t row = LeastUseful(partition, hash, tick);
  if (row < 0) return -1;
  const int64_t key = KeyOf(row);
  const int64_t slot = FindSlot(partition, key, KeyHash(key));
  if (slot != kNoSlot) Unlink(partition, slot);
  ++(*tally)[kEvicted];
  return row;
}

int64_t KeyTable::LeastUseful(int64_t partition, uint64_t hash,
                              int64_t tick) const {
  std::array<int64_t, kSample> sample;
  const int64_t candidates = RowsOf(partition) - 1;
  const int64_t size = std::min(candidates, kSample);
  const uint64_t seed = hash + static_cast<uint64_t>(tick) * 0x9E3779B97F4A7C15;
  for (int64_t i = 0; i < size; ++i) {
    int64_t number = i;
    if (candidates > kSample) {
      const uint64_t random = KeyHash(static_cast<int64_t>(
          seed + static_cast<uint64_t>(i + 1) * 0xD1B54A32D192ED03));
      number = static_cast<int64_t>(
          ((random >> 32) * static_cast<uint64_t>(candidates)) >> 32);
    }
    sample[i] = RowAt(partition, 1 + number);
    Prefetch(view_.entries + 2 * sample[i], 1);
  }
  int64_t least = -1;
  // Whether it is not expired, its uses if they matter, and its last tick.
  std::pair<bool, uint64_t> use_of_least;
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t usage = UsageOf(sample[i]);
    if (TickOf(usage) >= tick) continue;
    uint64_t use = static_cast<uint64_t>(TickOf(usage));
    if (options_.eviction == KeyOptions::Eviction::kLeastFrequent) {
      use |= static_cast<uint64_t>(UsesAt(usage, tick)) << (64 - kUsesBits);
    }
    const std::pair<bool, uint64_t> use_of_row(!IsExpired(usage, tick), use);
    if (least < 0 || use_of_row < use_of_least) {
      least = sample[i];
      use_of_least = use_of_row;
    }
  }
  return least;
}

int64_t KeyTable::UsesAt(uint64_t usage, int64_t tick) const {
  const int64_t uses = UsesOf(usage);
  if (options_.eviction != KeyOptions::Eviction::kLeastFrequent ||
      options_.half_life == 0) {
    return uses;
  }
  const int64_t idle = std::max<int64_t>(tick - TickOf(usage), 0);
  return uses >> std::min<int64_t>(idle / options_.half_life, 32);
}

bool KeyTable::IsAdmitted(int64_t partition, uint64_t hash, int64_t tick) {
  if (layout_.width > 0 && CountLookup(partition, hash) < options_.min_count) {
    return false;
  }
  if (options_.probability >= 1.0) return true;
  const uint64_t random = KeyHash(static_cast<int64_t>(
      hash ^ (static_cast<uint64_t>(tick) * 0x9E3779B97F4A7C15)));
  return static_cast<double>(random >> 11) * 0x1p-53 < options_.probability;
}

int64_t KeyTable::CountLookup(int64_t partition, uint64_t hash) {
  uint8_t* const segment = view_.sketch + partition * layout_.sketch_segment;
  uint8_t* const counters = segment + kCacheLine;
  // Other bits than those that lead to a slot.
  const uint64_t bits = KeyHash(static_cast<int64_t>(~hash));
  constexpr int64_t kPerArray = 16;  // counters of an array in a line
  const int64_t lines = layout_.width / kPerArray;
  uint8_t* const line =
      counters +
      kCacheLine *
          static_cast<int64_t>((bits >> 32) & static_cast<uint64_t>(lines - 1));
  std::array<uint8_t*, 4> own;
  uint8_t least = std::numeric_limits<uint8_t>::max();
  for (size_t i = 0; i < own.size(); ++i) {
    own[i] = line + kPerArray * i + (bits >> (4 * i)) % kPerArray;
    least = std::min(least, *own[i]);
  }
  if (least < std::numeric_limits<uint8_t>::max()) {
    for (uint8_t* counter : own) {
      if (*counter == least) ++*counter;
    }
    ++least;
  }
  int64_t added;
  std::memcpy(&added, segment, sizeof(added));
  ++added;
  if (added < 0 || added >= layout_.width) {
    for (int64_t i = 0; i < 4 * layout_.width; ++i) counters[i] >>= 1;
    added = 0;
  }
  std::memcpy(segment, &added, sizeof(added));
  return least;
}

void KeyTable::Link(int64_t partition, int64_t row, uint64_t hash) {
  uint32_t* const slots = Slots(partition);
  int64_t slot = HomeOf(hash);
  // There are more slots than rows.
  for (int64_t probes = 0; probes < layout_.slots; ++probes) {
    if (Load(slots + slot) == 0) {
      const auto number = static_cast<uint32_t>(row >> layout_.partition_bits);
      Store(TagOf(hash) | number, slots + slot);
      return;
    }
    slot = NextSlot(slot);
  }
}

void KeyTable::Unlink(int64_t partition, int64_t slot) {
  uint32_t* const slots = Slots(partition);
  const auto steps = [this](int64_t from, int64_t to) {
    return to >= from ? to - from : to - from + layout_.slots;
  };
  // Those behind it that are reached by way of it move up.
  int64_t other = NextSlot(slot);
  for (int64_t probes = 0; probes < layout_.slots; ++probes) {
    const uint32_t word = Load(slots + other);
    if (word == 0) break;
    const int64_t home = HomeOf(KeyHash(KeyOf(RowOfWord(partition, word))));
    if (steps(home, other) >= steps(slot, other)) {
      Store(word, slots + slot);
      slot = other;
    }
    other = NextSlot(other);
  }
  Store(uint32_t{0}, slots + slot);
}

void KeyTable::AddToCounts(const Tally& tally) {
  for (int i = kAdmitted; i < kKeyCounts; ++i) {
    if (tally[i] == 0) continue;
    __atomic_fetch_add(view_.counts + i, tally[i], __ATOMIC_RELAXED);
  }
}

}  // namespace recsync
