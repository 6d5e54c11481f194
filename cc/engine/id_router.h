// Finds out, for the ids of a batch, which rows of which tables they are.
//
// A feature gives each example a bag of ids; the bag's pooled vector is the
// weighted sum of the rows that the ids name. A feature's table is split into
// shards, modulo their number, and every shard is a range of rows of one of the
// physical tables that the parameter servers hold.
//
//   IdRouter router(features, tables);
//   status = router.Count(inputs, batch);     // checks, and sizes the outputs
//   ... allocate by router.ids(t) and router.bags(t) ...
//   router.Fill(inputs, outputs);
//
// The bags of a physical table are numbered in the order of their slots, where
// slot = feature * batch + example. Only bags that have an id there are listed.
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

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

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

// A physical table's part of what comes out; pointers may be null where the
// caller does not want it.
struct RoutedOutput {
  int64_t* ids;    // rows of the physical table
  int32_t* bags;   // the bag of each id
  float* scales;   // the scale of each id
  int32_t* slots;  // the slot of each bag
};

class IdRouter {
 public:
  IdRouter(std::vector<RoutedFeature> features, int tables)
      : features_(std::move(features)), ids_(tables), bags_(tables) {}

  const std::vector<RoutedFeature>& features() const { return features_; }
  int64_t ids(int table) const { return ids_[table]; }
  int64_t bags(int table) const { return bags_[table]; }

  // Checks the batch and counts what goes to each physical table.
  template <typename Index>
  absl::Status Count(const std::vector<RoutedInput<Index>>& inputs,
                     int64_t batch) {
    std::fill(ids_.begin(), ids_.end(), 0);
    std::fill(bags_.begin(), bags_.end(), 0);
    for (size_t f = 0; f < features_.size(); ++f) {
      const RoutedFeature& feature = features_[f];
      const RoutedInput<Index>& input = inputs[f];
      if (absl::Status s = CheckShape(feature, input, batch); !s.ok()) return s;
      if (feature.out_of_range == OutOfRange::kError) {
        for (int64_t i = 0; i < input.n; ++i) {
          const int64_t id = static_cast<int64_t>(input.ids[i]);
          if (id < 0 || id >= feature.rows) {
            return absl::InvalidArgumentError(absl::StrCat(
                "feature ", feature.name, " has id ", id, " at position ", i,
                ", table ", feature.table, " has rows 0 to ", feature.rows - 1,
                "; out_of_range='clip' or 'hash' would accept it"));
          }
        }
      }
    }
    Visit(inputs, batch,
          [this](int table, int64_t, float, int64_t, bool first) {
            ++ids_[table];
            bags_[table] += first;
          });
    return absl::OkStatus();
  }

  // Writes the outputs, [tables], sized by the last call of Count.
  template <typename Index>
  void Fill(const std::vector<RoutedInput<Index>>& inputs, int64_t batch,
            const std::vector<RoutedOutput>& outputs) {
    std::vector<int64_t> next_id(outputs.size(), 0);
    std::vector<int32_t> last_bag(outputs.size(), -1);
    Visit(inputs, batch,
          [&](int table, int64_t row, float scale, int64_t slot, bool first) {
            const RoutedOutput& out = outputs[table];
            const int64_t i = next_id[table]++;
            if (first) {
              const int32_t bag = ++last_bag[table];
              if (out.slots != nullptr) {
                out.slots[bag] = static_cast<int32_t>(slot);
              }
            }
            out.ids[i] = row;
            if (out.bags != nullptr) out.bags[i] = last_bag[table];
            if (out.scales != nullptr) out.scales[i] = scale;
          });
  }

 private:
  template <typename Index>
  static absl::Status CheckShape(const RoutedFeature& feature,
                                 const RoutedInput<Index>& input,
                                 int64_t batch) {
    if (input.splits == nullptr) {
      if (input.n == batch * feature.length) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat("feature ", feature.name, " of table ", feature.table,
                       " has ", input.n, " ids, but the batch has ", batch,
                       " examples of ", feature.length, " each"));
    }
    if (input.splits[0] != 0 || input.splits[batch] != input.n) {
      return absl::InvalidArgumentError(
          absl::StrCat("the row splits of feature ", feature.name, " go from ",
                       input.splits[0], " to ", input.splits[batch],
                       ", it has ", input.n, " ids"));
    }
    for (int64_t b = 0; b < batch; ++b) {
      if (input.splits[b] > input.splits[b + 1]) {
        return absl::InvalidArgumentError(
            absl::StrCat("the row splits of feature ", feature.name,
                         " decrease at example ", b));
      }
    }
    return absl::OkStatus();
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
      case OutOfRange::kHash: {
        // The finalizer of MurmurHash3.
        uint64_t x = static_cast<uint64_t>(id);
        x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
        x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
        x ^= x >> 33;
        return static_cast<int64_t>(x % static_cast<uint64_t>(feature.rows));
      }
    }
    return id;
  }

  // Calls visit(physical table, row there, scale, slot, first of its bag).
  template <typename Index, typename Visitor>
  void Visit(const std::vector<RoutedInput<Index>>& inputs, int64_t batch,
             const Visitor& visit) const {
    std::vector<int64_t> last_slot(ids_.size(), -1);
    for (size_t f = 0; f < features_.size(); ++f) {
      const RoutedFeature& feature = features_[f];
      const RoutedInput<Index>& input = inputs[f];
      const int64_t count = static_cast<int64_t>(feature.shards.size());
      for (int64_t b = 0; b < batch; ++b) {
        const bool ragged = input.splits != nullptr;
        const int64_t begin = ragged ? input.splits[b] : b * feature.length;
        const int64_t end =
            ragged ? input.splits[b + 1] : (b + 1) * feature.length;
        const int64_t slot = static_cast<int64_t>(f) * batch + b;
        const float bag_scale =
            feature.is_single() ? 1.0f : BagScale(feature, input, begin, end);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t id = RowOf(feature, static_cast<int64_t>(input.ids[i]));
          const ShardPlace& place =
              feature.shards[count == 1 ? 0 : static_cast<size_t>(id % count)];
          const int64_t row = place.offset + (count == 1 ? id : id / count);
          const float weight =
              input.weights == nullptr ? 1.0f : input.weights[i];
          const bool first = last_slot[place.table] != slot;
          last_slot[place.table] = slot;
          visit(place.table, row, weight * bag_scale, slot, first);
        }
      }
    }
  }

  const std::vector<RoutedFeature> features_;
  std::vector<int64_t> ids_;   // by physical table
  std::vector<int64_t> bags_;  // by physical table
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ID_ROUTER_H_
