// The op that makes the first values of a physical table.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/engine/limits.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("RecsyncInitialRows")
    .Output("values: dtype")
    .Attr("dtype: {float, bfloat16} = DT_FLOAT")
    .Attr("dimension: int >= 0")
    .Attr("rows: list(int)")
    .Attr("indices: list(int)")
    .Attr("counts: list(int)")
    .Attr("distributions: list(string)")
    .Attr("parameters: list(float)")
    .Attr("seeds: list(int)")
    // Else a graph would be made with the values in it.
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> rows;
      int64_t dimension, total = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("rows", &rows));
      TF_RETURN_IF_ERROR(c->GetAttr("dimension", &dimension));
      for (const int64_t own : rows) {
        // The kernel says what is wrong.
        if (own < 0 || own > kMostTableElements) {
          c->set_output(0, c->UnknownShapeOfRank(2));
          return absl::OkStatus();
        }
        total = std::min(total + own, kMostTableElements + 1);
      }
      c->set_output(0, c->Matrix(total, dimension));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes the first values of P pieces of tables, one after the other, in place.

A value depends on the seed, the row's number in its table and the column alone,
and so is the same however a table is divided into pieces.

values: [sum of rows, dimension]; ResourceExhausted where the machine lacks the
  memory.
dimension: The columns of all tables.
rows: [P], the rows of each piece.
indices: [P], the number in its table of each piece's first row, below its count.
counts: [P], how far apart in its table the rows of each piece are, at least 1.
distributions: [P], 'constant', 'uniform', 'normal' or 'truncated_normal', which
  is within two standard deviations of its mean, before it is rounded to dtype.
parameters: [2 P], two finite numbers for each piece: a constant and what is not
  used, a uniform distribution's bounds, the second of which does not occur but
  by rounding to bfloat16, or a mean and a standard deviation of at least 0.
seeds: [P].
)doc");

}  // namespace recsync
