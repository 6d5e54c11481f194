"""Tables of bfloat16: updates are rounded up or down, so that on average nothing is lost."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import checkpoint, optimizers
from tf_recsync.checkpoint.index import parsed
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.ops.bags import Bags, PackedBags
from tf_recsync.optimizers.base import no_versions
from tf_recsync.optimizers.plain_update import plain_update

LAST_PLACE = 2.0**-7  # Of numbers from 1 to 2.
PUSHES, PART = 2000, 16


def check_as_far_as_floats(values: np.ndarray, steps: int, part: int) -> None:
    """Checks numbers that began at 1 and made steps of a part of the last place.

    Each step goes a whole place or none, whatever the others do: a binomial distribution.
    """
    places = (values - 1) / LAST_PLACE
    np.testing.assert_array_equal(places, np.round(places))
    mean, variance, count = steps / part, steps * (part - 1) / part**2, places.size
    # Within five standard deviations of the mean of all, of their variance, and of those of a row.
    assert abs(places.mean() - mean) < 5 * np.sqrt(variance / count)
    assert abs(places.var(ddof=1) - variance) < 5 * variance * np.sqrt(2 / count)
    of_rows = places.mean(1)
    own = variance / places.shape[1]
    assert abs(of_rows.var(ddof=1) - own) < 5 * own * np.sqrt(2 / len(of_rows))


def table_of_ones(rows=64, width=16, **options):
    table = keras.Variable(np.ones((rows, width)), dtype="bfloat16", name="embeddings")
    optimizer = optimizers.SGD(LAST_PLACE / PART, **options)
    optimizer.build([table])
    return table, optimizer


def pushed(pushes=PUSHES, **options) -> np.ndarray:
    """What the op makes of a table whose rows are all pushed, again and again."""
    table, optimizer = table_of_ones(**options)
    (state,) = optimizer.states
    rows = PackedBags.pack([Bags(tf.range(table.shape[0], dtype=tf.int64))])
    gradient = -tf.ones([table.shape[0] * table.shape[1]])
    rate = tf.constant(LAST_PLACE / PART)
    arguments = optimizer.rows_arguments(
        [state], gradient, rows, no_versions(), rate, tf.constant(1, tf.int64)
    )
    for _ in range(pushes):
        optimizer.rows_op(**arguments)
    assert np.all(state.versions.numpy() == pushes)
    return np.asarray(tf.cast(table.value, tf.float32))


def test_pushes_of_a_sixteenth_of_the_last_place_move_a_table_as_floats():
    # The nearest would stand still.
    assert float(tf.cast(tf.constant(1 + LAST_PLACE / PART), tf.bfloat16)) == 1
    check_as_far_as_floats(pushed(), PUSHES, PART)


def test_the_seed_decides_how_rows_are_rounded():
    first = pushed(40)
    np.testing.assert_array_equal(pushed(40, seed=0), first)
    assert np.any(pushed(40, seed=1) != first)
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
        optimizers.Adagrad(0.1, seed=-1)
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got None"):
        optimizers.Adam(0.1, seed=None)
    again = optimizers.Adam.from_config(optimizers.Adam(0.1, seed=3).get_config())
    assert again.seed == 3
    config = optimizers.Adam(0.1).get_config()
    assert config.pop("seed") == 0
    assert optimizers.Adam.from_config(config).seed == 0  # Of a version that did not know it.


@pytest.mark.parametrize("jit", [False, True])
def test_stock_ops_move_a_table_as_floats_too(jit):
    table, optimizer = table_of_ones()
    (state,) = optimizer.states

    @tf.function(jit_compile=jit)
    def push():
        rate = tf.constant(LAST_PLACE / PART)
        step = tf.cast(optimizer.iterations, tf.int64) + 1
        plain_update(optimizer, state, table, -tf.ones(table.shape), rate, step)
        optimizer.iterations.assign_add(1)

    for _ in range(PUSHES):
        push()
    check_as_far_as_floats(np.asarray(tf.cast(table.value, tf.float32)), PUSHES, PART)


def test_stock_ops_keep_infinities_and_what_is_no_number():
    table, optimizer = table_of_ones(4, 2)
    table.assign(np.array([[np.inf, -np.inf], [np.nan, 1.5], [-0.0, 3e38], [1, 1]]))
    plain_update(
        optimizer,
        optimizer.states[0],
        table,
        tf.IndexedSlices(tf.zeros([3, 2]), [0, 1, 2], [4, 2]),
        tf.constant(1.0),
        tf.constant(1, tf.int64),
    )
    found = np.asarray(tf.cast(table.value, tf.float32))
    expected = tf.cast(
        tf.cast([[np.inf, -np.inf], [np.nan, 1.5], [-0.0, 3e38], [1, 1]], tf.bfloat16), tf.float32
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("rounding", "message"),
    [
        ([0, 0, 0, 1], "rounding must have 5 numbers for each piece, not 4"),
        ([1, 0, 0, 1, 0], "rounding must name tables from 0 to below 1, not 1"),
        ([-1, 0, 0, 1, 0], "rounding must name tables from 0 to below 1, not -1"),
        ([0, 1, 0, 1, 0], "rounding of table 0: offsets must rise from 0, piece 0 has 1"),
        ([0, 0, 0, 0, 0], "rounding of table 0: index must be from 0 to below count, not 0"),
    ],
)
def test_the_op_refuses_pieces_that_cannot_be(rounding, message):
    table, optimizer = table_of_ones(4, 2)
    rows = PackedBags.pack([Bags(tf.constant([1], tf.int64))])
    arguments = optimizer.rows_arguments(
        optimizer.states, tf.ones([2]), rows, no_versions(), 0.1, tf.constant(1, tf.int64)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        optimizer.rows_op(**arguments | {"rounding": rounding})
    assert np.all(np.asarray(tf.cast(table.value, tf.float32)) == 1)


# On servers.

ROWS, WIDTH, BATCH = 23, 3, 16


def make_model(scope, shards=1, dtype="bfloat16", make=lambda: optimizers.Adagrad(0.002)):
    keras.utils.set_random_seed(5)
    with scope():
        inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("a", "b")}
        layer = EmbeddingCollection(
            [
                TableConfig("one", ROWS, WIDTH, "ones", shards=shards, dtype=dtype),
                TableConfig("two", ROWS, WIDTH, "ones", shards=shards, dtype=dtype),
            ],
            [FeatureConfig("a", "one"), FeatureConfig("b", "two")],
            concatenate=True,
            name="embed",
        )
        model = keras.Model(inputs, keras.layers.Dense(1, trainable=False)(layer(inputs)))
        model.compile(make(), "mse", jit_compile=False)
    return model


def data(seed=0):
    random = np.random.default_rng(seed)
    ids = {name: random.integers(0, ROWS, 10 * BATCH) for name in ("a", "b")}
    return ids, random.normal(size=(10 * BATCH, 1)).astype(np.float32)


def fit(model, seed=0, **options):
    x, y = data(seed)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options)


def tables_of(model):
    layer = model.get_layer("embed")
    return [np.asarray(layer.table_values(name), np.float32) for name in ("one", "two")]


def test_training_goes_on_from_a_file_on_one_server_as_on_four(clusters, tmp_path):
    strategy = clusters.strategy(1, 4)
    divided = make_model(strategy.scope, 4)
    deltas = recsync.callbacks.Checkpoint(tmp_path / "deltas", every_steps=5, full_every=10)
    fit(divided, callbacks=[deltas])
    states = [s for s in divided.optimizer.states if hasattr(s.variable, "physical_table")]
    assert {s.variable.dtype for s in states} == {"bfloat16"}
    assert {s.accumulators[0].dtype for s in states} == {"float32"}
    assert {s.variable.physical_table.ps for s in states} == set(range(4))
    own = deltas.saved[-1].path
    assert parsed(own).base is not None
    divided.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=divided).write(str(tmp_path / "object"))
    saved = tables_of(divided)
    whole = make_model(strategy.scope, 1)
    with strategy.scope():
        whole.optimizer.build(whole.trainable_variables)
    for way in ("weights", "object", "own"):
        for state in whole.optimizer.states:
            state.variable.assign(np.zeros(state.variable.shape))
        if way == "weights":
            whole.load_weights(tmp_path / "model.weights.h5")
        elif way == "object":
            tf.train.Checkpoint(model=whole).read(str(tmp_path / "object")).assert_consumed()
        else:
            checkpoint.restore(own, whole)
        for found, expected in zip(tables_of(whole), saved, strict=True):
            np.testing.assert_array_equal(found, expected, way)
    for model in (whole, divided):
        fit(model, 1)
    for one, other, before in zip(tables_of(whole), tables_of(divided), saved, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.any(one != before)


def test_a_bfloat16_table_takes_half_of_a_servers_memory_for_rows(clusters):
    strategy = clusters.strategy(1, 4)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        model = make_model(strategy.scope, 4, dtype)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        found = [m for m in strategy.memory(model) if m.job == "ps"]
        assert all(m.tables > 0 for m in found)
        assert sum(m.tables for m in found) == size * 2 * ROWS * WIDTH
        # Accumulators are floats in either case.
        assert sum(m.slots for m in found) == 4 * 2 * ROWS * WIDTH
        assert sum(m.per_row for m in found) == 8 * 2 * ROWS
        # As was planned before anything was there.
        optimizer = model.optimizer
        plan = recsync.plan_placement(
            [TableConfig(name, ROWS, WIDTH, shards=4, dtype=dtype) for name in ("one", "two")],
            4,
            slots=optimizer.slots,
            bytes_per_row_overhead=optimizer.bytes_per_row_overhead,
        )
        expected = [m.tables + m.slots + m.per_row for m in found]
        assert plan.memory.tolist() == expected


class MeanOfAll(keras.layers.Embedding):
    """Rows of a table, less the mean of all of them."""

    def call(self, inputs):
        whole = keras.ops.cast(self.embeddings, "float32")
        return keras.ops.cast(super().call(inputs), "float32") - keras.ops.mean(whole, 0)


def test_what_cannot_be_bfloat16_is_refused_by_name_before_training(clusters):
    strategy = clusters.strategy(1, 4)
    with strategy.scope():
        inputs = keras.Input((2,), dtype="int64")
        table = MeanOfAll(ROWS, WIDTH, dtype="bfloat16")
        pooled = keras.layers.Flatten()(table(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
        model.compile(recsync.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    x = np.zeros((32, 2), np.int64)
    with pytest.raises(ValueError, match=f"{table.embeddings.path} is used as a whole.* bfloat16"):
        model.fit(x, np.zeros((32, 1)), verbose=0)
    with pytest.raises(ValueError, match="dtype"):
        TableConfig("half", ROWS, WIDTH, dtype="float16")
