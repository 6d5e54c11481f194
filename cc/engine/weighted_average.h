// Averages received copies of parameters into a worker's own, in one pass over
// memory.

#ifndef TF_RECSYNC_CC_ENGINE_WEIGHTED_AVERAGE_H_
#define TF_RECSYNC_CC_ENGINE_WEIGHTED_AVERAGE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace recsync {

// own += sum_j weights[j] * (copies[j] - base), elementwise over `size`.
//
// With base = own this is the weighted average, in which own has the rest of
// the weight. With base = what the worker had sent, and own what it made of it
// since, the average takes the place of base below what was learned meanwhile.
// `own` may be `base`; no other two may overlap. Sums are made in `T`, in the
// order of the copies.
template <typename T>
void AverageInto(const std::vector<const T*>& copies,
                 const std::vector<double>& weights, const T* base, T* own,
                 int64_t size) {
  // A block of `own` and `base` stays in the first-level cache while all copies
  // pass by.
  constexpr int64_t kBlock = 1024;
  double sum = 0.0;
  for (const double weight : weights) sum += weight;
  const T rest = static_cast<T>(sum);
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = std::min(size, begin + kBlock);
    T average[kBlock];
    for (int64_t i = begin; i < end; ++i) {
      average[i - begin] = own[i] - rest * base[i];
    }
    for (size_t j = 0; j < copies.size(); ++j) {
      const T weight = static_cast<T>(weights[j]);
      const T* copy = copies[j];
      for (int64_t i = begin; i < end; ++i) {
        average[i - begin] += weight * copy[i];
      }
    }
    std::copy_n(average, end - begin, own + begin);
  }
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_WEIGHTED_AVERAGE_H_
