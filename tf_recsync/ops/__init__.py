"""The custom ops: the op library, loaded, and thin wrappers over it.

Importing this module registers the ops in the process, which is all that a
server has to do.
"""

from __future__ import annotations

import pathlib

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

_LIBRARY = pathlib.Path(__file__).resolve().parent.parent / "_recsync_ops.so"

if not _LIBRARY.exists():
    raise ImportError(f"tf_recsync's op library {_LIBRARY} was not built; reinstall tf_recsync.")
library = tf.load_op_library(str(_LIBRARY))

# Ops that only read their resources: tf.function may run them side by side and
# leave out the ones whose result nobody uses.
for _name in ("RecsyncPullDense", "RecsyncGatherRows", "RecsyncPullTable"):
    if _name not in auto_control_deps_utils.RESOURCE_READ_OPS:
        auto_control_deps_utils.register_read_only_resource_op(_name)

pull_dense = library.recsync_pull_dense
pull_table = library.recsync_pull_table
next_global_step = library.recsync_next_global_step
gather_rows = library.recsync_gather_rows
sgd_dense = library.recsync_sgd_dense
sgd_rows = library.recsync_sgd_rows
adagrad_dense = library.recsync_adagrad_dense
adagrad_rows = library.recsync_adagrad_rows
mean_normalize = library.recsync_mean_normalize
delay = library.recsync_delay
route_ids = library.recsync_route_ids
assemble = library.recsync_assemble

for _name in (
    "RecsyncPullDense",
    "RecsyncPullTable",
    "RecsyncNextGlobalStep",
    "RecsyncSgdDense",
    "RecsyncSgdRows",
    "RecsyncAdagradDense",
    "RecsyncAdagradRows",
    "RecsyncMeanNormalizeGrad",
    "RecsyncDelay",
    "RecsyncRouteIds",
    "RecsyncAssembleGrad",
):
    tf.no_gradient(_name)


@tf.RegisterGradient("RecsyncMeanNormalize")
def _mean_normalize_gradient(op, dy, _):
    """The gradient of the returned mean is not defined and taken as zero."""
    return library.recsync_mean_normalize_grad(
        dy, op.inputs[0], op.inputs[1], op.outputs[1], epsilon=op.get_attr("epsilon")
    )


@tf.RegisterGradient("RecsyncGatherRows")
def _gather_rows_gradient(op, packed, _):
    """Rows of each table, as the gradient of a stock gather is."""
    n = op.get_attr("N")
    indices, counts = op.inputs[2 * n], op.inputs[2 * n + 1]
    ids = tf.split(indices, counts, num=n)
    shapes = [_variable_shape(op.inputs[i]) for i in range(n)]
    sizes = tf.stack(
        [counts[i] * tf.cast(tf.reduce_prod(shapes[i][1:]), tf.int64) for i in range(n)]
    )
    values = tf.split(packed, sizes, num=n)
    slices = [
        tf.IndexedSlices(
            tf.reshape(values[i], tf.concat([[-1], shapes[i][1:]], 0)), ids[i], shapes[i]
        )
        for i in range(n)
    ]
    return [*slices, *[None] * n, None, None]


def _variable_shape(handle):
    return tf.raw_ops.VariableShape(input=handle)


@tf.RegisterGradient("RecsyncAssemble")
def _assemble_gradient(op, gradient):
    count = op.get_attr("P")
    pooled, slots = op.inputs[1 : 1 + count], op.inputs[1 + count :]
    parts = library.recsync_assemble_grad(
        gradient,
        slots,
        dimensions=op.get_attr("dimensions"),
        table_dimensions=[p.shape[1] for p in pooled],
    )
    return [None, *parts, *[None] * count]
