"""Takes servers that were lost into the cluster again, once they can be reached."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Probe, Server
from tf_recsync.synchronization.synchronizer import Crew

_READMIT_SECONDS = 20.0  # For an attempt, once its server is up.
_ASK_SECONDS = 0.1  # Between two looks at whether an answer has come.


@dataclasses.dataclass(eq=False)
class Comebacks:
    """Sees to the return of lost servers; thread-safe.

    Attributes:
        cluster: the connected cluster.
        crew: those whose calls among each other have to pause meanwhile.
        wait: `wait(seconds)` waits for so long; returns whether nobody needs the server any more.
        unneeded: servers that need not be there: nobody may have found out that one is not.
    """

    cluster: Cluster
    crew: Crew
    wait: Callable[[float], bool]
    unneeded: Collection[Server] = ()

    def __post_init__(self) -> None:
        """Nobody is at any of them."""
        servers = self.cluster.membership.servers("worker", "ps", "reader")
        self._returning = {server: threading.Lock() for server in servers}
        # Others that did not answer in an attempt, of all its time.
        self._silent: frozenset[Server] = frozenset()

    def is_back(self, server: Server) -> bool:
        """Whether a server can be used; takes in one that can be reached again."""
        returning = self._returning[server]
        if not returning.acquire(blocking=False):
            with returning:  # Another thread of the pass is at it.
                return not self.cluster.membership.is_away(server)
        try:
            return not self.cluster.membership.is_away(server) or self._reach(server)
        finally:
            returning.release()

    def _reach(self, server: Server) -> bool:
        membership, probe = self.cluster.membership, self._ask(server)
        if probe.reachable and not membership.is_forgetful(server):
            membership.readmitted(server)
            return not membership.is_away(server)  # It may be about to end.
        # One that was started again answers that it doesn't know us.
        if membership.silent_seconds(server) and not probe.answered:
            return False
        # Nor can one be taken in that was left out since, and still stands still.
        if self.cluster.absent([server], is_suspect=lambda server: True):
            return False
        # Others of the crew may be held for long, which shall not keep another pass from it.
        with self.crew.pause():
            if not membership.readmitting(server):
                return not membership.is_away(server)  # Another pass is at it, or was.
            is_there = False
            try:
                is_there = self._take_in(server) and self._ask(server).reachable
            finally:
                is_there = is_there and membership.readmitted(server)
                if not is_there:
                    membership.refused(server)
            return is_there

    def _take_in(self, server: Server) -> bool:
        """Readmits a server, without others that are away; whether that was possible."""
        membership = self.cluster.membership
        # A worker may have died, and nobody have found out.
        others = {*membership.servers("worker"), *membership.away("ps"), *self.unneeded}
        anew = [server] if membership.is_forgetful(server) else []

        def is_suspect(other: Server) -> bool:
            # What is only silent has all that it had, and loses that when it is left out. A worker
            # does without; a parameter server is waited for once.
            is_lost_worker = other[0] == "worker" and membership.is_away(other)
            return is_lost_worker or other in self._silent

        def without() -> list[Server]:
            nonlocal began
            began = time.monotonic()
            return self.cluster.absent(sorted(others - {server}), is_suspect)

        began = float("inf")
        try:
            # One that has died since would be waited for, and the next attempt is without it.
            self.cluster.readmit(_READMIT_SECONDS, anew, without, up_timeout=0.0)
        except (RuntimeError, tf.errors.OpError) as error:
            logging.log_every_n_seconds(
                logging.INFO, "%s:%d is not back yet: %s", 30, *server, error
            )
            if time.monotonic() - began >= _READMIT_SECONDS:
                silent = self.cluster.absent(sorted(others - {server}), lambda other: True)
                self._silent = frozenset(silent)
            return False
        return True

    def _ask(self, server: Server) -> Probe:
        """Asks a server for a sign of life; waits for it, with a limit."""
        probe = self.cluster.probe(*server)
        deadline = time.monotonic() + _READMIT_SECONDS
        while probe.is_alive() and not self.wait(_ASK_SECONDS):
            if time.monotonic() >= deadline:
                self.cluster.cut_off(*server)
                break
        return probe
