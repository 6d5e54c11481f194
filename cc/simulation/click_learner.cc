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

// How many inputs hidden layers have.
int64_t InputsOf(const ClickDataOptions& data) {
  return int64_t{data.features} * data.dimension + data.numbers;
}

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
  constexpr int64_t kMostUnits = 1 << 14;
  const ClickDataOptions& data = options.data;
  for (const auto& [name, value, least, most] :
       {std::tuple<const char*, int64_t, int64_t, int64_t>(
            "features", data.features, 1, 1 << 16),
        {"vocabulary", data.vocabulary, 1, kMost},
        {"numbers", data.numbers, 0, 1 << 16},
        {"dimension", data.dimension, 0, 1 << 10},
        {"batch_size", options.batch_size, 1, 1 << 16},
        {"test_examples", options.test_examples, 1, kMost},
        {"day_batches", data.day_batches, 1, int64_t{1} << 40},
        {"features * vocabulary * (1 + dimension)",
         int64_t{data.features} * data.vocabulary * (1 + data.dimension), 1,
         int64_t{1} << 28}}) {
    if (value < least || value > most) {
      return Result::Error(name, " must be from ", least, " to ", most,
                           ", not ", value);
    }
  }
  for (const auto& [name, value] : {std::pair("signal", data.signal),
                                    {"number_mean", data.number_mean},
                                    {"number_pairs", data.number_pairs},
                                    {"drift", data.drift}}) {
    if (value >= 0.0 && std::isfinite(value)) continue;
    return Result::Error(name, " must be at least 0 and finite, not ", value);
  }
  for (const int units : options.hidden.units) {
    if (units >= 1 && units <= kMostUnits) continue;
    return Result::Error("hidden_units must be from 1 to ", kMostUnits,
                         ", not ", units);
  }
  if (!options.hidden.units.empty() && InputsOf(data) > kMostUnits) {
    return Result::Error("features * dimension + numbers must be at most ",
                         kMostUnits, " with hidden_units, not ",
                         InputsOf(data));
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
      hidden_(static_cast<int>(InputsOf(options.data)), options.hidden),
      means_(hidden_.means(), 1.0f),  // As in recsync.layers.
      workers_(options.workers),
      place_(data_.rows(), -1) {
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
  const int64_t wide = 1 + options.data.numbers;
  dense_ =
      std::make_unique<Table>(1, wide + hidden_.parameters(), options.dense);
  hidden_.Initialize(options.data.seed, dense_->row(0) + wide);
  TestAfter(0);
}

void ClickLearner::TestAfter(int64_t batches) {
  const int64_t day = data_.NextDay(batches);
  if (day == test_day_) return;
  test_day_ = day;
  data_.Draw(day, /*is_test=*/true, options_.test_examples, &test_);
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
  step.means = means_;
}

template <typename RowOf, typename Deep>
void ClickLearner::ComputeLogits(const ClickExamples& examples,
                                 const RowOf& row_of, const float* dense,
                                 const Deep& deep) {
  const int features = options_.data.features, numbers = options_.data.numbers;
  const int dimension = options_.data.dimension;
  // Hidden layers stand in for the pairs of factors.
  const int of_pairs = has_hidden_layers() ? 0 : dimension;
  logits_.resize(examples.count);
  sums_.resize(int64_t{examples.count} * of_pairs);
  if (has_hidden_layers()) {
    inputs_.resize(int64_t{examples.count} * hidden_.inputs());
    float* input = inputs_.data();
    for (int e = 0; e < examples.count; ++e) {
      for (int f = 0; f < features; ++f) {
        input = std::copy_n(row_of(e, f) + 1, dimension, input);
      }
      input = std::copy_n(examples.numbers.data() + int64_t{e} * numbers,
                          numbers, input);
    }
    deep(inputs_.data(), logits_.data());
  } else {
    std::fill(logits_.begin(), logits_.end(), 0.0);
  }
  for (int e = 0; e < examples.count; ++e) {
    logits_[e] +=
        LogitOf(
            features, of_pairs, [&](int f) { return row_of(e, f); },
            sums_.data() + int64_t{e} * of_pairs) +
        DenseLogitOf(dense, examples.numbers.data() + int64_t{e} * numbers,
                     numbers);
  }
}

void ClickLearner::Compute(int worker) {
  workers_[worker].computed = workers_[worker].begun;
  Step& step = computed(worker);
  const ClickExamples& examples = step.examples;
  const int features = options_.data.features, numbers = options_.data.numbers;
  const int dimension = options_.data.dimension;
  const int64_t wide = 1 + numbers;
  const auto row_of = [&](int e, int f) {
    const int32_t place = step.places[int64_t{e} * features + f];
    return step.values.data() + int64_t{place} * width();
  };
  ComputeLogits(
      examples, row_of, step.dense.data(), [&](const float* x, double* logits) {
        hidden_.Forward(step.dense.data() + wide, x, examples.count, logits);
      });
  std::vector<float> slopes, dense(step.dense.size(), 0.0f);
  for (int e = 0; e < examples.count; ++e) {
    slopes.push_back(static_cast<float>(
        (Sigmoid(logits_[e]) - examples.labels[e]) / examples.count));
  }
  if (has_hidden_layers()) {
    std::vector<float> of_inputs(inputs_.size());
    hidden_.Backward(step.dense.data() + wide, slopes.data(),
                     dense.data() + wide, of_inputs.data());
    inputs_ = std::move(of_inputs);
    std::vector<float> change(step.means.size());
    hidden_.ChangeOfMeans(step.means.data(), change.data());
    step.means = std::move(change);
  }
  gradients_.assign(step.values.size(), 0.0f);
  for (int e = 0; e < examples.count; ++e) {
    const float slope = slopes[e];
    for (int f = 0; f < features; ++f) {
      const float* row = row_of(e, f);
      float* gradient = gradients_.data() + (row - step.values.data());
      gradient[0] += slope;
      if (has_hidden_layers()) {
        const float* of_input =
            inputs_.data() + int64_t{e} * hidden_.inputs() + f * dimension;
        for (int k = 0; k < dimension; ++k) gradient[1 + k] += of_input[k];
      } else {
        const float* sums = sums_.data() + int64_t{e} * dimension;
        for (int k = 0; k < dimension; ++k) {
          gradient[1 + k] += slope * (sums[k] - row[1 + k]);
        }
      }
    }
    const float* x = examples.numbers.data() + int64_t{e} * numbers;
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
  AddToMeans(step);
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
  AddToMeans(step);  // Whether or not the gradients will be left out.
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

void ClickLearner::AddToMeans(const Step& step) {
  for (size_t i = 0; i < means_.size(); ++i) means_[i] += step.means[i];
}

void ClickLearner::Evaluate(int64_t steps, double seconds) {
  TestAfter(steps);
  const double auc = Auc();
  evaluations_.push_back({steps, seconds, auc, bayes_auc_});
}

double ClickLearner::Auc() {
  const auto row_of = [&](int e, int f) {
    const int32_t row = test_.rows[int64_t{e} * options_.data.features + f];
    return static_cast<const Table&>(*tables_[row % options_.servers])
        .row(row / options_.servers);
  };
  ComputeLogits(test_, row_of, dense_->row(0),
                [&](const float* x, double* logits) {
                  hidden_.Infer(dense_->row(0) + 1 + options_.data.numbers,
                                means_.data(), x, test_.count, logits);
                });
  return AreaUnderCurve(test_.labels, logits_);
}

}  // namespace recsync
