// Splits the rows of a push into partitions by the hash of the row, so that
// threads can take a partition each: all positions that name a row lie in the
// same one, in the order in which they were given, and what is needed to find
// rows named twice stays small enough for a core's own cache.
//
// Two passes, both spread over threads: count, then place. Thread compatible:
// Build from one thread, then read from many.

#ifndef TF_RECSYNC_CC_ENGINE_ROW_PARTITIONS_H_
#define TF_RECSYNC_CC_ENGINE_ROW_PARTITIONS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/engine/row_locks.h"

namespace recsync {

class RowPartitions {
 public:
  // A partition has about this many positions: enough of them to share out, and
  // no more of them than needed, as each reads its gradients across the whole
  // push.
  static constexpr int64_t kSmallest = 1024;
  static constexpr int64_t kLargest = 8192;
  static constexpr int kSharedOut = 3;  // log2 of as many partitions

  // `parallel_for(count, cost, f)` calls f(begin, end) on pieces of
  // [0, count), in any threads, and returns when all have ended; `cost` is
  // about the cycles of one unit. `n` is less than 2^31. Reuses its memory.
  template <typename Index, typename ParallelFor>
  void Build(const Index* ids, int64_t n, ParallelFor&& parallel_for) {
    int bits = 0;
    while ((kSmallest << bits) < n &&
           (bits < kSharedOut || (kLargest << bits) < n) && bits < 16) {
      ++bits;
    }
    const int64_t partitions = int64_t{1} << bits;
    const int64_t chunks = std::min<int64_t>(n / (4 * kSmallest) + 1, 32);
    const int64_t chunk_size = (n + chunks - 1) / chunks;
    const auto partition_of = [bits](Index id) {
      return bits == 0 ? 0 : RowHash(id) >> (32 - bits);
    };
    rows_.resize(n);
    positions_.resize(n);
    // Of each chunk: first how many of its positions go to each partition,
    // then where the next of them is placed.
    std::vector<int32_t>& next = next_;
    next.assign(chunks * partitions, 0);
    parallel_for(chunks, 2 * chunk_size, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        int32_t* own = next.data() + chunk * partitions;
        const int64_t last = std::min((chunk + 1) * chunk_size, n);
        for (int64_t p = chunk * chunk_size; p < last; ++p) {
          ++own[partition_of(ids[p])];
        }
      }
    });
    starts_.assign(1, 0);
    int32_t total = 0;
    for (int64_t partition = 0; partition < partitions; ++partition) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        int32_t& count = next[chunk * partitions + partition];
        const int32_t start = total;
        total += count;
        count = start;
      }
      starts_.push_back(total);
    }
    parallel_for(chunks, 4 * chunk_size, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        int32_t* own = next.data() + chunk * partitions;
        const int64_t last = std::min((chunk + 1) * chunk_size, n);
        for (int64_t p = chunk * chunk_size; p < last; ++p) {
          const int32_t place = own[partition_of(ids[p])]++;
          rows_[place] = static_cast<int64_t>(ids[p]);
          positions_[place] = static_cast<int32_t>(p);
        }
      }
    });
  }

  // The number of partitions; some may be empty.
  int64_t count() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t size(int64_t partition) const {
    return starts_[partition + 1] - starts_[partition];
  }
  // Arrays of size(partition): the row ids, and their positions in the push.
  const int64_t* rows(int64_t partition) const {
    return rows_.data() + starts_[partition];
  }
  const int32_t* positions(int64_t partition) const {
    return positions_.data() + starts_[partition];
  }

 private:
  std::vector<int64_t> rows_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> starts_;  // by partition, with the end
  std::vector<int32_t> next_;    // while building
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_ROW_PARTITIONS_H_
