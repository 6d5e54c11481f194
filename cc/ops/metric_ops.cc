// Ops of the metrics.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// Checks that labels, predictions and weights, from an input on, are vectors.
absl::Status CheckExamples(InferenceContext* c, int first) {
  ShapeHandle labels, unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 1, &labels));
  TF_RETURN_IF_ERROR(c->Merge(labels, c->input(first + 1), &unused));
  return c->WithRank(c->input(first + 2), 1, &unused);
}

}  // namespace

REGISTER_OP("RecsyncAddLogLoss")
    .Input("loss_sum: double")
    .Input("label_sum: double")
    .Input("weight_sum: double")
    .Input("labels: T")
    .Input("predictions: T")
    .Input("weights: T")
    .Output("new_loss_sum: double")
    .Output("new_label_sum: double")
    .Output("new_weight_sum: double")
    .Attr("T: {float, double}")
    .Attr("from_logits: bool = false")
    .Attr("epsilon: float = 1e-7")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      for (int i = 0; i < 3; ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
        c->set_output(i, c->Scalar());
      }
      return CheckExamples(c, 3);
    })
    .Doc(R"doc(
Adds the log losses of a batch to a sum, and its labels and weights to others.

loss_sum: A scalar, the sum so far of the weighted log losses.
label_sum: A scalar, that of the weighted labels.
weight_sum: A scalar, that of the weights.
labels: [n], from 0 to 1.
predictions: [n], probabilities or logits.
weights: [n], or [1]: the same for all.
from_logits: Whether predictions are logits.
epsilon: Probabilities are clipped to between this and 1 minus this.
new_loss_sum: A scalar.
new_label_sum: A scalar.
new_weight_sum: A scalar.
)doc");

REGISTER_OP("RecsyncAddScores")
    .Input("buckets: double")
    .Input("labels: T")
    .Input("predictions: T")
    .Input("weights: T")
    .Output("new_buckets: double")
    .Attr("T: {float, double}")
    .Attr("from_logits: bool = false")
    .Attr("spacing: {'linear', 'logit'} = 'linear'")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle buckets;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &buckets));
      c->set_output(0, buckets);
      return CheckExamples(c, 1);
    })
    .Doc(R"doc(
Adds the weights of a batch's examples to buckets, by their predictions.

With linear spacing, bucket i of n has predictions above i / n, up to and with (i + 1) / n; the
first also those of 0. Predictions are clipped to between 0 and 1; those that are NaN are left
out. With logit spacing, the same goes for (logit + 17) / 34, of logits clipped to [-17, 17].

buckets: [2, n], the sums so far: of examples with a label of 0, and of the others.
labels: [m].
predictions: [m], probabilities or logits.
weights: [m], or [1]: the same for all.
from_logits: Whether predictions are logits.
spacing: What the buckets divide evenly, probabilities or logits.
new_buckets: Shaped like buckets.
)doc");

REGISTER_OP("RecsyncAreaUnderCurve")
    .Input("buckets: double")
    .Output("area: double")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle buckets;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &buckets));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The area under the ROC curve of what RecsyncAddScores added up.

That is the chance that an example with a label other than 0 lies in a higher bucket than one
with a label of 0; the same bucket counts a half.

buckets: [2, n], the weights of examples with a label of 0, and of the others.
area: A scalar; 0 where there are not both.
)doc");

}  // namespace recsync
