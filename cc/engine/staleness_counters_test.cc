#include "cc/engine/staleness_counters.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "cc/engine/mutex.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Values = std::vector<int64_t>;

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

Values Zeros() { return Values(StalenessCounters::kSize, 0); }

int64_t BucketCount(const Values& counters, int64_t tau) {
  return counters[StalenessCounters::kFirstBucket +
                  StalenessCounters::BucketOf(tau)];
}

// The largest tau of every bucket but the last, listed from the description of
// the histogram: exact below 32, then eight equal buckets between a power of
// two and the next.
Values ListedEdges() {
  Values edges;
  for (int64_t tau = 0; tau < 32; ++tau) edges.push_back(tau);
  for (int64_t octave = 32; octave < int64_t{1} << 32; octave *= 2) {
    for (int64_t eighth = 1; eighth <= 8; ++eighth) {
      edges.push_back(octave + octave / 8 * eighth - 1);
    }
  }
  edges.pop_back();
  return edges;
}

// Staleness as it looks in a cluster: mostly short, with a long tail.
Values RandomTaus(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::lognormal_distribution<double> tau(3.0, 1.5);
  Values taus(n);
  for (int64_t& value : taus) value = 1 + static_cast<int64_t>(tau(random));
  return taus;
}

TEST(StalenessCountersTest, EverythingIsZeroBeforeTheFirstUpdate) {
  Values values = Zeros();
  const StalenessCounters counters(values.data());
  EXPECT_EQ(counters.count(), 0);
  EXPECT_EQ(counters.max(), 0);
  EXPECT_EQ(counters.Mean(), 0.0);
  EXPECT_EQ(counters.Variance(), 0.0);
  EXPECT_EQ(counters.Quantile(0.0), 0);
  EXPECT_EQ(counters.Quantile(1.0), 0);
}

TEST(StalenessCountersTest, AWindowForgetsWhatIsOlderThanTwiceItsPushes) {
  Values values = Zeros();
  StalenessCounters counters(values.data());
  const Values taus = RandomTaus(50, 5);
  // Of before the first push: left out.
  for (int i = 0; i < 9; ++i) counters.Add(1000);
  constexpr int kWindow = 7;
  for (int push = 0; push < 25; ++push) {
    const int first = 2 * std::max(push / kWindow - 1, 0) * kWindow;
    double sum = 0.0, squares = 0.0;
    for (int i = first; i < 2 * push; ++i) {
      sum += static_cast<double>(taus[i]);
      squares += static_cast<double>(taus[i] * taus[i]);
    }
    const double n = std::max(2 * push - first, 1);
    const auto measured = counters.BeginPush(kWindow);
    EXPECT_DOUBLE_EQ(measured.mean, sum / n);
    EXPECT_NEAR(measured.variance, squares / n - sum * sum / n / n,
                1e-9 * squares);
    counters.Add(taus[2 * push]);
    counters.Add(taus[2 * push + 1]);
  }
  EXPECT_EQ(counters.count(), 59);
}

TEST(StalenessCountersTest, SkippedUpdatesCountInNothingElse) {
  Values values = Zeros();
  StalenessCounters counters(values.data());
  LocalStalenessCounters local;
  counters.AddSkipped();
  local.AddSkipped();
  local.AddSkipped();
  counters.Merge(local.data());
  EXPECT_EQ(counters.skipped(), 3);
  Values rest = values;
  rest[StalenessCounters::kSkipped] = 0;
  EXPECT_EQ(rest, Zeros());
}

TEST(StalenessCountersTest, MomentsEqualThoseOfTheListOfUpdates) {
  const Values taus = RandomTaus(20000, 3);
  Values values = Zeros();
  StalenessCounters counters(values.data());
  for (int64_t tau : taus) counters.Add(tau);
  long double sum = 0.0;
  for (int64_t tau : taus) sum += tau;
  const long double mean = sum / taus.size();
  long double squares = 0.0;
  for (int64_t tau : taus) squares += (tau - mean) * (tau - mean);
  const double variance = static_cast<double>(squares / taus.size());
  EXPECT_EQ(counters.count(), 20000);
  EXPECT_EQ(counters.max(), *std::max_element(taus.begin(), taus.end()));
  EXPECT_NEAR(counters.Mean(), static_cast<double>(mean), 1e-9);
  EXPECT_NEAR(counters.Variance(), variance, 1e-9 * variance);
}

TEST(StalenessCountersTest, TheHistogramEqualsACountOverTheListedBuckets) {
  const Values taus = RandomTaus(20000, 4);
  const Values edges = ListedEdges();
  Values values = Zeros();
  Values expected(StalenessCounters::kBuckets, 0);
  StalenessCounters counters(values.data());
  for (int64_t tau : taus) {
    counters.Add(tau);
    ++expected[std::lower_bound(edges.begin(), edges.end(), tau) -
               edges.begin()];
  }
  for (int b = 0; b < StalenessCounters::kBuckets; ++b) {
    EXPECT_EQ(values[StalenessCounters::kFirstBucket + b], expected[b])
        << "bucket " << b;
  }
}

TEST(StalenessCountersTest, BucketsLieSideBySideWithoutGaps) {
  const Values edges = ListedEdges();
  ASSERT_EQ(edges.size() + 1, size_t{StalenessCounters::kBuckets});
  for (size_t b = 0; b < edges.size(); ++b) {
    const int bucket = static_cast<int>(b);
    EXPECT_EQ(StalenessCounters::UpperEdge(bucket), edges[b]);
    EXPECT_EQ(StalenessCounters::BucketOf(edges[b]), bucket);
    EXPECT_EQ(StalenessCounters::BucketOf(edges[b] + 1), bucket + 1);
  }
}

TEST(StalenessCountersTest, EveryTauUpTo100000FallsIntoItsListedBucket) {
  const Values edges = ListedEdges();
  size_t bucket = 0;
  for (int64_t tau = 0; tau <= 100000; ++tau) {
    if (tau > edges[bucket]) ++bucket;
    ASSERT_EQ(StalenessCounters::BucketOf(tau), static_cast<int>(bucket))
        << "tau " << tau;
  }
}

TEST(StalenessCountersTest, TausBeyondTheLastBucketFallIntoIt) {
  const int last = StalenessCounters::kBuckets - 1;
  for (int64_t tau : {int64_t{1} << 32, (int64_t{1} << 32) + 1,
                      int64_t{1} << 33, int64_t{1} << 62, kMaxInt64}) {
    EXPECT_EQ(StalenessCounters::BucketOf(tau), last) << "tau " << tau;
  }
  EXPECT_EQ(StalenessCounters::UpperEdge(last), kMaxInt64);

  Values values = Zeros();
  StalenessCounters counters(values.data());
  counters.Add(int64_t{1} << 40);
  counters.Add(int64_t{1} << 33);
  EXPECT_EQ(BucketCount(values, kMaxInt64), 2);
  EXPECT_EQ(counters.Quantile(0.5), int64_t{1} << 40) << "the maximum";
}

TEST(StalenessCountersTest, QuantilesOfShortStalenessAreExact) {
  std::mt19937 random(5);
  Values taus(1000);
  for (int64_t& tau : taus) tau = 1 + random() % 31;
  Values values = Zeros();
  StalenessCounters counters(values.data());
  for (int64_t tau : taus) counters.Add(tau);
  std::sort(taus.begin(), taus.end());
  // Multiples of 1/64, as they are exact in binary.
  for (int i = 1; i <= 64; ++i) {
    const int rank = (i * 1000 + 63) / 64;
    EXPECT_EQ(counters.Quantile(i / 64.0), taus[rank - 1]) << i << "/64";
  }
  EXPECT_EQ(counters.Quantile(0.0), taus.front());
}

TEST(StalenessCountersTest, QuantilesOfLongStalenessAreAtMostAnEighthTooHigh) {
  Values taus = RandomTaus(20000, 6);
  Values values = Zeros();
  StalenessCounters counters(values.data());
  for (int64_t tau : taus) counters.Add(tau);
  std::sort(taus.begin(), taus.end());
  for (int i = 1; i <= 256; ++i) {
    const int rank = (i * 20000 + 255) / 256;
    const int64_t exact = taus[rank - 1];
    const int64_t quantile = counters.Quantile(i / 256.0);
    EXPECT_GE(quantile, exact) << i << "/256";
    EXPECT_LE(quantile, exact + exact / 8) << i << "/256";
  }
  EXPECT_EQ(counters.Quantile(1.0), taus.back());
}

TEST(StalenessCountersTest, QuantilesOutsideOfTheirRangeAreThoseOfItsEnds) {
  Values values = Zeros();
  StalenessCounters counters(values.data());
  for (int64_t tau : {3, 4, 5}) counters.Add(tau);
  EXPECT_EQ(counters.Quantile(-1.0), 3);
  EXPECT_EQ(counters.Quantile(2.0), 5);
}

TEST(StalenessCountersTest, OneUpdateIsAllOfItsStatistics) {
  for (int64_t tau : {int64_t{1}, int64_t{31}, int64_t{32}, int64_t{1000001}}) {
    Values values = Zeros();
    StalenessCounters counters(values.data());
    counters.Add(tau);
    EXPECT_EQ(counters.count(), 1);
    EXPECT_EQ(counters.max(), tau);
    EXPECT_EQ(counters.Mean(), static_cast<double>(tau));
    EXPECT_EQ(counters.Variance(), 0.0);
    EXPECT_EQ(counters.Quantile(0.5), tau);
  }
}

TEST(StalenessCountersTest, EqualUpdatesHaveNoNegativeVariance) {
  // Where squares exceed 53 bits, rounding makes E(tau^2) - E(tau)^2 negative
  // for many of these.
  for (int64_t tau = 100000001; tau < 1000000000; tau += 1234568) {
    Values values = Zeros();
    StalenessCounters counters(values.data());
    for (int i = 0; i < 7; ++i) counters.Add(tau);
    EXPECT_GE(counters.Variance(), 0.0) << "tau " << tau;
    EXPECT_LE(counters.Variance(), 1e-15 * tau * tau) << "tau " << tau;
  }
}

TEST(StalenessCountersTest, MergedPartsEqualTheWhole) {
  const Values taus = RandomTaus(10000, 7);
  Values whole = Zeros();
  Values merged = Zeros();
  StalenessCounters whole_counters(whole.data());
  StalenessCounters merged_counters(merged.data());
  for (size_t begin = 0; begin < taus.size(); begin += 999) {
    LocalStalenessCounters part;
    for (size_t i = begin; i < std::min(begin + 999, taus.size()); ++i) {
      part.Add(taus[i]);
      whole_counters.Add(taus[i]);
    }
    merged_counters.Merge(part.data());
  }
  EXPECT_EQ(merged, whole);
}

TEST(StalenessCountersTest, MergingNothingChangesNothing) {
  Values values = Zeros();
  StalenessCounters counters(values.data());
  counters.Add(17);
  const Values before = values;
  counters.Merge(LocalStalenessCounters().data());
  EXPECT_EQ(values, before);
}

TEST(StalenessCountersTest, TheDifferenceOfTwoReadingsCountsTheSpanBetween) {
  const Values taus = RandomTaus(2000, 8);
  Values values = Zeros();
  StalenessCounters counters(values.data());
  for (int i = 0; i < 1000; ++i) counters.Add(taus[i]);
  Values span = values;
  for (int i = 1000; i < 2000; ++i) counters.Add(taus[i]);
  for (int i = 0; i < StalenessCounters::kSize; ++i) {
    span[i] = values[i] - span[i];
  }
  Values expected = Zeros();
  StalenessCounters expected_counters(expected.data());
  for (int i = 1000; i < 2000; ++i) expected_counters.Add(taus[i]);
  // The maximum is the one value that has no meaningful difference.
  span[StalenessCounters::kMax] = expected[StalenessCounters::kMax];
  EXPECT_EQ(span, expected);
}

TEST(StalenessCountersTest, CountersSaturateInsteadOfWrappingAround) {
  Values values(StalenessCounters::kSize, kMaxInt64 - 1);
  values[StalenessCounters::kMax] = 1;
  StalenessCounters counters(values.data());
  for (int i = 0; i < 3; ++i) counters.Add(5);
  EXPECT_EQ(counters.count(), kMaxInt64);
  EXPECT_EQ(values[StalenessCounters::kSum], kMaxInt64);
  EXPECT_EQ(values[StalenessCounters::kSumOfSquares], kMaxInt64);
  EXPECT_EQ(BucketCount(values, 5), kMaxInt64);
  EXPECT_EQ(BucketCount(values, 6), kMaxInt64 - 1) << "another bucket";
  EXPECT_EQ(counters.max(), 5);
}

TEST(StalenessCountersTest, TheSumOfSquaresSaturatesWhereASquareIsTooLarge) {
  // The largest tau whose square fits is the root of 2^63 - 1, 3037000499.
  Values values = Zeros();
  StalenessCounters counters(values.data());
  counters.Add(3037000499);
  EXPECT_EQ(values[StalenessCounters::kSumOfSquares], 9223372030926249001);
  for (int64_t tau : {int64_t{3037000500}, int64_t{1} << 40, kMaxInt64}) {
    Values large = Zeros();
    StalenessCounters(large.data()).Add(tau);
    EXPECT_EQ(large[StalenessCounters::kSumOfSquares], kMaxInt64);
    EXPECT_EQ(large[StalenessCounters::kSum], tau);
  }
}

TEST(StalenessCountersTest, MergingSaturatesToo) {
  Values values = Zeros();
  std::fill(values.begin(), values.end(), kMaxInt64 - 2);
  Values other = Zeros();
  std::fill(other.begin(), other.end(), 7);
  StalenessCounters(values.data()).Merge(other.data());
  for (int i = 0; i < StalenessCounters::kSize; ++i) {
    EXPECT_EQ(values[i],
              i == StalenessCounters::kMax ? kMaxInt64 - 2 : kMaxInt64);
  }
}

TEST(StalenessCountersTest, QuantilesOfSaturatedCountersDoNotOverflow) {
  // The buckets add up to more than fits, as happens after saturation.
  Values half = Zeros();
  half[StalenessCounters::kCount] = kMaxInt64 / 2 + 5;
  Values values = Zeros();
  StalenessCounters counters(values.data());
  for (int64_t tau : {1, 2, 3}) {
    half[StalenessCounters::kMax] = tau;
    std::fill(half.begin() + StalenessCounters::kFirstBucket, half.end(), 0);
    half[StalenessCounters::kFirstBucket + tau] = kMaxInt64 / 2 + 5;
    counters.Merge(half.data());
  }
  EXPECT_EQ(counters.count(), kMaxInt64);
  EXPECT_EQ(counters.Quantile(0.25), 1);
  EXPECT_EQ(counters.Quantile(0.75), 2);
  EXPECT_EQ(counters.Quantile(1.0), 2);
}

TEST(StalenessCountersTest, ManyThreadsMergeUnderALock) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 50;
  Values shared = Zeros();
  Mutex mu;  // guards shared
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&shared, &mu, t] {
      for (int round = 0; round < kRounds; ++round) {
        LocalStalenessCounters counted;
        for (int i = 0; i < 20; ++i) counted.Add(1 + t * 100 + i);
        MutexLock lock(&mu);
        StalenessCounters(shared.data()).Merge(counted.data());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const StalenessCounters counters(shared.data());
  EXPECT_EQ(counters.count(), kThreads * kRounds * 20);
  EXPECT_EQ(counters.max(), 1 + (kThreads - 1) * 100 + 19);
  // The mean over t of 1 + 100 t is 351, that over i is 9.5.
  EXPECT_EQ(counters.Mean(), 351 + 9.5);
}

}  // namespace
}  // namespace recsync
