// A click model on simulated servers: a logistic regression or a factorization
// machine of click_data.h or, with hidden layers, a wide and deep model: the
// logit of a logistic regression, plus that of the hidden layers, whose inputs
// are the factors of all features and the numbers. Rows of the table lie on
// server row % servers, and the dense part, as the only row of a table of its
// own, on server 0. Updates are those of real servers: RowUpdate with a rule, a
// staleness weight and SWAP.
//
// Moving means of mean-normalization lie on server 0, too. A push adds to them
// by how much its step changes those that it had pulled, as on real servers.
//
// A worker computes on what it has pulled: of each server, the rows of its
// batch as they were when it pulled from that one.
//
// Thread compatible.

#ifndef TF_RECSYNC_CC_SIMULATION_CLICK_LEARNER_H_
#define TF_RECSYNC_CC_SIMULATION_CLICK_LEARNER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/engine/result.h"
#include "cc/engine/row_partitions.h"
#include "cc/engine/row_update.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/update_options.h"
#include "cc/simulation/click_data.h"
#include "cc/simulation/hidden_layers.h"
#include "cc/simulation/learner.h"

namespace recsync {

// An optimizer.
struct LearnerUpdate {
  enum class Rule { kSgd, kAdagrad, kRowwiseAdagrad };

  Rule rule = Rule::kSgd;
  float learning_rate = 0.1f;
  float epsilon = 1e-7f;
  float initial_accumulator = 0.1f;
  UpdateOptions options;
};

struct ClickLearnerOptions {
  int workers = 1;
  int servers = 1;
  ClickDataOptions data;
  HiddenLayersOptions hidden;
  int batch_size = 64;
  int test_examples = 20000;
  LearnerUpdate dense;  // of the dense part
  LearnerUpdate rows;   // of the table
};

Result CheckOptions(const ClickLearnerOptions& options);

class ClickLearner : public Learner {
 public:
  struct Evaluation {
    int64_t steps;
    double seconds;
    double auc;
    double bayes_auc;  // on the same examples
  };

  // The options have passed CheckOptions.
  explicit ClickLearner(const ClickLearnerOptions& options);

  std::vector<GradientBufferOptions::Table> TablesOf(int server) const override;
  void Begin(int worker, int64_t batch) override;
  void Pull(int worker, int server) override;
  void Compute(int worker) override;
  void Apply(int worker, int server) override;
  void Collect(int worker, int server, GradientPush* push) override;
  void ApplyStep(int server, const Aggregate& aggregate) override;
  const StalenessTotals& RowsStaleness(int server) const override {
    return tables_[server]->counters();
  }
  void Evaluate(int64_t steps, double seconds) override;

  // An element of a row of the whole table: 0 is the linear part.
  float value(int row, int element) const {
    const Table& table = *tables_[row % options_.servers];
    return table.row(row / options_.servers)[element];
  }

  // The bias, what numbers are multiplied with, and hidden layers.
  const float* dense() const { return dense_->row(0); }

  // Takes the test's examples from the day after that of the last of so many
  // batches.
  // Those of the first day are there already.
  void TestAfter(int64_t batches);
  // On these examples: of the parameters as they are now, and the best.
  double Auc();
  double bayes_auc() const { return bayes_auc_; }
  const std::vector<Evaluation>& evaluations() const { return evaluations_; }

  // What was counted of the dense part.
  const StalenessTotals& dense_staleness() const { return dense_->counters(); }

 private:
  // A table on a server, with what lies beside it.
  class Table {
   public:
    Table(int64_t rows, int64_t width, const LearnerUpdate& update);

    float* row(int64_t row) { return values_.data() + row * width_; }
    const float* row(int64_t row) const {
      return values_.data() + row * width_;
    }
    int64_t version(int64_t row) const { return versions_[row]; }
    int64_t rows() const { return static_cast<int64_t>(versions_.size()); }
    int64_t width() const { return width_; }
    const StalenessTotals& counters() const { return counters_; }

    // Updates rows whose gradients are one after the other.
    void Update(const int64_t* ids, int64_t n, const RowPush& push,
                int64_t global_step, bool weighted);

   private:
    template <typename Rule>
    void Run(const Rule& rule, const RowPush& push, int64_t global_step,
             bool weighted);

    const int64_t width_;
    const LearnerUpdate update_;
    const UpdateOptions unweighted_;
    std::vector<float> values_;
    std::vector<float> accumulators_;
    std::vector<int64_t> versions_;
    std::vector<int32_t> last_periods_;
    std::vector<float> last_updates_;
    StalenessTotals counters_{};
    RowPartitions partitions_;
  };

  // A worker's batch, with what it has pulled for it; later, its gradients in
  // the same place.
  struct Step {
    ClickExamples examples;
    std::vector<int32_t> places;  // [examples, features], in the next ones
    // The different rows, those of a server after those of the one before.
    std::vector<int64_t> ids;       // on their server
    std::vector<int64_t> versions;  // as pulled
    std::vector<float> values;      // [rows, width]
    std::vector<int32_t> starts;    // by server, with the end
    std::vector<float> dense;  // the bias, one for each number, hidden layers
    std::vector<float> means;  // moving ones; later, their change
    int64_t dense_version = 0;
    int64_t global_step = 0;  // of its push; 0: none yet
  };

  struct Worker {
    // Steps take turns, as the last may be in the next one's time.
    std::array<Step, 2> steps;
    int64_t begun = 0;
    int64_t computed = 0;
  };

  int width() const { return 1 + options_.data.dimension; }
  Step& begun(int worker) {
    return workers_[worker].steps[workers_[worker].begun % 2];
  }
  Step& computed(int worker) {
    return workers_[worker].steps[workers_[worker].computed % 2];
  }
  // The push of a step's rows, or of its dense part.
  static RowPush PushOf(const Step& step, int64_t first, int64_t width);
  // The logits of some examples whose rows are those of `row_of(e, f)`, with
  // `deep(x, logits)` for those of the hidden layers.
  template <typename RowOf, typename Deep>
  void ComputeLogits(const ClickExamples& examples, const RowOf& row_of,
                     const float* dense, const Deep& deep);
  bool has_hidden_layers() const { return hidden_.parameters() > 0; }
  void AddToMeans(const Step& step);

  const ClickLearnerOptions options_;
  const ClickData data_;
  HiddenLayers hidden_;
  int64_t test_day_ = -1;
  ClickExamples test_;
  double bayes_auc_ = 0.5;
  std::vector<std::unique_ptr<Table>> tables_;  // by server
  std::unique_ptr<Table> dense_;
  std::vector<float> means_;
  std::vector<Worker> workers_;
  int64_t global_step_ = 0;
  std::vector<Evaluation> evaluations_;
  // While a batch is begun: the place of each row among the different ones.
  std::vector<int32_t> place_;
  std::vector<int32_t> different_;
  std::vector<float> sums_;     // [examples, dimension]
  std::vector<double> logits_;  // [examples]
  std::vector<float> inputs_;   // of hidden layers, [examples, inputs]
  std::vector<float> gradients_;
  std::vector<int64_t> ids_;
  std::vector<int64_t> oldest_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_CLICK_LEARNER_H_
