"""Calls in which a worker does many steps by itself."""

import itertools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, compute_time, mean_output, slope_model

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import model_functions, worker_functions, worker_run


@pytest.fixture
def two(clusters):
    cluster = clusters.get(workers=2, ps=1)
    cluster.connect()
    return cluster


class Calls:
    """A pass of workers that do nothing but wait, and the numbers of steps that they were given.

    Args:
        cluster: the cluster.
        seconds: of a step, by worker.
        unit: steps of a call, at least.
        end: so many steps there are in the data.
    """

    def __init__(self, cluster, seconds, unit=1, end=float("inf"), **arguments):
        self.given: list[list[int]] = [[] for _ in seconds]
        self._seconds = seconds
        self._left = end
        self._lock = threading.Lock()
        self.slow = 0.0  # Seconds that a call lasts besides.
        self.run = worker_run.WorkerRun(
            cluster, lambda slot: None, self._call, unit, lambda: False, 60.0, 60.0, **arguments
        )

    def _call(self, slot, steps):
        with self._lock:
            done = int(min(steps, self._left))
            self._left -= done
        time.sleep(done * self._seconds[slot.index] + self.slow)
        self.given[slot.index].append(steps)
        return done, done < steps, None

    def do(self, steps) -> None:
        self.run.grant(steps)
        assert not self.run.wait(float("inf"))

    @property
    def all(self) -> list[int]:
        return list(itertools.chain(*self.given))


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def test_calls_grow_until_they_last_a_quarter_of_a_second_and_shrink_towards_the_end(two):
    calls = Calls(two, [0.001, 0.001])
    calls.do(3000)
    calls.run.stop()
    assert calls.run.completed == sum(calls.all) == 3000
    for given in calls.given:
        assert given[:4] == [1, 2, 4, 8]
        assert 32 <= max(given) <= 256 and all(map(is_power_of_two, given))
        assert given[-1] == 1


def test_calls_of_long_steps_have_one_step_each(two):
    calls = Calls(two, [0.3, 0.3])
    calls.do(6)
    calls.run.stop()
    assert set(calls.all) == {1}


def test_a_call_has_whole_multiples_of_the_steps_that_keras_counts_at_once(two):
    calls = Calls(two, [0.001, 0.001], unit=5)
    calls.do(1003)
    calls.run.stop()
    assert calls.run.completed == 1003
    assert sorted(n for n in calls.all if n % 5) == [3]
    assert max(calls.all) > 5


def test_one_slow_call_does_not_make_the_next_ones_short_for_good(two):
    calls = Calls(two, [0.001, 0.001])
    calls.do(1000)
    calls.slow = 1.0
    calls.do(2)
    calls.slow = 0.0
    calls.do(1000)
    calls.run.stop()
    assert max(calls.given[0][-15:]) >= 32


def test_a_slow_worker_is_not_given_what_a_fast_one_could_have_done_meanwhile(two):
    """Towards the end of its steps an epoch waits for a call of the slow worker at most."""
    calls = Calls(two, [0.001, 0.05])
    calls.do(400)
    ends = time.monotonic()
    calls.do(400)
    calls.run.stop()
    seconds = time.monotonic() - ends
    fast, slow = map(sum, calls.given)
    assert fast > 5 * slow
    # All of the fast one's would take 0.4 s; each of the slow one's, 0.05 s.
    assert seconds < 2.0


def test_calls_end_with_the_data_and_no_step_is_counted_twice(two):
    calls = Calls(two, [0.001, 0.001], end=777)
    calls.do(float("inf"))
    calls.run.stop()
    assert calls.run.completed == 777


def data_of(batches):
    ones = tf.ones([2, 1])
    return tf.data.Dataset.from_tensors((ones, ones)).repeat(batches)


def model_of(strategy, **arguments):
    """A model of which each step of a batch takes 1 off the weight."""
    return compiled(strategy, slope_model, lambda: SGD(1.0), mean_output, **arguments)


def weight_of(model) -> float:
    return float(model.get_weights()[0].item())


def test_so_many_steps_as_keras_asks_for_are_done_on_uneven_workers(clusters):
    cluster = clusters.get(workers=4, ps=1)
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    done = []
    slow = recsync.testing.SlowWorkers(10.0, [3])
    with compute_time(strategy, 0.004, slow):
        for epoch in range(2):
            model.fit(data_of(None), steps_per_epoch=101, verbose=0)
            assert weight_of(model) == -101 * (epoch + 1)
            done.append(model.train_function.worker_steps())
    for steps in done:
        assert sum(steps) == 101
        assert max(steps) > 2 * steps[3]


def test_a_call_lasts_no_longer_than_its_limit_and_does_one_turn_at_least():
    @tf.function(autograph=False)
    def call(times, seconds, limit):
        def once():
            tf.py_function(lambda: time.sleep(seconds), [], [])

        return worker_functions.turns(once, times, limit)

    assert call(tf.constant(7, tf.int64), 0.0, 60.0) == 7
    assert 2 <= call(tf.constant(1000, tf.int64), 0.05, 0.3) <= 7
    assert call(tf.constant(1000, tf.int64), 0.2, 0.1) == 1


def test_a_worker_that_becomes_slow_in_a_long_call_keeps_nobody_waiting(two):
    """Its call ends at its limit, and others do what is left of it."""
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy)
    slow = recsync.testing.ChangingSlowdown([(0.0, 1.0), (1.5, 1.0), (1.6, 100.0), (900.0, 100.0)])
    ends = []

    class Weights(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 100 == 0 and len(ends) < 20:  # Holds the steps in flight.
                began = time.monotonic()
                assert self.model.get_weights()
                ends.append(time.monotonic() - began)
                self.model.stop_training = len(ends) == 20 or batch > 1000

    with compute_time(strategy, 0.002, slow):
        model.fit(data_of(None), steps_per_epoch=3000, callbacks=[Weights()], verbose=0)
    # Many steps of 0.2 s were in hand.
    assert max(ends) < 15.0


@pytest.mark.parametrize("steps_per_execution", [1, 5, 8, 10])
def test_of_a_call_that_is_lost_with_its_worker_all_steps_count_that_servers_have_applied(
    two, steps_per_execution
):
    """What remains of it others do: the steps that it had begun alone may be done once more."""
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy, steps_per_execution=steps_per_execution)
    kill = AtBatch(100 // steps_per_execution, lambda: two.kill("worker", 1))
    with compute_time(strategy, 0.004):
        model.fit(data_of(None), steps_per_epoch=400, callbacks=[kill], verbose=0)
    losses = strategy.losses(model)
    assert losses.workers == 1
    assert 400 <= -weight_of(model) <= 400 + losses.steps
    assert losses.steps <= min(steps_per_execution, worker_functions.MOST_UNROLLED)
    assert sum(strategy.worker_steps(model)) == 400
    two.restart("worker", 1)


@pytest.mark.parametrize("steps", [5, 8, 40])
def test_many_steps_of_an_execution_are_one_call(two, steps, monkeypatch):
    monkeypatch.setattr(model_functions, "_UNROLL_SHARE", 2)
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy, steps_per_execution=steps)
    seen = []
    count = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(b))
    model.fit(data_of(1203), callbacks=[count], verbose=0)
    assert weight_of(model) == -1203
    assert sum(model.train_function.worker_steps()) == 1203
    assert len(seen) == -(-1203 // steps)


def test_short_steps_are_unrolled_while_they_run(two, monkeypatch):
    monkeypatch.setattr(model_functions, "_UNROLL_SHARE", 2)
    trace, traced = worker_functions.trace_steps, []

    def trace_steps(model, layout, method, spec, steps, *arguments):
        traced.append((method, steps))
        return trace(model, layout, method, spec, steps, *arguments)

    monkeypatch.setattr(worker_functions, "trace_steps", trace_steps)
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy)
    for _ in range(2):
        model.fit(data_of(None), steps_per_epoch=1501, verbose=0)
    assert weight_of(model) == -3002
    assert traced == [("train_step", 1), ("train_step", worker_functions.MOST_UNROLLED)]
    dense = strategy.staleness(model).dense
    assert dense.count == 3002 and 1 <= dense.mean <= 2
    np.testing.assert_array_equal(model.optimizer.iterations.numpy(), 3002)
