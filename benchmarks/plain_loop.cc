// The bound of benchmarks/optimizers.py: row-wise Adagrad with a staleness
// weight and SWAP as a plain loop over rows, in `threads` threads that take
// equal parts of the rows. No locks, no checks, no search for rows that are
// named twice, no counters: only the traffic that the update can't do without.

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

}  // namespace

extern "C" void PlainLoop(float* values, float* accumulators, int64_t* versions,
                          int64_t* last_periods, int64_t width,
                          const int64_t* ids, const int64_t* pulled,
                          const float* gradient, int64_t n, float lr,
                          float epsilon, int64_t step, int64_t period,
                          float decay, int threads) {
  const Table table = {values, accumulators, versions, last_periods, width};
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) {
    others.emplace_back([=] {
      Update(table, ids, pulled, gradient, n * t / threads,
             n * (t + 1) / threads, lr, epsilon, step, period, decay);
    });
  }
  Update(table, ids, pulled, gradient, 0, n / threads, lr, epsilon, step,
         period, decay);
  for (std::thread& other : others) other.join();
}
