// Ops of the log of what a worker has done: batches, and events.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncWorkerLog")
    .Output("log: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes a log of the batches that a worker has trained on, and of what it did when.

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

log: Of RecsyncWorkerLog.
number: A scalar, that of the batch.
)doc");

REGISTER_OP("RecsyncNotedBatches")
    .Input("log: resource")
    .Input("known: int64")
    .Output("numbers: int64")
    .Output("first: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The batches that were noted, but for the first of them, which are forgotten.

log: Of RecsyncWorkerLog.
known: A scalar: how many of the first to leave out, and to forget; no more than
  were noted.
numbers: [n], in the order in which they were noted, from the first that is not
  forgotten.
first: A scalar: how many were noted before them.
)doc");

REGISTER_OP("RecsyncReportIsDue")
    .Input("log: resource")
    .Output("is_due: bool")
    .Attr("seconds: float")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Whether a worker is to report, as it has not for a while or never.

log: Of RecsyncWorkerLog, which remembers when it last was.
seconds: From one report to the next.
)doc");

REGISTER_OP("RecsyncNoteEvents")
    .Input("log: resource")
    .Input("iteration: int64")
    .Input("times: double")
    .Attr("activities: list(int) >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
      return c->WithRank(c->input(2), 2, &unused);
    })
    .Doc(R"doc(
Notes what a step of a worker did when, for a timeline.

Of more than 65,536 events that nobody takes, the oldest are lost.

log: Of RecsyncWorkerLog.
iteration: A scalar, the number of the step.
times: [n, 2], when each activity began and ended, in seconds since the Unix epoch.
activities: What it did, n numbers from 0 to 10: compute, waiting for 1 updates
  or 2 tokens, 3 send, 4 receive, 5 jump, 6 waiting for a batch, 7 pull, 8 push,
  9 push and pull, 10 synchronize.
)doc");

REGISTER_OP("RecsyncTakeEvents")
    .Input("log: resource")
    .Output("events: int64")
    .Output("lost: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, 5));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes what was noted of a worker's steps since the last call.

log: Of RecsyncWorkerLog.
events: [events, 5]: the activity, its begin and end in microseconds since the
  Unix epoch, the number of the step, and -1.
lost: A scalar: how many are missing among them, as there were too many.
)doc");

}  // namespace recsync
