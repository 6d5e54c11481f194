// Ops that put messages together and take them apart.

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncPack")
    .Input("pieces: N * T")
    .Output("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {float, int64}")
    .Attr("groups: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Puts pieces into one vector, such that taking it apart copies little.

pieces: Tensors of any shape, which are flattened.
groups: How many of the pieces each group has, which follow one another without
  a gap; a group begins where a tensor's buffer may. Adds up to N.
packed: A vector: the pieces, with zeros between groups.
)doc");

REGISTER_OP("RecsyncUnpack")
    .Input("packed: T")
    .Input("sizes: int64")
    .Output("pieces: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {float, int64}")
    .Attr("groups: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      for (int i = 0; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes apart what RecsyncPack put together.

The first piece of a group that has elements, and others that lie where a
tensor's buffer may, share the memory of `packed`; the rest is copied.

packed: A vector.
sizes: [N], the sizes of the pieces; the last may be -1 for all the rest.
groups: As in RecsyncPack.
pieces: Vectors.
)doc");

REGISTER_OP("RecsyncReadPacked")
    .Input("resources: num_resources * resource")
    .Input("tails: num_tails * int64")
    .Output("packed: uint8")
    .Attr("num_resources: int >= 1")
    .Attr("num_tails: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      int resources;
      TF_RETURN_IF_ERROR(c->GetAttr("num_resources", &resources));
      for (int i = 0; i < resources; ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
      }
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads variables of one device into one message.

resources: Handles of variables of numbers, of any types and shapes.
tails: What comes behind them, of any shapes.
packed: The bytes of the values, each followed by zeros up to a multiple of
  eight bytes, and those of `tails`.
)doc");

}  // namespace recsync
