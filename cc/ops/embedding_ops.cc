// Ops of embedding collections that run beside the model, on the trainer.

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncRouteIds")
    .Input("ids: F * Tindices")
    .Input("splits: num_ragged * int64")
    .Input("weights: num_weighted * float")
    .Output("batch: int64")
    .Output("rows: P * int64")
    .Output("bags: P * int32")
    .Output("scales: P * float")
    .Output("slots: P * int32")
    .Output("sources: P * int32")
    .Attr("F: int >= 1")
    .Attr("P: int >= 1")
    .Attr("num_ragged: int >= 0")
    .Attr("num_weighted: int >= 0")
    .Attr("Tindices: {int32, int64}")
    .Attr("features: list(string)")
    .Attr("tables: list(string)")
    .Attr("table_rows: list(int)")
    .Attr("lengths: list(int)")
    .Attr("weighted: list(bool)")
    .Attr("combiners: list(string)")
    .Attr("out_of_range: list(string)")
    .Attr("partitions: list(int)")
    .Attr("shard_counts: list(int)")
    .Attr("shard_tables: list(int)")
    .Attr("shard_offsets: list(int)")
    .Attr("has_bags: list(bool)")
    .Attr("has_scales: list(bool)")
    .SetShapeFn([](InferenceContext* c) {
      int p;
      TF_RETURN_IF_ERROR(c->GetAttr("P", &p));
      ShapeHandle unused;
      for (int i = 0; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
      }
      c->set_output(0, c->Scalar());
      for (int i = 1; i < 1 + 5 * p; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Finds the rows of P physical tables that the ids of F features name.

A feature gives each example a bag of ids. Its table is split into shards, modulo
their number, each a range of rows of a physical table. With bags, those of a
physical table are numbered by their slots, slot = feature * batch + example,
and only those that have an id there are listed. Without, every slot takes one
row, and every row is listed once, however many slots take it.

ids: Vectors; example after example.
splits: For each feature of length 0, [batch + 1]: where each example's ids begin.
weights: For each weighted feature, shaped like its ids.
batch: The number of examples.
rows: For each physical table, the rows to look up.
bags: For each physical table, the bag of each row; empty without has_bags.
scales: For each physical table, the scale of each row in its bag; empty without
  has_scales: then all are 1.
slots: For each physical table, the slot of each bag, or all slots that take a row.
sources: For each physical table without bags, the position in `rows` that each
  slot takes; empty with has_bags.
features: [F] names, for error messages.
tables: [F] names of the features' tables, for error messages.
table_rows: [F], the rows of each feature's table.
lengths: [F], how many ids an example has, or 0 for a ragged feature.
weighted: [F], whether a feature has weights.
combiners: [F], 'sum', 'mean' or 'sqrtn'.
out_of_range: [F], 'error', 'clip' (to the nearest row) or 'hash' (every id).
partitions: [F], of a table with keys, into how many partitions its keys fall: an
  id is a key then, which lies in the shard of its partition, modulo the number
  of shards, and stands in `rows` as it is. 0 where ids are rows.
shard_counts: [F], into how many shards each feature's table is split.
shard_tables: The shards' physical tables, feature after feature.
shard_offsets: The shards' first rows there, feature after feature.
has_bags: [P], whether there are bags; only where every example has one id of
  each feature may they be left out.
has_scales: [P], whether the scales are wanted.
)doc");

REGISTER_OP("RecsyncAssemble")
    .Input("batch: int64")
    .Input("pooled: P * float")
    .Input("slots: P * int32")
    .Input("sources: P * int32")
    .Output("assembled: float")
    .Attr("P: int >= 1")
    .Attr("dimensions: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int> dimensions;
      TF_RETURN_IF_ERROR(c->GetAttr("dimensions", &dimensions));
      int64_t width = 0;
      for (int dimension : dimensions) {
        if (dimension < 1) {
          return absl::InvalidArgumentError(
              absl::StrCat("dimensions must be positive, not ", dimension));
        }
        width += dimension;
      }
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, width));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Puts the pooled vectors of P physical tables side by side, a row per example.

Vectors of the same slot, which are partial pools of a split table, are added;
a slot that no table has is zero.

batch: The number of examples.
pooled: For each physical table [vectors, dimension].
slots: For each physical table, slots: feature * batch + example.
sources: For each physical table, the vector that each slot takes; empty where it
  is slot i that takes vector i.
assembled: [batch, sum of the dimensions]: the features' vectors in their order;
  at most 2^31 - 1 elements.
dimensions: The dimension of each feature.
)doc");

REGISTER_OP("RecsyncAssembleGrad")
    .Input("gradient: float")
    .Input("vectors: int32")
    .Input("slots: P * int32")
    .Input("sources: P * int32")
    .Output("pooled: P * float")
    .Attr("P: int >= 1")
    .Attr("dimensions: list(int)")
    .Attr("table_dimensions: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int> table_dimensions;
      TF_RETURN_IF_ERROR(c->GetAttr("table_dimensions", &table_dimensions));
      int p;
      TF_RETURN_IF_ERROR(c->GetAttr("P", &p));
      if (static_cast<int>(table_dimensions.size()) != p) {
        return absl::InvalidArgumentError(
            "table_dimensions must have a number for each physical table");
      }
      for (int i = 0; i < p; ++i) {
        if (table_dimensions[i] < 1) {
          return absl::InvalidArgumentError(absl::StrCat(
              "table_dimensions must be positive, not ", table_dimensions[i]));
        }
        c->set_output(
            i, c->Matrix(InferenceContext::kUnknownDim, table_dimensions[i]));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes apart the gradient of what RecsyncAssemble put together.

gradient: [batch, sum of the dimensions].
vectors: [P], how many vectors of each physical table there are.
slots: As for RecsyncAssemble.
sources: As for RecsyncAssemble.
pooled: For each physical table [vectors, dimension], at most 2^31 - 1 elements;
  the gradients of the slots that take the same vector are added up.
dimensions: The dimension of each feature.
table_dimensions: [P], the dimension of each physical table.
)doc");

}  // namespace recsync
