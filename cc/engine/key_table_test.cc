#include "cc/engine/key_table.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "cc/engine/key_hash.h"
#include "cc/engine/key_table_testing.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Eviction = KeyOptions::Eviction;
using Keys = std::vector<int64_t>;

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Keys from first to before end.
Keys Range(int64_t first, int64_t end) {
  Keys keys;
  for (int64_t key = first; key < end; ++key) keys.push_back(key);
  return keys;
}

Keys RandomKeys(int64_t n, std::mt19937_64* random) {
  Keys keys;
  for (int64_t i = 0; i < n; ++i) {
    keys.push_back(static_cast<int64_t>((*random)()));
  }
  return keys;
}

TEST(KeyHashTest, IsTheFinalizerOfMurmurHash3) {
  EXPECT_EQ(KeyHash(0), 0);
  EXPECT_EQ(KeyHash(1), 0xB456BCFC34C2CB2Cull);
}

TEST(KeyHashTest, KeysThatFollowEachOtherAreSpreadEvenlyOverPartitions) {
  constexpr int64_t kPartitions = 64, kEach = 1000;
  for (const int64_t stride : {1, 64, 1 << 20}) {
    std::vector<int64_t> keys(kPartitions, 0);
    for (int64_t i = 0; i < kPartitions * kEach; ++i) {
      const int64_t partition = PartitionOfKey(i * stride, kPartitions);
      ASSERT_GE(partition, 0);
      ASSERT_LT(partition, kPartitions);
      ++keys[partition];
    }
    // Within six standard deviations.
    for (const int64_t n : keys) EXPECT_NEAR(n, kEach, 190);
  }
}

TEST(KeyVersionTest, ALifeStandsAboveTheVersionsThatUpdatesCount) {
  const int64_t first = FirstOfNextLife(0);
  EXPECT_EQ(first, int64_t{1} << 40);
  EXPECT_EQ(LifeOf(first), 1);
  EXPECT_EQ(LifeOf(first + 12345), 1);
  EXPECT_EQ(FirstOfNextLife(first + 12345), 2 * first);
  EXPECT_EQ(LifeOf(first - 1), 0);
}

TEST(KeyVersionTest, ARowWhoseLivesAreOverBeginsWithTheFirstAgain) {
  OwnedKeyTable table(2, {});
  for (const int64_t last :
       {kVersionOfUnknown - 1, kVersionOfUnknown, kMost, kLeast}) {
    table.versions[1] = last;
    table.Train(last);
    EXPECT_EQ(table.given.size(), 1);
    EXPECT_EQ(LifeOf(table.versions[1]), 1);
  }
}

TEST(KeyTableTest, WhatIsWrongWithOptionsIsNamed) {
  const auto error = [](int64_t rows, int64_t partitions, int64_t shard,
                        int64_t shards, int64_t half_life = 0,
                        int64_t max_idle = 0, int64_t min_count = 1) {
    KeyOptions options;
    options.partitions = partitions;
    options.shard = shard;
    options.shards = shards;
    options.half_life = half_life;
    options.max_idle = max_idle;
    options.min_count = min_count;
    return KeyTable::Check(rows, options).error();
  };
  const auto begins = [](const std::string& text, const std::string& with) {
    return text.rfind(with, 0) == 0;
  };
  EXPECT_EQ(error(16, 8, 0, 1), "");
  EXPECT_EQ(error(8, 8, 1, 2), "");
  EXPECT_EQ(error(16, 8, 0, 1, 5, 5, 255), "");
  EXPECT_EQ(error(KeyTable::kMostPartitionRows, 1, 0, 1), "");
  for (const int64_t partitions :
       {kLeast, int64_t{-1}, int64_t{0}, int64_t{3}, int64_t{6},
        2 * KeyTable::kMostPartitions, kMost}) {
    EXPECT_TRUE(begins(error(kMost, partitions, 0, 1), "partitions is "));
  }
  for (const int64_t shards : {-1, 0, 3, 16}) {
    EXPECT_TRUE(begins(error(100, 8, 0, shards), "shards is "));
  }
  for (const int64_t shard : {-1, 2}) {
    EXPECT_TRUE(begins(error(100, 8, shard, 2), "shard is "));
  }
  for (const int64_t rows : {kLeast, int64_t{0}, int64_t{15},
                             8 * KeyTable::kMostPartitionRows + 1, kMost}) {
    EXPECT_TRUE(begins(error(rows, 8, 0, 1), "rows is "));
  }
  EXPECT_TRUE(begins(error(16, 8, 0, 1, -1), "half_life is -1; "));
  EXPECT_TRUE(begins(error(16, 8, 0, 1, 0, -1), "max_idle is -1; "));
  EXPECT_TRUE(begins(error(16, 8, 0, 1, 0, 0, 0), "min_count is 0; "));
  EXPECT_TRUE(begins(error(16, 8, 0, 1, 0, 0, 256), "min_count is 256; "));
  KeyOptions options;
  options.eviction = static_cast<Eviction>(2);
  EXPECT_TRUE(begins(KeyTable::Check(2, options).error(), "eviction is 2; "));
}

TEST(KeyTableTest, ANewKeyGetsARowThatBeginsALife) {
  OwnedKeyTable table(8, {});
  EXPECT_EQ(table.Find(42), 0);
  const int64_t row = table.Train(42);
  EXPECT_NE(row, 0);
  EXPECT_EQ(table.found_versions[0], FirstOfNextLife(0));
  EXPECT_EQ(table.key(row), 42);
  EXPECT_EQ(table.values[row], 42);
  EXPECT_EQ(table.tick(row), 1);
  EXPECT_EQ(table.uses(row), 1);
  ++table.versions[row];  // an update
  EXPECT_EQ(table.Find(42), row);
  EXPECT_EQ(table.found_versions[0], FirstOfNextLife(0) + 1);
  EXPECT_EQ(table.Table().Used(), 1);
}

TEST(KeyTableTest, AnyNumberIsAKey) {
  Keys keys{0, -1, 1, kLeast, kMost, kLeast + 1, kMost - 1};
  for (int shift = 1; shift < 63; ++shift) keys.push_back(int64_t{1} << shift);
  KeyOptions options;
  options.partitions = 4;
  OwnedKeyTable table(512, options);
  table.Find(keys);
  EXPECT_EQ(table.counts[kUnknown], static_cast<int64_t>(keys.size()));
  const Keys rows = table.Train(keys);
  EXPECT_EQ(std::set<int64_t>(rows.begin(), rows.end()).size(), keys.size());
  EXPECT_EQ(table.Find(keys), rows);
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(table.key(rows[i]), keys[i]);
  }
}

TEST(KeyTableTest, EqualsAnUnorderedMapWhileThereIsRoom) {
  std::mt19937_64 random(1);
  for (const int64_t partitions : {1, 8, 256}) {
    KeyOptions options;
    options.partitions = partitions;
    OwnedKeyTable table(16384, options);
    std::unordered_map<int64_t, int64_t> known;
    std::set<int64_t> taken;
    // At most half of the rows, so that no partition is full.
    const Keys universe = RandomKeys(6000, &random);
    for (int call = 0; call < 100; ++call) {
      Keys keys;
      for (int i = 0; i < 200; ++i) {
        keys.push_back(universe[random() % universe.size()]);
      }
      const Keys found = table.Find(keys);
      for (size_t i = 0; i < keys.size(); ++i) {
        const auto it = known.find(keys[i]);
        ASSERT_EQ(found[i],
                  it == known.end() ? table.ReservedRow(keys[i]) : it->second);
      }
      const Keys rows = table.Train(keys);
      for (size_t i = 0; i < keys.size(); ++i) {
        ASSERT_EQ(rows[i] % partitions, PartitionOfKey(keys[i], partitions));
        ASSERT_GE(rows[i], partitions);
        const auto [it, is_new] = known.emplace(keys[i], rows[i]);
        ASSERT_EQ(it->second, rows[i]);
        if (is_new) {
          ASSERT_TRUE(taken.insert(rows[i]).second);
        }
      }
    }
    EXPECT_EQ(table.counts[kAdmitted], static_cast<int64_t>(known.size()));
    EXPECT_EQ(table.counts[kEvicted], 0);
    EXPECT_EQ(table.counts[kRefused], 0);
    EXPECT_EQ(table.Table().Used(), static_cast<int64_t>(known.size()));
  }
}

TEST(KeyTableTest, AllRowsButTheReservedOnesCanBeUsedAtOnce) {
  for (const int64_t partitions : {1, 4}) {
    KeyOptions options;
    options.partitions = partitions;
    for (const int64_t rows : {2 * partitions, int64_t{63}, int64_t{1000}}) {
      OwnedKeyTable table(rows, options);
      const Keys keys = Range(0, 20 * rows);
      // In one call, so that no key can take another's row.
      const Keys found = table.Train(keys);
      std::map<int64_t, int64_t> owners;
      for (size_t i = 0; i < keys.size(); ++i) {
        if (found[i] >= partitions) {
          ASSERT_TRUE(owners.emplace(found[i], keys[i]).second);
        }
      }
      EXPECT_EQ(static_cast<int64_t>(owners.size()), rows - partitions);
      EXPECT_EQ(table.Table().Used(), rows - partitions);
      EXPECT_EQ(table.counts[kRefused],
                static_cast<int64_t>(keys.size()) - (rows - partitions));
      for (const auto& [row, key] : owners) ASSERT_EQ(table.Find(key), row);
    }
  }
}

TEST(KeyTableTest, UnknownKeysHaveTheReservedRowOfTheirPartition) {
  KeyOptions options;
  options.partitions = 8;
  options.shards = 2;
  options.shard = 1;
  OwnedKeyTable table(40, options);
  const Keys keys = Range(0, 100);
  const Keys rows = table.Find(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(rows[i], PartitionOfKey(keys[i], 8) / 2);
    EXPECT_EQ(table.found_versions[i], 0);
  }
  for (int64_t row = 0; row < table.rows(); ++row) {
    EXPECT_EQ(table.versions[row], row < 4 ? kVersionOfUnknown : 0);
  }
}

TEST(KeyTableTest, VersionsThatComeLaterThanTheIndexHaveReservedRowsMarked) {
  OwnedKeyTable table(8, {});
  KeyView view;
  view.entries = table.entries.data();
  view.rows = table.rows();
  view.index = table.index.data();
  view.counts = table.counts.data();
  KeyTable without({}, view);
  int64_t row = -1, version = -1;
  const int64_t key = 7;
  without.FindOrInsert(
      &key, 1, without.NextTick(), &row, &version,
      [&](int64_t row, int64_t key) { without.Own(row, key, 1); });
  EXPECT_EQ(row, 1);
  EXPECT_EQ(version, 0);
  without.Find(&key, 1, &row, nullptr);
  EXPECT_EQ(row, 1);
  EXPECT_EQ(table.versions[0], 0);
  EXPECT_EQ(table.Find(key), 1);
  EXPECT_EQ(table.versions[0], kVersionOfUnknown);
  EXPECT_EQ(table.versions[1], FirstOfNextLife(0));
}

TEST(KeyTableTest, VersionsThatTakeThePlaceOfOthersAreOfLives) {
  OwnedKeyTable table(8, {});
  const int64_t row = table.Train(7);
  std::fill(table.versions.begin(), table.versions.end(), 0);
  EXPECT_EQ(table.Find(7), row);
  EXPECT_EQ(table.versions[0], kVersionOfUnknown);
  EXPECT_EQ(table.versions[row], FirstOfNextLife(0));
}

TEST(KeyTableTest, TimeGoesOnWhereItWasWhenTheEntriesWereWritten) {
  KeyOptions options;
  options.max_idle = 5;
  OwnedKeyTable table(8, options);
  table.Train(7);
  const auto entries = table.entries;
  for (int64_t key = 8; key < 20; ++key) table.Train(key);
  EXPECT_EQ(table.Find(7), 0);
  table.entries = entries;
  table.index[0] = 0;
  EXPECT_NE(table.Find(7), 0);
  EXPECT_EQ(table.counts[kTick], 1);
}

TEST(KeyTableTest, KeysOfOtherShardsHaveNoRow) {
  KeyOptions options;
  options.partitions = 4;
  options.shards = 4;
  options.shard = 2;
  OwnedKeyTable table(100, options);
  const Keys keys = Range(0, 80);
  const Keys rows = table.Train(keys);
  int64_t own = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool is_own = PartitionOfKey(keys[i], 4) == 2;
    EXPECT_EQ(rows[i] != 0, is_own);
    own += is_own;
  }
  EXPECT_EQ(table.Find(keys), rows);
  EXPECT_EQ(table.Table().Used(), own);
  EXPECT_EQ(table.counts[kRefused], 80 - own);
  EXPECT_EQ(table.counts[kUnknown], 80 - own);
}

TEST(KeyTableTest, UnknownKeysAreCountedOnlyWhereThatIsWanted) {
  OwnedKeyTable table(8, {});
  const std::vector<int64_t> keys = {5, 6};
  std::vector<int64_t> rows(2, -1);
  for (const bool counts : {false, true}) {
    table.Table().Find(keys.data(), 2, rows.data(), nullptr, 0, counts);
    EXPECT_EQ(table.counts[kUnknown], counts ? 2 : 0);
  }
}

TEST(KeyTableTest, UsesAreCountedUpToTheMost) {
  OwnedKeyTable table(8, {});
  const int64_t row = table.Train(5);
  table.Train(Keys{5, 5, 5});
  EXPECT_EQ(table.uses(row), 4);
  EXPECT_EQ(table.tick(row), 2);
  table.Find(5);
  EXPECT_EQ(table.uses(row), 4);
  table.SetEntry(row, 5, 2, KeyTable::kMostUses - 1);
  table.Train(Keys{5, 5, 5});
  EXPECT_EQ(table.uses(row), KeyTable::kMostUses);
  EXPECT_EQ(table.tick(row), 3);
}

TEST(KeyTableTest, AnOlderCallDoesNotMakeAUseOlder) {
  OwnedKeyTable owned(8, {});
  KeyTable table = owned.Table();
  const int64_t older = table.NextTick();
  const int64_t row = owned.Train(5);  // in a newer call
  int64_t found = -1, version = -1;
  const int64_t key = 5;
  table.FindOrInsert(&key, 1, older, &found, &version,
                     [](int64_t, int64_t) { FAIL(); });
  EXPECT_EQ(found, row);
  EXPECT_EQ(version, owned.versions[row]);
  EXPECT_EQ(owned.tick(row), older + 1);
  EXPECT_EQ(owned.uses(row), 2);
}

TEST(KeyTableTest, TicksAreCountedUpToTheMost) {
  OwnedKeyTable table(8, {});
  EXPECT_EQ(table.Table().NextTick(), 1);
  EXPECT_EQ(table.Table().NextTick(), 2);
  table.counts[kTick] = KeyTable::kMostTicks - 1;
  EXPECT_EQ(table.Table().NextTick(), KeyTable::kMostTicks);
  EXPECT_EQ(table.Table().NextTick(), KeyTable::kMostTicks);
  const int64_t row = table.Train(5);
  EXPECT_EQ(table.tick(row), KeyTable::kMostTicks);
  EXPECT_EQ(table.Train(5), row);
  for (const int64_t wrong : {kLeast, int64_t{-1}}) {
    table.counts[kTick] = wrong;
    EXPECT_EQ(table.Table().NextTick(), 1);
  }
}

TEST(KeyTableTest, TheLeastRecentlyUsedKeyOfASmallPartitionGivesItsRow) {
  OwnedKeyTable table(5, {});  // four keys
  for (const int64_t key : {10, 11, 12, 13, 10}) table.Train(key);
  const int64_t row = table.Find(11);
  EXPECT_EQ(table.Train(14), row);
  EXPECT_EQ(LifeOf(table.versions[row]), 2);
  EXPECT_EQ(table.Find(11), 0);
  EXPECT_EQ(table.Find(10), 1);
  EXPECT_EQ(table.counts[kEvicted], 1);
  EXPECT_EQ(table.counts[kAdmitted], 5);
}

TEST(KeyTableTest, TheLeastOftenUsedKeyOfASmallPartitionGivesItsRow) {
  KeyOptions options;
  options.eviction = Eviction::kLeastFrequent;
  OwnedKeyTable table(4, options);
  table.Train(Keys{10, 10, 10});
  table.Train(Keys{11, 11});
  const int64_t least = table.Train(12);
  EXPECT_EQ(table.Train(13), least);
  EXPECT_EQ(table.Train(14), least);
  table.Train(Keys{14, 14, 14});
  // Now 11 is used less than 14, and its use longer ago.
  const int64_t row = table.Find(11);
  EXPECT_EQ(table.Train(15), row);
}

TEST(KeyTableTest, UsesLongAgoCountHalfPerHalfLife) {
  KeyOptions options;
  options.eviction = Eviction::kLeastFrequent;
  options.half_life = 10;
  OwnedKeyTable table(3, options);
  const int64_t often = table.Train(Keys(8, 20))[0];
  const int64_t seldom = table.Train(Keys(3, 21))[0];
  // Of 8 uses, 2 are left after two half-lives, less than 3.
  for (int i = 0; i < 19; ++i) table.Table().NextTick();
  table.Train(21);  // at tick 22: 3 / 2^2 + 1
  EXPECT_EQ(table.uses(seldom), 3 / 4 + 1);
  table.SetEntry(seldom, 21, 20, 3);
  EXPECT_EQ(table.Train(22), often);
  // Without half-lives, 8 uses are more than 3.
  options.half_life = 0;
  OwnedKeyTable lasting(3, options);
  lasting.Train(Keys(8, 20));
  const int64_t other = lasting.Train(Keys(3, 21))[0];
  for (int i = 0; i < 1000; ++i) lasting.Table().NextTick();
  EXPECT_EQ(lasting.Train(22), other);
}

TEST(KeyTableTest, KeysUsedInEachCallAreNeverEvictedWhileOthersStreamThrough) {
  for (const Eviction eviction :
       {Eviction::kLeastRecent, Eviction::kLeastFrequent}) {
    KeyOptions options;
    options.partitions = 2;
    options.eviction = eviction;
    OwnedKeyTable table(1000, options);
    // A quarter of the rows: that a sample of 32 has nothing else happens once
    // in 2^64.
    const Keys hot = Range(0, 250);
    const Keys rows = table.Train(hot);
    int64_t next = 1000;
    for (int call = 0; call < 60; ++call) {
      const Keys cold = Range(next, next + 100);
      next += 100;
      Keys keys = cold;  // the hot ones come after those that take rows
      keys.insert(keys.end(), hot.begin(), hot.end());
      const Keys found = table.Train(keys);
      ASSERT_EQ(Keys(found.end() - 250, found.end()), rows);
      for (size_t i = 0; i < cold.size(); ++i) {
        ASSERT_EQ(table.key(found[i]), cold[i]);
      }
    }
    EXPECT_EQ(table.counts[kRefused], 0);
    EXPECT_EQ(table.counts[kEvicted], 250 + 6000 - 998);
  }
}

TEST(KeyTableTest, EvictionTakesKeysOfTheOlderHalfOfALargePartition) {
  OwnedKeyTable table(1001, {});
  for (int64_t key = 0; key < 1000; ++key) table.Train(key);
  // Of 32 rows, none is of the older half once in 2^32.
  for (int64_t key = 1000; key < 1200; ++key) {
    EXPECT_NE(table.Train(key), 0);
  }
  for (int64_t key = 500; key < 1200; ++key) {
    EXPECT_NE(table.Find(key), 0) << key;
  }
  EXPECT_EQ(table.counts[kEvicted], 200);
}

TEST(KeyTableTest, RowsThatWereUsedInTheSameTickAreSpared) {
  OwnedKeyTable table(41, {});
  const Keys first = Range(0, 40);
  const Keys rows = table.Train(first);
  Keys keys = first;
  keys.push_back(100);
  EXPECT_EQ(table.Train(keys).back(), 0);
  EXPECT_EQ(table.counts[kRefused], 1);
  EXPECT_EQ(table.Find(first), rows);
  // In the next tick there is a row for it.
  EXPECT_NE(table.Train(100), 0);
}

TEST(KeyTableTest, AKeyThatWasIdleForTooLongBeginsAnewInItsRow) {
  KeyOptions options;
  options.max_idle = 3;
  OwnedKeyTable table(8, options);
  const int64_t row = table.Train(1);  // at tick 1
  for (int64_t key = 2; key <= 4; ++key) table.Train(key);
  EXPECT_EQ(table.Find(1), row);  // idle for 3
  table.Train(5);
  EXPECT_EQ(table.Find(1), 0);  // idle for 4
  EXPECT_EQ(table.counts[kUnknown], 1);
  EXPECT_EQ(table.counts[kExpired], 0);
  EXPECT_EQ(table.Train(1), row);
  ASSERT_EQ(table.given.size(), 1);
  EXPECT_EQ(LifeOf(table.versions[row]), 2);
  EXPECT_EQ(table.uses(row), 1);
  EXPECT_EQ(table.counts[kExpired], 1);
  EXPECT_EQ(table.counts[kAdmitted], 6);
  EXPECT_EQ(table.Find(1), row);
  EXPECT_EQ(table.Train(1), row);
  EXPECT_TRUE(table.given.empty());
}

TEST(KeyTableTest, AnExpiredKeyIsAdmittedByTheSameRuleAsANewOne) {
  KeyOptions options;
  options.max_idle = 1;
  options.min_count = 2;
  OwnedKeyTable table(8, options);
  EXPECT_EQ(table.Train(1), 0);
  const int64_t row = table.Train(1);
  EXPECT_NE(row, 0);
  std::fill(table.sketch.begin(), table.sketch.end(), 0);
  for (int i = 0; i < 2; ++i) table.Table().NextTick();
  EXPECT_EQ(table.Train(1), 0);
  EXPECT_EQ(table.Find(1), 0);
  EXPECT_EQ(table.Train(1), row);
  EXPECT_EQ(LifeOf(table.versions[row]), 2);
  EXPECT_EQ(table.counts[kExpired], 1);
  EXPECT_EQ(table.counts[kRefused], 2);
}

TEST(KeyTableTest, ExpiredKeysAreEvictedBeforeThoseThatAreUsedLess) {
  KeyOptions options;
  options.eviction = Eviction::kLeastFrequent;
  options.max_idle = 5;
  OwnedKeyTable table(3, options);
  const int64_t often = table.Train(Keys(100, 1))[0];
  for (int i = 0; i < 5; ++i) table.Table().NextTick();
  table.Train(2);
  EXPECT_EQ(table.Train(3), often);
}

TEST(KeyTableTest, AKeyIsAdmittedWhenItHasShownUpOftenEnough) {
  KeyOptions options;
  options.min_count = 3;
  OwnedKeyTable table(64, options);
  EXPECT_EQ(table.Train(Keys{7, 7}), (Keys{0, 0}));
  EXPECT_EQ(table.Find(Keys{7, 7, 7}), (Keys{0, 0, 0}));
  EXPECT_EQ(table.Train(Keys{7, 7}), (Keys{1, 1}));
  EXPECT_EQ(table.uses(1), 2);
  EXPECT_EQ(table.counts[kRefused], 2);
  options.min_count = 255;
  OwnedKeyTable strict(64, options);
  const Keys rows = strict.Train(Keys(255, 7));
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 0), 254);
}

TEST(KeyTableTest, AdmissionIsNeverLateAndSeldomEarly) {
  std::mt19937_64 random(3);
  KeyOptions options;
  options.min_count = 3;
  options.partitions = 2;
  constexpr int64_t kRows = 8192;  // of 16384 counters in each partition
  OwnedKeyTable table(kRows, options);
  // Most keys once, some often; up to just before any halving.
  const Keys often = RandomKeys(500, &random);
  std::unordered_map<int64_t, int64_t> counts;
  int64_t refused = 0, early = 0;
  while (refused < 2 * 16384 - 1000) {
    const bool is_often = random() % 8 == 0;
    const int64_t key = is_often ? often[random() % often.size()]
                                 : static_cast<int64_t>(random());
    const int64_t count = ++counts[key];
    const bool has_row = table.Train(key) >= 2;
    refused += !has_row;
    if (count >= options.min_count) {
      ASSERT_TRUE(has_row);
    } else if (has_row) {
      ++early;
    }
  }
  // Too early is a key whose count is 2 too high when it comes first, or 1 when
  // it comes second, which nearly only those do that come often.
  EXPECT_LE(early, 0.0002 * static_cast<double>(counts.size()) + 0.18 * 500);
  EXPECT_GT(table.Table().Used(), 400);
}

TEST(KeyTableTest, NewKeysAreCountedTooOftenAsSeldomAsIsSaid) {
  std::mt19937_64 random(4);
  for (const auto& [min_count, share] :
       std::map<int64_t, double>{{2, 0.18}, {3, 0.0002}}) {
    KeyOptions options;
    options.min_count = min_count;
    OwnedKeyTable table(16384, options);  // 65536 counters
    table.Train(RandomKeys(65536 - 8192, &random));
    const int64_t before = table.counts[kAdmitted];
    table.Train(RandomKeys(8000, &random));
    const double early =
        static_cast<double>(table.counts[kAdmitted] - before) / 8000;
    EXPECT_LE(early, 1.1 * share + 0.001) << min_count;
  }
}

TEST(KeyTableTest, CountsAreHalvedAfterAsManyLookupsAsCounters) {
  KeyOptions options;
  options.min_count = 20;
  OwnedKeyTable table(4, options);  // 16 counters
  // The 16th halves 16 to 8, so that 12 more make 20.
  EXPECT_EQ(table.Train(Keys(27, 9)), Keys(27, 0));
  EXPECT_EQ(table.Train(9), 1);
}

TEST(KeyTableTest, RowsMoveToAnotherNumberOfShardsWithTheirKeys) {
  KeyOptions options;
  options.partitions = 8;
  std::mt19937_64 random(5);
  for (const int64_t rows : {1024, 1021}) {
    std::vector<OwnedKeyTable> shards;
    shards.emplace_back(rows, options);
    const Keys keys = RandomKeys(600, &random);
    const Keys first = shards[0].Train(keys);
    shards[0].Train(keys);
    for (const int64_t count : {4, 2, 8, 1}) {
      shards = Resharded(shards, count);
      for (size_t i = 0; i < keys.size(); ++i) {
        OwnedKeyTable& shard = shards[PartitionOfKey(keys[i], 8) % count];
        const int64_t row = shard.Find(keys[i]);
        ASSERT_EQ(row * count + shard.options.shard, first[i]);
        ASSERT_EQ(shard.values[row], keys[i]);
        ASSERT_EQ(shard.counts[kTick], 2);
      }
    }
  }
}

TEST(KeyTableTest, AfterABuildNewKeysGetTheRowsThatAreFree) {
  OwnedKeyTable table(10, {});
  for (const int64_t row : {1, 2, 5, 9}) table.SetEntry(row, 100 + row, 7, 1);
  const Keys rows = table.Train(Range(0, 5));
  EXPECT_EQ(rows, (Keys{3, 4, 6, 7, 8}));
  EXPECT_EQ(table.Find(Keys{101, 102, 105, 109}), (Keys{1, 2, 5, 9}));
  EXPECT_EQ(table.counts[kTick], 8);
  EXPECT_EQ(table.counts[kEvicted], 0);
}

TEST(KeyTableTest, ABuildFreesRowsWhoseEntriesCannotBe) {
  KeyOptions options;
  options.partitions = 4;
  options.shards = 2;
  options.shard = 1;
  OwnedKeyTable table(20, options);
  const auto key_of = [](int64_t partition, int64_t from) {
    while (PartitionOfKey(from, 4) != partition) ++from;
    return from;
  };
  const int64_t right = key_of(1, 0), twice = key_of(1, 1000);
  table.SetEntry(0, right, 3, 1);           // a reserved row
  table.SetEntry(2, right, 4, 1);           // right
  table.SetEntry(4, twice, 5, 1);           // right
  table.SetEntry(6, twice, 90, 1);          // the same once more
  table.SetEntry(8, key_of(3, 0), 90, 1);   // of the other partition here
  table.SetEntry(10, key_of(0, 0), 90, 1);  // of the other shard
  table.SetEntry(12, right, 0, 0);          // a row without a key
  table.SetEntry(14, kMost, KeyTable::kMostTicks, 1);
  const bool is_of_1 = PartitionOfKey(kMost, 4) == 1;
  table.Table().Prepare();
  for (const int64_t row : {0, 6, 8, 10, 12}) {
    EXPECT_EQ(table.entries[2 * row], 0) << row;
    EXPECT_EQ(table.entries[2 * row + 1], 0) << row;
  }
  EXPECT_EQ(table.Find(Keys{right, twice}), (Keys{2, 4}));
  EXPECT_EQ(table.has_key(14), is_of_1);
  EXPECT_EQ(table.counts[kTick], is_of_1 ? KeyTable::kMostTicks : 5);
}

TEST(KeyTableTest, ATableOfRandomWordsWorksAfterABuild) {
  std::mt19937_64 random(6);
  for (int run = 0; run < 30; ++run) {
    KeyOptions options;
    options.partitions = int64_t{1} << (random() % 4);
    options.shards = int64_t{1} << (random() % 2);
    options.shards = std::min(options.shards, options.partitions);
    options.min_count = run % 2 == 0 ? 1 : 2;
    OwnedKeyTable table(16 + static_cast<int64_t>(random() % 200), options);
    // Keys of a few, so that they are there more than once; and ticks that are
    // lower than those that come.
    for (int64_t row = 0; row < table.rows(); ++row) {
      table.SetEntry(row, static_cast<int64_t>(random() % 64), random() % 9,
                     static_cast<int64_t>(random() % 9));
      table.versions[row] = static_cast<int64_t>(random());
    }
    for (uint8_t& byte : table.sketch) byte = static_cast<uint8_t>(random());
    table.Table().Prepare();
    std::map<int64_t, int64_t> owners;
    for (int64_t row = 0; row < table.rows(); ++row) {
      if (!table.has_key(row)) continue;
      ASSERT_GE(row, table.partitions());
      ASSERT_TRUE(owners.emplace(table.key(row), row).second);
    }
    EXPECT_EQ(table.Table().Used(), static_cast<int64_t>(owners.size()));
    for (const auto& [key, row] : owners) ASSERT_EQ(table.Find(key), row);
    for (int call = 0; call < 20; ++call) {
      const Keys keys = Range(64 * call, 64 * call + 64);
      const Keys rows = table.Train(keys);
      for (size_t i = 0; i < keys.size(); ++i) {
        if (rows[i] < table.partitions()) continue;
        ASSERT_EQ(table.key(rows[i]), keys[i]);
      }
      for (const auto& [row, key] : table.given) {
        ASSERT_GT(LifeOf(table.versions[row]), 0);
        ASSERT_LT(table.versions[row], kVersionOfUnknown);
        ASSERT_EQ(table.values[row], key);
      }
    }
  }
}

TEST(KeyTableTest, NoKeysAreNothingToDo) {
  OwnedKeyTable table(4, {});
  EXPECT_EQ(table.Train(Keys{}), Keys{});
  EXPECT_EQ(table.Find(Keys{}), Keys{});
  EXPECT_EQ(table.counts, (Keys{1, 0, 0, 0, 0, 0, 0, 0}));
}

TEST(KeyTableTest, KeysAreAdmittedWithAProbabilityAtEachLookup) {
  KeyOptions options;
  options.probability = 0.25;
  OwnedKeyTable table(20000, options);
  const Keys keys = Range(0, 8000);
  table.Train(keys);
  const auto used = static_cast<double>(table.Table().Used());
  EXPECT_NEAR(used, 0.25 * 8000, 5 * std::sqrt(8000 * 0.25 * 0.75));
  table.Train(keys);
  const double expected = (1 - 0.75 * 0.75) * 8000;
  EXPECT_NEAR(static_cast<double>(table.Table().Used()), expected,
              5 * std::sqrt(expected * 0.75 * 0.75));
}

TEST(KeyTableTest, TimeGoesNoFasterThanTheClockHoweverManyCallsThereAre) {
  constexpr int64_t kFirst = 1000, kLast = 20000;
  OwnedKeyTable owned(8, KeyOptions());
  KeyTable table = owned.Table();
  int64_t before = 0;
  for (int64_t now = kFirst; now < kLast; ++now) {
    for (int call = 0; call < 3; ++call) {
      const int64_t tick = table.NextTick(now);
      ASSERT_GE(tick, std::max(before, now));
      ASSERT_LE(tick, now + KeyTable::kMostLead + 1);
      before = tick;
    }
  }
  // Calls that are rare again let the clock catch up.
  EXPECT_EQ(table.NextTick(2 * kLast), 2 * kLast);
}

TEST(KeyTableTest, TicksGoOnWhenTheClockWasSetBack) {
  constexpr int64_t kDay = 24 * 3600 * 1024;
  OwnedKeyTable owned(8, KeyOptions());
  KeyTable table = owned.Table();
  EXPECT_EQ(table.NextTick(2 * kDay), 2 * kDay);
  std::mt19937 random(5);
  int64_t now = kDay, last = 2 * kDay, begun = 0;
  constexpr int kCalls = 1000;
  for (int call = 0; call < kCalls; ++call) {
    now += random() % 50;
    const int64_t tick = table.NextTick(now);
    ASSERT_TRUE(tick == last || tick == last + 1) << tick - last;
    begun += tick - last;
    last = tick;
  }
  EXPECT_GT(begun, kCalls / 3);
}

TEST(KeyTableTest, TicksMayStandForTime) {
  KeyOptions options;
  options.max_idle = 100;
  OwnedKeyTable owned(8, options);
  KeyTable table = owned.Table();
  EXPECT_EQ(table.NextTick(1000), 1000);
  EXPECT_EQ(table.NextTick(1000), 1001);
  EXPECT_EQ(table.NextTick(5), 1002);
  EXPECT_EQ(table.NextTick(KeyTable::kMostTicks + 1), KeyTable::kMostTicks);
  owned.counts[kTick] = 2000;
  const int64_t row = owned.Train(7);
  int64_t found = -1;
  const int64_t key = 7;
  table.Find(&key, 1, &found, nullptr, 2101);
  EXPECT_EQ(found, row);
  table.Find(&key, 1, &found, nullptr, 2102);
  EXPECT_EQ(found, 0);
}

}  // namespace
}  // namespace recsync
