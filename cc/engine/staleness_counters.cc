#include "cc/engine/staleness_counters.h"

#include <algorithm>
#include <cmath>

namespace recsync {
namespace {

// Position of the highest bit set; `value` is positive.
int FloorLog2(int64_t value) {
  return 63 - __builtin_clzll(static_cast<unsigned long long>(value));
}

}  // namespace

double StalenessCounters::Mean() const {
  if (count() == 0) return 0.0;
  return static_cast<double>(counters_[kSum]) / count();
}

double StalenessCounters::Variance() const {
  if (count() == 0) return 0.0;
  const double mean = Mean();
  const double mean_of_squares =
      static_cast<double>(counters_[kSumOfSquares]) / count();
  return std::max(0.0, mean_of_squares - mean * mean);
}

int64_t StalenessCounters::Quantile(double quantile) const {
  if (count() == 0) return 0;
  const double wanted = std::min(std::max(quantile, 0.0), 1.0) * count();
  int64_t seen = 0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    seen = SaturatingAdd(seen, counters_[kFirstBucket + bucket]);
    if (seen > 0 && seen >= wanted) return std::min(UpperEdge(bucket), max());
  }
  return max();
}

int StalenessCounters::BucketOf(int64_t tau) {
  if (tau < kExactBuckets) return static_cast<int>(std::max<int64_t>(tau, 0));
  const int octave = FloorLog2(tau);
  const int in_octave = static_cast<int>((tau >> (octave - 3)) & 7);
  const int bucket =
      kExactBuckets + kBucketsPerOctave * (octave - 5) + in_octave;
  return std::min(bucket, kBuckets - 1);
}

int64_t StalenessCounters::UpperEdge(int bucket) {
  if (bucket < kExactBuckets) return bucket;
  if (bucket >= kBuckets - 1) return std::numeric_limits<int64_t>::max();
  const int octave = 5 + (bucket - kExactBuckets) / kBucketsPerOctave;
  const int in_octave = (bucket - kExactBuckets) % kBucketsPerOctave;
  return ((int64_t{kBucketsPerOctave} + in_octave + 1) << (octave - 3)) - 1;
}

}  // namespace recsync
