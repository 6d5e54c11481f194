"""The ops of a training step of a model, and the layer that each belongs to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_recsync._instead import instead
from tf_recsync.embedding.keys import sorted_entries
from tf_recsync.placement import flops
from tf_recsync.synchronization.units import names_of, parts_of_model

# They have no inputs, or none that anybody waits for.
_SOURCES = ("Const", "NoOp", "Placeholder")


@dataclasses.dataclass
class TracedUnit:
    """A unit of a traced step, with the ops of its forward pass."""

    name: str
    kind: str
    layer: keras.Layer | None = None
    ops: list[tf.Operation] = dataclasses.field(default_factory=list)
    calls: int = 0  # of the layer
    has_others: bool = False  # ops that the layer did not make, such as casts of its outputs


@dataclasses.dataclass
class ModelTrace:
    """The forward pass of a model in a graph of its own; nothing in it has been run."""

    graph: tf.Graph
    units: list[TracedUnit]
    unit_of: dict[str, int]  # the number of the unit for the name of an op
    inputs: list[tf.Tensor]  # components of ragged and sparse tensors by themselves
    outputs: list[tf.Tensor]
    variables: dict[str, keras.Variable]  # for the name of the op that stands for each


def trace(
    model: keras.Model, specs: Any, names: list[str], lookups: tuple[type, ...]
) -> ModelTrace:
    """Traces a call of a model in training, with values in the place of its variables.

    Args:
        model: A built model.
        specs: What it is called with, as `tf.TypeSpec`s.
        names: What these are called, flat.
        lookups: Types of layers that look rows up.
    """
    layers = unit_layers(model, lookups)
    paths = names_of(model)
    calls: list[tuple[int, int, int]] = []
    found: dict[str, Any] = {}

    def step(inputs: Any) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        found["inputs"] = inputs
        values = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in _variables(model)]
        found["variables"] = {value.op.name: v for v, value in values}
        # Keys are looked up in stock ops, of values: for the rows that training would give them
        # there would have to be variables.
        with _recorded(layers, graph, calls), sorted_entries(), keras.StatelessScope(values):
            found["outputs"] = model(inputs, training=True)
        return tf.zeros([])

    # Keras looks for variables that a layer makes when it is called first: there are none.
    concrete = tf.function(step, autograph=False, jit_compile=False).get_concrete_function(specs)
    units = [
        TracedUnit(paths[id(layer)], "lookup" if isinstance(layer, lookups) else "layer", layer)
        for layer in layers
    ]
    traced = ModelTrace(
        concrete.graph,
        units,
        {},
        tf.nest.flatten(found["inputs"], expand_composites=True),
        tf.nest.flatten(found["outputs"], expand_composites=True),
        found["variables"],
    )
    ops = concrete.graph.get_operations()
    for unit, first, last in calls:
        units[unit].calls += 1
        for op in ops[first:last]:
            traced.unit_of[op.name] = unit
    _add_inputs(traced, names, found["inputs"])
    _join_operations(traced, ops)
    for op in ops:
        if op.name in traced.unit_of:
            units[traced.unit_of[op.name]].ops.append(op)
    called = {unit for unit, _, _ in calls}
    _drop(traced, [u for u in range(len(layers)) if u not in called])
    return traced


def unit_layers(model: keras.Model, lookups: tuple[type, ...]) -> list[keras.Layer]:
    """The layers that are units, each once.

    They are those of nested models, and of layers that look rows up by other layers, but not those
    of other layers.
    """

    def has_tables(part: keras.Operation) -> bool:
        if isinstance(part, lookups) or not isinstance(part, keras.layers.Layer):
            return False
        return any(isinstance(inner, lookups) for inner in part._flatten_layers())

    parts = parts_of_model(model, has_tables)
    layers = [part for part in parts if isinstance(part, keras.layers.Layer)]
    return [layer for layer in layers if not isinstance(layer, keras.layers.InputLayer)]


def _variables(model: keras.Model) -> list[keras.Variable]:
    return list({id(v): v for v in model.variables}.values())


@contextlib.contextmanager
def _recorded(
    layers: list[keras.Layer], graph: tf.Graph, calls: list[tuple[int, int, int]]
) -> Iterator[None]:
    """Inside, each call of a layer notes its number and the ops that it makes in a graph."""
    inside = False

    def recorder(number: int, call: Any) -> Any:
        def recorded(*args, **kwargs):
            nonlocal inside
            if inside or tf.compat.v1.get_default_graph() is not graph:
                return call(*args, **kwargs)
            inside = True
            first = len(graph.get_operations())
            try:
                return call(*args, **kwargs)
            finally:
                inside = False
                calls.append((number, first, len(graph.get_operations())))

        return recorded

    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.enter_context(instead(layer, "call", recorder(number, layer.call)))
        yield


def _add_inputs(traced: ModelTrace, names: list[str], inputs: Any) -> None:
    """Makes a unit of each input."""
    for name, value in zip(names, keras.tree.flatten(inputs), strict=True):
        for component in tf.nest.flatten(value, expand_composites=True):
            traced.unit_of[component.op.name] = len(traced.units)
        traced.units.append(TracedUnit(name, "input"))


def _join_operations(traced: ModelTrace, ops: list[tf.Operation]) -> None:
    """Makes units of connected ops that no layer made.

    What computes nothing and has its inputs from one unit belongs to that unit: casts, for
    instance, and changes of shape.
    """
    own = [
        op
        for op in ops
        if op.name not in traced.unit_of
        and op.type not in _SOURCES
        and op.name not in traced.variables
    ]
    names = {op.name for op in own}
    group = {name: name for name in names}

    def root(name: str) -> str:
        while group[name] != name:
            group[name] = group[group[name]]
            name = group[name]
        return name

    for op in own:
        for tensor in op.inputs:
            if tensor.op.name in names:
                group[root(op.name)] = root(tensor.op.name)
    members: dict[str, list[tf.Operation]] = {}
    for op in own:
        members.setdefault(root(op.name), []).append(op)
    for group_ops in members.values():
        sources = {
            traced.unit_of[tensor.op.name]
            for op in group_ops
            for tensor in op.inputs
            if tensor.op.name in traced.unit_of and tensor.op.name not in names
        }
        weights = any(t.op.name in traced.variables for op in group_ops for t in op.inputs)
        if not sources and not weights:
            continue
        computed = [op for op in group_ops if flops.count([op])]
        if len(sources) == 1 and not computed and not weights:
            number = sources.pop()
            traced.units[number].has_others = True
        else:
            number = len(traced.units)
            name = (computed or group_ops)[0].name
            traced.units.append(TracedUnit(f"operations/{name}", "operations"))
        for op in group_ops:
            traced.unit_of[op.name] = number


def _drop(traced: ModelTrace, numbers: list[int]) -> None:
    """Removes units that have no ops."""
    left = [u for u in range(len(traced.units)) if u not in set(numbers)]
    number = {u: n for n, u in enumerate(left)}
    traced.units[:] = [traced.units[u] for u in left]
    traced.unit_of = {name: number[u] for name, u in traced.unit_of.items()}
