"""The parameter servers that hold what a group trains on, where others go on without them.

A group whose server is lost waits for it alone. Which servers these are, the crew of a pass says;
those of the parameter-server strategies, without which nobody goes on, are not among them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from absl import logging

from tf_recsync.cluster import Cluster, Probe, device_of, is_reachable
from tf_recsync.strategies.slots import Crew
from tf_recsync.synchronization.arrangement import Server

Lives = list[tuple[int, int]]  # Of a worker's holders, see `Cluster.life`.


class Holders:
    """The holders of all workers during a pass; thread-safe.

    Args:
        cluster: the connected cluster.
        crew: says which they are; None if there are none.
        spared: other servers that nobody needs, though they may be away.

    Attributes:
        all: those of all workers, and the spared ones.
    """

    def __init__(self, cluster: Cluster, crew: Crew | None, spared: Iterable[Server] = ()):
        workers = range(cluster.workers)
        self._cluster = cluster
        self._of = [[] if crew is None else list(crew.holders_of(worker)) for worker in workers]
        held = {holder for holders in self._of for holder in holders}
        self.all: set[Server] = held | set(spared)
        self._lock = threading.Lock()
        self._silent: set[Server] = set()  # That were given up. Guarded by _lock, like the next.
        self._told: set[tuple[Server, tuple[int, int]]] = set()  # Said to be lost, in which life.
        # Of each holder: one thread of its group at a time sees to its return.
        self._returning = {holder: threading.Lock() for holder in held}

    def lives(self, worker: int) -> Lives:
        """The lives of a worker's holders as they are known now."""
        return [self._cluster.life(*holder) for holder in self._of[worker]]

    def give_up(self, holder: Server) -> list[int]:
        """A holder does not answer; returns the workers that may wait for it."""
        with self._lock:
            self._silent.add(holder)
        return [worker for worker, holders in enumerate(self._of) if holder in holders]

    def is_one_lost(self, worker: int, lives: Lives) -> bool:
        """Whether what a worker trained on is gone; says so once.

        Args:
            worker: which one.
            lives: of its holders when it was opened.
        """
        for holder, life in zip(self._of[worker], lives, strict=False):
            with self._lock:
                is_gone = holder in self._silent
            is_gone = is_gone or life != self._cluster.life(*holder)
            if not is_gone and is_reachable(device_of(*holder)):
                continue
            with self._lock:
                is_told = (holder, life) in self._told
                self._told.add((holder, life))
            if not is_told:
                logging.warning(
                    "%s:%d was lost in the middle of a pass, and a group's parameters with it: "
                    "its trainers wait until it is back, the other groups go on.",
                    *holder,
                )
            return True
        return False

    def are_back(
        self,
        worker: int,
        ask: Callable[[str, int], Probe],
        readmit: Callable[[Server], bool],
    ) -> bool:
        """Whether all that a worker needs to train on can be used; readmits what can be.

        Args:
            worker: which one.
            ask: asks a server for a sign of life, with a limit.
            readmit: readmits a server; whether it did.
        """
        return all(self._is_back(holder, ask, readmit) for holder in self._of[worker])

    def _is_back(
        self, holder: Server, ask: Callable[[str, int], Probe], readmit: Callable[[Server], bool]
    ) -> bool:
        with self._returning[holder]:
            with self._lock:
                was_silent = holder in self._silent
            probe = ask(*holder)
            if not probe.reachable:
                # One that was started again answers that it doesn't know us.
                if (was_silent and not probe.answered) or not self._cluster.is_up(*holder):
                    return False
                if not readmit(holder) or not ask(*holder).reachable:
                    return False
            with self._lock:
                self._silent.discard(holder)
            return True
