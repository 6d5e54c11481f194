// Ops of the gradient buffer that a parameter server has.

#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Checks the ranks of the inputs named.
absl::Status CheckRanks(
    InferenceContext* c,
    const std::vector<std::pair<std::string, int>>& expected) {
  for (const auto& [name, rank] : expected) {
    std::vector<ShapeHandle> shapes;
    ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->input(name, &shapes));
    TF_RETURN_IF_ERROR(c->WithRank(shapes[0], rank, &unused));
  }
  return absl::OkStatus();
}

// The outputs of a push and of a flush.
absl::Status AggregateShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {{"buffer", 0}}));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  for (int i = 2; i < c->num_outputs(); ++i) {
    c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  }
  return absl::OkStatus();
}

absl::Status PushShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {{"token_index", 0},
                                    {"token_value", 0},
                                    {"ticket", 0},
                                    {"pulled_step", 0},
                                    {"dense", 1},
                                    {"dense_versions", 1},
                                    {"gradient", 1},
                                    {"indices", 1},
                                    {"counts", 1},
                                    {"bags", 1},
                                    {"scales", 1},
                                    {"bag_counts", 1},
                                    {"pulled_versions", 1}}));
  return AggregateShape(c);
}

}  // namespace

#define RECSYNC_AGGREGATE_OUTPUTS          \
  .Output("ready: bool")                   \
      .Output("step: int64")               \
      .Output("dense_sum: float")          \
      .Output("dense_sum_versions: int64") \
      .Output("row_sums: float")           \
      .Output("row_ids: int64")            \
      .Output("row_counts: int64")         \
      .Output("row_versions: int64")

#define RECSYNC_AGGREGATE_DOC                                                  \
  "ready: A scalar: whether a step is given out.\n"                            \
  "step: A scalar: the number of that application, counted from 1; if none "   \
  "is ready, the number of the one that is being collected.\n"                 \
  "dense_sum: [dense_size], the dense sum divided; [0] if nothing is ready "   \
  "or "                                                                        \
  "no included push had a dense gradient.\n"                                   \
  "dense_sum_versions: [dense_count], the oldest version of each dense "       \
  "variable that an included push was computed on; [0] without dense_sum and " \
  "for fresh gradients.\n"                                                     \
  "row_sums: A vector: the sums of the rows of table 0, divided and "          \
  "flattened, then those of table 1, and so on; [0] if nothing is ready.\n"    \
  "row_ids: [rows], each row of a table once, in the order in which they "     \
  "first came.\n"                                                              \
  "row_counts: [tables of the buffer], how many rows each has; zeros if "      \
  "nothing is ready.\n"                                                        \
  "row_versions: [rows], the oldest version of each that an included push "    \
  "was computed on; [0] for fresh gradients."

REGISTER_OP("RecsyncGradientBuffer")
    .Output("buffer: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("capacity: int")
    .Attr("divisor: float")
    .Attr("staleness_decay: string = 'constant'")
    .Attr("staleness_power: float = 2.0")
    .Attr("staleness_baseline: float = 1.0")
    .Attr("staleness_normalized: bool = true")
    .Attr("staleness_iota: float = 0.0")
    .Attr("drop_late: bool = false")
    .Attr("dense_size: int = 0")
    .Attr("dense_count: int = 0")
    .Attr("table_rows: list(int) >= 0 = []")
    .Attr("table_widths: list(int) >= 0 = []")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A handle of the gradient buffer of this name on this device, which is made if
there is none.

The buffer counts pushes. When it has `capacity` of them it gives out
sum(weight * gradient) / divisor once, clears, and adds one to its step. A
push's weight is rho(tau) at tau = age + 1, its token's age being the buffer's
step minus the token's value (0 where that is negative). A push of weight 0 is
counted and adds nothing. The buffer lives until DestroyResourceOp.

container: As of a variable.
shared_name: The buffer's name; by default that of the node. One of this name
  that was made with other attributes is an error.
capacity: Pushes that make a step, at least 1.
divisor: What their sum is divided by, positive.
staleness_decay: rho(tau): 'constant' (1), 'inverse_power' or 'threshold'.
staleness_power: k of the inverse power.
staleness_baseline: mu, the staleness up to which rho is 1; at least 1.
staleness_normalized: true for (mu / tau)^k, false for tau^-k.
staleness_iota: The largest age that a threshold lets pass.
drop_late: Whether a push whose token value is less than the step is dropped on
  arrival and not counted, and so is a token that the step has taken already.
dense_size: The elements of all dense variables, at most 2^31 - 1.
dense_count: The dense variables, at most as many.
table_rows: The rows of each table.
table_widths: The floats of a row of each table, at most 2^31 - 1.
buffer: A scalar, the handle.
)doc");

REGISTER_OP("RecsyncGradientBufferStep")
    .Input("buffer: resource")
    .Output("step: int64")
    .Output("applied: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {{"buffer", 0}}));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads how far a gradient buffer is.

Read before the parameters, `applied` is a step that they have reached: the
pulled_step of a push.

buffer: A gradient buffer.
step: A scalar: the steps given out.
applied: A scalar: the step up to which all of them are applied.
)doc");

REGISTER_OP("RecsyncPushToBuffer")
    .Input("buffer: resource")
    .Input("token_index: int64")
    .Input("token_value: int64")
    .Input("ticket: int64")
    .Input("pulled_step: int64")
    .Input("dense: float")
    .Input("dense_versions: int64")
    .Input("gradient: float")
    .Input("indices: int64")
    .Input("counts: int64")
    .Input("bags: int32")
    .Input("scales: float")
    .Input("bag_counts: int64")
    .Input("pulled_versions: int64") RECSYNC_AGGREGATE_OUTPUTS
    .Attr("tables: list(int) >= 0")
    .SetIsStateful()
    .SetShapeFn(PushShape)
    .Doc(
        R"doc(
Pushes gradients to a gradient buffer; gives out the step that they complete.

The outputs can be handed to the update ops whether or not a step is ready: an
empty dense gradient and no rows are nothing to update.

buffer: A gradient buffer.
token_index: A scalar, the token's place in its list: no two batches have the
  same.
token_value: A scalar, the global step that the batch is meant for.
ticket: A scalar, the token's when it was taken; 0 for none.
pulled_step: A scalar, how far the buffer had applied when the parameters were
  pulled.
dense: [dense_size], the gradients of all dense variables, flattened, one after
  the other; or empty.
dense_versions: [dense_count], the versions that were pulled, or empty for
  fresh gradients; all pushes of a step must do alike.
gradient: A vector: for each entry of tables the gradients [bags, width] of its
  bags, flattened, one after the other.
indices: [n], row ids: first those of the first entry of tables, and so on.
counts: [number of tables], how many of the indices belong to each.
bags: [n], or empty without bag_counts: the bag of its table that each index
  belongs to; within a table they do not decrease.
scales: [n], or empty for 1: the weight of each index in its bag.
bag_counts: [number of tables], the number of bags of each, or empty: every
  index is a bag of its own.
pulled_versions: [n], or empty for fresh gradients; all pushes of a step must
  do alike.
tables: Which of the buffer's tables the rows are of; one may stand there twice.
)doc" RECSYNC_AGGREGATE_DOC);

REGISTER_OP("RecsyncFlushBuffer")
    .Input("buffer: resource") RECSYNC_AGGREGATE_OUTPUTS.SetIsStateful()
    .SetShapeFn(AggregateShape)
    .Doc(
        R"doc(
Gives out the pushes that a gradient buffer holds, though its step is not full.

Their sum is divided by the buffer's divisor: each weighs as in a step that is
full. Without pushes nothing is ready, and no step is counted.

buffer: A gradient buffer.
)doc" RECSYNC_AGGREGATE_DOC);

REGISTER_OP("RecsyncRevokeTickets")
    .Input("buffer: resource")
    .Input("tickets: int64")
    .Output("unapplied: int64")
    .Output("taken: int64")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {{"buffer", 0}, {"tickets", 1}}));
      c->set_output(0, c->UnknownShapeOfRank(1));
      c->set_output(1, c->UnknownShapeOfRank(1));
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Has a gradient buffer drop what comes from one who is gone.

buffer: A gradient buffer.
tickets: Those of the tokens that it had: pushes with them that come from now on
  are dropped as late. 0 is nobody's.
unapplied: The steps that earlier ones have completed, and that were given out
  and are not applied, rising.
taken: The places in their list of those of the tokens that the buffer has taken
  in its step or the one before, rising; empty if it counts late pushes.
step: A scalar: the steps given out.
)doc");

REGISTER_OP("RecsyncSpendTokens")
    .Input("buffer: resource")
    .Input("token_value: int64")
    .Input("token_indices: int64")
    .Input("ticket: int64") RECSYNC_AGGREGATE_OUTPUTS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(
          c, {{"token_value", 0}, {"token_indices", 1}, {"ticket", 0}}));
      return AggregateShape(c);
    })
    .Doc(
        R"doc(
Counts tokens that other servers have taken, and that nobody will push any more,
as pushes without gradients; gives out the step that they complete.

Those that the buffer has taken are not counted again, and nothing happens if
token_value is not its step.

buffer: A gradient buffer that drops late pushes.
token_value: A scalar, that of the tokens.
token_indices: Their places in their list.
ticket: A scalar, one that was revoked: if the step that they complete is not
  applied by who called this, RecsyncRevokeTickets tells of it.
)doc" RECSYNC_AGGREGATE_DOC);

REGISTER_OP("RecsyncBufferApplied")
    .Input("buffer: resource")
    .Input("ready: bool")
    .Input("step: int64")
    .Output("applied: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(
          CheckRanks(c, {{"buffer", 0}, {"ready", 0}, {"step", 0}}));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Tells a gradient buffer that a step which it gave out is applied.

Nothing happens if that is known already.

buffer: A gradient buffer.
ready: A scalar: whether a step was given out; if not, nothing changes.
step: A scalar, the number of that application.
applied: A scalar: the step up to which all of them are applied now.
)doc");

REGISTER_OP("RecsyncGradientBufferState")
    .Input("buffer: resource")
    .Output("counters: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckRanks(c, {{"buffer", 0}}));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads what a gradient buffer has counted.

buffer: A gradient buffer.
counters: A vector: the step; the step up to which all are applied; pushes that
  wait for others; pushes included (of a weight above 0), of these decayed (of
  a weight below 1), and excluded (of weight 0); late pushes and duplicates,
  which were dropped; tokens spent without a push; steps given out; the sum and the largest of the tokens'
  ages of included and excluded pushes; then staleness counters of these
  pushes, as of a variable: tau is the step minus pulled_step plus 1.
)doc");

REGISTER_OP("RecsyncRestoreBuffer")
    .Input("buffer: resource")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return CheckRanks(c, {{"buffer", 0}, {"step", 0}});
    })
    .Doc(R"doc(
Sets the step of a gradient buffer, all of it applied, and drops its pushes.

What was counted so far is kept. No application may be in progress.

buffer: A gradient buffer.
step: A scalar, at least 0.
)doc");

}  // namespace recsync
