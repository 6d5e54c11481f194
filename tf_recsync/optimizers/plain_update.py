"""An update in stock ops: for XLA, which knows no custom ops, other dtypes, and accelerators."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tf_recsync import staleness as staleness_lib


def in_xla_context() -> bool:
    """Whether XLA compiles what is being traced now."""
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def has_ops(device: str) -> bool:
    """Whether the ops of this package can use a variable on a device: they run on processors."""
    return tf.DeviceSpec.from_string(device).device_type in (None, "CPU")


def as_rows(gradient, shape) -> tuple[tf.Tensor, tf.Tensor]:
    """The gradient of a table as (values [n, ...], row ids [n])."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return tf.convert_to_tensor(gradient), tf.range(shape[0])


def named_rows(gradient: tf.Tensor) -> tf.Tensor:
    """Which rows of a table batches have named, bool [rows], by the gradient that Keras adds up.

    It is dense, and 0 elsewhere. What it is 0 of by chance is taken for a row that none has named.
    """
    return tf.reduce_any(gradient != 0, list(range(1, len(gradient.shape))))


def plain_update(
    optimizer: Any,
    state: Any,
    variable: Any,
    gradient: Any,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> None:
    """Applies a fresh gradient to one variable; a fresh gradient's weight is 1.

    Args:
        optimizer: an optimizer of this package.
        state: its `VariableState` of the variable.
        variable: what Keras hands the optimizer for the variable.
        gradient: a tensor or tf.IndexedSlices.
        learning_rate: a float32 scalar.
        step: the global step, an int64 scalar, counted from 1.
    """
    counted = optimizer.step_arguments(step)
    step = counted["global_step"]
    is_rounded = state.is_table and state.variable.dtype == "bfloat16"
    dtype = tf.as_dtype((state.accumulators or [state.variable])[0].dtype)
    if is_rounded:
        dtype = tf.float32
    rank = len(variable.shape)
    versions = state.versions.value
    if state.is_table:
        rows = variable.shape[0]
        values, ids = as_rows(gradient, state.variable.shape)
        if optimizer.gradient_accumulation_steps:
            ids = tf.where(named_rows(values), ids, -1)  # Those are dropped.
        gradient = tf.math.unsorted_segment_sum(tf.cast(values, dtype), ids, rows)
        touched = tf.math.unsorted_segment_sum(tf.ones_like(ids, tf.int32), ids, rows) > 0
        finite = tf.reduce_all(tf.math.is_finite(gradient), list(range(1, rank)))
    else:
        gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
        touched = tf.constant(True)
        finite = tf.reduce_all(tf.math.is_finite(gradient))
    skipped = tf.constant(0, tf.int64)
    if optimizer.nonfinite == "skip":
        skipped = tf.reduce_sum(tf.cast(touched & ~finite, tf.int64))
        touched &= finite
    elif optimizer.nonfinite == "error":
        _refuse_nonfinite(state, finite)

    def wide(per_row):
        # [rows] as [rows, 1, ...]; a dense variable's scalar as it is.
        return tf.reshape(per_row, [-1] + [1] * (rank - 1)) if state.is_table else per_row

    moved = touched
    if state.is_table and not optimizer.lazy:
        moved = tf.ones_like(touched)
        gradient = tf.where(wide(touched), gradient, tf.zeros([], dtype))
    decay = tf.ones([], dtype)
    if optimizer.swap:
        last_periods = state.last_periods[0].value
        last_period = tf.cast(last_periods.read_value(), tf.int64)
        swapped = step + counted["swap_offset"]
        # What is ahead goes on here: the global step has been set back.
        before = tf.maximum(swapped - 1, 0) // counted["swap_period"]
        last_period = tf.minimum(last_period, before)
        period = swapped // counted["swap_period"]
        # Beside rows they are counted as far as int32 goes, see cc/engine/swap.h.
        period = tf.minimum(period, last_periods.dtype.max)
        missed = tf.maximum(period - last_period, 0)
        decay = tf.cast(
            wide(tf.cast(optimizer.swap.decay, tf.float32) ** tf.cast(missed, tf.float32)), dtype
        )
        entered = tf.where(moved, tf.maximum(last_period, period), last_period)
        last_periods.assign(tf.cast(entered, last_periods.dtype))
    accumulators = [a.value for a in state.accumulators]
    last_step = None
    for last_steps in state.last_steps:
        last_step = tf.cast(last_steps.value.read_value(), tf.int64)
        # Steps likewise, see cc/engine/update_rules.h.
        most = last_steps.value.dtype.max
        last_step = tf.where((last_step == most) & (step > most), step - 1, last_step)
    before = [wide(a) for a in accumulators] if state.rowwise else accumulators
    new_accumulators, update = optimizer.plain_rule(
        before,
        gradient,
        tf.cast(learning_rate, dtype),
        decay,
        value=tf.cast(tf.convert_to_tensor(variable), dtype),
        step=step,
        last_step=None if last_step is None else wide(last_step),
    )
    for last_steps in state.last_steps:
        kept = tf.minimum(tf.where(moved, step, last_step), last_steps.value.dtype.max)
        last_steps.value.assign(tf.cast(kept, last_steps.value.dtype))
    mask = wide(moved)
    for accumulator, old, new in zip(accumulators, before, new_accumulators, strict=True):
        accumulator.assign(tf.reshape(tf.where(mask, new, old), accumulator.shape))
    # In the accumulators' type: a bfloat16 value is rounded once, at the end.
    new_value = tf.cast(tf.convert_to_tensor(variable), dtype) - update
    if is_rounded:
        rounded = _rounded(new_value, optimizer.rounding_seed(state.variable.path), step)
    else:
        rounded = tf.cast(new_value, variable.dtype)
    variable.assign(tf.where(mask, rounded, variable))
    if state.last_updates:
        axes = list(range(1, rank)) if state.is_table else None
        length = tf.sqrt(tf.reduce_sum(tf.square(tf.cast(update, tf.float32)), axes))
        last_update = state.last_updates[0].value
        last_update.assign(tf.where(touched, length, last_update))
    versions.assign_add(tf.cast(touched, tf.int64) + tf.zeros_like(versions))
    updates = tf.reduce_sum(tf.cast(touched, tf.int64))
    # count, sum, sum of squares, bucket 1, skipped; the maximum is 1.
    counters = state.counters.value
    places = [0, 1, 2, 5, staleness_lib.SKIPPED, staleness_lib.MAXIMUM]
    *counted, of_skipped, largest = tf.unstack(
        tf.one_hot(places, staleness_lib.COUNTERS, dtype=tf.int64)
    )
    added = updates * tf.add_n(counted) + skipped * of_skipped
    counters.assign(tf.maximum(counters + added, largest * tf.minimum(updates, 1)))


def _rounded(values: tf.Tensor, seed: int, step: tf.Tensor) -> tf.Tensor:
    """Floats as bfloat16, up or down so that on average nothing is lost.

    As cc/engine/row_rounding.h does it, by other random numbers.

    Args:
        values: float32.
        seed: an int64.
        step: an int64 scalar, another one for each update.
    """
    seeds = tf.stack([tf.constant(seed, tf.int64), step])
    random = tf.random.stateless_uniform(tf.shape(values), seeds, None, None, tf.uint32)
    # What is below the last place of a bfloat16 is the lower half of the float.
    bits = tf.bitcast(values, tf.uint32) + tf.bitwise.right_shift(random, 16)
    upper = tf.cast(tf.bitwise.right_shift(bits, 16), tf.uint16)
    is_nan = tf.math.is_nan(values)  # It could become an infinity.
    return tf.where(is_nan, tf.cast(values, tf.bfloat16), tf.bitcast(upper, tf.bfloat16))


def _refuse_nonfinite(state, finite):
    if in_xla_context():
        raise ValueError(
            'nonfinite must be "apply" or "skip" with jit_compile, which raises no errors, '
            'not "error"'
        )
    message = f"the gradient of {state.variable.path} is not finite"
    tf.debugging.assert_equal(tf.reduce_all(finite), True, message)
