"""Inference of a model whose tables are elsewhere: it takes looked-up vectors in place of ids."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tf_recsync.embedding.given_vectors import giving
from tf_recsync.input_parts import InputParts, name_of
from tf_recsync.layers.embedding_collection import EmbeddingCollection


@dataclasses.dataclass(frozen=True)
class GivenInput:
    """An input that stands for a lookup of a collection.

    Attributes:
        name: its name among the inputs.
        layer: the name of the collection.
        feature: that of the feature.
        kind: what is given of it; see `given_vectors`.
        spec: its type.
    """

    name: str
    layer: str
    feature: str
    kind: str
    spec: tf.TypeSpec


class TablesApart:
    """What a model computes of looked-up vectors.

    The inputs of the model that it computes with beside lookups stay; each feature that is looked
    up, of each of its collections, is one more input. To find out which, the model is called once
    with symbolic inputs.

    Args:
        model: a built model.
        signature: the types of its inputs, in the structure that it takes them.
        names: the names that inputs have of their own, by their paths in that structure.
        scope: a context to call the model in.

    Attributes:
        signature: the types of the inputs, by their names.
        given: those that stand for lookups.

    Raises:
        ValueError: if the model has no collection, calls one more than once, or two inputs would
            have the same name.
    """

    def __init__(
        self,
        model: keras.Model,
        signature: Any,
        names: Mapping[tuple, str],
        scope: contextlib.AbstractContextManager,
    ):
        keyed = [v.keyed.table for v in model.variables if hasattr(v, "keyed")]
        if keyed:
            raise ValueError(
                f'tables="apart": the tables {sorted(set(keyed))} of the model {model.name!r} have '
                'keys="any", which are looked up inside of the model only: give tables="inside"'
            )
        self._model, self._structure = model, signature
        probe = _Probe()
        graph = FuncGraph("tables_apart")
        with graph.as_default():
            inputs, parts = {}, {}
            for path, spec in keras.tree.flatten_with_path(signature):
                part = InputParts(name_of(path, spec, names.get(path)), spec)
                tensors = [_placeholder(own) for own in part.specs]
                inputs[path], parts[path] = part.join(tensors), tensors
            whole = tf.nest.pack_sequence_as(signature, list(inputs.values()))
            with scope, giving(probe):
                outputs = model(whole, training=False)
        if not probe.taken:
            raise ValueError(
                f'tables="apart": the model {model.name!r} calls no EmbeddingCollection whose '
                'tables could be; it must be "inside"'
            )
        used = _reached(outputs)
        # By the places of the model's inputs; None where it computes nothing else with one.
        self._kept: list[str | None] = []
        self.signature: dict[str, tf.TypeSpec] = {}
        for path, spec in keras.tree.flatten_with_path(signature):
            is_kept = any(tensor.op in used for tensor in parts[path])
            name = name_of(path, spec, names.get(path))
            self._kept.append(name if is_kept else None)
            if is_kept:
                self._add(name, spec)
        self.given = _named(probe.taken)
        for own in self.given:
            self._add(own.name, own.spec)

    def _add(self, name: str, spec: tf.TypeSpec) -> None:
        if name in self.signature:
            raise ValueError(
                f'tables="apart": two inputs of {self._model.name!r} would have the name {name!r}, '
                "one of them for looked-up vectors; give the model's input or the feature another"
            )
        if isinstance(spec, tf.TensorSpec):
            spec = tf.TensorSpec(spec.shape, spec.dtype, name)
        self.signature[name] = spec

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """Computes the model's outputs, in inference.

        Args:
            inputs: by their names, as `signature` says.
        """
        first = inputs[self.given[0].name]
        is_ragged = isinstance(first, tf.RaggedTensor)
        batch = first.nrows(tf.int64) if is_ragged else tf.shape(first, tf.int64)[0]
        specs = tf.nest.flatten(self._structure)
        flat = [
            _nothing(spec, batch) if name is None else inputs[name]
            for name, spec in zip(self._kept, specs, strict=True)
        ]
        taken = {(own.layer, own.feature, own.kind): inputs[own.name] for own in self.given}
        with giving(_Taken(taken)):
            return self._model(tf.nest.pack_sequence_as(self._structure, flat), training=False)


class _Probe:
    """Gives symbolic vectors, and notes which were taken, see `GivenVectors`."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, str, str], tf.TypeSpec] = {}
        self._tensors: dict[tuple[str, str, str], Any] = {}
        self._called: set[str] = set()

    def begin(self, layer: EmbeddingCollection) -> None:
        if layer.name in self._called:
            raise ValueError(
                f'tables="apart": the model calls the EmbeddingCollection {layer.name!r} more than '
                "once, or two of this name, so that its features have several vectors; it must "
                "have one for each call"
            )
        self._called.add(layer.name)

    def take(self, layer: EmbeddingCollection, feature: str, kind: str, spec: tf.TypeSpec) -> Any:
        key = layer.name, feature, kind
        if key not in self._tensors:
            part = InputParts(feature, spec)
            self._tensors[key] = part.join([_placeholder(own) for own in part.specs])
            self.taken[key] = spec
        return self._tensors[key]


class _Taken:
    """Gives vectors, see `GivenVectors`."""

    def __init__(self, vectors: Mapping[tuple[str, str, str], Any]):
        self._vectors = vectors

    def begin(self, layer: EmbeddingCollection) -> None:
        pass

    def take(self, layer: EmbeddingCollection, feature: str, kind: str, spec: tf.TypeSpec) -> Any:
        del spec
        return self._vectors[layer.name, feature, kind]


def _named(taken: Mapping[tuple[str, str, str], tf.TypeSpec]) -> tuple[GivenInput, ...]:
    """Names what is given by its feature, and by its collection, too, where others have such."""
    count = Counter((feature, kind) for _, feature, kind in taken)

    def name(layer: str, feature: str, kind: str) -> str:
        return f"{feature}_{kind}" if count[feature, kind] == 1 else f"{layer}_{feature}_{kind}"

    return tuple(GivenInput(name(*key), *key, spec) for key, spec in taken.items())


def _placeholder(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def _reached(outputs: Any) -> set[tf.Operation]:
    """The operations that outputs depend on."""
    found: set[tf.Operation] = set()
    todo = [tensor.op for tensor in tf.nest.flatten(outputs, expand_composites=True)]
    while todo:
        operation = todo.pop()
        if operation not in found:
            found.add(operation)
            todo += [tensor.op for tensor in operation.inputs] + operation.control_inputs
    return found


def _nothing(spec: tf.TypeSpec, batch: tf.Tensor) -> Any:
    """Stands for an input that nothing is computed with."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *_sizes(spec.shape[2:])], spec.dtype)
        splits = tf.zeros([batch + 1], spec.row_splits_dtype)
        return tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = tf.stack([batch, *_sizes(spec.shape[1:])])
        indices = tf.zeros([0, spec.shape.rank], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), shape)
    return tf.zeros(tf.stack([batch, *_sizes(spec.shape[1:])]), spec.dtype)


def _sizes(shape: tf.TensorShape) -> list[int]:
    return [size or 1 for size in shape]
