// Ops of the log of the batches that a worker has trained on.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncBatchLog")
    .Output("log: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes a log of the batches that a worker has trained on.

log: A handle of it; the log goes with the last one.
)doc");

REGISTER_OP("RecsyncNoteBatch")
    .Input("log: resource")
    .Input("number: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      return c->WithRank(c->input(1), 0, &unused);
    })
    .Doc(R"doc(
Notes that a batch was trained on.

log: Of RecsyncBatchLog.
number: A scalar, that of the batch.
)doc");

REGISTER_OP("RecsyncNotedBatches")
    .Input("log: resource")
    .Input("known: int64")
    .Output("numbers: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The batches that were noted, but for the first of them, which are forgotten.

log: Of RecsyncBatchLog.
known: A scalar: how many of the first to leave out; no fewer than before, and no
  more than were noted.
numbers: [n], in the order in which they were noted.
)doc");

}  // namespace recsync
