// Updates rows of a table by a push: expands bags, sums the gradients of rows
// that are named more than once, weighs them by their staleness and applies a
// rule, all in one pass over the rows.
//
//   RowUpdate<AdagradRule> update(rule, options, step, table, push);
//   // in any threads, each partition once:
//   update.Run(partitions, begin, end);
//   // after that, in any threads, each row of the table once, if
//   // MovesAll(rule):
//   update.RunRest(begin, end);
//
// A row and all that lives beside it is read and written under its row lock, so
// that pushes to other rows go on meanwhile and a reader who takes the lock too
// sees a row's value with its version. Rows are fetched into the cache a few
// ahead of their update: a table is much larger than the cache, and a push
// names rows anywhere in it.
//
// A gradient of an earlier life of its row (row_lives.h) is left out. One whose
// weight is 0 is no update, either: its staleness is counted, and the row stays
// as it is, but for what a step does to all rows.
//
// Fresh gradients are never late. Where rows have made later steps, somebody
// has set the global step back, and they go on from there.
//
// A row of a table whose weights decay is decayed up to now before its update,
// as if each push had decayed all rows.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_UPDATE_H_
#define TF_RECSYNC_CC_ENGINE_ROW_UPDATE_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cc/engine/bags.h"
#include "cc/engine/bfloat16.h"
#include "cc/engine/prefetch.h"
#include "cc/engine/row_decay.h"
#include "cc/engine/row_groups.h"
#include "cc/engine/row_lives.h"
#include "cc/engine/row_locks.h"
#include "cc/engine/row_partitions.h"
#include "cc/engine/row_push.h"
#include "cc/engine/row_rounding.h"
#include "cc/engine/saturated.h"
#include "cc/engine/span_update.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/update_options.h"

namespace recsync {

// A table and what lives beside it; nothing is owned.
struct TableView {
  static constexpr int kMaxAccumulators = 2;
  float* values = nullptr;     // [rows, width], or
  BFloat16* narrow = nullptr;  // [rows, width], the other being null
  // [rows, width], or [rows] if the rule has one per row.
  std::array<float*, kMaxAccumulators> accumulators{};
  int64_t* versions = nullptr;      // [rows]
  int64_t* counters = nullptr;      // StalenessCounters
  int32_t* last_periods = nullptr;  // [rows]; null without SWAP
  float* last_updates = nullptr;    // [rows]; null without update_sensitivity
  int32_t* last_steps = nullptr;    // [rows]; null if the rule keeps none
  RowDecay decay;                   // not enabled without weight decay
  const RowRounding* rounding = nullptr;  // of `narrow`; else not needed
  int64_t rows = 0;
  int64_t width = 0;

  // What row locks know the table by.
  const void* id() const {
    return values != nullptr ? static_cast<const void*>(values) : narrow;
  }
};

// The gradient of a group's row, summed into `sum` unless it stands alone;
// `oldest` becomes the oldest version it was pulled at, -1 for a fresh
// gradient. Only gradients of the latest life of those in the group are summed.
inline const float* SumOfGroup(const RowPush& push, int64_t width,
                               const RowGroups& groups, int64_t group,
                               const int32_t* positions,
                               std::vector<float>* sum, int64_t* oldest) {
  int64_t k = groups.first(group);
  const int64_t first = positions[k];
  *oldest = push.pulled == nullptr ? -1 : push.pulled[first];
  if (groups.next(k) < 0 && push.bags.scales == nullptr) {
    return push.gradient + push.bags.bag(first) * width;
  }
  sum->assign(static_cast<size_t>(width), 0.0f);
  for (; k >= 0; k = groups.next(k)) {
    const int64_t position = positions[k];
    if (push.pulled != nullptr &&
        !JoinSum(push.pulled[position], width, sum->data(), oldest)) {
      continue;
    }
    AddScaled(push.gradient + push.bags.bag(position) * width,
              push.bags.scale(position), width, sum->data());
  }
  return sum->data();
}

// A row whose summed gradient is not finite, or -1.
inline int64_t FindNonfiniteRow(const RowPush& push, int64_t width,
                                const RowPartitions& partitions) {
  RowGroups groups;
  std::vector<float> sum;
  for (int64_t i = 0; i < partitions.count(); ++i) {
    groups.Build(partitions.rows(i), partitions.size(i));
    for (int64_t g = 0; g < groups.size(); ++g) {
      int64_t oldest;
      const float* gradient = SumOfGroup(
          push, width, groups, g, partitions.positions(i), &sum, &oldest);
      if (!AllFinite(gradient, width)) return groups.row(g);
    }
  }
  return -1;
}

template <typename Rule>
class RowUpdate {
 public:
  // Reads what was measured before: the weights of all rows refer to that.
  RowUpdate(const Rule& rule, const UpdateOptions& options, int64_t global_step,
            const TableView& table, const RowPush& push)
      : rule_(rule),
        options_(options),
        global_step_(global_step),
        table_(table),
        push_(push),
        measures_(options.weight.uses_last_update()),
        moves_all_(MovesAll(rule)),
        least_decay_(Rule::kReplaces           ? 0.0
                     : table.values == nullptr ? RowDecay::kLeastOfNarrowUpdate
                                               : RowDecay::kLeastOfUpdate),
        // Rows of a table without any may be of any width.
        zeros_(moves_all_ && table.rows > 0 ? table.width : 0, 0.0f),
        apply_(measures_ ? ChooseSpanUpdate<Rule, true>()
                         : ChooseSpanUpdate<Rule, false>()) {
    if (!options.weight.rescales()) return;
    RowLock lock(&CountersLock());
    const auto measured =
        StalenessCounters(table.counters).BeginPush(options.weight.window);
    mean_ = measured.mean;
    deviation_ = std::sqrt(measured.variance);
  }

  // Updates the rows of partitions [begin, end).
  void Run(const RowPartitions& partitions, int64_t begin, int64_t end) const {
    LocalStalenessCounters counted;
    Scratch& scratch = OwnScratch();
    for (int64_t i = begin; i < end; ++i) {
      RunPartition(partitions, i, &scratch, &counted);
    }
    RowLock lock(&CountersLock());
    StalenessCounters(table_.counters).Merge(counted.data());
  }

  // Whether a step moves rows that its push does not name, too.
  static bool MovesAll(const Rule& rule) {
    if constexpr (Rule::kKeepsSteps) return !rule.lazy;
    return false;
  }

  // Has those of rows [begin, end) that have not made this step make it, with a
  // gradient of 0. That is no update: their versions stay. Rows make no more of
  // such steps than `last_steps` can count.
  void RunRest(int64_t begin, int64_t end) const {
    Scratch& scratch = OwnScratch();
    for (int64_t row = begin; row < end; ++row) {
      RowLock lock(&RowLocks::Global().Of(table_.id(), row));
      const int32_t made = Saturated<int32_t>(global_step_);
      if (table_.last_steps[row] != made) SetBackIfFresh(row);
      if (table_.last_steps[row] >= made) continue;
      const auto slots = SlotsOf(row);
      float* w = Widened(row, &scratch);
      Decay(row, w);
      CatchUp(row, global_step_, w, slots.data(), SwapDecay(row));
      // Which is no update of its own: its version stays.
      Narrow(row, table_.versions[row], global_step_, w);
    }
  }

 private:
  // Rows that are fetched ahead.
  static constexpr int64_t kAhead = 4;
  // Staleness up to which weights are remembered.
  static constexpr int64_t kRemembered = 64;

  struct Scratch {
    RowGroups groups;
    std::vector<float> sum;
    std::vector<float> wide;  // a row of bfloat16
  };

  // A partition is small, so what a thread keeps is, too.
  static Scratch& OwnScratch() {
    static thread_local Scratch scratch;
    return scratch;
  }

  SpinLock& CountersLock() const {
    return RowLocks::Global().Of(table_.counters, 0);
  }

  void RunPartition(const RowPartitions& partitions, int64_t partition,
                    Scratch* scratch, LocalStalenessCounters* counted) const {
    RowGroups& groups = scratch->groups;
    groups.Build(partitions.rows(partition), partitions.size(partition));
    const int32_t* positions = partitions.positions(partition);
    const int64_t count = groups.size();
    const bool skips = options_.nonfinite == Nonfinite::kSkip;
    std::array<float, kRemembered> weights;
    weights.fill(-1.0f);
    for (int64_t g = 0; g < std::min(kAhead, count); ++g) {
      Fetch(groups.row(g), positions[groups.first(g)]);
    }
    for (int64_t g = 0; g < count; ++g) {
      if (g + kAhead < count) {
        Fetch(groups.row(g + kAhead), positions[groups.first(g + kAhead)]);
      }
      int64_t oldest;
      const float* gradient = SumOfGroup(push_, table_.width, groups, g,
                                         positions, &scratch->sum, &oldest);
      if (skips && !AllFinite(gradient, table_.width)) {
        counted->AddSkipped();
        continue;
      }
      const int64_t tau =
          UpdateRow(groups.row(g), gradient, oldest, &weights, scratch);
      if (tau > 0) {
        counted->Add(tau);
      } else if (oldest != kNoLife) {
        counted->AddSkipped();
      }
    }
  }

  RECSYNC_PREFETCHING void Fetch(int64_t row, int64_t position) const {
    const int64_t start = row * table_.width;
    if (table_.values != nullptr) {
      Prefetch(table_.values + start, 4 * table_.width);
    } else {
      Prefetch(table_.narrow + start, 2 * table_.width);
    }
    for (int a = 0; a < Rule::kAccumulators; ++a) {
      Prefetch(SlotOf(a, row), 4 * SlotWidth());
    }
    Prefetch(table_.versions + row, 1);
    table_.decay.Fetch(row);
    if (table_.last_periods != nullptr) {
      Prefetch(table_.last_periods + row, 1);
    }
    if (measures_) Prefetch(table_.last_updates + row, 1);
    if (Rule::kKeepsSteps) Prefetch(table_.last_steps + row, 1);
    Prefetch(push_.gradient + push_.bags.bag(position) * table_.width,
             4 * table_.width);
  }

  // Returns the staleness; 0 if the gradient is of an earlier life of the row.
  // Nothing is updated then, nor with a weight of 0.
  int64_t UpdateRow(int64_t row, const float* gradient, int64_t oldest,
                    std::array<float, kRemembered>* weights,
                    Scratch* scratch) const {
    const int64_t width = table_.width;
    const auto slots = SlotsOf(row);
    RowLock lock(&RowLocks::Global().Of(table_.id(), row));
    int64_t& version = table_.versions[row];
    if (oldest >= 0 && LifeOf(oldest) != LifeOf(version)) return 0;
    // The version may have been set back since the push was checked.
    const int64_t tau =
        oldest < 0 ? 1 : std::max<int64_t>(version - oldest + 1, 1);
    const float rho = Weight(tau, row, weights);
    if (rho == 0.0f) return tau;
    SetBackIfFresh(row);
    float decay = SwapDecay(row);
    float* w = Widened(row, scratch);
    Decay(row, w);
    double squares;
    if constexpr (Rule::kKeepsSteps) {
      if (moves_all_) {
        decay = CatchUp(row, global_step_ - 1, w, slots.data(), decay);
      }
      squares = apply_(rule_.At(global_step_, &table_.last_steps[row]), w,
                       slots.data(), gradient, width, rho, decay);
    } else {
      squares = apply_(rule_, w, slots.data(), gradient, width, rho, decay);
    }
    Narrow(row, version, /*step=*/0, w);
    if (measures_) {
      table_.last_updates[row] = static_cast<float>(std::sqrt(squares));
    }
    // Atomically, for those who check versions without the row's lock.
    __atomic_store_n(&version, SaturatedSum(version, 1), __ATOMIC_RELAXED);
    return tau;
  }

  using Slots = std::array<float*, TableView::kMaxAccumulators>;

  // The elements of an accumulator that belong to a row.
  int64_t SlotWidth() const { return Rule::kOnePerRow ? 1 : table_.width; }

  float* SlotOf(int a, int64_t row) const {
    return table_.accumulators[a] + row * SlotWidth();
  }

  Slots SlotsOf(int64_t row) const {
    Slots slots{};
    for (int a = 0; a < Rule::kAccumulators; ++a) {
      slots[a] = SlotOf(a, row);
    }
    return slots;
  }

  // Lock: the row's, as for all below.
  void SetBackIfFresh(int64_t row) const {
    if (push_.pulled != nullptr) return;
    if (options_.swap.enabled()) {
      options_.swap.SetBack(&table_.last_periods[row], global_step_);
    }
    if constexpr (Rule::kKeepsSteps) {
      Rule::SetBack(global_step_, &table_.last_steps[row]);
    }
  }

  float SwapDecay(int64_t row) const {
    return options_.swap.enabled()
               ? options_.swap.DecaySince(&table_.last_periods[row],
                                          global_step_)
               : 1.0f;
  }

  // The weight decay of a row that is given as floats.
  void Decay(int64_t row, float* w) const {
    if (!table_.decay.enabled()) return;
    table_.decay.BringUpToDate(row, least_decay_, w, table_.width);
  }

  // The row as floats: itself, or a copy in `scratch`.
  float* Widened(int64_t row, Scratch* scratch) const {
    const int64_t width = table_.width;
    if (table_.values != nullptr) return table_.values + row * width;
    const BFloat16* narrow = table_.narrow + row * width;
    scratch->wide.resize(width);
    float* w = scratch->wide.data();
    for (int64_t i = 0; i < width; ++i) w[i] = static_cast<float>(narrow[i]);
    return w;
  }

  // Writes back what `Widened` gave. The row's version and the step tell this
  // from all other times.
  void Narrow(int64_t row, int64_t version, int64_t step,
              const float* w) const {
    if (table_.values != nullptr) return;
    table_.rounding->Round(row, version, step, w, table_.width,
                           table_.narrow + row * table_.width);
  }

  // Makes the steps up to `step` that the row has not made, one by one as long
  // as it moves. Returns what is left of SWAP's decay: 1 if there was a step
  // that it went into.
  float CatchUp(int64_t row, int64_t step, float* w, float* const* slots,
                float decay) const {
    if constexpr (Rule::kKeepsSteps) {
      int32_t& last = table_.last_steps[row];
      step = Saturated<int32_t>(step);
      if (last >= step) return decay;
      const int64_t moving = rule_.MovingSteps(slots, table_.width);
      for (int64_t made = 0; last < step; ++made) {
        const int64_t next = made < moving ? int64_t{last} + 1 : step;
        Rule rule = rule_;
        if (next != global_step_) rule.Begin(next);
        apply_(rule.At(next, &last), w, slots, zeros_.data(), table_.width,
               1.0f, decay);
        decay = 1.0f;
      }
    }
    return decay;
  }

  float Weight(int64_t tau, int64_t row,
               std::array<float, kRemembered>* weights) const {
    const StalenessWeight& weight = options_.weight;
    if (weight.decay == StalenessDecay::kConstant) return 1.0f;
    if (measures_ || tau >= kRemembered) {
      return static_cast<float>(weight.Of(
          static_cast<double>(tau), measures_ ? table_.last_updates[row] : 0.0,
          deviation_, mean_));
    }
    float& known = (*weights)[tau];
    if (known < 0.0f) {
      known = static_cast<float>(
          weight.Of(static_cast<double>(tau), 0.0, deviation_, mean_));
    }
    return known;
  }

  const Rule rule_;
  const UpdateOptions options_;
  const int64_t global_step_;
  const TableView table_;
  const RowPush push_;
  const bool measures_;
  const bool moves_all_;
  const double least_decay_;        // that is not left pending
  const std::vector<float> zeros_;  // a gradient
  const SpanUpdate<Rule> apply_;
  double mean_ = 0.0;
  double deviation_ = 0.0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_UPDATE_H_
