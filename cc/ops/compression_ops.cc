// Ops of compressed activations and gradients.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncEncodeInt8")
    .Input("x: float")
    .Output("codes: int8")
    .Output("scales: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x, scales;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &x));
      TF_RETURN_IF_ERROR(c->Subshape(x, 0, -1, &scales));
      c->set_output(0, x);
      c->set_output(1, scales);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Activations in int8, with a scale for each row.

x: [..., columns].
codes: Shaped like x, from -127 to 127: x / scale, rounded to the nearest.
scales: [...]: max|x| / 127 of each row; 0 of a row of zeros, NaN of one with a
  value that is not finite.
)doc");

REGISTER_OP("RecsyncDecodeInt8")
    .Input("codes: int8")
    .Input("scales: float")
    .Output("x: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle codes, rows;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &codes));
      TF_RETURN_IF_ERROR(c->Subshape(codes, 0, -1, &rows));
      TF_RETURN_IF_ERROR(c->Merge(rows, c->input(1), &rows));
      c->set_output(0, codes);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Restores what RecsyncEncodeInt8 has encoded.

codes: [..., columns].
scales: [...].
x: Shaped like codes: codes times the scale of their row.
)doc");

// Not stateful, though with feedback it has a state: or tf.function would run
// it where nobody uses what it gives. Steps of a net follow each other anyway.
REGISTER_OP("RecsyncCompressGradient")
    .Input("gradient: float")
    .Input("net: int64")
    .Output("mask: uint8")
    .Output("values: T")
    .Attr("T: {float, bfloat16}")
    .Attr("sparsify: float = 0.0")
    .Attr("feedback: string = ''")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The largest of the gradients g, or with feedback of g + e.

With feedback, e becomes what the gradients, and e, differ from what is sent,
rounding included. It begins at 0, anew when the number of gradients changes.

gradient: Of any shape.
net: Whose gradients they are, a scalar: each net has an e of its own.
mask: [bytes]: which gradients are sent, bit i % 8 of byte i / 8 for gradient i;
  empty if all are.
values: Those sent, in their order.
sparsify: The part that is left out, at least 0 and below 1; one gradient is
  always sent.
feedback: The name of e on the device, where ops with one name share it; empty
  for none.
)doc");

REGISTER_OP("RecsyncRestoreGradient")
    .Input("mask: uint8")
    .Input("values: T")
    .Input("shape: int64")
    .Output("gradient: float")
    .Attr("T: {float, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused, shape;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));
      TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(2, &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Restores what RecsyncCompressGradient has compressed.

mask: [bytes], or empty if all gradients are there.
values: Those sent, in their order.
shape: Of the gradient.
gradient: 0 where nothing was sent.
)doc");

}  // namespace recsync
