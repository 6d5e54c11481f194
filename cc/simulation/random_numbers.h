// Random numbers that are functions of a seed and of what they are for, so that
// a simulation does not depend on the order in which they are drawn.
//
//   RandomNumbers random(seed, kNoise, worker, step);
//   random.Uniform(), random.Normal(), ...
//
// Thread compatible.

#ifndef TF_RECSYNC_CC_SIMULATION_RANDOM_NUMBERS_H_
#define TF_RECSYNC_CC_SIMULATION_RANDOM_NUMBERS_H_

#include <cmath>
#include <cstdint>

#include "cc/engine/philox.h"

namespace recsync {

class RandomNumbers {
 public:
  // What they are for: two kinds share none.
  enum Kind : uint32_t { kNoise, kTruth, kInitial, kBatch, kTest };

  // At most 2^30 of them are drawn.
  RandomNumbers(uint64_t seed, Kind kind, uint32_t first, int64_t second)
      : seed_(seed),
        counter_{first, static_cast<uint32_t>(second),
                 static_cast<uint32_t>(static_cast<uint64_t>(second) >> 32),
                 static_cast<uint32_t>(kind) << 28} {}

  // In (0, 1).
  double Uniform() {
    if (left_ == 0) {
      words_ = Philox(seed_, counter_);
      ++counter_[3];
      left_ = 4;
    }
    constexpr double kScale = 1.0 / 4294967296.0;
    return (words_[--left_] + 0.5) * kScale;
  }

  // Of a standard normal distribution.
  double Normal() {
    constexpr double kTwoPi = 6.283185307179586;
    const double radius = std::sqrt(-2.0 * std::log(Uniform()));
    return radius * std::cos(kTwoPi * Uniform());
  }

 private:
  const uint64_t seed_;
  PhiloxWords counter_;
  PhiloxWords words_{};
  int left_ = 0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_RANDOM_NUMBERS_H_
