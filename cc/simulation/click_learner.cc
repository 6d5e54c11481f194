#include "cc/simulation/click_learner.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cc/engine/update_rules.h"
#include "cc/simulation/random_numbers.h"

namespace recsync {
namespace {

constexpr int64_t kRows = 0;   // of a buffer's tables
constexpr int64_t kDense = 1;  // on server 0
constexpr double kFirstFactors = 0.05;

double Sigmoid(double logit) { return 1.0 / (1.0 + std::exp(-logit)); }

UpdateOptions Unweighted(UpdateOptions options) {
  options.weight = StalenessWeight();
  return options;
}

// The logit of a row's linear part and factors, added up by `row_of(f)`, whose
// factors add up to `sums`.
template <typename RowOf>
double LogitOf(int features, int dimension, const RowOf& row_of, float* sums) {
  double logit = 0.0, squares = 0.0;
  std::fill_n(sums, dimension, 0.0f);
  for (int f = 0; f < features; ++f) {
    const float* row = row_of(f);
    logit += row[0];
    for (int k = 0; k < dimension; ++k) {
      sums[k] += row[1 + k];
      squares += static_cast<double>(row[1 + k]) * row[1 + k];
    }
  }
  double pairs = -squares;
  for (int k = 0; k < dimension; ++k) {
    pairs += static_cast<double>(sums[k]) * sums[k];
  }
  return logit + pairs / 2;
}

// The bias, and what is multiplied with numbers.
double DenseLogitOf(const float* dense, const float* numbers, int count) {
  double logit = dense[0];
  for (int i = 0; i < count; ++i) {
    logit += static_cast<double>(dense[1 + i]) * numbers[i];
  }
  return logit;
}

}  // namespace

Result CheckOptions(const ClickLearnerOptions& options) {
  constexpr int kMost = 1 << 24;
  const ClickDataOptions& data = options.data;
  for (const auto& [name, value, least, most] :
       {std::tuple<const char*, int64_t, int64_t, int64_t>(
            "features", data.features, 1, 1 << 16),
        {"vocabulary", data.vocabulary, 1, kMost},
        {"numbers", data.numbers, 0, 1 << 16},
        {"dimension", data.dimension, 0, 1 << 10},
        {"batch_size", options.batch_size, 1, 1 << 16},
        {"test_examples", options.test_examples, 1, kMost},
        {"features * vocabulary * (1 + dimension)",
         int64_t{data.features} * data.vocabulary * (1 + data.dimension), 1,
         int64_t{1} << 28}}) {
    if (value < least || value > most) {
      return Result::Error(name, " must be from ", least, " to ", most,
                           ", not ", value);
    }
  }
  if (!(data.signal >= 0.0 && std::isfinite(data.signal))) {
    return Result::Error("signal must be at least 0 and finite, not ",
                         data.signal);
  }
  return Result::Ok();
}

ClickLearner::Table::Table(int64_t rows, int64_t width,
                           const LearnerUpdate& update)
    : width_(width),
      update_(update),
      unweighted_(Unweighted(update.options)),
      values_(rows * width, 0.0f),
      versions_(rows, 0) {
  if (update.rule != LearnerUpdate::Rule::kSgd) {
    const bool one = update.rule == LearnerUpdate::Rule::kRowwiseAdagrad;
    accumulators_.assign(one ? rows : rows * width, update.initial_accumulator);
  }
  if (update.options.swap.enabled()) {
    last_periods_.assign(rows, Swap::kNoPeriod);
  }
  if (update.options.weight.uses_last_update())
    last_updates_.assign(rows, 0.0f);
}

void ClickLearner::Table::Update(const int64_t* ids, int64_t n,
                                 const RowPush& push, int64_t global_step,
                                 bool weighted) {
  partitions_.Build(ids, n, [](int64_t count, int64_t, const auto& f) {
    f(int64_t{0}, count);
  });
  switch (update_.rule) {
    case LearnerUpdate::Rule::kSgd: {
      SgdRule rule;
      rule.learning_rate = update_.learning_rate;
      return Run(rule, push, global_step, weighted);
    }
    case LearnerUpdate::Rule::kAdagrad: {
      AdagradRule rule;
      rule.learning_rate = update_.learning_rate;
      rule.epsilon = update_.epsilon;
      return Run(rule, push, global_step, weighted);
    }
    case LearnerUpdate::Rule::kRowwiseAdagrad: {
      RowwiseAdagradRule rule;
      rule.learning_rate = update_.learning_rate;
      rule.epsilon = update_.epsilon;
      return Run(rule, push, global_step, weighted);
    }
  }
}

template <typename Rule>
void ClickLearner::Table::Run(const Rule& rule, const RowPush& push,
                              int64_t global_step, bool weighted) {
  TableView view;
  view.values = values_.data();
  if (!accumulators_.empty()) view.accumulators[0] = accumulators_.data();
  view.versions = versions_.data();
  view.counters = counters_.data();
  if (!last_periods_.empty()) view.last_periods = last_periods_.data();
  const UpdateOptions& options = weighted ? update_.options : unweighted_;
  if (options.weight.uses_last_update()) {
    view.last_updates = last_updates_.data();
  }
  view.rows = rows();
  view.width = width_;
  const RowUpdate<Rule> update(rule, options, global_step, view, push);
  update.Run(partitions_, 0, partitions_.count());
}

ClickLearner::ClickLearner(const ClickLearnerOptions& options)
    : options_(options),
      data_(options.data),
      workers_(options.workers),
      place_(data_.rows(), -1),
      sums_(options.data.dimension) {
  for (int s = 0; s < options.servers; ++s) {
    const int64_t rows =
        (data_.rows() - s + options.servers - 1) / options.servers;
    tables_.push_back(std::make_unique<Table>(std::max<int64_t>(rows, 0),
                                              width(), options.rows));
  }
  for (int row = 0; row < data_.rows(); ++row) {
    RandomNumbers random(options.data.seed, RandomNumbers::kInitial, 0, row);
    float* values = tables_[row % options.servers]->row(row / options.servers);
    for (int k = 1; k < width(); ++k) {
      values[k] = static_cast<float>(kFirstFactors * random.Normal());
    }
  }
  dense_ = std::make_unique<Table>(1, 1 + options.data.numbers, options.dense);
  data_.Draw(0, /*is_test=*/true, options.test_examples, &test_);
  bayes_auc_ = AreaUnderCurve(test_.labels, test_.logits);
}

std::vector<GradientBufferOptions::Table> ClickLearner::TablesOf(
    int server) const {
  std::vector<GradientBufferOptions::Table> tables{
      {tables_[server]->rows(), width()}};
  if (server == 0) tables.push_back({1, dense_->width()});
  return tables;
}

void ClickLearner::Begin(int worker, int64_t batch) {
  ++workers_[worker].begun;
  Step& step = begun(worker);
  data_.Draw(batch, /*is_test=*/false, options_.batch_size, &step.examples);
  step.examples.logits.clear();  // Nobody knows them.
  step.global_step = 0;
  const std::vector<int32_t>& rows = step.examples.rows;
  const int servers = options_.servers;
  // How many different rows each server has, and where the first of them is.
  step.starts.assign(servers + 1, 0);
  different_.clear();
  for (const int32_t row : rows) {
    if (place_[row] >= 0) continue;
    place_[row] = 0;
    different_.push_back(row);
    ++step.starts[row % servers + 1];
  }
  for (int s = 0; s < servers; ++s) step.starts[s + 1] += step.starts[s];
  step.ids.resize(different_.size());
  step.versions.resize(different_.size());
  step.values.resize(different_.size() * width());
  // Each start moves to the next server's, and back.
  for (const int32_t row : different_) {
    const int32_t place = step.starts[row % servers]++;
    step.ids[place] = row / servers;
    place_[row] = place;
  }
  for (int s = servers; s > 0; --s) step.starts[s] = step.starts[s - 1];
  step.starts[0] = 0;
  step.places.clear();
  for (const int32_t row : rows) step.places.push_back(place_[row]);
  for (const int32_t row : different_) place_[row] = -1;
}

void ClickLearner::Pull(int worker, int server) {
  Step& step = begun(worker);
  const Table& table = *tables_[server];
  for (int32_t i = step.starts[server]; i < step.starts[server + 1]; ++i) {
    std::copy_n(table.row(step.ids[i]), width(),
                step.values.data() + int64_t{i} * width());
    step.versions[i] = table.version(step.ids[i]);
  }
  if (server != 0) return;
  step.dense.assign(dense_->row(0), dense_->row(0) + dense_->width());
  step.dense_version = dense_->version(0);
}

void ClickLearner::Compute(int worker) {
  workers_[worker].computed = workers_[worker].begun;
  Step& step = computed(worker);
  const ClickExamples& examples = step.examples;
  const int features = options_.data.features, numbers = options_.data.numbers;
  const int dimension = options_.data.dimension;
  gradients_.assign(step.values.size(), 0.0f);
  std::vector<float> dense(step.dense.size(), 0.0f);
  for (int e = 0; e < examples.count; ++e) {
    const int32_t* places = step.places.data() + int64_t{e} * features;
    const float* x = examples.numbers.data() + int64_t{e} * numbers;
    const auto row_of = [&](int f) {
      return step.values.data() + int64_t{places[f]} * width();
    };
    const double logit = LogitOf(features, dimension, row_of, sums_.data()) +
                         DenseLogitOf(step.dense.data(), x, numbers);
    const float slope = static_cast<float>(
        (Sigmoid(logit) - examples.labels[e]) / examples.count);
    for (int f = 0; f < features; ++f) {
      float* gradient = gradients_.data() + int64_t{places[f]} * width();
      const float* row = row_of(f);
      gradient[0] += slope;
      for (int k = 0; k < dimension; ++k) {
        gradient[1 + k] += slope * (sums_[k] - row[1 + k]);
      }
    }
    dense[0] += slope;
    for (int i = 0; i < numbers; ++i) dense[1 + i] += slope * x[i];
  }
  step.values = gradients_;
  step.dense = dense;
}

RowPush ClickLearner::PushOf(const Step& step, int64_t first, int64_t width) {
  RowPush push;
  push.gradient = step.values.data() + first * width;
  push.pulled = step.versions.data() + first;
  return push;
}

void ClickLearner::Apply(int worker, int server) {
  Step& step = computed(worker);
  // The first server that applies it counts it for all.
  if (step.global_step == 0) step.global_step = ++global_step_;
  const int64_t first = step.starts[server];
  const int64_t n = step.starts[server + 1] - first;
  if (n > 0) {
    tables_[server]->Update(step.ids.data() + first, n,
                            PushOf(step, first, width()), step.global_step,
                            /*weighted=*/true);
  }
  if (server != 0) return;
  const int64_t id = 0;
  RowPush push;
  push.gradient = step.dense.data();
  push.pulled = &step.dense_version;
  dense_->Update(&id, 1, push, step.global_step, /*weighted=*/true);
}

void ClickLearner::Collect(int worker, int server, GradientPush* push) {
  const Step& step = computed(worker);
  const int64_t first = step.starts[server];
  TableGradient rows;
  rows.table = kRows;
  rows.ids = step.ids.data() + first;
  rows.n = step.starts[server + 1] - first;
  rows.push = PushOf(step, first, width());
  push->tables.push_back(rows);
  if (server != 0) return;
  static constexpr int64_t kOnly = 0;
  TableGradient dense;
  dense.table = kDense;
  dense.ids = &kOnly;
  dense.n = 1;
  dense.push.gradient = step.dense.data();
  dense.push.pulled = &step.dense_version;
  push->tables.push_back(dense);
}

void ClickLearner::ApplyStep(int server, const Aggregate& aggregate) {
  for (const int64_t t : {kRows, kDense}) {
    if (t == kDense && server != 0) continue;
    const RowSums& sums = aggregate.rows(t);
    const int64_t n = sums.size();
    if (n == 0) continue;
    ids_.clear();
    oldest_.clear();
    for (int64_t i = 0; i < n; ++i) {
      ids_.push_back(sums.id(i));
      oldest_.push_back(sums.oldest(i));
    }
    gradients_.resize(n * sums.width());
    aggregate.WriteRows(t, 0, n, gradients_.data());
    RowPush push;
    push.gradient = gradients_.data();
    push.pulled = oldest_.data();
    Table& table = t == kDense ? *dense_ : *tables_[server];
    // Their weights are those of their tokens.
    table.Update(ids_.data(), n, push, aggregate.step(), /*weighted=*/false);
  }
}

void ClickLearner::Evaluate(int64_t steps, double seconds) {
  evaluations_.push_back({steps, seconds, Auc()});
}

double ClickLearner::Auc() const {
  const int features = options_.data.features, numbers = options_.data.numbers;
  std::vector<double> scores;
  std::vector<float> sums(options_.data.dimension);
  for (int e = 0; e < test_.count; ++e) {
    const int32_t* rows = test_.rows.data() + int64_t{e} * features;
    const auto row_of = [&](int f) {
      return static_cast<const Table&>(*tables_[rows[f] % options_.servers])
          .row(rows[f] / options_.servers);
    };
    scores.push_back(
        LogitOf(features, options_.data.dimension, row_of, sums.data()) +
        DenseLogitOf(dense_->row(0),
                     test_.numbers.data() + int64_t{e} * numbers, numbers));
  }
  return AreaUnderCurve(test_.labels, scores);
}

}  // namespace recsync
