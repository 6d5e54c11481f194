// Finds out, for the ids of a batch, which rows of which tables they are.
//
// A feature gives each example a bag of ids; the bag's pooled vector is the
// weighted sum of the rows that the ids name. A feature's table is split into
// shards, modulo their number, and every shard is a range of rows of one of the
// physical tables that the parameter servers hold.
//
//   IdRouter router(&features, has_bags);
//   const Result routed = router.Route(inputs, batch);
//   ... router.table(t).rows ...
//
// Of a physical table with bags, the bags are numbered in the order of their
// slots, slot = feature * batch + example; only bags that have an id there are
// listed. Without bags every slot takes one row, and every row is listed once,
// however many slots take it: popular rows travel once.
//
// Thread compatible.

#ifndef TF_RECSYNC_CC_ENGINE_ID_ROUTER_H_
#define TF_RECSYNC_CC_ENGINE_ID_ROUTER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
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

// Numbers different rows in the order of their first appearance.
class RowNumbers {
 public:
  explicit RowNumbers(int64_t most) {
    size_t capacity = 16;
    while (capacity < static_cast<size_t>(most) * 2) capacity *= 2;
    entries_.assign(capacity, {0, -1});
    mask_ = capacity - 1;
  }

  // The number of a row; `next` where it is new, and then *is_new is true.
  int32_t Number(int64_t row, int32_t next, bool* is_new) {
    uint64_t x = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ull;
    size_t i = static_cast<size_t>(x ^ (x >> 32)) & mask_;
    while (entries_[i].number < 0 || entries_[i].row != row) {
      if (entries_[i].number < 0) {
        entries_[i] = {row, next};
        *is_new = true;
        return next;
      }
      i = (i + 1) & mask_;
    }
    *is_new = false;
    return entries_[i].number;
  }

 private:
  struct Entry {
    int64_t row;
    int32_t number;  // -1: there is none
  };
  std::vector<Entry> entries_;
  size_t mask_;
};

class IdRouter {
 public:
  // `has_bags` tells for each physical table whether its features have bags.
  IdRouter(const std::vector<RoutedFeature>* features,
           const std::vector<bool>& has_bags)
      : features_(*features), has_bags_(has_bags), tables_(has_bags.size()) {}

  const RoutedTable& table(int t) const { return tables_[t]; }

  template <typename Index>
  Result Route(const std::vector<RoutedInput<Index>>& inputs, int64_t batch) {
    int64_t ids = 0;
    std::vector<int64_t> most(tables_.size(), 0);  // rows of each table
    for (size_t f = 0; f < features_.size(); ++f) {
      const RoutedFeature& feature = features_[f];
      const RoutedInput<Index>& input = inputs[f];
      if (Result shape = CheckShape(feature, input, batch); !shape.ok())
        return shape;
      ids += input.n;
      for (const ShardPlace& shard : feature.shards)
        most[shard.table] += input.n;
      if (feature.out_of_range != OutOfRange::kError) continue;
      if (feature.partitions > 0) continue;  // Every key is one.
      for (int64_t i = 0; i < input.n; ++i) {
        const int64_t id = static_cast<int64_t>(input.ids[i]);
        if (id < 0 || id >= feature.rows) {
          return Result::Error(
              "feature ", feature.name, " has id ", id, " at position ", i,
              ", table ", feature.table, " has rows 0 to ", feature.rows - 1,
              "; out_of_range='clip' or 'hash' would accept it");
        }
      }
    }
    if (static_cast<int64_t>(features_.size()) * batch > INT32_MAX ||
        ids > INT32_MAX) {
      return Result::Error("a batch of ", batch, " examples with ", ids,
                           " ids is too large");
    }
    std::vector<RowNumbers> numbers;
    for (size_t t = 0; t < tables_.size(); ++t) {
      tables_[t] = RoutedTable();
      numbers.emplace_back(has_bags_[t] ? 0 : most[t]);
    }
    std::vector<int64_t> last_slot(tables_.size(), -1);
    Visit(inputs, batch, [&](int t, int64_t row, float scale, int64_t slot) {
      RoutedTable& table = tables_[t];
      if (!has_bags_[t]) {
        bool is_new;
        const int32_t next = static_cast<int32_t>(table.rows.size());
        table.sources.push_back(numbers[t].Number(row, next, &is_new));
        table.slots.push_back(static_cast<int32_t>(slot));
        if (is_new) table.rows.push_back(row);
        return;
      }
      if (last_slot[t] != slot) {
        table.slots.push_back(static_cast<int32_t>(slot));
        last_slot[t] = slot;
      }
      table.rows.push_back(row);
      table.bags.push_back(static_cast<int32_t>(table.slots.size()) - 1);
      table.scales.push_back(scale);
    });
    return Result::Ok();
  }

 private:
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

  // Calls visit(physical table, row there, scale, slot).
  template <typename Index, typename Visitor>
  void Visit(const std::vector<RoutedInput<Index>>& inputs, int64_t batch,
             const Visitor& visit) const {
    for (size_t f = 0; f < features_.size(); ++f) {
      const RoutedFeature& feature = features_[f];
      const RoutedInput<Index>& input = inputs[f];
      const int64_t count = static_cast<int64_t>(feature.shards.size());
      const bool ragged = input.splits != nullptr;
      for (int64_t b = 0; b < batch; ++b) {
        const int64_t begin = ragged ? input.splits[b] : b * feature.length;
        const int64_t end =
            ragged ? input.splits[b + 1] : (b + 1) * feature.length;
        const int64_t slot = static_cast<int64_t>(f) * batch + b;
        const float bag_scale =
            feature.is_single() ? 1.0f : BagScale(feature, input, begin, end);
        for (int64_t i = begin; i < end; ++i) {
          int64_t id = static_cast<int64_t>(input.ids[i]);
          int64_t shard = 0, row = id;
          if (feature.partitions > 0) {
            shard = PartitionOfKey(id, feature.partitions) % count;
          } else {
            id = RowOf(feature, id);
            if (count > 1) shard = id % count;
            row = feature.shards[shard].offset + (count == 1 ? id : id / count);
          }
          const ShardPlace& place = feature.shards[shard];
          const float weight =
              input.weights == nullptr ? 1.0f : input.weights[i];
          visit(place.table, row, weight * bag_scale, slot);
        }
      }
    }
  }

  const std::vector<RoutedFeature>& features_;
  const std::vector<bool>& has_bags_;
  std::vector<RoutedTable> tables_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ID_ROUTER_H_
