// The deep part of a click model: dense layers with ReLU, and an output of one
// logit. With mean-normalization, it is between a dense layer and its ReLU
// (Liu and Zhao 2021, algorithm 1), computed by the engine's MeanNormalize.
//
// All parameters lie in one array, layer after layer: the kernel [inputs,
// units], the bias [units] and, with mean-normalization, alpha [units] and
// beta [units]; the output's kernel and bias are last. The moving means of
// all layers lie in another one.
//
//   HiddenLayers layers(options);
//   layers.Initialize(seed, parameters);
//   layers.Forward(parameters, x, rows, logits);
//   layers.Backward(parameters, slopes, gradients, slopes_of_x);
//
// Thread compatible.

#ifndef TF_RECSYNC_CC_SIMULATION_HIDDEN_LAYERS_H_
#define TF_RECSYNC_CC_SIMULATION_HIDDEN_LAYERS_H_

#include <cstdint>
#include <vector>

namespace recsync {

struct HiddenLayersOptions {
  std::vector<int> units;  // of each layer, from the inputs up; none: no layers
  bool mean_normalization = false;
  float momentum = 0.99f;  // of moving means, in [0, 1)
  float epsilon = 1e-3f;   // the smallest divisor, positive
};

class HiddenLayers {
 public:
  HiddenLayers(int inputs, const HiddenLayersOptions& options);

  int inputs() const { return inputs_; }
  // How many parameters and moving means there are; 0 without layers.
  int64_t parameters() const { return parameters_; }
  int64_t means() const { return means_; }

  // Writes Keras's first values: Glorot's uniform kernels, biases of 0, alphas
  // and betas of 1.
  void Initialize(uint64_t seed, float* parameters) const;

  // The logits of a mini-batch in training, of x [rows, inputs]. What Backward
  // needs is kept, and x must stay until then.
  void Forward(const float* parameters, const float* x, int rows,
               double* logits);
  // Of the last mini-batch, from the slopes of the loss by its logits [rows]:
  // adds those by the parameters to `gradients`, and writes those by x.
  void Backward(const float* parameters, const float* slopes, float* gradients,
                float* slopes_of_x);
  // By how much the last mini-batch changes moving means from what they were.
  void ChangeOfMeans(const float* moving_means, float* change) const;

  // The logits in inference, where moving means normalize.
  void Infer(const float* parameters, const float* moving_means, const float* x,
             int rows, double* logits);

 private:
  struct Layer {
    int inputs;
    int units;
    int64_t kernel;  // where its parameters begin
    int64_t means;   // where its moving means begin
    // Of the last mini-batch, [rows, units] each.
    std::vector<float> dense;   // after the kernel and the bias
    std::vector<float> values;  // after ReLU
    std::vector<float> mean;    // [units], of `dense`
  };

  bool normalizes(const Layer& layer) const {
    return options_.mean_normalization && &layer != &layers_.back();
  }
  // x times the kernel, plus the bias, into `dense`.
  static void Multiply(const float* parameters, const float* x, int rows,
                       Layer* layer);
  // Has all layers one after the other; `normalize` writes `values` of one.
  template <typename Normalize>
  void Run(const float* parameters, const float* x, int rows, double* logits,
           const Normalize& normalize);

  const int inputs_;
  const HiddenLayersOptions options_;
  int64_t parameters_ = 0;
  int64_t means_ = 0;
  std::vector<Layer> layers_;  // the output is the last one
  const float* x_ = nullptr;
  int rows_ = 0;
  std::vector<float> slopes_;  // by values, while going backward
  std::vector<float> of_dense_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_HIDDEN_LAYERS_H_
