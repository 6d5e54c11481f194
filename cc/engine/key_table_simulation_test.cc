// The table of keys against a model of its rules by brute force, in random
// calls on small tables.

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/engine/key_hash.h"
#include "cc/engine/key_table.h"
#include "cc/engine/key_table_testing.h"
#include "cc/engine/simulation_length_testing.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Eviction = KeyOptions::Eviction;

// A whole table, whatever its shards are: every row is one of a list, and every
// question is answered by looking at all of them. Where the rules leave a
// choice (which free row, which row of a sample, an early admission), it
// follows the table that is tried, and says whether that may choose so.
class Model {
 public:
  Model(int64_t rows, const KeyOptions& options)
      : options_(options), rows_(rows) {
    SetShards(1);
  }

  // All of a shard but its rows begins anew.
  void SetShards(int64_t shards) {
    shards_.assign(shards, Shard());
    for (int64_t s = 0; s < shards; ++s) SetEntries(s);
    partitions_.assign(options_.partitions, Partition());
    const int64_t in_shard = options_.partitions / shards;
    for (int64_t p = 0; p < options_.partitions; ++p) {
      const int64_t s = p % shards;
      const int64_t shard_rows = (rows() - s + shards - 1) / shards;
      const int64_t most = (shard_rows + in_shard - 1) / in_shard;
      int64_t width = 16;
      while (width < 4 * most) width *= 2;
      partitions_[p].width = width;
    }
  }

  // A shard's entries were set: its time is that of the latest one.
  void SetEntries(int64_t s) {
    Shard& shard = shards_[s];
    shard.tick = 0;
    for (int64_t r = s; r < rows(); r += shard_count()) {
      if (rows_[r].key) shard.tick = std::max(shard.tick, rows_[r].tick);
    }
  }

  void Update(int64_t row) {
    if (rows_[row].key) ++rows_[row].version;
  }

  void BeginCall(int64_t shard) { ++shards_[shard].tick; }

  // A lookup in training that gave `row`; `given` if that row was given to the
  // key. Says what is wrong with that, or nothing.
  const char* Train(int64_t s, int64_t key, int64_t row, int64_t version,
                    bool given) {
    Shard& shard = shards_[s];
    const int64_t p = PartitionOfKey(key, options_.partitions);
    const int64_t unknown = Reserved(s, p);
    if (p % shard_count() != s) {
      ++shard.counts[kRefused];
      return row == unknown && version == 0 && !given ? nullptr : "foreign";
    }
    const std::optional<int64_t> known = RowOf(key);
    if (known && !IsExpired(*known, s)) {
      if (row != *known || given) return "a known key has another row";
      Row& found = rows_[row];
      if (version != found.version) return "another version";
      found.uses = UsesNow(found, s) + 1;
      found.tick = shard.tick;
      return nullptr;
    }
    if (known && rows_[*known].uses > 0) {
      ++shard.counts[kExpired];
      rows_[*known].uses = 0;
    }
    const bool has_to = Counted(p, key) >= options_.min_count;
    if (!given) {
      ++shard.counts[kRefused];
      if (row != unknown || version != 0) return "a refused key has a row";
      if (!has_to) return nullptr;
      if (known) return "an expired key is refused";
      return CanRefuse(s, p) ? nullptr : "refused though there is a row";
    }
    if (options_.min_count == 1 && !has_to) return "admitted too early";
    ++shard.counts[kAdmitted];
    if (row < options_.partitions) return "a reserved row is given";
    if (row % options_.partitions != p) return "a row of another partition";
    if (known) {
      if (row != *known) return "an expired key gets another row";
    } else if (rows_[row].key) {
      if (HasFree(p)) return "evicted though there is a free row";
      if (rows_[row].tick >= shard.tick) return "evicted in its own tick";
      if (RowsOf(p).size() <= KeyTable::kSample) {
        for (const int64_t other : RowsOf(p)) {
          if (rows_[other].tick >= shard.tick) continue;
          if (Use(other, s) < Use(row, s)) return "another is of less use";
        }
      }
      ++shard.counts[kEvicted];
    }
    Row& taken = rows_[row];
    taken.key = key;
    taken.tick = shard.tick;
    taken.uses = 1;
    taken.version = (LifeOf(taken.version) + 1) * (int64_t{1} << kLifeBits);
    return version == taken.version ? nullptr : "not the next life";
  }

  const char* Find(int64_t s, int64_t key, int64_t row, int64_t version) {
    const int64_t p = PartitionOfKey(key, options_.partitions);
    const std::optional<int64_t> known = RowOf(key);
    if (p % shard_count() == s && known && !IsExpired(*known, s)) {
      return row == *known && version == rows_[row].version ? nullptr
                                                            : "not found";
    }
    ++shards_[s].counts[kUnknown];
    return row == Reserved(s, p) && version == 0 ? nullptr : "found";
  }

  // Whether a shard has what the model has.
  void ExpectEqual(int64_t s, const OwnedKeyTable& table) const {
    for (int64_t i = 0; i < table.rows(); ++i) {
      const int64_t r = i * shard_count() + s;
      const Row& row = rows_[r];
      ASSERT_EQ(table.has_key(i), row.key.has_value());
      if (r < options_.partitions) {
        ASSERT_EQ(table.versions[i], kVersionOfUnknown);
        continue;
      }
      ASSERT_EQ(table.versions[i], row.version);
      if (!row.key) continue;
      ASSERT_EQ(table.key(i), *row.key);
      ASSERT_EQ(table.values[i], *row.key);
      ASSERT_EQ(table.tick(i), row.tick);
      ASSERT_EQ(table.uses(i), row.uses);
    }
    ASSERT_EQ(table.counts[kTick], shards_[s].tick);
    for (const KeyCount count :
         {kAdmitted, kRefused, kEvicted, kExpired, kUnknown}) {
      ASSERT_EQ(table.counts[count], shards_[s].counts[count]) << count;
    }
  }

 private:
  struct Row {
    std::optional<int64_t> key;
    int64_t tick = 0;
    int64_t uses = 0;
    int64_t version = 0;
  };
  struct Shard {
    int64_t tick = 0;
    std::array<int64_t, kKeyCounts> counts{};
  };
  struct Partition {
    std::map<int64_t, int64_t> counts;  // of lookups of keys without a row
    int64_t width = 0;
    int64_t added = 0;
  };

  int64_t rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t shard_count() const { return static_cast<int64_t>(shards_.size()); }
  // Of the partition in this shard that has the place of p in its own.
  int64_t Reserved(int64_t s, int64_t p) const {
    return p / shard_count() * shard_count() + s;
  }
  std::vector<int64_t> RowsOf(int64_t p) const {
    std::vector<int64_t> all;
    for (int64_t r = p + options_.partitions; r < rows();
         r += options_.partitions) {
      all.push_back(r);
    }
    return all;
  }
  std::optional<int64_t> RowOf(int64_t key) const {
    for (int64_t r = 0; r < rows(); ++r) {
      if (rows_[r].key == key) return r;
    }
    return std::nullopt;
  }
  bool HasFree(int64_t p) const {
    for (const int64_t r : RowsOf(p)) {
      if (!rows_[r].key) return true;
    }
    return false;
  }
  bool IsExpired(int64_t r, int64_t s) const {
    return options_.max_idle > 0 &&
           shards_[s].tick - rows_[r].tick > options_.max_idle;
  }
  int64_t UsesNow(const Row& row, int64_t s) const {
    int64_t uses = row.uses;
    if (options_.eviction == Eviction::kLeastFrequent &&
        options_.half_life > 0) {
      for (int64_t idle = shards_[s].tick - row.tick;
           idle >= options_.half_life; idle -= options_.half_life) {
        uses /= 2;
      }
    }
    return uses;
  }
  // What is less is evicted first.
  std::tuple<bool, int64_t, int64_t> Use(int64_t r, int64_t s) const {
    const Row& row = rows_[r];
    const bool by_uses = options_.eviction == Eviction::kLeastFrequent;
    return {!IsExpired(r, s), by_uses ? UsesNow(row, s) : 0, row.tick};
  }
  // Where not all rows are looked at, those that are may all be spared.
  bool CanRefuse(int64_t s, int64_t p) const {
    if (HasFree(p)) return false;
    bool all = true, any = false;
    for (const int64_t r : RowsOf(p)) {
      const bool spared = rows_[r].tick >= shards_[s].tick;
      all &= spared;
      any |= spared;
    }
    return all || (any && RowsOf(p).size() > KeyTable::kSample);
  }
  int64_t Counted(int64_t p, int64_t key) {
    Partition& partition = partitions_[p];
    const int64_t count = ++partition.counts[key];
    if (++partition.added == partition.width) {
      partition.added = 0;
      for (auto& [other, n] : partition.counts) n /= 2;
    }
    return count;
  }

  const KeyOptions options_;
  std::vector<Row> rows_;
  std::vector<Shard> shards_;
  std::vector<Partition> partitions_;
};

class RandomRun {
 public:
  explicit RandomRun(uint64_t seed) : random_(seed) {
    KeyOptions options;
    options.partitions = int64_t{1} << Below(4);
    if (Below(2) == 0) options.eviction = Eviction::kLeastFrequent;
    if (Below(2) == 0) options.half_life = 1 + Below(8);
    if (Below(3) == 0) options.max_idle = 1 + Below(20);
    if (Below(3) == 0) options.min_count = 2 + Below(3);
    const int64_t each = Below(4) == 0 ? 2 + Below(70) : 2 + Below(8);
    const int64_t rows = options.partitions * each + Below(options.partitions);
    EXPECT_EQ(KeyTable::Check(rows, options).error(), "");
    model_.emplace(rows, options);
    shards_.emplace_back(rows, options);
    const int64_t keys = 1 + rows / 2 + Below(3 * rows);
    for (int64_t i = 0; i < keys; ++i) {
      universe_.push_back(static_cast<int64_t>(random_()));
    }
  }

  void Go() {
    for (int call = 0; call < 40; ++call) {
      const int64_t s = Below(static_cast<int64_t>(shards_.size()));
      OwnedKeyTable& shard = shards_[s];
      switch (Below(12)) {
        case 0:
          Find(s, universe_);
          break;
        case 1:  // As whoever restores it does; the mark stands in front.
          shard.index[0] = 0;
          model_->SetEntries(s);
          break;
        case 2: {
          const int64_t partitions = shard.options.partitions;
          int64_t count = 1;
          while (2 * count <= partitions && Below(2) == 0) count *= 2;
          shards_ = Resharded(shards_, count);
          model_->SetShards(count);
          break;
        }
        case 3:
          for (int64_t i = 0; i < shard.rows(); i += 1 + Below(3)) {
            if (!shard.has_key(i)) continue;
            ++shard.versions[i];
            model_->Update(i * static_cast<int64_t>(shards_.size()) + s);
          }
          break;
        default:
          Train(s);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
    for (size_t s = 0; s < shards_.size(); ++s) {
      Find(static_cast<int64_t>(s), universe_);
      model_->ExpectEqual(static_cast<int64_t>(s), shards_[s]);
      if (testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  int64_t Below(int64_t n) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(n));
  }
  int64_t GlobalRow(int64_t s, int64_t row) const {
    return row * static_cast<int64_t>(shards_.size()) + s;
  }

  void Find(int64_t s, const std::vector<int64_t>& keys) {
    OwnedKeyTable& shard = shards_[s];
    const std::vector<int64_t> rows = shard.Find(keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      const char* wrong = model_->Find(s, keys[i], GlobalRow(s, rows[i]),
                                       shard.found_versions[i]);
      ASSERT_EQ(wrong, nullptr) << wrong;
    }
  }

  void Train(int64_t s) {
    OwnedKeyTable& shard = shards_[s];
    std::vector<int64_t> keys;
    // Some keys come more often than others.
    const int64_t often = 1 + Below(static_cast<int64_t>(universe_.size()));
    for (int64_t n = Below(40); n > 0; --n)
      keys.push_back(universe_[Below(often)]);
    const std::vector<int64_t> rows = shard.Train(keys);
    model_->BeginCall(s);
    size_t given = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const bool is_given =
          given < shard.given.size() &&
          shard.given[given] == std::make_pair(rows[i], keys[i]);
      given += is_given;
      const char* wrong = model_->Train(s, keys[i], GlobalRow(s, rows[i]),
                                        shard.found_versions[i], is_given);
      ASSERT_EQ(wrong, nullptr) << wrong;
    }
    ASSERT_EQ(given, shard.given.size());
    model_->ExpectEqual(s, shard);
  }

  std::mt19937_64 random_;
  std::optional<Model> model_;
  std::vector<OwnedKeyTable> shards_;
  std::vector<int64_t> universe_;
};

TEST(KeyTableSimulationTest, EqualsTheModelInRandomCalls) {
  const int64_t runs = SimulationLength(20000);
  for (int64_t run = 0; run < runs; ++run) {
    SCOPED_TRACE(run);
    RandomRun(static_cast<uint64_t>(run)).Go();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace recsync
