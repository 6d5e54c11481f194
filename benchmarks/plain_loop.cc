// The bounds of benchmarks, as plain loops in `threads` threads that take equal
// parts. No locks, no checks, no counters: only the traffic that the work can't
// do without.
//
// PlainLoop is that of benchmarks/optimizers.py: row-wise Adagrad with a
// staleness weight and SWAP, without a search for rows that are named twice.
// PlainInterpolation is that of benchmarks/interpolation.py.

#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

struct Table {
  float* values;
  float* accumulators;
  int64_t* versions;
  int64_t* last_periods;
  int64_t width;
};

void Update(const Table& table, const int64_t* ids, const int64_t* pulled,
            const float* gradient, int64_t begin, int64_t end, float lr,
            float epsilon, int64_t step, int64_t period, float decay) {
  const int64_t width = table.width;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = ids[i];
    float* __restrict w = table.values + row * width;
    float* __restrict v = table.accumulators + row * width;
    const float* __restrict g = gradient + i * width;
    const float tau = static_cast<float>(table.versions[row]++ - pulled[i] + 1);
    const float rho = tau <= 4.0f ? 1.0f : (4.0f / tau) * (4.0f / tau);
    float factor = 1.0f;
    for (int64_t now = step / period; table.last_periods[row] < now;
         ++table.last_periods[row]) {
      factor *= decay;
    }
    for (int64_t k = 0; k < width; ++k) {
      const float weighted = rho * g[k];
      v[k] = factor * v[k] + weighted * weighted;
      w[k] -= lr * weighted / std::sqrt(v[k] + epsilon);
    }
  }
}

// Calls `part` of [0, n) in equal parts, each in a thread.
template <typename Part>
void InThreads(int64_t n, int threads, Part part) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) {
    others.emplace_back(part, n * t / threads, n * (t + 1) / threads);
  }
  part(0, n / threads);
  for (std::thread& other : others) other.join();
}

}  // namespace

extern "C" void PlainLoop(float* values, float* accumulators, int64_t* versions,
                          int64_t* last_periods, int64_t width,
                          const int64_t* ids, const int64_t* pulled,
                          const float* gradient, int64_t n, float lr,
                          float epsilon, int64_t step, int64_t period,
                          float decay, int threads) {
  const Table table = {values, accumulators, versions, last_periods, width};
  InThreads(n, threads, [=](int64_t begin, int64_t end) {
    Update(table, ids, pulled, gradient, begin, end, lr, epsilon, step, period,
           decay);
  });
}

// own <- (1 - alpha) own + alpha target.
extern "C" void PlainInterpolation(float* own, const float* target, int64_t n,
                                   float alpha, int threads) {
  InThreads(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      own[i] = (1.0f - alpha) * own[i] + alpha * target[i];
    }
  });
}
