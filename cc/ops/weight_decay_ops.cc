// Ops of weight decay.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncDecayWeights")
    .Input("variables: N * resource")
    .Input("log_decays: M * resource")
    .Input("learning_rate: float")
    .Attr("N: int >= 0")
    .Attr("M: int >= 0")
    .Attr("weight_decay: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle scalar;
      return c->WithRank(c->input(c->num_inputs() - 1), 0, &scalar);
    })
    .Doc(R"doc(
Decays weights once, as an update does before its gradient: multiplies them by
1 - weight_decay * learning_rate.

Each variable is multiplied under its own lock. Of a table with log-decays
nothing but its log-decay changes: rows are multiplied when they are needed.

variables: float or bfloat16 variables of any shape.
log_decays: double variables [rows + 2] beside tables: the log-decay that each
  row's value has, then that of the table, then what that was when all rows were
  brought up to date.
learning_rate: A scalar. With 0 nothing changes.
weight_decay: Times the learning rate it must be in [0, 1).
)doc");

REGISTER_OP("RecsyncSettleDecay")
    .Input("variables: N * resource")
    .Input("log_decays: N * resource")
    .Attr("N: int >= 1")
    .Attr("rounding: list(int) = []")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Multiplies all rows of tables by what is pending of their weights' decay, so
that anybody may read or assign the tables. Updates may go on meanwhile. If
nothing has decayed since the last time, it does nothing.

variables: Tables, float or bfloat16 [rows, ...].
log_decays: double variables [rows + 2], one for each table.
rounding: How rows of bfloat16 tables are rounded, as an update's: up or down,
  here by random numbers that depend on the table's log-decay.
)doc");

}  // namespace recsync
