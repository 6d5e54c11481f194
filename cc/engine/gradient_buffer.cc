#include "cc/engine/gradient_buffer.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "cc/engine/limits.h"
#include "cc/engine/row_checks.h"
#include "cc/engine/saturated.h"

namespace recsync {
namespace {

using Versions = GradientSums::Versions;

Versions GivenBy(const int64_t* versions) {
  return versions == nullptr ? Versions::kNone : Versions::kGiven;
}

bool Disagree(Versions a, Versions b) {
  return a != Versions::kUnknown && b != Versions::kUnknown && a != b;
}

// The first of `n` numbers that is negative, or -1.
int64_t FirstNegative(const int64_t* values, int64_t n) {
  const int64_t* bad =
      std::find_if(values, values + n, [](int64_t v) { return v < 0; });
  return bad == values + n ? -1 : bad - values;
}

}  // namespace

Result CheckOptions(const GradientBufferOptions& options) {
  if (options.capacity < 1) {
    return Result::Error("capacity must be at least 1, not ", options.capacity);
  }
  if (!(options.divisor > 0.0 && std::isfinite(options.divisor))) {
    return Result::Error("divisor must be positive and finite, not ",
                         options.divisor);
  }
  if (options.weight.uses_last_update() || options.weight.rescales()) {
    return Result::Error(
        "a buffer's weight must depend on the token's age alone, not on an "
        "update_sensitivity or a target_deviation");
  }
  for (const auto& [name, value] :
       {std::pair("dense_size", options.dense_size),
        std::pair("dense_count", options.dense_count)}) {
    if (value < 0 || value > kMostElements) {
      return Result::Error(name, " must be from 0 to ", kMostElements, ", not ",
                           value);
    }
  }
  for (size_t t = 0; t < options.tables.size(); ++t) {
    const GradientBufferOptions::Table& table = options.tables[t];
    if (table.rows < 0 || table.width < 0 || table.width > kMostElements) {
      return Result::Error("table ", t, " must have at least 0 rows, of 0 to ",
                           kMostElements, " floats, not ", table.rows,
                           " rows of ", table.width);
    }
  }
  return Result::Ok();
}

std::string Describe(const GradientBufferOptions& options) {
  std::ostringstream text;
  text.precision(17);
  const StalenessWeight& weight = options.weight;
  const char* decay = weight.decay == StalenessDecay::kConstant ? "constant"
                      : weight.decay == StalenessDecay::kThreshold
                          ? "threshold"
                          : "inverse_power";
  text << "capacity " << options.capacity << ", divisor " << options.divisor
       << ", weight " << decay;
  if (weight.decay == StalenessDecay::kThreshold) {
    text << " (iota " << weight.iota << ")";
  } else if (weight.decay == StalenessDecay::kInversePower) {
    text << " (power " << weight.power << ", baseline " << weight.baseline
         << (weight.normalized ? ")" : ", not normalized)");
  }
  text << (options.drop_late ? ", drops late pushes" : ", counts late pushes")
       << ", " << options.dense_size << " elements of " << options.dense_count
       << " dense variables, tables";
  for (const GradientBufferOptions::Table& table : options.tables) {
    text << " " << table.rows << "x" << table.width;
  }
  if (options.tables.empty()) text << " none";
  return text.str();
}

void GradientSums::Clear() {
  has_dense = false;
  dense_given = rows_given = Versions::kUnknown;
  for (RowSums& table : tables) table.Clear();
}

Aggregate::Aggregate(int64_t step, double divisor, std::unique_ptr<Lease> sums)
    : step_(step),
      divisor_(static_cast<float>(divisor)),
      sums_(std::move(sums)) {}

Aggregate::~Aggregate() { (*sums_)->Clear(); }

void Aggregate::WriteDense(int64_t begin, int64_t end, float* to) const {
  const float* from = sums().dense.data();
  for (int64_t i = begin; i < end; ++i) to[i] = from[i] / divisor_;
}

const std::vector<int64_t>& Aggregate::dense_versions() const {
  static const std::vector<int64_t> none;
  return sums().dense_given == Versions::kGiven ? sums().dense_versions : none;
}

void Aggregate::WriteRows(int64_t table, int64_t begin, int64_t end,
                          float* to) const {
  const RowSums& from = rows(table);
  for (int64_t i = begin; i < end; ++i) {
    const float* sum = from.sum(i);
    float* row = to + i * from.width();
    for (int64_t j = 0; j < from.width(); ++j) row[j] = sum[j] / divisor_;
  }
}

GradientBuffer::GradientBuffer(const GradientBufferOptions& options)
    : options_(options), sums_(FreshSums()) {}

Result GradientBuffer::Push(const GradientPush& push,
                            std::unique_ptr<Aggregate>* aggregate) {
  aggregate->reset();
  if (Result checked = Check(push); !checked.ok()) return checked;
  MutexLock lock(&mu_);
  const int64_t step = state_.step;
  if (push.pulled_step > step) {
    return Result::Error("pulled_step = ", push.pulled_step, " is not in [0, ",
                         step, "], the steps up to now");
  }
  if (revoked_.count(push.ticket) > 0) {
    ++state_.late;
    return Result::Ok();
  }
  if (options_.drop_late) {
    if (push.token_value > step) {
      return Result::Error(
          "token_value = ", push.token_value, " is ahead of step = ", step,
          ": a buffer that drops late pushes takes those of its own "
          "step only");
    }
    if (push.token_value < step) {
      ++state_.late;
      return Result::Ok();
    }
    if (taken_.count(push.token_index) > 0) {
      ++state_.duplicates;
      return Result::Ok();
    }
  }
  const int64_t age = std::max<int64_t>(step - push.token_value, 0);
  const float weight = static_cast<float>(
      options_.weight.Of(static_cast<double>(age) + 1.0, 0.0, 0.0, 0.0));
  if (weight > 0.0f) {
    if (Result checked = CheckVersions(push); !checked.ok()) return checked;
    Add(push, weight);
    ++state_.included;
    if (weight < 1.0f) ++state_.decayed;
  } else {
    ++state_.excluded;
  }
  if (options_.drop_late) taken_.emplace(push.token_index, push.ticket);
  state_.age_sum = SaturatedSum(state_.age_sum, age);
  state_.age_max = std::max(state_.age_max, age);
  StalenessCounters(state_.staleness.data())
      .Add(SaturatedSum(step, 1 - push.pulled_step));
  if (++state_.pending == options_.capacity) {
    *aggregate = Drain();
    if (push.ticket > 0) completed_by_[state_.step] = push.ticket;
  }
  return Result::Ok();
}

std::unique_ptr<Aggregate> GradientBuffer::Flush() {
  MutexLock lock(&mu_);
  if (state_.pending == 0) return nullptr;
  return Drain();
}

Result GradientBuffer::Applied(int64_t step) {
  MutexLock lock(&mu_);
  if (step < 1 || step > state_.step) {
    return Result::Error("step = ", step, " is not in [1, ", state_.step,
                         "], the steps given out");
  }
  if (step <= state_.applied) return Result::Ok();
  completed_by_.erase(step);
  done_.insert(step);
  while (done_.erase(state_.applied + 1) > 0) ++state_.applied;
  return Result::Ok();
}

Revoked GradientBuffer::Revoke(const std::vector<int64_t>& tickets) {
  std::unordered_set<int64_t> wanted(tickets.begin(), tickets.end());
  wanted.erase(0);  // Pushes without one are nobody's.
  Revoked found;
  MutexLock lock(&mu_);
  revoked_.insert(wanted.begin(), wanted.end());
  for (const auto& [step, ticket] : completed_by_) {
    if (wanted.count(ticket) > 0) found.unapplied.push_back(step);
  }
  for (const auto* taken : {&taken_before_, &taken_}) {
    for (const auto& [index, ticket] : *taken) {
      if (wanted.count(ticket) > 0) found.taken.push_back(index);
    }
  }
  std::sort(found.taken.begin(), found.taken.end());
  found.step = state_.step;
  return found;
}

Result GradientBuffer::Spend(int64_t step,
                             const std::vector<int64_t>& token_indices,
                             int64_t ticket,
                             std::unique_ptr<Aggregate>* aggregate) {
  aggregate->reset();
  if (!options_.drop_late) {
    return Result::Error(
        "a buffer that counts late pushes does not know its tokens");
  }
  if (ticket < 0) {
    return Result::Error("ticket must be at least 0, not ", ticket);
  }
  MutexLock lock(&mu_);
  if (step != state_.step) return Result::Ok();
  for (const int64_t index : token_indices) {
    if (!taken_.emplace(index, ticket).second) continue;
    ++state_.spent;
    if (++state_.pending == options_.capacity) {
      *aggregate = Drain();
      if (ticket > 0) completed_by_[state_.step] = ticket;
      break;
    }
  }
  return Result::Ok();
}

int64_t GradientBuffer::step() const {
  MutexLock lock(&mu_);
  return state_.step;
}

int64_t GradientBuffer::applied() const {
  MutexLock lock(&mu_);
  return state_.applied;
}

GradientBufferState GradientBuffer::state() const {
  MutexLock lock(&mu_);
  return state_;
}

void GradientBuffer::Restore(int64_t step) {
  MutexLock lock(&mu_);
  (*sums_)->Clear();
  taken_.clear();
  taken_before_.clear();
  done_.clear();
  completed_by_.clear();
  state_.pending = 0;
  state_.step = state_.applied = step;
}

Result GradientBuffer::Check(const GradientPush& push) const {
  for (const auto& [name, value] :
       {std::pair<const char*, int64_t>("token_index", push.token_index),
        {"token_value", push.token_value},
        {"ticket", push.ticket},
        {"pulled_step", push.pulled_step}}) {
    if (value < 0)
      return Result::Error(name, " must be at least 0, not ", value);
  }
  if (push.dense_versions != nullptr) {
    const int64_t bad =
        FirstNegative(push.dense_versions, options_.dense_count);
    if (bad >= 0) {
      return Result::Error("dense_versions[", bad,
                           "] = ", push.dense_versions[bad], " is negative");
    }
  }
  for (const TableGradient& rows : push.tables) {
    const int64_t tables = static_cast<int64_t>(options_.tables.size());
    if (rows.table < 0 || rows.table >= tables) {
      return Result::Error("table ", rows.table, " is not in [0, ", tables,
                           ")");
    }
    // Many rows may share one gradient, by its bag, and each has a sum.
    const int64_t width = options_.tables[rows.table].width;
    if (rows.n > kMostElements / std::max<int64_t>(width, 1)) {
      return Result::Error("indices must name at most ", kMostElements,
                           " floats of table ", rows.table, " in a push, not ",
                           rows.n, " rows of ", width);
    }
    const int64_t count = options_.tables[rows.table].rows;
    const int64_t bad = FirstNotARow(rows.ids, rows.n, count);
    if (bad >= 0) {
      return Result::Error("row id ", rows.ids[bad], " of table ", rows.table,
                           ", at its position ", bad, ", is not in [0, ", count,
                           ")");
    }
    if (rows.push.pulled == nullptr) continue;
    const int64_t negative = FirstNegative(rows.push.pulled, rows.n);
    if (negative >= 0) {
      return Result::Error("the version ", rows.push.pulled[negative],
                           " pulled of a row of table ", rows.table,
                           ", at its position ", negative, ", is negative");
    }
  }
  return Result::Ok();
}

Result GradientBuffer::CheckVersions(const GradientPush& push) const {
  const GradientSums& sums = **sums_;
  if (push.dense != nullptr &&
      Disagree(sums.dense_given, GivenBy(push.dense_versions))) {
    return Result::Error(
        "dense_versions must hold ",
        push.dense_versions == nullptr ? options_.dense_count : 0,
        " versions, like those of the other pushes of this step");
  }
  Versions given = sums.rows_given;
  std::vector<int64_t> sizes(sums.tables.size());
  for (size_t t = 0; t < sizes.size(); ++t) sizes[t] = sums.tables[t].size();
  for (const TableGradient& rows : push.tables) {
    if (rows.n == 0) continue;
    if (Disagree(given, GivenBy(rows.push.pulled))) {
      return Result::Error(
          "the gradients of rows must come with ",
          rows.push.pulled == nullptr ? "" : "no ",
          "versions, like those of the other pushes of this step");
    }
    given = GivenBy(rows.push.pulled);
    if ((sizes[rows.table] += rows.n) > RowSums::kMost) {
      return Result::Error("a step can't add up more than ", RowSums::kMost,
                           " rows of table ", rows.table);
    }
  }
  return Result::Ok();
}

void GradientBuffer::Add(const GradientPush& push, float weight) {
  GradientSums& sums = **sums_;
  if (push.dense != nullptr) {
    // Not before, as an attribute alone says the size: now there is a gradient
    // that has it.
    sums.dense.resize(options_.dense_size);
    float* to = sums.dense.data();
    const float* from = push.dense;
    const int64_t n = options_.dense_size;
    if (sums.has_dense) {
      AddScaled(from, weight, n, to);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = weight * from[i];
    }
    if (push.dense_versions != nullptr) {
      sums.dense_versions.resize(options_.dense_count);
      for (int64_t i = 0; i < options_.dense_count; ++i) {
        int64_t& oldest = sums.dense_versions[i];
        oldest = sums.has_dense ? std::min(oldest, push.dense_versions[i])
                                : push.dense_versions[i];
      }
    }
    sums.has_dense = true;
    sums.dense_given = GivenBy(push.dense_versions);
  }
  for (const TableGradient& rows : push.tables) {
    if (rows.n == 0) continue;
    sums.tables[rows.table].Add(rows.ids, rows.n, rows.push, weight);
    sums.rows_given = GivenBy(rows.push.pulled);
  }
}

std::unique_ptr<Aggregate> GradientBuffer::Drain() {
  std::unique_ptr<Aggregate::Lease> sums = std::exchange(sums_, FreshSums());
  taken_before_.swap(taken_);
  taken_.clear();
  state_.pending = 0;
  ++state_.applications;
  return std::make_unique<Aggregate>(++state_.step, options_.divisor,
                                     std::move(sums));
}

std::unique_ptr<Aggregate::Lease> GradientBuffer::FreshSums() {
  auto sums = std::make_unique<Aggregate::Lease>(&free_);
  if ((*sums)->tables.size() != options_.tables.size()) {
    for (const GradientBufferOptions::Table& table : options_.tables) {
      (*sums)->tables.emplace_back().set_width(table.width);
    }
  }
  return sums;
}

}  // namespace recsync
