"""Gives up servers that are there and do not answer.

A server whose process ends closes its connections, and calls to it fail. One that hangs, is
stopped, or is cut off from the network keeps callers waiting, for TensorFlow's calls have no time
limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from absl import logging

from tf_recsync._checks import check_seconds
from tf_recsync.cluster.membership import Membership, Server
from tf_recsync.cluster.signs_of_life import Probe

# A short limit would take a server for silent that is only busy.
_SHORTEST_SECONDS = 10.0
_LONGEST_SECONDS = 60.0
_SUSPICIOUS_SHARE = 0.3  # Of the limit: a call that takes longer has its server asked.
_SUSPICIOUS_SECONDS = 3.0  # But so long at most.
_LONGEST_PERIOD_SECONDS = 60.0  # Of asking, however long servers may be silent.
_REST_SECONDS = 10.0  # For which the thread waits for somebody who waits.


def silence_limit(silence_timeout: float | None, worker_timeout: float) -> float:
    """For how many seconds a server may be silent, with these arguments of a strategy."""
    if silence_timeout is not None:
        return check_seconds("silence_timeout", silence_timeout)
    return min(max(worker_timeout, _SHORTEST_SECONDS), _LONGEST_SECONDS)


def suspicious_after(silence_timeout: float) -> float:
    """After how many seconds of a call its server is asked for signs of life.

    Args:
        silence_timeout: for how many seconds a server may be silent.
    """
    return min(_SUSPICIOUS_SECONDS, _SUSPICIOUS_SHARE * silence_timeout)


@dataclasses.dataclass(eq=False)
class Wait:
    """Somebody who may be waiting for servers.

    Attributes:
        suspects: the servers to ask at the moment.
        give_up: `give_up(server, seconds)`, called when a server has not answered for so long;
            called again if it then goes on to be silent.
        limit: for how many seconds a server may be silent.
        until: when it waits no longer, whether or not that is told (time.monotonic()).
    """

    suspects: Callable[[], Iterable[Server]]
    give_up: Callable[[Server, float], None]
    limit: float
    until: float = float("inf")


@dataclasses.dataclass
class _Asked:
    """A server that is asked for a sign of life.

    Attributes:
        probe: asks it.
        silent: for how long it has not answered, in seconds.
        given_up: for how long it had not when somebody who waits for it last gave it up.
    """

    probe: Probe
    silent: float = 0.0
    given_up: dict[Wait, float] = dataclasses.field(default_factory=dict)


class SilenceWatch:
    """Asks servers for which somebody waits for a sign of life, and reports those that give none.

    One thread does it for all who wait; it runs while somebody does. Thread-safe.

    Args:
        membership: is told who is suspected.
        probe: asks a server, in a thread.
    """

    def __init__(self, membership: Membership, probe: Callable[[Server], Probe]):
        self._membership = membership
        self._probe = probe
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None
        self._giving_up = threading.Lock()  # Held while somebody is told of one that is silent.
        self._asked: dict[Server, _Asked] = {}  # The thread's own.

    def begin(self, wait: Wait) -> None:
        """Watches for somebody, until `end`."""
        with self._changed:
            is_hasty = wait.limit < min((w.limit for w in self._waits), default=float("inf"))
            self._waits.add(wait)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="recsync_silence_watch", daemon=True
                )
                self._thread.start()
            elif is_hasty:
                self._changed.notify_all()

    def end(self, wait: Wait) -> None:
        """Watches no longer for somebody."""
        with self._changed:
            self._waits.discard(wait)

    def settle(self) -> None:
        """Waits until nobody is being told of a server that has been silent.

        Whoever waits for a server gives it up by itself, one after the other. The first error may
        end what all of them did, and the last of them cuts connections when the server answers
        again: who begins something new waits for that before.
        """
        with self._giving_up:
            pass

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                if not self._waits:
                    self._forget()
                    self._changed.wait(_REST_SECONDS)
                    if not self._waits:
                        self._thread = None
                        return
                    last = time.monotonic()
                limit = min(wait.limit for wait in self._waits)
                period = min(limit / 10, _LONGEST_PERIOD_SECONDS)
                self._changed.wait(period)
                now = time.monotonic()
                self._waits = {wait for wait in self._waits if wait.until > now}
                waits = list(self._waits)
            # If this process stood still itself, that says nothing about servers.
            passed, last = min(now - last, 2 * period), now
            self._ask(waits, passed)

    def _forget(self) -> None:
        """Nobody waits for any server."""
        for server in self._asked:
            self._membership.answered(server)
        self._asked.clear()

    def _ask(self, waits: Sequence[Wait], passed: float) -> None:
        waiting: dict[Server, list[Wait]] = {}
        for wait in waits:
            with _logged():
                for server in set(wait.suspects()):
                    waiting.setdefault(server, []).append(wait)
        for server in self._asked.keys() - waiting.keys():
            # What is known of it is of no use when somebody waits again.
            if self._asked.pop(server).silent:
                self._membership.answered(server)  # As far as anybody cares.
        for server in sorted(waiting):
            with _logged():
                self._ask_one(server, waiting[server], passed)

    def _ask_one(self, server: Server, waits: Sequence[Wait], passed: float) -> None:
        asked = self._asked.get(server)
        if asked is None or asked.probe.answered:
            is_back = asked is not None and asked.probe.reachable
            if is_back and self._membership.silent_seconds(server):
                # It was given up, and has all that it had.
                self._membership.readmitted(server)
            self._membership.answered(server)
            self._asked[server] = _Asked(self._probe(server))
            return
        # One whose connections were cut, by whomever, can't be reached, and may still have
        # callers elsewhere wait.
        if not asked.probe.is_alive():
            asked.probe = self._probe(server)
        self._membership.suspected(server)
        asked.silent += passed
        # Who waits no longer has given up nothing.
        asked.given_up = {wait: asked.given_up.get(wait, 0.0) for wait in waits}
        with self._giving_up:
            for wait, given_up in asked.given_up.items():
                with self._changed:
                    is_waiting = wait in self._waits
                if is_waiting and asked.silent - given_up >= wait.limit:
                    asked.given_up[wait] = asked.silent
                    with _logged():
                        wait.give_up(server, asked.silent)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Inside, errors of somebody who waits are logged, as the watch is for others, too."""
    try:
        yield
    except Exception:
        logging.exception("Somebody who waits for servers could not be asked or told.")
