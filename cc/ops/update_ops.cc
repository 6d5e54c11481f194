// Ops that apply pushed gradients on the server that holds the variables.

#include <string>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace recsync {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Checks the rank of the inputs named in `scalars` and `vectors`.
absl::Status CheckRanks(InferenceContext* c,
                        const std::vector<std::string>& scalars,
                        const std::vector<std::string>& vectors) {
  ShapeHandle unused;
  std::vector<ShapeHandle> shapes;
  for (const std::string& name : scalars) {
    TF_RETURN_IF_ERROR(c->input(name, &shapes));
    TF_RETURN_IF_ERROR(c->WithRank(shapes[0], 0, &unused));
  }
  for (const std::string& name : vectors) {
    TF_RETURN_IF_ERROR(c->input(name, &shapes));
    TF_RETURN_IF_ERROR(c->WithRank(shapes[0], 1, &unused));
  }
  return absl::OkStatus();
}

absl::Status DenseUpdateShape(InferenceContext* c) {
  return CheckRanks(c, {"learning_rate", "global_step"},
                    {"gradient", "pulled_versions"});
}

absl::Status RowsUpdateShape(InferenceContext* c) {
  return CheckRanks(c, {"learning_rate", "global_step"},
                    {"gradient", "indices", "counts", "bags", "scales",
                     "bag_counts", "pulled_versions"});
}

}  // namespace

#define RECSYNC_UPDATE_ATTRIBUTES                    \
  Attr("num_swap: int >= 0")                         \
      .Attr("num_measured: int >= 0")                \
      .Attr("T: {float, half, bfloat16} = DT_FLOAT") \
      .Attr("swap_period: int = 0")                  \
      .Attr("swap_decay: float = 1.0")               \
      .Attr("swap_offset: int = 0")                  \
      .Attr("staleness_decay: string = 'constant'")  \
      .Attr("staleness_power: float = 2.0")          \
      .Attr("staleness_baseline: float = 1.0")       \
      .Attr("staleness_normalized: bool = true")     \
      .Attr("staleness_iota: float = 0.0")           \
      .Attr("update_sensitivity: float = -1.0")      \
      .Attr("target_deviation: float = 0.0")         \
      .Attr("target_mean: float = 0.0")              \
      .Attr("deviation_window: int = 1000")          \
      .Attr("nonfinite: string = 'apply'")           \
      .Attr("names: list(string) = []")

// And those of updates of rows.
#define RECSYNC_ROWS_ATTRIBUTES         \
  Attr("num_decayed: int >= 0 = 0")     \
      .Attr("decayed: list(int) = []")  \
      .Attr("rounding: list(int) = []") \
      .RECSYNC_UPDATE_ATTRIBUTES

#define RECSYNC_COMMON_DOC                                                     \
  "\nlearning_rate: A scalar.\n"                                               \
  "global_step: A scalar, counted from 1: what SWAP's period refers to.\n"     \
  "swap_period: T of SWAP in global steps; 0 switches it off.\n"               \
  "swap_decay: lambda_0 of SWAP, in (0, 1].\n"                                 \
  "swap_offset: What is added to the global step before periods are counted "  \
  "in it; the sum must be at least 0.\n"                                       \
  "staleness_decay: rho(tau): 'constant' (1), 'inverse_power' or "             \
  "'threshold'.\n"                                                             \
  "staleness_power: k of the inverse power.\n"                                 \
  "staleness_baseline: mu, the staleness up to which rho is 1; at least 1.\n"  \
  "staleness_normalized: true for (mu / tau)^k, false for tau^-k.\n"           \
  "staleness_iota: the largest age tau - 1 that a threshold lets pass.\n"      \
  "update_sensitivity: lambda: rho is taken at tau sigmoid(lambda |dw|); "     \
  "negative switches it off.\n"                                                \
  "target_deviation: delta' that tau is rescaled to, by the deviation "        \
  "measured; 0 switches it off.\n"                                             \
  "target_mean: mu' of the full rescaling delta' (tau - mu) / delta + mu'; 0 " \
  "for the paper's simplified delta' tau / delta.\n"                           \
  "deviation_window: The pushes that the deviation and mean of tau are "       \
  "measured in, or up to twice as many: earlier ones are forgotten.\n"         \
  "nonfinite: What becomes of a variable or row whose gradient holds an "      \
  "infinity or no number: 'apply' applies it, 'skip' leaves the variable or "  \
  "row as it is and counts that, 'error' refuses the whole push.\n"            \
  "names: Of the variables, for the error of nonfinite; none, or each "        \
  "one's.\n"

#define RECSYNC_DENSE_DOC                                                     \
  "\n"                                                                        \
  "Each variable i of N is updated under its own lock by its piece of the "   \
  "packed gradient, weighted by rho(tau) with tau = versions[i] - "           \
  "pulled_versions[i] + 1; then versions[i] rises by one and tau is counted " \
  "in counters[i]. With a weight of 0, tau is counted and nothing else "      \
  "happens.\n"                                                                \
  "\n"                                                                        \
  "versions: int64 scalars.\n"                                                \
  "counters: int64 vectors of staleness statistics.\n"                        \
  "last_periods: int64 scalars, the last SWAP period applied; none without "  \
  "SWAP.\n"                                                                   \
  "last_updates: float scalars, the length of the last update; none without " \
  "update_sensitivity.\n"                                                     \
  "gradient: A vector: the variables' gradients, flattened, one after the "   \
  "other; or empty: nothing is updated or counted, and no version rises.\n"   \
  "pulled_versions: [N], or empty for gradients of the current values (tau "  \
  "is 1), which no push of a later global step has come before.\n"            \
  "hogwild: Updates side by side, each element without a lock: two that "     \
  "write the same element at once may lose one of the updates."

#define RECSYNC_ROWS_DOC                                                       \
  "\n"                                                                         \
  "Rows of N tables, packed: first the rows of table 0, then those of table "  \
  "1, and so on. Positions that name the same row of a table are summed "      \
  "first, so that each row is updated once, weighted by rho(tau) of the "      \
  "oldest version it was pulled at; its version rises by one and its tau is "  \
  "counted. With a weight of 0, tau is counted and the row stays as it is, "   \
  "but for what a step does to all rows. "                                     \
  "The rows of a table are updated in parallel.\n"                             \
  "\n"                                                                         \
  "versions: int64 [rows] for each table.\n"                                   \
  "counters: int64 vectors of staleness statistics.\n"                         \
  "last_periods: int32 [rows], the last SWAP period applied, at most "         \
  "2^31 - 1; none without SWAP.\n"                                             \
  "last_updates: float [rows], the length of the last update; none without "   \
  "update_sensitivity.\n"                                                      \
  "log_decays: double [rows + 2] of tables whose weights decay, see "          \
  "RecsyncDecayWeights: a row is decayed before it is updated.\n"              \
  "decayed: The numbers of those tables, rising.\n"                            \
  "rounding: How rows of bfloat16 tables are rounded, which is up or down by " \
  "random numbers that depend on a seed, the row's number in its table, its "  \
  "version (and the step, of rows that are not named) and the column: for "    \
  "each piece of a table five "                                                \
  "numbers, the table's, that of the piece's first row here, the one that "    \
  "this row has in its table, how far apart there the piece's rows are, and "  \
  "the seed. The pieces of a table begin with row 0 and follow one another; "  \
  "without any, it is a table as a whole, with the seed 0.\n"                  \
  "gradient: A vector: for each table the gradients [bags, width] of its "     \
  "bags, flattened, one after the other.\n"                                    \
  "indices: [n], row ids; an error where one is out of its table's range.\n"   \
  "counts: [N], how many of the indices belong to each table.\n"               \
  "bags: [n], or empty without bag_counts: the bag of its table that each "    \
  "index belongs to; within a table they do not decrease. The gradient of "    \
  "index p is scales[p] times that of bags[p].\n"                              \
  "scales: [n], or empty for 1: the weight of each index in its bag.\n"        \
  "bag_counts: [N], the number of bags of each table, or empty: every index "  \
  "is a bag of its own.\n"                                                     \
  "pulled_versions: [n], or empty for gradients of the current values (tau "   \
  "is 1), which no push of a later global step has come before."

REGISTER_OP("RecsyncSgdDense")
    .Input("variables: N * resource")
    .Input("versions: N * resource")
    .Input("counters: N * resource")
    .Input("last_periods: num_swap * resource")
    .Input("last_updates: num_measured * resource")
    .Input("gradient: T")
    .Input("pulled_versions: int64")
    .Input("learning_rate: float")
    .Input("global_step: int64")
    .Attr("N: int >= 1")
    .Attr("hogwild: bool = false")
    .RECSYNC_UPDATE_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(DenseUpdateShape)
    .Doc(
        "Applies staleness-weighted SGD to dense variables.\n" RECSYNC_DENSE_DOC
            RECSYNC_COMMON_DOC);

REGISTER_OP("RecsyncSgdRows")
    .Input("variables: N * resource")
    .Input("versions: N * resource")
    .Input("counters: N * resource")
    .Input("last_periods: num_swap * resource")
    .Input("last_updates: num_measured * resource")
    .Input("log_decays: num_decayed * resource")
    .Input("gradient: T")
    .Input("indices: Tindices")
    .Input("counts: int64")
    .Input("bags: int32")
    .Input("scales: float")
    .Input("bag_counts: int64")
    .Input("pulled_versions: int64")
    .Input("learning_rate: float")
    .Input("global_step: int64")
    .Attr("N: int >= 1")
    .Attr("Tindices: {int32, int64}")
    .RECSYNC_ROWS_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(RowsUpdateShape)
    .Doc("Applies staleness-weighted SGD to rows of tables.\n" RECSYNC_ROWS_DOC
             RECSYNC_COMMON_DOC);

REGISTER_OP("RecsyncAdagradDense")
    .Input("variables: N * resource")
    .Input("accumulators: N * resource")
    .Input("versions: N * resource")
    .Input("counters: N * resource")
    .Input("last_periods: num_swap * resource")
    .Input("last_updates: num_measured * resource")
    .Input("gradient: T")
    .Input("pulled_versions: int64")
    .Input("learning_rate: float")
    .Input("global_step: int64")
    .Attr("N: int >= 1")
    .Attr("epsilon: float = 1e-7")
    .Attr("hogwild: bool = false")
    .RECSYNC_UPDATE_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(DenseUpdateShape)
    .Doc(
        "Applies staleness-weighted Adagrad, with SWAP, to dense "
        "variables.\n" RECSYNC_DENSE_DOC
        "\naccumulators: float, shaped like the variables.\n"
        "epsilon: Added to the accumulator under the root." RECSYNC_COMMON_DOC);

// The two differ only in the shape of the accumulators and in what is added.
#define RECSYNC_ADAGRAD_ROWS(name)                    \
  REGISTER_OP(name)                                   \
      .Input("variables: N * resource")               \
      .Input("accumulators: N * resource")            \
      .Input("versions: N * resource")                \
      .Input("counters: N * resource")                \
      .Input("last_periods: num_swap * resource")     \
      .Input("last_updates: num_measured * resource") \
      .Input("log_decays: num_decayed * resource")    \
      .Input("gradient: T")                           \
      .Input("indices: Tindices")                     \
      .Input("counts: int64")                         \
      .Input("bags: int32")                           \
      .Input("scales: float")                         \
      .Input("bag_counts: int64")                     \
      .Input("pulled_versions: int64")                \
      .Input("learning_rate: float")                  \
      .Input("global_step: int64")                    \
      .Attr("N: int >= 1")                            \
      .Attr("Tindices: {int32, int64}")               \
      .Attr("epsilon: float = 1e-7")                  \
      .RECSYNC_ROWS_ATTRIBUTES.SetIsStateful()        \
      .SetShapeFn(RowsUpdateShape)

RECSYNC_ADAGRAD_ROWS("RecsyncAdagradRows")
    .Doc(
        "Applies staleness-weighted Adagrad, with SWAP, to rows of a "
        "table.\n" RECSYNC_ROWS_DOC
        "\naccumulators: float, shaped like the tables.\n"
        "epsilon: Added to the accumulator under the root." RECSYNC_COMMON_DOC);

RECSYNC_ADAGRAD_ROWS("RecsyncRowwiseAdagradRows")
    .Doc(
        "Applies staleness-weighted Adagrad, with SWAP and one accumulator for "
        "each row, to rows of a table.\n" RECSYNC_ROWS_DOC
        "\naccumulators: float [rows], to which the mean of the squares of the "
        "row's weighted gradient is added.\n"
        "epsilon: Added to the accumulator under the root." RECSYNC_COMMON_DOC);

#undef RECSYNC_ADAGRAD_ROWS

REGISTER_OP("RecsyncAdamDense")
    .Input("variables: N * resource")
    .Input("momentums: N * resource")
    .Input("velocities: N * resource")
    .Input("versions: N * resource")
    .Input("counters: N * resource")
    .Input("last_periods: num_swap * resource")
    .Input("last_updates: num_measured * resource")
    .Input("last_steps: N * resource")
    .Input("gradient: T")
    .Input("pulled_versions: int64")
    .Input("learning_rate: float")
    .Input("global_step: int64")
    .Attr("N: int >= 1")
    .Attr("beta_1: float = 0.9")
    .Attr("beta_2: float = 0.999")
    .Attr("epsilon: float = 1e-7")
    .Attr("hogwild: bool = false")
    .RECSYNC_UPDATE_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(DenseUpdateShape)
    .Doc(
        "Applies staleness-weighted Adam, with SWAP, to dense "
        "variables.\n" RECSYNC_DENSE_DOC
        "\nmomentums: float, shaped like the variables: first moments.\n"
        "velocities: float, like them: second moments, which SWAP decays.\n"
        "last_steps: int64 scalars, the global step of the last update: the "
        "moments are decayed for the steps since.\n"
        "beta_1: The decay of the first moment in a step, in [0, 1).\n"
        "beta_2: That of the second moment.\n"
        "epsilon: Added to the root of the second moment." RECSYNC_COMMON_DOC);

REGISTER_OP("RecsyncAdamRows")
    .Input("variables: N * resource")
    .Input("momentums: N * resource")
    .Input("velocities: N * resource")
    .Input("versions: N * resource")
    .Input("counters: N * resource")
    .Input("last_periods: num_swap * resource")
    .Input("last_updates: num_measured * resource")
    .Input("last_steps: N * resource")
    .Input("log_decays: num_decayed * resource")
    .Input("gradient: T")
    .Input("indices: Tindices")
    .Input("counts: int64")
    .Input("bags: int32")
    .Input("scales: float")
    .Input("bag_counts: int64")
    .Input("pulled_versions: int64")
    .Input("learning_rate: float")
    .Input("global_step: int64")
    .Attr("N: int >= 1")
    .Attr("Tindices: {int32, int64}")
    .Attr("beta_1: float = 0.9")
    .Attr("beta_2: float = 0.999")
    .Attr("epsilon: float = 1e-7")
    .Attr("lazy: bool = true")
    .Attr("several_counters: bool = false")
    .RECSYNC_ROWS_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(RowsUpdateShape)
    .Doc(
        "Applies staleness-weighted Adam, with SWAP, to rows of "
        "tables.\n" RECSYNC_ROWS_DOC
        "\nmomentums: float, shaped like the variables: first moments.\n"
        "velocities: float, like them: second moments, which SWAP decays.\n"
        "last_steps: int32 [rows], the global step of the last update, at most "
        "2^31 - 1: the moments are decayed for the steps since. Later steps "
        "count as one each.\n"
        "beta_1: The decay of the first moment in a step, in [0, 1).\n"
        "beta_2: That of the second moment.\n"
        "epsilon: Added to the root of the second moment.\n"
        "lazy: Whether rows that are not named stay where they are; else all "
        "rows of the tables make each step.\n"
        "several_counters: Whether the tables are also updated by others, who "
        "count their global steps apart: then each update is a step after the "
        "last one at least." RECSYNC_COMMON_DOC);

REGISTER_OP("RecsyncFtrlDense")
    .Input("variables: N * resource")
    .Input("accumulators: N * resource")
    .Input("linears: N * resource")
    .Input("versions: N * resource")
    .Input("counters: N * resource")
    .Input("last_periods: num_swap * resource")
    .Input("last_updates: num_measured * resource")
    .Input("gradient: T")
    .Input("pulled_versions: int64")
    .Input("learning_rate: float")
    .Input("global_step: int64")
    .Attr("N: int >= 1")
    .Attr("learning_rate_power: float = -0.5")
    .Attr("l1: float = 0.0")
    .Attr("l2: float = 0.0")
    .Attr("beta: float = 0.0")
    .Attr("hogwild: bool = false")
    .RECSYNC_UPDATE_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(DenseUpdateShape)
    .Doc(
        "Applies staleness-weighted FTRL-Proximal, with SWAP, to dense "
        "variables.\n" RECSYNC_DENSE_DOC
        "\naccumulators: float, shaped like the variables: sums of squares, "
        "which SWAP decays.\n"
        "linears: float, like them.\n"
        "learning_rate_power: At most 0; -0.5 takes the root of the sums.\n"
        "l1: The strength of the l1 regularization.\n"
        "l2: That of the l2 regularization.\n"
        "beta: Adds beta / (2 learning_rate) to l2." RECSYNC_COMMON_DOC);

REGISTER_OP("RecsyncFtrlRows")
    .Input("variables: N * resource")
    .Input("accumulators: N * resource")
    .Input("linears: N * resource")
    .Input("versions: N * resource")
    .Input("counters: N * resource")
    .Input("last_periods: num_swap * resource")
    .Input("last_updates: num_measured * resource")
    .Input("log_decays: num_decayed * resource")
    .Input("gradient: T")
    .Input("indices: Tindices")
    .Input("counts: int64")
    .Input("bags: int32")
    .Input("scales: float")
    .Input("bag_counts: int64")
    .Input("pulled_versions: int64")
    .Input("learning_rate: float")
    .Input("global_step: int64")
    .Attr("N: int >= 1")
    .Attr("Tindices: {int32, int64}")
    .Attr("learning_rate_power: float = -0.5")
    .Attr("l1: float = 0.0")
    .Attr("l2: float = 0.0")
    .Attr("beta: float = 0.0")
    .RECSYNC_ROWS_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(RowsUpdateShape)
    .Doc(
        "Applies staleness-weighted FTRL-Proximal, with SWAP, to rows of "
        "tables.\n" RECSYNC_ROWS_DOC
        "\naccumulators: float, shaped like the variables: sums of squares, "
        "which SWAP decays.\n"
        "linears: float, like them.\n"
        "learning_rate_power: At most 0; -0.5 takes the root of the sums.\n"
        "l1: The strength of the l1 regularization.\n"
        "l2: That of the l2 regularization.\n"
        "beta: Adds beta / (2 learning_rate) to l2." RECSYNC_COMMON_DOC);

}  // namespace recsync
