// Finds out, for the ids of a batch, which rows of which tables they are.
//
// A feature gives each example a bag of ids; the bag's pooled vector is the
// weighted sum of the rows that the ids name. A feature's table is split into
// shards, modulo their number, and every shard is a range of rows of one of the
// physical tables that the parameter servers hold.
//
//   const IdRouter router(features, has_bags);
//   std::vector<RoutedTable> tables;
//   const Result routed = router.Route(inputs, batch, &tables);
//   ... tables[t].rows ...
//
// Of a physical table with bags, the bags are numbered in the order of their
// slots, slot = feature * batch + example; only bags that have an id there are
// listed. Without bags every slot takes one row, and every row is listed once,
// however many slots take it: popular rows travel once.
//
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_ID_ROUTER_H_
#define TF_RECSYNC_CC_ENGINE_ID_ROUTER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/engine/key_hash.h"
#include "cc/engine/result.h"

namespace recsync {

enum class OutOfRange { kError, kClip, kHash };
enum class Combiner { kSum, kMean, kSqrtN };

// Where a shard of a feature's table lies.
struct ShardPlace {
  int table;       // the physical table
  int64_t offset;  // its first row there
};

struct RoutedFeature {
  std::string name;
  std::string table;
  int64_t rows;    // of the table, all shards together
  int64_t length;  // ids per example, or 0 where the feature is ragged
  bool weighted;
  Combiner combiner;
  OutOfRange out_of_range;
  std::vector<ShardPlace> shards;
  // Of a table with keys: into how many partitions its keys fall, a power of
  // two. An id is a key then, and stands in place of a row, which the server
  // finds. 0: ids are rows.
  int64_t partitions = 0;

  // Whether every example has exactly one id, of scale 1.
  bool is_single() const { return length == 1 && !weighted; }
};

// A feature's part of a batch.
template <typename Index>
struct RoutedInput {
  const Index* ids;
  int64_t n;
  const int64_t* splits;  // [batch + 1] of a ragged feature, else null
  const float* weights;   // [n], or null
};

// What to look up in a physical table, and where it goes.
struct RoutedTable {
  std::vector<int64_t> rows;   // of the physical table
  std::vector<int32_t> bags;   // with bags: the bag of each row
  std::vector<float> scales;   // with bags: the scale of each row in its bag
  std::vector<int32_t> slots;  // with bags: of each bag; else in any number
  std::vector<int32_t>
      sources;  // without bags: the position in `rows` of each slot
};

// Numbers different ids in the order of their first appearance.
class IdNumbers {
 public:
  // Forgets all ids, and makes room for `most` of them.
  void Reset(int64_t most) {
    size_t capacity = 16;
    while (capacity < static_cast<size_t>(most) * 2) capacity *= 2;
    entries_.assign(capacity, kNone);
    mask_ = capacity - 1;
    ids_.resize(static_cast<size_t>(most) + 1);
    size_ = 0;
  }

  int32_t size() const { return size_; }
  int64_t id(size_t number) const { return ids_[number]; }

  // The number of an id. Whether an id is a new one can't be foreseen, so
  // there is no branch for that: the id is written where a new one belongs, and
  // an empty entry is taken for one that names this place.
  int32_t Number(int64_t id) {
    uint64_t x = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull;
    size_t i = static_cast<size_t>(x ^ (x >> 32)) & mask_;
    ids_[size_] = id;
    while (true) {
      const int32_t entry = entries_[i];
      const int32_t number = entry == kNone ? size_ : entry;
      if (ids_[number] == id) {
        entries_[i] = number;
        size_ += number == size_;
        return number;
      }
      i = (i + 1) & mask_;
    }
  }

 private:
  static constexpr int32_t kNone = -1;
  std::vector<int32_t> entries_;  // a hash table of numbers
  std::vector<int64_t> ids_;      // one more than there can be
  size_t mask_ = 0;
  int32_t size_ = 0;
};

class IdRouter {
 public:
  // `has_bags` tells for each physical table whether its features have bags.
  IdRouter(std::vector<RoutedFeature> features,
           const std::vector<bool>& has_bags)
      : features_(std::move(features)),
        has_bags_(has_bags.begin(), has_bags.end()) {
    std::unordered_map<std::string, size_t> tables;
    for (const RoutedFeature& feature : features_) {
      const size_t next = tables.size();
      table_of_.push_back(tables.emplace(feature.table, next).first->second);
    }
    features_of_.resize(tables.size());
    for (const size_t table : table_of_) ++features_of_[table];
  }

  const std::vector<RoutedFeature>& features() const { return features_; }

  // Finds the rows of each physical table.
  template <typename Index>
  Result Route(const std::vector<RoutedInput<Index>>& inputs, int64_t batch,
               std::vector<RoutedTable>* routed) const {
    int64_t ids = 0;
    std::vector<int64_t> ids_of(features_of_.size(), 0);
    for (size_t f = 0; f < features_.size(); ++f) {
      if (Result checked = Check(features_[f], inputs[f], batch); !checked.ok())
        return checked;
      ids += inputs[f].n;
      ids_of[table_of_[f]] += inputs[f].n;
    }
    if (static_cast<int64_t>(features_.size()) * batch > INT32_MAX ||
        ids > INT32_MAX) {
      return Result::Error("a batch of ", batch, " examples with ", ids,
                           " ids is too large");
    }
    MakeRoom(inputs, routed);
    // Most tables have one feature. All of these use the same memory, one after
    // the other, which so stays in the processor's cache.
    Places of_one_feature;
    std::vector<Places> of_several(features_of_.size());
    for (size_t f = 0; f < features_.size(); ++f) {
      const int64_t slot = static_cast<int64_t>(f) * batch;
      if (!ListsRowsOnce(features_[f])) {
        RouteBags(features_[f], inputs[f], batch, slot, routed);
        continue;
      }
      const size_t table = table_of_[f];
      const bool alone = features_of_[table] == 1;
      Places* places = alone ? &of_one_feature : &of_several[table];
      if (alone || places->of_numbers.empty()) {
        places->numbers.Reset(ids_of[table]);
        places->of_numbers.clear();
      }
      RouteSingles(features_[f], inputs[f], slot, places, routed);
    }
    return Result::Ok();
  }

 private:
  // Where a row is listed: in which physical table, and at which position.
  struct Place {
    int table;
    int32_t position;
  };

  struct Places {
    IdNumbers numbers;
    std::vector<Place> of_numbers;
  };

  template <typename Index>
  static Result Check(const RoutedFeature& feature,
                      const RoutedInput<Index>& input, int64_t batch) {
    if (Result shape = CheckShape(feature, input, batch); !shape.ok())
      return shape;
    if (feature.out_of_range != OutOfRange::kError) return Result::Ok();
    if (feature.partitions > 0) return Result::Ok();  // Every key is one.
    const uint64_t rows = static_cast<uint64_t>(feature.rows);
    const auto is_outside = [rows](Index id) {
      return static_cast<uint64_t>(static_cast<int64_t>(id)) >= rows;
    };
    bool any = false;  // without a branch for each id
    for (int64_t i = 0; i < input.n; ++i) any |= is_outside(input.ids[i]);
    if (!any) return Result::Ok();
    const Index* bad = std::find_if(input.ids, input.ids + input.n, is_outside);
    return Result::Error("feature ", feature.name, " has id ",
                         static_cast<int64_t>(*bad), " at position ",
                         bad - input.ids, ", table ", feature.table,
                         " has rows 0 to ", feature.rows - 1,
                         "; out_of_range='clip' or 'hash' would accept it");
  }

  template <typename Index>
  static Result CheckShape(const RoutedFeature& feature,
                           const RoutedInput<Index>& input, int64_t batch) {
    if (input.splits == nullptr) {
      if (input.n == batch * feature.length) return Result::Ok();
      return Result::Error("feature ", feature.name, " of table ",
                           feature.table, " has ", input.n,
                           " ids, but the batch has ", batch, " examples of ",
                           feature.length, " each");
    }
    if (input.splits[0] != 0 || input.splits[batch] != input.n) {
      return Result::Error("the row splits of feature ", feature.name,
                           " go from ", input.splits[0], " to ",
                           input.splits[batch], ", it has ", input.n, " ids");
    }
    for (int64_t b = 0; b < batch; ++b) {
      if (input.splits[b] > input.splits[b + 1]) {
        return Result::Error("the row splits of feature ", feature.name,
                             " decrease at example ", b);
      }
    }
    return Result::Ok();
  }

  // The factor that makes a bag's weighted sum what the combiner wants.
  template <typename Index>
  static float BagScale(const RoutedFeature& feature,
                        const RoutedInput<Index>& input, int64_t begin,
                        int64_t end) {
    if (feature.combiner == Combiner::kSum) return 1.0f;
    double total = 0.0;
    for (int64_t i = begin; i < end; ++i) {
      const double w = input.weights == nullptr ? 1.0 : input.weights[i];
      total += feature.combiner == Combiner::kMean ? w : w * w;
    }
    if (feature.combiner == Combiner::kSqrtN) total = std::sqrt(total);
    // Weights that add up to nothing: a vector of zeros, not of NaN.
    return total == 0.0 ? 0.0f : static_cast<float>(1.0 / total);
  }

  static int64_t RowOf(const RoutedFeature& feature, int64_t id) {
    switch (feature.out_of_range) {
      case OutOfRange::kError:
        return id;
      case OutOfRange::kClip:
        return std::min(std::max<int64_t>(id, 0), feature.rows - 1);
      case OutOfRange::kHash:
        return static_cast<int64_t>(KeyHash(id) %
                                    static_cast<uint64_t>(feature.rows));
    }
    return id;
  }

  // Where the row of an id is: a physical table, and the row there.
  static ShardPlace Find(const RoutedFeature& feature, int64_t id) {
    const int64_t count = static_cast<int64_t>(feature.shards.size());
    if (feature.partitions > 0) {
      return {
          feature.shards[PartitionOfKey(id, feature.partitions) % count].table,
          id};
    }
    const ShardPlace& shard = feature.shards[count == 1 ? 0 : id % count];
    return {shard.table, shard.offset + (count == 1 ? id : id / count)};
  }

  static int64_t RowOrKey(const RoutedFeature& feature, int64_t id) {
    return feature.partitions > 0 ? id : RowOf(feature, id);
  }

  // Empties all tables, with as much room as they need if each shard gets as
  // many ids as the others.
  template <typename Index>
  void MakeRoom(const std::vector<RoutedInput<Index>>& inputs,
                std::vector<RoutedTable>* routed) const {
    std::vector<size_t> ids(has_bags_.size(), 0);
    for (size_t f = 0; f < features_.size(); ++f) {
      const std::vector<ShardPlace>& shards = features_[f].shards;
      for (const ShardPlace& shard : shards) {
        ids[shard.table] += static_cast<size_t>(inputs[f].n) / shards.size();
      }
    }
    routed->assign(has_bags_.size(), RoutedTable());
    for (size_t t = 0; t < has_bags_.size(); ++t) {
      RoutedTable& table = (*routed)[t];
      table.rows.reserve(ids[t]);
      table.slots.reserve(ids[t]);
      if (has_bags_[t]) {
        table.bags.reserve(ids[t]);
        table.scales.reserve(ids[t]);
      } else {
        table.sources.reserve(ids[t]);
      }
    }
  }

  // Whether there is a table of the feature's without bags.
  bool ListsRowsOnce(const RoutedFeature& feature) const {
    return std::any_of(
        feature.shards.begin(), feature.shards.end(),
        [this](const ShardPlace& shard) { return !has_bags_[shard.table]; });
  }

  static void AddToBag(int64_t row, float scale, int64_t slot,
                       RoutedTable* table) {
    if (table->slots.empty() || table->slots.back() != slot) {
      table->slots.push_back(static_cast<int32_t>(slot));
    }
    table->rows.push_back(row);
    table->bags.push_back(static_cast<int32_t>(table->slots.size()) - 1);
    table->scales.push_back(scale);
  }

  template <typename Index>
  void RouteBags(const RoutedFeature& feature, const RoutedInput<Index>& input,
                 int64_t batch, int64_t first_slot,
                 std::vector<RoutedTable>* routed) const {
    const bool ragged = input.splits != nullptr;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t begin = ragged ? input.splits[b] : b * feature.length;
      const int64_t end =
          ragged ? input.splits[b + 1] : (b + 1) * feature.length;
      const float bag_scale =
          feature.is_single() ? 1.0f : BagScale(feature, input, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        const float weight = input.weights == nullptr ? 1.0f : input.weights[i];
        const ShardPlace place = Find(
            feature, RowOrKey(feature, static_cast<int64_t>(input.ids[i])));
        AddToBag(place.offset, weight * bag_scale, first_slot + b,
                 &(*routed)[place.table]);
      }
    }
  }

  // Of a feature with one id for each example.
  template <typename Index>
  void RouteSingles(const RoutedFeature& feature,
                    const RoutedInput<Index>& input, int64_t first_slot,
                    Places* places, std::vector<RoutedTable>* routed) const {
    std::vector<int32_t> numbers(static_cast<size_t>(input.n));
    for (int64_t i = 0; i < input.n; ++i) {
      numbers[i] = places->numbers.Number(
          RowOrKey(feature, static_cast<int64_t>(input.ids[i])));
    }
    std::vector<Place>& of_numbers = places->of_numbers;
    size_t number = of_numbers.size();
    of_numbers.resize(static_cast<size_t>(places->numbers.size()));
    for (; number < of_numbers.size(); ++number) {
      const ShardPlace place = Find(feature, places->numbers.id(number));
      std::vector<int64_t>& rows = (*routed)[place.table].rows;
      of_numbers[number].table = place.table;
      of_numbers[number].position = static_cast<int32_t>(rows.size());
      if (!has_bags_[place.table]) rows.push_back(place.offset);
    }
    for (int64_t i = 0; i < input.n; ++i) {
      const Place& place = of_numbers[numbers[i]];
      RoutedTable& table = (*routed)[place.table];
      const int64_t slot = first_slot + i;
      if (has_bags_[place.table]) {
        const int64_t id = places->numbers.id(numbers[i]);
        AddToBag(Find(feature, id).offset, 1.0f, slot, &table);
        continue;
      }
      table.sources.push_back(place.position);
      table.slots.push_back(static_cast<int32_t>(slot));
    }
  }

  const std::vector<RoutedFeature> features_;
  const std::vector<char> has_bags_;
  std::vector<size_t> table_of_;  // of each feature, by numbers of names
  std::vector<int> features_of_;  // of each such table, how many
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ID_ROUTER_H_
