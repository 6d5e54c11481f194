#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cc/engine/key_table.h"
#include "cc/engine/row_locks.h"
#include "cc/engine/simulation_length_testing.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr int kThreads = 16;
constexpr int64_t kWidth = 4;  // values of a row

// A keyed table whose rows have values that are made of their keys.
class Shared {
 public:
  Shared(int64_t rows, const KeyOptions& options)
      : options_(options),
        entries_(2 * rows, 0),
        index_(KeyTable::IndexSize(rows, options), 0),
        sketch_(KeyTable::SketchSize(rows, options), 0),
        counts_(kKeyCounts, 0),
        versions_(rows, 0),
        values_(kWidth * rows, 0) {}

  int64_t rows() const { return static_cast<int64_t>(versions_.size()); }
  const std::vector<int64_t>& counts() const { return counts_; }
  KeyTable Table() {
    KeyView view;
    view.entries = entries_.data();
    view.rows = rows();
    view.index = index_.data();
    view.sketch = sketch_.empty() ? nullptr : sketch_.data();
    view.counts = counts_.data();
    view.versions = versions_.data();
    return KeyTable(options_, view);
  }

  void Train(const std::vector<int64_t>& keys, int64_t tick,
             std::vector<int64_t>* rows, std::vector<int64_t>* versions) {
    KeyTable table = Table();
    rows->resize(keys.size());
    versions->resize(keys.size());
    table.FindOrInsert(keys.data(), static_cast<int64_t>(keys.size()), tick,
                       rows->data(), versions->data(),
                       [&](int64_t row, int64_t key) {
                         RowLock lock(LockOf(row));
                         for (int64_t i = 0; i < kWidth; ++i) {
                           values_[kWidth * row + i] = ValueOf(key, i);
                         }
                         table.Own(row, key, tick);
                         ++gifts_;
                       });
  }

  // What a copy has of a row.
  struct Copy {
    bool has_key = false;
    int64_t key = 0;
    int64_t version = 0;
    std::vector<int64_t> values;

    bool IsWhole() const {
      if (!has_key) return LifeOf(version) == 0 || version == kVersionOfUnknown;
      if (LifeOf(version) == 0) return false;
      for (int64_t i = 0; i < kWidth; ++i) {
        if (values[i] != ValueOf(key, i)) return false;
      }
      return true;
    }
  };
  Copy CopyOf(int64_t row) {
    Copy copy;
    RowLock lock(LockOf(row));
    copy.key = __atomic_load_n(&entries_[2 * row], __ATOMIC_RELAXED);
    copy.has_key =
        __atomic_load_n(&entries_[2 * row + 1], __ATOMIC_RELAXED) != 0;
    copy.version = __atomic_load_n(&versions_[row], __ATOMIC_RELAXED);
    copy.values.assign(values_.begin() + kWidth * row,
                       values_.begin() + kWidth * (row + 1));
    return copy;
  }

  // As a push does with a row that was pulled.
  void Update(int64_t row) {
    RowLock lock(LockOf(row));
    const int64_t version =
        __atomic_load_n(&versions_[row], __ATOMIC_RELAXED) + 1;
    __atomic_store_n(&versions_[row], version, __ATOMIC_RELAXED);
  }

  void ForgetIndex() { std::fill(index_.begin(), index_.end(), 0); }

  int64_t gifts() const { return gifts_; }
  int64_t lives() const {
    int64_t lives = 0;
    for (const int64_t version : versions_) {
      if (version != kVersionOfUnknown) lives += LifeOf(version);
    }
    return lives;
  }

 private:
  static int64_t ValueOf(int64_t key, int64_t i) { return key * 31 + i; }
  SpinLock* LockOf(int64_t row) {
    return &RowLocks::Global().Of(values_.data(), row);
  }

  const KeyOptions options_;
  std::vector<int64_t> entries_;
  std::vector<uint32_t> index_;
  std::vector<uint8_t> sketch_;
  std::vector<int64_t> counts_;
  std::vector<int64_t> versions_;
  std::vector<int64_t> values_;
  std::atomic<int64_t> gifts_{0};
};

template <typename Body>
void InThreads(const Body& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(body, t);
  for (std::thread& thread : threads) thread.join();
}

TEST(KeyTableThreadsTest, ACopiedRowHasValuesAndLifeOfItsKey) {
  for (const int64_t min_count : {1, 2}) {
    KeyOptions options;
    options.partitions = 4;
    options.min_count = min_count;
    options.max_idle = 50;
    Shared shared(200, options);
    std::atomic<int> running{kThreads};
    std::atomic<int64_t> torn{0}, wrong{0}, backwards{0}, refused{0};
    std::thread copier([&] {
      std::vector<int64_t> seen(shared.rows(), 0);
      // Once more when all have ended.
      for (bool last = false; !last;) {
        last = running == 0;
        for (int64_t row = 0; row < shared.rows(); ++row) {
          const Shared::Copy copy = shared.CopyOf(row);
          torn += !copy.IsWhole();
          backwards += copy.version < seen[row];
          seen[row] = copy.version;
        }
        std::this_thread::yield();
      }
    });
    const int64_t calls = SimulationLength(20000);
    InThreads([&](int t) {
      std::mt19937_64 random(t);
      std::vector<int64_t> rows, versions;
      for (int64_t call = 0; call < 30 + calls / kThreads; ++call) {
        std::vector<int64_t> keys;
        for (int i = 0; i < 20; ++i) {
          keys.push_back(static_cast<int64_t>(random() % 1000) - 500);
        }
        KeyTable table = shared.Table();
        if (call % 4 == 3) {
          rows.resize(keys.size());
          versions.resize(keys.size());
          table.Find(keys.data(), 20, rows.data(), versions.data());
        } else {
          shared.Train(keys, table.NextTick(), &rows, &versions);
        }
        for (int i = 0; i < 20; ++i) {
          if (rows[i] < options.partitions) {
            refused += call % 4 != 3;
            wrong += versions[i] != 0 ||
                     rows[i] != PartitionOfKey(keys[i], options.partitions);
            continue;
          }
          // Unless it is in another life by now, it is the key's.
          const Shared::Copy copy = shared.CopyOf(rows[i]);
          const bool is_same = LifeOf(copy.version) == LifeOf(versions[i]);
          wrong += LifeOf(copy.version) < LifeOf(versions[i]) ||
                   (is_same && copy.key != keys[i]);
          shared.Update(rows[i]);
        }
      }
      --running;
    });
    copier.join();
    EXPECT_EQ(torn, 0);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(backwards, 0);
    EXPECT_EQ(shared.counts()[kRefused], refused);
    EXPECT_EQ(shared.counts()[kAdmitted], shared.gifts());
    EXPECT_EQ(shared.lives(), shared.gifts());
    EXPECT_GT(shared.counts()[kEvicted], 0);
    EXPECT_EQ(shared.counts()[kTick],
              kThreads * (30 + calls / kThreads) -
                  kThreads * ((30 + calls / kThreads) / 4));
  }
}

TEST(KeyTableThreadsTest, PartsOfACallThatNameTheSameKeysGetTheSameRows) {
  KeyOptions options;
  options.partitions = 2;
  Shared shared(4096, options);
  const int64_t tick = shared.Table().NextTick();
  std::vector<std::vector<int64_t>> rows(kThreads), versions(kThreads);
  InThreads([&](int t) {
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < 500; ++i) keys.push_back((i + 37 * t) % 500);
    shared.Train(keys, tick, &rows[t], &versions[t]);
    // In the order of the keys.
    const auto shift = rows[t].end() - 37 * t % 500;
    std::vector<int64_t> sorted(shift, rows[t].end());
    sorted.insert(sorted.end(), rows[t].begin(), shift);
    rows[t] = sorted;
  });
  for (int t = 1; t < kThreads; ++t) EXPECT_EQ(rows[t], rows[0]);
  EXPECT_EQ(std::set<int64_t>(rows[0].begin(), rows[0].end()).size(), 500);
  EXPECT_EQ(shared.gifts(), 500);
  EXPECT_EQ(shared.Table().Used(), 500);
}

TEST(KeyTableThreadsTest, NobodyFindsAnythingInAnIndexThatIsBeingBuilt) {
  KeyOptions options;
  options.partitions = 2;
  // Building takes longer than threads take to get here.
  constexpr int64_t kRows = 1 << 18, kKeys = 6000;
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < kKeys; ++key) keys.push_back(key);
  Shared shared(kRows, options);
  std::vector<int64_t> expected, versions;
  shared.Train(keys, 1, &expected, &versions);
  for (int round = 0; round < 3; ++round) {
    shared.ForgetIndex();
    std::atomic<int64_t> wrong{0};
    std::atomic<int> there{0};
    InThreads([&](int t) {
      std::vector<int64_t> rows(kKeys);
      ++there;
      while (there < kThreads) std::this_thread::yield();
      if (t % 2 == 0) {
        shared.Table().Find(keys.data(), kKeys, rows.data(), nullptr);
      } else {
        std::vector<int64_t> found;
        shared.Train(keys, 2 + round, &rows, &found);
      }
      wrong += rows != expected;
    });
    EXPECT_EQ(wrong, 0);
  }
  EXPECT_EQ(shared.gifts(), kKeys);
}

}  // namespace
}  // namespace recsync
