"""Vectors that collections are given in place of lookups, where their tables are elsewhere."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from tf_recsync.embedding.feature_inputs import FeatureInput

if TYPE_CHECKING:
    import keras

    from tf_recsync.embedding.config import FeatureConfig
    from tf_recsync.embedding.interaction_lookups import ServerInteractions

# What there is of a feature: its looked-up vectors, or, for an interaction that takes them as they
# are, the rows of its ids and the weights of these.
VECTORS, ROWS, ROW_WEIGHTS = "vectors", "rows", "row_weights"


class GivenVectors(Protocol):
    """Has the vectors that are given."""

    def begin(self, layer: keras.layers.Layer) -> None:
        """A collection is called."""

    def take(
        self, layer: keras.layers.Layer, feature: str, kind: str, spec: tf.TypeSpec
    ) -> tf.Tensor | tf.RaggedTensor:
        """What is given of a feature, of the collection that is called.

        Args:
            layer: the collection.
            feature: the feature's name.
            kind: `VECTORS`, `ROWS` or `ROW_WEIGHTS`.
            spec: its type.
        """


_given: contextvars.ContextVar[GivenVectors | None] = contextvars.ContextVar("given", default=None)


@contextlib.contextmanager
def giving(vectors: GivenVectors) -> Iterator[None]:
    """Inside, this thread's collections look nothing up, and take these vectors instead."""
    token = _given.set(vectors)
    try:
        yield
    finally:
        _given.reset(token)


def given_vectors() -> GivenVectors | None:
    """What collections are given; None where they look up."""
    return _given.get()


class LayerVectors:
    """The vectors that one collection is given.

    Args:
        given: what all are given.
        layer: the collection.
        dimensions: those of its features, by name.
        inputs: what it is called with, by feature.
    """

    def __init__(
        self,
        given: GivenVectors,
        layer: keras.layers.Layer,
        dimensions: Mapping[str, int],
        inputs: Mapping[str, FeatureInput],
    ):
        self._given, self._layer = given, layer
        self._dimensions, self._inputs = dimensions, inputs
        given.begin(layer)

    def pooled(self, feature: FeatureConfig) -> tf.Tensor:
        """The pooled vectors of a feature: [batch, dimension]."""
        return self._vectors(feature.name, [None])

    def sequence(self, feature: FeatureConfig) -> tf.Tensor:
        """Those of one that is not pooled, as `sequences.arrange` gives them."""
        own = self._inputs[feature.name]
        given = own.given or own
        shape = [None] if given.is_vector else [None, given.length or None]
        return self._vectors(feature.name, shape)

    def interactions(self, beside: ServerInteractions) -> tf.Tensor:
        """The results of interactions, side by side."""
        inputs, vectors = dict(self._inputs), []
        for feature, is_pooled in beside.looked_up:
            if is_pooled:
                vectors.append(self.pooled(feature))
                continue
            name = feature.name
            rows = self._ragged(name, ROWS, [self._dimensions[name]])
            weights = None
            if inputs[name].weights is not None:
                weights = self._ragged(name, ROW_WEIGHTS, []).values
            vectors.append(rows.values)
            inputs[name] = dataclasses.replace(
                inputs[name], length=0, splits=rows.row_splits, weights=weights
            )
        return beside.compute(inputs, vectors)

    def _vectors(self, feature: str, shape: Sequence[int | None]) -> tf.Tensor:
        spec = tf.TensorSpec([*shape, self._dimensions[feature]], tf.float32)
        return self._given.take(self._layer, feature, VECTORS, spec)

    def _ragged(self, feature: str, kind: str, shape: Sequence[int]) -> tf.RaggedTensor:
        spec = tf.RaggedTensorSpec([None, None, *shape], tf.float32, ragged_rank=1)
        return self._given.take(self._layer, feature, kind, spec)


def vectors_of(own: FeatureInput, kind: str, rows: tf.Tensor) -> Any:
    """What a collection is given of a feature that an interaction takes as it is.

    Args:
        own: the feature's ids.
        kind: `ROWS` or `ROW_WEIGHTS`.
        rows: [ids, dimension], those that the ids name.
    """
    splits = own.splits
    if splits is None:
        splits = tf.range(0, tf.size(own.ids, tf.int64) + 1, own.length)
    values = rows if kind == ROWS else own.weights
    return tf.RaggedTensor.from_row_splits(values, splits, validate=False)
