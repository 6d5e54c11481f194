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
TEXTS = np.array([["a b"], ["b a"], ["zzz a"], ["b b"], ["a a"], ["b zzz"]])
VALUES = np.array([[0.1], [0.5], [2.0], [0.5], [0.1], [0.5]], np.float32)
FEATURES = {
    "strings": (WORDS, lambda: layers.StringLookup(vocabulary=["a", "b"])),
    "integers": (NUMBERS, lambda: layers.IntegerLookup(vocabulary=[1, 2])),
    "texts": (
        TEXTS,
        lambda: layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=2),
    ),
    "hashed": (WORDS, lambda: layers.Hashing(4)),
    "ranges": (VALUES, lambda: layers.Discretization([0.3, 1.0])),
}
ROWS = 6  # Of each feature's table; more than it has ids.


@pytest.fixture
def cluster(clusters):
    return clusters.get(WORKERS, 1)


STRATEGIES = {
    "Async": recsync.AsyncStrategy,
    "GBA": lambda cluster: recsync.GBAStrategy(
        cluster, global_batch_size=2, local_batch_size=1, staleness_tolerance=3
    ),
    "Hop": lambda cluster: recsync.HopStrategy(cluster, topology.ring(WORKERS)),
    "ShadowSync": lambda cluster: recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3)),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_rows_that_the_layers_name_are_trained(cluster, kind):
    strategy = STRATEGIES[kind](cluster)
    with strategy.scope():
        inputs, pooled = {}, []
        for name, (values, make) in FEATURES.items():
            inputs[name] = keras.Input((1,), dtype=tf.as_dtype(values.dtype).name, name=name)
            table = layers.Embedding(ROWS, 1, "ones", name=f"rows_of_{name}")
            pooled.append(keras.ops.sum(table(make()(inputs[name])), axis=1))
        model = keras.Model(inputs, keras.ops.sum(keras.ops.stack(pooled), axis=0))
        model.compile(recsync.optimizers.SGD(RATE), loss=lambda _, output: output)
    data = {name: values for name, (values, _) in FEATURES.items()}
    labels = np.zeros(len(WORDS), np.float32)
    model.fit(tf.data.Dataset.from_tensor_slices((data, labels)).batch(1), verbose=0)
    for name, (values, make) in FEATURES.items():
        ids = np.asarray(make()(values)).ravel()
        counts = np.bincount(ids, minlength=ROWS)
        table = np.asarray(model.get_layer(f"rows_of_{name}").embeddings.value).ravel()
        assert not np.any((table < 1.0) & (counts == 0)), name
        if kind != "ShadowSync":  # Whose output need not have come by all trainers' steps.
            np.testing.assert_array_equal(table < 1.0, counts > 0, name)
        if kind == "Async":
            # A gradient of 1 for each time that a row is named.
            np.testing.assert_allclose(table, 1.0 - RATE * counts, atol=1e-6, err_msg=name)


def test_a_feature_space_trains_and_predicts(cluster):
    space = keras.utils.FeatureSpace
    raw = {
        "site": np.array(["x", "y", "x", "z"] * 8),
        "ad": np.array(["q", "w", "e", "r"] * 8),
        "price": np.array([0.1, 0.2, 0.3, 0.4] * 8, np.float32),
    }
    labels = np.array([0, 1, 0, 1] * 8, np.float32)
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope():
        features = space(
            {
                "site": space.string_categorical(output_mode="int"),
                "ad": space.string_hashed(8, output_mode="int"),
                "price": space.float_normalized(),
            },
            output_mode="dict",
        )
        features.adapt(tf.data.Dataset.from_tensor_slices(raw))
        encoded = features.get_encoded_features()
        embedded = [
            layers.Flatten()(layers.Embedding(8, 2)(encoded[name])) for name in ("site", "ad")
        ]
        output = layers.Dense(1, "sigmoid")(layers.Concatenate()([*embedded, encoded["price"]]))
        model = keras.Model(features.get_inputs(), output)
        model.compile(recsync.optimizers.Adagrad(0.5), "binary_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((raw, labels)).batch(4)
    losses = model.fit(data, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    predicted = model.predict(data, verbose=0).ravel()
    np.testing.assert_array_equal(predicted > 0.5, labels > 0.5)
