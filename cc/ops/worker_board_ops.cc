// Ops of a board, on which a server that counts steps has what it knows of
// workers.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// All inputs are scalars.
absl::Status Scalars(InferenceContext* c) {
  ShapeHandle unused;
  for (int i = 0; i < c->num_inputs(); ++i) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  }
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  return absl::OkStatus();
}

// The first input is a scalar, the others are vectors.
absl::Status Vectors(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
  for (int i = 1; i < c->num_inputs(); ++i) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  }
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("RecsyncWorkerBoard")
    .Output("board: resource")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
Makes a board of workers, on the server that counts their steps.

board: A handle of it; the board goes with the last one.
)doc");

REGISTER_OP("RecsyncBoardRow")
    .Input("board: resource")
    .Input("key: int64")
    .Output("row: resource")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
Makes the row of a worker on a board.

board: Of RecsyncWorkerBoard.
key: A scalar, by which it is read and told; one of the same key is no more.
row: A handle of it; the row goes with the last one.
)doc");

REGISTER_OP("RecsyncCountStep")
    .Input("row: resource")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
Counts that a step of a worker was applied.

row: Of RecsyncBoardRow.
)doc");

REGISTER_OP("RecsyncReadRow")
    .Input("row: resource")
    .Output("told: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      c->set_output(0, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What a worker is told.

row: Of RecsyncBoardRow.
told: [2]: how often it was told to end the call that it is in, and how many of
  the numbers of its batches are known, and may be forgotten.
)doc");

REGISTER_OP("RecsyncReport")
    .Input("row: resource")
    .Input("message: uint8")
    .SetIsStateful()
    .SetShapeFn(Vectors)
    .Doc(R"doc(
Puts on the board what a worker reports, in place of what it had reported.

row: Of RecsyncBoardRow.
message: [bytes]; nothing happens if it is empty.
)doc");

REGISTER_OP("RecsyncReadBoard")
    .Input("board: resource")
    .Output("message: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads how far all workers on a board are, and takes what they have reported.

board: Of RecsyncWorkerBoard.
message: An int64, the number of rows; of each, three int64: its key, the steps
  that were applied, and the bytes of its report, -1 if there is none since the
  last reading; then the reports, each followed by zeros up to a multiple of
  eight bytes.
)doc");

REGISTER_OP("RecsyncTellWorkers")
    .Input("board: resource")
    .Input("keys: int64")
    .Input("ends: int64")
    .Input("known: int64")
    .SetIsStateful()
    .SetShapeFn(Vectors)
    .Doc(R"doc(
Tells workers, see RecsyncReadRow.

board: Of RecsyncWorkerBoard.
keys: [n], of their rows; nothing happens where there is none.
ends: [n], what is added to how often each was told to end its call.
known: [n], how many numbers of each are known at least.
)doc");

}  // namespace recsync
