"""Padding is no id, in every form of input, and tables without a combiner give sequences."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close

import tf_recsync as recsync
from tf_recsync.layers import (
    AttentionPooling,
    DotInteraction,
    EmbeddingCollection,
    FeatureConfig,
    Interaction,
    TableConfig,
)

ROWS, DIMENSION, PAD = 30, 3, -7
BAGS = [[4, 9, 4], [], [2], [29, 0, 1], []]
WIDE = 2**40  # Beyond int32.


def padded(bags, padding, form, dtype):
    """Bags with padding at the front, in between and at the end; dense: filled up to 5."""
    filled = []
    for bag in bags:
        own = [padding, *(bag[:1]), padding, *bag[1:]]
        filled.append(own + [padding] * (5 - len(own)) if form == "dense" else own)
    if form == "dense":
        return tf.constant(filled, dtype)
    ragged = tf.ragged.constant(filled, dtype=dtype, ragged_rank=1)
    return ragged if form == "ragged" else ragged.to_sparse()


def collection(combiner, padding=None, out_of_range="error", **kwargs):
    return EmbeddingCollection(
        [TableConfig("films", ROWS, DIMENSION, combiner=combiner)],
        [FeatureConfig("seen", "films", out_of_range, padding)],
        **kwargs,
    )


def pooled(table, bags, weights, combiner):
    vectors = np.zeros([len(bags), table.shape[1]])
    for vector, ids, w in zip(vectors, bags, weights, strict=True):
        divisor = {"sum": 1, "mean": np.sum(w), "sqrtn": np.sqrt(np.sum(np.square(w)))}[combiner]
        for row, weight in zip(ids, w, strict=True):
            vector += weight * table[row] / divisor
    return vectors


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
def test_padding_is_pooled_with_nothing(form, combiner, training):
    weights = [[1.5, 0.5, 2.0], [], [3.0], [1.0, 2.0, 0.25], []]
    ones = [[1.0] * len(bag) for bag in BAGS]
    for padding, dtype in ((PAD, tf.int32), (WIDE, tf.int64)):
        layer = collection(combiner, padding)
        given = padded(BAGS, padding, form, dtype)
        found = layer({"seen": given}, training=training)["seen"]
        assert_close([found], [pooled(layer.table_values("films"), BAGS, ones, combiner)])
        own = {"seen": padded(weights, 99.0, form, tf.float32)}
        found = layer({"seen": given}, own, training=training)["seen"]
        assert_close([found], [pooled(layer.table_values("films"), BAGS, weights, combiner)])


def test_padding_may_be_beyond_the_type_of_the_ids():
    layer = collection("sum", WIDE)
    found = layer({"seen": tf.constant([[1, 2]])}, training=True)["seen"]
    assert_close([found], [layer.table_values("films")[[1, 2]].sum(0, keepdims=True)])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("out_of_range", ["error", "clip", "hash"])
def test_padding_is_neither_out_of_range_nor_clipped_nor_hashed(out_of_range, training):
    ids = {"seen": tf.constant([[PAD, 3], [PAD, PAD]])}
    layer = collection("sum", PAD, out_of_range)
    without = layer({"seen": tf.ragged.constant([[3], []], dtype=tf.int32)}, training=training)
    assert_close([layer(ids, training=training)["seen"]], [without["seen"]])
    assert not np.any(layer(ids, training=training)["seen"][1])
    # One that has not said what padding is.
    if out_of_range == "error":
        with pytest.raises(tf.errors.InvalidArgumentError, match="feature seen"):
            collection("sum")(ids, training=training)


def test_zero_may_be_padding_and_single_ids_may_be_missing():
    layer = collection("mean", 0)
    found = layer({"seen": tf.constant([0, 3])}, training=True)["seen"]
    assert_close([found], [[np.zeros(DIMENSION), layer.table_values("films")[3]]])
    assert layer({"seen": tf.zeros([0], tf.int64)}, training=True)["seen"].shape == (0, DIMENSION)


@pytest.mark.parametrize("combiner", ["mean", None])
def test_xla_leaves_padding_out(combiner):
    def loss_and_gradient(layer, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True)["seen"] ** 2)
        (gradient,) = tape.gradient(loss, layer.trainable_variables)
        return loss, tf.convert_to_tensor(gradient)

    layer = collection(combiner, PAD, "clip")
    ids = {"seen": padded(BAGS, PAD, "dense", tf.int64)}
    expected = loss_and_gradient(layer, ids)
    call = tf.function(lambda x: loss_and_gradient(layer, x), jit_compile=True)
    assert_close(call(ids), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [None, PAD])
@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
def test_a_table_without_a_combiner_gives_the_vector_of_each_id(form, padding, training):
    layer = collection(None, padding)
    ids = padded(BAGS, 8 if padding is None else padding, form, tf.int64)
    found = layer({"seen": ids}, training=training)["seen"]
    dense = ids.numpy() if form == "dense" else None
    if dense is None:
        ragged = ids if form == "ragged" else tf.RaggedTensor.from_sparse(ids)
        dense = ragged.to_tensor(default_value=-99).numpy()
    there = (dense != -99) & (dense != (-99 if padding is None else padding))
    table = layer.table_values("films")
    expected = np.where(there[..., None], table[np.where(there, dense, 0)], 0.0)
    np.testing.assert_array_equal(found, expected)
    if form == "sparse":
        backwards = tf.SparseTensor(ids.indices[::-1], ids.values[::-1], ids.dense_shape)
        again = layer({"seen": backwards}, training=training)["seen"]
        np.testing.assert_array_equal(again, expected)
    mask = found._keras_mask if hasattr(found, "_keras_mask") else None
    if form == "dense" and padding is None:
        assert mask is None
    else:
        np.testing.assert_array_equal(mask, there)


def test_a_table_without_a_combiner_gives_single_ids_one_vector():
    layer = EmbeddingCollection(
        [TableConfig("films", ROWS, DIMENSION, combiner=None)],
        [FeatureConfig("film", "films", padding=0), FeatureConfig("seen", "films")],
    )
    ids = {"film": tf.constant([3, 0]), "seen": tf.ragged.constant([[1, 2], []])}
    found = layer(ids, training=True)
    table = layer.table_values("films")
    np.testing.assert_array_equal(found["film"], [table[3], np.zeros(DIMENSION)])
    np.testing.assert_array_equal(found["seen"], [table[[1, 2]], np.zeros([2, DIMENSION])])
    empty = layer({"film": ids["film"][:0], "seen": ids["seen"][:0]}, training=True)
    assert empty["film"].shape == (0, DIMENSION)
    assert empty["seen"].shape == (0, 0, DIMENSION)


def test_a_sequence_of_another_number_of_examples_is_refused_with_feature_and_table():
    layer = EmbeddingCollection(
        [TableConfig("films", ROWS, DIMENSION, combiner=None), TableConfig("users", 9, 2)],
        [FeatureConfig("seen", "films"), FeatureConfig("user", "users")],
    )
    layer.build()
    with pytest.raises(ValueError, match="feature 'user' of table 'users': has 3.*'seen' has 2"):
        layer.call({"seen": tf.constant([[1, 2], [3, 4]]), "user": tf.constant([1, 2, 3])})


def test_masks_reach_the_layers_that_follow(tmp_path):
    ids = keras.Input((None,), dtype="int64", name="seen")
    (vectors,) = collection(None, PAD, name="embed")({"seen": ids}).values()
    assert vectors.shape == (None, None, DIMENSION)
    mean = keras.layers.GlobalAveragePooling1D()(vectors)
    model = keras.Model(ids, mean)
    given = padded(BAGS, PAD, "dense", tf.int64)
    table = model.get_layer("embed").table_values("films")
    expected = pooled(table, BAGS, [[1.0] * len(bag) for bag in BAGS], "mean")
    some = np.array([bool(bag) for bag in BAGS])  # Keras divides by the number of ids.
    assert_close([model(given).numpy()[some]], [expected[some]])
    assert_close([model.predict(given, verbose=0)[some]], [expected[some]])
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    assert_close([copy.predict(given, verbose=0)[some]], [expected[some]])


def _count(vectors):
    counts = tf.cast(vectors["seen"].rows.row_lengths(), tf.float32)
    return tf.ensure_shape(counts[:, tf.newaxis], [None, 1])


def test_interactions_see_no_padding():
    tables = [TableConfig("films", ROWS, DIMENSION, combiner="mean")]
    count = Interaction("count", ["seen"], _count, unpooled=["seen"])
    interactions = [
        AttentionPooling("taste", "film", "seen"),
        DotInteraction("cross", ["film", "seen"]),
        count,
    ]
    features = [FeatureConfig("film", "films"), FeatureConfig("seen", "films", padding=PAD)]
    layer = EmbeddingCollection(tables, features, interactions=interactions)
    film = tf.constant([1, 2, 3, 4, 5], tf.int64)
    ragged = tf.ragged.constant(BAGS, dtype=tf.int64, ragged_rank=1)
    for training in (False, True):
        expected = layer({"film": film, "seen": ragged}, training=training)
        for form in ("dense", "ragged"):
            ids = {"film": film, "seen": padded(BAGS, PAD, form, tf.int64)}
            found = layer(ids, training=training)
            assert_close(list(found.values()), list(expected.values()))
        assert found["count"][:, 0].numpy().tolist() == [3, 0, 1, 3, 0]


class Weighted(keras.layers.Layer):
    """The sum of a sequence's vectors, each times its place, so that places matter."""

    def compute_mask(self, inputs, previous_mask=None):
        return None

    def call(self, vectors, mask=None):
        place = tf.range(1.0, tf.cast(tf.shape(vectors)[1], tf.float32) + 1)[None, :, None]
        assert mask is not None
        return tf.reduce_sum(vectors * place * tf.cast(mask, tf.float32)[..., None], 1)


def click_model(combined: bool) -> keras.Model:
    """Of a padded bag, and a sequence that is split where there are servers to split it."""
    inputs = {
        "film": keras.Input((), dtype="int64", name="film"),
        "tags": keras.Input((4,), dtype="int64", name="tags"),
        "seen": keras.Input((None,), dtype="int64", name="seen", ragged=True),
    }
    tables = [
        TableConfig("films", ROWS, DIMENSION, combiner=None, shards=2),
        TableConfig("tags", 9, 2, combiner="mean"),
    ]
    features = [
        FeatureConfig("film", "films"),
        FeatureConfig("tags", "tags", padding=-1),
        FeatureConfig("seen", "films", padding=0),
    ]
    interactions = [Interaction("double", ["tags"], lambda v: 2 * v["tags"])] if combined else []
    found = EmbeddingCollection(tables, features, interactions=interactions, name="embed")(inputs)
    parts = [found["film"], found["double" if combined else "tags"], Weighted()(found["seen"])]
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.concatenate(parts)))


def click_data(n: int = 64) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    bags = [rng.integers(0, ROWS, rng.integers(0, 5)).tolist() for _ in range(n)]
    inputs = {
        "film": rng.integers(0, ROWS, n),
        "tags": rng.integers(-1, 9, (n, 4)),
        "seen": tf.ragged.constant(bags, dtype=tf.int64, ragged_rank=1),
    }
    labels = rng.integers(0, 2, (n, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(16)


def trained(strategy, combined: bool):
    """Weights, loss and predictions after two epochs; the model, too."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = click_model(combined)
        model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", jit_compile=False)
    model.fit(click_data(), epochs=2, verbose=0, shuffle=False)
    layer = model.get_layer("embed")
    tables = [layer.table_values("films"), layer.table_values("tags")]
    loss = model.evaluate(click_data(), verbose=0)
    return [*tables, loss, model.predict(click_data(), verbose=0)]


@pytest.mark.full
@pytest.mark.parametrize("combined", [False, True])
def test_servers_train_sequences_and_padded_bags_as_one_process_does(clusters, combined):
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=2))
    expected = trained(tf.distribute.get_strategy(), combined)
    assert_close(trained(strategy, combined), expected, 1e-4)


@pytest.mark.full
def test_what_is_trained_without_servers_is_the_same(clusters):
    cluster = clusters.get(workers=1, ps=0)
    expected = trained(tf.distribute.get_strategy(), False)
    strategy = recsync.HopStrategy(cluster, recsync.topology.complete(1))
    assert_close(trained(strategy, False), expected, 1e-4)


@pytest.mark.parametrize("wrong", [1.0, True, b"0", 2**63])
def test_wrong_padding_is_named(wrong):
    with pytest.raises(ValueError, match=f"padding={wrong!r}: must be None, a str, or an int"):
        FeatureConfig("seen", "films", padding=wrong)


def test_configurations_survive_a_round_trip():
    layer = collection(None, PAD)
    copy = EmbeddingCollection.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    config = FeatureConfig("seen", "films", padding=PAD).get_config()
    assert FeatureConfig.from_config(config).padding == PAD
    del config["padding"]  # Of an older version.
    assert FeatureConfig.from_config(config).padding is None


def test_what_sequences_can_not_do_is_named():
    with pytest.raises(ValueError, match=r"concatenate=True: .*\['seen'\] have combiner=None"):
        collection(None, concatenate=True)
    with pytest.raises(ValueError, match="combiner='max': must be one of .* None"):
        collection("max")
    ids = {"seen": tf.constant([[1, 2]])}
    with pytest.raises(ValueError, match="feature 'seen' of table 'films'.*combiner=None"):
        collection(None).call(ids, {"seen": tf.constant([[1.0, 2.0]])})
    with pytest.raises(ValueError, match="its feature 'seen', 'films', has combiner=None"):
        collection(None, interactions=[Interaction("same", ["seen"], lambda v: v["seen"])])


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (keras.Input((3,)), None, "ids must be int32 or int64, not float32"),
        (keras.Input((3, 2), dtype="int64"), None, r"ids must be \[batch\] or \[batch, k\], not"),
        (keras.Input((3,), dtype="int64"), keras.Input((3,), dtype="int64"), "weights must be fl"),
        (keras.Input((3,), dtype="int64"), keras.Input((3, 1)), "the weights are"),
    ],
)
def test_symbolic_inputs_are_checked_when_the_model_is_built(ids, weights, message):
    with pytest.raises(ValueError, match=f"feature 'seen' of table 'films': {message}"):
        collection("sum")({"seen": ids}, weights if weights is None else {"seen": weights})
