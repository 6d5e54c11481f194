"""The first values of tables: the same wherever rows lie, of their distribution, made in place."""

import dataclasses
import json
import math
import pathlib
import statistics
import threading

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.embedding import initial_values, table_rows
from tf_recsync.embedding.physical_tables import (
    PhysicalInitializer,
    physical_tables,
)
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

I = keras.initializers  # noqa: E741
ROWS, DIMENSION = 1003, 6
NORMAL = statistics.NormalDist()


def layer_of(*tables: TableConfig, **kwargs) -> EmbeddingCollection:
    return EmbeddingCollection(tables, [FeatureConfig(t.name, t.name) for t in tables], **kwargs)


def built(*tables: TableConfig, **kwargs) -> EmbeddingCollection:
    layer = layer_of(*tables, **kwargs)
    layer.build()
    return layer


def values_of(initializer, rows=ROWS, dimension=DIMENSION, name="t", dtype="float32"):
    table = TableConfig(name, rows, dimension, initializer, dtype=dtype)
    return built(table).table_values(name)


def divided(table: TableConfig, shards: int) -> np.ndarray:
    """The values of a table that is divided among as many servers, made in this process."""
    table = dataclasses.replace(table, shards=shards)
    physical = physical_tables([table], recsync.plan_placement([table], shards))
    values = initial_values.first_values(table)
    make = [
        PhysicalInitializer(p, {table.name: values}, {table.name: values.draw_seed(table.name)})
        for p in physical
    ]
    parts = [np.asarray(tf.cast(one(None, table.dtype), tf.float32)) for one in make]
    assert len(parts) == shards
    whole = np.empty((table.rows, table.dimension), np.float32)
    for one, part in zip(physical, parts, strict=True):
        for piece in one.pieces:
            whole[piece.index :: piece.count] = part[piece.offset : piece.offset + piece.rows]
    return whole


# Where rows lie.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "initializer",
    [
        I.RandomUniform(-1, 3, seed=1),
        I.RandomNormal(1, 2, seed=1),
        I.TruncatedNormal(1, 2, seed=1),
        I.GlorotUniform(seed=1),
        I.Constant(0.3),
    ],
    ids=lambda i: type(i).__name__,
)
def test_values_are_the_same_however_a_table_is_divided(initializer, dtype):
    table = TableConfig("t", ROWS, DIMENSION, initializer, dtype=dtype)
    whole = built(table).table_values("t")
    for shards in (1, 3, 4):
        np.testing.assert_array_equal(divided(table, shards), whole, err_msg=f"{shards=}")


def test_servers_make_the_values_of_one_process(clusters):
    def numbered(rows, dtype):
        return tf.cast(rows[:, None] + np.arange(3) / 8, dtype)

    array = np.arange(80, dtype=np.float64).reshape(40, 2)
    tables = [
        *(TableConfig(f"split_{n}", 103, 5, I.RandomNormal(seed=2), shards=n) for n in (1, 3)),
        TableConfig("constant", 21, 5, "ones"),
        TableConfig("numbered", 50, 3, numbered, shards=3),
        TableConfig("narrow", 50, 3, numbered, shards=2, dtype="bfloat16"),
        TableConfig("array", 40, 2, array, shards=3),
    ]
    strategy = clusters.strategy(1, 3)  # First: this process has another name from then on.
    alone = built(*tables)
    with strategy.scope():
        there = built(*tables)
    assert {"ps" in v.value.device for v in there.variables} == {True}
    for table in tables:
        np.testing.assert_array_equal(
            there.table_values(table.name), alone.table_values(table.name), err_msg=table.name
        )
    np.testing.assert_array_equal(there.table_values("array"), array)
    np.testing.assert_array_equal(there.table_values("numbered")[:, 1], np.arange(50) + 0.125)


def test_a_server_needs_no_more_memory_than_its_rows(clusters):
    strategy = clusters.strategy(1, 3)
    rows, megabytes = 3_000_000, 2.0**20
    share = rows / 3 * 16 * 4 / megabytes
    pids = [strategy.cluster.pid("ps", i) for i in range(3)]

    def memory(pid, name):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) / 1024

    for pid in pids:
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # The peak is what is there now.
    before = [memory(pid, "VmRSS") for pid in pids]

    def peaks():
        return [memory(pid, "VmHWM") - old for pid, old in zip(pids, before, strict=True)]

    with strategy.scope():
        layer = built(TableConfig("t", rows, 16, "uniform", shards=3))
        # Beside the rows: what servers need for calls, whatever the table.
        assert max(peaks()) < 1.1 * share + 25
        optimizer = recsync.optimizers.Adagrad(0.1)
        optimizer.build(layer.trainable_variables)
    versions = rows / 3 * 8 / megabytes
    assert share < min(peaks())
    assert max(peaks()) < 1.1 * (2 * share + versions) + 25


# What values there are.


def furthest(values: np.ndarray, cdf) -> float:
    """The largest difference of the values' distribution from another (Kolmogorov, Smirnov)."""
    expected = np.array([cdf(v) for v in np.sort(values)])
    steps = np.arange(len(values) + 1) / len(values)
    return max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))


def truncated(v: float) -> float:
    tail = NORMAL.cdf(-2)
    return (NORMAL.cdf(v) - tail) / (1 - 2 * tail)


WITHIN_TWO = 0.87962566  # The standard deviation of what is within two standard deviations.


@pytest.mark.parametrize(
    ("initializer", "mean", "stddev", "bounds", "cdf"),
    [
        (I.RandomUniform(-1, 3, 5), 1, 4 / math.sqrt(12), (-1, 3), lambda v: (v + 1) / 4),
        (I.RandomNormal(2, 3, 5), 2, 3, (-18, 22), lambda v: NORMAL.cdf((v - 2) / 3)),
        (
            I.TruncatedNormal(2, 3, 5),
            *(2, 3 * WITHIN_TWO, (-4, 8)),
            lambda v: truncated((v - 2) / 3),
        ),
    ],
    ids=["uniform", "normal", "truncated_normal"],
)
def test_values_have_their_distribution(initializer, mean, stddev, bounds, cdf):
    values = values_of(initializer, 10_000, 7)
    n = values.size
    assert abs(values.mean() - mean) < 4 * stddev / math.sqrt(n)
    assert abs(values.std() / stddev - 1) < 4 / math.sqrt(n)
    assert bounds[0] <= values.min()
    assert values.max() <= bounds[1]
    critical = 1.95  # Beyond it in one of a thousand samples.
    assert furthest(values.ravel(), cdf) < critical / math.sqrt(n)
    # Neither rows, columns nor neighbors go together.
    assert furthest(values[:, 0], cdf) < critical / math.sqrt(len(values))
    centered = (values - values.mean()) / values.std()
    for a, b in [(centered[1:], centered[:-1]), (centered[:, 1:], centered[:, :-1])]:
        assert abs((a * b).mean()) < 4 / math.sqrt(a.size)
    assert len(np.unique(values)) > 0.97 * n


@pytest.mark.parametrize("distribution", ["uniform", "truncated_normal", "untruncated_normal"])
@pytest.mark.parametrize("mode", ["fan_in", "fan_out", "fan_avg"])
def test_fans_are_those_of_the_whole_table(mode, distribution):
    initializer = I.VarianceScaling(2.0, mode, distribution, seed=4)
    table = TableConfig("t", 4000, 8, initializer)
    fan = {"fan_in": 4000, "fan_out": 8, "fan_avg": 2004}[mode]
    values = divided(table, 4)
    assert abs(values.std() / math.sqrt(2 / fan) - 1) < 0.02
    stock = np.asarray(initializer((4000, 8)))
    assert abs(values.std() / stock.std() - 1) < 0.03
    if distribution != "untruncated_normal":
        assert abs(np.abs(values).max() / np.abs(stock).max() - 1) < 0.01


@pytest.mark.parametrize(
    ("initializer", "value"),
    [("zeros", 0), (I.Ones(), 1), (I.Constant, 0), (I.Constant(-2.5), -2.5)],
    ids=["name", "ones", "class", "constant"],
)
def test_constants(initializer, value):
    np.testing.assert_array_equal(values_of(initializer), np.full((ROWS, DIMENSION), value))


def test_uniform_bounds_may_be_one_number_or_next_to_each_other():
    np.testing.assert_array_equal(values_of(I.RandomUniform(0.1, 0.1)), np.float32(0.1))
    above = np.nextafter(np.float32(1), np.float32(2))
    np.testing.assert_array_equal(values_of(I.RandomUniform(1.0, above)), 1)


def test_tables_and_seeds_differ():
    layer = built(*(TableConfig(n, 50, 4, I.RandomUniform(seed=1)) for n in ("a", "b")))
    found = [layer.table_values("a"), layer.table_values("b")]
    found.append(values_of(I.RandomUniform(seed=2), 50, 4, "a"))
    for i, a in enumerate(found):
        assert not any(np.intersect1d(a, b).size > 5 for b in found[:i])


def test_the_random_seed_of_keras_decides_where_none_is_given():
    def once(seed):
        keras.utils.set_random_seed(seed)
        return values_of("uniform")

    np.testing.assert_array_equal(once(1), once(1))
    assert not np.array_equal(once(1), once(2))


def test_a_seed_generator_gives_other_values_to_each_layer():
    generator = keras.random.SeedGenerator(3)
    first, second = (values_of(I.RandomUniform(seed=generator)) for _ in range(2))
    assert not np.array_equal(first, second)
    again = values_of(I.RandomUniform(seed=keras.random.SeedGenerator(3)))
    np.testing.assert_array_equal(first, again)


def test_a_model_without_a_graph_has_them_too():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layer_of(
                TableConfig("drawn", 9, 2, I.RandomNormal(seed=1)),
                TableConfig("given", 9, 2, np.eye(9, 2)),
            )

        def call(self, x):
            return self.embed({"drawn": x, "given": x}, training=False)

    model = Model()
    model(keras.Input((), dtype="int64"))
    np.testing.assert_array_equal(model.embed.table_values("given"), np.eye(9, 2))
    expected = values_of(I.RandomNormal(seed=1), 9, 2, "drawn")
    np.testing.assert_array_equal(model.embed.table_values("drawn"), expected)


# Given values.


def test_arrays_of_any_kind_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(table_rows, "BLOCK_BYTES", 4 * DIMENSION * 100)
    array = np.random.default_rng(1).normal(size=(ROWS, DIMENSION)).astype(np.float32)
    np.save(tmp_path / "a.npy", array)
    tf.train.Checkpoint(v=tf.Variable(array)).write(str(tmp_path / "checkpoint"))
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoint"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["table"] = array
        for source in (
            array,
            np.load(tmp_path / "a.npy", mmap_mode="r"),
            file["table"],
            tf.constant(array),
            reader.get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE"),
        ):
            np.testing.assert_array_equal(values_of(source), array)
    np.testing.assert_array_equal(values_of(array.astype(np.float16)), array.astype(np.float16))
    narrow = np.asarray(tf.cast(tf.cast(array, tf.bfloat16), tf.float32))
    np.testing.assert_array_equal(values_of(array, dtype="bfloat16"), narrow)


def test_a_callable_is_asked_for_each_row_once_and_in_order(monkeypatch):
    monkeypatch.setattr(table_rows, "BLOCK_BYTES", 4 * DIMENSION * 400)
    asked = []

    def rows_of(rows, dtype):
        assert (rows.dtype, dtype) == (np.int64, "float32")
        asked.append(rows)
        return np.outer(rows, np.ones(DIMENSION))

    values = values_of(rows_of)
    assert [len(rows) for rows in asked] == [400, 400, 203]
    np.testing.assert_array_equal(np.concatenate(asked), np.arange(ROWS))
    np.testing.assert_array_equal(values[:, 2], np.arange(ROWS))


# Configurations.


@keras.saving.register_keras_serializable(package="test_initial_values")
def squares(rows, dtype):
    return np.repeat(np.square(rows)[:, None], 2, 1).astype(dtype)


@pytest.mark.parametrize(
    "initializer", [squares, I.HeNormal(seed=4), np.eye(9, 2)], ids=["callable", "keras", "array"]
)
def test_a_layer_and_its_copy_begin_alike(initializer):
    layer = built(TableConfig("t", 9, 2, initializer))
    config = json.loads(json.dumps(layer.get_config()))
    copy = EmbeddingCollection.from_config(config)
    copy.build()
    np.testing.assert_array_equal(copy.table_values("t"), layer.table_values("t"))
    assert TableConfig("t", 9, 2, initializer) == TableConfig("t", 9, 2, initializer)
    assert TableConfig("t", 9, 2, initializer) != TableConfig("t", 9, 2, "zeros")


def test_a_large_array_is_no_part_of_a_configuration():
    array = np.zeros((2**17 + 1, 2), np.float32)
    table = TableConfig("vectors", *array.shape, array)
    with pytest.raises(ValueError, match="'vectors'.* array of 1048584 bytes.*callable"):
        table.get_config()
    assert table == TableConfig("vectors", *array.shape, array)
    assert table != TableConfig("vectors", *array.shape, array.copy())


# What is refused.


class OfItsOwn(I.RandomUniform):
    def __call__(self, shape, dtype=None):
        return keras.ops.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("initializer", "message"),
    [
        ("orthogonal", "table 'u': initializer Orthogonal .*whole.* VarianceScaling .*callable"),
        (I.Identity(), "table 'u': initializer Identity .*whole"),
        (OfItsOwn(), "table 'u': initializer OfItsOwn .*whole"),
        (lambda shape, dtype=None: tf.zeros(shape), "table 'u'.*whole table.*f.rows, dtype"),
        (None, "table 'u'.*initializer=None"),
        ("no_such_thing", "table 'u'.*no_such_thing"),
        ([[1.0, 2.0]] * 4, "table 'u'.*must be one of"),
        (I.RandomUniform(math.nan, 1), "table 'u': RandomUniform has minval=nan.*finite"),
        (I.RandomUniform(0, math.inf), "table 'u': RandomUniform has maxval=inf"),
        (I.RandomUniform(2, 1), "table 'u': RandomUniform has minval=2.0: .* at most maxval=1"),
        (I.RandomUniform(-3e38, 3e38), "table 'u': RandomUniform has .*range"),
        (I.RandomNormal(0, -1), "table 'u': RandomNormal has stddev=-1.0: must be at least 0"),
        (I.RandomNormal(1e39, 1), "table 'u': RandomNormal has mean=1e.39.*finite"),
        (I.TruncatedNormal("zero"), "table 'u': TruncatedNormal has mean='zero'"),
        (I.Constant([1, 2]), r"table 'u': Constant has value=\[1, 2\]"),
        (I.VarianceScaling(math.inf), "table 'u': VarianceScaling has scale=inf"),
        (np.zeros((2, 4)), r"table 'u'.*array of float64 \(2, 4\): must be floats \(4, 2\)"),
        (np.zeros((4, 2), int), r"table 'u'.*array of int64 \(4, 2\): must be floats"),
        (np.array([["a"] * 2] * 4), r"table 'u'.*array of .U1 \(4, 2\)"),
    ],
)
def test_what_gives_no_values_is_refused_by_name(initializer, message):
    with pytest.raises(ValueError, match=message):
        layer_of(TableConfig("u", 4, 2, initializer))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((4, 3)), r"table 'u': .*gave float64 \(4, 3\) for rows 0 to 3: .* \(4, 2\)"),
        (np.zeros((2, 4)), r"table 'u': .*\(2, 4\)"),
        (np.zeros((4, 2), int), "table 'u': .*int64"),
        (None, "table 'u': .*object"),
        (1.0, r"table 'u': .*float64 \(\)"),
    ],
)
def test_a_callable_that_gives_something_else_is_named(values, message):
    layer = layer_of(TableConfig("u", 4, 2, lambda rows, dtype: values))
    with pytest.raises(ValueError, match=message):
        layer.build()


GOOD = {
    "dtype": tf.float32,
    "dimension": 2,
    "rows": [3, 1],
    "indices": [0, 1],
    "counts": [1, 2],
    "distributions": ["normal", "uniform"],
    "parameters": [0.0, 1.0, 0.0, 1.0],
    "seeds": [1, 2],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [3, -1]}, "piece 1: rows must be at least 0, not -1"),
        ({"rows": [2**62, 1]}, f"rows must be at most {2**40}, not {2**62}"),
        ({"rows": [2**40, 2**40]}, f"rows x dimension must be at most {2**40} elements"),
        ({"rows": [2**40, 1], "dimension": 0}, "rows x dimension must be at most"),
        ({"dimension": 2**62}, f"rows x dimension .*, not 4 x {2**62}"),
        ({"rows": [2**38, 1]}, "rows x dimension = .* bytes; the machine, or .*, has .* left"),
        ({"rows": [3]}, "indices must have 1 values, not 2"),
        ({"seeds": []}, "seeds must have 2 values, not 0"),
        ({"parameters": [0.0, 1.0]}, "parameters must have 4 values, not 2"),
        ({"indices": [-1, 0]}, "piece 0: index must be from 0 to below count, not -1"),
        ({"indices": [0, 2]}, "piece 1: index must be .*, not 2 with count 2"),
        ({"counts": [0, 2]}, "piece 0: index .* count 0"),
        ({"counts": [2**62, 2]}, f"piece 0: rows x count must be at most .*, not 3 x {2**62}"),
        ({"distributions": ["normal", "cauchy"]}, "distributions can't be 'cauchy'"),
        ({"parameters": [math.nan, 1.0, 0.0, 1.0]}, "piece 0: parameters must be finite, not nan"),
        ({"parameters": [0.0, 1.0, 0.0, math.inf]}, "piece 1: parameters must be finite"),
        ({"parameters": [0.0, -1.0, 0.0, 1.0]}, "piece 0: a standard deviation .*, not -1"),
        ({"parameters": [0.0, 1.0, 2.0, 1.0]}, "piece 1: .*bounds.* not 2 and 1"),
        ({"parameters": [0.0, 1.0, -3e38, 3e38]}, "piece 1: .*finite range"),
    ],
)
def test_the_kernel_refuses_by_name(changes, message):
    errors = (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError)
    with pytest.raises(errors, match=message):
        ops.initial_rows(**(GOOD | changes))
    assert ops.initial_rows(**GOOD).shape == (4, 2)


def test_a_cancelled_step_makes_no_values():
    @tf.function(input_signature=[], autograph=False)
    def make():
        return tf.reduce_sum(ops.initial_rows(**(GOOD | {"rows": [2 * 10**7, 1]})))

    manager = cancellation.CancellationManager()
    run = manager.get_cancelable_function(make.get_concrete_function())
    run()
    # In the middle, as a rule: it takes tenths of a second.
    cancels = threading.Timer(0.05, manager.start_cancel)
    cancels.start()
    with pytest.raises(tf.errors.CancelledError):
        while True:
            run()


def test_pieces_may_be_empty():
    none = {name: [] for name in ("rows", "indices", "counts", "distributions", "parameters")}
    assert ops.initial_rows(**(GOOD | none | {"seeds": []})).shape == (0, 2)
    assert ops.initial_rows(**(GOOD | {"dimension": 0})).shape == (4, 0)
    assert ops.initial_rows(**(GOOD | {"rows": [0, 1]})).shape == (1, 2)
