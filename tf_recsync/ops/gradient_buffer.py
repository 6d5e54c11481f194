"""The ops of a parameter server's gradient buffer.

A buffer is a resource on the server's device; its handle is a tensor, which
functions on workers may use. `tf_recsync.synchronization.gradient_buffer` has
the class that owns one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tf_recsync import ops, staleness
from tf_recsync.ops.bags import PackedBags

# They only read the buffer: in a tf.function they wait for what was pushed
# before them, not for each other.
for _name in ("RecsyncGradientBufferStep", "RecsyncGradientBufferState"):
    if _name not in auto_control_deps_utils.RESOURCE_READ_OPS:
        auto_control_deps_utils.register_read_only_resource_op(_name)

for _name in (
    "RecsyncGradientBuffer",
    "RecsyncGradientBufferStep",
    "RecsyncPushToBuffer",
    "RecsyncFlushBuffer",
    "RecsyncSpendTokens",
    "RecsyncBufferApplied",
    "RecsyncGradientBufferState",
    "RecsyncRestoreBuffer",
):
    tf.no_gradient(_name)


class BufferStep(NamedTuple):
    """How far a buffer is.

    Attributes:
        step: int64 scalar, the steps that it has given out.
        applied: int64 scalar, the step up to which all of them are applied.
    """

    step: tf.Tensor
    applied: tf.Tensor


class Revoked(NamedTuple):
    """What a buffer has of one who is gone.

    Attributes:
        unapplied: int64 vector, the steps that its pushes have completed, and that are not applied
            yet, rising.
        taken: int64 vector, the places in their list of those of its tokens that the buffer has
            taken in its step or the one before, rising; empty if it counts late pushes.
        step: int64 scalar, the steps that it has given out.
    """

    unapplied: tf.Tensor
    taken: tf.Tensor
    step: tf.Tensor


class Aggregate(NamedTuple):
    """What a push or a flush gives out.

    It can be handed to an optimizer's `apply_dense` and `apply_rows` whether or
    not a step is ready: with none they are called with nothing to update.

    Attributes:
        ready: bool scalar, whether a step is given out.
        step: int64 scalar, the number of that application, from 1; if none is
            ready, of the one that is being collected.
        dense: float32 [dense size], the weighted sum of the dense gradients,
            divided; [0] if nothing is ready, or no push of a weight above 0 had one.
        dense_versions: int64 [dense variables], the oldest that were pulled;
            [0] without `dense`, and where gradients came without versions.
        values: float32, the sums of the rows of all tables, divided, flattened.
        rows: which rows they are, each of a table once.
        row_versions: int64 [n], the oldest that were pulled, or [0] as above.
    """

    ready: tf.Tensor
    step: tf.Tensor
    dense: tf.Tensor
    dense_versions: tf.Tensor
    values: tf.Tensor
    rows: PackedBags
    row_versions: tf.Tensor


def gradient_buffer(
    name: str,
    *,
    capacity: int,
    divisor: float,
    weight: staleness.Policy,
    drop_late: bool,
    dense_size: int,
    dense_count: int,
    table_rows: Sequence[int],
    table_widths: Sequence[int],
    container: str = "",
) -> tf.Tensor:
    """The buffer of this name on the current device, made if there is none.

    Args:
        name: a non-empty str.
        capacity: how many pushes make a step, an int of at least 1.
        divisor: what their sum is divided by, a positive float.
        weight: the weight of a push by its token's age; tau is the age plus 1.
        drop_late: whether pushes for a step before the buffer's, and tokens
            that its step has taken already, are dropped and not counted.
        dense_size: the elements of all dense variables.
        dense_count: the dense variables.
        table_rows: the rows of each table.
        table_widths: the floats of a row of each table.
        container: the resource container, the default one if empty.

    Returns:
        The handle, a resource tensor; `tf.raw_ops.DestroyResourceOp` destroys
        what it names.

    Raises:
        ValueError: if `name` is empty, or `weight` depends on more than the age.
        tf.errors.InvalidArgumentError: for another option out of range, or if
            there is a buffer of this name with other options.
    """
    if not name:
        raise ValueError(f"name must be a non-empty str, not {name!r}")
    attributes = weight.attributes()
    sensitivity = attributes.pop("update_sensitivity")
    rescales = attributes.pop("target_deviation") > 0
    del attributes["target_mean"], attributes["deviation_window"]
    if sensitivity >= 0 or rescales:
        raise ValueError(
            "weight must depend on the token's age alone, without update_sensitivity and "
            f"rescale, not {weight!r}"
        )
    return ops.library.recsync_gradient_buffer(
        container=container,
        shared_name=name,
        capacity=capacity,
        divisor=divisor,
        drop_late=drop_late,
        dense_size=dense_size,
        dense_count=dense_count,
        table_rows=list(table_rows),
        table_widths=list(table_widths),
        **attributes,
    )


def gradient_buffer_step(buffer: tf.Tensor) -> BufferStep:
    """Reads how far a buffer is.

    Read before the parameters, `applied` is a step that they have reached, and so
    the `pulled_step` of what is computed from them.
    """
    return BufferStep(*ops.library.recsync_gradient_buffer_step(buffer))


def push_to_buffer(
    buffer: tf.Tensor,
    token_index: tf.Tensor,
    token_value: tf.Tensor,
    pulled_step: tf.Tensor,
    dense: tf.Tensor | None = None,
    dense_versions: tf.Tensor | None = None,
    tables: Sequence[int] = (),
    values: tf.Tensor | None = None,
    rows: PackedBags | None = None,
    row_versions: tf.Tensor | None = None,
    ticket: int | tf.Tensor = 0,
) -> Aggregate:
    """Pushes gradients; gives out the step that they complete, if they do.

    Args:
        buffer: the handle.
        token_index: int64 scalar, the token's place in its list.
        token_value: int64 scalar, the step that the batch is meant for.
        pulled_step: int64 scalar, `applied` of the buffer when the parameters
            were pulled.
        dense: float32 [dense size], the gradients of all dense variables,
            flattened; None for none.
        dense_versions: int64 [dense variables] as pulled; None for fresh gradients.
        tables: which of the buffer's tables `rows` are of; one may stand there
            twice.
        values: float32, the gradients of the pooled vectors of `rows`, flattened,
            table after table; needed with `tables`.
        rows: what was looked up in `tables`; needed with them.
        row_versions: int64 [n], of `rows.ids`; None for fresh gradients.
        ticket: int64 scalar, the token's; 0 for none.

    Raises:
        ValueError: if `tables` come without `values` or `rows`, or the other way
            round.
        tf.errors.InvalidArgumentError: for an input out of range or of another
            shape; the buffer is as before then.
        tf.errors.NotFoundError: if the buffer is gone.
    """
    if not bool(tables) == (values is not None) == (rows is not None):
        raise ValueError(
            f"tables, values and rows must be given together, not tables={list(tables)} with "
            f"{'no ' if values is None else ''}values and {'no ' if rows is None else ''}rows"
        )

    def or_empty(tensor: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor:
        return tf.zeros([0], dtype) if tensor is None else tensor

    rows = rows or PackedBags(tf.zeros([0], tf.int64), tf.zeros([0], tf.int64))
    return _aggregate(
        ops.library.recsync_push_to_buffer(
            buffer,
            token_index,
            token_value,
            ticket,
            pulled_step,
            or_empty(dense, tf.float32),
            or_empty(dense_versions, tf.int64),
            or_empty(values, tf.float32),
            rows.ids,
            rows.counts,
            or_empty(rows.bags, tf.int32),
            or_empty(rows.scales, tf.float32),
            or_empty(rows.bag_counts, tf.int64),
            or_empty(row_versions, tf.int64),
            tables=list(tables),
        )
    )


def flush_buffer(buffer: tf.Tensor) -> Aggregate:
    """Gives out the pushes that a buffer holds, though its step is not full.

    Each weighs as in a step that is. Without pushes nothing is ready, and no step
    is counted.
    """
    return _aggregate(ops.library.recsync_flush_buffer(buffer))


def buffer_applied(buffer: tf.Tensor, ready: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Tells a buffer that what it gave out is applied; nothing if that is known already.

    Args:
        buffer: the handle.
        ready: bool scalar, as given out; with False nothing changes.
        step: int64 scalar, as given out.

    Returns:
        The step up to which all are applied now, an int64 scalar.

    Raises:
        tf.errors.InvalidArgumentError: if `step` was not given out.
    """
    return ops.library.recsync_buffer_applied(buffer, ready, step)


def spend_tokens(
    buffer: tf.Tensor,
    token_value: int | tf.Tensor,
    token_indices: tf.Tensor,
    ticket: int | tf.Tensor,
) -> Aggregate:
    """Counts tokens that other servers have taken as pushes without gradients.

    Args:
        buffer: the handle, of one that drops late pushes.
        token_value: int64 scalar, that of the tokens; if it is not the buffer's step, nothing
            happens.
        token_indices: int64 [n], their places in their list. Those that the buffer has taken are
            not counted again.
        ticket: int64 scalar, one that was revoked: `revoke_tickets` tells of the step that they
            complete, until it is applied.

    Raises:
        tf.errors.InvalidArgumentError: if the buffer counts late pushes.
    """
    return _aggregate(ops.library.recsync_spend_tokens(buffer, token_value, token_indices, ticket))


def revoke_tickets(buffer: tf.Tensor, tickets: tf.Tensor) -> Revoked:
    """Has a buffer drop pushes that come from now on from one who is gone.

    Args:
        buffer: the handle.
        tickets: int64 [n], of the tokens that it had.

    Returns:
        What became of its earlier pushes.
    """
    return Revoked(*ops.library.recsync_revoke_tickets(buffer, tickets))


def gradient_buffer_state(buffer: tf.Tensor) -> tf.Tensor:
    """The counters of a buffer, an int64 vector; see the op's documentation."""
    return ops.library.recsync_gradient_buffer_state(buffer)


def restore_buffer(buffer: tf.Tensor, step: tf.Tensor) -> tf.Operation:
    """Sets a buffer's step (int64 scalar, at least 0), all of it applied; drops its pushes."""
    return ops.library.recsync_restore_buffer(buffer, step)


def _aggregate(outputs) -> Aggregate:
    return Aggregate(
        ready=outputs.ready,
        step=outputs.step,
        dense=outputs.dense_sum,
        dense_versions=outputs.dense_sum_versions,
        values=outputs.row_sums,
        rows=PackedBags(outputs.row_counts, outputs.row_ids),
        row_versions=outputs.row_versions,
    )
