// A keyed table with all that lies beside it, for tests.

#ifndef TF_RECSYNC_CC_ENGINE_KEY_TABLE_TESTING_H_
#define TF_RECSYNC_CC_ENGINE_KEY_TABLE_TESTING_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/engine/key_table.h"
#include "cc/engine/row_locks.h"

namespace recsync {

struct OwnedKeyTable {
  OwnedKeyTable(int64_t rows, const KeyOptions& options)
      : options(options),
        entries(2 * rows, 0),
        index(KeyTable::IndexSize(rows, options), 0),
        sketch(KeyTable::SketchSize(rows, options), 0),
        counts(kKeyCounts, 0),
        versions(rows, 0),
        values(rows, 0) {}

  int64_t rows() const { return static_cast<int64_t>(values.size()); }
  int64_t partitions() const { return options.partitions / options.shards; }
  // The reserved row of a key's partition.
  int64_t ReservedRow(int64_t key) const {
    return PartitionOfKey(key, options.partitions) / options.shards;
  }
  int64_t key(int64_t row) const { return entries[2 * row]; }
  int64_t tick(int64_t row) const {
    return static_cast<int64_t>(static_cast<uint64_t>(entries[2 * row + 1]) >>
                                KeyTable::kUsesBits);
  }
  int64_t uses(int64_t row) const {
    return entries[2 * row + 1] & KeyTable::kMostUses;
  }
  bool has_key(int64_t row) const { return entries[2 * row + 1] != 0; }
  void SetEntry(int64_t row, int64_t key, int64_t tick, int64_t uses) {
    entries[2 * row] = key;
    entries[2 * row + 1] = static_cast<int64_t>(static_cast<uint64_t>(tick)
                                                << KeyTable::kUsesBits) |
                           uses;
  }

  KeyTable Table() {
    KeyView view;
    view.entries = entries.data();
    view.rows = rows();
    view.index = index.data();
    view.sketch = sketch.empty() ? nullptr : sketch.data();
    view.counts = counts.data();
    view.versions = versions.data();
    return KeyTable(options, view);
  }

  // Writes the key as the row's value.
  void Give(KeyTable* table, int64_t row, int64_t key, int64_t tick) {
    RowLock lock(&RowLocks::Global().Of(values.data(), row));
    values[row] = key;
    table->Own(row, key, tick);
    given.emplace_back(row, key);
  }

  // Looks keys up in training, in a call of their own. `given` says which rows
  // that gave to which keys.
  std::vector<int64_t> Train(const std::vector<int64_t>& keys) {
    KeyTable table = Table();
    given.clear();
    const int64_t tick = table.NextTick();
    return Run(keys, [&](const int64_t* from, int64_t n, int64_t* rows) {
      table.FindOrInsert(
          from, n, tick, rows, found_versions.data(),
          [&](int64_t row, int64_t key) { Give(&table, row, key, tick); });
    });
  }
  int64_t Train(int64_t key) { return Train(std::vector<int64_t>{key})[0]; }

  std::vector<int64_t> Find(const std::vector<int64_t>& keys) {
    KeyTable table = Table();
    return Run(keys, [&](const int64_t* from, int64_t n, int64_t* rows) {
      table.Find(from, n, rows, found_versions.data());
    });
  }
  int64_t Find(int64_t key) { return Find(std::vector<int64_t>{key})[0]; }

  template <typename Look>
  std::vector<int64_t> Run(const std::vector<int64_t>& keys, const Look& look) {
    std::vector<int64_t> rows(keys.size(), -1);
    found_versions.assign(keys.size(), -1);
    look(keys.data(), static_cast<int64_t>(keys.size()), rows.data());
    return rows;
  }

  const KeyOptions options;
  std::vector<int64_t> entries;
  std::vector<uint32_t> index;
  std::vector<uint8_t> sketch;
  std::vector<int64_t> counts;
  std::vector<int64_t> versions;
  std::vector<int64_t> values;
  // Of the last call.
  std::vector<std::pair<int64_t, int64_t>> given;
  std::vector<int64_t> found_versions;
};

// The shards of a table, in `shards` pieces, as a table in other pieces: rows
// are dealt out anew, with their entries, versions and values.
inline std::vector<OwnedKeyTable> Resharded(
    const std::vector<OwnedKeyTable>& before, int64_t shards) {
  const int64_t pieces = static_cast<int64_t>(before.size());
  int64_t rows = 0;
  for (const OwnedKeyTable& piece : before) rows += piece.rows();
  std::vector<OwnedKeyTable> after;
  for (int64_t s = 0; s < shards; ++s) {
    KeyOptions options = before[0].options;
    options.shard = s;
    options.shards = shards;
    after.emplace_back((rows - s + shards - 1) / shards, options);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const OwnedKeyTable& from = before[row % pieces];
    const int64_t i = row / pieces;
    OwnedKeyTable& to = after[row % shards];
    const int64_t j = row / shards;
    to.entries[2 * j] = from.entries[2 * i];
    to.entries[2 * j + 1] = from.entries[2 * i + 1];
    to.versions[j] = from.versions[i];
    to.values[j] = from.values[i];
  }
  return after;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_KEY_TABLE_TESTING_H_
