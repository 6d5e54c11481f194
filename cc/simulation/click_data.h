// Made click data: examples of categorical features and numbers whose click is
// drawn from a known probability, so that it is known how good a model can be.
//
// The logit of an example is
//
//   bias + dense . x + sum_f linear[id_f] + sum_(f < g) factors[id_f] .
//   factors[id_g]
//
// that of a factorization machine; without factors, of a logistic regression.
// Small ids of a feature are more frequent than large ones.
//
// Thread safe: examples are functions of the seed and their numbers.

#ifndef TF_RECSYNC_CC_SIMULATION_CLICK_DATA_H_
#define TF_RECSYNC_CC_SIMULATION_CLICK_DATA_H_

#include <cstdint>
#include <vector>

namespace recsync {

struct ClickDataOptions {
  int features = 10;      // categorical ones, at least 1
  int vocabulary = 1000;  // ids of each, at least 1
  int numbers = 8;        // of an example, at least 0
  int dimension = 0;      // of the factors; 0: none
  double signal = 1.0;    // the deviation of logits is about this
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

  // Draws the examples of a batch; of a test, batches that no training has.
  void Draw(int64_t batch, bool is_test, int count,
            ClickExamples* examples) const;

 private:
  const ClickDataOptions options_;
  double bias_ = 0.0;
  std::vector<double> dense_;    // [numbers]
  std::vector<double> linear_;   // [rows]
  std::vector<double> factors_;  // [rows, dimension]
};

// How likely a click has a higher score than none, ties counting by half; 0.5
// if all labels are alike.
double AreaUnderCurve(const std::vector<float>& labels,
                      const std::vector<double>& scores);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_CLICK_DATA_H_
