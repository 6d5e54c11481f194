"""`callbacks.Publish`: inference models that are published while training goes on."""

import json
import re
import resource
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    IDS,
    LOSS,
    Subclassed,
    clicks,
    compiled,
    dataset,
    functional,
    gated,
    slope_model,
)

import tf_recsync as recsync
from tf_recsync.callbacks import Publish
from tf_recsync.serving import Inference
from tf_recsync.versions import MARKER, Versions

WORKERS, PS = 4, 6  # Of the cluster that test_maintenance.py uses, too.
LARGE = 1 << 20  # Bytes.


def make_strategy(name, cluster):
    make = {
        "async": lambda: recsync.AsyncStrategy(cluster),
        "GBA": lambda: recsync.GBAStrategy(cluster, 2 * BATCH, BATCH),
        "shadow": lambda: recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3)),
        "hierarchical": lambda: recsync.HierarchicalStrategy(
            cluster, recsync.EASGD(0.3), groups=2, trainers_per_group=2, ps_per_group=1
        ),
    }
    return make[name]()


class Weights(keras.callbacks.Callback):
    """Notes the weights after each step and at the end, when callbacks after it see the same."""

    def __init__(self):
        super().__init__()
        self.noted = []
        self.has_any = threading.Event()

    def on_train_batch_end(self, batch, logs=None):
        self.noted.append(self.model.get_weights())
        self.has_any.set()

    def on_train_end(self, logs=None):
        self.noted.append(self.model.get_weights())


@pytest.mark.parametrize("name", ["async", "GBA", "shadow", "hierarchical"])
def test_what_is_published_is_of_one_moment_and_predicts_what_the_model_did(
    clusters, tmp_path, name
):
    strategy = make_strategy(name, clusters.get(WORKERS, PS))
    model = compiled(strategy)
    recsync.testing.set_compute_time(strategy, 0.02)
    weights, publish = Weights(), Publish(tmp_path, every_seconds=1e-6)
    data = gated(weights.has_any).map(lambda ids, number: (ids, number % 2))
    model.fit(data, callbacks=[weights, publish], verbose=0)
    ids = clicks(8)[0]
    local = functional()
    predictions = []
    for noted in weights.noted:
        local.set_weights(noted)
        predictions.append(local(ids, training=False).numpy())
    assert len(publish.publications) > 1
    places = []
    for publication in publish.publications:
        served = tf.saved_model.load(publication.path)
        clicked = served.serve(tf.constant(ids))
        differences = [np.abs(clicked - prediction).max() for prediction in predictions]
        assert min(differences) < 1e-6
        places.append(int(np.argmin(differences)))
        assert publication.pause_seconds > 0
        assert publication.write_seconds > 0
    assert places == sorted(places)
    assert places[0] < places[-1]
    last = publish.publications[-1]
    assert last.global_step == int(model.optimizer.iterations.numpy())
    assert recsync.latest_published(tmp_path) == last.path == str(tmp_path / str(last.version))


@pytest.fixture
def writing(monkeypatch):
    """Versions are not written before the second event; the first says that one is to be."""
    is_writing, goes_on = threading.Event(), threading.Event()
    write = Inference.write

    def write_later(inference, folder):
        is_writing.set()
        assert goes_on.wait(60)
        write(inference, folder)

    monkeypatch.setattr(Inference, "write", write_later)
    return is_writing, goes_on


def test_training_goes_on_while_a_version_is_written_and_fit_waits_for_the_last(
    clusters, tmp_path, writing
):
    strategy = recsync.AsyncStrategy(clusters.get(WORKERS, PS))
    model = compiled(strategy)
    is_writing, goes_on = writing
    publish = Publish(tmp_path, every_seconds=1e-6, at_end=False)
    seen = []

    class GoesOn(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((is_writing.is_set(), recsync.latest_published(tmp_path)))

        def on_epoch_end(self, epoch, logs=None):
            assert publish.publications == []
            goes_on.set()

    model.fit(dataset(), callbacks=[publish, GoesOn()], verbose=0)
    assert len(seen) == 20
    assert {version for _, version in seen} == {None}
    assert [publication.version for publication in publish.publications] == [1]


def local_model(units=1):
    model = slope_model(units)
    model.compile(recsync.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def ones(batches=3, units=1):
    return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, units]))).repeat(batches)


def test_what_an_interrupted_fit_has_left_writing_is_whole_before_the_next_is_begun(
    tmp_path, writing
):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert is_writing.wait(60)
            raise KeyboardInterrupt

    class GoesOn(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:  # The second one has been begun after the first batch.
                assert recsync.latest_published(target) is None
                goes_on.set()

    is_writing, goes_on = writing
    target, model = tmp_path / "published", local_model()
    first = Publish(target, every_seconds=1e-6)
    with pytest.raises(KeyboardInterrupt):
        model.fit(ones(), callbacks=[first, Interrupt()], verbose=0)
    same = tmp_path / "other" / ".." / "published"
    second = Publish(same, every_seconds=1e-6, keep=None)
    model.fit(ones(2), callbacks=[second, GoesOn()], verbose=0)
    assert [one.version for one in first.publications] == [1]
    assert [one.version for one in second.publications] == [2, 3]
    assert sorted(path.name for path in target.iterdir()) == ["1", "2", "3"]


def test_of_versions_in_object_stores_the_marker_says_which_are_whole(monkeypatch):
    target = "ram://published/clicks"
    model, publish = local_model(), Publish(target, every_seconds=1e9, keep=2)
    finish, seen = Versions.finish, []

    def look_and_finish(versions, number, about):
        seen.append((recsync.latest_published(target), sorted(tf.io.gfile.listdir(target))))
        finish(versions, number, about)

    monkeypatch.setattr(Versions, "finish", look_and_finish)
    for _ in range(2):
        model.fit(ones(), callbacks=[publish], verbose=0)
    # As an earlier program left it that was killed; and somebody's own.
    tf.io.gfile.makedirs(f"{target}/3")
    for name in (".publishing-3", "3/saved_model.pb", "own/notes"):
        tf.io.gfile.makedirs(f"{target}/own")
        with tf.io.gfile.GFile(f"{target}/{name}", "w") as file:
            file.write("")
    assert recsync.latest_published(target) == f"{target}/2"
    for _ in range(2):
        model.fit(ones(), callbacks=[publish], verbose=0)
    latest, names = seen[1]
    assert latest == f"{target}/1"
    assert [name.rpartition("-")[0] or name for name in names] == [".publishing-2", "1", "2"]
    # Somebody may have seen 3: that number is not used again.
    assert sorted(tf.io.gfile.listdir(target)) == ["4", "5", "own"]
    with tf.io.gfile.GFile(f"{target}/5/{MARKER}") as file:
        assert json.loads(file.read()) == {"version": 5, "global_step": 12}
    served = tf.saved_model.load(recsync.latest_published(target))
    np.testing.assert_allclose(served.serve(tf.ones([1, 1])), model(tf.ones([1, 1])), rtol=1e-6)


PROGRAM = """
import sys
import time

import keras
import numpy as np

import tf_recsync as recsync
from tf_recsync.serving import Inference

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)
publish = recsync.callbacks.Publish(sys.argv[1])
ones = np.ones([4, 1])
model.fit(ones, ones, callbacks=[publish], verbose=0)
write = Inference.write


def write_and_wait(inference, folder):
    write(inference, folder)
    print("has written", flush=True)
    time.sleep(600)


Inference.write = write_and_wait
model.fit(ones, ones, callbacks=[publish], verbose=0)
"""


def test_a_program_that_is_killed_while_it_writes_leaves_the_version_before(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout.readline() == "has written\n"
        program.send_signal(signal.SIGKILL)
    left, whole = sorted(path.name for path in tmp_path.iterdir())
    assert left.startswith(".publishing-2-") and whole == "1"
    assert recsync.latest_published(tmp_path) == str(tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1"))
    assert served.serve(tf.ones([3, 1])).shape == (3, 1)
    # The next one removes what was left behind.
    local_model().fit(ones(), callbacks=[Publish(tmp_path)], verbose=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_full_target_ends_fit_with_an_error_and_leaves_the_version_before(tmp_path):
    units = LARGE
    model, publish = local_model(units), Publish(tmp_path, every_seconds=1e-6, at_end=False)
    model.fit(ones(1, units), callbacks=[publish], verbose=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=f"target='{tmp_path}'.*{tmp_path}/1 is whole"):
            model.fit(ones(10_000, units), callbacks=[publish], verbose=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert int(model.optimizer.iterations.numpy()) < 10_000  # Not only at the end.
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    model.fit(ones(1, units), callbacks=[publish], verbose=0)
    assert recsync.latest_published(tmp_path) == str(tmp_path / "2")


def test_writing_that_takes_too_long_ends_fit(tmp_path, monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr(Inference, "write", lambda inference, folder: is_over.wait(60))
    publish = Publish(tmp_path, timeout=0.1)
    try:
        with pytest.raises(RuntimeError, match="timeout=0.1; nothing was written before"):
            local_model().fit(ones(), callbacks=[publish], verbose=0)
    finally:
        is_over.set()


def test_a_target_that_can_not_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    model = local_model()
    with pytest.raises(OSError, match="can't be written: .*; it must be a folder"):
        model.fit(ones(), callbacks=[Publish(tmp_path / "file" / "models")], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 0


class Holds(keras.layers.Layer):
    """Has a variable that Keras does not know."""

    def build(self, shape):
        self.own = tf.Variable(1.0, name="own_scale")

    def call(self, x):
        return self.own * x


def test_a_model_that_can_not_be_exported_is_an_error_before_training(tmp_path):
    model = Subclassed()
    model.compile("sgd", LOSS, jit_compile=False)
    with pytest.raises(ValueError, match="input_signature=None: must be given"):
        model.fit(dataset(), callbacks=[Publish(tmp_path)], verbose=0)
    assert not model.built, "no step has begun"
    signature = tf.TensorSpec([None, IDS], tf.int32)
    model.fit(dataset(), callbacks=[Publish(tmp_path, input_signature=signature)], verbose=0)
    assert recsync.latest_published(tmp_path) == str(tmp_path / "1")
    x = keras.Input((1,))
    model = keras.Model(x, keras.layers.Dense(1)(Holds()(x)))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="own_scale.*must be made by add_weight"):
        model.fit(ones(), callbacks=[Publish(tmp_path)], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 0
    model = keras.Sequential([Holds(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="own_scale.*must be made by add_weight"):
        model.fit(ones(), callbacks=[Publish(tmp_path)], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 1, "the first step builds it"


def test_numbers_of_numpy_are_taken(tmp_path):
    Publish(tmp_path, every_seconds=np.float32(0.5), timeout=np.int64(3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target": ""}, "target must be the path of a folder, not ''"),
        ({"target": 3}, "target must be the path of a folder, not 3"),
        ({"every_seconds": 0}, "every_seconds must be positive, in seconds, not 0"),
        ({"every_seconds": "hourly"}, "every_seconds must be positive, in seconds, not 'hourly'"),
        ({"timeout": True}, "timeout must be positive, in seconds, not True"),
        ({"keep": 0}, "keep must be an integer of at least 1, got 0"),
        ({"at_end": 1}, "at_end must be a bool, not 1"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Publish(**{"target": "models", **wrong})
    if "target" in wrong:
        with pytest.raises(ValueError, match=message):
            recsync.latest_published(**wrong)


def test_an_old_version_that_can_not_be_removed_keeps_no_later_one_from_being_written(
    tmp_path, monkeypatch, caplog
):
    """As of a file that somebody reads, on some file systems."""
    written = Versions(str(tmp_path))
    written.prepare()

    def write():
        number, folder = written.begin()
        tf.io.gfile.makedirs(folder)
        written.finish(number, {})
        return number

    first = write()
    with monkeypatch.context() as patch:

        def refuse(path):
            raise tf.errors.FailedPreconditionError(None, None, f"{path} is not empty")

        patch.setattr(tf.io.gfile, "rmtree", refuse)
        with pytest.raises(tf.errors.FailedPreconditionError):
            written.remove(first)
        assert write() == first + 1
        assert re.search(rf"\.publishing-{first}-\w+ could not be removed", caplog.text)
    assert write() == first + 2
    assert written.published() == [first + 1, first + 2]
    assert not any(path.name.startswith(".publishing-") for path in tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["plain path", "object store"])
def test_one_that_fails_leaves_what_another_program_has_written_meanwhile(
    tmp_path, monkeypatch, kind
):
    target = str(tmp_path) if kind == "plain path" else "ram://two/clicks"
    other, write = Versions(target), Inference.write
    seen = []

    def write_while_another_does(inference, folder):
        write(inference, folder)
        number, own = other.begin()
        tf.io.gfile.makedirs(own)
        with tf.io.gfile.GFile(f"{own}/whole", "w") as file:
            file.write("")
        other.finish(number, {})
        seen.append(number)
        tf.io.gfile.makedirs(f"{folder}/tables")  # As the first file of the rest would.

    monkeypatch.setattr(Inference, "write", write_while_another_does)
    with pytest.raises(RuntimeError, match="a publication could not be written"):
        local_model().fit(ones(), callbacks=[Publish(target)], verbose=0)
    assert [name.rstrip("/") for name in tf.io.gfile.listdir(target)] == [str(*seen)]
    assert sorted(tf.io.gfile.listdir(f"{target}/{seen[0]}")) == [MARKER, "whole"]
