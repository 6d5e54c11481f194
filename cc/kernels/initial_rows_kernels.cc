// The kernel that makes the first values of a physical table.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/bfloat16.h"
#include "cc/engine/huge_pages.h"
#include "cc/engine/initial_rows.h"
#include "cc/engine/limits.h"
#include "cc/engine/memory.h"
#include "cc/kernels/checked_shape.h"
#include "cc/kernels/distribution.h"
#include "cc/kernels/inputs.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/util/work_sharder.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// What lies in an output's buffer: BFloat16 for TensorFlow's bfloat16.
template <typename T>
struct Stored {
  using Type = T;
};
template <>
struct Stored<Eigen::bfloat16> {
  using Type = BFloat16;
};

template <typename T>
class InitialRowsOp : public OpKernel {
 public:
  explicit InitialRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadPieces(ctx));
    int64_t rows = 0;
    for (const InitialRows& piece : pieces_) {
      // Bounded before they are added up, which may overflow.
      OP_REQUIRES(ctx, piece.rows <= kMostTableElements,
                  absl::InvalidArgumentError(
                      absl::StrCat("rows must be at most ", kMostTableElements,
                                   ", not ", piece.rows)));
      rows = std::min(rows + piece.rows, kMostTableElements + 1);
    }
    OP_REQUIRES_OK(ctx, MakeShape({{"rows", rows}, {"dimension", dimension_}},
                                  &shape_, kMostTableElements));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckMemory());
    Tensor* values;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape_, &values));
    auto* to = reinterpret_cast<Element*>(values->flat<T>().data());
    // Before the pages are there, which then are huge ones from the first.
    PreferHugePages(to, shape_.num_elements() * sizeof(Element));
    for (const InitialRows& piece : pieces_) {
      OP_REQUIRES_OK(ctx, Fill(ctx, piece, to));
      to += piece.rows * dimension_;
    }
  }

 private:
  using Element = typename Stored<T>::Type;

  absl::Status ReadPieces(OpKernelConstruction* ctx) {
    std::vector<int64_t> rows, indices, counts, seeds;
    std::vector<std::string> distributions;
    std::vector<float> parameters;
    TF_RETURN_IF_ERROR(ctx->GetAttr("dimension", &dimension_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("rows", &rows));
    const size_t n = rows.size();
    TF_RETURN_IF_ERROR(ReadList(ctx, "indices", n, &indices));
    TF_RETURN_IF_ERROR(ReadList(ctx, "counts", n, &counts));
    TF_RETURN_IF_ERROR(ReadList(ctx, "distributions", n, &distributions));
    TF_RETURN_IF_ERROR(ReadList(ctx, "parameters", 2 * n, &parameters));
    TF_RETURN_IF_ERROR(ReadList(ctx, "seeds", n, &seeds));
    for (size_t i = 0; i < n; ++i) {
      InitialRows piece;
      piece.rows = rows[i];
      piece.index = indices[i];
      piece.count = counts[i];
      TF_RETURN_IF_ERROR(
          ParseDistribution(distributions[i], &piece.distribution));
      piece.first = parameters[2 * i];
      piece.second = parameters[2 * i + 1];
      piece.seed = static_cast<uint64_t>(seeds[i]);
      const Result checked = CheckInitialRows(piece);
      if (!checked.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat("piece ", i, ": ", checked.error()));
      }
      pieces_.push_back(piece);
    }
    return absl::OkStatus();
  }

  // An allocation that the machine can't give succeeds, as a rule, and ends the
  // process once it is written to.
  absl::Status CheckMemory() const {
    const int64_t bytes = shape_.num_elements() * sizeof(Element);
    const auto available = AvailableMemory();
    if (!available.has_value() || bytes <= *available) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        "rows x dimension = ", shape_.dim_size(0), " x ", shape_.dim_size(1),
        " take ", bytes, " bytes; the machine, or the limit of its container, ",
        "has ", *available, " left"));
  }

  absl::Status Fill(OpKernelContext* ctx, const InitialRows& piece,
                    Element* to) const {
    // Between two looks at whether somebody still wants the values.
    constexpr int64_t kElements = int64_t{1} << 18;
    const int64_t block = std::max<int64_t>(kElements / (dimension_ + 1), 1);
    tensorflow::CancellationManager* cancellation = ctx->cancellation_manager();
    std::atomic<bool> cancelled = false;
    const auto fill = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row += block) {
        if (cancellation != nullptr && cancellation->IsCancelled()) {
          cancelled = true;
          return;
        }
        FillRows(piece, dimension_, row, std::min(row + block, end), to);
      }
    };
    const auto* threads = ctx->device()->tensorflow_cpu_worker_threads();
    constexpr int64_t kCycles = 8;  // Of an element.
    tensorflow::Shard(threads->num_threads, threads->workers, piece.rows,
                      kCycles * (dimension_ + 1), fill);
    if (!cancelled) return absl::OkStatus();
    return absl::CancelledError("the step was cancelled");
  }

  int64_t dimension_;
  std::vector<InitialRows> pieces_;  // One after the other.
  TensorShape shape_;
};

#define REGISTER_INITIAL_ROWS(T)                              \
  REGISTER_KERNEL_BUILDER(Name("RecsyncInitialRows")          \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("dtype"),    \
                          InitialRowsOp<T>);
REGISTER_INITIAL_ROWS(float)
REGISTER_INITIAL_ROWS(Eigen::bfloat16)
#undef REGISTER_INITIAL_ROWS

}  // namespace
}  // namespace recsync
