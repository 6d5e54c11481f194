"""Loops of this process that call servers beside the steps of training.

A shadow's loop, one that takes a group's server from one iteration to the next, and one that
carries what a worker tells its neighbor: each is a thread that calls servers again and again,
stands still while a server is taken into the cluster again, makes a call anew that failed by
chance, and ends with the epoch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Server, reason

ATTEMPTS = 5  # At a call that fails though everybody is there, the first one included.
RETRY_SECONDS = 0.5  # Between two of them.
PAUSE_SECONDS = 10.0  # How long calls that are under way may take to end.
JOIN_SECONDS = 60.0  # And loops, at the end of an epoch.
_INTERRUPT_SECONDS = 0.1  # Between two attempts to end what they wait for.

Told = TypeVar("Told")


def tried_again(call: Callable[[], Told], goes_on: Callable[[], bool]) -> Told | None:
    """Makes a call to a server that nobody else would make, and again while it fails.

    For about a second after a connection broke, calls fail also to a server that is there.

    Args:
        call: the call.
        goes_on: whether it is made again, asked when it has failed, and before it is: of a server
            that was cut off as it was silent, it may not be known yet that it is lost, and another
            call would wait.

    Returns:
        What it returns; None if it fails on.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(RETRY_SECONDS)
            if not goes_on():
                break
        with contextlib.suppress(tf.errors.OpError):
            return call()
        if not goes_on():
            break
    return None


class Loops:
    """Threads by a key, each in charge until it is dropped or all are to end; thread-safe.

    Args:
        name: that of the threads begins with it.
        cluster: the connected cluster, whose servers they call.
        fail: is called with what ends training.
        groups: of loops, which may wait each for what concerns its own group.

    Attributes:
        lock: guards what loops wait for; reentrant.
    """

    def __init__(
        self, name: str, cluster: Cluster, fail: Callable[[Exception], None], groups: int = 1
    ):
        self._name = name
        self._cluster = cluster
        self._fail = fail
        self.lock = threading.RLock()
        self._changed = [threading.Condition(self.lock) for _ in range(groups)]
        self._quiet = threading.Condition(self.lock)
        # Guarded by lock.
        self._ending = True
        self._pauses = 0  # In how many of them everything stands still.
        self._threads: dict[Hashable, threading.Thread] = {}
        # Of each thread that calls: since when (time.monotonic()), which servers, and its key.
        self._calls: dict[threading.Thread, tuple[float, Sequence[Server], Hashable]] = {}

    # An epoch.

    def begin(self) -> None:
        """Loops may start."""
        with self.lock:
            self._ending = False

    def start(self, key: Hashable, run: Callable[[], None]) -> bool:
        """Starts a loop, unless one with this key runs, or all are to end; whether it does."""
        with self.lock:
            before = self._threads.get(key)
            if self._ending or (before is not None and before.is_alive()):
                return False
            name = "_".join([self._name, *map(str, key)])
            thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)
            self._threads[key] = thread
            thread.start()
            return True

    def _run(self, run: Callable[[], None]) -> None:
        try:
            with self._cluster.dispatch_scope():
                run()
        except tf.errors.OpError as error:
            # Said, or the threads find out that drive the workers.
            logging.debug("A loop ends: %s", reason(error))
        except Exception as error:
            # As of an algorithm that can't be traced.
            self._fail(error)

    def drop(self, concerned: Callable[[Hashable], bool]) -> None:
        """Loops of these keys end when they next look; others may take their places."""
        with self.lock:
            for key in [key for key in self._threads if concerned(key)]:
                del self._threads[key]
            self._notify_all()

    def end(self) -> None:
        """All loops are to end."""
        with self.lock:
            self._ending = True
            self._notify_all()

    @property
    def is_ending(self) -> bool:
        """Whether all loops are to end."""
        return self._ending

    def join(self, deadline: float, interrupt: Callable[[], None] | None = None) -> None:
        """Waits for the ends of loops, and of calls, until a time (time.monotonic()).

        Args:
            deadline: the time.
            interrupt: ends what loops wait for; again and again, as one may just begin to wait.
        """
        with self.lock:
            joined = dict(self._threads)
        loops = list(joined.values())
        while loops and (rest := deadline - time.monotonic()) > 0:
            loops[0].join(rest if interrupt is None else min(rest, _INTERRUPT_SECONDS))
            loops = [loop for loop in loops if loop.is_alive()]
            if loops and interrupt is not None:
                interrupt()
        with self.lock:
            for key, loop in joined.items():
                if self._threads.get(key) is loop:
                    del self._threads[key]
            # Of other threads, which may be at one although their steps are done.
            rest = max(0.0, deadline - time.monotonic())
            self._quiet.wait_for(lambda: not self._under_way(), rest)

    # What a loop does.

    def goes_on(self, key: Hashable) -> bool:
        """Whether this thread is the loop with this key, and is not to end."""
        return not self._ending and self.is_in_charge(key)

    def is_in_charge(self, key: Hashable) -> bool:
        """Whether this thread is the loop with this key, although all may be to end."""
        return self._threads.get(key) is threading.current_thread()

    def wait(
        self, condition: Callable[[], bool], seconds: float | None = None, group: int = 0
    ) -> bool:
        """Waits until a condition holds; whether it does in time.

        Args:
            condition: is looked at again after `notify`, and when loops are to end; it may use
                `goes_on`.
            seconds: how long it waits at most; None for no limit.
            group: that of the loop.
        """
        if seconds is not None:
            seconds = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        with self.lock:
            return self._changed[group].wait_for(condition, seconds)

    def notify(self, group: int = 0) -> None:
        """Something has happened that a group's loops may wait for."""
        with self.lock:
            self._changed[group].notify_all()

    def rest(self) -> None:
        """Waits for a moment, if loops are not to end."""
        self.wait(lambda: self._ending, RETRY_SECONDS)

    def may_try_again(self, what: str, error: tf.errors.OpError, failures: int) -> bool:
        """Waits for a moment if a call that failed is made again; else training fails.

        Args:
            what: the call and what becomes of it, in words.
            error: why it failed.
            failures: how often it has failed in a row, though everybody was there.

        Returns:
            Whether it is made again.
        """
        if self._ending:
            return False
        if failures >= ATTEMPTS:
            self._fail(error)
            return False
        logging.warning("%s (%d of %d): %s", what, failures, ATTEMPTS - 1, reason(error))
        self.rest()
        return not self._ending

    @contextlib.contextmanager
    def call(self, servers: Sequence[Server], key: Hashable = None) -> Iterator[None]:
        """Inside, a thread calls servers, or waits for what they do; not in a pause.

        Args:
            servers: which.
            key: of the loop that calls, which waits for the end of no pause once it is dropped.
        """
        thread = threading.current_thread()
        with self.lock:
            while self._pauses and not self._ending and (key is None or self.is_in_charge(key)):
                self._quiet.wait()
            self._calls[thread] = time.monotonic(), servers, key
        try:
            yield
        finally:
            with self.lock:
                del self._calls[thread]
                self._quiet.notify_all()

    def waits_for(self, seconds: float) -> list[Server]:
        """The servers that calls have waited for so long."""
        since = time.monotonic() - seconds
        with self.lock:
            late = [servers for began, servers in self._under_way() if began < since]
        return list(dict.fromkeys(server for servers in late for server in servers))

    def _under_way(self) -> list[tuple[float, Sequence[Server]]]:
        """Calls, but those of loops that were dropped: nobody waits for what becomes of them."""
        return [
            (began, servers)
            for thread, (began, servers, key) in self._calls.items()
            if key is None or self._threads.get(key) is thread
        ]

    # Pauses.

    @property
    def is_paused(self) -> bool:
        """Whether no call may begin."""
        return self._pauses > 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, no call begins; those under way go on, see `become_quiet`."""
        with self.lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self.lock:
                self._pauses -= 1
                self._notify_all()

    def become_quiet(
        self,
        seconds: float = PAUSE_SECONDS,
        interrupt: Callable[[], None] | None = None,
        or_ending: bool = False,
    ) -> None:
        """Waits for the ends of calls under way; says so if they don't end in time.

        Args:
            seconds: how long it waits at most.
            interrupt: ends what they wait for, again and again; default None.
            or_ending: whether it does not wait for them when all loops are to end.
        """
        deadline = time.monotonic() + seconds
        limit = seconds if interrupt is None else _INTERRUPT_SECONDS

        def is_quiet() -> bool:
            return not self._under_way() or (or_ending and self._ending)

        while True:
            with self.lock:
                if self._quiet.wait_for(is_quiet, limit):
                    return
            if time.monotonic() >= deadline:
                break
            if interrupt is not None:
                interrupt()
        logging.warning(
            "Calls of servers to each other did not end within %g s (%s).", seconds, self._name
        )

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no thread calls a server."""
        with self.closed():
            self.become_quiet()
            yield

    def _notify_all(self) -> None:
        for condition in (*self._changed, self._quiet):
            condition.notify_all()
