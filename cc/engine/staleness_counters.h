// Staleness statistics of one variable, as a flat array of int64 counters that
// live beside the variable, on the server that applies its updates.
//
// A flat array (and not an object with a lock) so that the counters can be an
// ordinary TensorFlow variable: checkpoints carry it, any client reads it with
// stock ops, and a span of time is the difference of two readings.
//
//   count   updates counted
//   sum     sum of tau
//   sum_sq  sum of tau^2
//   max     largest tau
//   bucket  a histogram: exact for tau < 32, eight buckets per octave beyond
//   skipped updates left out because their gradient was not finite, or their
//   row
//           belongs to another key by now; they count in nothing else
//   window  what `BeginPush` needs: pushes since the window's second half
//   began,
//           and what count, sum and sum_sq were when each half did
//
// Thread compatible: the caller holds the variable's lock, or works on a copy
// of its own and merges it under the lock.

#ifndef TF_RECSYNC_CC_ENGINE_STALENESS_COUNTERS_H_
#define TF_RECSYNC_CC_ENGINE_STALENESS_COUNTERS_H_

#include <array>
#include <cstdint>
#include <limits>

#include "cc/engine/saturated.h"

namespace recsync {

class StalenessCounters {
 public:
  static constexpr int kCount = 0;
  static constexpr int kSum = 1;
  static constexpr int kSumOfSquares = 2;
  static constexpr int kMax = 3;
  static constexpr int kFirstBucket = 4;
  static constexpr int kExactBuckets = 32;
  static constexpr int kBucketsPerOctave = 8;
  static constexpr int kOctaves = 27;  // 2^5 .. 2^32
  static constexpr int kBuckets = kExactBuckets + kBucketsPerOctave * kOctaves;
  static constexpr int kSkipped = kFirstBucket + kBuckets;
  static constexpr int kPushes = kSkipped + 1;
  static constexpr int kBefore = kPushes + 1;      // kCount .. kSumOfSquares
  static constexpr int kHalfBefore = kBefore + 3;  // the same
  static constexpr int kSize = kHalfBefore + 3;

  // `counters` points at kSize values, outlives this object and starts zeroed.
  explicit StalenessCounters(int64_t* counters) : counters_(counters) {}

  // Counts one update of staleness `tau` (1 or more).
  void Add(int64_t tau) {
    counters_[kCount] = SaturatedSum(counters_[kCount], 1);
    counters_[kSum] = SaturatedSum(counters_[kSum], tau);
    counters_[kSumOfSquares] =
        SaturatedSum(counters_[kSumOfSquares], SaturatingMultiply(tau, tau));
    if (tau > counters_[kMax]) counters_[kMax] = tau;
    int64_t& bucket = counters_[kFirstBucket + BucketOf(tau)];
    bucket = SaturatedSum(bucket, 1);
  }

  // Counts one update that was left out.
  void AddSkipped() {
    counters_[kSkipped] = SaturatedSum(counters_[kSkipped], 1);
  }

  struct Moments {
    double mean = 0.0;
    // Of the population, not of a sample. Both are 0 without updates.
    double variance = 0.0;
  };

  // Begins a push, whose updates are counted after that. Returns the moments of
  // the updates of the last pushes: of `window` (1 or more) to 2 window - 1, or
  // all since the first call if there are less. Counts from before the first
  // call are left out.
  Moments BeginPush(int64_t window);

  // Adds what another set of counters, which has begun no push, has counted.
  void Merge(const int64_t* other) {
    for (int i = 0; i < kSize; ++i) {
      if (i == kMax) continue;
      counters_[i] = SaturatedSum(counters_[i], other[i]);
    }
    if (other[kMax] > counters_[kMax]) counters_[kMax] = other[kMax];
  }

  int64_t count() const { return counters_[kCount]; }
  int64_t max() const { return counters_[kMax]; }
  int64_t skipped() const { return counters_[kSkipped]; }
  // Of all updates.
  double Mean() const { return MomentsSince(nullptr).mean; }
  double Variance() const { return MomentsSince(nullptr).variance; }
  // The smallest tau that `quantile` (in [0, 1]) of the updates did not exceed;
  // beyond the exact buckets, the upper edge of its bucket (or the maximum, if
  // that is less). 0 before the first update.
  int64_t Quantile(double quantile) const;

  // The histogram's bucket of `tau`, from 0.
  static int BucketOf(int64_t tau);
  // The largest tau that bucket `bucket` holds.
  static int64_t UpperEdge(int bucket);

 private:
  // Of the updates since kCount .. kSumOfSquares were `before`; null: all.
  Moments MomentsSince(const int64_t* before) const;

  static int64_t SaturatingMultiply(int64_t a, int64_t b) {
    int64_t product;
    return __builtin_mul_overflow(a, b, &product)
               ? std::numeric_limits<int64_t>::max()
               : product;
  }

  int64_t* const counters_;  // Not owned.
};

// Counters of a thread's own, to be merged into the shared ones.
class LocalStalenessCounters {
 public:
  LocalStalenessCounters() { values_.fill(0); }
  void Add(int64_t tau) { StalenessCounters(values_.data()).Add(tau); }
  void AddSkipped() { StalenessCounters(values_.data()).AddSkipped(); }
  const int64_t* data() const { return values_.data(); }

 private:
  std::array<int64_t, StalenessCounters::kSize> values_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_STALENESS_COUNTERS_H_
