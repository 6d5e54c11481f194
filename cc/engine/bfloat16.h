// bfloat16, the upper half of a float, and how it is converted: to float
// exactly, from float to the nearest, ties to even, or stochastically.

#ifndef TF_RECSYNC_CC_ENGINE_BFLOAT16_H_
#define TF_RECSYNC_CC_ENGINE_BFLOAT16_H_

#include <cstdint>
#include <cstring>

namespace recsync {

// The bits of a bfloat16.
struct BFloat16 {
  uint16_t bits;

  explicit operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
};

// A float whose lower half, once `Added` is added to its bits, is cut off.
template <typename Added>
BFloat16 CutOff(float value, Added added) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) {  // rounding could carry into an infinity
    return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  }
  return BFloat16{static_cast<uint16_t>((bits + added(bits)) >> 16)};
}

inline BFloat16 ToBFloat16(float value) {
  return CutOff(value,
                [](uint32_t bits) { return 0x7FFF + ((bits >> 16) & 1); });
}

// Rounded away from 0 or towards it, by 16 random bits: on average the value
// itself, and a value that bfloat16 has as it is.
inline BFloat16 ToBFloat16(float value, uint16_t random) {
  return CutOff(value, [random](uint32_t) { return uint32_t{random}; });
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_BFLOAT16_H_
