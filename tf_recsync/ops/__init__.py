"""The custom ops: the op library, loaded, and thin wrappers over it.

Importing this module registers the ops in the process, which is all that a
server has to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tf_recsync.ops import compression, packing
from tf_recsync.ops._library import library
from tf_recsync.ops.bags import Bags, PackedBags

# Ops that only read their resources: tf.function may run them side by side and
# leave out the ones whose result nobody uses.
for _name in (
    *("RecsyncPullDense", "RecsyncGatherRows", "RecsyncCopyRows", "RecsyncChangedRows"),
    *("RecsyncPullTable", "RecsyncSnapshot"),
):
    if _name not in auto_control_deps_utils.RESOURCE_READ_OPS:
        auto_control_deps_utils.register_read_only_resource_op(_name)

encode_int8 = compression.encode_int8
decode_int8 = compression.decode_int8
compress_gradient = compression.compress_gradient
restore_gradient = compression.restore_gradient
pack = packing.pack
unpack = packing.unpack
pull_dense = packing.pull_dense
changed_rows = library.recsync_changed_rows
decay_weights = library.recsync_decay_weights
settle_decay = library.recsync_settle_decay
next_global_step = library.recsync_next_global_step
snapshot = library.recsync_snapshot
interpolate = library.recsync_interpolate
sgd_dense = library.recsync_sgd_dense
adagrad_dense = library.recsync_adagrad_dense
adam_dense = library.recsync_adam_dense
ftrl_dense = library.recsync_ftrl_dense
mean_normalize = library.recsync_mean_normalize
add_log_loss = library.recsync_add_log_loss
add_scores = library.recsync_add_scores
area_under_curve = library.recsync_area_under_curve
delay = library.recsync_delay
computed = library.recsync_computed
reserved = library.recsync_reserved
server_threads = library.recsync_server_threads
resident_memory = library.recsync_resident_memory
worker_board = library.recsync_worker_board
board_row = library.recsync_board_row
count_step = library.recsync_count_step
read_row = library.recsync_read_row
report = library.recsync_report
report_is_due = library.recsync_report_is_due
read_board = library.recsync_read_board
tell_workers = library.recsync_tell_workers
worker_log = library.recsync_worker_log
note_batch = library.recsync_note_batch
noted_batches = library.recsync_noted_batches
read_packed = library.recsync_read_packed
limit_parallelism = library.recsync_limit_parallelism
route_ids = library.recsync_route_ids
assemble = library.recsync_assemble
initial_rows = library.recsync_initial_rows
find_rows = library.recsync_find_rows
used_rows = library.recsync_used_rows
key_sizes = library.recsync_key_sizes


def transfer(message: tf.Tensor, bytes_per_second: tf.Tensor | float) -> tf.Tensor:
    """Has a message pass a link once for each call, see `RecsyncTransfer`."""
    passage = ""
    if not tf.executing_eagerly():
        passage = tf.compat.v1.get_default_graph().unique_name("recsync_passage")
    return library.recsync_transfer(message, bytes_per_second, passage=passage)


def _undecayed(op: Callable) -> Callable:
    """An op on rows of tables whose weights do not decay by default."""

    @functools.wraps(op)
    def call(*args, log_decays=(), decayed=(), **kwargs):
        return op(*args, log_decays=list(log_decays), decayed=list(decayed), **kwargs)

    return call


def _unpooled(op: Callable) -> Callable:
    """The same, in which every index is a bag of its own by default."""
    op = _undecayed(op)

    @functools.wraps(op)
    def call(*args, bags=None, scales=None, bag_counts=None, **kwargs):
        return op(
            *args,
            bags=_NO_BAGS if bags is None else bags,
            scales=_NO_SCALES if scales is None else scales,
            bag_counts=_NO_COUNTS if bag_counts is None else bag_counts,
            **kwargs,
        )

    return call


_NO_BAGS = np.zeros([0], np.int32)
_NO_SCALES = np.zeros([0], np.float32)
_NO_COUNTS = np.zeros([0], np.int64)

pull_table = _undecayed(library.recsync_pull_table)
copy_rows = _undecayed(library.recsync_copy_rows)
gather_rows = _unpooled(library.recsync_gather_rows)
sgd_rows = _unpooled(library.recsync_sgd_rows)
adagrad_rows = _unpooled(library.recsync_adagrad_rows)
rowwise_adagrad_rows = _unpooled(library.recsync_rowwise_adagrad_rows)
adam_rows = _unpooled(library.recsync_adam_rows)
ftrl_rows = _unpooled(library.recsync_ftrl_rows)

for _name in (
    "RecsyncPullDense",
    "RecsyncPullTable",
    "RecsyncCopyRows",
    "RecsyncChangedRows",
    "RecsyncDecayWeights",
    "RecsyncSettleDecay",
    "RecsyncNextGlobalStep",
    "RecsyncSnapshot",
    "RecsyncInterpolate",
    "RecsyncSgdDense",
    "RecsyncSgdRows",
    "RecsyncAdagradDense",
    "RecsyncAdagradRows",
    "RecsyncRowwiseAdagradRows",
    "RecsyncAdamDense",
    "RecsyncAdamRows",
    "RecsyncFtrlDense",
    "RecsyncFtrlRows",
    "RecsyncMeanNormalizeGrad",
    "RecsyncAddLogLoss",
    "RecsyncAddScores",
    "RecsyncAreaUnderCurve",
    "RecsyncDelay",
    "RecsyncTransfer",
    "RecsyncServerThreads",
    "RecsyncNoteBatch",
    "RecsyncNotedBatches",
    "RecsyncReadPacked",
    "RecsyncRouteIds",
    "RecsyncAssembleGrad",
    "RecsyncInitialRows",
    "RecsyncFindRows",
    "RecsyncUsedRows",
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
    """Rows of each table, as the gradient of a stock gather is; none of `scales`.

    Each carries the gradient of the pooled vectors, too, from which it was computed (`lookup_of`).
    """
    n, first = op.get_attr("N"), op.get_attr("N") + op.get_attr("V")
    indices, counts, bags, scales, bag_counts = op.inputs[first : first + 5]
    scales = None if scales.shape[0] == 0 else scales
    given = PackedBags(counts, indices, scales=scales)
    if bag_counts.shape[0] != 0:
        given = PackedBags(counts, indices, bags, scales, bag_counts)
    shapes = [_variable_shape(op.inputs[i]) for i in range(n)]
    widths = tf.stack([tf.cast(tf.reduce_prod(shape[1:]), tf.int64) for shape in shapes])
    gradients = tf.split(packed, given.sizes * widths, num=n)
    slices = []
    for own, gradient, shape in zip(given.unpack(n), gradients, shapes, strict=True):
        wide = tf.reshape(gradient, tf.concat([[-1], shape[1:]], 0))
        one = tf.IndexedSlices(own.expand(wide), own.ids, shape)
        # An attribute, as whatever changes the gradient makes another object, without it.
        one.lookup = gradient, own
        slices.append(one)
    return [*slices, *[None] * (len(op.inputs) - n)]


def lookup_of(gradient: tf.IndexedSlices) -> tuple[tf.Tensor, Bags] | None:
    """What the gradient of a table was computed from, if it comes from `gather_rows` unchanged.

    Args:
        gradient: the gradient of a table.

    Returns:
        The flat gradient of the pooled vectors, and the bags; None if the gradient is another.
    """
    return getattr(gradient, "lookup", None)


def _variable_shape(handle):
    return tf.raw_ops.VariableShape(input=handle)


@tf.RegisterGradient("RecsyncAssemble")
def _assemble_gradient(op, gradient):
    count = op.get_attr("P")
    pooled = op.inputs[1 : 1 + count]
    slots, sources = op.inputs[1 + count : 1 + 2 * count], op.inputs[1 + 2 * count :]
    parts = library.recsync_assemble_grad(
        gradient,
        tf.stack([tf.shape(p)[0] for p in pooled]),
        slots,
        sources,
        dimensions=op.get_attr("dimensions"),
        table_dimensions=[p.shape[1] for p in pooled],
    )
    return [None, *parts, *[None] * (2 * count)]
