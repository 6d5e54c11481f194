// Ops of the testing tools: artificial compute time, artificial bandwidth and
// speed, servers that share a process. And what measurements need.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncDelay")
    .Input("seconds: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      return c->WithRank(c->input(0), 0, &unused);
    })
    .Doc(R"doc(
Completes after a time, without using a processor meanwhile.

seconds: A scalar, 0 or more.
)doc");

REGISTER_OP("RecsyncResidentMemory")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The memory that the process of the op's server has at the moment.

bytes: A scalar; -1 where the system does not say.
)doc");

REGISTER_OP("RecsyncServerThreads")
    .Input("threads: int32")
    .Output("size: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes the pool of threads that all TensorFlow servers of this process share.

It is made once: by this op, or with the first server of the process, as large
as that wants it.

threads: A scalar, from 1 to 4096: how large to make it, if there is none.
size: A scalar: how large the pool is.
)doc");

REGISTER_OP("RecsyncLimitParallelism")
    .Input("limit: int32")
    .Output("previous: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Limits how many threads each kernel uses that the calling thread runs.

For measurements: with 1, the time of the calling thread's processor is all that
a kernel takes. Call it eagerly; in a function, the thread may be any.

limit: A scalar, at least 1.
previous: A scalar: the limit before.
)doc");

// Not stateful, although it has a state: tf.function runs stateful ops one
// after the other, and messages of different servers, or there and back, pass
// side by side. Whether it runs is decided by who needs the message. Where both
// inputs are constants, TensorFlow would fold it; the kernel prevents that. And
// it would take two that pass the same message for one, but for their names.
REGISTER_OP("RecsyncTransfer")
    .Input("message: T")
    .Input("bytes_per_second: double")
    .Output("passed: T")
    .Attr(
        "T: {float, double, half, bfloat16, bool, int8, uint8, int16, uint16, "
        "int32, uint32, int64, uint64}")
    .Attr("passage: string = ''")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Completes when a message has passed the link of the device that it is placed on.

A device has one link. Messages pass it one after the other, in the order in
which they come. The op uses no processor while it waits. A message whose step
is cancelled meanwhile takes up the link all the same.

message: Of any shape.
bytes_per_second: A scalar, positive: how fast this message passes; infinity for
  no limit.
passage: Tells this one from others of the same message.
passed: The message.
)doc");

// Not stateful, for the same reasons.
REGISTER_OP("RecsyncComputed")
    .Input("results: T")
    .Input("flop: double")
    .Input("flops_per_second: double")
    .Output("computed: T")
    .Attr("T: list(type) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      const int results = c->num_outputs();
      TF_RETURN_IF_ERROR(c->WithRank(c->input(results), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(results + 1), 0, &unused));
      for (int i = 0; i < results; ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Completes when the processor of the device that it is placed on has had the time
to compute something.

A device has one processor, which computes one thing after the other, in the
order in which they come. The op itself uses no processor while it waits. What
is cancelled meanwhile takes up the processor all the same.

results: What was computed.
flop: A scalar, at least 0: the floating-point operations that it took.
flops_per_second: A scalar, positive: how many of them the processor does in a
  second; infinity for no limit.
computed: The results.
)doc");

REGISTER_OP("RecsyncReserved")
    .Output("amounts: int64")
    .Output("seconds: double")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      c->set_output(1, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What the processor and the link of the device that it is placed on were asked
for since the device was made, by RecsyncComputed and RecsyncTransfer.

amounts: Floating-point operations, and bytes.
seconds: How long they take.
)doc");

}  // namespace recsync
