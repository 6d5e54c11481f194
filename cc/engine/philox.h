// Philox-4x32-10, a generator without a state: its numbers are a function of a
// key and a counter, so that any of them can be had without those before it.
//
// Reference: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

#ifndef TF_RECSYNC_CC_ENGINE_PHILOX_H_
#define TF_RECSYNC_CC_ENGINE_PHILOX_H_

#include <array>
#include <cstdint>

namespace recsync {

// Four random words, or the counter that they come from.
using PhiloxWords = std::array<uint32_t, 4>;

// The words of a counter, under a key whose lower half comes first.
inline PhiloxWords Philox(uint64_t key, PhiloxWords counter) {
  constexpr int kRounds = 10;
  constexpr uint64_t kEven = 0xD2511F53, kOdd = 0xCD9E8D57;
  constexpr uint32_t kGolden = 0x9E3779B9, kRoot = 0xBB67AE85;
  uint32_t low = static_cast<uint32_t>(key);
  uint32_t high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t even = kEven * counter[0];
    const uint64_t odd = kOdd * counter[2];
    counter = {static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ low,
               static_cast<uint32_t>(odd),
               static_cast<uint32_t>(even >> 32) ^ counter[3] ^ high,
               static_cast<uint32_t>(even)};
    low += kGolden;
    high += kRoot;
  }
  return counter;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_PHILOX_H_
