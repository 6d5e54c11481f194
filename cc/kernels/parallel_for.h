// Loops that kernels spread over the device's threads.

#ifndef TF_RECSYNC_CC_KERNELS_PARALLEL_FOR_H_
#define TF_RECSYNC_CC_KERNELS_PARALLEL_FOR_H_

#include <algorithm>
#include <cstdint>
#include <functional>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace recsync {

// Calls f(begin, end) on pieces of [0, count) and returns when all have ended.
// `cost` is what one unit takes, in cycles.
//
// As TensorFlow's Shard, but a piece is worth waking a thread for: a step's
// work on a server is some hundred microseconds, which Shard would cut into
// four pieces for each thread.
inline void ParallelFor(tensorflow::OpKernelContext* ctx, int64_t count,
                        int64_t cost,
                        const std::function<void(int64_t, int64_t)>& f) {
  constexpr int64_t kCyclesPerPiece = 100000;
  const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
  const int64_t threads = std::min<int64_t>(
      workers->num_threads, tensorflow::GetPerThreadMaxParallelism());
  // Not multiplied, as that may overflow.
  const int64_t least =
      std::max<int64_t>(kCyclesPerPiece / std::max<int64_t>(cost, 1), 1);
  const int64_t pieces = count / least;
  if (pieces <= 1 || threads <= 1) {
    if (count > 0) f(0, count);
  } else if (pieces <= 4 * threads) {
    // Two for each thread, as one may be late.
    const int64_t fair = (count + 2 * threads - 1) / (2 * threads);
    workers->workers->ParallelFor(
        count,
        tsl::thread::ThreadPool::SchedulingParams::Fixed(std::max(least, fair)),
        f);
  } else {
    tensorflow::Shard(workers->num_threads, workers->workers, count, cost, f);
  }
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_PARALLEL_FOR_H_
