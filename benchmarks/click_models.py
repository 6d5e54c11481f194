"""The model and the data of the benchmarks, in the forms that the systems need.

The model is Wide & Deep on the 26 categorical features of the Criteo data set (up to 100,000 ids
each) and 13 numeric ones: embeddings of dimension 16, a wide part (embeddings of dimension 1), and
dense layers of 256, 128 and 64 units, trained with Adagrad.

The data are batches of `tf_recsync.data.Synthetic` that the input pipeline keeps in memory and
hands out in random order, again and again: what is left of its cost is that of moving batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import common
import keras
import numpy as np
import tensorflow as tf
from wide_deep_model import build_wide_deep

import tf_recsync as recsync

DIMENSION = 16
HIDDEN_UNITS = (256, 128, 64)
LEARNING_RATE = 0.001
INITIAL_ACCUMULATOR = 0.1  # The defaults of Keras.
EPSILON = 1e-7
CACHED_BATCHES = 64
STEPS_PER_EXECUTION = 8


def make_data(batch_size: int) -> recsync.data.Synthetic:
    """The data: `CACHED_BATCHES` batches."""
    return recsync.data.Synthetic(rows=CACHED_BATCHES * batch_size, test_rows=0, seed=common.SEED)


def in_memory(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The batches from memory, endlessly and in random order."""
    return batches.cache().shuffle(CACHED_BATCHES).repeat().prefetch(2)


def serve_fit(
    rounds: common.Rounds,
    model: keras.Model,
    batches: Any,
    *,
    multiple: int,
    counters: Callable[[], dict[str, int]] = dict,
) -> None:
    """Takes turns with `model.fit` on endless batches; see `Rounds.serve_fit`."""

    def fit(steps: int, epochs: int, callbacks: list[Any]) -> None:
        model.fit(
            batches,
            steps_per_epoch=steps,
            epochs=epochs,
            callbacks=callbacks,
            verbose=0,
            shuffle=False,  # The batches are in random order already.
        )

    rounds.serve_fit(keras.callbacks.Callback, fit, multiple=multiple, counters=counters)


def serve_local(
    rounds: common.Rounds,
    model: keras.Model,
    optimizer: Any,
    data: recsync.data.Synthetic,
    metrics: Sequence[Any] = (),
) -> None:
    """Takes turns with `model.fit` in this process, eight steps per call."""
    model.compile(
        optimizer,
        "binary_crossentropy",
        metrics=list(metrics),
        steps_per_execution=STEPS_PER_EXECUTION,
        jit_compile=False,
    )
    batches = in_memory(data.train(rounds.batch_size))
    serve_fit(rounds, model, batches, multiple=STEPS_PER_EXECUTION)


def start_cluster(
    rounds: common.Rounds, workers: int, ps: int, transport: str = "recsync"
) -> recsync.LocalCluster:
    """Starts a system's servers, whose processor time then counts as the system's."""
    cluster = recsync.LocalCluster(workers=workers, ps=ps, transport=transport)
    jobs = {"worker": workers, "ps": ps}
    rounds.watch_servers(
        cluster.pid(job, index) for job, size in jobs.items() for index in range(size)
    )
    return cluster


def build_stock(spec: recsync.data.FeatureSpec) -> keras.Model:
    """The model in plain Keras: an Embedding layer for each of the 52 tables."""
    return _build(spec, collections=False)


def build_ours(spec: recsync.data.FeatureSpec) -> keras.Model:
    """The model with this package's layers: an EmbeddingCollection for each part."""
    return _build(spec, collections=True)


def _build(spec: recsync.data.FeatureSpec, collections: bool) -> keras.Model:
    keras.utils.set_random_seed(common.SEED)
    return build_wide_deep(
        spec,
        embedding_dimension=DIMENSION,
        hidden_units=HIDDEN_UNITS,
        collections=collections,
    )


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


class MergedModel:
    """The model by hand: tables merged into one with offsets, and TensorFlow's fused update ops.

    Each device has one table of dimension 16 and one of dimension 1 with the rows of some of the
    features, and some of the dense variables, such that about the same is everywhere.

    Args:
        spec: The data's features.
        devices: Where the variables are; [None] for this process.
        pack_dense: Makes all dense variables of a device one, which the step cuts up.
        unique: Looks up and updates each row once, however often the batch names it; without, the
            update op goes through the batch's ids one by one.
    """

    def __init__(
        self,
        spec: recsync.data.FeatureSpec,
        devices: Sequence[str | None],
        *,
        pack_dense: bool = False,
        unique: bool = True,
    ):
        self._pack_dense = pack_dense
        self._unique = unique
        parts = range(len(devices))
        self._names: list[list[str]] = [[] for _ in devices]
        self._offsets: list[list[int]] = [[] for _ in devices]
        rows = [0 for _ in devices]
        # The largest first, each to the table that is the smallest so far.
        for name, size in sorted(spec.categorical.items(), key=lambda item: -item[1]):
            part = min(parts, key=lambda i: (rows[i], len(self._names[i])))
            self._names[part].append(name)
            self._offsets[part].append(rows[part])
            rows[part] += size
        rng = np.random.default_rng(common.SEED)
        deep = [rng.uniform(-0.05, 0.05, (n, DIMENSION)).astype(np.float32) for n in rows]
        wide = [np.zeros((n, 1), np.float32) for n in rows]
        self._tables = [
            _Updated(device, values)
            for tables in (deep, wide)
            for device, values in zip(devices, tables, strict=True)
        ]

        # The shapes of kernels and biases: the deep part's layers, then the wide part's.
        width = len(spec.numeric) + DIMENSION * len(spec.categorical)
        shapes: list[tuple[int, ...]] = []
        for units in (*HIDDEN_UNITS, 1):
            shapes += [(width, units), (units,)]
            width = units
        shapes += [(len(spec.numeric), 1), (1,)]
        self._dense_of: list[list[np.ndarray]] = [[] for _ in devices]
        self._dense_order: list[int] = []
        for shape in shapes:
            part = min(parts, key=lambda i: sum(value.size for value in self._dense_of[i]))
            limit = (6 / sum(shape)) ** 0.5 if len(shape) > 1 else 0.0
            value = rng.uniform(-limit, limit, shape).astype(np.float32)
            self._dense_of[part].append(value)
            self._dense_order.append(part)
        self._dense: list[_Updated] = []
        for device, values in zip(devices, self._dense_of, strict=True):
            if pack_dense:
                values = [np.concatenate([value.ravel() for value in values])]
            self._dense += [_Updated(device, value) for value in values]

    def merge(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Makes (numeric, (rows of each merged table [batch, features], ...), label) of batches."""

        def merge_one(
            features: dict[str, tf.Tensor], label: tf.Tensor
        ) -> tuple[tf.Tensor, tuple[tf.Tensor, ...], tf.Tensor]:
            merged = (
                tf.stack([features[name] for name in names], axis=1)
                + np.array(offsets, dtype=np.int64)
                for names, offsets in zip(self._names, self._offsets, strict=True)
            )
            return features["numeric"], tuple(merged), label

        return batches.map(merge_one)

    def train_step(
        self, numeric: tf.Tensor, ids: Sequence[tf.Tensor], labels: tf.Tensor
    ) -> tf.Tensor:
        """Trains on a batch of `merge`; returns the loss before the step."""
        shapes = [tf.shape(part) for part in ids]
        rows = [tf.reshape(part, [-1]) for part in ids]
        if self._unique:
            unique = [tf.unique(part) for part in rows]
            rows = [part.y for part in unique]
            places = [tf.reshape(u.idx, shape) for u, shape in zip(unique, shapes, strict=True)]
        else:
            places = [tf.reshape(tf.range(tf.size(part)), tf.shape(part)) for part in ids]
        rows, places = rows * 2, places * 2  # Of the deep tables, then of the wide ones.
        pulled = [table.pull_rows(r) for table, r in zip(self._tables, rows, strict=True)]
        values = [one.variable.read_value() for one in self._dense]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([pulled, values])
            if self._unique:
                embeddings = [tf.gather(p, place) for p, place in zip(pulled, places, strict=True)]
            else:
                embeddings = [
                    tf.reshape(p, [-1, place.shape[1], p.shape[1]])
                    for p, place in zip(pulled, places, strict=True)
                ]
            loss = self._loss(numeric, embeddings, self._in_order(values), labels)
        row_gradients, gradients = tape.gradient(loss, [pulled, values])
        for table, gradient, r in zip(self._tables, row_gradients, rows, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.math.unsorted_segment_sum(
                    gradient.values, gradient.indices, tf.size(r)
                )
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                **table.update_arguments(), grad=gradient, indices=r
            )
        for one, gradient in zip(self._dense, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdagradV2(**one.update_arguments(), grad=gradient)
        return loss

    def _in_order(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The dense values in the model's order."""
        if self._pack_dense:
            values = [
                tf.reshape(part, like.shape)
                for packed, likes in zip(values, self._dense_of, strict=True)
                for part, like in zip(
                    tf.split(packed, [like.size for like in likes]), likes, strict=True
                )
            ]
        rest = iter(values)
        by_device = [[next(rest) for _ in likes] for likes in self._dense_of]
        return [by_device[part].pop(0) for part in self._dense_order]

    def _loss(
        self,
        numeric: tf.Tensor,
        embeddings: Sequence[tf.Tensor],
        dense: Sequence[tf.Tensor],
        labels: tf.Tensor,
    ) -> tf.Tensor:
        half = len(embeddings) // 2
        flat = [tf.reshape(e, [-1, e.shape[1] * e.shape[2]]) for e in embeddings[:half]]
        hidden = tf.concat([numeric, *flat], axis=1)
        *layers, last, wide = zip(dense[0::2], dense[1::2], strict=True)
        for kernel, bias in layers:
            hidden = tf.nn.relu(tf.nn.bias_add(tf.matmul(hidden, kernel), bias))
        logit = tf.matmul(hidden, last[0]) + last[1] + tf.matmul(numeric, wide[0]) + wide[1]
        logit += tf.add_n([tf.reduce_sum(e, axis=1) for e in embeddings[half:]])
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logit))


class _Updated:
    """A variable and its accumulator on a device."""

    def __init__(self, device: str | None, value: np.ndarray):
        self._device = device
        with tf.device(device):
            self.variable = tf.Variable(value)
            self._accumulator = tf.Variable(np.full_like(value, INITIAL_ACCUMULATOR))

    def pull_rows(self, rows: tf.Tensor) -> tf.Tensor:
        pulled = tf.raw_ops.ResourceGather(
            resource=self.variable.handle, indices=rows, dtype=tf.float32
        )
        return tf.ensure_shape(pulled, [None, self.variable.shape[1]])

    def update_arguments(self) -> dict[str, tf.Tensor]:
        with tf.device(self._device):  # Else the constants would be sent in each step.
            return {
                "var": self.variable.handle,
                "accum": self._accumulator.handle,
                "lr": tf.constant(LEARNING_RATE),
                "epsilon": tf.constant(EPSILON),
            }
