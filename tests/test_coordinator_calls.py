"""Calls that the coordinator makes itself, beside the workers' steps, end and name the server."""

import time

import keras
import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, mean_output, slope_model

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.synchronization.hop import HopSynchronizer

LIMIT = 3.0  # A busy machine answers within that.
STRATEGIES = {
    "async": lambda c: recsync.AsyncStrategy(c, silence_timeout=LIMIT),
    "GBA": lambda c: recsync.GBAStrategy(c, 4, 2, staleness_tolerance=4, silence_timeout=LIMIT),
    "ShadowSync": lambda c: recsync.ShadowSyncStrategy(
        c, recsync.EASGD(0.3), mode=recsync.Foreground(gap=4), silence_timeout=LIMIT
    ),
}
SILENT = r"parameter server ps:0 has not answered for \d+ s; end it, start it again"
LOST = "ps:0 was lost, and its (parameters|part of the central copy) with it"


@pytest.fixture
def two(clusters):
    return clusters.get(workers=2, ps=1)


@pytest.fixture(scope="module", autouse=True)
def _end(end_calls_of_servers_that_were_cut_off):
    pass


def ones(steps=12):
    return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat(steps)


def model_of(strategy):
    model = compiled(strategy, slope_model, lambda: SGD(0.01), mean_output)
    model.fit(ones(), verbose=0)
    return model


def begin_and_end(cluster, how):
    act = {"silent": cluster.pause, "lost": cluster.kill}[how]
    return lambda: act("ps", 0), {"silent": SILENT, "lost": LOST}[how]


@pytest.mark.cases(
    "async-before fit-silent", "GBA-last batch-silent", "ShadowSync-epoch's end-lost"
)
@pytest.mark.parametrize(
    ("name", "when", "how"),
    [
        ("async", "before fit", "silent"),
        ("async", "epoch's end", "lost"),
        ("async", "last batch", "silent"),
        ("GBA", "before fit", "lost"),
        ("GBA", "epoch's end", "silent"),
        ("GBA", "last batch", "silent"),
        ("ShadowSync", "before fit", "silent"),
        ("ShadowSync", "epoch's end", "lost"),
        ("ShadowSync", "last batch", "silent"),
    ],
)
def test_a_parameter_server_that_is_gone_between_steps_is_named(two, name, when, how):
    strategy = STRATEGIES[name](two)
    model = model_of(strategy)
    end, message = begin_and_end(two, how)
    callbacks = {
        "before fit": [],
        "epoch's end": [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: end())],
        "last batch": [AtBatch(10, end)],
    }[when]
    if when == "before fit":
        end()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        model.fit(ones(), epochs=2, callbacks=callbacks, verbose=0)
    assert time.monotonic() - began < 60


@pytest.mark.cases("aggregation", "weights", "checkpoint")
@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("async", lambda strategy, model, path: strategy.staleness(model)),
        ("GBA", lambda strategy, model, path: strategy.aggregation(model)),
        ("ShadowSync", lambda strategy, model, path: strategy.sync_report(model)),
        ("async", lambda strategy, model, path: model.get_weights()),
        ("async", lambda strategy, model, path: model.layers[-1].kernel.assign([[1.0]])),
        ("async", lambda strategy, model, path: model.save_weights(path)),
        ("async", lambda strategy, model, path: tf.train.Checkpoint(model=model).write(path)),
    ],
    ids=["staleness", "aggregation", "syncs", "weights", "assignment", "file", "checkpoint"],
)
def test_a_report_of_a_silent_parameter_server_ends(two, name, reading, tmp_path):
    path = str(tmp_path / "clicks.weights.h5")
    strategy = STRATEGIES[name](two)
    model = model_of(strategy)
    reading(strategy, model, path)
    two.pause("ps", 0)
    # What writes a checkpoint is TensorFlow's call, and the error its own.
    errors = RuntimeError, tf.errors.UnavailableError
    with pytest.raises(errors, match=f"{SILENT}|/job:ps/replica:0/task:0"):
        reading(strategy, model, path)


@pytest.mark.cases("GBA")
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_worker_that_stands_still_when_it_has_finished_holds_nobody(two, name):
    strategy = STRATEGIES[name](two)
    model = model_of(strategy)
    pause = AtBatch(10, lambda: two.pause("worker", 1))
    began = time.monotonic()
    model.fit(ones(), epochs=2, callbacks=[pause], verbose=0)
    model.evaluate(ones(), verbose=0)
    assert time.monotonic() - began < 60


def test_a_worker_that_stands_still_is_left_out_of_a_checkpoint_of_copies(two, tmp_path, caplog):
    two.readmit()
    strategy = STRATEGIES["ShadowSync"](two)
    model = model_of(strategy)
    two.pause("worker", 1)
    began = time.monotonic()
    checkpoint = tf.train.Checkpoint(workers=strategy.worker_states(model))
    checkpoint.write(str(tmp_path / "copies"))
    assert time.monotonic() - began < 60
    assert "Worker 1 does not answer; its copies are left out." in caplog.text


def test_a_worker_that_stands_still_when_it_has_finished_holds_no_neighbor(two, monkeypatch):
    """Its neighbors tell it when they leave; by Hop."""
    two.readmit()  # Worker 1 stood still in another test.
    strategy = recsync.HopStrategy(two, recsync.topology.ring(2), silence_timeout=LIMIT)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    leave, told = HopSynchronizer.leave, []

    def leave_when_the_other_stands_still(synchronizer, worker):
        if worker == 0 and not told:
            told.append(time.monotonic())
            two.pause("worker", 1)
        leave(synchronizer, worker)

    monkeypatch.setattr(HopSynchronizer, "leave", leave_when_the_other_stands_still)

    def dataset_fn(context):
        return ones(10 if context.input_pipeline_id == 0 else 2)

    try:
        data = strategy.distribute_datasets_from_function(dataset_fn)
        model.fit(data, verbose=0)
        assert 0 < time.monotonic() - told[0] < 60
    finally:
        two.resume("worker", 1)
    two.readmit()
    model.fit(ones(), verbose=0)
