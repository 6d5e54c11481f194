"""Loops beside training: when they may call, when a call is made again, and when they end."""

import contextlib
import threading
import time
import types

import pytest
import tensorflow as tf
from helpers import wait_until

from tf_recsync.synchronization import loops
from tf_recsync.synchronization.loops import Loops

CLUSTER = types.SimpleNamespace(dispatch_scope=contextlib.nullcontext)
SECONDS = 60.0  # That anything may take on a busy machine.
PS, WORKER = ("ps", 0), ("worker", 1)


@pytest.fixture
def failures():
    return []


@pytest.fixture
def some(failures):
    made = Loops("loop_of_a_test", CLUSTER, failures.append)
    made.begin()
    yield made
    made.end()
    made.join(time.monotonic() + SECONDS)
    assert not running()


def running() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loop_of_a_test")]


def calling(some, key, server, until: threading.Event, entered: threading.Event):
    """What a loop does that makes one call."""

    def run():
        with some.call([server], key):
            entered.set()
            until.wait(SECONDS)

    return run


def test_a_loop_runs_once_until_it_ends(some):
    runs = []

    def run():
        runs.append(some.goes_on(("a", 1)))
        some.wait(lambda: not some.goes_on(("a", 1)))

    assert some.start(("a", 1), run)
    assert not some.start(("a", 1), run)
    assert wait_until(lambda: runs == [True], SECONDS) and running() == ["loop_of_a_test_a_1"]
    assert not some.goes_on(("a", 1))  # This is another thread.
    some.end()
    assert wait_until(lambda: not running(), SECONDS)
    assert not some.start(("a", 1), run)
    some.begin()
    assert some.start(("a", 1), run)
    assert wait_until(lambda: runs == [True, True], SECONDS)


def test_in_a_pause_no_call_is_under_way_and_none_begins(some):
    until, first, second = threading.Event(), threading.Event(), threading.Event()
    some.start((1,), calling(some, (1,), PS, until, first))
    assert first.wait(SECONDS)
    assert some.waits_for(0.0) == [PS] and some.waits_for(SECONDS) == []
    inside, begun = threading.Event(), []

    def pause():
        with some.pause():
            inside.set()
            some.start((2,), calling(some, (2,), WORKER, until, second))
            begun.append(second.wait(0.1))

    pausing = threading.Thread(target=pause)
    pausing.start()
    assert wait_until(lambda: some.is_paused, SECONDS)
    assert not inside.wait(0.05)
    until.set()
    pausing.join(SECONDS)
    assert begun == [False] and not some.is_paused
    assert second.wait(SECONDS)


def test_nobody_waits_for_the_call_of_a_loop_that_was_dropped(some, caplog):
    until, entered = threading.Event(), threading.Event()
    some.start((1,), calling(some, (1,), PS, until, entered))
    assert entered.wait(SECONDS)
    some.drop(lambda key: key == (1,))
    assert some.waits_for(0.0) == []
    with some.pause():
        pass
    assert "did not end within" not in caplog.text  # What a pause says that waits for a call.
    # Another one has its place.
    again = threading.Event()
    assert some.start((1,), calling(some, (1,), WORKER, until, again))
    assert again.wait(SECONDS) and some.waits_for(0.0) == [WORKER]
    until.set()
    assert wait_until(lambda: not running(), SECONDS)


def test_what_a_loop_waits_for_is_ended_again_and_again(some):
    ended, asked = threading.Event(), []

    def interrupt():
        asked.append(None)
        if len(asked) == 3:
            ended.set()

    some.start((1,), calling(some, (1,), PS, ended, threading.Event()))
    some.end()
    some.join(time.monotonic() + SECONDS, interrupt)
    # Once more, perhaps, before a thread that is to end has ended.
    assert len(asked) >= 3 and not running()


def test_a_call_is_made_again_so_many_times(some, failures, monkeypatch, caplog):
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    error = tf.errors.InternalError(None, None, "garbled\nand more")
    again = [some.may_try_again("A call fails", error, n) for n in range(1, loops.ATTEMPTS + 1)]
    assert again == [True] * (loops.ATTEMPTS - 1) + [False]
    assert failures == [error]
    assert "A call fails (1 of 4): garbled" in [record.message for record in caplog.records]
    some.end()
    assert not some.may_try_again("A call fails", error, 1) and failures == [error]


def test_a_server_that_is_found_to_be_lost_after_its_call_has_failed_is_not_called_again(
    monkeypatch,
):
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.0)
    called, is_there = [], iter([True, False])

    def call():
        called.append(True)
        raise tf.errors.UnavailableError(None, None, "the connection was cut")

    assert loops.tried_again(call, lambda: next(is_there)) is None
    assert called == [True]


def test_an_error_that_is_none_of_servers_ends_training(some, failures):
    error = ValueError("an algorithm that can't be traced")

    def run():
        raise error

    some.start((1,), run)
    assert wait_until(lambda: failures == [error], SECONDS)
