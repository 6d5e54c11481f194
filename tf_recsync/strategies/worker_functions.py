"""The functions that workers run, traced once for all workers.

Each takes the worker's iterator, the number of steps to run at most, and the
variables that the worker keeps for itself, and returns what became of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_recsync.synchronization.lookups import find_lookups
from tf_recsync.synchronization.pull_push import Layout, Step


def trace_steps(
    model: keras.Model,
    layout: Layout,
    method: str,
    element_spec: Any,
    steps_per_call: int,
    compute_time: float | None,
) -> Callable:
    """Traces `model.train_step` or `model.test_step` for the workers.

    Args:
        model: a built, compiled model.
        layout: its layout.
        method: "train_step" or "test_step".
        element_spec: the type spec of the batches that the workers' iterators yield.
        steps_per_call: the most steps that one call runs.
        compute_time: artificial compute time in seconds, or None.

    Returns:
        A concrete function of (iterator, limit: int64 scalar, *private) that
        returns [int64 [2]: (steps run, whether data may be left), *private].
        With `steps_per_call` 1 it runs exactly one step, and raises
        OutOfRangeError at the end of the data.

    Raises:
        ValueError: if the model's own step can't be run on workers.
    """
    is_training = method == "train_step"
    known = set(model.get_metrics_result())
    lookups = find_lookups(model, layout, method, element_spec)

    def one_step(data, private):
        step = Step(layout, private, lookups, data, compute_time if is_training else None)
        with step.computing():
            logs = getattr(model, method)(data)
        _check_logs(model, method, logs, known)
        if is_training and layout.optimizers and not step.pushed:
            raise ValueError(
                f"{type(model).__name__}.train_step applied no gradients; it has to call "
                "self.optimizer.apply_gradients or self.optimizer.apply"
            )
        return step.finish()

    def next_step(iterator, count, private):
        optional = iterator.get_next_as_optional()

        def run():
            kept, pushes = one_step(optional.get_value(), private)
            # The next step pulls when this one's pushes are applied.
            with tf.control_dependencies(pushes):
                return [tf.identity(count + 1), tf.constant(1, tf.int64), *map(tf.identity, kept)]

        def end():
            return [count, tf.constant(0, tf.int64), *private]

        return tf.cond(optional.has_value(), run, end)

    def one(iterator, limit, *private):
        del limit
        kept, pushes = one_step(iterator.get_next(), private)
        with tf.control_dependencies(pushes):
            return [tf.constant([1, 1], tf.int64), *map(tf.identity, kept)]

    def several(iterator, limit, *private):
        outcome = tf.while_loop(
            lambda count, more, *kept: tf.logical_and(count < limit, more > 0),
            lambda count, more, *kept: next_step(iterator, count, kept),
            [tf.constant(0, tf.int64), tf.constant(1, tf.int64), *private],
            parallel_iterations=1,
        )
        return [tf.stack(outcome[:2]), *outcome[2:]]

    private_specs = [tf.TensorSpec(v.shape, v.dtype) for v in layout.private]
    # A single step is spared the control flow, which spans all servers.
    steps = one if steps_per_call == 1 else several
    return tf.function(steps, autograph=False).get_concrete_function(
        tf.data.IteratorSpec(element_spec), tf.TensorSpec([], tf.int64), *private_specs
    )


def trace_predict(model: keras.Model, layout: Layout, element_spec: Any) -> Callable:
    """Traces `model.predict_step` for the workers.

    Returns:
        A concrete function of (iterator, *private) that returns (the batch's
        number, its outputs) and raises OutOfRangeError at the end of the data.
    """
    lookups = find_lookups(model, layout, "predict_step", element_spec[1])

    def predict(iterator, *private):
        number, data = iterator.get_next()
        step = Step(layout, private, lookups, data)
        with step.computing():
            outputs = model.predict_step(data)
        return number, outputs

    private_specs = [tf.TensorSpec(v.shape, v.dtype) for v in layout.private]
    return tf.function(predict, autograph=False).get_concrete_function(
        tf.data.IteratorSpec(element_spec), *private_specs
    )


def _check_logs(model, method, logs, known):
    """Metrics are kept per worker and merged; nothing else can be reported."""
    unknown = set(logs) - known if isinstance(logs, dict) else {repr(logs)}
    if unknown:
        raise ValueError(
            f"{type(model).__name__}.{method} must return the results of the model's metrics "
            f"({sorted(known)}), which can be merged over workers; it also returned "
            f"{sorted(unknown)}. Report them through a keras.metrics.Metric."
        )
