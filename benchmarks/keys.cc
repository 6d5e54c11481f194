// Maps from keys to rows, for benchmarks/keys.py: this package's and hash maps
// of the standard library and of Abseil, behind one interface. All are called
// from one thread.

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "cc/engine/key_mean.h"
#include "cc/engine/key_table.h"
#include "cc/engine/row_decay.h"
#include "cc/engine/row_gather.h"

namespace {

using recsync::KeyOptions;
using recsync::KeyTable;

class Map {
 public:
  virtual ~Map() = default;
  // Gives rows to keys that have none.
  virtual void Insert(const int64_t* keys, int64_t n, int64_t* rows) = 0;
  virtual void Find(const int64_t* keys, int64_t n, int64_t* rows) = 0;
};

class Ours : public Map {
 public:
  // With a width, rows have values, whose mean calls that insert go on with.
  Ours(int64_t rows, const KeyOptions& options, int64_t width)
      : options_(options),
        width_(width),
        values_(rows * width, 1.0f),
        mean_(recsync::KeyMean::StateSize(width)),
        entries_(2 * rows),
        index_(KeyTable::IndexSize(rows, options)),
        sketch_(KeyTable::SketchSize(rows, options)),
        counts_(recsync::kKeyCounts),
        versions_(rows) {
    view_ = {entries_.data(), rows,           index_.data(),
             sketch_.data(),  counts_.data(), versions_.data()};
  }

  void Insert(const int64_t* keys, int64_t n, int64_t* rows) override {
    KeyTable table(options_, view_);
    const int64_t tick = table.NextTick();
    table.FindOrInsert(
        keys, n, tick, rows, nullptr, [&](int64_t row, int64_t key) {
          recsync::RowLock lock(
              &recsync::RowLocks::Global().Of(entries_.data(), row));
          table.Own(row, key, tick);
        });
    if (width_ == 0) return;
    recsync::KeyMean(mean_.data(), width_)
        .Advance(table, n, tick, recsync::RowDecay(), values_.data());
  }
  void Find(const int64_t* keys, int64_t n, int64_t* rows) override {
    KeyTable(options_, view_).Find(keys, n, rows, nullptr);
  }

 private:
  const KeyOptions options_;
  const int64_t width_;
  std::vector<float> values_;
  std::vector<double> mean_;
  std::vector<int64_t> entries_;
  std::vector<uint32_t> index_;
  std::vector<uint8_t> sketch_;
  std::vector<int64_t> counts_;
  std::vector<int64_t> versions_;
  recsync::KeyView view_;
};

template <typename HashMap>
class Other : public Map {
 public:
  explicit Other(int64_t rows) { rows_.reserve(rows); }

  void Insert(const int64_t* keys, int64_t n, int64_t* rows) override {
    for (int64_t i = 0; i < n; ++i) {
      const auto next = static_cast<int64_t>(rows_.size());
      rows[i] = rows_.emplace(keys[i], next).first->second;
    }
  }
  void Find(const int64_t* keys, int64_t n, int64_t* rows) override {
    for (int64_t i = 0; i < n; ++i) {
      const auto it = rows_.find(keys[i]);
      rows[i] = it == rows_.end() ? -1 : it->second;
    }
  }

 private:
  HashMap rows_;
};

// Of the map that is measured.
std::unique_ptr<Map>& Current() {
  static std::unique_ptr<Map> map;
  return map;
}

}  // namespace

extern "C" {

// Makes an empty map the one that is measured: 0 is ours, 1 the standard
// library's, 2 Abseil's. Each has room for all rows from the first. Ours keeps
// the mean of rows of `mean_width` elements, unless that is 0.
void MakeMap(int system, int64_t rows, int64_t partitions, int64_t min_count,
             int64_t mean_width) {
  Current().reset();
  KeyOptions options;
  options.partitions = partitions;
  options.min_count = min_count;
  if (system == 0)
    Current() = std::make_unique<Ours>(rows, options, mean_width);
  if (system == 1) {
    Current() =
        std::make_unique<Other<std::unordered_map<int64_t, int64_t>>>(rows);
  }
  if (system == 2) {
    Current() =
        std::make_unique<Other<absl::flat_hash_map<int64_t, int64_t>>>(rows);
  }
}

void Insert(const int64_t* keys, int64_t n, int64_t* rows) {
  Current()->Insert(keys, n, rows);
}

void Find(const int64_t* keys, int64_t n, int64_t* rows) {
  Current()->Find(keys, n, rows);
}

// What looks rows up by their numbers: a gather of [rows, width] into
// [n, width].
void Gather(const float* values, const int64_t* versions, int64_t rows,
            int64_t width, const int64_t* ids, int64_t n, float* to,
            int64_t* found_versions) {
  recsync::RowReader reader;
  reader.values = values;
  reader.versions = versions;
  reader.rows = rows;
  reader.width = width;
  reader.locks = true;
  recsync::GatherBags(reader, ids, n, recsync::Bags{}, 0, n, to,
                      found_versions);
}

}  // extern "C"
