"""Tables whose ids are keys, in one process: against numpy, dicts and tables of numbered ids."""

import itertools
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, wait_until

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.checkpoint.index import INDEX
from tf_recsync.embedding import checkpoint, table_rows
from tf_recsync.layers import (
    Admission,
    DotInteraction,
    EmbeddingCollection,
    Eviction,
    FeatureConfig,
    TableConfig,
)
from tf_recsync.ops.bags import PackedBags
from tf_recsync.optimizers import SGD, Adagrad, Adam, Ftrl, SwapAdagrad

EXTREMES = [0, -1, 2**63 - 1, -(2**63), 17, 2**40]
UNIFORM = keras.initializers.RandomUniform(-1, 1, seed=3)


def keyed_layer(rows=64, dimension=3, features=("user",), padding=None, **options):
    options = {"initializer": UNIFORM, "keys": "any", **options}
    return EmbeddingCollection(
        [TableConfig("users", rows=rows, dimension=dimension, **options)],
        [FeatureConfig(name, "users", padding=padding) for name in features],
        name="embeddings",
    )


def looked_up(layer, keys, training=False) -> np.ndarray:
    return layer({"user": tf.constant(keys)}, training=training)["user"].numpy()


def train(layer, optimizer, keys, gradient=1.0) -> None:
    """A step whose gradient of each of the keys' vectors is the same number everywhere."""
    with tf.GradientTape() as tape:
        loss = gradient * tf.reduce_sum(layer({"user": tf.constant(keys)}, training=True)["user"])
    variables = layer.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)


@pytest.mark.parametrize(
    "make",
    [lambda: SGD(0.1), lambda: Adagrad(0.1), lambda: Adam(0.01), lambda: keras.optimizers.SGD(0.1)],
)
@pytest.mark.parametrize("as_strings", [False, True])
def test_keys_are_trained_as_rows_of_a_table_of_numbered_ids(make, as_strings):
    rng = np.random.default_rng(5)
    keys = np.array(EXTREMES)
    names = np.array([f"user {key}" for key in keys]) if as_strings else keys
    layer = keyed_layer()
    first = looked_up(layer, names, training=True)
    assert np.abs(first).min() > 0 and len(np.unique(first)) == first.size
    numbered = EmbeddingCollection(
        [TableConfig("rows", len(keys), 3, initializer=first)], [FeatureConfig("user", "rows")]
    )
    numbered.build()
    optimizers = make(), make()
    for _ in range(12):
        rows = rng.integers(0, len(keys), 8)
        gradient = float(rng.normal())
        train(layer, optimizers[0], names[rows], gradient)
        train(numbered, optimizers[1], rows, gradient)
    assert_close([looked_up(layer, names)], [numbered.table_values("rows")])
    counts = layer.key_counts()["users"]
    assert (counts.used, counts.admitted, counts.evicted) == (len(keys), len(keys), 0)


def test_first_values_depend_on_the_key_and_the_seed_alone():
    keys = np.arange(-20, 20) * 2**50
    vectors = looked_up(keyed_layer(), keys, training=True)
    others = looked_up(keyed_layer(rows=9000), keys[::-1].copy(), training=True)[::-1]
    np.testing.assert_array_equal(vectors, others)
    different = keyed_layer(initializer=keras.initializers.RandomUniform(-1, 1, seed=4))
    assert not np.any(looked_up(different, keys, training=True) == vectors)
    assert abs(vectors.mean()) < 0.2 and 0.45 < vectors.std() < 0.7


def test_lookups_without_training_give_no_key_a_row():
    layer = keyed_layer()
    known = looked_up(layer, EXTREMES[:3], training=True)
    found = looked_up(layer, [*EXTREMES[:3], 5, 6])
    np.testing.assert_array_equal(found, np.concatenate([known, np.zeros([2, 3])]))
    counts = layer.key_counts()["users"]
    assert (counts.used, counts.unknown) == (3, 2)


@pytest.mark.parametrize("unknown", ["zeros", "trained"])
def test_keys_without_a_row_are_zeros_or_share_a_row_that_is_trained(unknown):
    layer = keyed_layer(unknown=unknown, admission=Admission(200))
    optimizer = SGD(0.1)
    for keys in ([1, 2], [3, 3]):
        train(layer, optimizer, keys)
    expected = -0.4 if unknown == "trained" else 0.0
    np.testing.assert_allclose(looked_up(layer, [1, 9]), np.full([2, 3], expected), rtol=1e-6)
    assert layer.key_counts()["users"].refused == 3  # A batch looks a key up once.


def rows_of_keys(layer) -> np.ndarray:
    return np.concatenate([vectors for _, vectors in layer.read_keys("users")])


@pytest.mark.cases(
    "<lambda>0-bfloat16", "<lambda>1-float32", "<lambda>2-float32", "<lambda>3-bfloat16"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "make",
    [lambda: SGD(0.1), lambda: Adam(0.01), lambda: Ftrl(0.1), lambda: keras.optimizers.SGD(0.1)],
)
def test_keys_without_a_row_may_be_the_mean_of_the_others_and_train_nothing(make, dtype):
    layer, zeros = (
        keyed_layer(unknown=unknown, admission=Admission(2), dtype=dtype)
        for unknown in ("mean", "zeros")
    )
    assert not looked_up(layer, [9]).any()
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    for own in (layer, zeros):
        optimizer = make()
        for new in range(100, 105):
            for key in (1, 1, 2, 3, 3, 2):
                train(own, optimizer, [key, key])
            before = rows_of_keys(own)
            train(own, optimizer, [1, new, new])
            if own is layer:
                expected = np.broadcast_to(before.mean(0), [2, 3])
                np.testing.assert_allclose(looked_up(own, [9, new]), expected, rtol=tolerance)
    # As if the others had never been there.
    assert layer.key_counts()["users"].used == zeros.key_counts()["users"].used == 3
    np.testing.assert_array_equal(looked_up(layer, [1, 2, 3]), looked_up(zeros, [1, 2, 3]))


def test_in_training_too_keys_that_are_not_admitted_are_the_mean():
    layer = keyed_layer(unknown="mean", admission=Admission(2), features=("user", "item"))
    keys = tf.constant([1, 2, 3])
    for _ in range(2):
        layer({"user": keys, "item": keys}, training=True)
    known = rows_of_keys(layer)
    found = layer({"user": tf.constant([1, 50]), "item": tf.constant([60, 60])}, training=True)
    for vectors in (found["user"][1], *found["item"]):
        np.testing.assert_allclose(vectors, known.mean(0), rtol=1e-6)
    # Steps of `fit`, some of which have none but such keys.
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    vectors = layer(inputs)
    model = keras.Model(inputs, keras.ops.sum(vectors["user"] + vectors["item"], axis=1))
    model.compile(SGD(0.5), loss=lambda y, p: p)
    ids = np.array([70, 71, 72, 1, 73, 74])
    model.fit({"user": ids, "item": ids[::-1].copy()}, ids, 2, shuffle=False, verbose=0)
    # The middle one of the batches has 72 and 1 twice.
    expected = known - [[0.5], [0.0], [0.0]]
    np.testing.assert_allclose(layer({"user": keys, "item": keys})["user"], expected, rtol=1e-5)


def test_bags_of_known_and_unknown_keys_are_sums_of_rows_and_the_mean():
    def layer_of(unknown):
        layer = EmbeddingCollection(
            [
                TableConfig(
                    *("all", 64, 3, UNIFORM, "mean"),
                    keys="any",
                    admission=Admission(100),
                    unknown=unknown,
                )
            ],
            [FeatureConfig("bag", "all")],
        )
        layer.build()
        layer.write_keys("all", [1, 2], [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
        return layer

    lengths = [2, 0, 2, 1]
    inputs = {"bag": tf.RaggedTensor.from_row_lengths([1, 8, 9, 2, 9], lengths)}
    weights = {"bag": tf.RaggedTensor.from_row_lengths([1.0, 3.0, 0.5, 1.5, 2.0], lengths)}
    vectors = np.array([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
    mean, layers = vectors.mean(0), {unknown: layer_of(unknown) for unknown in ("mean", "zeros")}
    expected = [(vectors[0] + 3 * mean) / 4, np.zeros(3), (0.5 * mean + 1.5 * vectors[1]) / 2, mean]
    gradients = []
    for (unknown, layer), training in itertools.product(layers.items(), (True, False)):
        with tf.GradientTape() as tape:
            found = layer(inputs, weights=weights, training=training)["bag"]
        above = tf.tile([[1.0, 2.0, 4.0]], [4, 1])
        (gradient,) = tape.gradient(found, layer.trainable_variables, above)
        gradients.append(tf.convert_to_tensor(gradient).numpy())
        if unknown == "mean":
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    rows = np.zeros([64, 3])
    rows[1:3] = np.array([[1 / 4], [1.5 / 2]]) * [[1.0, 2.0, 4.0]]
    for gradient in gradients:
        np.testing.assert_allclose(gradient, rows, rtol=1e-6)


def test_a_pass_for_the_mean_takes_a_part_of_the_rows_with_each_lookup():
    layer = keyed_layer(rows=9000, unknown="mean")  # Two partitions.
    keys = np.arange(300) * 2**50
    looked_up(layer, keys, training=True)
    assert not looked_up(layer, np.arange(1, 20)).any()
    for _ in range(7):
        looked_up(layer, keys, training=True)
    found = looked_up(layer, np.arange(1, 20))
    expected = np.broadcast_to(rows_of_keys(layer).astype(float).mean(0), found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_keys_that_have_left_or_have_expired_are_in_no_mean():
    layer = keyed_layer(rows=5, unknown="mean", eviction=Eviction(max_idle=4))
    for key in (1, 2, 3, 4, 5):  # The first has left for the last.
        looked_up(layer, [key], training=True)
    np.testing.assert_allclose(looked_up(layer, [1])[0], rows_of_keys(layer).mean(0), rtol=1e-5)
    for _ in range(4):
        looked_up(layer, [5], training=True)
    np.testing.assert_allclose(*looked_up(layer, [5, 1]), rtol=1e-6)


def test_files_have_the_mean_and_what_is_read_or_written_makes_no_wrong_one(tmp_path):
    layer = keyed_layer(unknown="mean")
    model = model_of(layer)
    train(layer, SGD(0.1), [1, 2, 3])
    expected = looked_up(layer, [2, 9])
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    recsync.checkpoint.save(tmp_path / "own", model)
    loaded = keras.models.load_model(tmp_path / "model.keras").get_layer("embeddings")
    assert loaded.table_configs[0].unknown == "mean"
    np.testing.assert_array_equal(looked_up(loaded, [2, 9]), expected)
    for load in (
        lambda model: model.load_weights(tmp_path / "model.weights.h5"),
        lambda model: recsync.checkpoint.restore(tmp_path / "own", model),
    ):
        other = keyed_layer(unknown="mean")
        other_model = model_of(other)
        looked_up(other, np.arange(20, 70), training=True)  # In the middle of a pass.
        load(other_model)
        np.testing.assert_array_equal(looked_up(other, [2, 9]), expected)
        known = rows_of_keys(other)
        looked_up(other, [1], training=True)
        np.testing.assert_allclose(looked_up(other, [9])[0], known.mean(0), rtol=1e-5)


def test_vectors_that_are_written_are_in_the_mean_at_once():
    layer = keyed_layer(rows=9000, unknown="mean")
    layer.build()
    vectors = np.random.default_rng(1).normal(size=[200, 3]).astype(np.float32)
    assert layer.write_keys("users", np.arange(200), vectors) == 200
    expected = vectors.astype(float).mean(0)
    np.testing.assert_allclose(looked_up(layer, [777])[0], expected, rtol=1e-5, atol=1e-7)


def test_a_key_is_admitted_when_it_has_been_looked_up_often_enough():
    layer = keyed_layer(admission=Admission(3))
    for times, is_there in ((1, False), (2, False), (3, True)):
        assert np.any(looked_up(layer, [7], training=True)) == is_there, times
        looked_up(layer, [7])  # Not in training.
    counts = layer.key_counts()["users"]
    assert (counts.used, counts.refused) == (1, 2)


def test_keys_are_admitted_with_a_probability_at_each_lookup():
    layer = keyed_layer(rows=4000, admission=Admission(probability=0.2))
    looked_up(layer, np.arange(3000), training=True)
    counts = layer.key_counts()["users"]
    assert abs(counts.used - 600) < 5 * np.sqrt(3000 * 0.2 * 0.8)
    assert counts.refused == 3000 - counts.used
    for _ in range(60):
        looked_up(layer, np.arange(3000), training=True)
    assert layer.key_counts()["users"].used > 2990


def test_time_may_be_that_of_the_clock_which_goes_on_while_nobody_trains(tmp_path):
    layer = keyed_layer(eviction=Eviction(max_idle=1e6, unit="seconds"))
    vectors = looked_up(layer, [1, 2], training=True)
    looked_up(layer, [2], training=True)
    keyed = layer.variables[0].keyed
    ticks = keyed.entries.numpy()[1:3, 1].astype(np.uint64) >> np.uint64(24)
    now = (time.time() - 1577836800) * 1024
    assert (abs(ticks.astype(float) - now) < 600 * 1024).all()
    assert ticks[0] != ticks[1]  # Also within one 1024th of a second.
    np.testing.assert_array_equal(looked_up(layer, [1, 2]), vectors)
    # As if the first key had been looked up two million seconds ago.
    entries = keyed.entries.numpy()
    row = int(keyed.find(np.array([1]), False)[0][0])
    entries[row, 1] -= int(2e6 * 1024) << 24
    keyed.entries.assign(entries)
    keyed.forget_index()
    assert looked_up(layer, [1, 2]).any(1).tolist() == [False, True]
    model = model_of(layer)
    recsync.serving.export_model(model, tmp_path)
    served = tf.saved_model.load(tmp_path)
    known = served.serve({"user": tf.constant([1, 2], tf.int64)}).numpy().any(1)
    assert known.tolist() == [False, True]


def test_the_key_that_was_not_looked_up_for_longest_loses_its_row_and_begins_anew():
    layer = keyed_layer(rows=5)  # Room for four keys.
    optimizer = Adagrad(0.1, initial_accumulator_value=0.5)
    first = looked_up(layer, [1], training=True)
    for key in (1, 2, 3, 4, 2, 3, 4):
        train(layer, optimizer, [key])
    train(layer, optimizer, [5])  # In place of 1.
    assert not looked_up(layer, [1]).any() and looked_up(layer, [5]).all()
    train(layer, optimizer, [1])  # In place of 2.
    assert not looked_up(layer, [2]).any()
    np.testing.assert_allclose(looked_up(layer, [1]), first - 0.1 / np.sqrt(0.5 + 1.0), rtol=1e-5)
    counts = layer.key_counts()["users"]
    assert (counts.used, counts.capacity, counts.admitted, counts.evicted) == (4, 4, 6, 2)


def test_the_key_that_was_looked_up_least_often_leaves():
    layer = keyed_layer(rows=5, eviction=Eviction("least_frequent"))
    for key in (1, 1, 1, 2, 2, 3, 4, 4, 5):
        looked_up(layer, [key], training=True)
    assert looked_up(layer, [1, 2, 3, 4, 5]).any(1).tolist() == [True, True, False, True, True]


def test_a_key_that_was_idle_for_too_long_is_unknown_and_begins_anew():
    layer = keyed_layer(eviction=Eviction(max_idle=3))
    optimizer = SGD(0.1)
    train(layer, optimizer, [1])
    trained = looked_up(layer, [1])
    for key in (2, 3, 4):
        train(layer, optimizer, [key])
    np.testing.assert_array_equal(looked_up(layer, [1]), trained)
    train(layer, optimizer, [5])
    assert not looked_up(layer, [1]).any()
    np.testing.assert_allclose(looked_up(layer, [1], training=True), trained + 0.1, rtol=1e-5)
    assert layer.key_counts()["users"].expired == 1


def test_keys_of_one_batch_do_not_take_each_other_s_rows():
    layer = keyed_layer(rows=5)
    vectors = looked_up(layer, range(10), training=True)
    assert (vectors.any(1).sum(), layer.key_counts()["users"].refused) == (4, 6)


@pytest.mark.parametrize("way", ["sequences", "interactions"])
def test_keys_of_one_step_take_no_rows_of_each_other_whichever_feature_has_them(way):
    table = TableConfig(
        *("users", 5, 2, UNIFORM, None if way == "sequences" else "sum"),
        keys="any",
        eviction=Eviction("least_frequent"),
    )
    features = ("user", "item", "user 2", "item 2")
    interactions = []
    if way == "interactions":
        interactions = [
            DotInteraction("first", features=features[:2]),
            DotInteraction("second", features=features[2:]),
        ]
    layer = EmbeddingCollection(
        [table], [FeatureConfig(name, "users") for name in features], interactions=interactions
    )
    layer.build()
    optimizer = SGD(0.1)

    def step(keys):
        inputs = {n: tf.constant([key]) for n, key in zip(features, keys, strict=True)}
        with tf.GradientTape() as tape:
            found = layer(inputs, training=True)
            loss = sum(i * tf.reduce_sum(v) for i, v in enumerate(found.values(), 1))
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for _ in range(3):
        step([1, 2, 3, 4])
    (ticks,) = (v for v in layer.variables if v.name.endswith("_key_counts"))
    before = ticks.numpy()[0]
    step([5, 6, 7, 8])  # Of all keys, these were looked up least often.
    assert ticks.numpy()[0] == before + 1
    counts = layer.key_counts()["users"]
    assert (counts.used, counts.evicted, counts.refused) == (4, 4, 0)
    read = {int(k): v for ks, vs in layer.read_keys("users") for k, v in zip(ks, vs, strict=True)}
    # First values depend on the key and the seed alone.
    keys = np.array([5, 6, 7, 8])
    first = looked_up(keyed_layer(dimension=2, rows=64), keys, training=True)
    gradients = np.arange(1, 5)[:, np.newaxis]
    if way == "interactions":
        gradients = np.array([[1], [1], [2], [2]]) * first[[1, 0, 3, 2]]
    found = np.array([read[int(key)] for key in keys])
    np.testing.assert_allclose(found, first - 0.1 * gradients, rtol=1e-5)


def test_a_new_key_s_accumulator_is_not_decayed_for_periods_before_it():
    layer, optimizer = (
        keyed_layer(),
        SwapAdagrad(0.1, swap=recsync.Swap(period=2, decay=0.5), initial_accumulator_value=1.0),
    )
    for _ in range(9):
        train(layer, optimizer, [1])
    first = looked_up(layer, [2], training=True)
    train(layer, optimizer, [2])
    np.testing.assert_allclose(looked_up(layer, [2]), first - 0.1 / np.sqrt(2.0), rtol=1e-5)


def state_of(layer, optimizer):
    optimizer.build(layer.trainable_variables)
    return optimizer.states[0]


def pushed(optimizer, state, rows, versions, gradient) -> None:
    flat = tf.reshape(tf.constant(gradient, tf.float32), [-1])
    bags = PackedBags(tf.constant([len(rows)], tf.int64), tf.constant(rows, tf.int64))
    one = tf.constant(1, tf.int64)
    optimizer.apply_rows([state], flat, bags, tf.constant(versions, tf.int64), 1.0, one)


def test_a_gradient_whose_row_was_given_to_another_key_meanwhile_is_left_out_and_counted():
    layer, optimizer = keyed_layer(rows=3, dimension=1), SGD(1.0)  # Room for two keys.
    layer.build()
    state = state_of(layer, optimizer)
    (rows, versions) = (np.asarray(t) for t in state.keyed.find(np.array([1, 2]), True))
    state.keyed.find(np.array([2]), True)
    (new_row,), (new_version,) = state.keyed.find(np.array([3]), True)
    assert new_row == rows[0] and new_version > versions[0]
    before = looked_up(layer, [2, 3])
    pushed(optimizer, state, rows, versions, [5.0, 5.0])
    np.testing.assert_allclose(looked_up(layer, [2, 3]), before - [[5.0], [0.0]])
    pushed(optimizer, state, [int(new_row)], [int(new_version)], [5.0])
    np.testing.assert_allclose(looked_up(layer, [2, 3]), before - 5.0)
    counters = recsync.staleness.Statistics.from_counters([state.counters.numpy()])
    assert (counters.count, counters.skipped) == (2, 1)


def test_where_keys_were_summed_up_a_row_of_another_life_is_not_pushed_to():
    layer, optimizer = keyed_layer(rows=3, dimension=1), SGD(1.0)
    layer.build()
    keyed = state_of(layer, optimizer).keyed
    keys = np.array([1, 2])
    rows, versions = keyed.find(keys, True)
    same = keyed.find(keys, False, versions)
    np.testing.assert_array_equal(same, [rows, versions])
    keyed.find(np.array([2]), True)
    keyed.find(np.array([3]), True)  # In place of 1.
    _, found = keyed.find(np.array([1, 2]), False, versions)
    assert found.numpy().tolist() == [0, versions.numpy()[1]]
    assert layer.key_counts()["users"].unknown == 0  # It was counted when it was looked up.


def test_export_scores_keys_and_strings_with_stock_ops(tmp_path):
    names = [f"é{i}" for i in range(6)]
    for keys, unknown in ((EXTREMES, "zeros"), (names, "trained"), (names, "mean")):
        inputs = keras.Input((2,), dtype=tf.constant(keys).dtype.name, name="user")
        layer = keyed_layer(unknown=unknown, eviction=Eviction(max_idle=50))
        model = keras.Model({"user": inputs}, layer({"user": inputs})["user"])
        optimizer = SGD(0.1)
        # The last one is unknown; some rows train that stand for such keys.
        batch = np.array([keys[:5], keys[1:]]).T
        train(layer, optimizer, batch[:4])
        variables = [v for v in layer.variables if v.shape[1:] == (3,)]
        variables[0].assign_add(
            tf.one_hot([0], layer.variables[0].shape[0], 0.25)[0][:, None] * tf.ones([1, 3])
        )
        recsync.serving.export_model(model, tmp_path / unknown)
        served = tf.saved_model.load(tmp_path / unknown)
        expected = model.predict({"user": tf.constant(batch)}, verbose=0)
        np.testing.assert_allclose(served.serve({"user": tf.constant(batch)}), expected, atol=1e-6)
        operations = {
            node.op for f in served.signatures.values() for node in f.graph.as_graph_def().node
        }
        assert not any(op.startswith("Recsync") for op in operations)


def test_strings_are_keys_by_their_fingerprint():
    layer = keyed_layer()
    vectors = looked_up(layer, ["anna", "otto"], training=True)
    fingerprints = tf.bitcast(tf.fingerprint(["anna", "otto"]), tf.int64)
    np.testing.assert_array_equal(looked_up(layer, fingerprints), vectors)


def test_padding_of_strings_is_no_key():
    layer = keyed_layer(features=("user",), padding="", combiner=None)
    ids = tf.constant([["anna", ""], ["otto", "anna"]])
    vectors = layer({"user": ids}, training=True)["user"]
    assert vectors.numpy().any(2).tolist() == [[True, False], [True, True]]
    assert vectors._keras_mask.numpy().tolist() == [[True, False], [True, True]]
    assert layer.key_counts()["users"].used == 2


def test_weighted_bags_and_interactions_of_keys_are_those_of_numbered_rows():
    keys = np.array(EXTREMES)
    interaction = DotInteraction("dot", features=("user", "item"))

    def layer_of(initializer, ids):
        layer = EmbeddingCollection(
            [
                TableConfig(
                    "all", 32, 4, initializer, "mean", **({"keys": "any"} if ids is keys else {})
                )
            ],
            [FeatureConfig(name, "all") for name in ("user", "item", "bag")],
            interactions=[interaction],
        )
        inputs = {
            "user": tf.constant(ids[[0, 1]]),
            "item": tf.constant(ids[[2, 3]]),
            "bag": tf.RaggedTensor.from_row_lengths(ids[[4, 5, 0]], [2, 1]),
        }
        weights = {"bag": tf.RaggedTensor.from_row_lengths([0.5, 2.0, 1.0], [2, 1])}
        return layer, layer(inputs, weights=weights, training=True)

    layer, found = layer_of(UNIFORM, keys)
    values = np.zeros([32, 4], np.float32)
    values[: len(keys)] = layer.variables[0].numpy()[
        [int(layer.variables[0].keyed.find(keys[[i]], False)[0][0]) for i in range(len(keys))]
    ]
    _, expected = layer_of(values, np.arange(len(keys)))
    assert found.keys() == expected.keys()
    assert_close([found[name] for name in found], [expected[name] for name in found])


def test_weights_carry_the_keys(tmp_path):
    inputs = keras.Input((2,), dtype="string", name="user")
    layer = keyed_layer(admission=Admission(1), eviction=Eviction("least_frequent", half_life=9))
    model = keras.Model({"user": inputs}, layer({"user": inputs})["user"])
    train(layer, SGD(0.1), ["a", "b", "c", "b"])
    expected = looked_up(layer, ["a", "b", "c", "d"])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    config = loaded.get_layer("embeddings").table_configs[0]
    assert config == layer.table_configs[0] and config.eviction.half_life == 9
    np.testing.assert_array_equal(
        looked_up(loaded.get_layer("embeddings"), ["a", "b", "c", "d"]), expected
    )
    # Keys go on where they were: no one gets a second row, and their rows can be pushed to.
    train(loaded.get_layer("embeddings"), SGD(0.1), ["a", "b", "e"])
    assert loaded.get_layer("embeddings").key_counts()["users"].used == 4
    np.testing.assert_allclose(
        looked_up(loaded.get_layer("embeddings"), ["a"]), expected[:1] - 0.1, rtol=1e-5
    )


def test_rows_of_keys_that_were_loaded_without_versions_can_be_pushed_to():
    layer, optimizer = keyed_layer(), SGD(1.0)
    looked_up(layer, [1, 2], training=True)  # Before there are versions.
    state = state_of(layer, optimizer)
    rows, versions = (t.numpy() for t in state.keyed.find(np.array([1, 2]), True))
    before = looked_up(layer, [1, 2])
    pushed(optimizer, state, rows, versions, np.ones([2, 3]))
    np.testing.assert_allclose(looked_up(layer, [1, 2]), before - 1.0)


def test_bfloat16_rows_of_keys_are_narrowed_first_values():
    wide, narrow = (
        looked_up(keyed_layer(dtype=d), EXTREMES, True) for d in ("float32", "bfloat16")
    )
    np.testing.assert_array_equal(
        narrow, wide.astype(tf.bfloat16.as_numpy_dtype).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"keys": "some"}, "keys='some'.*'any'"),
        ({"rows": 1}, "rows=1: a table with keys needs at least 2"),
        ({"shards": 3, "rows": 90_000}, "shards=3: must be None or a power of two up to 16"),
        ({"keys": None, "unknown": "trained"}, "unknown='trained': must be 'zeros' without keys"),
        ({"keys": None, "admission": Admission(2)}, "admission=.*must be None without keys"),
        ({"eviction": "lru"}, "eviction='lru': must be None or an Eviction"),
        ({"unknown": "median"}, "unknown='median'.*'zeros', 'trained', 'mean'"),
    ],
)
def test_a_table_with_keys_that_can_t_be_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        TableConfig(**{"name": "t", "rows": 64, "dimension": 2, "keys": "any", **change})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Admission(0), "min_count must be an integer from 1 to 255, got 0"),
        (lambda: Admission(256), "min_count must be an integer from 1 to 255, got 256"),
        (lambda: Eviction("random"), "policy must be one of .*least_recent.*not 'random'"),
        (lambda: Eviction(half_life=3), "half_life must be None with policy='least_recent'"),
        (lambda: Eviction(max_idle=0), "max_idle must be an integer of at least 1"),
        (lambda: Eviction(max_idle=0.0, unit="seconds"), "max_idle must be positive, in seconds"),
        (lambda: Eviction(max_idle=2**40), "max_idle must be at most 1073741823, got"),
        (lambda: Eviction(unit="days"), "unit must be one of .*'seconds'.*, not 'days'"),
        (
            lambda: Admission(probability=0),
            "probability must be a number above 0 .*, not 0",
        ),
        (
            lambda: Admission(probability=1.5),
            "probability must be .* at most 1, not 1.5",
        ),
        (lambda: Admission(probability="1"), "probability must be a number .*, not '1'"),
    ],
)
def test_rules_for_keys_that_can_t_be_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_what_keys_can_t_have_is_refused_by_name():
    with pytest.raises(ValueError, match="'users': initializer must be one of Keras's that draws"):
        keyed_layer(initializer=np.zeros([64, 3], np.float32))
    with pytest.raises(ValueError, match="out_of_range='clip' must be 'error', as no key"):
        EmbeddingCollection(
            [TableConfig("users", 64, 2, keys="any")], [FeatureConfig("user", "users", "clip")]
        )
    with pytest.raises(ValueError, match="not string; a table with keys='any' takes strings"):
        plain = EmbeddingCollection([TableConfig("t", 9, 2)], [FeatureConfig("user", "t")])
        plain({"user": tf.constant(["a"])})
    with pytest.raises(ValueError, match="padding='' must be None or an int, as the ids of table"):
        EmbeddingCollection(
            [TableConfig("users", 64, 2)], [FeatureConfig("user", "users", padding="")]
        )
    with pytest.raises(ValueError, match="padding=-1 can't be among ids of string"):
        looked_up(keyed_layer(padding=-1), ["a"])
    with pytest.raises(ValueError, match="use_ema must be False for table .*users"):
        layer = keyed_layer()
        layer.build()
        SGD(0.1, use_ema=True).build(layer.trainable_variables)
    with pytest.raises(ValueError, match="XLA can't compile: compile the model with jit_compile"):
        layer = keyed_layer()
        tf.function(lambda ids: layer({"user": ids}), jit_compile=True)(tf.constant([1, 2]))


def test_keras_compiles_a_model_with_keys_without_xla_by_itself():
    inputs = keras.Input((2,), dtype="int64", name="user")
    model = keras.Model({"user": inputs}, keyed_layer()({"user": inputs})["user"])
    model.compile(SGD(0.1), "mse")
    assert not model.jit_compile
    model.fit({"user": np.array([[1, 2], [3, 4]])}, np.zeros([2, 3]), verbose=0)


@pytest.mark.full
def test_a_table_with_keys_lies_where_its_ops_run_whatever_the_default_device_is():
    script = """
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])
import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
tables = [TableConfig("users", 64, 3, keys="any", unknown="mean"), TableConfig("films", 64, 2)]
layer = EmbeddingCollection(tables, [FeatureConfig(table.name, table.name) for table in tables])
optimizer = recsync.optimizers.Adagrad(0.1, swap=recsync.Swap(period=5, decay=0.5))
with tf.device("/CPU:1"):
    layer.build()
    optimizer.build(layer.trainable_variables)
for state in optimizer.states:
    others = state.keyed.variables if state.keyed else []
    for variable in [state.variable, *state.beside, *others]:
        expected = "CPU:0" if state.keyed else "CPU:1"
        assert variable.value.device.endswith(expected), (variable.path, variable.value.device)
assert {bool(state.keyed) for state in optimizer.states} == {False, True}
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_index_is_made_anew_when_entries_were_set():
    layer = keyed_layer()
    vectors = looked_up(layer, EXTREMES, training=True)
    keyed = layer.variables[0].keyed
    entries = keyed.entries.numpy()
    keyed.entries.assign(np.zeros_like(entries))
    keyed.forget_index()
    assert not looked_up(layer, EXTREMES).any()
    keyed.entries.assign(entries)
    keyed.forget_index()
    np.testing.assert_array_equal(looked_up(layer, EXTREMES), vectors)
    assert int(ops.used_rows(keyed.entries._value.handle)) == len(EXTREMES)


def test_keys_and_vectors_move_from_one_table_to_another():
    old, new = keyed_layer(rows=9000), keyed_layer(rows=300, admission=Admission(9))
    new.build()
    keys = np.arange(-100, 100) * 2**52 + 5
    vectors = looked_up(old, keys, training=True)
    read = {int(k): v for ks, vs in old.read_keys("users") for k, v in zip(ks, vs, strict=True)}
    assert_close([[read.pop(int(key)) for key in keys]], [vectors], 0)
    assert not read
    assert new.write_keys("users", keys, vectors) == 200
    np.testing.assert_array_equal(looked_up(new, keys), vectors)
    # Of what is too much, keys that were written before leave, and then nobody does.
    assert new.write_keys("users", np.arange(400), np.ones([400, 3])) == 299
    assert new.key_counts()["users"].used == 299
    with pytest.raises(
        ValueError, match=r"'films' is not among those with keys='any', \['users'\]"
    ):
        new.write_keys("films", [1], [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"vectors have shape \(1, 2\), must have \(1, 3\)"):
        new.write_keys("users", [1], [[1, 2]])
    with pytest.raises(ValueError, match="keys must be int64 or strings, not float32"):
        new.write_keys("users", [1.5, 1.7], np.ones([2, 3]))
    for some, named in (([7, 8, 7], "7"), (["a", "b", "a"], "b'a'")):
        with pytest.raises(ValueError, match=f"keys must be different, but {named} occurs 2 times"):
            new.write_keys("users", some, np.ones([3, 3]))
    assert new.write_keys("users", [], np.ones([0, 3])) == 0


def test_a_layer_that_is_not_built_has_no_keys_to_read_or_write():
    layer = keyed_layer()
    for call in (
        lambda: layer.write_keys("users", [1], [[1, 2, 3]]),
        lambda: layer.read_keys("users"),
        lambda: layer.table_values("users"),
        layer.key_counts,
    ):
        with pytest.raises(ValueError, match="layer '.*' is not built: call it, or build()"):
            call()
    layer.build()
    with pytest.raises(ValueError, match="table 'films' is not among"):
        layer.read_keys("films")


def test_keys_that_are_too_many_are_told_of_also_if_they_are_written_in_blocks(monkeypatch):
    layer = keyed_layer(rows=300)
    layer.build()
    monkeypatch.setattr(table_rows, "BLOCK_BYTES", 70 * 3 * 4)
    vectors = np.random.default_rng(4).normal(size=[400, 3]).astype(np.float32)
    assert layer.write_keys("users", np.arange(400), vectors) == 299
    assert layer.key_counts()["users"].unknown == 0
    found = looked_up(layer, np.arange(400))
    there = found.any(1)
    assert there.sum() == 299
    np.testing.assert_array_equal(found[there], vectors[there])


def test_what_is_written_to_keys_while_training_is_in_the_next_delta(tmp_path):
    def trainable_model():
        layer = keyed_layer()
        inputs = keras.Input((), dtype="int64", name="user")
        output = keras.ops.sum(layer({"user": inputs})["user"], axis=1, keepdims=True)
        model = keras.Model({"user": inputs}, output)
        model.compile(SGD(0.1), loss=lambda y, p: p)
        return model

    class Write(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                assert wait_until(lambda: list(tmp_path.glob(f"*/{INDEX}")), 60)
                layer = self.model.get_layer("embeddings")
                layer.write_keys("users", [1, 2, 50], np.full([3, 3], 7.0))

    model, other = trainable_model(), trainable_model()
    deltas = recsync.callbacks.Checkpoint(tmp_path, every_steps=2, full_every=9, keep=None)
    # The keys that are written to are not in the batches that follow.
    keys = np.array([1, 2, 3, 4, 3, 4, 3, 4])
    data = tf.data.Dataset.from_tensor_slices(({"user": keys}, np.zeros(8, np.float32))).batch(2)
    model.fit(data, epochs=2, steps_per_epoch=2, verbose=0, callbacks=[deltas, Write()])
    assert [saved.is_delta for saved in deltas.saved] == [False, True]
    recsync.checkpoint.restore(deltas.saved[-1].path, other)
    keys = np.array([1, 2, 3, 4, 50])
    expected = looked_up(model.get_layer("embeddings"), keys)
    np.testing.assert_array_equal(expected[[0, 1, 4]], np.full([3, 3], 7.0))
    np.testing.assert_array_equal(looked_up(other.get_layer("embeddings"), keys), expected)


def model_of(layer, dtype="int64") -> keras.Model:
    inputs = keras.Input((), dtype=dtype, name="user")
    return keras.Model({"user": inputs}, layer({"user": inputs})["user"])


def test_time_goes_back_with_a_file_and_no_key_is_idle_by_that(tmp_path):
    layer = keyed_layer(eviction=Eviction(max_idle=5))
    model = model_of(layer)
    vectors = looked_up(layer, [1, 2], training=True)
    model.save_weights(tmp_path / "model.weights.h5")
    recsync.checkpoint.save(tmp_path / "own", model)
    for load in (
        lambda: model.load_weights(tmp_path / "model.weights.h5"),
        lambda: recsync.checkpoint.restore(tmp_path / "own", model),
    ):
        for key in range(10, 20):
            looked_up(layer, [key], training=True)
        assert not looked_up(layer, [1, 2]).any()
        load()
        np.testing.assert_array_equal(looked_up(layer, [1, 2]), vectors)


def test_a_checkpoint_that_is_read_in_blocks_has_its_keys_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 7 * 16)  # Ten blocks of keys.
    layer = keyed_layer()
    keys = np.arange(40) * 2**50
    vectors = looked_up(layer, keys, training=True)
    saved = tf.train.Checkpoint(layer=layer)
    saved.write(str(tmp_path / "saved"))
    looked_up(layer, np.arange(1, 64), training=True)  # All rows are others' now.
    saved.read(str(tmp_path / "saved")).assert_consumed()
    np.testing.assert_array_equal(looked_up(layer, keys), vectors)
    assert not looked_up(layer, np.arange(1, 64)).any()


def test_an_export_knows_the_keys_that_predict_knows(tmp_path):
    layer = keyed_layer(eviction=Eviction(max_idle=5), admission=Admission(2))
    model = model_of(layer)
    looked_up(layer, [1, 1], training=True)
    train(layer, SGD(0.1), [1, 1])
    for key in range(10, 20):  # None of them is admitted.
        looked_up(layer, [key], training=True)
    recsync.serving.export_model(model, tmp_path)
    served = tf.saved_model.load(tmp_path)
    assert not looked_up(layer, [1]).any()
    np.testing.assert_array_equal(served.serve({"user": tf.constant([1], tf.int64)}), [[0, 0, 0]])


def test_an_export_right_after_a_restore_knows_the_keys_that_predict_knows(tmp_path):
    def model_to_load():
        return model_of(keyed_layer(eviction=Eviction(max_idle=5)))

    model = model_to_load()
    layer = model.get_layer("embeddings")
    for key in (1, 2, 3, 4, 5, 6, 7):
        looked_up(layer, [key], training=True)
    keys = tf.range(1, 8, dtype=tf.int64)
    expected = looked_up(layer, keys)
    assert expected.any(1).tolist() == [False] + 6 * [True]
    model.save_weights(tmp_path / "model.weights.h5")
    recsync.checkpoint.save(tmp_path / "own", model)
    tf.train.Checkpoint(model=model).write(str(tmp_path / "tf"))
    for number, load in enumerate(
        (
            lambda model: model.load_weights(tmp_path / "model.weights.h5"),
            lambda model: recsync.checkpoint.restore(tmp_path / "own", model),
            lambda model: tf.train.Checkpoint(model=model).read(str(tmp_path / "tf")),
        )
    ):
        for _ in range(20):  # The time of what is here is later than that of the file.
            looked_up(layer, [1], training=True)
        for here in (model, model_to_load()):
            load(here)
            folder = tmp_path / f"{number} {here is model}"
            recsync.serving.export_model(here, folder)
            served = tf.saved_model.load(folder)
            np.testing.assert_array_equal(served.serve({"user": keys}), expected)
            np.testing.assert_array_equal(looked_up(here.get_layer("embeddings"), keys), expected)


def test_set_weights_leaves_what_stands_for_unknown_keys_untrained():
    layers = keyed_layer(), keyed_layer(admission=Admission(100))
    looked_up(layers[0], [1, 2], training=True)
    models, optimizer = [model_of(layer) for layer in layers], SGD(0.1)
    optimizer.build(models[1].trainable_variables)
    for of, to in zip(layers[0].variables, layers[1].variables, strict=False):
        to.assign(of)
    train(layers[1], optimizer, [1, 7])
    rows, versions = (t.numpy() for t in optimizer.states[0].keyed.find(np.array([1, 7]), True))
    pushed(optimizer, optimizer.states[0], rows, versions, np.ones([2, 3]))
    found = looked_up(layers[1], [1, 7])
    np.testing.assert_allclose(found[0], looked_up(layers[0], [1])[0] - 0.1 - 1.0, rtol=1e-5)
    assert not found[1].any()


def test_a_file_of_a_table_with_keys_is_not_read_into_one_without_nor_the_other_way(tmp_path):
    def made(keys):
        layer = keyed_layer() if keys else keyed_layer(keys=None)
        return model_of(layer)

    for keys in (True, False):
        model, other = made(keys), made(not keys)
        model.save_weights(tmp_path / f"{keys}.weights.h5")
        recsync.checkpoint.save(tmp_path / f"own {keys}", model)
        before = other.get_layer("embeddings").table_values("users")
        there, here = ("keys='any'", "none") if keys else ("none", "keys='any'")
        with pytest.raises(ValueError, match=f"the saved one has {there}, this one {here}"):
            other.load_weights(tmp_path / f"{keys}.weights.h5")
        with pytest.raises(ValueError, match="table 'embeddings/users' has .* in the checkpoint"):
            recsync.checkpoint.restore(tmp_path / f"own {keys}", other)
        np.testing.assert_array_equal(other.get_layer("embeddings").table_values("users"), before)


def test_names_with_slashes_are_names_of_tables_with_keys_and_those_of_files_are_not():
    def layer_of(*names, keys="any"):
        tables = [TableConfig(name, 9, 2, keys=keys) for name in names]
        return EmbeddingCollection(tables, [FeatureConfig(name, name) for name in names])

    layer = layer_of("a/b")
    layer({"a/b": tf.constant([1, 2])}, training=True)
    assert layer.key_counts()["a/b"].used == 2
    for keys in ("any", None):
        with pytest.raises(ValueError, match="'a' and 'a:keys': in files 'a:keys' stands"):
            layer_of("a", "a:keys", keys=keys)


def test_keras_s_own_export_works_where_this_package_is(tmp_path):
    layer = keyed_layer()
    model = model_of(layer)
    train(layer, SGD(0.1), [1, 2])
    model.export(tmp_path / "keras", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "keras")
    served = loaded.serve({"user": tf.constant([2, 3], tf.int64)})
    np.testing.assert_array_equal(served, looked_up(layer, [2, 3]))
    with pytest.raises(ValueError, match=r"tables=\"apart\": the tables \['users'\] of the model"):
        recsync.serving.Inference(model, tables_apart=True)
