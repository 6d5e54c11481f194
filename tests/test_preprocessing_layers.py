"""Keras's preprocessing layers in models that are trained under a strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_recsync as recsync
from tf_recsync import topology

WORKERS, RATE = 3, 0.01
WORDS = np.array([["a"], ["b"], ["zzz"], ["b"], ["a"], ["b"]])
NUMBERS = np.array([[1], [2], [9], [2], [1], [2]], np.int64)
TEXTS = np.array(["a b", "a", "zzz a", "b b", "a a", "b zzz"])
VALUES = np.array([[0.1], [0.5], [2.0], [0.5], [0.1], [0.5]], np.float32)
# Layers that give ids, of which an Embedding has the rows.
IDS = {
    "strings": (WORDS, lambda: layers.StringLookup(vocabulary=["a", "b"])),
    "integers": (NUMBERS, lambda: layers.IntegerLookup(vocabulary=[1, 2])),
    "texts": (
        TEXTS,
        lambda: layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=2),
    ),
    "hashed": (WORDS, lambda: layers.Hashing(4)),
    "crossed": ((WORDS, NUMBERS), lambda: layers.HashedCrossing(4)),
    "ranges": (VALUES, lambda: layers.Discretization([0.3, 1.0])),
}


def adapted(layer, values):
    layer.adapt(values)
    return layer


def encoded(ids, depth) -> np.ndarray:
    """Which ids each example has."""
    return np.array([[float(i in example) for i in range(depth)] for example in ids])


# In texts, what the vocabulary lacks has the number 0, then come words in the order of their
# frequency. "tf_idf" counts an example's words, and weighs each by
# log(1 + texts / (1 + texts with it)), what the vocabulary lacks by the mean of these.
WORDS_OF_TEXTS = [[["zzz", "a", "b"].index(word) for word in text.split()] for text in TEXTS]
TEXTS_WITH = encoded(WORDS_OF_TEXTS, 3).sum(0)
WEIGHTS = np.log(1.0 + len(TEXTS) / (1.0 + TEXTS_WITH))
WEIGHTS[0] = WEIGHTS[1:].mean()
# Layers that give numbers, of which a Dense layer takes the weighted sum; and what they are.
NUMBERS_OF = {
    "categories": (NUMBERS, lambda: layers.CategoryEncoding(10), encoded(NUMBERS, 10)),
    "normalized": (
        VALUES,
        lambda: adapted(layers.Normalization(), VALUES[:3]),
        (VALUES - VALUES[:3].mean()) / VALUES[:3].std(),
    ),
    "rescaled": (VALUES, lambda: layers.Rescaling(2.0, offset=1.0), 2.0 * VALUES + 1.0),
    "words_of_texts": (
        TEXTS,
        lambda: layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot"),
        encoded(WORDS_OF_TEXTS, 3),
    ),
    "weighed_texts": (
        TEXTS,
        lambda: adapted(layers.TextVectorization(3, output_mode="tf_idf"), TEXTS),
        np.array([np.bincount(text, minlength=3) for text in WORDS_OF_TEXTS]) * WEIGHTS,
    ),
}
ROWS = 6  # Of each layer's table; more than it has ids.


@pytest.fixture
def cluster(clusters):
    return clusters.get(WORKERS, ps=4)


GLOBAL = {"global_batch_size": 2, "local_batch_size": 1}
STRATEGIES = {
    "Async": recsync.AsyncStrategy,
    "BoundedStaleness": lambda cluster: recsync.BoundedStalenessStrategy(cluster, 2),
    "Sync": lambda cluster: recsync.SyncStrategy(cluster, **GLOBAL),
    "BSP": lambda cluster: recsync.BSPStrategy(cluster, **GLOBAL),
    "GBA": lambda cluster: recsync.GBAStrategy(cluster, staleness_tolerance=3, **GLOBAL),
    "BackupWorkers": lambda cluster: recsync.BackupWorkersStrategy(cluster, 1),
    # The mean, as the first one need not have a batch.
    "Hop": lambda cluster: recsync.HopStrategy(cluster, topology.ring(WORKERS), output="mean"),
    "ShadowSync": lambda cluster: recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.3), output="mean"
    ),
    "Hierarchical": lambda cluster: recsync.HierarchicalStrategy(
        cluster,
        recsync.Hop(topology.ring(WORKERS)),
        groups=WORKERS,
        trainers_per_group=1,
        ps_per_group=1,
        output="mean",
    ),
}
# Strategies of one kind trace a step alike: one of each has all layers, the others have these.
ALL_LAYERS = ("Async", "GBA", "Hop", "ShadowSync")
SOME_LAYERS = ("strings", "weighed_texts")
# What a batch of one example weighs: one where each is applied, a half where two are averaged.
WEIGHT = {"Async": 1.0, "BoundedStaleness": 1.0, "Sync": 0.5, "BSP": 0.5, "GBA": 0.5}


def inputs_of(name, values) -> dict[keras.KerasTensor, np.ndarray]:
    """The Keras inputs of a layer, which have its name, and the data for them."""
    arrays = values if isinstance(values, tuple) else (values,)
    return {
        keras.Input(array.shape[1:], dtype=tf.as_dtype(array.dtype).name, name=f"{name}_{i}"): array
        for i, array in enumerate(arrays)
    }


def outputs_of(layer, inputs):
    return layer(list(inputs) if len(inputs) > 1 else inputs[0])


@pytest.mark.cases("GBA", "Hierarchical")
@pytest.mark.parametrize("kind", STRATEGIES)
def test_what_the_layers_make_of_the_data_is_trained_on(cluster, kind):
    strategy = STRATEGIES[kind](cluster)

    def of_kind(features):
        return {n: f for n, f in features.items() if kind in ALL_LAYERS or n in SOME_LAYERS}.items()

    data, outputs = {}, []
    with strategy.scope():
        for name, (values, make) in of_kind(IDS):
            own = inputs_of(name, values)
            table = layers.Embedding(ROWS, 1, "ones", name=f"of_{name}")
            rows = layers.Flatten()(table(outputs_of(make(), [*own])))
            outputs.append(keras.ops.sum(rows, axis=1, keepdims=True))
            data |= own
        for name, (values, make, _) in of_kind(NUMBERS_OF):
            own = inputs_of(name, values)
            dense = layers.Dense(1, use_bias=False, kernel_initializer="ones", name=f"of_{name}")
            outputs.append(dense(outputs_of(make(), [*own])))
            data |= own
        model = keras.Model(list(data), keras.ops.sum(keras.ops.stack(outputs), axis=0))
        model.compile(recsync.optimizers.SGD(RATE), loss=lambda _, output: output)
    data = {tensor.name: values for tensor, values in data.items()}
    labels = np.zeros(len(WORDS), np.float32)
    model.fit(tf.data.Dataset.from_tensor_slices((data, labels)).batch(1), verbose=0)

    # The gradient that each example has for each weight: how often it names the row, or the input.
    gradients = {name: encoding for name, (_, _, encoding) in of_kind(NUMBERS_OF)}
    for name, (values, make) in of_kind(IDS):
        ids = np.asarray(make()(values)).reshape(len(WORDS), -1)
        gradients[name] = np.stack([np.bincount(row, minlength=ROWS) for row in ids])
    for name, gradient in gradients.items():
        (weights,) = model.get_layer(f"of_{name}").get_weights()
        moved = 1.0 - weights.ravel()
        assert np.any(moved), name
        assert not np.any(moved[~np.any(gradient, axis=0)]), name
        if kind in WEIGHT:
            expected = RATE * WEIGHT[kind] * gradient.sum(0)
            np.testing.assert_allclose(moved, expected, atol=1e-6, err_msg=name)


@pytest.mark.cases("Hop")
@pytest.mark.parametrize("kind", ["Async", "Hop"])
def test_a_feature_space_trains_and_predicts(cluster, kind):
    space = keras.utils.FeatureSpace
    raw = {
        "site": np.array(["x", "y", "x", "z"] * 8),
        "ad": np.array(["q", "w", "e", "r"] * 8),
        "price": np.array([0.1, 0.2, 0.3, 0.4] * 8, np.float32),
    }
    labels = np.array([0, 1, 0, 1] * 8, np.float32)
    strategy = STRATEGIES[kind](cluster)
    with strategy.scope():
        features = space(
            {
                "site": space.string_categorical(output_mode="int"),
                "ad": space.string_hashed(8, output_mode="int"),
                "price": space.float_normalized(),
            },
            crosses=[space.cross(("site", "ad"), crossing_dim=8, output_mode="int")],
            output_mode="dict",
        )
        features.adapt(tf.data.Dataset.from_tensor_slices(raw))
        encoded = features.get_encoded_features()
        embedded = [
            layers.Flatten()(layers.Embedding(8, 2)(encoded[name]))
            for name in ("site", "ad", "site_X_ad")
        ]
        output = layers.Dense(1, "sigmoid")(layers.Concatenate()([*embedded, encoded["price"]]))
        model = keras.Model(features.get_inputs(), output)
        model.compile(recsync.optimizers.Adagrad(0.5), "binary_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((raw, labels)).batch(4)
    losses = model.fit(data, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    predicted = model.predict(data, verbose=0).ravel()
    np.testing.assert_array_equal(predicted > 0.5, labels > 0.5)
