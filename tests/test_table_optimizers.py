"""Tables that are trained by optimizers of their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import SGD, Adagrad, Ftrl, SwapAdagrad, per_table

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

NAMES = ("a", "b", "c", "d")
SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay([20], [0.5, 0.1])


def swap_adagrad():
    swap = recsync.Swap(period=7, decay=0.5)
    return SwapAdagrad(0.1, swap=swap, staleness=recsync.staleness.InversePower(1.0))


# Of each table; those of a and d are equal.
OWN = {"a": lambda: Ftrl(0.2), "b": lambda: None, "c": swap_adagrad, "d": lambda: Ftrl(0.2)}


def model_of(strategy=None, own=OWN, optimizer=lambda: per_table(SGD(SCHEDULE)), **options):
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        tables = [
            TableConfig(n, 12, 3, "ones", optimizer=own[n](), **options.get(n, {})) for n in NAMES
        ]
        layer = EmbeddingCollection(
            tables, [FeatureConfig(n, n) for n in NAMES], concatenate=True, name="tables"
        )
        inputs = {n: keras.Input((), dtype="int64", name=n) for n in NAMES}
        model = keras.Model(inputs, keras.layers.Dense(1, name="dense")(layer(inputs)))
        model.compile(optimizer(), "mse")
    return model


def dataset(batches=30):
    rng = np.random.default_rng(3)
    x = {n: rng.integers(0, 12, batches * 8) for n in NAMES}
    y = rng.normal(size=(batches * 8, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def values_of(model) -> dict[str, np.ndarray]:
    layer = model.get_layer("tables")
    kernel = model.get_layer("dense").kernel.numpy()
    return {n: layer.table_values(n) for n in NAMES} | {"dense": kernel}


@pytest.fixture
def strategy(clusters):
    return recsync.AsyncStrategy(clusters.get(workers=1, ps=2))


@pytest.mark.parametrize("keys", [False, True])
def test_each_table_is_trained_by_its_own_optimizer(strategy, keys):
    options = {"a": {"keys": "any"}} if keys else {}
    keras.utils.set_random_seed(3)
    model = model_of(strategy, **options)
    before = values_of(model)["dense"]
    model.fit(dataset(), verbose=0, shuffle=False)
    parts = [type(part).__name__ for part in model.optimizer.optimizers]
    assert parts == ["SGD", "Ftrl", "SwapAdagrad"]
    assert {int(part.iterations.numpy()) for part in model.optimizer.optimizers} == {30}
    # As in models in which one optimizer trains everything, but only its own part is looked at
    # after one step, in which nothing depends on how the rest is trained.
    few = dataset(1)
    for make, names in (
        (lambda: SGD(SCHEDULE), "b"),
        (lambda: Ftrl(0.2), "d"),
        (swap_adagrad, "c"),
    ):
        alone = model_of(None, dict.fromkeys(NAMES, lambda: None), make)
        own = model_of(strategy)
        for one in (alone, own):
            one.get_layer("dense").kernel.assign(before)
            one.fit(few, verbose=0)
        assert_close([values_of(own)[names]], [values_of(alone)[names]])


def test_the_same_model_in_one_process_trains_alike(strategy):
    keras.utils.set_random_seed(3)
    model, local = model_of(strategy), model_of()
    local.get_layer("dense").kernel.assign(values_of(model)["dense"])
    for one in (model, local):
        one.fit(dataset(), verbose=0, shuffle=False)
    found, expected = values_of(model), values_of(local)
    assert_close(list(found.values()), list(expected.values()), 1e-4)


def test_files_carry_what_each_optimizer_keeps(strategy, tmp_path):
    model = model_of(strategy)
    model.fit(dataset(), verbose=0)
    model.save(tmp_path / "model.keras")
    checkpoint.save(tmp_path / "own", model)
    expected = values_of(model)
    model.fit(dataset(4), verbose=0)
    after = values_of(model)
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    other = model_of(strategy)
    checkpoint.restore(tmp_path / "own", other)
    for one in (loaded, other):
        assert_close(list(values_of(one).values()), list(expected.values()), 0)
        one.fit(dataset(4), verbose=0)
        assert_close(list(values_of(one).values()), list(after.values()), 1e-5)
    assert [type(part).__name__ for part in loaded.optimizer.optimizers] == [
        "SGD",
        "Ftrl",
        "SwapAdagrad",
    ]


def test_a_model_that_leaves_tables_optimizers_out_is_refused():
    model = model_of(optimizer=lambda: Adagrad(0.1))
    with pytest.raises(
        ValueError, match=r"tables \['a', 'd'\] have optimizers of their own.*per_t"
    ):
        model.fit(dataset(1), verbose=0)
    with pytest.raises(TypeError, match="default must be an optimizer of Keras, not 'sgd'"):
        per_table("sgd")
    with pytest.raises(ValueError, match="optimizer='adam': must be None or an Optimizer"):
        TableConfig("t", 9, 2, optimizer="adam")
