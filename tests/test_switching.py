"""Checkpoints go on in other modes, with other numbers of workers and servers."""

import contextlib
import pathlib
import re
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from helpers import AtBatch, assert_close, compiled, mean_output, steps_of

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import saving

LOCAL = 16  # Examples of a batch.
STEPS = 12  # Batches of an epoch.
ROWS = {"films": 40, "users": 24}


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(5)


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of the package."""
    lines = []
    monkeypatch.setattr(logging, "warning", lambda message, *args: lines.append(message % args))
    return lines


def build() -> keras.Model:
    """Two tables, one of them split where there are servers enough, and dense layers."""
    inputs = {name: keras.Input((2,), dtype="int32", name=name) for name in ROWS}
    x = EmbeddingCollection(
        [TableConfig("films", ROWS["films"], 4, "normal"), TableConfig("users", 24, 2, "normal")],
        [FeatureConfig(name, name) for name in ROWS],
        concatenate=True,
        name="tables",
    )(inputs)
    x = keras.layers.Dense(4, activation="relu", name="hidden")(x)
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(x), name="clicks")


def make(period: int = 4):
    return recsync.optimizers.SwapAdagrad(0.1, swap=recsync.Swap(period, 0.5))


def data(steps: int = STEPS, seed: int = 3) -> tf.data.Dataset:
    """Batches; the last rows of the tables are never named."""
    rng = np.random.default_rng(seed)
    n = LOCAL * steps
    ids = {name: rng.integers(0, rows - 4, (n, 2)).astype(np.int32) for name, rows in ROWS.items()}
    labels = (np.sin(ids["films"].sum(1)) + rng.normal(size=n) > 0).astype(np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(LOCAL)


STRATEGIES = {
    # One local batch of each worker is a global batch.
    "sync": lambda cluster: recsync.SyncStrategy(cluster),
    "sync of 64": lambda cluster: recsync.SyncStrategy(
        cluster, global_batch_size=64, local_batch_size=LOCAL
    ),
    # So tolerant that no test has steps enough to leave out what a worker pushes late by chance.
    "GBA": lambda cluster: recsync.GBAStrategy(cluster, 64, LOCAL, staleness_tolerance=8),
    "GBA of 32": lambda cluster: recsync.GBAStrategy(cluster, 32, LOCAL, staleness_tolerance=8),
    "async": lambda cluster: recsync.AsyncStrategy(cluster),
    "BSP": lambda cluster: recsync.BSPStrategy(cluster, 64, LOCAL),
    "backup workers": lambda cluster: recsync.BackupWorkersStrategy(cluster, 1),
    "bounded staleness": lambda cluster: recsync.BoundedStalenessStrategy(cluster, 2),
}


def cluster_of(clusters, workers: int, ps: int) -> recsync.LocalCluster:
    """One of many sizes; none is killed, and the servers of this process soon change it."""
    return clusters.get(workers, ps, processes=0)


def start(clusters, mode: str, workers: int, ps: int, make=make) -> tuple:
    """(a strategy, a model that it is to train)"""
    strategy = STRATEGIES[mode](cluster_of(clusters, workers, ps))
    return strategy, compiled(strategy, build, make)


def logical(model) -> dict[str, np.ndarray]:
    """Everything that a checkpoint holds, whatever server it is on; not the steps' meaning."""
    found: dict = {}
    saving.save_variables(model.optimizer, found)
    del found["step_state"], found["signature"]
    collection = model.get_layer("tables")
    found.update({table: collection.table_values(table) for table in ROWS})
    for name in ("hidden", "out"):
        for variable in model.get_layer(name).variables:
            found[f"{name}/{variable.name}"] = variable.numpy()
    return found


def assert_same(found: dict, expected: dict, but: tuple = ()) -> None:
    """Compares two `logical` states exactly."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name not in but:
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def save(model: keras.Model, path: pathlib.Path) -> types.SimpleNamespace:
    """Saves the weights; where they are, and what is in them."""
    model.save_weights(path)
    return types.SimpleNamespace(
        path=path, state=logical(model), steps=steps_of(model), meaning=model.optimizer.step_state
    )


@pytest.fixture(scope="module")
def synchronous(clusters, tmp_path_factory):
    """What two workers trained synchronously for an epoch, saved."""
    _, model = start(clusters, "sync", 2, 1)
    model.fit(data(), verbose=0)
    assert (steps_of(model), model.optimizer.examples_per_step) == (6, 32)
    return save(model, tmp_path_factory.mktemp("sync") / "sync.weights.h5")


def test_a_chain_of_switches_keeps_everything(clusters, synchronous, tmp_path, warnings):
    last = synchronous
    # The examples of a step, its number and SWAP's period on arrival, by hand: 6 steps of 32
    # examples are 3 of 64. 12 batches are 3 more: 6 of 64 are 24 of 16; with 12 more 36, which
    # are 18 steps of 32.
    chain = [
        ("GBA", 3, 2, 12, (64, 3, 2), 6),
        ("async", 2, 3, 12, (16, 24, 8), 36),
        ("sync", 2, 1, 12, (32, 18, 4), 24),
    ]
    for i, (mode, workers, ps, batches, arrival, after) in enumerate(chain):
        before = last.state
        periods = [v for k, v in before.items() if "last_period" in k]
        assert len(periods) == 2 and all(p.max() >= 1 for p in periods)
        number = (last.steps + last.meaning.swap_offset) // last.meaning.swap_period
        strategy, model = start(clusters, mode, workers, ps)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        model.load_weights(last.path)
        assert_same(logical(model), before, but=("0",))
        assert len({v.value.device for v in model.get_layer("tables").variables}) == ps > 0
        # Only GBA is told the batch size beforehand; the others learn it at fit.
        model.optimizer.count_steps_of(arrival[0])
        state = model.optimizer.step_state
        assert (state.examples, steps_of(model), state.swap_period) == arrival
        assert (steps_of(model) + state.swap_offset) // state.swap_period == number
        statistics = strategy.staleness(model).dense
        model.fit(data(batches), verbose=0)
        assert steps_of(model) == after
        since = strategy.staleness(model).dense.since(statistics)
        # Async counts variables (four dense ones) at each push, buffers pushes on each server.
        assert since.count == batches * (4 if mode == "async" else ps)
        assert 1 <= since.mean <= (1 if mode == "sync" else workers)
        report = strategy.aggregation(model)
        assert (report is None) == (mode == "async")
        assert report is None or report.global_step == after
        last = save(model, tmp_path / f"{i}.weights.h5")
    assert warnings == []


@pytest.mark.full
def test_the_other_modes_go_on_from_synchronous_training_and_it_from_theirs(
    clusters, synchronous, tmp_path, warnings
):
    before = synchronous.state
    # The examples of a step, its number and SWAP's period on arrival, by hand: 6 steps of 32
    # examples; and the steps that 12 batches make. A step of 3 workers with a backup is two of
    # their batches, and at most one more that is dropped.
    modes = {
        "BSP": ((64, 3, 2), (3, 3)),
        "backup workers": ((32, 6, 4), (4, 6)),
        "bounded staleness": ((16, 12, 8), (12, 12)),
    }
    saved = {}
    for mode, (arrival, steps) in modes.items():
        strategy, model = start(clusters, mode, 3, 2)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        model.load_weights(synchronous.path)
        assert_same(logical(model), before, but=("0",))
        model.optimizer.count_steps_of(arrival[0])
        state = model.optimizer.step_state
        assert (state.examples, steps_of(model), state.swap_period) == arrival
        model.fit(data(seed=9), verbose=0)
        done = steps_of(model) - arrival[1]
        assert steps[0] <= done <= steps[1]
        versions = {k: v for k, v in logical(model).items() if ":version:" in k}
        assert versions
        for name, values in versions.items():
            assert (values >= before[name]).all() and (values <= before[name] + done).all()
        saved[mode] = save(model, tmp_path / f"{mode}.weights.h5")
    _, model = start(clusters, "sync", 2, 1)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    for mode, other in saved.items():
        model.load_weights(other.path)
        assert_same(logical(model), other.state, but=("0",))
        model.fit(data(4), verbose=0)
        steps = other.steps * modes[mode][0][0] // 32
        assert (steps_of(model), model.optimizer.step_state.swap_period) == (steps + 2, 4), mode
    assert warnings == []


@pytest.mark.full
def test_switching_from_sync_to_gba_changes_no_number(clusters, tmp_path):
    # One worker and the same order of data: the same global batches.
    _, model = start(clusters, "sync of 64", 1, 1)
    model.fit(data(8), verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    model.fit(data(8, seed=9), verbose=0)
    expected = logical(model)

    _, model = start(clusters, "GBA", 1, 2)
    model.load_weights(tmp_path / "a.weights.h5")
    model.fit(data(8, seed=9), verbose=0)
    found = logical(model)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        # Placement changes the order in which partial sums are added, no more.
        np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def decayed(clusters, tmp_path_factory):
    """A model saved in the second of SWAP's periods."""
    path = tmp_path_factory.mktemp("decayed") / "a.keras"
    _, model = start(clusters, "GBA of 32", 1, 1, lambda: make(period=3))
    model.fit(data(10), verbose=0)
    assert steps_of(model) == 5  # 160 examples, a period has 96.
    model.save(path)
    return path


@pytest.mark.cases("load_model")
@pytest.mark.parametrize("whole", [False, True], ids=["load_weights", "load_model"])
def test_switching_to_asynchronous_training_decays_at_the_same_examples(clusters, decayed, whole):
    # One worker is in order: what decays when shows in the periods that rows remember.
    strategy, model = start(clusters, "async", 1, 2, lambda: make(period=3))
    if whole:
        with strategy.scope():
            model = keras.models.load_model(decayed)
    else:
        model.load_weights(decayed)
    for batches, number in [(1, 1), (1, 2), (5, 2), (1, 3)]:
        model.fit(data(batches), verbose=0)
        state = logical(model)
        assert max(v.max() for k, v in state.items() if "last_period" in k) == number
    assert (steps_of(model), model.optimizer.step_state.swap_period) == (18, 6)


def test_adam_goes_on_with_its_moments(clusters, tmp_path):
    def adam():
        return recsync.optimizers.Adam(0.05)

    _, model = start(clusters, "sync of 64", 1, 1, adam)
    model.fit(data(16), verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    weights = model.get_layer("hidden").get_weights()
    _, model = start(clusters, "async", 1, 1, adam)
    model.load_weights(tmp_path / "a.weights.h5")
    model.fit(data(1, seed=9), verbose=0)
    state = model.optimizer.step_state
    assert (steps_of(model), state.update_offset) == (17, 4 - 16)
    # The fifth application, not the 17th: had the bias been corrected for 17, the step
    # would be about twice as large.
    moved = np.abs(model.get_layer("hidden").get_weights()[0] - weights[0])
    optimizer = model.optimizer.state_of(model.get_layer("hidden").kernel)
    m, v = (a.numpy() for a in optimizer.accumulators)
    expected = 0.05 * np.sqrt(1 - 0.999**5) / (1 - 0.9**5) * np.abs(m) / (np.sqrt(v) + 1e-7)
    assert_close([moved], [expected], 1e-5)
    assert optimizer.last_steps[0].numpy() == 5


def test_schedules_and_moving_averages_go_on_and_counts_of_pushes_begin_anew(clusters, tmp_path):
    # One worker, whose inputs are ones: each update takes the rate from the slope.
    def sloped():
        inputs = keras.Input((1,))
        # It only moves, by each batch.
        moving = keras.layers.BatchNormalization(momentum=0.9, center=False, scale=False)
        moved = keras.layers.Rescaling(0.0)(moving(inputs))
        slope = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        return keras.Model(inputs, slope(inputs) + moved)

    def sgd():
        return recsync.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(1.0, 16, 0.0))

    batches, path = 8, tmp_path / "a.weights.h5"
    ones = np.ones((batches * LOCAL, 1), np.float32)
    rows = tf.data.Dataset.from_tensor_slices((ones, ones)).batch(LOCAL)
    slope, before = 0.0, []
    chain = {"sync of 64": 64, "bounded staleness": LOCAL, "GBA of 32": 32}
    for i, (mode, step) in enumerate(chain.items()):
        strategy = STRATEGIES[mode](cluster_of(clusters, 1, 1))
        model = compiled(strategy, sloped, sgd, mean_output)
        if before:
            model.load_weights(path)
            assert_close(model.get_weights(), before, 0)
        model.fit(rows, verbose=0)
        # The schedule is one of steps of 64 examples, in whichever steps it is gone through.
        for examples in range(i * len(ones), (i + 1) * len(ones), step):
            slope -= 1.0 - examples / 64 / 16
        mean = 1.0 - 0.9 ** ((i + 1) * batches)
        weights = {v.name: float(v.numpy().squeeze()) for v in model.weights}
        assert (weights["kernel"], weights["moving_mean"]) == (
            pytest.approx(slope, rel=1e-5),
            pytest.approx(mean, rel=1e-5),
        )
        # Of tokens alone there is nothing to apply.
        collected = 0 if mode == "bounded staleness" else batches
        assert strategy.aggregation(model).included == collected, mode
        before = model.get_weights()
        model.save_weights(path)


@pytest.fixture(scope="module")
def stopped(clusters, tmp_path_factory):
    """What was trained for two epochs, 12 steps, and then stopped, saved in two ways."""
    folder = tmp_path_factory.mktemp("stopped")
    _, model = start(clusters, "GBA", 2, 1)

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("stopped")

    saver = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    with pytest.raises(RuntimeError, match="stopped"):
        model.fit(data(24), epochs=4, callbacks=[saver, Stop()], verbose=0)
    assert steps_of(model) == 12
    model.save_weights(folder / "a.weights.h5")
    return types.SimpleNamespace(
        backup=folder / "backup", weights=folder / "a.weights.h5", state=logical(model)
    )


@pytest.mark.cases("by BackupAndRestore")
@pytest.mark.parametrize("when", ["before building", "between fits", "by BackupAndRestore"])
def test_tokens_go_on_at_the_loaded_step(clusters, stopped, tmp_path, when):
    strategy, model = start(clusters, "GBA", 3, 2)
    if when == "between fits":
        model.fit(data(), epochs=1, verbose=0)
    loaded = {}
    if when == "by BackupAndRestore":
        backup = shutil.copytree(stopped.backup, tmp_path / "backup")
        loaded["callbacks"] = [keras.callbacks.BackupAndRestore(backup)]
    else:
        model.load_weights(stopped.weights)
        loaded["initial_epoch"] = 2
    before = strategy.aggregation(model)
    history = model.fit(data(), epochs=4, verbose=0, **loaded)
    assert history.epoch == [2, 3]
    # Two epochs of three steps each.
    assert steps_of(model) == 18
    report = strategy.aggregation(model)
    # Tokens and servers count alike. Were tokens to begin anew they would be 12 steps old, and
    # left out; these can't be older than the steps since.
    assert (report.global_step, report.late, report.excluded) == (18, 0, 0)
    assert report.age_max <= 6
    pushes = report.included - (before.included if before else 0)
    assert pushes == 2 * STEPS * 2  # On each of two servers.
    versions = [k for k in stopped.state if ":version:" in k]
    after = logical(model)
    for name in versions:
        low = stopped.state[name]
        assert (after[name] >= low).all() and (after[name] <= low + 6).all()


@pytest.mark.full
def test_checkpoints_of_epochs_and_of_batches_can_be_trained_on(clusters, tmp_path):
    strategy, model = start(clusters, "GBA", 2, 2)
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "epoch{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(
            tmp_path / "batch{batch}.weights.h5", save_weights_only=True, save_freq=10
        ),
    ]
    model.fit(data(), epochs=2, callbacks=callbacks, verbose=0)  # 2 * 3 steps of 64.
    expected = logical(model)
    # The end of an epoch has applied everything.
    _, model = start(clusters, "sync", 2, 1)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "epoch2.keras")
    assert_same(logical(model), expected, but=("0",))
    # In the middle of one, the pushes that wait in buffers are not in it, and workers are
    # at work.
    _, model = start(clusters, "sync", 2, 1)
    model.load_weights(tmp_path / "batch10.weights.h5")
    model.fit(data(), verbose=0)
    applied = steps_of(model) - STEPS // 2
    assert 2 <= applied <= 6  # Of 32 examples; up to STEPS batches were applied by then.


@pytest.mark.full
def test_weights_loaded_between_epochs_of_one_run_count(clusters, tmp_path):
    strategy, model = start(clusters, "GBA", 2, 2)
    path = tmp_path / "a.weights.h5"

    class BackToTheFirst(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.save_weights(path)
            if epoch == 1:
                self.model.load_weights(path)

    model.fit(data().repeat(), epochs=3, steps_per_epoch=8, callbacks=[BackToTheFirst()], verbose=0)
    assert steps_of(model) == 2 + 2
    assert strategy.aggregation(model).global_step == 4


def test_a_checkpoint_of_another_model_is_refused_before_anything_runs(clusters, tmp_path):
    _, model = start(clusters, "sync", 2, 1, lambda: recsync.optimizers.Ftrl(0.1))
    model.fit(data(4), verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    ran = []
    for is_built in (True, False):
        strategy, model = start(clusters, "GBA", 2, 1)
        with pytest.raises(ValueError, match="Ftrl keeps accumulator, linear, .*SwapAdagrad here"):
            if is_built:
                with strategy.scope():
                    model.optimizer.build(model.trainable_variables)
            model.load_weights(tmp_path / "a.weights.h5")
            model.fit(data(4), callbacks=[AtBatch(0, lambda: ran.append(1))], verbose=0)
    assert ran == []


@pytest.mark.full
def test_unknown_batch_sizes_are_named_when_modes_differ(clusters, tmp_path, warnings):
    def unsized():
        # Made of single examples in a way that tells nobody how many are in a batch.
        signature = data(4).element_spec
        return tf.data.Dataset.from_generator(lambda: iter(data(4)), output_signature=signature)

    _, model = start(clusters, "sync", 2, 1)
    model.fit(unsized(), verbose=0)
    assert model.optimizer.examples_per_step is None
    model.save_weights(tmp_path / "a.weights.h5")
    _, model = start(clusters, "sync", 2, 2)
    model.load_weights(tmp_path / "a.weights.h5")
    model.fit(unsized(), verbose=0)
    assert warnings == [] and steps_of(model) == 4

    _, model = start(clusters, "async", 2, 1)
    model.load_weights(tmp_path / "a.weights.h5")
    model.fit(data(4), verbose=0)
    (warning,) = warnings
    assert "2 local batches (an unknown number of examples)" in warning
    assert "1 local batch (16 examples)" in warning and "local_batch_size" in warning
    assert steps_of(model) == 2 + 4
    model.fit(data(4), verbose=0)
    assert len(warnings) == 1


def test_local_keras_trains_on_what_a_cluster_trained(clusters, tmp_path, warnings):
    _, model = start(clusters, "GBA", 2, 2)
    model.fit(data(), verbose=0)
    model.save(tmp_path / "a.keras")
    expected = logical(model)
    model = keras.models.load_model(tmp_path / "a.keras")
    assert_same(logical(model), expected)
    (warning,) = warnings
    assert "optimizer.examples_per_step" in warning
    local = build()
    local.compile(make(), "binary_crossentropy", run_eagerly=True)
    local.optimizer.examples_per_step = LOCAL
    local.optimizer.build(local.trainable_variables)
    local.load_weights(tmp_path / "a.keras")
    assert (steps_of(local), local.optimizer.step_state.swap_period) == (12, 16)
    local.fit(data(4), verbose=0)
    local.save_weights(tmp_path / "b.weights.h5")
    strategy, model = start(clusters, "GBA", 3, 1)
    model.load_weights(tmp_path / "b.weights.h5")
    model.fit(data(4), verbose=0)
    assert steps_of(model) == 4 + 1
    # It was trained in a process that is connected to a cluster.
    assert len(warnings) == 2 and "was not made in the scope() of a strategy" in warnings[1]
    with pytest.raises(ValueError, match="pass it local_batch_size"):
        model.optimizer.examples_per_step = 16


def test_a_tensorflow_checkpoint_is_converted_at_fit(clusters, tmp_path):
    # Without a collection, whose tables lie otherwise elsewhere.
    def dense():
        inputs = keras.Input((2,))
        return keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(inputs))

    x, y = np.ones((64, 2), np.float32), np.ones((64, 1), np.float32)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(LOCAL)
    model = compiled(STRATEGIES["GBA"](cluster_of(clusters, 2, 1)), dense, make)
    model.fit(rows, epochs=3, verbose=0)
    tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    model = compiled(STRATEGIES["async"](cluster_of(clusters, 1, 1)), dense, make)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    status = tf.train.Checkpoint(model=model).read(str(tmp_path / "checkpoint"))
    status.assert_existing_objects_matched()
    model.fit(rows, verbose=0)
    assert (steps_of(model), model.optimizer.step_state.swap_period) == (12 + 4, 16)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("servers", [None, 2])
def test_a_tensorflow_checkpoint_of_another_optimizer_or_model_is_an_error(
    clusters, tmp_path, servers, built
):
    def dense(units=1):
        inputs = keras.Input((2,))
        return keras.Model(inputs, keras.layers.Dense(units, "sigmoid", name="out")(inputs))

    def compiled_here(units, optimizer, build=True):
        scope = strategy.scope() if strategy else contextlib.nullcontext()
        with scope:
            model = dense(units)
            model.compile(optimizer(0.1), "mse", jit_compile=False)
            if build:
                model.optimizer.build(model.trainable_variables)
        return model

    strategy = STRATEGIES["async"](cluster_of(clusters, 1, servers)) if servers else None
    path = str(tmp_path / "checkpoint")
    tf.train.Checkpoint(model=compiled_here(1, recsync.optimizers.Adagrad)).write(path)
    for other in (recsync.optimizers.SGD, recsync.optimizers.Adam, recsync.optimizers.Ftrl):
        model = compiled_here(1, other, built)
        # Else at the first use.
        with pytest.raises(tf.errors.InvalidArgumentError, match="of another model or optimizer"):
            tf.train.Checkpoint(model=model).read(path)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model.optimizer.build(model.trainable_variables)
    model = compiled_here(2, recsync.optimizers.Adagrad, built)
    # In one process TensorFlow finds out first.
    error = tf.errors.InvalidArgumentError if strategy else ValueError
    shapes = r"shapes \[2, 2\], \[2\][^$]*shapes \[2, 1\], \[1\]" if strategy else r"shape \(2, 1\)"
    with pytest.raises(error, match=shapes):
        tf.train.Checkpoint(model=model).read(path)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model.optimizer.build(model.trainable_variables)
    same = compiled_here(1, recsync.optimizers.Adagrad, built)
    tf.train.Checkpoint(model=same).read(path).assert_existing_objects_matched()


def test_the_documents_example_runs(clusters, tmp_path, monkeypatch):
    clusters.close()
    monkeypatch.chdir(tmp_path)
    document = pathlib.Path(__file__).resolve().parent.parent / "docs" / "modes.md"
    section = document.read_text().partition("## Switching modes at a checkpoint\n")[2]
    (program,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    exec(compile(program, document.name, "exec"), {})
    assert (tmp_path / "clicks.weights.h5").exists()
