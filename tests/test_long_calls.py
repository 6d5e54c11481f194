"""Calls in which a worker does many steps by itself."""

import collections
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, compute_time, held_back, mean_output, slope_model

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import model_functions, worker_functions


@pytest.fixture
def two(clusters):
    cluster = clusters.get(workers=2, ps=1)
    cluster.connect()
    return cluster


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
    with compute_time(strategy, 0.02, slow):
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
        def once(told):
            assert told is None
            tf.py_function(lambda: time.sleep(seconds), [], [])

        return worker_functions.turns(once, times, limit)[0]

    assert call(tf.constant(7, tf.int64), 0.0, 60.0) == 7
    # On a busy machine the first turn alone may last so long.
    assert 1 <= call(tf.constant(1000, tf.int64), 0.05, 0.3) <= 7
    assert call(tf.constant(3, tf.int64), 0.05, 60.0) == 3
    assert call(tf.constant(1000, tf.int64), 0.2, 0.1) == 1


def test_a_call_ends_after_the_turn_in_which_it_is_told_to():
    told = tf.Variable([3, 0], dtype=tf.int64)

    @tf.function(autograph=False)
    def call(times, ends):
        seen = []

        def once(before):
            done = tf.py_function(lambda now: seen.append(now) or len(seen), [before], tf.int64)
            # The second number ends nothing.
            return tf.cond(
                done == ends, lambda: told.assign_add([1, 1]), lambda: told.assign_add([0, 1])
            )

        return worker_functions.turns(once, times, 60.0, told.read_value())

    done, last = call(tf.constant(1000, tf.int64), tf.constant(5, tf.int64))
    assert (int(done), last.numpy().tolist()) == (5, [4, 5])
    # Told before: no matter.
    done, last = call(tf.constant(7, tf.int64), tf.constant(-1, tf.int64))
    assert (int(done), last.numpy().tolist()) == (7, [4, 12])


def test_a_pass_of_short_steps_is_few_calls_of_which_keras_sees_the_steps(two, monkeypatch):
    run, calls = worker_functions.Repeated.__call__, []

    def counted(self, iterator, times, state):
        calls.append(times)
        return run(self, iterator, times, state)

    monkeypatch.setattr(worker_functions.Repeated, "__call__", counted)
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy)
    seen, shown = [], []

    class Looks(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            shown.append((sum(strategy.worker_steps(self.model)), len(calls)))

    with compute_time(strategy, 0.002):
        model.fit(data_of(2000), callbacks=[Looks()], verbose=0)
    assert weight_of(model) == -2000
    assert seen == list(range(2000))
    # What opened the workers; one step and all others of each; what a faster one has left; and
    # whenever one stood still on a busy machine, what others were given of its steps.
    assert len(calls) < 60
    # Steps are known while their call goes on: many between two calls, whichever is a long one.
    known = collections.defaultdict(set)
    for steps, number in shown:
        known[number].add(steps)
    assert max(len(steps) for steps in known.values()) > 3
    calls.clear()
    with compute_time(strategy, 0.002):
        model.fit(data_of(None), steps_per_epoch=2000, verbose=0)
    assert weight_of(model) == -4000
    # Each has a quarter of what is left, down to single steps: 37, and more for what is given back.
    assert len(calls) < 150


class LateSlowdown(recsync.testing.Slowdown):
    """One worker takes 300 times as long from its eleventh step on."""

    def factor(self, worker, step, seconds):
        return tf.where((worker == 3) & (step >= 10), 300.0, 1.0)


@pytest.mark.full
def test_workers_that_have_nothing_to_do_get_what_a_slow_one_has_before_it(clusters):
    cluster = clusters.get(workers=4, ps=1)
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    with compute_time(strategy, 0.003, LateSlowdown()):
        model.fit(data_of(None), steps_per_epoch=4000, verbose=0)
    done = strategy.worker_steps(model)
    assert sum(done) == 4000 == -weight_of(model)
    # It took a power of two near an eighth of all: minutes of its own steps.
    assert 10 < done[3] < 128


def test_a_worker_that_becomes_slow_in_a_long_call_keeps_nobody_waiting(two):
    """Its call ends at its limit, and others do what is left of it."""
    # Many of what are steps of 0.2 s now were in hand: to do them all would take a minute, which
    # is the limit of a call, and to end the steps in flight takes two seconds. More than once only
    # if a server stands still meanwhile, on a busy machine.
    assert any(longest_wait_for_slow_steps(two) < 40.0 for _ in range(5))


def longest_wait_for_slow_steps(two) -> float:
    """For how long variables are waited for at most when workers have become slow."""
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy)
    slow = recsync.testing.ChangingSlowdown([(400, 1.0), (401, 100.0)], unit="steps")
    seconds, began = [], []

    class Reads(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            asked = time.monotonic()
            if batch < 400:
                return
            began.append(asked)
            assert self.model.get_weights()  # Waits for the steps in flight.
            seconds.append(time.monotonic() - asked)
            self.model.stop_training = asked - began[0] > 4.0

    with compute_time(strategy, 0.002, slow):
        model.fit(data_of(None), steps_per_epoch=100_000, callbacks=[Reads()], verbose=0)
    assert weight_of(model) < -400
    return max(seconds)


@pytest.mark.cases("5", "10")
@pytest.mark.parametrize("steps_per_execution", [1, 5, 8, 10])
def test_of_a_call_that_is_lost_with_its_worker_all_steps_count_that_servers_have_applied(
    two, steps_per_execution
):
    """What remains of it others do: the steps that it had begun alone may be done once more."""
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy, steps_per_execution=steps_per_execution)
    kill = AtBatch(100 // steps_per_execution, lambda: two.kill("worker", 1))
    data = held_back(data_of(None), 350, lambda: strategy.losses(model).workers)
    with compute_time(strategy, 0.004):
        model.fit(data, steps_per_epoch=400, callbacks=[kill], verbose=0)
    losses = strategy.losses(model)
    assert losses.workers == 1
    assert 400 <= -weight_of(model) <= 400 + losses.steps
    assert losses.steps <= min(steps_per_execution, worker_functions.MOST_UNROLLED)
    assert sum(strategy.worker_steps(model)) == 400
    two.restart("worker", 1)


def test_of_a_call_that_is_lost_with_the_only_worker_all_applied_steps_count_too(clusters):
    cluster = clusters.get(workers=1, ps=1)
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)

    def kill():
        cluster.kill("worker", 0)
        threading.Timer(0.5, cluster.restart, ["worker", 0]).start()

    with compute_time(strategy, 0.004):
        model.fit(data_of(None), steps_per_epoch=400, callbacks=[AtBatch(100, kill)], verbose=0)
    losses = strategy.losses(model)
    assert losses.workers == 1
    assert 400 <= -weight_of(model) <= 400 + losses.steps
    assert losses.steps <= worker_functions.MOST_UNROLLED


@pytest.mark.cases("40")
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

    def trace_steps(model, layout, method, spec, lookups, steps, *arguments):
        traced.append((method, steps))
        return trace(model, layout, method, spec, lookups, steps, *arguments)

    monkeypatch.setattr(worker_functions, "trace_steps", trace_steps)
    strategy = recsync.AsyncStrategy(two)
    model = model_of(strategy)
    began, unrolled_at = time.monotonic(), []

    class UntilUnrolled(tf.keras.callbacks.Callback):
        """How long that takes depends on how long it took to trace one step."""

        def on_train_batch_end(self, batch, logs=None):
            assert time.monotonic() - began < 240
            if len(traced) > 1 and not unrolled_at:
                unrolled_at.append(batch)
            self.model.stop_training = bool(unrolled_at) and batch > unrolled_at[0] + 300

    model.fit(data_of(None), steps_per_epoch=1_000_000, callbacks=[UntilUnrolled()], verbose=0)
    model.fit(data_of(None), steps_per_epoch=1501, verbose=0)
    assert traced == [("train_step", 1), ("train_step", worker_functions.MOST_UNROLLED)]
    steps = -weight_of(model)
    assert steps > unrolled_at[0] + 300 + 1501
    dense = strategy.staleness(model).dense
    assert dense.count == steps and 1 <= dense.mean <= 2
    np.testing.assert_array_equal(model.optimizer.iterations.numpy(), steps)
