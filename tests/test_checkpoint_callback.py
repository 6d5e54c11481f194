"""Checkpoints that are saved while training goes on, and with which a program goes on."""

import json
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from groups import BETWEEN, hierarchical
from helpers import wait_until

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint
from tf_recsync.checkpoint import blocks
from tf_recsync.checkpoint.index import INDEX
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

BATCH = 2
NAME = "rows"
MODES = {
    "async": lambda c: recsync.AsyncStrategy(c),
    "sync": lambda c: recsync.SyncStrategy(c, global_batch_size=2 * BATCH, local_batch_size=BATCH),
    "GBA": lambda c: recsync.GBAStrategy(c, 2 * BATCH, BATCH, staleness_tolerance=100),
    "ShadowSync": lambda c: recsync.ShadowSyncStrategy(c, recsync.EASGD(0.3)),
    "groups": lambda c: hierarchical(c, BETWEEN["EASGD"]),
}
COPIED = ("ShadowSync", "groups")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=4, ps=4)


def make_model(strategy=None, rows=1, shards=None, units=0):
    """The gradient of a row that an example names is half of 1; both of a batch name the same.

    With units there is a dense layer, too, on whose output the loss does not depend.
    """
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64", name="ids")
        layer = EmbeddingCollection(
            [TableConfig("ones", rows, 3, initializer="ones", shards=shards)],
            [FeatureConfig("ids", "ones")],
            concatenate=True,
            name=NAME,
        )
        vectors = layer({"ids": ids})
        outputs = keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1, keepdims=True))(vectors)
        if units:
            others = keras.layers.Dense(units)(vectors)
            outputs = keras.layers.Lambda(lambda x: x[0] + 0.0 * tf.reduce_sum(x[1]))(
                [outputs, others]
            )
        model = keras.Model({"ids": ids}, outputs)
        model.compile(recsync.optimizers.Adagrad(0.1), loss=lambda y, p: p)
    return model


def dataset(steps, rows=1):
    ids = np.random.default_rng(0).integers(0, rows, (steps, 1)).repeat(BATCH, 0)
    both = {"ids": ids}, np.zeros((steps * BATCH, 1), np.float32)
    return tf.data.Dataset.from_tensor_slices(both).batch(BATCH)


def check_rows(path):
    """A row's values, its accumulator and its version are those after as many updates; how many."""
    saved = checkpoint.open(path)
    saved.verify()
    values = saved.rows(f"{NAME}/ones")
    accumulators = saved.rows(f"{NAME}/ones/accumulator")
    updates = saved.rows(f"{NAME}/ones/version")
    for value, accumulator, version in zip(values, accumulators, updates, strict=True):
        # Each update adds 1 to what began with 0.1.
        sums = 0.1 + np.arange(1, version + 1)
        np.testing.assert_allclose(accumulator, 0.1 + version, rtol=1e-5)
        np.testing.assert_allclose(value, 1 - np.sum(0.1 / np.sqrt(sums)), atol=1e-3)
    return int(updates.sum())


@pytest.mark.cases("sync", "groups")
@pytest.mark.parametrize("mode", MODES)
def test_each_row_is_of_one_moment_in_what_is_saved_while_workers_push(cluster, tmp_path, mode):
    rows = 1 if mode in ("sync", "GBA") else 5
    strategy = MODES[mode](cluster)
    recsync.testing.set_compute_time(strategy, 0.01)
    model = make_model(strategy, rows)
    callback = Checkpoint(tmp_path, every_steps=20, keep=None)
    model.fit(dataset(300, rows), verbose=0, callbacks=[callback])
    assert len(callback.saved) >= 2
    numbers = sorted(int(path.name) for path in tmp_path.iterdir())
    assert numbers == list(range(1, len(callback.saved) + 1))
    updates = [check_rows(saved.path) for saved in callback.saved]
    assert updates == sorted(updates)
    assert updates[-1] == (150 if rows == 1 else 300)
    for saved, count in zip(callback.saved, updates, strict=True):
        assert saved.global_step == checkpoint.open(saved.path).global_step
        assert count >= (0 if mode in COPIED else saved.global_step)
    # The last one: training has ended.
    restored = make_model(MODES[mode](cluster), rows)
    assert checkpoint.restore(checkpoint.latest(tmp_path), restored)["epoch"] == 1
    np.testing.assert_array_equal(restored.get_weights()[0], model.get_weights()[0])


def test_a_layers_own_table_is_of_one_moment_with_all_else(cluster, tmp_path):
    def made(strategy):
        with strategy.scope():
            ids = keras.Input((1,), dtype="int64")
            table = keras.layers.Embedding(1, 1, "ones")
            model = keras.Model(ids, keras.layers.Flatten()(table(ids)))
            model.compile(recsync.optimizers.Adagrad(0.1), loss=lambda y, p: p)
        return model

    model = made(recsync.AsyncStrategy(cluster))
    callback = Checkpoint(tmp_path, every_steps=20, keep=None)
    data = tf.data.Dataset.from_tensors((np.zeros((BATCH, 1)), np.zeros(BATCH))).repeat(300)
    model.fit(data, verbose=0, callbacks=[callback])
    local = made(tf.distribute.get_strategy())
    for saved in callback.saved:
        checkpoint.restore(saved.path, local)
        (state,) = local.optimizer.states
        version = int(state.versions[0])
        assert version == saved.global_step
        np.testing.assert_allclose(state.accumulators[0], [[0.1 + version]], rtol=1e-5)
        sums = 0.1 + np.arange(1, version + 1)
        weight = 1 - np.sum(0.1 / np.sqrt(sums))
        np.testing.assert_allclose(local.get_weights()[0], [[weight]], atol=1e-3)


def test_training_goes_on_while_servers_write(cluster, tmp_path, monkeypatch):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy, rows=5)
    goes_on, is_writing = threading.Event(), threading.Event()
    write = blocks.Source.write

    def write_when_training_has_gone_on(*args):
        is_writing.set()
        assert goes_on.wait(200)
        return write(*args)

    monkeypatch.setattr(blocks.Source, "write", write_when_training_has_gone_on)
    # Else the first one is saved before training begins.
    callback = Checkpoint(tmp_path, every_steps=5, at_end=False, on_ps_lost="raise")
    seen = []

    class GoesOn(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # Workers may be ahead of what Keras has counted by then.
            if is_writing.is_set():
                seen.append(sum(strategy.worker_steps(self.model)))
                self.model.stop_training = seen[-1] > seen[0] + 20

        def on_epoch_end(self, epoch, logs=None):
            assert callback.saved == []
            assert checkpoint.latest(tmp_path) is None
            goes_on.set()

    recsync.testing.set_compute_time(strategy, 0.02)
    model.fit(dataset(400, 5).repeat(200), callbacks=[callback, GoesOn()], verbose=0)
    assert seen[-1] > seen[0] + 20
    assert [saved.path for saved in callback.saved] == [str(tmp_path / "1")]
    # Rows are those of when they were written, the global step is that of before.
    assert callback.saved[0].global_step < check_rows(tmp_path / "1")


def test_steps_are_counted_as_keras_does_in_executions_of_several(tmp_path):
    model = make_model()
    model.compile(recsync.optimizers.Adagrad(0.1), loss=lambda y, p: p, steps_per_execution=4)
    callback = Checkpoint(tmp_path, every_steps=10, keep=None)
    model.fit(dataset(10), epochs=2, verbose=0, callbacks=[callback])
    found = [checkpoint.open(saved.path) for saved in callback.saved]
    # What is due while one is written comes a little later.
    assert found[0].global_step == 10
    assert [(s.metadata["epoch"], s.global_step) for s in found][-1] == (2, 20)
    assert all(s.metadata["epoch"] == s.global_step // 10 for s in found)


def test_as_many_are_kept_as_asked_for(tmp_path):
    model = make_model()
    callback = Checkpoint(tmp_path, every_steps=1, keep=2)
    for _ in range(2):
        model.fit(dataset(3), verbose=0, callbacks=[callback])
    numbers = sorted(int(path.name) for path in tmp_path.iterdir())
    assert len(callback.saved) >= 4
    assert numbers == [len(callback.saved) - 1, len(callback.saved)]
    assert checkpoint.latest(tmp_path) == callback.saved[-1].path


def test_a_program_goes_on_with_the_epoch_that_had_not_ended(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (epochs[-1], batch) == (2, 1):
                raise KeyboardInterrupt

        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    epochs = []
    first = make_model()
    saver = Checkpoint(tmp_path, every_steps=4)
    with pytest.raises(KeyboardInterrupt):
        first.fit(dataset(4), epochs=5, verbose=0, callbacks=[saver, Stop()])
    assert epochs == [0, 1, 2]
    # Another program would begin when this one has ended.
    assert wait_until(lambda: saver._thread is None or not saver._thread.is_alive(), 100)
    second = make_model()
    callback = Checkpoint(tmp_path, every_steps=4, keep=None, metadata={"day": 3})
    history = second.fit(dataset(4), epochs=5, verbose=0, callbacks=[callback])
    updates = check_rows(callback.restored)
    epoch = checkpoint.open(callback.restored).metadata["epoch"]
    assert epoch in (0, 1, 2)  # What was due while the one before was written came later.
    assert history.epoch == list(range(epoch, 5))
    updates += 4 * (5 - epoch)
    assert check_rows(checkpoint.latest(tmp_path)) == updates
    parts = {"part": 1, "done_parts": []}
    assert checkpoint.open(checkpoint.latest(tmp_path)).metadata == {"day": 3, "epoch": 5, **parts}
    # What the model has by now counts in a further call, and another program has nothing to do.
    assert second.fit(dataset(4), verbose=0, callbacks=[callback]).epoch == [0]
    assert check_rows(checkpoint.latest(tmp_path)) == updates + 4
    third = make_model()
    ended = third.fit(dataset(4), epochs=1, verbose=0, callbacks=[Checkpoint(tmp_path)])
    assert ended.epoch == []
    fresh = make_model()
    fresh.fit(dataset(4), verbose=0, callbacks=[Checkpoint(tmp_path, resume=False)])
    assert check_rows(checkpoint.latest(tmp_path)) == 4


PROGRAM = """
import sys
import time

import keras

sys.path.insert(0, sys.argv[2])
import test_checkpoint_callback as tests

from tf_recsync.checkpoint import blocks

model = tests.make_model()
callback = tests.Checkpoint(
    sys.argv[1], every_steps=1, at_end=False, full_every=int(sys.argv[3]), keep=None
)
write = blocks.Source.write


def write_and_wait(*args):
    written = write(*args)
    if len(callback.saved) == int(sys.argv[4]):
        print("has written", flush=True)
        time.sleep(600)
    return written


blocks.Source.write = write_and_wait
# Until it is killed: however slow it is, and however quick steps are.
model.fit(tests.dataset(100), epochs=100_000, verbose=0, callbacks=[callback])
"""


def kill_while_it_writes(folder, request, full_every, saved):
    """Has a program save so many checkpoints, and kills it while it writes the next one."""
    arguments = [str(folder), str(request.path.parent), str(full_every), str(saved)]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout.readline() == "has written\n"
        program.send_signal(signal.SIGKILL)


def test_a_program_that_is_killed_while_servers_write_leaves_the_last_one(tmp_path, request):
    kill_while_it_writes(tmp_path, request, full_every=1, saved=1)
    left, whole = sorted(path.name for path in tmp_path.iterdir())
    assert left.startswith(".publishing-2-") and whole == "1"
    updates = check_rows(checkpoint.latest(tmp_path))
    assert updates >= 1
    # The next one removes what was left behind, and goes on.
    model = make_model()
    model.fit(dataset(3), verbose=0, callbacks=[Checkpoint(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert check_rows(tmp_path / "2") == updates + 3


def test_a_server_that_dies_while_it_writes_ends_fit_and_the_last_one_stays(
    cluster, tmp_path, monkeypatch
):
    strategy = recsync.AsyncStrategy(cluster, worker_timeout=20.0, silence_timeout=60.0)
    model = make_model(strategy, 40)
    callback = Checkpoint(tmp_path, every_steps=10, on_ps_lost="raise")
    write = blocks.Source.write

    def kill_and_write(*args):
        if callback.saved:
            cluster.kill("ps", 0)
        return write(*args)

    monkeypatch.setattr(blocks.Source, "write", kill_and_write)
    with pytest.raises(RuntimeError, match="parameter server ps:0 was lost"):
        model.fit(dataset(10_000, 40), verbose=0, callbacks=[callback])
    assert wait_until(lambda: sorted(p.name for p in tmp_path.iterdir()) == ["1"], 30)
    check_rows(tmp_path / "1")


def test_what_can_not_be_is_said_before_training_begins(saved_elsewhere, tmp_path, cluster):
    model = make_model()
    with pytest.raises(ValueError, match="rows.*'ones' are .*3.* in the checkpoint|of another mo"):
        make_model(rows=7).fit(dataset(1), verbose=0, callbacks=[Checkpoint(saved_elsewhere)])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"folder='.*/file/x' can't be written: "):
        model.fit(dataset(1), verbose=0, callbacks=[Checkpoint(tmp_path / "file" / "x")])
    on_servers = make_model(recsync.AsyncStrategy(cluster))
    with pytest.raises(OSError, match="writes there this process does not see"):
        on_servers.fit(dataset(1), verbose=0, callbacks=[Checkpoint("ram://of_this_process/c")])
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must be built before it is trained with a Checkpoint"):
        unbuilt.fit(np.ones([2, 1]), np.ones(2), verbose=0, callbacks=[Checkpoint(tmp_path / "x")])
    for wrong, message in (
        ({"folder": 3}, "folder must be the path of a folder, not 3"),
        ({"every_seconds": 0}, "every_seconds must be positive"),
        ({"every_steps": 0.5}, "every_steps must be an integer of at least 1"),
        ({"keep": 0}, "keep must be an integer of at least 1"),
        ({"resume": 1}, "resume must be a bool, not 1"),
        ({"metadata": {"epoch": 1}}, "metadata can't have 'epoch', which the callback sets itself"),
        ({"metadata": [1]}, r"metadata must be a dict of what JSON has, not \[1\]"),
        ({"timeout": -1}, "timeout must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoint(**{"folder": tmp_path, **wrong})


@pytest.fixture
def saved_elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    make_model().fit(dataset(1), verbose=0, callbacks=[Checkpoint(folder)])
    found = json.loads((folder / "1" / INDEX).read_text())["metadata"]
    assert found == {"epoch": 1, "part": 1, "done_parts": []}
    return folder
