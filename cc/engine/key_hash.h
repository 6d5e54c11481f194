// How keys are spread: ids of any value over the partitions of a table.

#ifndef TF_RECSYNC_CC_ENGINE_KEY_HASH_H_
#define TF_RECSYNC_CC_ENGINE_KEY_HASH_H_

#include <cstdint>

namespace recsync {

// The finalizer of MurmurHash3: a permutation that spreads keys evenly.
inline uint64_t KeyHash(int64_t key) {
  uint64_t x = static_cast<uint64_t>(key);
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

// Which of so many partitions, a power of two, a key belongs to.
inline int64_t PartitionOfKey(int64_t key, int64_t partitions) {
  return static_cast<int64_t>(KeyHash(key) &
                              static_cast<uint64_t>(partitions - 1));
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_KEY_HASH_H_
