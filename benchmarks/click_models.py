"""The model and the data of the benchmarks, in the forms that the systems need.

The model is Wide & Deep on the 26 categorical features of the Criteo data set (up to 100,000 ids
each) and 13 numeric ones: embeddings of dimension 16, a wide part (embeddings of dimension 1), and
dense layers of 256, 128 and 64 units, trained with Adagrad.

The data are batches of `tf_recsync.data.Synthetic` that the input pipeline keeps in memory and
hands out in random order, again and again: what is left of its cost is that of moving batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import common
import keras
import numpy as np
import tensorflow as tf
from wide_deep_model import build_wide_deep

import tf_recsync as recsync

DIMENSION = 16
HIDDEN_UNITS = (256, 128, 64)
LEARNING_RATE = 0.05
INITIAL_ACCUMULATOR = 0.1  # The defaults of Keras.
EPSILON = 1e-7
CACHED_BATCHES = 64


def make_data(batch_size: int) -> recsync.data.Synthetic:
    """The data: `CACHED_BATCHES` batches."""
    return recsync.data.Synthetic(rows=CACHED_BATCHES * batch_size, test_rows=0, seed=common.SEED)


def in_memory(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The batches from memory, endlessly and in random order."""
    return batches.cache().shuffle(CACHED_BATCHES).repeat().prefetch(2)


def build_stock(spec: recsync.data.FeatureSpec) -> keras.Model:
    """The model in plain Keras: an Embedding layer for each of the 52 tables."""
    keras.utils.set_random_seed(common.SEED)
    return build_wide_deep(spec, embedding_dimension=DIMENSION, hidden_units=HIDDEN_UNITS)


def build_ours(spec: recsync.data.FeatureSpec) -> keras.Model:
    """The model with this package's layers."""
    if not hasattr(recsync.layers, "EmbeddingCollection"):
        return build_stock(spec)
    keras.utils.set_random_seed(common.SEED)
    numeric = keras.Input((len(spec.numeric),), name="numeric")
    ids = {name: keras.Input((), dtype="int64", name=name) for name in spec.categorical}
    deep = _collection(spec, "deep", DIMENSION, "uniform")(ids)
    wide = _collection(spec, "wide", 1, "zeros")(ids)
    hidden = keras.layers.Concatenate()([numeric, *(deep[name] for name in ids)])
    for units in HIDDEN_UNITS:
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    parts = [keras.layers.Dense(1)(numeric), *(wide[name] for name in ids)]
    logit = keras.layers.Add()([*parts, keras.layers.Dense(1)(hidden)])
    click = keras.layers.Activation("sigmoid")(logit)
    return keras.Model({"numeric": numeric, **ids}, click, name="wide_deep")


def build_legacy(spec: recsync.data.FeatureSpec, tf_keras: Any) -> Any:
    """The model in legacy Keras, the module `tf_keras`."""
    tf_keras.utils.set_random_seed(common.SEED)
    layers = tf_keras.layers
    numeric = layers.Input((len(spec.numeric),), name="numeric")
    ids = {name: layers.Input((), dtype="int64", name=name) for name in spec.categorical}
    wide = [layers.Dense(1)(numeric)]
    deep = [numeric]
    for name, size in spec.categorical.items():
        wide.append(layers.Embedding(size, 1, embeddings_initializer="zeros")(ids[name]))
        deep.append(layers.Embedding(size, DIMENSION)(ids[name]))
    hidden = layers.Concatenate()(deep)
    for units in HIDDEN_UNITS:
        hidden = layers.Dense(units, activation="relu")(hidden)
    logit = layers.Add()([*wide, layers.Dense(1)(hidden)])
    click = layers.Activation("sigmoid")(logit)
    return tf_keras.Model({"numeric": numeric, **ids}, click)


def _collection(
    spec: recsync.data.FeatureSpec, part: str, dimension: int, initializer: str
) -> keras.layers.Layer:
    """A table of its own for each feature."""
    layers = recsync.layers
    return layers.EmbeddingCollection(
        tables=[
            layers.TableConfig(
                f"{part}_{name}", rows, dimension, initializer=initializer, combiner="sum"
            )
            for name, rows in spec.categorical.items()
        ],
        features=[layers.FeatureConfig(name, table=f"{part}_{name}") for name in spec.categorical],
        name=part,
    )


class MergedFeatures:
    """Puts the tables of several features into one, one behind the other.

    Args:
        spec: The data's features.
        groups: How many merged tables there are; the features are dealt out to them.

    Attributes:
        rows: The rows of each merged table.
    """

    def __init__(self, spec: recsync.data.FeatureSpec, groups: int):
        sizes = sorted(spec.categorical.items(), key=lambda item: item[1], reverse=True)
        self._names: list[list[str]] = [[] for _ in range(groups)]
        self._offsets: list[list[int]] = [[] for _ in range(groups)]
        self.rows = [0] * groups
        for name, size in sizes:  # The largest first, to the smallest table.
            group = min(range(groups), key=lambda g: (self.rows[g], len(self._names[g])))
            self._names[group].append(name)
            self._offsets[group].append(self.rows[group])
            self.rows[group] += size

    @property
    def features(self) -> list[int]:
        """The number of features in each merged table."""
        return [len(names) for names in self._names]

    def batches(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Makes (numeric, (rows of each merged table [batch, features], ...), label) of batches."""

        def merge(
            features: dict[str, tf.Tensor], label: tf.Tensor
        ) -> tuple[tf.Tensor, tuple[tf.Tensor, ...], tf.Tensor]:
            merged = (
                tf.stack([features[name] for name in names], axis=1)
                + np.array(offsets, dtype=np.int64)
                for names, offsets in zip(self._names, self._offsets, strict=True)
            )
            return features["numeric"], tuple(merged), label

        return batches.map(merge)


def dense_shapes(spec: recsync.data.FeatureSpec) -> list[tuple[int, ...]]:
    """The shapes of the dense variables: kernel and bias of each layer, the wide part's last."""
    width = len(spec.numeric) + DIMENSION * len(spec.categorical)
    shapes: list[tuple[int, ...]] = []
    for units in (*HIDDEN_UNITS, 1):
        shapes += [(width, units), (units,)]
        width = units
    return [*shapes, (len(spec.numeric), 1), (1,)]


def merged_forward(
    numeric: tf.Tensor,
    deep: Sequence[tf.Tensor],
    wide: Sequence[tf.Tensor],
    dense: Sequence[tf.Tensor],
    labels: tf.Tensor,
) -> tf.Tensor:
    """The loss of the model in plain TensorFlow.

    Args:
        numeric: [batch, numeric].
        deep: Embeddings [batch, features, dimension] from each merged table.
        wide: Embeddings [batch, features, 1] from each merged table.
        dense: The dense variables, as in `dense_shapes`.
        labels: [batch, 1].
    """
    batch = tf.shape(numeric)[0]
    flat = [tf.reshape(e, [batch, e.shape[1] * e.shape[2]]) for e in deep]
    hidden = tf.concat([numeric, *flat], axis=1)
    layers = list(zip(dense[0:-2:2], dense[1:-2:2], strict=True))
    for kernel, bias in layers[:-1]:
        hidden = tf.nn.relu(tf.nn.bias_add(tf.matmul(hidden, kernel), bias))
    kernel, bias = layers[-1]
    logit = tf.matmul(hidden, kernel) + bias + tf.matmul(numeric, dense[-2]) + dense[-1]
    logit += tf.add_n([tf.reduce_sum(e, axis=1) for e in wide])
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logit))


def initial_kernel(shape: tuple[int, ...]) -> np.ndarray:
    """Glorot-uniform initial values; zeros for biases."""
    if len(shape) == 1:
        return np.zeros(shape, np.float32)
    limit = (6 / sum(shape)) ** 0.5
    return np.random.default_rng(common.SEED).uniform(-limit, limit, shape).astype(np.float32)
