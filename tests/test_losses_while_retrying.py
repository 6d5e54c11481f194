"""Servers and programs that are lost while what was lost before is trained on again."""

import threading

import keras
import pytest
import tensorflow as tf
from helpers import compute_time
from test_checkpoint_deltas import Waiting
from test_retried_batches import (
    BATCHES,
    STRATEGIES,
    Killing,
    batches,
    check_all_are_done,
    counts_of,
    make_model,
)

import tf_recsync as recsync
from tf_recsync import checkpoint

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=3, ps=2)


def in_a_retry(model, action, data):
    """The dataset; something happens, once, when batches are made for those who do what was lost.

    Args:
        model: who trains.
        action: what happens.
        data: the dataset.
    """
    done = []
    lock = threading.Lock()

    def see():
        of_pass = model.train_function._batches  # None while Keras looks at the data.
        with lock:
            if of_pass is not None and of_pass.round and not done:
                done.append(action())

    def passed(*batch):
        with tf.control_dependencies([tf.py_function(see, [], [])]):
            return tf.nest.map_structure(tf.identity, batch)

    return data.map(passed)


@pytest.mark.cases("sync")
@pytest.mark.parametrize("kind", ["async", "sync", "GBA"])
def test_a_worker_that_is_lost_in_a_retry_leaves_nothing_out(cluster, kind):
    strategy = STRATEGIES[kind](cluster)
    model = make_model(strategy)
    data = in_a_retry(model, lambda: cluster.kill("worker", 2), Killing(cluster).seen(batches()))
    with compute_time(strategy, 0.01):
        model.fit(data, verbose=0)
    losses = strategy.losses(model)
    assert losses.workers == 2 and losses.batches == 0
    assert model.train_function._batches.round >= 1
    check_all_are_done(model)
    of_a_step = 1 if kind == "async" else strategy.mode.capacity
    assert (counts_of(model) * of_a_step).min() >= 1 - 1e-6


@pytest.mark.cases("all")
@pytest.mark.parametrize("recovery", ["partial", "all"])
def test_a_parameter_server_that_is_lost_in_a_retry_leaves_nothing_out(cluster, tmp_path, recovery):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    callback = Waiting(tmp_path, every_steps=10, keep=None, recovery=recovery)
    table = next(v for v in model.variables if tuple(v.shape) == (BATCHES, 1))
    lost = tf.DeviceSpec.from_string(table._value.device).task

    def kill():
        cluster.kill("ps", lost)
        threading.Thread(target=cluster.restart, args=("ps", lost)).start()

    data = in_a_retry(model, kill, Killing(cluster).seen(batches()))
    with compute_time(strategy, 0.01):
        history = model.fit(data, epochs=2, verbose=0, callbacks=[callback])
    assert history.epoch == [0, 1]
    assert callback.recoveries == 1 and strategy.losses(model).workers >= 1
    check_all_are_done(model)
    counts = counts_of(model)
    if recovery == "all":  # Else the table lacks what came after the checkpoint.
        assert counts.min() >= 2
    assert counts.max() <= 2 * 2


class Ends(keras.callbacks.Callback):
    """As if the program died after so many batches."""

    def __init__(self, batches):
        super().__init__()
        self._left = batches

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.mark.cases("a worker is lost")
@pytest.mark.parametrize("has_losses", [False, True], ids=["all stay", "a worker is lost"])
def test_programs_that_resume_one_after_the_other_leave_nothing_out(cluster, tmp_path, has_losses):
    # Each dies one epoch later at most, however far workers are when Keras has counted so many.
    saved_at, epochs, repeated = [], 4, 0
    for dies_after in (25, 20, 40, None):
        strategy = recsync.AsyncStrategy(cluster)
        model = make_model(strategy)
        callback = Waiting(tmp_path, every_steps=10, keep=None, at_end=dies_after is None)
        data = Killing(cluster, restart=True).seen(batches()) if has_losses else batches()
        ends = [] if dies_after is None else [Ends(dies_after)]
        with compute_time(strategy, 0.005):
            if dies_after is None:
                model.fit(data, epochs=epochs, verbose=0, callbacks=[callback])
            else:
                with pytest.raises(KeyboardInterrupt):
                    model.fit(data, epochs=epochs, verbose=0, callbacks=[callback, *ends])
        callback._wait()
        losses = strategy.losses(model)
        repeated += losses.repeated + losses.steps
        saved_at.append(checkpoint.open(checkpoint.latest(tmp_path)).global_step)
    assert saved_at == sorted(saved_at)
    counts = counts_of(model)
    assert counts.min() >= epochs
    # What was in a file when a program died is not trained on again.
    assert counts.sum() <= epochs * BATCHES + repeated
    assert has_losses or repeated == 0
