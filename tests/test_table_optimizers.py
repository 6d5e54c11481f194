"""Tables that are trained by optimizers of their own."""

import dataclasses

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.checkpoint.restoring import restore_lost
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import SGD, Adagrad, Adam, Ftrl, SwapAdagrad, per_table
from tf_recsync.optimizers.per_table import TableOptimizers

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


def write(model, folder, way):
    if way == "weights":
        model.save_weights(folder / "model.weights.h5")
    elif way == "object":
        tf.train.Checkpoint(model=model).write(str(folder / "object"))
    else:
        checkpoint.save(folder / "own", model)


def read(model, folder, way):
    if way == "weights":
        model.load_weights(folder / "model.weights.h5")
    elif way == "object":
        status = tf.train.Checkpoint(model=model).read(str(folder / "object"))
        # What is read before the optimizer is built is restored then.
        status.assert_consumed() if model.optimizer.built else status.expect_partial()
    else:
        checkpoint.restore(folder / "own", model)


def check_alike(models, batches=4):
    """Models that have the same values, and whose optimizers keep the same, train alike."""
    for one in models:
        one.fit(dataset(batches), verbose=0, shuffle=False)
    expected, *found = (list(values_of(one).values()) for one in models)
    for values in found:
        assert_close(values, expected, 1e-4)


def built(model):
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def kept_of(model):
    """What the parts of its optimizer keep, and what of that of each table."""
    kept = {}
    model.optimizer.save_own_variables(kept)
    own = kept.pop("iterations")
    assert own.shape == ()  # Nobody counts in it on servers.
    return {name: value for name, value in kept.items() if "signature" not in name}


def test_files_of_every_kind_are_read_where_tables_are_placed_otherwise(strategy, tmp_path):
    local, there = model_of(), model_of(strategy)
    local.fit(dataset(8), verbose=0, shuffle=False)
    order = [
        [v.physical_table.pieces[0].table for v in m.trainable_variables[:-2]]
        for m in (local, there)
    ]
    assert order[0] != order[1]
    models = [there, built(model_of(strategy)), built(model_of(strategy))]
    ways = ("weights", "object", "own")
    for model, way in zip(models, ways, strict=True):
        write(local, tmp_path, way)
        read(model, tmp_path, way)
    with h5py.File(tmp_path / "model.weights.h5") as file:
        assert set(file["optimizer"]) == {"vars"}  # Nothing of the parts by their classes.
    kept = kept_of(local)
    for other, way in zip(models, ways, strict=True):
        (tmp_path / f"back_{way}").mkdir()
        write(other, tmp_path / f"back_{way}", way)
        back = model_of()
        read(back, tmp_path / f"back_{way}", way)
        back = kept_of(built(back))
        assert back.keys() == kept.keys()
        for name, expected in kept.items():
            np.testing.assert_array_equal(back[name], expected, name)
    check_alike([local, *models])
    # As at first: the steps of the schedule, the periods of SWAP.
    parts = [part for model in models for part in model.optimizer.optimizers]
    assert {int(part.iterations.numpy()) for part in parts} == {12}


def test_survivors_keep_what_their_optimizers_keep_when_a_server_is_restored(strategy, tmp_path):
    model = model_of(strategy)
    model.fit(dataset(3), verbose=0)
    checkpoint.save(tmp_path / "own", model)
    saved = {id(v): v.numpy() for v in model.optimizer.variables}
    model.fit(dataset(3), verbose=0)
    gone = [
        v
        for v in (*model.variables, *model.optimizer.variables)
        if "ps/" in v._value.device and v._value.device.split("task:")[1][0] == "1"
    ]
    later = {id(v): v.numpy() for v in model.optimizer.variables}
    restore_lost(str(tmp_path / "own"), model, [v._value for v in gone])
    lost = {id(v) for v in gone}
    seen = {True: 0, False: 0}
    for part in model.optimizer.optimizers:
        for state in part.states:
            for variable in (*state.accumulators, state.versions):
                expected = (saved if id(variable) in lost else later)[id(variable)]
                np.testing.assert_array_equal(variable.numpy(), expected)
                seen[id(variable) in lost] += 1
    assert min(seen.values()) > 0


def test_optimizers_stay_apart_that_become_equal_later(tmp_path):
    own = {"a": lambda: Ftrl(0.2), "b": lambda: None, "c": lambda: Ftrl(0.3), "d": OWN["d"]}
    model = model_of(own=own)
    model.fit(dataset(3), verbose=0)
    model.optimizer.parts["table_c"].learning_rate = 0.2
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert list(loaded.optimizer.parts) == ["default", "table_a", "table_c"]
    check_alike([model, loaded])


def test_parts_go_on_at_steps_of_their_own_where_servers_collect_pushes(clusters, tmp_path):
    """A default optimizer that trains nothing at first, and then one that begins anew."""
    own = OWN | dict.fromkeys("abd", lambda: Adam(0.01))
    collecting = recsync.SyncStrategy(clusters.get(1, 2), global_batch_size=8, local_batch_size=8)

    def compiled(model, trains):
        with model.distribute_strategy.scope():
            model.get_layer("dense").trainable = trains
            schedule = keras.optimizers.schedules.PiecewiseConstantDecay([7], [0.5, 0.01])
            model.compile(per_table(SGD(schedule)), "mse")
        return model

    class Assign(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.get_weights()  # Nobody is in a step from here on.
            for part in self.model.optimizer.optimizers:
                part.iterations.assign(part.iterations)

    def check(steps):
        found, expected = (list(values_of(model).values()) for model in (trained, local))
        assert_close(found, expected, 1e-4)
        parts = trained.optimizer.parts
        assert {name: int(part.iterations.numpy()) for name, part in parts.items()} == steps

    first = compiled(model_of(own=own), False)
    first.fit(dataset(10), verbose=0, shuffle=False)
    first.save_weights(tmp_path / "first.weights.h5")
    local, trained = (compiled(model_of(one, own), False) for one in (None, collecting))
    for model in (local, trained):
        model.load_weights(tmp_path / "first.weights.h5")
        model.fit(dataset(5), verbose=0, shuffle=False, callbacks=[Assign()])
    check({"table_a": 15, "table_c": 15})
    for model in (local, trained):
        compiled(model, True).fit(dataset(5), epochs=2, verbose=0, shuffle=False)
    check({"default": 10, "table_a": 25, "table_c": 25})


def test_a_part_that_is_behind_is_loaded_as_it_was_where_servers_collect_pushes(clusters, tmp_path):
    collecting = recsync.SyncStrategy(clusters.get(1, 2), global_batch_size=8, local_batch_size=8)

    def trained(is_loaded):
        keras.utils.set_random_seed(7)
        model = model_of(collecting)
        model.fit(dataset(5), verbose=0, shuffle=False)
        with collecting.scope():
            model.compile(per_table(Adam(0.1)), "mse")  # Begins anew.
        model.fit(dataset(3), verbose=0, shuffle=False)
        if is_loaded:
            model.save_weights(tmp_path / "a.weights.h5")
            model.load_weights(tmp_path / "a.weights.h5")
        model.fit(dataset(3), verbose=0, shuffle=False)
        return list(values_of(model).values())

    assert_close(trained(True), trained(False), 1e-6)


def test_parts_that_are_behind_are_set_back_as_well_where_servers_collect_pushes(clusters):
    collecting = recsync.SyncStrategy(clusters.get(1, 2), global_batch_size=8, local_batch_size=8)
    own = dict.fromkeys(NAMES, lambda: Adam(0.01))
    model = model_of(collecting, own, lambda: per_table(Adam(0.01)))
    model.fit(dataset(5), verbose=0, shuffle=False)
    with collecting.scope():
        model.compile(per_table(Adam(0.1)), "mse")  # Begins anew.
    model.fit(dataset(9), verbose=0, shuffle=False)
    parts = model.optimizer.parts.values()
    assert sorted({int(part.iterations.numpy()) for part in parts}) == [9, 14]
    for part in parts:
        part.iterations.assign(part.iterations - 6)
    model.fit(dataset(2), verbose=0, shuffle=False)
    # All go by the step of the part that is ahead: 8, and two more.
    steps = {
        int(value)
        for part in parts
        for state in part.states
        for variable in state.last_steps
        for value in np.ravel(variable.numpy())
    }
    assert max(steps) == 10


def test_optimizers_without_a_configuration_train_those_tables_that_were_given_them():
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 ** (1.0 + keras.ops.cast(step, "float32"))

    first, second = SGD(Halving()), SGD(Halving())
    own = {"a": lambda: first, "b": lambda: None, "c": lambda: second, "d": lambda: first}
    model = model_of(own=own)
    model.fit(dataset(2), verbose=0)
    assert list(model.optimizer.parts) == ["default", "table_a", "table_c"]
    assert float(model.optimizer.parts["table_a"].learning_rate) == 0.125
    tables = model.get_layer("tables").table_configs
    assert tables[0] == dataclasses.replace(tables[0])
    assert tables[0] != dataclasses.replace(tables[0], optimizer=second)


def test_what_an_optimizer_can_not_load_is_an_error(tmp_path):
    def model(a, default=lambda: SGD(0.1)):
        own = {**OWN, "a": a, "d": lambda: None}
        return built(model_of(own=own, optimizer=lambda: per_table(default())))

    saved = model(lambda: Adagrad(0.1))
    for way in ("weights", "own"):
        write(saved, tmp_path, way)
        with pytest.raises(ValueError, match="saved with rowwise=False"):
            read(model(lambda: Adagrad(0.1, rowwise=True)), tmp_path, way)
        with pytest.raises(ValueError, match="has the parts default, table_a, table_c, the opt"):
            read(model(lambda: None), tmp_path, way)
        with pytest.raises(ValueError, match="Adagrad keeps .*, Ftrl here"):
            read(model(lambda: Ftrl(0.1)), tmp_path, way)


@pytest.mark.parametrize("way", ["weights", "own"])
def test_files_of_older_versions_are_read_on_the_same_placement(tmp_path, way):
    older = model_of(optimizer=lambda: keras.optimizers.MultiOptimizer(TableOptimizers(SGD(0.1))))
    older.fit(dataset(3), verbose=0)
    write(older, tmp_path, way)
    models = [model_of(optimizer=lambda: per_table(SGD(0.1))) for _ in range(2)]
    built(models[0])  # The other one takes them over when it is built.
    for model in models:
        read(model, tmp_path, way)
    check_alike([older, *models])
    if way == "weights":
        other = built(model_of(own=dict.fromkeys(NAMES, lambda: None)))
        with pytest.raises(ValueError, match="can only be loaded into the same model"):
            read(other, tmp_path, way)


def test_a_multi_optimizer_of_keras_is_refused_on_servers(strategy):
    parts = keras.optimizers.OptimizerMap(SGD(0.3), {"tables/.*": Adagrad(0.3)})
    with pytest.raises(ValueError, match=r"must be a tf_recsync.optimizers.MultiOptimizer"):
        model = model_of(
            strategy,
            dict.fromkeys(NAMES, lambda: None),
            lambda: keras.optimizers.MultiOptimizer(parts),
        )
        model.fit(dataset(1), verbose=0)
    with pytest.raises(TypeError, match="optimizer_map must be a keras.optimizers.OptimizerMap"):
        recsync.optimizers.MultiOptimizer(SGD(0.1))


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
