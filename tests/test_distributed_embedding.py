"""`DistributedEmbedding` in the place of that of keras-rs, with its configurations."""

import functools

import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.layers import DistributedEmbedding, TableConfig

BATCH = 4


def feature(name, table, *shape):
    width = table.embedding_dim
    return keras_rs.layers.FeatureConfig(name, table, (BATCH, *shape), (BATCH, width))


def configs():
    """Features nested in dicts and a tuple, two of which share a table."""
    users = keras_rs.layers.TableConfig("users", 20, 3, initializer="uniform")
    films = keras_rs.layers.TableConfig("films", 30, 4, combiner="sqrtn")
    return {
        "user": feature("user", users),
        "films": (feature("film", films, 1), {"all": feature("watched", films, 3)}),
    }


def inputs(seed=0):
    random = np.random.default_rng(seed)
    return {
        "user": random.integers(0, 20, BATCH),
        "films": (random.integers(0, 30, (BATCH, 1)), {"all": random.integers(0, 30, (BATCH, 3))}),
    }


def like(theirs, layer):
    """Gives a layer of keras-rs the tables of one of ours."""
    tables = layer.get_embedding_tables()
    for own in theirs._default_device_embedding_layers.values():
        own.embeddings.assign(tables[own.name])


def expect_alike(ours, theirs, rtol=1e-5):
    keras.tree.assert_same_structure(ours, theirs)
    for own, other in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        np.testing.assert_allclose(own, other, rtol=rtol, atol=1e-6)


def both():
    options = {"table_stacking": [["users"]], "update_stats": False}
    kinds = (DistributedEmbedding, keras_rs.layers.DistributedEmbedding)
    ours, theirs = (kind(configs(), **options) for kind in kinds)
    ids = inputs()
    ours(ids), theirs(keras.tree.map_structure(tf.constant, ids))
    like(theirs, ours)
    return ours, theirs


def test_it_gives_what_keras_rs_gives():
    ours, theirs = both()
    ids = keras.tree.map_structure(tf.constant, inputs(1))
    expect_alike(ours(ids), theirs(ids))
    weights = keras.tree.map_structure(lambda x: tf.cast(x, tf.float32) / 7 + 0.1, ids)
    weights["user"] = tf.ones([BATCH])
    expect_alike(ours(ids, weights), theirs(ids, weights))


def test_ragged_ids_are_pooled_alike():
    ours, theirs = both()
    ids = keras.tree.map_structure(tf.constant, inputs(1))
    ids["films"][1]["all"] = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7]])
    expect_alike(ours(ids), theirs(ids))


def model_of(layer):
    keys = {
        "user": keras.Input((), dtype="int64", name="user"),
        "films": (
            keras.Input((1,), dtype="int64", name="film"),
            {"all": keras.Input((3,), dtype="int64", name="watched")},
        ),
    }
    hidden = keras.layers.Concatenate()(keras.tree.flatten(layer(keys)))
    model = keras.Model(keys, keras.layers.Dense(1, kernel_initializer="ones")(hidden))
    model.compile(recsync.optimizers.SGD(0.1), "mse")
    return model


def batches():
    pairs = [(inputs(seed), np.full((BATCH, 1), seed, np.float32)) for seed in range(3)]
    return tf.data.Dataset.from_tensor_slices(
        keras.tree.map_structure(lambda *own: np.concatenate(own), *pairs)
    ).batch(BATCH)


def test_a_model_trains_and_is_saved_as_with_keras_rs(clusters, tmp_path):
    theirs = keras_rs.layers.DistributedEmbedding(configs())
    with recsync.AsyncStrategy(clusters.get(1, 2)).scope():
        layer = DistributedEmbedding(configs(), name="embedding")
        model = model_of(layer)
    expected = model_of(theirs)
    like(theirs, layer)
    assert {p.ps for p in layer.collection.placement.shards} == {0, 1}
    for one in (model, expected):
        one.fit(batches(), verbose=0)
    tables = layer.get_embedding_tables()
    for own in theirs._default_device_embedding_layers.values():
        np.testing.assert_allclose(tables[own.name], own.embeddings, rtol=1e-4, atol=1e-6)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    ids = inputs(5)
    np.testing.assert_allclose(loaded(ids), model.predict(ids, verbose=0), rtol=1e-5)


def test_a_saved_layer_keeps_who_trains_its_tables_and_is_placed_anew(clusters, tmp_path):
    def table(name, rate=0.2):
        return TableConfig(name, 12, 3, optimizer=recsync.optimizers.Ftrl(rate))

    with recsync.AsyncStrategy(clusters.get(1, 2)).scope():
        tables = {"a": table("a"), "b": table("b"), "c": table("c", 0.3)}
        placement = recsync.plan_placement(list(tables.values()), 2)
        # Two features of a table, each with a configuration of its own.
        tables["again"] = table("b")
        features = {n: keras_rs.layers.FeatureConfig(n, t, (4,), (4, 3)) for n, t in tables.items()}
        layer = DistributedEmbedding(features, placement=placement, name="embedding")
        inputs = {name: keras.Input((), batch_size=4, dtype="int64", name=name) for name in tables}
        model = keras.Model(inputs, keras.layers.Concatenate()(list(layer(inputs).values())))
        model.compile(recsync.optimizers.per_table(recsync.optimizers.SGD(0.1)), "mse")
    ids = {name: np.arange(4) for name in tables}
    model.fit(ids, np.ones([4, 12]), batch_size=4, verbose=0)
    # What had equal optimizers at first has one; now the third has an equal one, too.
    assert list(model.optimizer.parts) == ["table_a", "table_c"]
    model.optimizer.parts["table_a"].learning_rate = 0.3
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert list(loaded.optimizer.parts) == ["table_a", "table_c"]
    assert loaded.get_layer("embedding").collection.placement.ps == 1
    np.testing.assert_allclose(loaded(ids), model.predict(ids, batch_size=4, verbose=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: {**c, "user": "user"}, TypeError, "'user', which has no name, table"),
        (
            lambda c: {**c, "more": feature("more", keras_rs.layers.TableConfig("films", 9, 4))},
            ValueError,
            "two tables are named 'films'",
        ),
    ],
)
def test_wrong_configurations_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        DistributedEmbedding(change(configs()))


def test_features_share_a_table_whose_initializer_has_no_configuration():
    def filled(rows, dtype, value):
        return np.full([len(rows), 2], value, dtype)

    table = keras_rs.layers.TableConfig("t", 5, 2, functools.partial(filled, value=7))
    layer = DistributedEmbedding([feature("f", table), feature("g", table)])
    layer.build()
    assert (layer.get_embedding_tables()["t"] == 7).all()


def test_a_layer_that_is_not_built_has_no_tables():
    with pytest.raises(ValueError, match="is not built: call it, or build()"):
        DistributedEmbedding(configs()).get_embedding_tables()


def test_features_of_one_name_are_told_apart_by_their_places():
    table = keras_rs.layers.TableConfig("t", 5, 2)
    layer = DistributedEmbedding([feature("f", table), {"a": feature("f", table, 2)}])
    found = layer([np.array([1, 2, 3, 4]), {"a": np.array([[1, 2]] * BATCH)}])
    rows = layer.get_embedding_tables()["t"]
    np.testing.assert_allclose(found[0], rows[1:], rtol=1e-6)
    np.testing.assert_allclose(found[1]["a"], [rows[1:3].mean(0)] * BATCH, rtol=1e-6)


def test_inputs_of_other_shapes_are_refused():
    ids = inputs()
    ids["films"] = (ids["films"][0][:, 0], ids["films"][1])
    with pytest.raises(ValueError, match=r"feature 'film' have shape \(4,\), .* is \(4, 1\)"):
        DistributedEmbedding(configs())(ids)
