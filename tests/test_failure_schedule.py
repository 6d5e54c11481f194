"""Servers fail and come back on schedule, and what goes wrong in that is told."""

import pathlib
import threading
import time

import keras
import pytest
import tensorflow as tf
from helpers import (
    AtBatch,
    compiled,
    compute_time,
    mean_output,
    slope_model,
    steps_of,
    wait_until,
)

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.testing import Failure, FailureSchedule


@pytest.fixture
def two(clusters):
    strategy = clusters.strategy(workers=2, ps=1)
    assert all(strategy.cluster.is_alive("worker", i) for i in range(2))
    return strategy


@pytest.fixture(scope="module")
def unkillable():
    """A cluster in this process, not connected: its servers can't be killed."""
    with recsync.LocalCluster(workers=1, ps=1, processes=0) as cluster:
        yield cluster


def train(strategy, steps, seconds, callbacks=()):
    """Trains; every step takes exactly 1 off the only weight. Returns the steps done."""
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(steps)
    with compute_time(strategy, seconds):
        model.fit(ones, callbacks=list(callbacks), verbose=0)
    assert model.get_weights()[0] == -steps_of(model)
    return steps_of(model)


def state(pid: int) -> str:
    """The state of a process: T when it is stopped."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class StopWhen(keras.callbacks.Callback):
    """Ends the training when `condition()` holds."""

    def __init__(self, condition):
        super().__init__()
        self._condition = condition

    def on_train_batch_end(self, batch, logs=None):
        if self._condition():
            self.model.stop_training = True


def test_a_worker_is_killed_and_restarted_at_its_steps(two, caplog):
    events = [(40, "restart", "worker", 1), Failure(10, "kill", "worker", 1)]
    stop = StopWhen(lambda: "worker:1 is back" in caplog.text)
    with FailureSchedule(two.cluster, events, unit="steps") as failures:
        # For 150 s at least, if the worker does not come back.
        done = train(two, 3000, 0.05, [failures, stop])
    assert 40 <= done < 3000
    assert [event for _, event in failures.happened] == [Failure(*e) for e in reversed(events)]
    assert failures.happened[0][0] < failures.happened[1][0]
    assert "worker:1 was lost" in caplog.text and "worker:0 was lost" not in caplog.text
    assert train(two, 30, 0.0) == 30


def test_a_stopped_worker_stands_still_and_goes_on_at_its_time(two, monkeypatch):
    pid = two.cluster.pid("worker", 0)
    train(two, 10, 0.0)  # So that the steps of the next fit begin soon.
    states, resume = [], two.cluster.resume

    def look_and_resume(job, index):
        states.append(state(pid))
        resume(job, index)

    monkeypatch.setattr(two.cluster, "resume", look_and_resume)
    events = [(2.0, "stop", "worker", 0), (4.0, "continue", "worker", 0)]
    with FailureSchedule(two.cluster, events) as failures:
        # 160 steps of 50 ms take two workers 4 s, and one of them 8 s.
        assert train(two, 160, 0.05, [failures]) == 160  # None is lost.
        assert wait_until(lambda: len(failures.happened) == 2, 60.0)
    assert states == ["T"]
    assert state(pid) != "T"
    assert [event.action for _, event in failures.happened] == ["stop", "continue"]


def test_seconds_count_from_the_beginning_and_the_rest_is_dropped(two):
    pid = two.cluster.pid("worker", 0)
    events = [
        (0.6, "continue", "worker", 0),
        (0.2, "stop", "worker", 0),
        (600, "kill", "worker", 0),
    ]
    started = time.monotonic()
    with FailureSchedule(two.cluster, events) as failures:
        assert wait_until(lambda: len(failures.happened) == 2, 60.0)
    assert time.monotonic() - started >= 0.6
    assert [event.action for _, event in failures.happened] == ["stop", "continue"]
    for (happened, event), planned in zip(failures.happened, (0.2, 0.6), strict=True):
        assert event.when == planned <= happened
    assert state(pid) != "T" and two.cluster.is_alive("worker", 0)
    assert "recsync_failures" not in {thread.name for thread in threading.enumerate()}


def test_an_event_that_fails_is_an_error_of_the_block(unkillable):
    schedule = FailureSchedule(unkillable, [(0, "kill", "worker", 0), (0, "stop", "ps", 0)])
    error = pytest.raises(RuntimeError, match="scheduled failure.*worker:0 runs in this process")
    with error, schedule:
        assert wait_until(lambda: schedule._error is not None, 50.0)
    assert schedule.happened == []


def test_an_event_that_fails_is_an_error_of_fit_if_fit_knows_the_schedule(two, unkillable):
    schedule = FailureSchedule(unkillable, [(5, "kill", "worker", 0)], unit="steps")
    reached = []
    error = pytest.raises(RuntimeError, match="scheduled failure.*worker:0 runs in this process")
    with schedule, error:
        train(two, 4000, 0.05, [schedule, AtBatch(3000, lambda: reached.append(1))])
    assert not reached


def test_an_error_of_the_block_itself_goes_first(unkillable, caplog):
    schedule = FailureSchedule(unkillable, [(0, "kill", "worker", 0)])
    with pytest.raises(KeyError, match="a user's mistake"), schedule:
        assert wait_until(lambda: schedule._error is not None, 50.0)
        raise KeyError("a user's mistake")
    assert "worker:0 runs in this process" in caplog.text


def test_schedules_used_wrongly_say_so(two):
    forgotten = FailureSchedule(two.cluster, [(5, "kill", "worker", 0)], unit="steps")
    with pytest.raises(RuntimeError, match="counted no steps.*callbacks"), forgotten:
        train(two, 10, 0.0)
    outside = FailureSchedule(two.cluster, [(5, "kill", "worker", 0)], unit="steps")
    with pytest.raises(RuntimeError, match="`with` block around fit"):
        train(two, 10, 0.0, [outside])
    with outside:
        train(two, 3, 0.0, [outside])
    with pytest.raises(RuntimeError, match="used once"):
        outside.__enter__()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ((1.0, "kill", "worker"), r"must be \(when, action, job, index\) tuples, got"),
        (3, r"must be \(when, action, job, index\) tuples, got 3"),
        (
            ("soon", "kill", "worker", 0),
            "the time of the event .* must be .* at least 0, not 'soon'",
        ),
        (
            (-1.0, "kill", "worker", 0),
            "the time of the event .* must be .* at least 0, not -1.0",
        ),
        (
            (float("inf"), "kill", "worker", 0),
            "the time of the event .* must be .* at least 0, not inf",
        ),
        ((1.0, "hurt", "worker", 0), "action must be one of .*'continue'.*, got .*'hurt'"),
        ((1.0, "kill", "chief", 0), "must name a server of LocalCluster.*got .*'chief'"),
        ((1.0, "kill", "worker", 1), "the index of the event .* must be .* from 0 to 0, got 1"),
    ],
)
def test_wrong_events_are_refused(unkillable, event, message):
    with pytest.raises(ValueError, match=message):
        FailureSchedule(unkillable, [event])


def test_wrong_arguments_are_refused(unkillable):
    with pytest.raises(ValueError, match="cluster must be a LocalCluster, got None"):
        FailureSchedule(None, [])
    with pytest.raises(ValueError, match="unit must be 'seconds' or 'steps', got 'hours'"):
        FailureSchedule(unkillable, [], unit="hours")
    for action in ("stop", "continue"):
        with pytest.raises(ValueError, match=f"'{action}' needs unit='seconds'"):
            FailureSchedule(unkillable, [(1, action, "worker", 0)], unit="steps")
