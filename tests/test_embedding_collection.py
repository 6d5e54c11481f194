"""EmbeddingCollection against lookups and updates in numpy, with and without a cluster."""

import functools
import json
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

BATCH = 6
ROWS = {"films": 40, "users": 25}
DIMENSIONS = {"films": 4, "users": 2}
FEATURE_ROWS = {"film": 40, "seen": 40, "user": 25}


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(3)


def collection(
    combiner="sum", shards=None, out_of_range="error", dtype="float32", **kwargs
) -> EmbeddingCollection:
    return EmbeddingCollection(
        [
            TableConfig(
                "films", ROWS["films"], DIMENSIONS["films"], "normal", combiner, shards, dtype
            ),
            TableConfig("users", ROWS["users"], DIMENSIONS["users"], "normal", combiner),
        ],
        [
            FeatureConfig("film", "films", out_of_range),
            FeatureConfig("seen", "films", out_of_range),
            FeatureConfig("user", "users", out_of_range),
        ],
        **kwargs,
    )


def bags_of(form: str, rows: int, seed: int) -> list[list[int]]:
    """Ids of each example: one, three, or any number, with repetitions."""
    rng = np.random.default_rng(seed)
    lengths = {"single": [1] * BATCH, "dense": [3] * BATCH}.get(form, [3, 0, 1, 2, 0, 4])
    return [list(map(int, rng.integers(0, rows // 4, n))) for n in lengths]


def as_input(form: str, bags: list[list], dtype):
    if form == "single":
        return tf.constant([bag[0] for bag in bags], dtype)
    if form == "dense":
        return tf.constant(bags, dtype)
    ragged = tf.ragged.constant(bags, dtype=dtype, ragged_rank=1)
    if form == "ragged":
        return ragged
    return sparse(ragged) if form == "sparse" else shuffled(sparse(ragged))


def shuffled(ids: tf.SparseTensor) -> tf.SparseTensor:
    """The same in an order that a SparseTensor may have; of weights it is another one."""
    order = np.random.default_rng(ids.dtype.size).permutation(len(ids.values))
    assert list(order) != sorted(order)
    return tf.SparseTensor(
        tf.gather(ids.indices, order), tf.gather(ids.values, order), ids.dense_shape
    )


def sparse(ragged: tf.RaggedTensor) -> tf.SparseTensor:
    """Not RaggedTensor.to_sparse: columns with gaps, as a SparseTensor may have."""
    rows = ragged.value_rowids()
    columns = 2 * tf.range(tf.size(rows, out_type=tf.int64))
    shape = tf.cast([ragged.nrows(), 2 * tf.size(rows, out_type=tf.int64) + 1], tf.int64)
    return tf.SparseTensor(tf.stack([rows, columns], 1), ragged.values, shape)


def pooled(table: np.ndarray, bags, weights, combiner: str) -> np.ndarray:
    """The pooled vectors in numpy."""
    vectors = []
    for ids, own in zip(bags, weights, strict=True):
        w = np.array(own, np.float64)
        total = (table[ids].astype(np.float64) * w[:, None]).sum(0)
        divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        vectors.append(total / divisor if ids else np.zeros(table.shape[1]))
    return np.array(vectors)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["single", "dense", "ragged", "sparse", "shuffled"])
def test_every_form_of_input_is_pooled_as_in_numpy(form, weighted, combiner):
    layer = collection(combiner)
    rng = np.random.default_rng(1)
    inputs, weights, expected = {}, {}, {}
    layer.build()
    for i, (feature, table) in enumerate([("film", "films"), ("seen", "films"), ("user", "users")]):
        bags = bags_of(form, ROWS[table], i)
        own = [
            list(rng.uniform(0.5, 2, len(bag))) if weighted else [1.0] * len(bag) for bag in bags
        ]
        inputs[feature] = as_input(form, bags, tf.int32 if i == 0 else tf.int64)
        if weighted:
            weights[feature] = as_input(form, own, tf.float32)
        expected[feature] = pooled(layer.table_values(table), bags, own, combiner)
    for training in (True, False):
        vectors = layer(inputs, weights or None, training=training)
        assert list(vectors) == ["film", "seen", "user"], f"{training=}"
        for name, value in expected.items():
            np.testing.assert_allclose(
                vectors[name], value, 2e-5, 2e-5, err_msg=f"{name}, {training=}"
            )


@pytest.mark.parametrize("shards", [None, 1])
@pytest.mark.parametrize("form", ["single", "ragged"])
def test_rows_are_updated_as_in_numpy(form, shards):
    layer = collection("mean", shards)
    layer.build()
    before = layer.table_values("films")
    bags = {
        "film": bags_of(form, 40, 0),
        "seen": bags_of(form, 40, 1),
        "user": bags_of(form, 25, 2),
    }
    optimizer = recsync.optimizers.Adagrad(0.1, initial_accumulator_value=0.2, epsilon=1e-7)
    optimizer.build(layer.trainable_variables)
    with tf.GradientTape() as tape:
        vectors = layer({f: as_input(form, b, tf.int64) for f, b in bags.items()}, training=True)
        loss = sum(tf.reduce_sum(v * v) for v in vectors.values())
    optimizer.apply(tape.gradient(loss, layer.trainable_variables))
    gradient = np.zeros_like(before, np.float64)
    for feature in ("film", "seen"):
        for ids in bags[feature]:
            for row in ids:
                gradient[row] += 2 * before[ids].mean(0) / len(ids)
    touched = np.abs(gradient).sum(1) > 0
    assert touched.any()
    assert not touched.all()
    expected = before - 0.1 * gradient / np.sqrt(0.2 + gradient**2 + 1e-7)
    assert_close([layer.table_values("films")], [np.where(touched[:, None], expected, before)])


@pytest.mark.parametrize("clipped", [False, True])
def test_local_updates_take_bags_unless_rows_must_be_known(clipped, monkeypatch):
    updates = []
    rows_op = recsync.optimizers.Adagrad.rows_op

    def noted(self, **kwargs):
        updates.append("bags" in kwargs)
        return rows_op(self, **kwargs)

    monkeypatch.setattr(recsync.optimizers.Adagrad, "rows_op", noted)
    clip = {"global_clipnorm": 1e6} if clipped else {}  # So large that nothing changes.
    models = []
    data = click_data(24)
    for eager in (False, True):
        keras.utils.set_random_seed(3)
        models.append(click_model(collection("mean", name="embed")))
        optimizer = recsync.optimizers.Adagrad(0.1, **clip)
        models[-1].compile(optimizer, "mse", jit_compile=False, run_eagerly=eager)
        models[-1].fit(data, verbose=0, shuffle=False)
    assert set(updates) == {not clipped}
    assert_close(tables_of(models[0]), tables_of(models[1]))
    keras.utils.set_random_seed(3)
    reference = click_model(collection("mean", name="embed"))
    reference.compile(recsync.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    for x, y in data:
        # Inference looks up in stock ops.
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((reference(x, training=False) - y) ** 2)
        variables = reference.trainable_variables
        reference.optimizer.apply(tape.gradient(loss, variables), variables)
    assert_close(tables_of(models[0]), tables_of(reference))


@pytest.mark.parametrize("training", [True, False])
def test_ids_out_of_range_are_refused_clipped_or_hashed(training):
    others = {"seen": tf.constant([0, 1, 2]), "user": tf.constant([1, 2, 3])}
    ids = {"film": tf.constant([-5, 39, 40]), **others}
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature film.*table films"):
        collection()(ids, training=training)
    clipped = collection(out_of_range="clip")
    vectors = clipped(ids, training=training)["film"]
    assert_close([vectors], [clipped.table_values("films")[[0, 39, 39]]])
    hashed = collection(out_of_range="hash")
    many = {**ids, "film": tf.range(-(10**6), 10**6, 499, tf.int64)}
    many = {name: tf.repeat(tf.cast(x, tf.int64)[:1], 4009) for name, x in many.items()} | {
        "film": many["film"]
    }
    vectors = hashed(many, training=training)["film"].numpy()
    table = hashed.table_values("films")
    rows = np.argmin(np.abs(vectors[:, None] - table[None]).sum(2), 1)
    assert_close([vectors], [table[rows]])
    # Spread evenly: a hash that maps half of the ids to one row would not do.
    assert np.bincount(rows, minlength=40).min() > 4009 / 40 / 2


def test_xla_looks_up_no_ids_of_which_it_does_not_see_that_they_are_out_of_range():
    ids = {"film": [-1, 39, 40], "seen": [0, 1, 2], "user": [1, 2, 25]}
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ids}
    model = keras.Model(inputs, collection(concatenate=True, name="embed")(inputs))
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile(recsync.optimizers.Adagrad(0.1), "mse", jit_compile=True)
    before = tables_of(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature film has id -1"):
        model.fit({name: np.array(own) for name, own in ids.items()}, np.ones([3, 10]), verbose=0)
    for table, values in zip(tables_of(model), before, strict=True):
        np.testing.assert_array_equal(table, values)

    def compiled_lookup(layer):
        lookup = tf.function(layer, jit_compile=True)
        return lookup({name: tf.constant(own) for name, own in ids.items()})

    names = r"\['film', 'seen', 'user'\]"
    with pytest.raises(ValueError, match=rf"{names} have out_of_range='error', and XLA raises no"):
        compiled_lookup(collection())
    clipped = collection(out_of_range="clip")
    assert clipped.supports_jit
    found = compiled_lookup(clipped)
    np.testing.assert_array_equal(found["film"], clipped.table_values("films")[[0, 39, 39]])
    np.testing.assert_array_equal(found["user"], clipped.table_values("users")[[1, 2, 24]])


def test_the_op_and_stock_ops_hash_alike():
    layer = collection(out_of_range="hash")
    ids = {n: tf.constant([-3, 5, 2**40, -(2**62)], tf.int64) for n in ("film", "seen", "user")}
    assert_close(list(layer(ids, training=True).values()), list(layer(ids).values()))


SINGLE = {"film": [1, 2], "seen": [3, 4], "user": [5, 6]}


@pytest.mark.parametrize(
    ("inputs", "weights", "message"),
    [
        ({"film": [1, 2], "seen": [3, 4]}, None, r"lacks the features \['user'\]"),
        ({**SINGLE, "actor": [1, 2]}, None, r"unknown features \['actor'\]"),
        (SINGLE, {"actor": [1.0, 2.0]}, r"weights has unknown features \['actor'\]"),
        ({**SINGLE, "seen": [1.0, 2.0]}, None, "feature 'seen' of table 'films'.*not float32"),
        (SINGLE, {"seen": [1.0]}, r"feature 'seen' of table 'films'.*weights are \(1,\)"),
        (SINGLE, {"seen": [1, 2]}, "feature 'seen' of table 'films'.*floats, not int32"),
        ({**SINGLE, "user": [[[1]], [[2]]]}, None, "feature 'user' of table 'users'.*dense ids"),
        ([1, 2], None, "inputs must be a dict"),
    ],
)
def test_wrong_inputs_are_refused_with_feature_and_table(inputs, weights, message):
    layer = collection()
    layer.build()
    as_tensors = inputs
    if isinstance(inputs, dict):
        as_tensors = {name: tf.constant(x) for name, x in inputs.items()}
    weights = weights and {name: tf.constant(x) for name, x in weights.items()}
    with pytest.raises(ValueError, match=message):
        layer.call(as_tensors, weights, training=True)


@pytest.mark.parametrize(
    ("seen", "weights", "message"),
    [
        (tf.constant([1, 2, 3]), None, "feature seen of table films has 3 examples"),
        (tf.ragged.constant([[1], [2], []]), None, "feature seen of table films has 3 examples"),
        (
            tf.ragged.constant([[1, 2], [3]]),
            tf.ragged.constant([[1.0], [3.0]]),
            "feature seen of table films has 3 ids, but 2 weights",
        ),
    ],
)
def test_inputs_of_different_sizes_are_refused_with_feature_and_table(seen, weights, message):
    inputs = {"film": tf.constant([1, 2]), "seen": seen, "user": tf.constant([1, 2])}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        collection()(inputs, None if weights is None else {"seen": weights}, training=True)


def test_a_placement_for_another_strategy_is_refused():
    layer = collection()
    tables = layer._table_configs
    plan = recsync.plan_placement(tables, ps=3)
    with pytest.raises(ValueError, match="3 parameter servers, the strategy has 1"):
        collection(placement=plan).build()
    with pytest.raises(ValueError, match="users"):
        collection(placement=recsync.plan_placement(tables[:1], ps=1)).build()
    with pytest.raises(ValueError, match="memory_limit"):
        collection(memory_limit=100).build()


def test_configuration_survives_a_round_trip():
    layer = collection("mean", concatenate=True, memory_limit=10**6)
    config = json.loads(json.dumps(layer.get_config()))
    again = EmbeddingCollection.from_config(config)
    assert again.get_config() == layer.get_config()
    vectors = again({name: tf.constant([1, 2]) for name in ("film", "seen", "user")})
    assert vectors.shape == (2, 10)


# On a cluster.

FEATURES = ("film", "seen", "user")


def click_model(layer: EmbeddingCollection) -> keras.Model:
    inputs = {
        "film": keras.Input((), dtype="int32", name="film"),
        "seen": keras.Input((None,), dtype="int64", name="seen", ragged=True),
        "user": keras.Input((2,), dtype="int32", name="user"),
    }
    vectors = layer(inputs)
    x = keras.layers.Concatenate()([vectors[name] for name in FEATURES])
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))


def click_data(n: int = 48) -> tf.data.Dataset:
    rng = np.random.default_rng(4)
    seen = [list(map(int, rng.integers(0, 40, rng.integers(0, 5)))) for _ in range(n)]
    features = {
        "film": rng.integers(0, 40, n).astype(np.int32),
        "seen": tf.ragged.constant(seen, dtype=tf.int64, ragged_rank=1),
        "user": rng.integers(0, 25, (n, 2)).astype(np.int32),
    }
    labels = (rng.random((n, 1)) < 0.4).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(8)


def make_optimizer(clip=None):
    swap = recsync.Swap(period=5, decay=0.5)
    return recsync.optimizers.SwapAdagrad(0.1, swap=swap, global_clipnorm=clip)


class Expected(typing.NamedTuple):
    """What a number of epochs in this process alone give."""

    tables: list[np.ndarray]
    predictions: np.ndarray


@functools.cache
def trained_locally(epochs: int, dtype="float32", clip=None) -> Expected:
    """Eagerly, as few steps are not worth a trace; as arrays, which outlive a connection."""
    keras.utils.set_random_seed(3)
    model = click_model(collection("mean", dtype=dtype, name="embed"))
    model.compile(make_optimizer(clip), "binary_crossentropy", run_eagerly=True)
    model.fit(click_data(), epochs=epochs, verbose=0, shuffle=False)
    found = [model(inputs, training=False) for inputs, _ in click_data()]
    return Expected(tables_of(model), np.concatenate(found))


def on_cluster(strategy, shards=None, dtype="float32", clip=None) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = click_model(collection("mean", shards, dtype=dtype, name="embed"))
        model.compile(make_optimizer(clip), "binary_crossentropy")
    return model


def tables_of(model: keras.Model) -> list[np.ndarray]:
    layer = model.get_layer("embed")
    return [layer.table_values("films"), layer.table_values("users")]


@pytest.mark.cases("None-2", "0.05-None")
@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_one_worker_trains_tables_on_two_servers_as_one_process_does(clusters, shards, clip):
    # Connects, before there are variables.
    strategy = clusters.strategy(1, 2)
    local = trained_locally(2, clip=clip)
    model = on_cluster(strategy, shards, clip=clip)
    assert len(model.get_layer("embed").trainable_variables) > 2
    model.fit(click_data(), epochs=2, verbose=0)
    assert_close(tables_of(model), local.tables)
    assert_close([model.predict(click_data(), verbose=0)], [local.predictions])


def test_bfloat16_tables_are_rounded_but_their_accumulators_are_not(clusters):
    strategy = clusters.strategy(1, 2)
    exact = trained_locally(2).tables
    local = trained_locally(2, "bfloat16").tables
    model = on_cluster(strategy, 2, "bfloat16")
    model.fit(click_data(), epochs=2, verbose=0)
    states = [s for s in model.optimizer.states if "bfloat16" in s.variable.path]
    assert [s.variable.dtype for s in states] == ["bfloat16"] * 2
    assert [s.accumulators[0].dtype for s in states] == ["float32"] * 2
    for found, expected in ((tables_of(model), local), (local, exact)):
        # 8 bits of mantissa, and a dozen updates of a row.
        np.testing.assert_allclose(found[0], expected[0], rtol=0.02, atol=0.01)
    assert np.abs(local[0] - exact[0]).max() > 1e-5


@pytest.mark.cases("Ftrl")
@pytest.mark.parametrize("optimizer", ["Adam", "Ftrl"])
def test_adam_and_ftrl_train_and_save_tables_wherever_they_are(clusters, optimizer, tmp_path):
    strategy = clusters.strategy(1, 2)

    def model_of(layer, **options):
        model = click_model(layer)
        model.compile(getattr(recsync.optimizers, optimizer)(0.05), "mse", **options)
        return model

    keras.utils.set_random_seed(3)
    local = model_of(collection("mean", name="embed"), run_eagerly=True)
    local.fit(click_data(), epochs=2, verbose=0, shuffle=False)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = model_of(collection("mean", 2, name="embed"), jit_compile=False)
    model.fit(click_data(), epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    again.run_eagerly = True
    again.fit(click_data(), epochs=1, verbose=0, shuffle=False)
    assert_close(tables_of(again), tables_of(local))


def test_what_two_servers_trained_goes_on_locally_and_back(clusters, tmp_path):
    strategy = clusters.strategy(1, 2)
    model = on_cluster(strategy, shards=2)
    model.fit(click_data(), epochs=1, verbose=0)
    model.save(tmp_path / "two.keras")
    one = keras.saving.load_model(tmp_path / "two.keras")
    assert_close(tables_of(one), tables_of(model))
    one.run_eagerly = True
    one.fit(click_data(), epochs=1, verbose=0, shuffle=False)
    one.save_weights(tmp_path / "one.weights.h5")
    with strategy.scope():
        back = keras.saving.load_model(tmp_path / "two.keras")
    back.fit(click_data(), epochs=2, verbose=0)
    assert_close(tables_of(back), trained_locally(3).tables)
    again = on_cluster(strategy)
    again.load_weights(tmp_path / "one.weights.h5")
    assert_close(tables_of(again), tables_of(one))
