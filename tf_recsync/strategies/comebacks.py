"""Takes servers that were lost into the cluster again, once they can be reached."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Probe, Server
from tf_recsync.strategies.slots import Crew

_READMIT_SECONDS = 20.0  # For an attempt, once its server is up.
_ASK_SECONDS = 0.1  # Between two looks at whether an answer has come.


class Comebacks:
    """Sees to the return of lost servers; thread-safe.

    Args:
        cluster: the connected cluster.
        crew: those whose calls among each other have to pause meanwhile; None if there are none.
        wait: `wait(seconds)` waits for so long; returns whether nobody needs the server any more.
    """

    def __init__(self, cluster: Cluster, crew: Crew | None, wait: Callable[[float], bool]):
        self._cluster = cluster
        self._crew = crew
        self._wait = wait
        members = cluster.membership.members()
        self._returning = {(m.job, m.index): threading.Lock() for m in members}

    def is_back(self, server: Server) -> bool:
        """Whether a server can be used; takes in one that can be reached again."""
        membership = self._cluster.membership
        with self._returning[server]:  # One thread of a pass at a time.
            if not membership.is_away(server):
                return True
            if not membership.readmitting(server):
                return False  # Another pass is at it.
            is_there = False
            try:
                is_there = self._reach(server)
            finally:
                if is_there:
                    membership.readmitted(server)
                else:
                    membership.refused(server)
            return is_there

    def _reach(self, server: Server) -> bool:
        membership, probe = self._cluster.membership, self._ask(server)
        is_forgetful = membership.is_forgetful(server)
        if probe.reachable and not is_forgetful:
            return True
        # One that was started again answers that it doesn't know us.
        if membership.silent_seconds(server) and not probe.answered:
            return False
        if not self._cluster.is_up(*server) or not self._take_in(server, is_forgetful):
            return False
        return self._ask(server).reachable

    def _take_in(self, server: Server, is_new: bool) -> bool:
        """Readmits a server, without others that are away; whether that was possible.

        Args:
            server: which one.
            is_new: whether it shall be taken for one that was started again.
        """
        members = self._cluster.membership.members()
        away = [(m.job, m.index) for m in members if m.job != "reader" and not m.is_there]
        try:
            without = [s for s in away if s != server and not self._cluster.is_up(*s)]
            pause = contextlib.nullcontext() if self._crew is None else self._crew.pause()
            with pause:
                self._cluster.readmit(_READMIT_SECONDS, [server] if is_new else [], without)
        except (RuntimeError, tf.errors.OpError) as error:
            logging.log_every_n_seconds(
                logging.INFO, "%s:%d is not back yet: %s", 30, *server, error
            )
            return False
        return True

    def _ask(self, server: Server) -> Probe:
        """Asks a server for a sign of life; waits for it, with a limit."""
        probe = self._cluster.probe(*server)
        deadline = time.monotonic() + _READMIT_SECONDS
        while probe.is_alive() and not self._wait(_ASK_SECONDS):
            if time.monotonic() >= deadline:
                self._cluster.cut_off(*server)
                break
        return probe
