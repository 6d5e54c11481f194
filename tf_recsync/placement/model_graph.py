"""Counts what a training step of a Keras model computes and what travels between its layers."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync._checks import check_at_least
from tf_recsync.layers import EmbeddingCollection
from tf_recsync.optimizers.base import Optimizer, parts_of
from tf_recsync.placement import flops
from tf_recsync.placement.graph import Edge, StepGraph, Unit
from tf_recsync.placement.model_trace import ModelTrace, trace
from tf_recsync.synchronization.divided import is_elementwise, why_whole
from tf_recsync.synchronization.units import numbered

LOOKUPS = (keras.layers.Embedding, EmbeddingCollection)
_LOSS = "loss"


def step_graph(
    model: keras.Model, batch_size: int, *, inputs: Any = None, slots: int | None = None
) -> StepGraph:
    """See `OperatorPlan.step_graph`."""
    check_at_least("batch_size", batch_size, 1)
    _check_model(model)
    step = differentiated(model, _inputs_of(model) if inputs is None else inputs, batch_size)
    return step.to_graph(slots_of(model, slots))


def differentiated(model: keras.Model, inputs: Any, batch_size: int | None) -> DifferentiatedStep:
    """Traces a step of a model with inputs that are like the given ones."""
    _check_model(model)
    flat = [_spec(given, batch_size) for given in keras.tree.flatten(inputs)]
    specs = keras.tree.pack_sequence_as(inputs, flat)
    optimizers = [
        optimizer
        for optimizer in parts_of(getattr(model, "optimizer", None))
        if isinstance(optimizer, Optimizer)
    ]
    return DifferentiatedStep(trace(model, specs, _names(model, inputs), LOOKUPS), optimizers)


def _check_model(model: keras.Model) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(f"model={model!r}: must be a keras.Model.")
    if not model.built:
        raise ValueError(f"model {model.name!r}: must be built; call it on a batch, or build it.")


def slots_of(model: keras.Model, slots: int | None) -> int:
    """The accumulators for each element, those of a model's optimizer if `slots` is None."""
    if slots is not None:
        check_at_least("slots", slots, 0)
        return int(slots)
    optimizer = getattr(model, "optimizer", None)
    return optimizer.dense_slots if isinstance(optimizer, Optimizer) else 1


def _inputs_of(model: keras.Model) -> Any:
    """What a model says that it is called with."""
    try:
        return model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"inputs: model {model.name!r} has no graph that would tell them; give them as "
            "tf.TensorSpecs, in the structure that its call takes."
        ) from error


def _names(model: keras.Model, inputs: Any) -> list[str]:
    """What the inputs are called: as the model calls them, or by where they are."""
    paths = [path for path, _ in keras.tree.flatten_with_path(inputs)]
    try:
        own = [getattr(given, "name", None) for given in keras.tree.flatten(_inputs_of(model))]
    except ValueError:
        own = []
    if len(own) == len(paths) and all(own):
        return own
    return ["/".join(["inputs", *map(str, path)]) for path in paths]


def _spec(given: Any, batch_size: int | None) -> tf.TypeSpec:
    """The type spec of an input, with the batch size where that is not known."""
    if isinstance(given, (tf.RaggedTensor, tf.SparseTensor)):
        return tf.type_spec_from_value(given)
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        raise ValueError(
            f"inputs: {given!r} must be a tensor, an array, a tf.TypeSpec or a keras.KerasTensor."
        )
    shape = list(given.shape)
    if shape and shape[0] is None:
        shape[0] = batch_size
    if getattr(given, "ragged", False) or isinstance(given, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, given.dtype, getattr(given, "ragged_rank", None))
    if getattr(given, "sparse", False) or isinstance(given, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, given.dtype)
    return tf.TensorSpec(shape, given.dtype)


class DifferentiatedStep:
    """A traced step with the gradient ops of each unit.

    Args:
        traced: the step.
        optimizers: that train the model, as far as they are known.

    Attributes:
        backward: For each unit the ops of its backward pass.
        leaving: For each unit the tensors that others use, or that the model returns.
        results: What has to be computed for the step, gradients included.
        given_gradients: For each placeholder of a gradient from above the tensor that it is of.
    """

    def __init__(self, traced: ModelTrace, optimizers: Sequence[Optimizer] = ()):
        self.traced = traced
        self._optimizers = optimizers
        units = len(traced.units)
        self.backward: list[list[tf.Operation]] = [[] for _ in range(units)]
        self.results: list[tf.Tensor] = list(traced.outputs)
        self.given_gradients: list[tf.Tensor] = []
        self._owners = self._owners_of_variables()
        self._sensitive = self._find_sensitive()
        # For each pair of units the tensors that go from the first to the second.
        self._traffic: dict[tuple[int, int], dict[str, tf.Tensor]] = collections.defaultdict(dict)
        self._own_weights: list[dict[str, tf.Tensor]] = [{} for _ in range(units)]
        # Those that are not trained, too: they travel as well, and take memory.
        self._weights: list[dict[str, tf.Tensor]] = [{} for _ in range(units)]
        for u, unit in enumerate(traced.units):
            for op in unit.ops:
                for tensor in op.inputs:
                    self._note_use(u, tensor)
        self.leaving: list[dict[str, tf.Tensor]] = [{} for _ in range(units)]
        for (source, _), tensors in self._traffic.items():
            self.leaving[source].update(tensors)
        self._returned: dict[int, dict[str, tf.Tensor]] = collections.defaultdict(dict)
        for tensor in traced.outputs:
            source = traced.unit_of.get(tensor.op.name)
            if source is not None:
                self._returned[source][tensor.name] = tensor
                self.leaving[source][tensor.name] = tensor
        with traced.graph.as_default():
            for u, unit in enumerate(traced.units):
                if unit.kind not in ("input", "lookup"):
                    self._differentiate(u)

    def _owners_of_variables(self) -> dict[str, int]:
        """The unit of each variable, by the op that stands for it: the first that uses it."""
        owners: dict[str, int] = {}
        for u, unit in enumerate(self.traced.units):
            for op in unit.ops:
                for tensor in op.inputs:
                    if tensor.op.name in self.traced.variables:
                        owners.setdefault(tensor.op.name, u)
        return owners

    def _find_sensitive(self) -> set[str]:
        """Names of the tensors that depend on parameters, so that gradients come back."""
        found: set[str] = set()
        lists: set[str] = set()  # Variants, as those of loops.
        for op in self.traced.graph.get_operations():
            variable = self.traced.variables.get(op.name)
            if variable is not None:
                sensitive = variable.trainable
            else:
                sensitive = op.type != "StopGradient" and any(
                    t.name in found or t.name in lists for t in op.inputs
                )
            if sensitive:
                found |= {t.name for t in op.outputs if t.dtype.is_floating}
                lists |= {t.name for t in op.outputs if t.dtype == tf.variant}
        return found

    def _note_use(self, unit: int, tensor: tf.Tensor) -> None:
        source = self._owners.get(tensor.op.name, self.traced.unit_of.get(tensor.op.name))
        if source is None:
            return
        if source != unit:
            self._traffic[source, unit][tensor.name] = tensor
        elif tensor.op.name in self._owners and tensor.dtype.is_floating:
            self._weights[unit][tensor.name] = tensor
            if tensor.name in self._sensitive:
                self._own_weights[unit][tensor.name] = tensor

    def _differentiate(self, unit: int) -> None:
        """Adds the gradient ops of a unit, from its outputs to its inputs and weights."""
        outputs = [t for name, t in self.leaving[unit].items() if name in self._sensitive]
        outputs = [t for t in outputs if t.op.name not in self._owners]
        inputs = dict(self._own_weights[unit])
        for (_, target), tensors in self._traffic.items():
            if target == unit:
                inputs.update((n, t) for n, t in tensors.items() if n in self._sensitive)
        if not outputs or not inputs:
            return
        above = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in outputs]
        before = len(self.traced.graph.get_operations())
        sources = list(inputs.values())
        gradients = tf.gradients(outputs, sources, above, stop_gradients=sources)
        found = [gradient for gradient in gradients if gradient is not None]
        results = tf.nest.flatten(found, expand_composites=True)
        made = self.traced.graph.get_operations()[before:]
        self.backward[unit] = flops.needed(made, results)
        self.given_gradients += above
        self.results += results

    def counted(self) -> list[float]:
        """Floating-point operations of each unit; lookups have none here."""
        return [
            0.0 if unit.kind == "lookup" else flops.count([*unit.ops, *self.backward[u]])
            for u, unit in enumerate(self.traced.units)
        ]

    def to_graph(self, slots: int, operations: list[float] | None = None) -> StepGraph:
        """The step as units and edges, with the given operations of each unit or counted ones."""
        names, kinds = self._names(), self._kinds()
        loss = names[-1]
        operations = self.counted() if operations is None else operations
        sizes = self._sizes(names)
        units = [
            Unit(
                names[u],
                kinds[u],
                flops=operations[u],
                parameter_bytes=self._parameter_bytes(u),
                slots=slots,
                activation_bytes=sum(sizes[name] for name in self.leaving[u]),
                **self._pieces(u),
            )
            for u in range(len(self.traced.units))
        ]
        edges = [
            self._edge(names[source], names[target], tensors, sizes)
            for (source, target), tensors in self._traffic.items()
        ]
        edges += [
            self._edge(names[source], loss, tensors, sizes)
            for source, tensors in self._returned.items()
        ]
        units.append(Unit(loss, "loss", 0.0))
        order = {unit: place for place, unit in enumerate(self._order(names))}
        return StepGraph(sorted(units, key=lambda unit: order[unit.name]), edges)

    def _order(self, names: list[str]) -> list[str]:
        """The names in the order in which units compute."""
        at = {op.name: n for n, op in enumerate(self.traced.graph.get_operations())}
        first = {
            u: min((at[op.name] for op in unit.ops), default=-1)
            for u, unit in enumerate(self.traced.units)
        }
        return [names[u] for u in sorted(first, key=first.__getitem__)] + names[-1:]

    def _edge(
        self, source: str, target: str, tensors: dict[str, tf.Tensor], sizes: dict[str, int]
    ) -> Edge:
        back = sum(sizes[name] for name in tensors if name in self._sensitive)
        return Edge(source, target, sum(sizes[name] for name in tensors), back)

    def _sizes(self, names: list[str]) -> dict[str, int]:
        """Bytes of what leaves units."""
        sizes: dict[str, int] = {}
        uses = [(source, target, tensors) for (source, target), tensors in self._traffic.items()]
        uses += [(source, None, tensors) for source, tensors in self._returned.items()]
        for source, target, tensors in uses:
            # How many ids there are matters to nobody else.
            for_lookup = target is not None and self.traced.units[target].kind == "lookup"
            for name, tensor in tensors.items():
                if not (for_lookup or tensor.shape.is_fully_defined()):
                    raise ValueError(
                        f"unit {names[source]!r}: the shape {tensor.shape} of {name!r}, which "
                        "another unit uses, is not known; give inputs whose shapes are complete."
                    )
                sizes[name] = flops.elements(tensor) * max(tensor.dtype.size, 1)
        return sizes

    def _parameter_bytes(self, unit: int) -> int:
        if self.traced.units[unit].kind in ("input", "lookup"):
            return 0
        weights = self._weights[unit].values()
        return sum(flops.elements(weight) * weight.dtype.size for weight in weights)

    def _pieces(self, unit: int) -> dict[str, Any]:
        """Whether a unit can be divided, and whether it acts on each element by itself."""
        traced = self.traced.units[unit]
        if traced.kind != "layer":
            return {}
        if not self._parameter_bytes(unit):
            return {"elementwise": is_elementwise(traced.layer) and not traced.has_others}
        reason = why_whole(traced.layer, self._optimizers)
        leaving = self.leaving[unit].values()
        if not reason and any(tensor.op.name in self._owners for tensor in leaving):
            reason = "shares variables with another layer"
        if not reason and traced.calls > 1:
            reason = f"is called {traced.calls} times"
        if not reason and any(tensor.shape.rank != 2 for tensor in leaving):
            reason = "gives more than a row for each example"
        if reason:
            return {"why_whole": reason}
        features_in, features_out = traced.layer.kernel.shape
        is_piecewise = is_elementwise(traced.layer.activation) and not traced.has_others
        return {
            "features_in": features_in,
            "features_out": features_out,
            "elementwise": is_piecewise,
        }

    def _names(self) -> list[str]:
        """The names of the units and of the loss: numbers are added, but not to those of layers."""
        used: set[str] = set()
        return [numbered(name, used) for name in [*(u.name for u in self.traced.units), _LOSS]]

    def _kinds(self) -> list[str]:
        kinds = [unit.kind for unit in self.traced.units]
        plain = [kind == "layer" and not self._parameter_bytes(u) for u, kind in enumerate(kinds)]
        sources: dict[int, set[int]] = collections.defaultdict(set)
        for (source, target), tensors in self._traffic.items():
            # Masks join nothing.
            if any(tensor.dtype.is_floating for tensor in tensors.values()):
                sources[target].add(source)
        for u in range(len(kinds)):
            # What changes raw features, as Hashing does, is beside them.
            leaving = self.leaving[u].values()
            if plain[u] and leaving and not any(t.dtype.is_floating for t in leaving):
                kinds[u] = "input"

        def from_data(unit: int, seen: set[int]) -> bool:
            """Whether a unit is on the trainers or depends on such without parameters between.

            Args:
                unit: which one.
                seen: those that were asked already, and it is added to them.
            """
            if kinds[unit] in ("input", "lookup", "operations"):
                return True
            if not plain[unit] or unit in seen:
                return False
            seen.add(unit)
            return any(from_data(source, seen) for source in sources[unit])

        for u in range(len(kinds)):
            joins = plain[u] and kinds[u] == "layer" and len(sources[u]) > 1
            seen = {u}
            if joins and any(from_data(source, seen) for source in sources[u]):
                kinds[u] = "interaction"
        return kinds
