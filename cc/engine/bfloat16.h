// bfloat16, the upper half of a float, and how it is converted: to float
// exactly, from float to the nearest, ties to even.

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

inline BFloat16 ToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) {  // rounding could carry into an infinity
    return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  }
  return BFloat16{
      static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_BFLOAT16_H_
