// A small problem to learn, for simulations that tell a loss: a logistic
// regression, whose examples come from a seed. With a weight decay its loss has
// one minimum.
//
// Thread compatible; const members may be called by several threads.

#ifndef TF_RECSYNC_CC_SIMULATION_LOGISTIC_PROBLEM_H_
#define TF_RECSYNC_CC_SIMULATION_LOGISTIC_PROBLEM_H_

#include <cstdint>
#include <vector>

namespace recsync {

class LogisticProblem {
 public:
  struct Options {
    int64_t examples = 4096;    // at least 1
    int64_t features = 32;      // at least 1
    int64_t batch_size = 128;   // at least 1
    double weight_decay = 0.0;  // of each parameter's square, halved
    uint64_t seed = 0;
  };

  explicit LogisticProblem(const Options& options);

  const Options& options() const { return options_; }

  // One for each feature, and a bias.
  int64_t parameters() const { return options_.features + 1; }

  // The gradient of a batch's mean loss at `w`. Which examples the batch has
  // depends on the seed, the worker and its step, all of them alike likely.
  void Gradient(const float* w, int64_t worker, int64_t step,
                float* gradient) const;

  // The mean loss of all examples at `w`.
  double Loss(const float* w) const;

  // Of all examples; for tests. Row by row, without the bias's 1.
  const std::vector<float>& inputs() const { return inputs_; }
  const std::vector<float>& labels() const { return labels_; }

 private:
  double Score(const float* w, int64_t example) const;

  const Options options_;
  std::vector<float> inputs_;
  std::vector<float> labels_;  // 0 or 1
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_LOGISTIC_PROBLEM_H_
