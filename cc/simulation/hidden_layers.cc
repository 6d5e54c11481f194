#include "cc/simulation/hidden_layers.h"

#include <algorithm>
#include <cmath>

#include "cc/engine/mean_normalization.h"
#include "cc/simulation/random_numbers.h"

namespace recsync {

HiddenLayers::HiddenLayers(int inputs, const HiddenLayersOptions& options)
    : inputs_(inputs), options_(options) {
  if (options.units.empty()) return;
  std::vector<int> units = options.units;
  units.push_back(1);
  for (const int width : units) {
    const bool is_output = layers_.size() + 1 == units.size();
    const bool normalizes = options.mean_normalization && !is_output;
    layers_.push_back({inputs, width, parameters_, means_, {}, {}, {}});
    parameters_ += int64_t{width} * (inputs + (normalizes ? 3 : 1));
    if (normalizes) means_ += width;
    inputs = width;
  }
}

void HiddenLayers::Initialize(uint64_t seed, float* parameters) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    // Rows of the click model's table have the first of these numbers.
    RandomNumbers random(seed, RandomNumbers::kInitial, 1,
                         static_cast<int64_t>(i));
    const double limit = std::sqrt(6.0 / (layer.inputs + layer.units));
    float* value = parameters + layer.kernel;
    for (int64_t k = 0; k < int64_t{layer.inputs} * layer.units; ++k) {
      *value++ = static_cast<float>(limit * (2.0 * random.Uniform() - 1.0));
    }
    value = std::fill_n(value, layer.units, 0.0f);
    if (normalizes(layer)) std::fill_n(value, 2 * layer.units, 1.0f);
  }
}

void HiddenLayers::Multiply(const float* parameters, const float* x, int rows,
                            Layer* layer) {
  const int inputs = layer->inputs, units = layer->units;
  const float* kernel = parameters + layer->kernel;
  const float* bias = kernel + int64_t{inputs} * units;
  layer->dense.resize(int64_t{rows} * units);
  for (int r = 0; r < rows; ++r) {
    float* sums = layer->dense.data() + int64_t{r} * units;
    std::copy_n(bias, units, sums);
    for (int i = 0; i < inputs; ++i) {
      const float input = x[int64_t{r} * inputs + i];
      if (input == 0.0f) continue;  // As often after ReLU.
      const float* weights = kernel + int64_t{i} * units;
      for (int u = 0; u < units; ++u) sums[u] += input * weights[u];
    }
  }
}

template <typename Normalize>
void HiddenLayers::Run(const float* parameters, const float* x, int rows,
                       double* logits, const Normalize& normalize) {
  for (Layer& layer : layers_) {
    Multiply(parameters, x, rows, &layer);
    if (&layer == &layers_.back()) break;
    layer.values.resize(layer.dense.size());
    if (options_.mean_normalization) {
      normalize(&layer);
    } else {
      layer.values = layer.dense;
    }
    for (float& value : layer.values) value = std::max(value, 0.0f);
    x = layer.values.data();
  }
  std::copy_n(layers_.back().dense.data(), rows, logits);
}

void HiddenLayers::Forward(const float* parameters, const float* x, int rows,
                           double* logits) {
  x_ = x;
  rows_ = rows;
  Run(parameters, x, rows, logits, [&](Layer* layer) {
    const float* alpha =
        parameters + layer->kernel + int64_t{layer->inputs + 1} * layer->units;
    layer->mean.resize(layer->units);
    MeanNormalize(layer->dense.data(), alpha, alpha + layer->units,
                  options_.epsilon, rows, layer->units, layer->values.data(),
                  layer->mean.data());
  });
}

void HiddenLayers::Infer(const float* parameters, const float* moving_means,
                         const float* x, int rows, double* logits) {
  Run(parameters, x, rows, logits, [&](Layer* layer) {
    const int units = layer->units;
    const float* alpha =
        parameters + layer->kernel + int64_t{layer->inputs + 1} * units;
    const float* beta = alpha + units;
    for (int u = 0; u < units; ++u) {
      const float scale =
          alpha[u] /
          GuardedDivisor(moving_means[layer->means + u], options_.epsilon);
      for (int r = 0; r < rows; ++r) {
        const int64_t at = int64_t{r} * units + u;
        layer->values[at] = layer->dense[at] * scale - beta[u];
      }
    }
  });
}

void HiddenLayers::Backward(const float* parameters, const float* slopes,
                            float* gradients, float* slopes_of_x) {
  of_dense_.assign(slopes, slopes + rows_);
  for (size_t l = layers_.size(); l-- > 0;) {
    const Layer& layer = layers_[l];
    const int inputs = layer.inputs, units = layer.units;
    if (&layer != &layers_.back()) {
      for (size_t i = 0; i < layer.values.size(); ++i) {
        if (layer.values[i] <= 0.0f) slopes_[i] = 0.0f;
      }
      of_dense_.resize(slopes_.size());
      if (normalizes(layer)) {
        const int64_t alpha = layer.kernel + int64_t{inputs + 1} * units;
        std::vector<float> of_alpha(units), of_beta(units);
        MeanNormalizeGrad(slopes_.data(), layer.dense.data(),
                          parameters + alpha, layer.mean.data(),
                          options_.epsilon, rows_, units, of_dense_.data(),
                          of_alpha.data(), of_beta.data());
        for (int u = 0; u < units; ++u) {
          gradients[alpha + u] += of_alpha[u];
          gradients[alpha + units + u] += of_beta[u];
        }
      } else {
        of_dense_ = slopes_;
      }
    }
    const float* x = l > 0 ? layers_[l - 1].values.data() : x_;
    const float* kernel = parameters + layer.kernel;
    float* of_kernel = gradients + layer.kernel;
    float* of_bias = of_kernel + int64_t{inputs} * units;
    slopes_.resize(int64_t{rows_} * inputs);
    for (int r = 0; r < rows_; ++r) {
      const float* slope = of_dense_.data() + int64_t{r} * units;
      for (int u = 0; u < units; ++u) of_bias[u] += slope[u];
      for (int i = 0; i < inputs; ++i) {
        const int64_t at = int64_t{r} * inputs + i;
        const float input = x[at];
        const float* weights = kernel + int64_t{i} * units;
        float* of_weights = of_kernel + int64_t{i} * units;
        float sum = 0.0f;
        for (int u = 0; u < units; ++u) {
          of_weights[u] += slope[u] * input;
          sum += slope[u] * weights[u];
        }
        slopes_[at] = sum;
      }
    }
  }
  std::copy(slopes_.begin(), slopes_.end(), slopes_of_x);
}

void HiddenLayers::ChangeOfMeans(const float* moving_means,
                                 float* change) const {
  for (const Layer& layer : layers_) {
    if (!normalizes(layer)) continue;
    for (int u = 0; u < layer.units; ++u) {
      const int64_t at = layer.means + u;
      change[at] =
          (1.0f - options_.momentum) * (layer.mean[u] - moving_means[at]);
    }
  }
}

}  // namespace recsync
