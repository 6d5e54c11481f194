// Ops that read variables together with their versions.

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncPullDense")
    .Input("variables: N * resource")
    .Input("versions: N * resource")
    .Input("others: M * float")
    .Output("packed: float")
    .Output("pulled_versions: int64")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(n));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads N dense variables, each together with its version, into one message.

A variable and its version are read under the variable's lock, so no update can
come between them.

variables: float variables of any shape.
versions: int64 scalar variables.
others: What the message has besides, of any shapes.
packed: As if RecsyncPack had packed the values, and then the others, each as a
  group of its own.
pulled_versions: [N], to be sent back with the gradients.
)doc");

REGISTER_OP("RecsyncGatherRows")
    .Input("variables: N * resource")
    .Input("versions: V * resource")
    .Input("indices: Tindices")
    .Input("counts: int64")
    .Input("bags: int32")
    .Input("scales: float")
    .Input("bag_counts: int64")
    .Input("log_decays: num_decayed * resource")
    .Output("packed: float")
    .Output("pulled_versions: int64")
    .Attr("N: int >= 1")
    .Attr("V: int >= 0")
    .Attr("num_decayed: int >= 0 = 0")
    .Attr("decayed: list(int) = []")
    .Attr("Tindices: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n, v;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("V", &v));
      if (v != n && v != 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("versions must be one for each of the ", n,
                         " variables, or none, not ", v));
      }
      ShapeHandle indices, vector;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(n + v), 1, &indices));
      for (int i = 1; i < 5; ++i) {  // counts, bags, scales, bag_counts
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + v + i), 1, &vector));
      }
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, v == 0 ? c->Vector(0) : indices);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gathers rows of N tables, each row together with its version, into one tensor,
pooled where bags are given.

The rows and versions of a table are read under its lock, so no update can come
between them.

variables: float variables [rows, ...].
versions: int64 variables [rows], one for each table, or none.
indices: [n], row ids: first those of table 0, then those of table 1, and so
  on; an error where one is out of its table's range.
counts: [N], how many of the indices belong to each table.
bags: [n], or empty without bag_counts: the bag of its table that each index
  belongs to; within a table they do not decrease.
scales: [n], or empty for 1: the weight of each index in its bag.
bag_counts: [N], the number of bags of each table, or empty: every index is a
  bag of its own.
log_decays: double variables [rows + 2] of tables whose weights decay, see
  RecsyncDecayWeights: their rows are read as if they were decayed.
decayed: The numbers of those tables, rising.
packed: A vector: for each table [bags, width], flattened, one after the other;
  a bag is the sum of its rows times their scales, zero if it has none. It has
  at most 2^31 - 1 elements.
pulled_versions: [n], by index, to be sent back with the gradients; empty
  without versions.
)doc");

REGISTER_OP("RecsyncCopyRows")
    .Input("variables: N * resource")
    .Input("rows: int64")
    .Input("log_decays: num_decayed * resource")
    .Output("values: dtypes")
    .Output("log_decay: double")
    .Attr("N: int >= 1")
    .Attr("num_decayed: int >= 0 = 0")
    .Attr("decayed: list(int) = []")
    .Attr("dtypes: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(n), 1, &rows));
      for (int i = 0; i + 1 < c->num_outputs(); ++i) {
        c->set_output(i, c->UnknownShape());
      }
      c->set_output(c->num_outputs() - 1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Copies rows of a table together with what lies beside each of them, as to save
them while they are trained.

What is copied of a row is of one moment: an update of that row is in all of it,
or in none.

variables: A table, float or bfloat16 [rows, ...], and variables [rows, ...] of
  any types but strings and such, which an update changes together with it.
rows: [n], the rows; an error where one is out of range.
log_decays: If the table's weights decay, a double variable [rows + 2], see
  RecsyncDecayWeights.
decayed: [0] with log_decays, else empty.
dtypes: The variables' types.
values: [n, ...] of each variable; the table's rows as they would be if all of
  them had decayed by log_decay.
log_decay: The table's log-decay, a scalar; 0 without log_decays.
)doc");

REGISTER_OP("RecsyncChangedRows")
    .Input("versions: resource")
    .Input("saved: resource")
    .Input("begin: int64")
    .Input("end: int64")
    .Output("rows: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &scalar));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &scalar));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Finds the rows of a table that were updated since they were saved. One that is
updated meanwhile may be among them or not.

versions: An int64 variable [rows] beside the table.
saved: An int64 variable [rows], the versions of what was saved of each row.
begin: The first row that is looked at, a scalar.
end: The one after the last of them, a scalar of at most the table's rows.
rows: [n], those from `begin` to `end` whose version is not the saved one, in
  ascending order.
)doc");

REGISTER_OP("RecsyncPullTable")
    .Input("variable: resource")
    .Input("versions: resource")
    .Input("log_decays: num_decayed * resource")
    .Output("values: float")
    .Output("pulled_versions: int64")
    .Attr("shape: shape")
    .Attr("num_decayed: int >= 0 = 0")
    .Attr("decayed: list(int) = []")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::PartialTensorShape attribute;
      TF_RETURN_IF_ERROR(c->GetAttr("shape", &attribute));
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(attribute, &shape));
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, 1, &shape));
      c->set_output(0, shape);
      c->set_output(1, c->Vector(c->Dim(shape, 0)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads a whole table together with the versions of its rows.

Not stateful, unlike its relatives, so that a graph whose layers only ask for
the table's shape drops it.

variable: A float variable [rows, ...].
versions: An int64 variable [rows].
log_decays: If its weights decay, a double variable [rows + 2], see
  RecsyncDecayWeights: its rows are read as if they were decayed.
decayed: [0] with log_decays, else empty.
shape: The table's shape.
values: The table.
pulled_versions: [rows], to be sent back with the gradients.
)doc");

REGISTER_OP("RecsyncNextGlobalStep")
    .Input("global_step: resource")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Adds one to a counter and returns the new value, in one step.

global_step: An int64 scalar variable.
step: The counter after the addition: no two calls return the same.
)doc");

}  // namespace recsync
