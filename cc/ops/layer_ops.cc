// Ops of the layers.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncMeanNormalize")
    .Input("x: T")
    .Input("alpha: float")
    .Input("beta: float")
    .Output("y: T")
    .Output("mean: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("epsilon: float = 1e-3")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x, alpha, beta;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &x));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &alpha));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &beta));
      DimensionHandle features = c->Dim(x, 1);
      TF_RETURN_IF_ERROR(c->Merge(features, c->Dim(alpha, 0), &features));
      TF_RETURN_IF_ERROR(c->Merge(features, c->Dim(beta, 0), &features));
      c->set_output(0, c->Matrix(c->Dim(x, 0), features));
      c->set_output(1, c->Vector(features));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Local mean-normalization: y = alpha x / E(x) - beta, E over the rows of x.

x: [rows, features].
alpha: [features].
beta: [features].
epsilon: The divisor is sign(E) max(|E|, epsilon).
y: Shaped like x.
mean: [features], E(x); 0 where x has no rows.
)doc");

REGISTER_OP("RecsyncMeanNormalizeGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("alpha: float")
    .Input("mean: float")
    .Output("dx: T")
    .Output("dalpha: float")
    .Output("dbeta: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("epsilon: float = 1e-3")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x, alpha, mean;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &x));
      TF_RETURN_IF_ERROR(c->Merge(x, c->input(0), &x));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &alpha));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 1, &mean));
      DimensionHandle features = c->Dim(x, 1);
      TF_RETURN_IF_ERROR(c->Merge(features, c->Dim(alpha, 0), &features));
      TF_RETURN_IF_ERROR(c->Merge(features, c->Dim(mean, 0), &features));
      c->set_output(0, x);
      c->set_output(1, c->Vector(features));
      c->set_output(2, c->Vector(features));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradients of RecsyncMeanNormalize, through the mean too.

dy: [rows, features], the gradient of y.
x: [rows, features].
alpha: [features].
mean: [features], as RecsyncMeanNormalize returned it.
epsilon: As in RecsyncMeanNormalize.
dx: The gradient of x.
dalpha: The gradient of alpha.
dbeta: The gradient of beta.
)doc");

}  // namespace recsync
