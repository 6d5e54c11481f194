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

StalenessCounters::Moments StalenessCounters::BeginPush(int64_t window) {
  static_assert(kCount == 0 && kSum == 1 && kSumOfSquares == 2,
                "totals are copied at once");
  int64_t& pushes = counters_[kPushes];
  int64_t* const half = counters_ + kHalfBefore;
  if (pushes == 0) std::copy_n(counters_, 3, half);
  if (pushes == 0 || pushes >= window) {
    std::copy_n(half, 3, counters_ + kBefore);
    std::copy_n(counters_, 3, half);
    pushes = 0;
  }
  ++pushes;
  return MomentsSince(counters_ + kBefore);
}

StalenessCounters::Moments StalenessCounters::MomentsSince(
    const int64_t* before) const {
  const auto since = [&](int i) {
    const int64_t first = before == nullptr ? 0 : before[i];
    // Unsigned, as what a variable holds may be anything.
    return static_cast<double>(static_cast<int64_t>(
        static_cast<uint64_t>(counters_[i]) - static_cast<uint64_t>(first)));
  };
  const double n = since(kCount);
  if (n <= 0.0) return {};
  const double mean = since(kSum) / n;
  return {mean, std::max(0.0, since(kSumOfSquares) / n - mean * mean)};
}

int64_t StalenessCounters::Quantile(double quantile) const {
  if (count() == 0) return 0;
  const double wanted = std::min(std::max(quantile, 0.0), 1.0) * count();
  int64_t seen = 0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    seen = SaturatedSum(seen, counters_[kFirstBucket + bucket]);
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
