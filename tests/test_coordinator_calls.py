"""Calls that the coordinator makes itself, beside the workers' steps, end and name the server."""

import re

import keras
import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, mean_output, slope_model

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.synchronization.hop import HopSynchronizer

LIMIT = 3.0  # Seconds that a server may be silent; one of a busy machine may be by itself.
STRATEGIES = {
    "async": lambda c, s=LIMIT: recsync.AsyncStrategy(c, silence_timeout=s),
    "GBA": lambda c, s=LIMIT: recsync.GBAStrategy(
        c, 4, 2, staleness_tolerance=4, silence_timeout=s
    ),
    "ShadowSync": lambda c, s=LIMIT: recsync.ShadowSyncStrategy(
        c, recsync.EASGD(0.3), mode=recsync.Foreground(gap=4), silence_timeout=s
    ),
}
# Not for the 60 s that it may by default.
SILENT = r"parameter server ps:0 has not answered for [1-5]?\d s; end it, start it again"
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


def undisturbed(cluster, attempt):
    """What `attempt()` returns, once no server that is needed is silent by itself meanwhile."""
    for _ in range(19):
        try:
            return attempt()
        except tf.errors.UnavailableError:
            pass  # Of one that it was saved from, or of all workers.
        except RuntimeError as error:
            if not re.search(SILENT, str(error)):
                raise
        cluster.connect(timeout=200.0)
    return attempt()


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
    limit = {"silent": LIMIT, "lost": None}[how]  # A server that is lost is not waited for.
    model = undisturbed(two, lambda: model_of(STRATEGIES[name](two, limit)))
    end, message = begin_and_end(two, how)
    callbacks = {
        "before fit": [],
        "epoch's end": [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: end())],
        "last batch": [AtBatch(10, end)],
    }[when]
    if when == "before fit":
        end()
    with pytest.raises(RuntimeError, match=message):
        model.fit(ones(), epochs=2, callbacks=callbacks, verbose=0)


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

    def attempt():
        strategy = STRATEGIES[name](two)
        model = model_of(strategy)
        reading(strategy, model, path)
        return strategy, model

    strategy, model = undisturbed(two, attempt)
    two.pause("ps", 0)
    # What writes a checkpoint is TensorFlow's call, and the error its own.
    errors = RuntimeError, tf.errors.UnavailableError
    with pytest.raises(errors, match=f"{SILENT}|/job:ps/replica:0/task:0"):
        reading(strategy, model, path)


def answering(cluster):
    """Has worker 1 answer, which may have stood still in another test."""
    cluster.resume("worker", 1)
    cluster.readmit()


@pytest.mark.cases("GBA")
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_worker_that_stands_still_when_it_has_finished_holds_nobody(two, name, caplog):

    def attempt():
        answering(two)
        caplog.clear()
        model = model_of(STRATEGIES[name](two))
        pause = AtBatch(10, lambda: two.pause("worker", 1))
        model.fit(ones(), epochs=2, callbacks=[pause], verbose=0)
        model.evaluate(ones(), verbose=0)
        # Nobody may have waited for it; who has, not for the 60 s that it may by default.
        waits = re.findall(r"worker:1 has not answered for (\d+) s", caplog.text)
        assert all(int(seconds) < 60 for seconds in waits)

    undisturbed(two, attempt)


def test_a_worker_that_stands_still_is_left_out_of_a_checkpoint_of_copies(two, tmp_path, caplog):

    def attempt():
        answering(two)
        strategy = STRATEGIES["ShadowSync"](two)
        model = model_of(strategy)
        caplog.clear()
        two.pause("worker", 1)
        checkpoint = tf.train.Checkpoint(workers=strategy.worker_states(model))
        checkpoint.write(str(tmp_path / "copies"))

    undisturbed(two, attempt)
    assert "Worker 1 does not answer; its copies are left out." in caplog.text


def test_a_worker_that_stands_still_when_it_has_finished_holds_no_neighbor(
    two, monkeypatch, caplog
):
    """Its neighbors tell it when they leave; by Hop."""
    leave, told = HopSynchronizer.leave, []

    def leave_when_the_other_stands_still(synchronizer, worker):
        if worker == 0 and not told:
            told.append(worker)
            two.pause("worker", 1)
        leave(synchronizer, worker)

    monkeypatch.setattr(HopSynchronizer, "leave", leave_when_the_other_stands_still)

    def dataset_fn(context):
        return ones(10 if context.input_pipeline_id == 0 else 2)

    def attempt():
        answering(two)
        told.clear()
        caplog.clear()
        strategy = recsync.HopStrategy(two, recsync.topology.ring(2), silence_timeout=LIMIT)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = strategy.distribute_datasets_from_function(dataset_fn)
        model.fit(data, verbose=0)
        assert told
        assert re.search(r"worker:1 has not answered for [1-5]?\d s", caplog.text)
        answering(two)
        model.fit(ones(), verbose=0)

    undisturbed(two, attempt)
