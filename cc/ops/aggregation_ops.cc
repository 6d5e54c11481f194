// Ops of the token list.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

absl::Status CheckScalars(InferenceContext* c) {
  for (int i = 0; i < c->num_inputs(); ++i) {
    ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  }
  return absl::OkStatus();
}

// All inputs and outputs are scalars.
absl::Status Scalars(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckScalars(c));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("RecsyncTokenList")
    .Output("list: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string")
    .Attr("repeats: int >= 1")
    .Attr("gate: {'none', 'step', 'clock'}")
    .Attr("clock_bound: int >= 0 = 0")
    .Attr("servers: int >= 1 = 1")
    .Attr("workers: int >= 1")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
A list of tokens, which workers take, one for every batch that they have got.

Token i (i = 0, 1, ...) has value floor(i / repeats), the global step that its
gradient is meant for. Tokens are handed out in ascending order, each once.

Makes the list if the device has none of this name. It lives until
DestroyResourceOp, which answers all that wait with Cancelled.

list: A scalar, the handle.
container: Where the device keeps it; empty for the default container.
shared_name: The list's name, not empty.
repeats: How many tokens have the same value.
gate: When a worker may take a token. "none": at once. "step": when the next
  token's value is not above the smallest step that all servers have reported;
  tokens whose value is below that step are skipped. "clock": when the worker's
  clock, the number of tokens that it has taken, is at most clock_bound ahead of
  the slowest live worker's.
clock_bound: Only for the gate "clock", else 0.
servers: How many servers report their steps, at most 2^20.
workers: How many workers take tokens, at most 2^20. All are live at the start,
  with clock 0.
)doc");

REGISTER_OP("RecsyncTakeToken")
    .Input("list: resource")
    .Input("worker: int64")
    .Output("index: int64")
    .Output("value: int64")
    .Output("ticket: int64")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
Takes the next token, when the list's gate opens for this worker.

Holds no thread while it waits. Fails with Cancelled when the step is cancelled,
the worker is lost or leaves, or the list is destroyed meanwhile; then no token
was taken.

A worker that was lost or has left takes part again with this op, with the clock
of the slowest live worker.

list: A scalar, the list.
worker: A scalar, from 0 to workers - 1.
index: A scalar, the token's place in the list.
value: A scalar, floor(index / repeats).
ticket: A scalar: whoever gets the same token later gets another one.
)doc");

REGISTER_OP("RecsyncLoseWorker")
    .Input("list: resource")
    .Input("worker: int64")
    .Output("lost: int64")
    .Output("withheld: int64")
    .Output("tickets: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c));
      c->set_output(1, c->UnknownShapeOfRank(1));
      c->set_output(2, c->UnknownShapeOfRank(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes a worker that is gone out of a list.

Its waiting takes are cancelled, and nobody waits for its clock any more. With
the gate "step", all tokens that it took and whose value is not below the
smallest step are withheld until RecsyncReissueTokens names them. With the other
gates the last token that it took is lost.

list: A scalar, the list.
worker: A scalar, from 0 to workers - 1. Of one that is gone already the outputs
  are the same again, as the first answer may not have arrived: until its tokens
  are reissued or useless or, without the gate "step", it takes another or
  leaves.
lost: A scalar, how many tokens are gone for good.
withheld: The places in the list of those that may be handed out again, rising.
tickets: Those of either, in the order of their places.
)doc");

REGISTER_OP("RecsyncReissueTokens")
    .Input("list: resource")
    .Input("indices: int64")
    .Output("reissued: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Has tokens of lost workers be the next to be handed out.

No server may have them: it would leave the second push out.

list: A scalar, the list.
indices: Their places in the list. Those that are not withheld, or whose value is
  below the smallest step, have no effect.
reissued: A scalar, how many they are.
)doc");

REGISTER_OP("RecsyncLeaveTokens")
    .Input("list: resource")
    .Input("worker: int64")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
Takes a worker that has come to the end of its data out of a list.

All its pushes count as arrived, and nobody waits for its clock any more.

list: A scalar, the list.
worker: A scalar, from 0 to workers - 1.
)doc");

REGISTER_OP("RecsyncReportStep")
    .Input("list: resource")
    .Input("server: int64")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
Tells a list how many applications a server has finished.

list: A scalar, the list.
server: A scalar, from 0 to servers - 1.
step: A scalar, 0 or more. One that is not above an earlier report is ignored.
)doc");

REGISTER_OP("RecsyncSeekTokens")
    .Input("list: resource")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn(Scalars)
    .Doc(R"doc(
Goes on as a new list in which all servers have reached a step.

The next token is the first one of value `step`; all workers are live, with
clock 0, and hold nothing. Only the counts stay. Fails with FailedPrecondition
while a worker waits for a token.

list: A scalar, the list.
step: A scalar, 0 or more.
)doc");

REGISTER_OP("RecsyncTokenListState")
    .Input("list: resource")
    .Output("position: int64")
    .Output("steps: int64")
    .Output("clocks: int64")
    .Output("live: bool")
    .Output("held: int64")
    .Output("reissues: int64")
    .Output("waiting_workers: int64")
    .Output("waiting_seconds: double")
    .Output("counts: int64")
    .Output("withheld: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckScalars(c));
      const auto unknown = InferenceContext::kUnknownDim;
      c->set_output(0, c->Scalar());
      for (int i = 1; i < 8; ++i) c->set_output(i, c->Vector(unknown));
      c->set_output(4, c->Matrix(unknown, 2));
      c->set_output(8, c->Vector(4));
      c->set_output(9, c->Vector(unknown));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Tells where a list stands, and who waits.

list: A scalar, the list.
position: A scalar, the first index that was never handed out.
steps: [servers], the step that each server has reported.
clocks: [workers].
live: [workers], false for a worker that was lost or has left.
held: [n, 2], a worker and the index of a token that it holds, in ascending
  order: with the gate "step", each that it took and whose value is not below
  the smallest step; else the last one, unless it asks for the next.
reissues: [n], indices that will be handed out next, ascending.
waiting_workers: [n], the workers that wait for a token, in the order they came.
waiting_seconds: [n], for how long they have waited.
counts: [4], since the list was made: tokens taken, the reissued ones each time;
  reissued; lost; and skipped as useless.
withheld: [n], indices of lost workers' tokens that nobody gets before
  RecsyncReissueTokens names them, ascending.
)doc");

}  // namespace recsync
