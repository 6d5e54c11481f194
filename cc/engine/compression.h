// What travels between the devices of a group in fewer bytes (Huang et al.
// 2021, "Hierarchical Training", section 4.2): activations in int8 with a scale
// for each row, gradients of which only the largest are sent, and an error
// feedback that adds what was left out to the next gradient.
//
// Numbers that are not finite stay visible: a row of activations that has one
// comes out as NaN, and gradients that are not finite count as the largest.

#ifndef TF_RECSYNC_CC_ENGINE_COMPRESSION_H_
#define TF_RECSYNC_CC_ENGINE_COMPRESSION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cc/engine/bfloat16.h"
#include "cc/engine/mutex.h"

namespace recsync {

constexpr uint32_t kMagnitudeBits = 0x7FFFFFFF;
constexpr uint32_t kInfinityBits = 0x7F800000;

// The bits of |x|, which are ordered as |x| is; NaN is above infinity.
inline uint32_t Magnitude(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits & kMagnitudeBits;
}

// Writes codes of a row of `columns` values from -127 to 127, and returns their
// scale, max|x| / 127; x is about code * scale, rounded to the nearest, ties to
// even. The scale of a row with a value that is not finite is NaN, and that of
// a row of zeros 0.
inline float QuantizeRow(const float* x, int64_t columns, int8_t* codes) {
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < columns; ++i) {
    // Signed, as the vector units of every x86-64 compare such.
    const int32_t bits = static_cast<int32_t>(Magnitude(x[i]));
    largest_bits = largest_bits < bits ? bits : largest_bits;
  }
  if (static_cast<uint32_t>(largest_bits) >= kInfinityBits) {
    std::fill_n(codes, columns, int8_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof(largest));
  const float inverse = 127.0f / largest;
  if (!std::isfinite(inverse)) {  // all 0, or too small for a scale
    std::fill_n(codes, columns, int8_t{0});
    return 0.0f;
  }
  // Above 2^23, floats are the integers: adding rounds, and the lowest bits of
  // the sum are the code.
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  constexpr int32_t kRounderBits = 0x4B400000;
  for (int64_t i = 0; i < columns; ++i) {
    const float sum = x[i] * inverse + kRounder;
    int32_t bits;
    std::memcpy(&bits, &sum, sizeof(bits));
    codes[i] = static_cast<int8_t>(bits - kRounderBits);
  }
  return largest / 127.0f;
}

inline void DequantizeRow(const int8_t* codes, int64_t columns, float scale,
                          float* x) {
  for (int64_t i = 0; i < columns; ++i) {
    x[i] = static_cast<float>(codes[i]) * scale;
  }
}

// How many of `count` gradients are sent if a part `sparsify`, at least 0 and
// below 1, is left out: at least one, if there is any.
inline int64_t KeptCount(int64_t count, double sparsify) {
  const auto left_out =
      static_cast<int64_t>(sparsify * static_cast<double>(count));
  return std::max<int64_t>(count - left_out, std::min<int64_t>(count, 1));
}

// Bytes of a mask with a bit for each of `count` gradients.
inline int64_t MaskBytes(int64_t count) { return count / 8 + (count % 8 > 0); }

// Which gradients are the largest: those above a magnitude, and the first
// `ties` of those that have it.
struct Threshold {
  uint32_t magnitude;
  int64_t ties;
};

// The threshold of the `kept` largest of `count` gradients, 0 < kept <= count.
// Counts the upper halves of the magnitudes, and then the lower halves of those
// among which the threshold is.
inline Threshold FindThreshold(const float* x, int64_t count, int64_t kept) {
  std::vector<int64_t> counts(1 << 15, 0);
  for (int64_t i = 0; i < count; ++i) ++counts[Magnitude(x[i]) >> 16];
  auto last_of = [&counts](int64_t* wanted) {
    auto bucket = static_cast<uint32_t>(counts.size() - 1);
    while (counts[bucket] < *wanted) *wanted -= counts[bucket--];
    return bucket;
  };
  int64_t wanted = kept;
  const uint32_t upper = last_of(&wanted);
  counts.assign(1 << 16, 0);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = Magnitude(x[i]);
    if (magnitude >> 16 == upper) ++counts[magnitude & 0xFFFF];
  }
  const uint32_t lower = last_of(&wanted);
  return {upper << 16 | lower, wanted};
}

inline float Sent(float x, float* value) { return *value = x; }
inline float Sent(float x, BFloat16* value) {
  *value = ToBFloat16(x);
  return static_cast<float>(*value);
}

// Compresses the gradients x: the `kept` largest, in their order, into
// `values`, and which these are into `mask`, bit i % 8 of byte i / 8 for
// gradient i. With kept == count there is no mask, and it may be null. If
// `error` is not null, it gets what x differs from what is sent, or 0 where
// that is not finite.
template <typename V>
void Compress(const float* x, int64_t count, int64_t kept, uint8_t* mask,
              V* values, float* error) {
  auto send = [error, x](int64_t i, V* value) {
    const float rest = x[i] - Sent(x[i], value);
    if (error != nullptr) error[i] = std::isfinite(rest) ? rest : 0.0f;
  };
  if (kept == count) {
    for (int64_t i = 0; i < count; ++i) send(i, values + i);
    return;
  }
  Threshold threshold = FindThreshold(x, count, kept);
  std::fill_n(mask, MaskBytes(count), uint8_t{0});
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = Magnitude(x[i]);
    if (magnitude > threshold.magnitude ||
        (magnitude == threshold.magnitude && threshold.ties-- > 0)) {
      mask[i / 8] = static_cast<uint8_t>(mask[i / 8] | 1 << i % 8);
      send(i, values++);
    } else if (error != nullptr) {
      error[i] = std::isfinite(x[i]) ? x[i] : 0.0f;
    }
  }
}

// Whether a mask, of MaskBytes(count), names `kept` of `count` gradients.
inline bool MaskFits(const uint8_t* mask, int64_t count, int64_t kept) {
  int64_t found = 0;
  for (int64_t b = 0; b < MaskBytes(count); ++b) {
    found += __builtin_popcount(mask[b]);
  }
  const bool beyond = count % 8 > 0 && mask[count / 8] >> count % 8 != 0;
  return found == kept && !beyond;
}

// Restores what Compress wrote, 0 for what was left out. The mask must fit, or
// be null if all are there.
template <typename V>
void Restore(const uint8_t* mask, const V* values, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    const bool sent = mask == nullptr || (mask[i / 8] >> i % 8 & 1);
    x[i] = sent ? static_cast<float>(*values++) : 0.0f;
  }
}

// What one net has not sent yet of the gradients on one edge: e <- g + e -
// C(g + e), with C the compression (Karimireddy et al. 2019). It begins at 0,
// anew when the number of gradients changes.
//
// Thread safe; calls wait for one another.
class ErrorFeedback {
 public:
  // As Compress, of g + e.
  template <typename V>
  void CompressWith(const float* g, int64_t count, int64_t kept, uint8_t* mask,
                    V* values) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (static_cast<int64_t>(error_.size()) != count) {
      error_.assign(static_cast<size_t>(count), 0.0f);
    }
    for (int64_t i = 0; i < count; ++i) error_[i] += g[i];
    // Each is read before what is left of it is written in its place.
    Compress(error_.data(), count, kept, mask, values, error_.data());
  }

  std::vector<float> error() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return error_;
  }

 private:
  mutable Mutex mu_;
  std::vector<float> error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_COMPRESSION_H_
