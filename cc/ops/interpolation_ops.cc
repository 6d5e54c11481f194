// Ops that move parameters towards others.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncSnapshot")
    .Input("variables: N * resource")
    .Output("packed: float")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Copies N variables into one tensor, while Hogwild's updates may go on.

variables: float variables of any shape.
packed: A vector: the values, flattened, one after the other.
)doc");

REGISTER_OP("RecsyncInterpolate")
    .Input("variables: N * resource")
    .Input("target: float")
    .Input("alpha: float")
    .Output("after: float")
    .Attr("N: int >= 1")
    .Attr("hogwild: bool")
    .Attr("answer: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      bool answer;
      ShapeHandle target, alpha;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("answer", &answer));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(n), 1, &target));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(n + 1), 0, &alpha));
      c->set_output(0, answer ? target : c->Vector(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Moves N variables towards a target, in place: w <- (1 - alpha) w + alpha target.

What w is at that time counts: what others have made of it since the target was
computed is kept, times 1 - alpha.

variables: float variables of any shape.
target: A vector: what each variable moves towards, flattened, one after the
  other.
alpha: A scalar in [0, 1].
after: A vector: the new values, like `target`; empty without `answer`.
hogwild: Whether Hogwild's updates may go on meanwhile, each element being
  written without a lock; else the variables are locked one after the other.
answer: Whether the new values are returned.
)doc");

}  // namespace recsync
