#include "cc/engine/initial_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cc/engine/philox.h"

namespace recsync {
namespace {

// Columns that one counter gives values for.
constexpr int kColumns = 4;
// Counters that are worked on together: their words stay in the nearest cache.
constexpr int kCounters = 256;
constexpr int kWords = kColumns * kCounters;

// Half of what is below -2 standard deviations and above 2, in a normal
// distribution.
constexpr float kBelowTwo = 0.022750132f;

// As memcpy does it, which GCC does not vectorize.
inline float FromBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t ToBits(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

// The logarithm of a positive, normal number, off by less than 1e-6 in all.
// Not the library's, of which processors have several that differ in the last
// bit, and whose calls would keep loops from being vectorized.
[[gnu::always_inline]] inline float Log(float value) {
  const uint32_t bits = ToBits(value);
  const float exponent =
      static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  const float m = FromBits((bits & 0x7FFFFF) | 0x3F800000) - 1.5f;
  float log = -0.0060748775f;
  log = log * m + 0.010119083f;
  log = log * m - 0.014372835f;
  log = log * m + 0.026015664f;
  log = log * m - 0.04940485f;
  log = log * m + 0.09878653f;
  log = log * m - 0.22222157f;
  log = log * m + 0.6666663f;
  log = log * m + 0.4054651f;
  return exponent * 0.69314718f + log;
}

// How many standard deviations above the mean a normal distribution has `above`
// of its mass, from 2^-33 to a half.
//
// With x = 1 - 2 * above and w = -log(1 - x^2), the quotient of the quantile
// and x is nearly a polynomial in sqrt(w + 3). The coefficients are those of
// least relative error at Chebyshev's nodes, 3e-6, of the variable moved to
// [-1, 1].
[[gnu::always_inline]] inline float Quantile(float above) {
  const float x = 1.0f - 2.0f * above;
  const float w = -Log(4.0f * above * (1.0f - above));
  const float t = (std::sqrt(w + 3.0f) - 3.3402709f) * (1.0f / 1.60822f);
  float quotient = -0.0321148f;
  quotient = quotient * t + 0.035346314f;
  quotient = quotient * t + 0.094891615f;
  quotient = quotient * t - 0.14892107f;
  quotient = quotient * t - 0.03399848f;
  quotient = quotient * t + 0.19585857f;
  quotient = quotient * t - 0.17619047f;
  quotient = quotient * t + 0.077265896f;
  quotient = quotient * t + 0.0341359f;
  quotient = quotient * t - 0.1668342f;
  quotient = quotient * t + 2.6555946f;
  quotient = quotient * t + 3.802921f;
  return x * quotient;
}

// 31 of a word's bits as the middle of one of 2^31 parts of [0, 1].
inline float Part(uint32_t word) {
  constexpr float kParts = 1.0f / 2147483648.0f;
  return static_cast<float>(static_cast<int32_t>(word >> 1)) * kParts +
         0.5f * kParts;
}

// The value or its negative, by the bit that Part leaves.
inline float WithSign(uint32_t word, float value) {
  return FromBits(ToBits(value) ^ (word << 31));
}

void Uniform(const uint32_t* words, int n, float low, float high,
             float* values) {
  const float range = high - low;
  // Rounding must not reach `high`.
  const float most = low < high ? std::nextafter(high, low) : low;
  for (int i = 0; i < n; ++i) {
    const float part = static_cast<float>(static_cast<int32_t>(words[i] >> 8)) *
                       (1.0f / 16777216.0f);
    values[i] = std::min(low + range * part, most);
  }
}

void Normal(const uint32_t* words, int n, float mean, float stddev,
            float* values) {
  for (int i = 0; i < n; ++i) {
    const float above = 0.5f * Part(words[i]);
    values[i] = mean + stddev * WithSign(words[i], Quantile(above));
  }
}

void TruncatedNormal(const uint32_t* words, int n, float mean, float stddev,
                     float* values) {
  for (int i = 0; i < n; ++i) {
    const float above = kBelowTwo + (0.5f - kBelowTwo) * Part(words[i]);
    const float deviations = std::min(Quantile(above), 2.0f);
    values[i] = mean + stddev * WithSign(words[i], deviations);
  }
}

void Transform(const InitialRows& rows, const uint32_t* words, int n,
               float* values) {
  switch (rows.distribution) {
    case Distribution::kConstant:
      std::fill_n(values, n, rows.first);
      return;
    case Distribution::kUniform:
      return Uniform(words, n, rows.first, rows.second, values);
    case Distribution::kNormal:
      return Normal(words, n, rows.first, rows.second, values);
    case Distribution::kTruncatedNormal:
      return TruncatedNormal(words, n, rows.first, rows.second, values);
  }
}

void Store(const float* values, int64_t n, float* to) {
  std::copy_n(values, n, to);
}

void Store(const float* values, int64_t n, BFloat16* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = ToBFloat16(values[i]);
}

template <typename T>
T Converted(float value) {
  T converted;
  Store(&value, 1, &converted);
  return converted;
}

template <typename T>
void Fill(const InitialRows& rows, int64_t dimension, int64_t begin,
          int64_t end, T* values) {
  if (dimension == 0) return;
  if (rows.distribution == Distribution::kConstant) {
    std::fill(values + begin * dimension, values + end * dimension,
              Converted<T>(rows.first));
    return;
  }
  const int64_t per_row = (dimension + kColumns - 1) / kColumns;
  uint32_t words[kWords];
  float found[kWords];
  int64_t row = begin, block = 0;
  while (row < end) {
    // The next counters go through the columns, then to the next row.
    const int64_t first_row = row, first_block = block;
    int counters = 0;
    for (; counters < kCounters && row < end; ++counters) {
      const uint64_t number = rows.index + rows.count * row;
      const PhiloxWords drawn = Philox(
          rows.seed,
          {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32),
           static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32)});
      std::copy_n(drawn.data(), kColumns, words + kColumns * counters);
      if (++block == per_row) {
        block = 0;
        ++row;
      }
    }
    Transform(rows, words, kColumns * counters, found);
    T* to = values + first_row * dimension + first_block * kColumns;
    if (dimension % kColumns == 0) {
      Store(found, kColumns * counters, to);
      continue;
    }
    // A row's last counter gives more than it takes.
    block = first_block;
    for (int i = 0; i < counters; ++i) {
      const int64_t n =
          std::min<int64_t>(kColumns, dimension - block * kColumns);
      Store(found + kColumns * i, n, to);
      to += n;
      if (++block == per_row) block = 0;
    }
  }
}

}  // namespace

Result CheckInitialRows(const InitialRows& rows) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  if (rows.rows < 0) {
    return Result::Error("rows must be at least 0, not ", rows.rows);
  }
  if (rows.count < 1 || rows.index < 0 || rows.index >= rows.count) {
    return Result::Error("index must be from 0 to below count, not ",
                         rows.index, " with count ", rows.count);
  }
  if (rows.rows > kMost / rows.count) {
    return Result::Error("rows x count must be at most ", kMost, ", not ",
                         rows.rows, " x ", rows.count);
  }
  if (!std::isfinite(rows.first) || !std::isfinite(rows.second)) {
    return Result::Error("parameters must be finite, not ", rows.first, " and ",
                         rows.second);
  }
  if (rows.distribution == Distribution::kConstant) return Result::Ok();
  if (rows.distribution == Distribution::kUniform) {
    if (rows.first <= rows.second && std::isfinite(rows.second - rows.first)) {
      return Result::Ok();
    }
    return Result::Error(
        "parameters must be the bounds of a finite range, not ", rows.first,
        " and ", rows.second);
  }
  if (rows.second >= 0.0f) return Result::Ok();
  return Result::Error("a standard deviation must be at least 0, not ",
                       rows.second);
}

void FillRows(const InitialRows& rows, int64_t dimension, int64_t begin,
              int64_t end, float* values) {
  Fill(rows, dimension, begin, end, values);
}

void FillRows(const InitialRows& rows, int64_t dimension, int64_t begin,
              int64_t end, BFloat16* values) {
  Fill(rows, dimension, begin, end, values);
}

}  // namespace recsync
