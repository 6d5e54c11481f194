"""Measures what the units of a training step of a Keras model cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

from tf_recsync._checks import check_at_least
from tf_recsync.placement.graph import StepGraph
from tf_recsync.placement.model_graph import DifferentiatedStep, differentiated, slots_of
from tf_recsync.placement.model_trace import TracedUnit

_PASSES = 3  # Runs of each batch; the fastest time of each op counts.
_WARM_UP = 2


def profile(
    model: keras.Model, batches: Iterable[Any], *, steps: int = 20, slots: int | None = None
) -> StepGraph:
    """See `OperatorPlan.profile`."""
    check_at_least("steps", steps, 1)
    taken = [_features(batch) for batch in itertools.islice(batches, steps)]
    if not taken:
        raise ValueError("batches: there must be at least one batch.")
    step = differentiated(model, taken[0], None)
    shapes = _shapes(taken[0])
    seconds = _measured(step, [batch for batch in taken if _shapes(batch) == shapes])
    # All operations are those that were counted; who has how many of them is measured.
    total = sum(step.counted())
    rate = total / sum(seconds) if sum(seconds) else 0.0
    return step.to_graph(slots_of(model, slots), [rate * own for own in seconds])


def _features(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch


def _shapes(batch: Any) -> list[Any]:
    return [tuple(getattr(value, "shape", ())) for value in keras.tree.flatten(batch)]


def _measured(step: DifferentiatedStep, batches: list[Any]) -> list[float]:
    """Seconds that each unit's ops take for a batch.

    0 of inputs and lookups, and of what looks up in a table of TensorFlow's, as StringLookup does.
    """
    traced = step.traced
    fixed = _fixed_values(step)
    inputs = {tensor.name for tensor in traced.inputs}
    unit_of = {op.name: u for u, unit in enumerate(traced.units) for op in unit.ops}
    unit_of |= {op.name: u for u, ops in enumerate(step.backward) for op in ops}
    skipped = [unit.kind in ("input", "lookup") for unit in traced.units]
    with tf.compat.v1.Session(graph=traced.graph, config=_one_thread()) as session:
        targets = [tensor.op for tensor in step.results if tensor.name not in fixed]
        seconds = np.zeros(len(traced.units))
        for number, batch in enumerate(batches):
            feed = dict(fixed)
            for tensor, value in zip(
                traced.inputs, tf.nest.flatten(batch, expand_composites=True), strict=True
            ):
                feed[tensor.name] = np.asarray(value)
            feed = {name: feed[name] for name in feed if name in inputs or name in fixed}
            for _ in range(0 if number else _WARM_UP):
                session.run(targets, feed)
            times = [_op_seconds(session, targets, feed) for _ in range(_PASSES)]
            for name in set().union(*times):
                unit = _unit_of(name, unit_of)
                if unit is not None and not skipped[unit]:
                    seconds[unit] += min(own.get(name, np.inf) for own in times)
    return (seconds / len(batches)).tolist()


def _fixed_values(step: DifferentiatedStep) -> dict[str, np.ndarray]:
    """Values of weights, of what comes from lookups, and of gradients from above.

    Raises:
        ValueError: if a layer has weights and uses what the session has not.
    """
    random = np.random.default_rng(0)
    traced = step.traced
    graph = traced.graph
    tensors = {f"{name}:0": graph.get_tensor_by_name(f"{name}:0") for name in traced.variables}
    tables = {
        tensor.name
        for unit in traced.units
        if unit.kind == "lookup"
        for op in unit.ops
        for tensor in op.inputs
    }
    for name in tables & set(tensors):
        del tensors[name]
    for u, unit in enumerate(traced.units):
        if unit.kind == "lookup":
            tensors |= step.leaving[u]
        elif _uses_resources(unit, graph):
            if any(t.op.name in traced.variables for op in unit.ops for t in op.inputs):
                raise ValueError(
                    f"unit {unit.name!r} can't be measured: it has weights, and uses a table or "
                    "a variable that is not the model's; OperatorPlan.step_graph counts it."
                )
            # How many ids there are matters to lookups alone, which get none.
            own = step.leaving[u].items()
            tensors |= {name: t for name, t in own if t.shape.is_fully_defined()}
    tensors |= {tensor.name: tensor for tensor in step.given_gradients}
    values = {}
    for name, tensor in tensors.items():
        dtype, shape = tensor.dtype.as_numpy_dtype, tensor.shape.as_list()
        if tensor.dtype == tf.string:
            value = np.full(shape, b"")
        elif tensor.dtype.is_floating:
            value = random.uniform(0.01, 0.1, shape)
        else:
            value = np.zeros(shape)
        values[name] = np.asarray(value, dtype)
    for outside, inside in graph.captures:
        if inside.dtype != tf.resource:
            values[inside.name] = outside.numpy()
    return values


def _uses_resources(unit: TracedUnit, graph: tf.Graph) -> bool:
    """Whether a unit computes with what lies outside of the model's variables."""
    captured = [*(inside for _, inside in graph.captures), *graph.deferred_internal_captures]
    resources = {inside.name for inside in captured if inside.dtype == tf.resource}
    return any(tensor.name in resources for op in unit.ops for tensor in op.inputs)


def _one_thread() -> tf.compat.v1.ConfigProto:
    """Ops one after the other in one thread, and none of them changed."""
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=1, device_count={"GPU": 0}
    )
    options = config.graph_options
    options.rewrite_options.disable_meta_optimizer = True
    options.rewrite_options.constant_folding = rewriter_config_pb2.RewriterConfig.OFF
    options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    return config


def _op_seconds(session: Any, targets: Any, feed: dict[str, np.ndarray]) -> dict[str, float]:
    """Seconds of each op in one run."""
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    session.run(targets, feed, options=options, run_metadata=metadata)
    seconds: dict[str, float] = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            took = max(node.op_end_rel_nanos - node.op_start_rel_nanos, 0) * 1e-9
            seconds[node.node_name] = seconds.get(node.node_name, 0.0) + took
    return seconds


def _unit_of(name: str, unit_of: dict[str, int]) -> int | None:
    """The unit of an op; ops of a function have the name of its call before their own."""
    while name not in unit_of and "/" in name:
        name = name.rpartition("/")[0]
    return unit_of.get(name)
