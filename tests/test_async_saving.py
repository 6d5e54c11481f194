"""What AsyncStrategy trained is saved, restored on other clusters, and served by TensorFlow."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import types

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    IDS,
    ROWS,
    assert_close,
    clicks,
    mean_output,
    slope_model,
    state_of,
    steps_of,
)

import tf_recsync as recsync

PERIOD = 4
STEPS = 10  # Of an epoch.


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(5)


def build() -> keras.Model:
    """Embedding, mean-normalization with its moving average, and dense layers."""
    inputs = keras.Input((IDS,), dtype="int32", name="ids")
    x = keras.layers.Embedding(ROWS, 3, name="table")(inputs)
    x = keras.layers.Dense(8, name="hidden")(keras.layers.Flatten()(x))
    x = recsync.layers.MeanNormalization(momentum=0.9, name="normalization")(x)
    x = keras.layers.Dropout(0.1)(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(x), name="clicks")


def compiled(strategy) -> keras.Model:
    with strategy.scope():
        model = build()
        model.compile(make_optimizer(), "binary_crossentropy", metrics=["AUC"])
    return model


def make_optimizer():
    return recsync.optimizers.Adagrad(
        0.1,
        swap=recsync.Swap(period=PERIOD, decay=0.5),
        staleness=recsync.staleness.InversePower(k=1, baseline=2, update_sensitivity=5.0),
    )


def dataset():
    return tf.data.Dataset.from_tensor_slices(clicks(16 * STEPS)).batch(16)


def numbers(statistics):
    return statistics.count, statistics.mean, statistics.max, statistics.histogram


@pytest.fixture(scope="module")
def trained(clusters, tmp_path_factory):
    """What was trained by two workers on two parameter servers, saved in every way."""
    folder = tmp_path_factory.mktemp("saved")
    strategy = clusters.strategy(workers=2, ps=2)
    model = compiled(strategy)
    model.fit(dataset(), epochs=2, verbose=0)
    model.save_weights(folder / "model.weights.h5")
    tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    model.save(folder / "model.keras")
    model.export(folder / "exported", verbose=False)
    report = strategy.staleness(model)
    return types.SimpleNamespace(
        folder=folder,
        predictions=model.predict(clicks(100)[0], verbose=0),
        weights=model.get_weights(),
        state=state_of(model),
        rows=numbers(report.rows),
        dense=numbers(report.dense),
        steps=steps_of(model),
    )


def test_the_trained_state_is_worth_saving(trained):
    assert trained.steps == 2 * STEPS
    assert trained.predictions.std() > 0.01
    state = trained.state
    for name, expected in [
        ("version", lambda v: v.max() == 2 * STEPS or v.shape == (ROWS,)),
        ("last_period", lambda v: 1 <= v.max() <= 2 * STEPS // PERIOD),
        ("last_update", lambda v: v.max() > 0),
        ("accumulator", lambda v: v.std() > 0 or v.size == 1),
        ("staleness", lambda v: v[0] >= 2 * STEPS),
    ]:
        found = [v for path, v in state.items() if re.search(name + "$", path)]
        assert len(found) == 7  # Of each trained variable.
        assert all(expected(values) for values in found), name
    row_versions = state["adagrad/table_embeddings_version"]
    assert (row_versions[-4:] == 0).all() and (row_versions[:-4] > 10).all()


# Writes a file anew as HDF5 does, and is killed in the middle of it.
KILLED_WRITER = """
import os, signal, sys
import h5py
with h5py.File(sys.argv[1], "r") as old:
    new = h5py.File(sys.argv[2], "w")
    old.copy("layers", new)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Backup(keras.callbacks.BackupAndRestore):
    """Keeps two backups, and notes the slope and the global step that each epoch begins with."""

    def __init__(self, folder, end=None):
        super().__init__(folder, double_checkpoint=True)
        self.begun = {}
        self._end = end  # The epoch in which the program ends.

    def on_epoch_begin(self, epoch, logs=None):
        self.begun[epoch] = float(self.model.get_weights()[0].item()), steps_of(self.model)
        if epoch == self._end:
            raise RuntimeError("the program ends")


def ones():
    return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat(STEPS)


@pytest.fixture(scope="module")
def interrupted(clusters, tmp_path_factory):
    """(a model whose program ended in its fourth epoch, the folder of its backups)."""
    folder = tmp_path_factory.mktemp("backups")
    model = helpers.compiled(
        clusters.strategy(workers=2, ps=2),
        slope_model,
        lambda: recsync.optimizers.SGD(0.25),
        mean_output,
    )
    with pytest.raises(RuntimeError, match="the program ends"):
        model.fit(ones(), epochs=5, callbacks=[Backup(folder, end=3)], verbose=0)
    return model, folder


@pytest.mark.parametrize("broken", ["weights", "metadata"])
def test_training_goes_on_from_the_backup_before_if_the_newest_is_broken(
    interrupted, tmp_path, broken
):
    model, folder = interrupted
    folder = shutil.copytree(folder, tmp_path / "backup")
    weights, metadata = folder / "latest.weights.h5", folder / "training_metadata.json"
    before = {path: folder / (path.name + ".bkp") for path in (weights, metadata)}
    backup = Backup(folder)
    if broken == "weights":
        killed = [sys.executable, "-c", KILLED_WRITER, before[weights], weights]
        assert subprocess.run(killed, timeout=500).returncode == -signal.SIGKILL
        with pytest.raises(OSError, match="Unable to synchronously open file"):
            model.load_weights(weights)
    else:
        metadata.write_text(metadata.read_text()[:-3])
        with pytest.raises(json.JSONDecodeError):
            model.fit(ones(), epochs=5, callbacks=[backup], verbose=0)
        for path, older in before.items():  # As docs/operations.md says.
            shutil.copy(older, path)
    history = model.fit(ones(), epochs=5, callbacks=[backup], verbose=0)
    assert history.epoch == [2, 3, 4]
    # A quarter less with each step.
    assert backup.begun[2] == (-0.25 * 2 * STEPS, 2 * STEPS)
    assert model.get_weights()[0] == -0.25 * 5 * STEPS
    assert steps_of(model) == 5 * STEPS


def load_weights(model, trained):
    model.load_weights(trained.folder / "model.weights.h5")


def restore_checkpoint(model, trained):
    status = tf.train.Checkpoint(model=model).read(str(trained.folder / "checkpoint"))
    status.assert_existing_objects_matched()


@pytest.mark.cases("load_weights-unused", "restore_checkpoint-used")
@pytest.mark.parametrize("attached", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("load", [load_weights, restore_checkpoint])
def test_training_goes_on_on_another_number_of_servers(clusters, trained, load, attached):
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=3, processes=0))
    model = compiled(strategy)
    if attached:
        model.fit(dataset(), verbose=0)
    else:
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
    load(model, trained)
    assert_close(model.get_weights(), trained.weights, 0)
    assert_close([model.predict(clicks(100)[0], verbose=0)], [trained.predictions], 1e-6)
    state = state_of(model)
    assert state.keys() == trained.state.keys()
    for path, values in trained.state.items():
        np.testing.assert_array_equal(state[path], values, err_msg=path)
    report = strategy.staleness(model)
    assert (numbers(report.dense), numbers(report.rows)) == (trained.dense, trained.rows)
    # The servers are other ones, and hold the variables in another way.
    assert len({v.value.device for v in model.trainable_variables}) == 3

    history = model.fit(dataset(), epochs=2, verbose=0).history
    assert steps_of(model) == trained.steps + 2 * STEPS
    assert np.isfinite(history["loss"]).all()
    after = state_of(model)
    for path, values in trained.state.items():
        if path.endswith("_version") and values.shape == ():
            assert after[path] == values + 2 * STEPS
        if path.endswith("_last_period") and values.shape == ():
            assert after[path] == 4 * STEPS // PERIOD
    # One worker: all that was added was fresh.
    assert strategy.staleness(model).dense.count == trained.dense[0] + 2 * STEPS * 6
    assert strategy.staleness(model).dense.max == trained.dense[2]


@pytest.mark.parametrize("load", [load_weights, restore_checkpoint])
def test_what_is_loaded_before_the_first_fit_is_not_lost(clusters, trained, load):
    model = compiled(recsync.AsyncStrategy(clusters.get(workers=1, ps=3, processes=0)))
    load(model, trained)
    model.fit(dataset(), steps_per_epoch=1, verbose=0)
    assert steps_of(model) == trained.steps + 1
    versions = state_of(model)["adagrad/hidden_kernel_version"]
    assert versions == trained.state["adagrad/hidden_kernel_version"] + 1


def test_a_saved_model_is_loaded_and_trained_by_local_keras(trained):
    model = keras.models.load_model(trained.folder / "model.keras")
    assert_close([model.predict(clicks(100)[0], verbose=0)], [trained.predictions], 1e-6)
    assert isinstance(model.optimizer, recsync.optimizers.Adagrad)
    assert model.optimizer.get_config() == make_optimizer().get_config()
    for path, values in trained.state.items():
        np.testing.assert_array_equal(state_of(model)[path], values, err_msg=path)
    model.fit(dataset(), verbose=0)
    assert steps_of(model) == trained.steps + STEPS


def test_an_exported_model_is_served_without_this_package(trained, tmp_path):
    np.save(tmp_path / "ids.npy", clicks(100)[0])
    program = f"""
        import sys
        import numpy as np
        import tensorflow as tf
        model = tf.saved_model.load({str(trained.folder / "exported")!r})
        ids = tf.constant(np.load({str(tmp_path / "ids.npy")!r}))
        np.save({str(tmp_path / "served.npy")!r}, model.serve(ids).numpy())
        signature = model.signatures["serving_default"]
        (outputs,) = signature(ids=ids).values()
        np.save({str(tmp_path / "signature.npy")!r}, outputs.numpy())
        # An editable install's finder, whose name begins otherwise, may be there.
        assert not any(name.split(".")[0] == "tf_recsync" for name in sys.modules)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=True, cwd=tmp_path, timeout=500
    )
    for name in ("served.npy", "signature.npy"):
        assert_close([np.load(tmp_path / name)], [trained.predictions], 1e-6)
    graph = pathlib.Path(trained.folder / "exported" / "saved_model.pb").read_bytes()
    assert b"AddV2" in graph or b"Mul" in graph
    assert b"Recsync" not in graph and b"/job:" not in graph
