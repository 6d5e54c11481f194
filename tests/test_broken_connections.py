"""Connections to servers that break while the servers live."""

import contextlib
import re
import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compiled, compute_time, mean_output, slope_model, wait_until
from tensorflow.python.eager import context

import tf_recsync as recsync
from tf_recsync.cluster import device_of, is_reachable
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import (
    model_functions,
    registered_dataset,
    worker_functions,
    worker_run,
)
from tf_recsync.strategies.leases import Leases
from tf_recsync.strategies.slots import Losses
from tf_recsync.synchronization.remote_functions import traced_once

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

STEPS = 20  # Of a pass, and at least of one that lasts until a worker is back.


@pytest.fixture
def two(clusters):
    cluster = clusters.get(workers=2, ps=1)
    cluster.connect()
    wait_for_worker()
    yield cluster
    cluster.resume("worker", 1)


def wait_for_worker() -> None:
    """Waits until worker 1 is reached again: gRPC lets calls fail for a while after a cut."""
    assert wait_until(lambda: is_reachable(device_of("worker", 1)), 100.0)


@contextlib.contextmanager
def cutting(cluster, period: float, seconds: float, is_to_the_end: bool = False):
    """Ends the connections to worker 1 again and again, for so long, or at least, to the end."""
    is_over = threading.Event()

    def cut():
        end = time.monotonic() + seconds
        while time.monotonic() < end or (is_to_the_end and not is_over.is_set()):
            cluster.cut_off("worker", 1)
            time.sleep(period)
        cluster.resume("worker", 1)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def model_of(strategy):
    """A model of which each step of a batch takes 1 off the weight."""
    return compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)


def weight_of(model) -> float:
    return float(model.get_weights()[0].item())


def fit(strategy, model, data=None) -> None:
    """Trains so many steps, each of which leaves something over for the other worker."""
    if data is None:
        data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat(STEPS)
    with compute_time(strategy, 0.1):
        model.fit(data, verbose=0)


def train(strategy) -> float:
    """Returns the weight."""
    model = model_of(strategy)
    fit(strategy, model)
    return weight_of(model)


class UntilBack:
    """Batches of a pass that does not end before worker 1 is back, or after some minutes.

    If lost ones are done once more, they are read from a pass of as many.
    """

    def __init__(self, caplog):
        self._caplog = caplog
        self.given = 0  # So many.

    def dataset(self) -> tf.data.Dataset:
        ones = tf.TensorSpec([2, 1])
        return tf.data.Dataset.from_generator(self._batches, output_signature=(ones, ones))

    def _batches(self):
        least, number = max(self.given, STEPS), 0
        while number < least or (number < 3000 and "worker:1 is back" not in self._caplog.text):
            number += 1
            self.given = max(self.given, number)
            yield np.ones([2, 1], np.float32), np.ones([2, 1], np.float32)


def train_until_back(strategy, caplog) -> None:
    """Checks that each batch is trained on once, though worker 1 was lost and is back."""
    model, batches = model_of(strategy), UntilBack(caplog)
    fit(strategy, model, batches.dataset())
    assert "worker:1 is back" in caplog.text
    assert weight_of(model) == -batches.given
    assert batches.given >= STEPS


@pytest.mark.cases("SyncStrategy-10")
@pytest.mark.parametrize("make,updates", [(recsync.AsyncStrategy, 20), (recsync.SyncStrategy, 10)])
def test_training_goes_on_whenever_a_connection_breaks(two, caplog, make, updates):
    strategy = make(two)
    two.tell_members()  # What happened in the test before.
    caplog.clear()
    # While functions are traced and sent to the workers, and while they run: a busy machine may
    # trace for as long as connections are cut, so that nobody is lost.
    rounds = 0
    while rounds < 2 or (rounds < 20 and "worker:1 was lost" not in caplog.text):
        rounds += 1
        model, before, losses = model_of(strategy), 0.0, Losses()
        for _ in range(3):
            with cutting(two, period=0.002, seconds=0.6):
                fit(strategy, model)
            # A lost worker's steps in flight are lost with their batches, or only the news of
            # them: then others do these batches once more, and those that it had done unheard.
            done, before = before - weight_of(model), weight_of(model)
            earlier, losses = losses, strategy.losses(model)
            lost, repeated, steps = (
                getattr(losses, name) - getattr(earlier, name)
                for name in ("workers", "repeated", "steps")
            )
            most = updates + (repeated + steps) * updates / STEPS
            assert updates - 6 * max(lost, 1) <= done <= most
    told = re.findall(r"worker:1 (was lost|is back)", caplog.text)
    if told[0] == "is back":
        del told[0]  # The test before had lost it.
    assert told.count("was lost") >= max(told.count("is back"), 1)


@pytest.mark.parametrize("is_open", [False, True], ids=["between epochs", "in a pass"])
def test_a_connection_that_breaks_during_evaluation_costs_nobody_a_copy(two, monkeypatch, is_open):
    """Neither worker could go on without the other."""
    # A worker that lacks functions has to begin anew: all of them are there before the first step.
    monkeypatch.setattr(model_functions.Steps, "most_unrolled", 1)
    strategy = recsync.HopStrategy(two, recsync.topology.ring(2))
    model = compiled(strategy, slope_model, lambda: keras.optimizers.SGD(0.01), mean_output)
    ones = tf.data.Dataset.from_tensors((np.ones([2, 1]), np.ones([2, 1])))
    steps = STEPS if is_open else None
    # With `steps_per_epoch`, the pass is open while the model is evaluated.
    data = ones.repeat() if is_open else ones.repeat(STEPS)

    class Cuts(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if batch in (5, 6, 7):
                two.cut_off("worker", 1)

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            before = strategy.copies(model)
            model.evaluate(ones.repeat(200), callbacks=[Cuts()], verbose=0)
            wait_for_worker()
            for old, new in zip(before, strategy.copies(model), strict=True):
                np.testing.assert_array_equal(old[0], new[0])

    model.fit(data, steps_per_epoch=steps, epochs=2, callbacks=[Evaluates()], verbose=0)
    assert strategy.losses(model).workers == 0
    assert None not in strategy.copies(model)


def while_unreachable(cluster, function):
    """Has `function` run while worker 1 can't be reached, whenever it is called."""

    def run(*args, **kwargs):
        cluster.pause("worker", 1)
        # First of all: what reaches a stopped server before the cut, it may read when it goes on.
        cluster.cut_off("worker", 1)
        with cutting(cluster, period=0.1, seconds=2.0, is_to_the_end=True):
            result = function(*args, **kwargs)
        wait_for_worker()
        return result

    return run


def test_a_worker_gets_functions_that_were_traced_while_it_could_not_be_reached(
    two, caplog, monkeypatch
):
    traced = while_unreachable(two, worker_functions.trace_steps)
    monkeypatch.setattr(worker_functions, "trace_steps", traced)
    # Whichever shows first: that it lacks the function, or the connection that was cut before.
    train_until_back(recsync.AsyncStrategy(two), caplog)


def test_a_worker_gets_functions_of_datasets_that_were_made_while_it_could_not_be_reached(
    two, caplog, monkeypatch
):
    # What a worker runs to take its batches from the data service; here each has its own.
    trace, made = registered_dataset._joining.__wrapped__, []

    def make(*key):
        return traced_once(trace)(*key)

    unreachable = while_unreachable(two, make)

    def make_some_meanwhile(*key):
        is_early = device_of("worker", 1) in context.context().device_name and not made
        if is_early:
            made.append(True)
        return (unreachable if is_early else make)(*key)

    monkeypatch.setattr(registered_dataset, "_joining", make_some_meanwhile)
    train_until_back(recsync.AsyncStrategy(two), caplog)
    assert made == [True]


def test_a_connection_that_breaks_all_the_time_ends_the_run(two, caplog):
    calls = []

    def call(slot, steps):
        calls.append(slot.index)
        if slot.index == 0:
            return steps, False, None
        raise tf.errors.UnavailableError(None, None, "the network is down")

    batches = types.SimpleNamespace(
        data=types.SimpleNamespace(readers=0),
        distributed=types.SimpleNamespace(check_retries=lambda: None),
        retries=False,
        recounts=False,
        round=0,
    )
    leases = Leases(1, None, two.workers)
    run = worker_run.WorkerRun(
        two, leases, batches, lambda slot: None, call, lambda: False, 60.0, 60.0
    )
    run.grant(float("inf"))
    with pytest.raises(tf.errors.UnavailableError, match="the network is down"):
        run.wait(float("inf"))
    run.stop()
    assert calls.count(1) == 1 + caplog.text.count("worker:1 is back") == 6


def test_what_was_on_a_server_that_is_readmitted_anew_is_gone_and_all_else_stays(two):
    variables = {}
    for job in ("worker", "ps"):
        with tf.device(device_of(job, 0)):
            variables[job] = tf.Variable(7.0)
    add = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([]))
    two.readmit(anew=[("worker", 0)])
    with pytest.raises(tf.errors.OpError):
        variables["worker"].numpy()
    assert variables["ps"].numpy() == 7.0
    for index in range(2):
        with tf.device(device_of("worker", index)):
            assert add(tf.constant(1.0)).numpy() == 2.0


@pytest.mark.parametrize("wrong", [("worker", 2), ("chief", 0), ("ps", -1), ("evaluator", 0)])
def test_only_servers_of_the_cluster_are_readmitted_anew(two, wrong):
    with pytest.raises(ValueError, match="anew must name servers"):
        two.readmit(anew=[wrong])
    with pytest.raises(ValueError, match="each once"):
        two.readmit(anew=[("ps", 0), ("ps", 0)])


def break_connection(cluster) -> None:
    """Leaves the parameter server without a connection that gRPC would use at once."""
    cluster.pause("ps", 0)
    try:
        # Its listener still takes connections, of which nothing comes: attempts that fail.
        for _ in range(3):
            cluster.cut_off("ps", 0)
            cluster.probe("ps", 0).join(0.3)
        cluster.cut_off("ps", 0)
    finally:
        cluster.resume("ps", 0)


def test_connecting_again_waits_for_a_parameter_server_whose_connection_has_broken(two):
    two.connect()
    with tf.device(device_of("ps", 0)):
        kept = tf.Variable(7.0)
    break_connection(two)
    strategy = recsync.AsyncStrategy(two)
    assert train(strategy) == -STEPS
    assert kept.numpy() == 7.0


def test_connecting_again_names_a_parameter_server_that_stands_still(two):
    two.connect()
    two.pause("ps", 0)
    try:
        address = re.escape(two.cluster_spec.task_address("ps", 0))
        with pytest.raises(RuntimeError, match=rf"within timeout=1 s: ps:0 \({address}\)"):
            two.connect(timeout=1.0)
    finally:
        two.resume("ps", 0)
    two.connect()


def test_connecting_again_readmits_a_parameter_server_that_was_started_again(two):
    assert train(recsync.AsyncStrategy(two)) == -STEPS
    two.kill("ps", 0)
    two.restart("ps", 0)
    assert train(recsync.AsyncStrategy(two)) == -STEPS
