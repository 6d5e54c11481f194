"""Files of versions in which periods and steps beside rows were int64, and others as narrow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.embedding.table_rows import narrowed, narrowed_tensor
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

ROWS = {"films": 11, "users": 6}
PLAIN = 7  # Rows of a layer's own table.
MOST = np.iinfo(np.int32).max


class Older(recsync.optimizers.Adam):
    """Adam with the variables that it had before."""

    def add_variable(self, shape, initializer="zeros", dtype=None, **kwargs):
        dtype = "int64" if dtype == "int32" else dtype
        return super().add_variable(shape, initializer, dtype, **kwargs)


Older.__name__ = "Adam"  # By which files know it.


def make_model(make=recsync.optimizers.Adam, strategy=None, shards=1):
    with (strategy or tf.distribute.get_strategy()).scope():
        ids = {name: keras.Input((2,), dtype="int64", name=name) for name in [*ROWS, "plain"]}
        layer = EmbeddingCollection(
            [TableConfig(name, rows, 4, shards=shards) for name, rows in ROWS.items()],
            [FeatureConfig(name, name) for name in ROWS],
            concatenate=True,
            name="embed",
        )
        vectors = layer({name: ids[name] for name in ROWS})
        plain = keras.layers.Flatten()(keras.layers.Embedding(PLAIN, 3)(ids["plain"]))
        joined = keras.layers.Concatenate()([vectors, plain])
        model = keras.Model(ids, keras.layers.Dense(1)(joined))
        model.compile(make(0.1, swap=recsync.Swap(period=2, decay=0.5)), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def counted(state):
    return {"period": state.last_periods[0], "step": state.last_steps[0]}


def of_rows(model):
    """Periods and steps of the rows of each table, whatever server has them."""
    found = {}
    for state in model.optimizer.states:
        for kind, variable in counted(state).items():
            values = np.asarray(variable)
            if hasattr(state.variable, "physical_table"):
                for piece in state.variable.physical_table.pieces:
                    whole = found.setdefault(
                        (piece.table, kind), np.zeros(ROWS[piece.table], np.int64)
                    )
                    piece.take(whole)[:] = values[piece.offset : piece.offset + piece.rows]
            elif state.is_table:
                found["plain", kind] = values
    return found


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """What an older version has written, in each way, and what it had."""
    folder = tmp_path_factory.mktemp("older")
    model = make_model(Older)
    random = np.random.default_rng(1)
    for state in model.optimizer.states:
        for variable in counted(state).values():
            values = random.integers(0, 1000, variable.shape)
            if state.is_table:
                assert variable.dtype == "int64"
                values[:3] = [MOST, MOST + 1, 2**40]
            variable.assign(values)
    model.save_weights(folder / "model.weights.h5")
    tf.train.Checkpoint(model=model).write(str(folder / "object"))
    checkpoint.save(folder / "own", model)
    return folder, of_rows(model)


def load(model, folder, way):
    if way == "weights":
        model.load_weights(folder / "model.weights.h5")
    elif way == "object":
        tf.train.Checkpoint(model=model).read(str(folder / "object")).assert_consumed()
    else:
        checkpoint.restore(folder / "own", model)


def check(model, expected):
    found = of_rows(model)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], np.minimum(values, MOST), str(name))
    for state in model.optimizer.states:
        types = {variable.dtype for variable in counted(state).values()}
        assert types == {"int32" if state.is_table else "int64"}


@pytest.mark.parametrize("way", ["weights", "object", "own"])
def test_files_with_int64_beside_rows_are_restored_in_one_process(older, way):
    folder, expected = older
    model = make_model()
    load(model, folder, way)
    check(model, expected)


def test_files_with_int64_beside_rows_are_restored_on_servers(older, clusters):
    folder, expected = older
    strategy = clusters.strategy(2, 2)
    model = make_model(strategy=strategy, shards=2)
    for way in ("weights", "object", "own"):
        for state in model.optimizer.states:
            for variable in counted(state).values():
                variable.assign(np.zeros(variable.shape))
        load(model, folder, way)
        check(model, expected)


def test_what_is_written_now_is_restored_with_its_own_types(older, tmp_path):
    folder, expected = older
    model = make_model()
    load(model, folder, "weights")
    model.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=model).write(str(tmp_path / "object"))
    checkpoint.save(tmp_path / "own", model)
    for way in ("weights", "object", "own"):
        other = make_model()
        load(other, tmp_path, way)
        check(other, expected)
    # So that versions before read it as well.
    reader = tf.train.load_checkpoint(str(tmp_path / "object"))
    types = reader.get_variable_to_dtype_map()
    of_tables = [t for name, t in types.items() if "last_" in name and "/values" in name]
    assert of_tables == [tf.int64] * 4
    assert set(types.values()) <= {tf.int64, tf.float32, tf.string}


def test_integers_that_a_type_lacks_become_the_nearest():
    random = np.random.default_rng(2)
    values = random.integers(-(2**33), 2**33, 1000)
    values[:4] = [2**31 - 1, 2**31, -(2**31), -(2**31) - 1]
    expected = [min(max(int(v), -(2**31)), 2**31 - 1) for v in values]
    for found in (narrowed(values, "int32"), narrowed_tensor(tf.constant(values), "int32")):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == tf.int32
    for found in (narrowed(values, "float32"), narrowed_tensor(tf.constant(values), "float32")):
        np.testing.assert_array_equal(found, values.astype(np.float32))
