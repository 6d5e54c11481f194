"""Interactions in one process, against numpy; which ones fit, and where their tables go."""

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

BATCH, ROWS, DIMENSION = 8, 30, 4
FEATURES = {"film": "films", "watched": "films", "user": "users", "shop": "shops", "day": "days"}


@keras.saving.register_keras_serializable(package="tests")
def difference(vectors):
    """An interaction of one's own: of tables of other dimensions too."""
    return tf.abs(vectors["user"] - vectors["shop"][:, :1])


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(3)


def interactions():
    return [
        DotInteraction("crosses", ["film", "watched", "user"]),
        AttentionPooling("taste", query="film", keys="watched", scale=0.5),
        Interaction("difference", ["user", "shop"], difference),
    ]


def configs(combiner="mean", dtype="float32") -> list[TableConfig]:
    return [
        TableConfig("films", ROWS, DIMENSION, "normal", combiner, dtype=dtype),
        TableConfig("users", ROWS, DIMENSION, "normal", combiner),
        TableConfig("shops", ROWS, 2, "normal", combiner),
        TableConfig("days", 2 * ROWS, 3, "normal", combiner),
    ]


def collection(
    combiner="mean", dtype="float32", out_of_range="error", **kwargs
) -> EmbeddingCollection:
    features = [FeatureConfig(name, table, out_of_range) for name, table in FEATURES.items()]
    kwargs.setdefault("interactions", interactions())
    return EmbeddingCollection(configs(combiner, dtype), features, **kwargs)


def bags_of(form, seed):
    rng = np.random.default_rng(seed)
    lengths = {"single": [1] * BATCH, "dense": [3] * BATCH}.get(form, [3, 0, 1, 2, 0, 4, 1, 5])
    return [list(map(int, rng.integers(0, ROWS // 3, n))) for n in lengths]


def as_input(form, bags, dtype=tf.int64):
    if form == "single":
        return tf.constant([bag[0] for bag in bags], dtype)
    if form == "dense":
        return tf.constant(bags, dtype)
    ragged = tf.ragged.constant(bags, dtype=dtype, ragged_rank=1)
    return ragged if form == "ragged" else ragged.to_sparse()


def pooled(table, bags, weights, combiner):
    vectors = []
    for ids, own in zip(bags, weights, strict=True):
        w = np.array(own)
        divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        total = (table[ids] * w[:, None]).sum(0) / divisor if ids else np.zeros(table.shape[1])
        vectors.append(total)
    return np.array(vectors)


def expected(tables, bags, weights, combiner):
    """The results in numpy, example by example."""
    vectors = {
        name: pooled(tables[table], bags[name], weights[name], combiner)
        for name, table in FEATURES.items()
    }
    film, watched, user, shop = (vectors[n] for n in ("film", "watched", "user", "shop"))
    pairs = [(film, watched), (film, user), (watched, user)]
    taste = np.zeros_like(film)
    for i, (q, ids) in enumerate(zip(film, bags["watched"], strict=True)):
        if ids:
            rows = tables["films"][ids]
            e = np.array(weights["watched"][i]) * np.exp(0.5 * rows @ q)
            taste[i] = (e[:, None] * rows).sum(0) / e.sum()
    return {
        "day": vectors["day"],
        "crosses": np.stack([(a * b).sum(1) for a, b in pairs], 1),
        "taste": taste,
        "difference": np.abs(user - shop[:, :1]),
    }


def batch_of(form, weighted):
    bags = {name: bags_of(form, i) for i, name in enumerate(FEATURES)}
    rng = np.random.default_rng(9)
    weights = {
        name: [list(rng.uniform(0.5, 2, len(b))) if weighted else [1.0] * len(b) for b in own]
        for name, own in bags.items()
    }
    inputs = {name: as_input(form, own) for name, own in bags.items()}
    given = {name: as_input(form, w, tf.float32) for name, w in weights.items()}
    return bags, weights, inputs, given if weighted else None


def tables_of(layer):
    return {name: layer.table_values(name) for name in dict.fromkeys(FEATURES.values())}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["single", "dense", "ragged", "sparse"])
def test_results_are_those_of_numpy_for_every_form_of_input(form, weighted, combiner):
    layer = collection(combiner=combiner)
    layer.build()
    bags, weights, inputs, given = batch_of(form, weighted)
    wanted = expected(tables_of(layer), bags, weights, combiner)
    for training in (True, False):
        found = layer(inputs, given, training=training)
        assert list(found) == ["day", "crosses", "taste", "difference"], f"{training=}"
        for name, value in wanted.items():
            np.testing.assert_allclose(
                found[name], value, 2e-5, 2e-5, err_msg=f"{name}, {training=}"
            )


@pytest.mark.parametrize("weighted", [False, True])
def test_tables_are_updated_by_the_numeric_gradient(weighted):
    layer = collection()
    layer.build()
    bags, weights, inputs, given = batch_of("ragged", weighted)
    before = {name: value.astype(np.float64) for name, value in tables_of(layer).items()}

    def loss(tables):
        results = expected(tables, bags, weights, "mean")
        return sum((np.sin(1 + np.arange(r.shape[1])) * r).sum() for r in results.values())

    optimizer = recsync.optimizers.SGD(0.1)
    optimizer.build(layer.trainable_variables)
    with tf.GradientTape() as tape:
        found = layer(inputs, given, training=True)
        total = sum(
            tf.reduce_sum(tf.sin(1.0 + tf.range(r.shape[1], dtype=tf.float32)) * r)
            for r in found.values()
        )
    np.testing.assert_allclose(total, loss(before), rtol=1e-4)
    optimizer.apply(tape.gradient(total, layer.trainable_variables))
    for name, after in tables_of(layer).items():
        gradient = np.zeros_like(before[name])
        # No id reaches ROWS // 3: the other rows change nothing.
        for at in np.ndindex(ROWS // 3 + 1, gradient.shape[1]):
            sides = []
            for step in (1e-5, -1e-5):
                moved = before[name].copy()
                moved[at] += step
                sides.append(loss({**before, name: moved}))
            gradient[at] = (sides[0] - sides[1]) / 2e-5
        assert np.abs(gradient).max() > 0.1
        np.testing.assert_allclose(after, before[name] - 0.1 * gradient, rtol=1e-4, atol=1e-4)


def test_ids_of_no_weight_and_large_products_harm_no_attention():
    layer = EmbeddingCollection(
        [TableConfig("t", 3, 2, keras.initializers.Constant(100.0))],
        [FeatureConfig("q", "t"), FeatureConfig("k", "t")],
        interactions=[AttentionPooling("a", "q", "k")],
    )
    inputs = {"q": tf.constant([0, 1, 2]), "k": tf.ragged.constant([[0, 1], [2, 2], []])}
    weights = {"k": tf.ragged.constant([[0.0, 1.0], [0.0, 0.0], []], ragged_rank=1)}
    with tf.GradientTape() as tape:
        vectors = layer(inputs, weights, training=True)["a"]
    assert_close([vectors], [[[100, 100], [0, 0], [0, 0]]])
    gradient = tape.gradient(vectors, layer.trainable_variables)[0]
    assert np.isfinite(tf.convert_to_tensor(gradient)).all()


def test_features_are_returned_as_asked_side_by_side_or_by_name():
    named = collection(returned_features=["shop", "film", "day"], name="embed")
    joined = collection(
        returned_features=["shop", "film", "day"], concatenate=True, name="embed_joined"
    )
    inputs = batch_of("ragged", False)[2]
    named.build()
    joined.build()
    for variable, other in zip(joined.variables, named.variables, strict=True):
        variable.assign(other)
    for training in (True, False):
        found = named(inputs, training=training)
        assert list(found) == ["film", "shop", "day", "crosses", "taste", "difference"]
        assert_close([joined(inputs, training=training)], [np.concatenate(list(found.values()), 1)])
        spec = named.compute_output_spec(inputs)
        assert {n: s.shape[1] for n, s in spec.items()} == {n: v.shape[1] for n, v in found.items()}
    assert joined.compute_output_spec(inputs).shape[1] == joined(inputs).shape[1]


def test_a_collection_comes_back_from_its_configuration():
    layer = collection(returned_features=["film", "day"])
    again = EmbeddingCollection.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    again.build()
    layer.build()
    for variable, other in zip(again.variables, layer.variables, strict=True):
        variable.assign(other)
    inputs = batch_of("ragged", False)[2]
    assert_close(list(again(inputs).values()), list(layer(inputs).values()))


def test_tables_that_interact_are_whole_on_one_server():
    tables = [TableConfig(f"t{i}", rows, 4) for i, rows in enumerate([5000, 300, 2000, 2000, 10])]
    free = recsync.plan_placement(tables, ps=3)
    assert len(free.shards_of("t0")) > 1
    plan = recsync.plan_placement(tables, ps=3, together=[["t0", "t1"], ["t4", "t1"]])
    places = {name: plan.shards_of(name) for name in ("t0", "t1", "t4")}
    assert {len(shards) for shards in places.values()} == {1}
    assert len({shards[0].ps for shards in places.values()}) == 1
    # The rest goes where they are not.
    assert plan.loads.tolist() == [5310 * 16, 2000 * 16, 2000 * 16]
    assert plan.memory.tolist() == [5310 * 32, 2000 * 32, 2000 * 32]
    assert [shard.table for shard in plan.shards] == ["t0", "t1", "t2", "t3", "t4"]


@pytest.mark.parametrize(
    ("together", "shards", "limit", "message"),
    [
        ([["a", "c"]], None, None, r"together: \['c'\] are not among the tables \['a', 'b'\]"),
        ([["a", "b"]], 2, None, r"table 'a': shards=2 must be None or 1, .*\['a', 'b'\]"),
        ([["a", "b"]], None, 3500, "table 'a' together with 'b': its 5120 bytes do not fit"),
        ([["a"]], None, 3000, "table 'a': its 3200 bytes do not fit.*even in 1 shards"),
    ],
)
def test_tables_that_cannot_be_together_are_refused(together, shards, limit, message):
    tables = [TableConfig("a", 100, 4, shards=shards), TableConfig("b", 60, 4)]
    with pytest.raises(ValueError, match=message):
        recsync.plan_placement(tables, ps=2, memory_limit=limit, together=together)


def trains(vectors):
    return keras.layers.Dense(2)(vectors["film"])


def reads(vectors):
    return vectors["film"] * scale


scale = tf.Variable(2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [DotInteraction("film", ["film", "user"])], "name 'film' is taken"),
        (lambda: [DotInteraction("x", ["film", "actor"])], "'x': its feature 'actor' is not among"),
        (lambda: [DotInteraction("x", ["film"])], "'x'.*at least two"),
        (lambda: [DotInteraction("x", ["film", "film"])], "'x'.*different names"),
        (lambda: [DotInteraction("", ["film", "user"])], "name=''"),
        (lambda: DotInteraction("x", ["film", "user"]), "interactions=.* not a single one"),
        (lambda: [DotInteraction("x", "film")], "'x'.*'film': must be a sequence of texts"),
        (lambda: [Interaction("x", [], difference)], "'x'.*at least one"),
        (lambda: [Interaction("x", ["film"], 3)], "function=3"),
        (lambda: [Interaction("x", ["film"], difference, ["user"])], r"unpooled.*\['user'\]"),
        (lambda: [AttentionPooling("x", "film", "film")], "both 'film'"),
        (lambda: ["crosses"], "must have Interactions, not 'crosses'"),
        (lambda: [Interaction("x", ["film"], trains)], "'x'.*make no variables"),
        (lambda: [Interaction("x", ["film"], reads)], "'x'.*use no variables"),
        (
            lambda: [Interaction("x", ["film"], lambda v: tf.reduce_sum(v["film"], 1))],
            r"'x'.*\[batch, width\].*not \(None,\)",
        ),
        (
            lambda: [Interaction("x", ["film"], lambda v: tf.reduce_sum(v["film"], 0)[None])],
            r"'x'.*of a batch of any size, not \(1, 4\)",
        ),
    ],
)
def test_interactions_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        collection(interactions=make())


def test_features_without_use_are_refused():
    with pytest.raises(ValueError, match=r"unknown features \['actor'\]"):
        collection(returned_features=["actor"])
    with pytest.raises(ValueError, match=r"\['day'\] are neither returned nor used"):
        collection(returned_features=["film"])
