"""A pass takes few calls of the coordinator to each worker."""

import collections
import threading

import pytest
import tensorflow as tf
from helpers import compiled, mean_output, slope_model
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.strategies.worker_functions import Repeated

WORKERS = 2
BATCH = tf.ones([2, 1]), tf.ones([2, 1])


@pytest.fixture
def calls_to_workers(monkeypatch):
    """Counts operations, functions among them, that this process has workers run, by name."""
    counted, lock = collections.Counter(), threading.Lock()

    def note(device, name):
        if "/job:worker" in (device or ""):
            with lock:
                counted[name] += 1

    for name in ("TFE_Py_Execute", "TFE_Py_ExecuteCancelable"):
        execute = getattr(pywrap_tfe, name)

        def on_device(handle, device, op, *others, execute=execute):
            note(device or context.context().device_name, op)
            return execute(handle, device, op, *others)

        monkeypatch.setattr(pywrap_tfe, name, on_device)
    fast = pywrap_tfe.TFE_Py_FastPathExecute

    def in_scope(ctx, op, *others):
        note(context.context().device_name, op)
        return fast(ctx, op, *others)

    monkeypatch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", in_scope)
    return counted


@pytest.fixture
def strategy(clusters):
    return recsync.AsyncStrategy(clusters.get(workers=WORKERS, ps=1))


@pytest.fixture
def model(strategy):
    return compiled(strategy, slope_model, lambda: SGD(0.01), mean_output)


@pytest.mark.parametrize("data", ["of this process", "of each worker"])
def test_a_pass_of_a_batch_takes_ten_calls_a_worker(strategy, model, data, calls_to_workers):
    if data == "of this process":
        data = tf.data.Dataset.from_tensors(BATCH).repeat(WORKERS)
    else:
        data = strategy.distribute_datasets_from_function(
            lambda _: tf.data.Dataset.from_tensors(BATCH)
        )
    for _ in range(2):  # Traces, and has servers build their parts.
        model.fit(data, verbose=0)
    calls_to_workers.clear()
    model.fit(data, verbose=0)
    assert 4 * WORKERS <= calls_to_workers.total() <= 10 * WORKERS, calls_to_workers


def test_servers_build_their_parts_of_a_function_anew_when_one_of_them_has_been_taken_in():
    class State:
        inputs = ()

    built = []
    function = Repeated(lambda iterator: built.append(iterator), None)
    one, other = ("worker", 0), ("worker", 1)
    begun = [(one, 2), (other, 2), (one, 2), (one, 3), (other, 3), (one, 3)]
    for iterator, (worker, lives_begun) in enumerate(begun):
        function.build(iterator, State(), worker, lives_begun)
    assert built == [0, 1, 3, 4]


def test_what_could_not_be_built_is_built_later():
    class State:
        inputs = ()

    attempts = []

    def once(iterator):
        attempts.append(iterator)
        if len(attempts) == 1:
            raise tf.errors.UnavailableError(None, None, "gone")
        raise tf.errors.OutOfRangeError(None, None, "no batch")

    function = Repeated(once, None)
    with pytest.raises(tf.errors.UnavailableError):
        function.build(None, State(), ("worker", 0), 1)
    for _ in range(2):
        function.build(None, State(), ("worker", 0), 1)
    assert len(attempts) == 2
