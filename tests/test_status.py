"""What `python -m tf_recsync.status` shows of a run."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import wait_until

import tf_recsync as recsync
from tf_recsync.run_status import RunStatus, ServerStatus, running, status_folder


def status_of(**changes) -> RunStatus:
    worker = ServerStatus("worker:0", "working", 0.25, 0, batches=1234, data_wait=75.0)
    ps = ServerStatus("ps:0", "ready", 3723.0, 1)
    status = RunStatus(
        *(1000.0, 900.0, 42, "train.py --epochs=3", "GBAStrategy", "train", 1, 3, 1500, 2000, 12.5),
        losses={"steps": 2, "retried": 0},
        logs={"loss": 0.51234},
        waiting="worker 0 has waited 2.0 s for worker 1",
        servers=[worker, ps],
    )
    return dataclasses.replace(status, **changes)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tf_recsync.status", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, **environment),
    )


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Programs of others are not to be seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_table_has_the_progress_the_servers_and_who_waits():
    lines = status_of().table(now=1001.0).splitlines()
    assert lines == [
        "GBAStrategy, process 42: train.py --epochs=3",
        "trains for 0:01:40; epoch 2 of 3, batch 1,500 of 2,000, 12.5 batches/s",
        "loss 0.5123",
        "losses: steps 2",
        "waiting: worker 0 has waited 2.0 s for worker 1",
        "",
        "server    state        for  times lost  batches  waited for data",
        "worker:0  working    0.2 s           0    1,234          0:01:15",
        "ps:0      ready    1:02:03           1",
    ]
    assert "as of 9.0 s ago" in status_of().table(now=1009.0)
    ended = status_of(doing="end", expected=None, losses={}, logs={}, waiting="").table(now=1009.0)
    assert "has ended after training for 0:01:40; epoch 2 of 3, batch 1,500, 12.5" in ended
    assert "as of" not in ended and "losses" not in ended and "waiting" not in ended
    endings = [doing for doing in ("train", "end", "failed") if status_of(doing=doing).has_ended]
    assert endings == ["end", "failed"]
    failed = status_of(doing="failed").table(now=1009.0)
    assert "has ended by an error after training for 0:01:40" in failed and "as of" not in failed


def test_a_file_is_old_only_when_it_should_have_been_written_anew(tmp_path):
    assert "as of" not in status_of(every_seconds=60.0).table(now=1060.0)
    assert "as of 0:01:10 ago" in status_of(every_seconds=60.0).table(now=1070.0)
    # Earlier versions wrote nothing of it.
    status_of(every_seconds=60.0).write(tmp_path / "run.json")
    values = json.loads((tmp_path / "run.json").read_text())
    del values["every_seconds"]
    (tmp_path / "older.json").write_text(json.dumps(values))
    assert "as of 9.0 s ago" in RunStatus.read(tmp_path / "older.json").table(now=1009.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "tf_recsync status: Unknown command line flag 'nonsense'"),
        (["--path=a.json", "--pid=1"], "--path can't be used with --pid"),
    ],
)
def test_wrong_flags_end_the_command_with_a_message_and_exit_code_2(arguments, message):
    ended = run(*arguments)
    assert ended.returncode == 2 and message in ended.stderr


def test_a_file_gives_what_was_written_or_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.json"
    status_of().write(path)
    assert RunStatus.read(path) == status_of()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    for wrong in ("", "[]", "{}", '{"servers": [{"name": 1}]}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="a.json has no status"):
            RunStatus.read(path)


def test_files_of_programs_that_are_gone_are_removed(own_folder):
    folder = status_folder()
    folder.mkdir()
    gone, mine = folder / "999999999-0.status.json", folder / f"{os.getpid()}-0.status.json"
    for path in (gone, mine):
        status_of().write(path)
    assert running() == [mine]
    assert not gone.exists()


def fit(strategy, *callbacks, epochs=2):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.1), "mse")
    x = np.ones((96, 2), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks), validation_data=data)
    return model, data


class Seen(recsync.callbacks.Status):
    """Keeps all that was written."""

    def __init__(self, **arguments):
        super().__init__(every_seconds=1e-3, **arguments)
        self.all = []

    def _put(self, doing):
        super()._put(doing)
        self.all.append(self.last)


@pytest.mark.parametrize("kind", ["async", "sync", "hop"])
def test_a_run_says_what_it_does_until_it_ends(clusters, own_folder, kind):
    if kind == "hop":
        cluster = clusters.get(workers=3, ps=0)
        strategy = recsync.HopStrategy(cluster, recsync.topology.ring(3))
    else:
        cluster = clusters.get(workers=2, ps=2)
        make = recsync.AsyncStrategy if kind == "async" else recsync.SyncStrategy
        strategy = make(cluster)
    seen = Seen()
    files = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            files.append([RunStatus.read(path) for path in running()])

    fit(strategy, seen, Looks())
    assert [len(found) for found in files] == [1, 1]
    assert not list(status_folder().iterdir())
    first, last = seen.all[0], seen.all[-1]
    assert (first.doing, first.batches, last.doing) == ("train", 0, "end")
    assert (last.epoch, last.epochs, last.pid) == (1, 2, os.getpid())
    assert last.every_seconds == 1e-3
    assert last.strategy == type(strategy).__name__
    workers = [server for server in last.servers if server.name.startswith("worker")]
    assert len(last.servers) == cluster.workers + cluster.ps
    assert sum(worker.batches for worker in workers) >= last.batches > 0
    assert all(server.batches is None for server in last.servers if server not in workers)
    texts = {status.waiting for status in seen.all}
    assert texts == {""} if kind == "async" else len(texts - {""}) > 0
    assert "loss" in last.logs


def test_what_can_t_be_reported_on_is_refused(clusters, tmp_path):
    with pytest.raises(ValueError, match="every_seconds"):
        recsync.callbacks.Status(every_seconds=0)
    with pytest.raises(ValueError, match="path must be the path of a file, not 3"):
        recsync.callbacks.Status(path=3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2), np.float32)
    with pytest.raises(ValueError, match="can't report on a _DefaultDistributionStrategy"):
        model.fit(x, x[:, :1], verbose=0, callbacks=[recsync.callbacks.Status()])


def test_the_command_shows_a_program_that_runs_and_says_why_it_can_t(tmp_path):
    path = tmp_path / "run.json"
    status_of().write(path)
    status_of(doing="failed").write(tmp_path / "failed.json")
    commands = {
        "table": ["--once", f"--path={path}"],
        "failed": [f"--path={tmp_path / 'failed.json'}"],
        "no file": ["--once", f"--path={tmp_path / 'none'}"],
        "no program": ["--once"],
        "both": ["--pid=3", f"--path={path}"],
    }
    done = {}
    threads = [
        threading.Thread(
            target=lambda name=name, a=a: done.update({name: run(*a, TMPDIR=str(tmp_path))})
        )
        for name, a in commands.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done["table"].returncode == 0
    assert done["table"].stdout.splitlines()[0] == "GBAStrategy, process 42: train.py --epochs=3"
    assert done["failed"].returncode == 0
    assert "has ended by an error after training for" in done["failed"].stdout
    assert done["failed"].stdout.splitlines()[-1] == "The program has ended."
    assert done["no file"].returncode == 1 and "no file" in done["no file"].stderr
    assert done["no program"].returncode == 1
    assert "give recsync.callbacks.Status() to fit" in done["no program"].stderr
    assert "--path can't be used with --pid" in done["both"].stdout + done["both"].stderr


def test_the_command_ends_with_the_program_and_not_with_its_first_fit(tmp_path, own_folder):
    status_folder().mkdir()
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = status_folder() / f"{program.pid}-0.status.json"
    status_of(pid=program.pid, program="first").write(path)
    command = subprocess.Popen(
        [sys.executable, "-m", "tf_recsync.status", "--every=0.1"],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, TMPDIR=str(tmp_path)),
    )

    def reads_until(words):
        return any(words in line for line in command.stdout)

    try:
        assert reads_until(f"process {program.pid}: first")
        path.unlink()
        assert reads_until("No program trains at the moment")
        status_of(pid=program.pid, program="second").write(path)
        assert reads_until(f"process {program.pid}: second")
        program.communicate(b"\n")
        assert reads_until("The program has ended.")
        assert command.wait() == 0
    finally:
        for process in (program, command):
            process.kill()
            process.communicate()


class Labels(keras.metrics.Metric):
    """A metric of two values."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight(shape=(2,), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add([1.0, 2.0])

    def result(self):
        return self.total.value


def test_nothing_that_a_status_can_t_show_or_write_ends_training(clusters, own_folder):
    strategy = recsync.AsyncStrategy(clusters.get(workers=2, ps=2))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.1), "mse", metrics=[Labels()])
    x = np.ones((96, 2), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)

    class Removes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            shutil.rmtree(status_folder())
            status_folder().write_text("something else")

        def on_epoch_end(self, epoch, logs=None):
            status_folder().unlink(missing_ok=True)
            logs |= {"phase": "warm-up", "next": None}

    seen = Seen()
    model.fit(data, epochs=2, verbose=0, callbacks=[Removes(), seen])
    assert seen.last.batches == 12 and set(seen.last.logs) == {"loss"}


def test_a_fit_that_fails_leaves_no_status_but_one_that_says_so(clusters, own_folder):
    strategy = recsync.AsyncStrategy(clusters.get(workers=2, ps=2))

    class Bad(keras.layers.Layer):
        def call(self, x):
            return tf.debugging.check_numerics(x / 0.0, "no number")

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), Bad()])
        model.compile(recsync.optimizers.SGD(0.1), "mse")
    x = np.ones((96, 2), np.float32)
    path = own_folder / "run.json"
    callbacks = [recsync.callbacks.Status(), recsync.callbacks.Status(path)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
        model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    assert not running()
    assert RunStatus.read(path).doing == "failed"
    assert model.train_function.observers.isdisjoint(callbacks)


def test_validation_is_told_of_and_the_next_fit_begins_with_no_batch(clusters, own_folder):
    strategy = recsync.AsyncStrategy(clusters.get(workers=2, ps=2))
    seen = Seen()
    model, data = fit(strategy, seen)
    assert "evaluate" in {status.doing for status in seen.all}
    seen.all.clear()
    # What predicts or evaluates in between has it told of that.
    tells = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: (time.sleep(0.01), seen.tell())
    )
    model.fit(data, verbose=0, callbacks=[seen, tells])
    for status in seen.all[:2]:
        assert (status.doing, status.epoch) == ("train", 0)
        assert (status.batches, status.rate) == (0, 0.0)
        workers = [server for server in status.servers if server.name.startswith("worker")]
        assert [server.batches for server in workers] == [0, 0]
    assert seen.all[-1].batches == 12


def test_the_status_is_new_while_a_callback_predicts(clusters, tmp_path):
    strategy = recsync.AsyncStrategy(clusters.get(workers=2, ps=2))
    path, times = tmp_path / "run.json", []

    def batches():
        for _ in range(8):
            yield np.ones((8, 2), np.float32)
        before = RunStatus.read(path).time
        assert wait_until(lambda: RunStatus.read(path).time > before, 60.0)
        times.append(before)

    spec = tf.TensorSpec((8, 2))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    predicts = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: predicts.model.predict(data, verbose=0)
    )
    fit(strategy, recsync.callbacks.Status(path, every_seconds=0.01), predicts, epochs=1)
    assert times
