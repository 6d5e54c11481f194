// Made click data: examples of categorical features and numbers whose click is
// drawn from a known probability, so that it is known how good a model can be.
//
// The logit of an example is
//
//   bias + dense . z + sum_f linear[id_f] + sum_(f < g) factors[id_f] .
//   factors[id_g] + sum_(i < j) pairs[i, j] z_i z_j
//
// where z are the numbers without their mean: that of a factorization machine;
// without factors, of a logistic regression. Products of numbers are for models
// with hidden layers alone. Small ids of a feature are more frequent than large
// ones.
//
// With a drift, what the logit is made of changes from day to day. Each weight
// and factor of day d is cos(d drift) of one drawn number and sin(d drift) of
// another one: those of two days have a correlation of cos(drift) for each day
// between them, and they deviate alike on all days.
//
// Thread safe: examples are functions of the seed and their numbers.

#ifndef TF_RECSYNC_CC_SIMULATION_CLICK_DATA_H_
#define TF_RECSYNC_CC_SIMULATION_CLICK_DATA_H_

#include <cstdint>
#include <vector>

namespace recsync {

struct ClickDataOptions {
  int features = 10;           // categorical ones, at least 1
  int vocabulary = 1000;       // ids of each, at least 1
  int numbers = 8;             // of an example, at least 0
  int dimension = 0;           // of the factors; 0: none
  double signal = 1.0;         // the deviation of logits is about this
  double number_mean = 0.0;    // of numbers, which deviate by 1
  double number_pairs = 0.0;   // the deviation of their products in logits
  double drift = 0.0;          // an angle for each day, in radians
  int64_t day_batches = 1000;  // of all workers together, at least 1
  uint64_t seed = 0;
};

// Some examples; rows are those of a table of all features' ids.
struct ClickExamples {
  int count = 0;
  std::vector<int32_t> rows;   // [count, features]
  std::vector<float> numbers;  // [count, numbers]
  std::vector<float> labels;   // [count]
  std::vector<double> logits;  // [count], the true ones
};

class ClickData {
 public:
  explicit ClickData(const ClickDataOptions& options);

  const ClickDataOptions& options() const { return options_; }
  // Of the table.
  int rows() const { return options_.features * options_.vocabulary; }

  // On which day a batch is.
  int64_t DayOf(int64_t batch) const {
    return options_.drift > 0.0 ? batch / options_.day_batches : 0;
  }
  // The day that follows that of the last of so many batches; 0 if there is
  // none yet, or if days do not differ.
  int64_t NextDay(int64_t batches) const {
    return DayOf(batches + options_.day_batches - 1);
  }
  // Draws the examples of a batch; or of the test of a day of that number,
  // which no training has.
  void Draw(int64_t batch, bool is_test, int count,
            ClickExamples* examples) const;

 private:
  // What logits are made of: that of the first day, or what it drifts to.
  struct Truth {
    std::vector<double> dense;    // [numbers]
    std::vector<double> linear;   // [rows]
    std::vector<double> factors;  // [rows, dimension]
    // [numbers, numbers], those above the diagonal
    std::vector<double> pairs;
  };

  Truth DrawTruth(uint32_t which) const;

  const ClickDataOptions options_;
  Truth first_;
  Truth other_;  // with a drift
};

// How likely a click has a higher score than none, ties counting by half; 0.5
// if all labels are alike.
double AreaUnderCurve(const std::vector<float>& labels,
                      const std::vector<double>& scores);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_CLICK_DATA_H_
