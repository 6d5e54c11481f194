// Ops of tables whose ids are keys.

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("RecsyncFindRows")
    .Input("table: resource")
    .Input("entries: resource")
    .Input("index: resource")
    .Input("counts: resource")
    .Input("sketches: num_sketches * resource")
    .Input("versions: num_versions * resource")
    .Input("beside: num_beside * resource")
    .Input("log_decays: num_decayed * resource")
    .Input("means: num_means * resource")
    .Input("keys: int64")
    .Input("expected: int64")
    .Output("rows: int64")
    .Output("found_versions: int64")
    .Attr("num_sketches: int >= 0")
    .Attr("num_versions: int >= 0")
    .Attr("num_beside: int >= 0")
    .Attr("num_decayed: int >= 0")
    .Attr("num_means: int >= 0")
    .Attr("inserts: bool")
    .Attr("partitions: int")
    .Attr("shard: int")
    .Attr("shards: int")
    .Attr("eviction: string")
    .Attr("half_life: int")
    .Attr("max_idle: int")
    .Attr("min_count: int")
    .Attr("probability: float")
    .Attr("keeps_time: bool")
    .Attr("trains_unknown: bool")
    .Attr("mean_rows: int")
    .Attr("distribution: string")
    .Attr("parameters: list(float)")
    .Attr("seed: int")
    .Attr("beside_values: list(float)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 2), 1, &keys));
      c->set_output(0, keys);
      c->set_output(1, keys);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Finds the rows of a table that belong to keys; with `inserts`, gives rows to keys
that have none and are admitted, and takes them away from others if there is no
free one.

Such a row gets first values that depend on the seed and the key alone, and
begins its next life: gradients of earlier ones are not applied any more. The
rows and all that lies beside them are changed under the rows' locks.

table: A float or bfloat16 variable [rows, width].
entries: An int64 variable [rows, 2]: the key of each row, and its usage.
index: An int32 variable that is made from the entries when it is all 0.
counts: An int64 variable [8], see cc/engine/key_table.h.
sketches: With min_count > 1, an int8 variable, zeros at first.
versions: An int64 variable [rows], if there is one.
beside: What else is given a first value: float or int32 variables [rows, ...].
log_decays: If the table's weights decay, a double variable [rows + 2].
means: If unknown keys shall be looked up as the mean of the rows that have keys,
  a double variable [width + 2], zeros at first. The call goes on with a pass
  over the rows, then, which at its end writes the mean into the rows that stand
  for unknown keys, see cc/engine/key_mean.h.
keys: [n], any.
expected: [n], versions of the keys' rows, or empty. A key whose row is in
  another life by now counts as unknown to those who push.
rows: [n], those of the keys; for a key without one, the row that stands for
  unknown keys.
found_versions: [n], the versions of the rows when they were found; 0, which no
  push gets by with, for an unknown key and where `expected` is another life.
  Zeros without versions.
inserts: Whether keys may be given rows, and count as used.
partitions: Of the whole table, a power of two.
shard: Which one of its shards the table is.
shards: A power of two, at most `partitions`.
eviction: 'least_recent' or 'least_frequent'.
half_life: Ticks without use after which uses count half; 0: they always count.
max_idle: Ticks without use after which a key is unknown; 0: it never is.
min_count: From 1 to 255, how often a key must have shown up to be admitted.
probability: Above 0, with which it is admitted then, at each call.
keeps_time: Whether a tick is at least the time since the beginning of 2020, in
  1/1024 seconds, of calls that come faster one more than the last, until they are a
  second ahead; else each call that inserts is one.
trains_unknown: Whether the rows of unknown keys may be pushed to.
mean_rows: With means, through how many rows that have keys a call goes at least,
  if it has fewer keys than that.
distribution: Of first values, see RecsyncInitialRows.
parameters: Two.
seed: Of first values.
beside_values: The first value of what lies beside a row, for each of `beside`.
)doc");

REGISTER_OP("RecsyncUsedRows")
    .Input("entries: resource")
    .Output("used: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Counts the rows of a table that have a key.

entries: See RecsyncFindRows.
used: A scalar.
)doc");

REGISTER_OP("RecsyncKeySizes")
    .Output("index: int64")
    .Output("sketch: int64")
    .Attr("rows: int")
    .Attr("partitions: int")
    .Attr("shard: int")
    .Attr("shards: int")
    .Attr("min_count: int")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Says how large the variables are that RecsyncFindRows needs; an error if there
can be no such table.

index: The elements of its index.
sketch: The elements of its sketch, 0 if it needs none.
rows: Of the shard.
partitions: See RecsyncFindRows, like the others.
)doc");

}  // namespace recsync
