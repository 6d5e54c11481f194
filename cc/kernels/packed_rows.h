// The inputs that name rows of several tables, packed: `indices` and `counts`,
// and how the rows are pooled: `bags`, `scales` and `bag_counts`.

#ifndef TF_RECSYNC_CC_KERNELS_PACKED_ROWS_H_
#define TF_RECSYNC_CC_KERNELS_PACKED_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/bags.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

struct PackedRows {
  const tensorflow::Tensor* indices = nullptr;
  // Table i has the positions [offsets[i], offsets[i + 1]) of `indices` and the
  // vectors [bag_offsets[i], bag_offsets[i + 1]) of what is packed.
  std::vector<int64_t> offsets;
  std::vector<int64_t> bag_offsets;
  Bags bags;  // of all positions

  int64_t tables() const { return offsets.size() - 1; }
  int64_t size() const { return offsets.back(); }
  int64_t size(int64_t table) const {
    return offsets[table + 1] - offsets[table];
  }
  int64_t bag_count(int64_t table) const {
    return bag_offsets[table + 1] - bag_offsets[table];
  }
  // The bags of one table's positions.
  Bags BagsOf(int64_t table) const;
};

// Reads and checks them for `tables` tables. The row ids themselves are not
// checked: that takes the tables' locks.
absl::Status ReadPackedRows(tensorflow::OpKernelContext* ctx, int64_t tables,
                            PackedRows* rows);

// Where each table's vectors start among the packed floats, with the total at
// the end; `widths` holds the floats of a row of each table. InvalidArgument if
// there are more than kMostElements floats: bag_counts alone may say so many.
absl::Status PackedStarts(const PackedRows& rows,
                          const std::vector<int64_t>& widths,
                          std::vector<int64_t>* starts);

// The error of a row id that is out of range.
absl::Status NotARow(int64_t position, int64_t id, int64_t rows);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_PACKED_ROWS_H_
