"""The functions that workers run, traced once for all workers.

Each takes the worker's iterator, its index, and handles of the variables that
it keeps for itself; all of them stay on the worker, so that a call takes and
returns next to nothing.
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
        steps_per_call: how many steps one call runs. They are unrolled: a loop
            would span all servers.
        compute_time: artificial compute time in seconds, or None.

    Returns:
        A concrete function of (iterator, the worker's index, handle of the
        worker's count of steps, *handles of the worker's private variables) that
        runs the steps, returns nothing, and raises OutOfRangeError at the end of
        the data. The index is an int64 scalar. The count then tells how many
        steps it ran; for single steps it is not kept.

    Raises:
        ValueError: if the model's own step can't be run on workers.
    """
    is_training = method == "train_step"
    # What Keras's own steps return, or {m.name: m.result() for m in self.metrics}.
    known = {*model.get_metrics_result(), *(metric.name for metric in model.metrics)}
    lookups = find_lookups(model, layout, method, element_spec)

    def run_step(data, worker, handles) -> list[tf.Operation]:
        private = [_read(h, v) for h, v in zip(handles, layout.private, strict=True)]
        step = Step(layout, private, lookups, data, worker, compute_time if is_training else None)
        with step.computing():
            logs = getattr(model, method)(data)
        _check_logs(model, method, logs, known)
        if is_training and layout.optimizers and not step.pushed:
            raise ValueError(
                f"{type(model).__name__}.train_step applied no gradients; it has to call "
                "self.optimizer.apply_gradients or self.optimizer.apply"
            )
        kept, operations = step.finish()
        for handle, old, new in zip(handles, private, kept, strict=True):
            if new is not old:
                operations.append(tf.raw_ops.AssignVariableOp(resource=handle, value=new))
        return operations

    def steps(iterator, worker, count, *handles):
        operations: list[tf.Operation] = []
        for _ in range(steps_per_call):
            # The next step pulls when this one's pushes are applied.
            with tf.control_dependencies(operations):
                batch = iterator.get_next()
            # Without a batch nothing may happen, not even what needs none of it.
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                # One message from each server says that all is done there.
                operations = [tf.group(*run_step(batch, worker, handles))]
            if steps_per_call > 1:
                with tf.control_dependencies(operations):
                    one = tf.ones([], tf.int64)
                    operations = [tf.raw_ops.AssignAddVariableOp(resource=count, value=one)]
        with tf.control_dependencies(operations):
            tf.no_op()

    return tf.function(steps, autograph=False).get_concrete_function(
        tf.data.IteratorSpec(element_spec), *_worker_specs(layout)
    )


def trace_predict(model: keras.Model, layout: Layout, element_spec: Any) -> Callable:
    """Traces `model.predict_step` for the workers.

    Returns:
        A concrete function of the same arguments as those of `trace_steps` that
        returns (the batch's number, its outputs) and raises OutOfRangeError at
        the end of the data.
    """
    lookups = find_lookups(model, layout, "predict_step", element_spec[1])

    def predict(iterator, worker, count, *handles):
        del count
        number, data = iterator.get_next()
        private = [_read(h, v) for h, v in zip(handles, layout.private, strict=True)]
        step = Step(layout, private, lookups, data, worker)
        with step.computing():
            outputs = model.predict_step(data)
        return number, outputs

    return tf.function(predict, autograph=False).get_concrete_function(
        tf.data.IteratorSpec(element_spec), *_worker_specs(layout)
    )


def _worker_specs(layout: Layout) -> list[tf.TensorSpec]:
    """The worker's index, the count of steps, and the private variables."""
    handles = [tf.TensorSpec([], tf.resource) for _ in range(1 + len(layout.private))]
    return [tf.TensorSpec([], tf.int64), *handles]


def _read(handle: tf.Tensor, like: keras.Variable) -> tf.Tensor:
    """The value of a worker's own copy of a variable."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=like._value.dtype)
    return tf.ensure_shape(value, like.shape)


def _check_logs(model, method, logs, known):
    """Metrics are kept per worker and merged; nothing else can be reported."""
    unknown = set(logs) - known if isinstance(logs, dict) else {repr(logs)}
    if unknown:
        raise ValueError(
            f"{type(model).__name__}.{method} must return the results of the model's metrics "
            f"({sorted(known)}), which can be merged over workers; it also returned "
            f"{sorted(unknown)}. Report them through a keras.metrics.Metric."
        )
