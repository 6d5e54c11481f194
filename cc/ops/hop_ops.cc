// Ops of decentralized training (Hop).

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// The first `scalars` inputs are scalars.
absl::Status CheckScalars(InferenceContext* c, int scalars) {
  for (int i = 0; i < scalars; ++i) {
    ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  }
  return absl::OkStatus();
}

// So many inputs are scalars, the next one, if there is one, is an update; all
// outputs are scalars.
template <int scalars>
absl::Status Scalars(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckScalars(c, scalars));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("RecsyncHopWorker")
    .Output("worker: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string")
    .Attr("in_neighbors: list(int) >= 0")
    .Attr("weights: list(float) >= 0")
    .Attr("out_neighbors: list(int) >= 0")
    .Attr("max_iteration_gap: int >= 0 = 0")
    .Attr("slots: int >= 1")
    .Attr("capacity: int >= 1")
    .Attr("backup_workers: int >= 0 = 0")
    .Attr("staleness_bound: int >= -1 = -1")
    .Attr("max_jump: int >= 1 = 1")
    .Attr("jump_trigger: int >= 0 = 0")
    .Attr("notify_ack: bool = false")
    .Attr("gap_bounds: list(int) >= 0 = []")
    .SetIsStateful()
    .SetShapeFn(Scalars<0>)
    .Doc(R"doc(
What a worker of decentralized training keeps beside its parameters: its update
queue, the tokens of its out-neighbors, and what it has to tell its neighbors.

Makes it if the device has none of this name. It lives until DestroyResourceOp,
which answers all that wait with Cancelled.

worker: A scalar, the handle.
container: Where the device keeps it; empty for the default container.
shared_name: The worker's name, not empty. If there is one of this name, all
  attributes must be those that it was made with.
in_neighbors: The numbers of the workers that send to this one, without itself.
weights: Of their updates, where all of them are waited for and must be of the
  same iteration; the worker's own parameters have the rest of 1.
out_neighbors: The numbers of the workers that it sends to, without itself.
max_iteration_gap: How many iterations it may be ahead of an out-neighbor, by
  token queues; 0 without them.
slots: Into how many slots the update queue is divided by iteration.
capacity: How many updates may wait in it.
backup_workers: How many of the in-neighbors' updates it does not wait for.
staleness_bound: Of how many iterations ago updates may be; -1 if they must be
  of the worker's own iteration.
max_jump: How many iterations it may go forward at a time when it is behind; 1
  if it never skips any.
jump_trigger: It skips only if it is further behind than this.
notify_ack: Whether it waits, before it sends, until all out-neighbors have
  used what it sent before.
gap_bounds: How far each in-neighbor may be ahead by the protocol, -1 for no
  bound. With them it is checked: when a neighbor announces its progress or
  delivers, that bound, and that no more of its updates wait than it can have made;
  when the worker enters an iteration, that it has the tokens that belong to the
  iterations of its out-neighbors. What does not hold is a
  FailedPrecondition error. Empty: nothing is checked.
)doc");

REGISTER_OP("RecsyncHopBegin")
    .Input("worker: resource")
    .Input("first: int64")
    .SetIsStateful()
    .SetShapeFn(Scalars<2>)
    .Doc(R"doc(
Starts a worker anew: empty queues, the tokens of the start, all neighbors there.

Only while no other op but RecsyncHopCollect uses it.

worker: A scalar, the worker.
first: A scalar of at least 0, the iteration that all workers begin with.
)doc");

REGISTER_OP("RecsyncHopNext")
    .Input("worker: resource")
    .Input("variables: N * resource")
    .Output("iteration: int64")
    .Attr("N: int >= 1")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn(Scalars<1>)
    .Doc(R"doc(
Waits until the worker may enter its next iteration.

If it is behind all its out-neighbors and may skip, this is a later one; it then
first averages the updates of the iteration before that into its variables. Takes
a token of every out-neighbor for each iteration. Holds no thread while it waits;
fails with Cancelled when the step is cancelled or the worker is destroyed.

worker: A scalar, the worker.
variables: The worker's parameters, in the order of a packed update.
iteration: A scalar, the iteration to enter.
T: The type of the variables.
)doc");

REGISTER_OP("RecsyncHopEnter")
    .Input("worker: resource")
    .Input("iteration: int64")
    .Input("update: T")
    .Attr("T: {float, double}")
    .Attr("send: bool")
    .SetIsStateful()
    .SetShapeFn(Scalars<2>)
    .Doc(R"doc(
The worker enters an iteration, which gives its in-neighbors tokens.

Fails with FailedPrecondition if the worker checks the protocol (gap_bounds) and
something does not hold.

worker: A scalar, the worker.
iteration: A scalar, from RecsyncHopNext.
update: [elements], the worker's parameters, packed. They are sent to the
  out-neighbors, by reference.
send: Whether `update` is sent now (parallel order); else RecsyncHopSend does.
)doc");

REGISTER_OP("RecsyncHopSend")
    .Input("worker: resource")
    .Input("update: T")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn(Scalars<1>)
    .Doc(R"doc(
Sends the worker's parameters to its out-neighbors, by way of its edges' loops.

With notify_ack it waits until all of them have used those sent before; without a
thread, and cancellable.

worker: A scalar, the worker.
update: [elements], the worker's parameters, packed.
)doc");

REGISTER_OP("RecsyncHopReceive")
    .Input("worker: resource")
    .Input("iteration: int64")
    .Input("base: T")
    .Input("variables: N * resource")
    .Attr("N: int >= 1")
    .Attr("T: {float, double}")
    .Attr("relative: bool")
    .SetIsStateful()
    .SetShapeFn(Scalars<2>)
    .Doc(R"doc(
Waits for the in-neighbors' updates of an iteration, and averages them into the
worker's variables in one pass: variables += sum of weight * (update - base).

Holds no thread while it waits; fails with Cancelled when the step is cancelled
or the worker is destroyed.

worker: A scalar, the worker.
iteration: A scalar, the iteration that the worker is in.
base: [elements], the parameters, packed, whose place the average takes.
variables: The worker's parameters, in the order of a packed update.
relative: Whether `base` is used; if not, the variables' own values are.
)doc");

REGISTER_OP("RecsyncHopCollect")
    .Input("worker: resource")
    .Input("neighbor: int64")
    .Output("progress: int64")
    .Output("iteration: int64")
    .Output("update: T")
    .Output("open: bool")
    .Output("number: int64")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckScalars(c, 2));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(3, c->Scalar());
      c->set_output(4, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Waits until the worker has something to tell a neighbor.

Gives the same again until RecsyncHopCarried has acknowledged it. Holds no
thread while it waits; fails with Cancelled when the step is cancelled, or when
another op collects for the same neighbor, which takes its place.

worker: A scalar, the worker.
neighbor: A scalar, the neighbor's number. With -1 nothing is waited for and nothing taken.
progress: A scalar: the iteration that the worker has entered, or (notify_ack) of
  which it has used the updates; -1 if there is nothing new.
iteration: A scalar: the update's iteration, -1 without an update.
update: [elements], packed parameters; empty without.
open: A scalar, False when the outboxes are closed and all is told.
number: A scalar, the parcel's, above those of all before it; 0 without a parcel.
)doc");

REGISTER_OP("RecsyncHopAsk")
    .Input("worker: resource")
    .Input("neighbor: int64")
    .Input("number: int64")
    .Input("progress: int64")
    .Input("iteration: int64")
    .Output("wanted: bool")
    .SetIsStateful()
    .SetShapeFn(Scalars<5>)
    .Doc(R"doc(
Tells a worker how far a neighbor is, and asks whether it wants that one's update.

Fails with FailedPrecondition if the neighbor is further ahead than gap_bounds
allow, which is a bug.

worker: A scalar, the receiver.
neighbor: A scalar, the sender's number.
number: A scalar of at least 0, as from RecsyncHopCollect.
progress: A scalar, as from RecsyncHopCollect.
iteration: A scalar, as from RecsyncHopCollect.
wanted: A scalar: whether there is an update, it has not come before, and the
  receiver can still use it.
)doc");

REGISTER_OP("RecsyncHopDeliver")
    .Input("worker: resource")
    .Input("neighbor: int64")
    .Input("number: int64")
    .Input("iteration: int64")
    .Input("update: T")
    .Output("delivered: int64")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn(Scalars<4>)
    .Doc(R"doc(
Puts a neighbor's update into a worker's queue.

One that can no longer be used is dropped and counted; nothing happens if the
parcel has come before. Fails with ResourceExhausted if the queue is full, and
with FailedPrecondition if the neighbor is further ahead, or has more updates
there, than gap_bounds allow: both are bugs.

worker: A scalar, the receiver.
neighbor: A scalar, the sender's number, an in-neighbor.
number: A scalar of at least 1, the parcel's; those of a sender rise.
iteration: A scalar, the iteration in which the update was made.
update: [elements], packed parameters; kept by reference.
delivered: A scalar, the iteration.
)doc");

REGISTER_OP("RecsyncHopCarried")
    .Input("worker: resource")
    .Input("neighbor: int64")
    .Input("number: int64")
    .Input("iteration: int64")
    .Input("began: int64")
    .SetIsStateful()
    .SetShapeFn(Scalars<5>)
    .Doc(R"doc(
Acknowledges a parcel, and notes for the timeline that its update has got to a
neighbor.

worker: A scalar, the sender.
neighbor: A scalar, the receiver's number.
number: A scalar of at least 0, the parcel's, as from RecsyncHopCollect.
iteration: A scalar, the update's; -1 to note nothing.
began: A scalar, when it was collected, microseconds since the Unix epoch.
)doc");

REGISTER_OP("RecsyncHopSetNeighbor")
    .Input("worker: resource")
    .Input("neighbor: int64")
    .Input("since: int64")
    .Input("until: int64")
    .Output("iteration: int64")
    .SetIsStateful()
    .SetShapeFn(Scalars<4>)
    .Doc(R"doc(
Tells a worker that a neighbor has left, was lost, or is back.

From then on, until RecsyncHopBegin, the bounds that hold by paths over others are
void, whatever the number is: tell those that are no neighbors, too, and first.

worker: A scalar, the worker.
neighbor: A scalar, the neighbor's number.
since: A scalar, the first iteration in which it takes part, if it is back.
until: A scalar, the last one: -1 for a neighbor that is lost, the iteration that
  one that has left was in, the largest int64 for one that takes part.
iteration: A scalar, the worker's own at this moment, -1 before the first.
)doc");

REGISTER_OP("RecsyncHopCloseOutboxes")
    .Input("worker: resource")
    .SetIsStateful()
    .SetShapeFn(Scalars<1>)
    .Doc(R"doc(
Lets RecsyncHopCollect end, once all is told, until RecsyncHopBegin.

worker: A scalar, the worker.
)doc");

REGISTER_OP("RecsyncHopHold")
    .Input("worker: resource")
    .Input("held: bool")
    .SetIsStateful()
    .SetShapeFn(Scalars<2>)
    .Doc(R"doc(
Has a worker tell its neighbors nothing for a while.

Until it is released, RecsyncHopCollect completes at once and gives nothing. The
worker goes on, and keeps what it has to tell. RecsyncHopBegin releases it, too.

worker: A scalar, the worker.
held: A scalar, False to release it.
)doc");

REGISTER_OP("RecsyncHopInterrupt")
    .Input("worker: resource")
    .SetIsStateful()
    .SetShapeFn(Scalars<1>)
    .Doc(R"doc(
Ends what the worker's trainer waits for, if it does, with Cancelled.

worker: A scalar, the worker.
)doc");

REGISTER_OP("RecsyncHopState")
    .Input("worker: resource")
    .Output("iteration: int64")
    .Output("phase: int64")
    .Output("seconds: double")
    .Output("missing: int64")
    .Output("tokens: int64")
    .Output("declined: int64")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckScalars(c, 1));
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
      for (int i = 3; i < 6; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      c->set_output(6, c->Vector(13));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Where a worker stands, and whom it waits for.

worker: A scalar, the worker.
iteration: A scalar, -1 before the first.
phase: A scalar: 0 idle, 1 computing, waiting for 2 updates, 3 tokens or 4
  acknowledgements.
seconds: A scalar, how long it has been in this phase.
missing: The neighbors that it waits for.
tokens: By out-neighbor, the tokens that are there.
declined: By in-neighbor, how many of its updates were not wanted.
counts: Iterations entered, updates used, jumps, iterations skipped, updates
  sent, updates replaced by newer ones before they were sent, microseconds of
  waiting for updates, and for tokens or acknowledgements, updates dropped as too
  old, and as superseded, updates in the queue, events lost; and, last, the
  iteration that the missing neighbors have to come to, -1 if it waits for none:
  to send an update of it or a later one, to enter it, or to have used the
  updates of it.
)doc");

REGISTER_OP("RecsyncHopEvents")
    .Input("worker: resource")
    .Output("events: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckScalars(c, 1));
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, 5));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes what a worker has done since the last call, for a timeline.

worker: A scalar, the worker.
events: [events, 5]: what (0 compute, waiting for 1 updates or 2 tokens, 3 send,
  4 receive, 5 jump), its begin and end in microseconds since the Unix epoch, the
  iteration, the neighbor or -1. An update is received from when RecsyncHopAsk
  answers that it is wanted until RecsyncHopDeliver has it.
)doc");

}  // namespace recsync
