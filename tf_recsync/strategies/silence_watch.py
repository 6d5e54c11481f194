"""Gives up servers that are there and do not answer.

A server whose process ends closes its connections, and calls to it fail. One that hangs, is
stopped, or is cut off from the network keeps callers waiting, for TensorFlow's calls have no time
limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from absl import logging

from tf_recsync.cluster import Cluster, Probe, Server

# A short limit would take a server for silent that is only busy.
_SHORTEST_SECONDS = 10.0
_LONGEST_SECONDS = 60.0
_SUSPICIOUS_SHARE = 0.3  # Of the limit: a call that takes longer has its server asked.
_SUSPICIOUS_SECONDS = 3.0  # But so long at most.


def silence_limit(silence_timeout: float | None, worker_timeout: float) -> float:
    """For how many seconds a server may be silent, with these arguments of a strategy."""
    if silence_timeout is not None:
        return float(silence_timeout)
    return min(max(worker_timeout, _SHORTEST_SECONDS), _LONGEST_SECONDS)


def suspicious_after(silence_timeout: float) -> float:
    """After how many seconds of a call its server is asked for signs of life.

    Args:
        silence_timeout: for how many seconds a server may be silent.
    """
    return min(_SUSPICIOUS_SECONDS, _SUSPICIOUS_SHARE * silence_timeout)


def lose_the_gone(cluster: Cluster, servers: Sequence[Server], seconds: float) -> list[Server]:
    """Finds servers that have nothing any more of what they had, or don't answer: they are lost.

    Connections to those that don't answer are cut.

    Args:
        cluster: the connected cluster.
        servers: the servers to ask; nothing may be asked of them meanwhile.
        seconds: how long to wait for an answer.
    """
    probes = {server: cluster.probe(*server) for server in servers}
    deadline = time.monotonic() + seconds
    for server, probe in list(probes.items()):
        probe.join(max(0.0, deadline - time.monotonic()))
        if probe.is_alive():
            logging.warning("%s:%d has not answered for %.0f s.", *server, seconds)
            cluster.cut_off(*server)
        elif probe.answered is False:
            # A connection that broke while nobody used it shows at the first call.
            probe = probes[server] = cluster.probe(*server)
            probe.join(max(0.0, deadline - time.monotonic()))
    gone = [server for server, probe in probes.items() if not probe.reachable]
    for server in gone:
        was_silent = probes[server].answered is None
        cluster.membership.lost(server, None, "between two epochs", was_silent=was_silent)
    return gone


class SilenceWatch(threading.Thread):
    """Asks servers on which somebody waits for a sign of life, and reports those that give none.

    Args:
        cluster: the connected cluster.
        suspects: the servers to ask at the moment.
        give_up: `give_up(server, seconds)`, called when a server has not answered for
            so long; called again if it then goes on to be silent.
        silence_timeout: for how many seconds a server may be silent.
    """

    def __init__(
        self,
        cluster: Cluster,
        suspects: Callable[[], Iterable[Server]],
        give_up: Callable[[Server, float], None],
        silence_timeout: float,
    ):
        super().__init__(name="recsync_silence_watch", daemon=True)
        self._cluster = cluster
        self._suspects = suspects
        self._give_up = give_up
        self._limit = silence_timeout
        self._ended = threading.Event()
        self._probes: dict[Server, Probe] = {}
        self._silent: dict[Server, float] = {}  # For how long, in seconds.
        self.start()

    def end(self) -> None:
        """Watches no longer, and soon refers to nobody."""
        self._ended.set()
        for server in list(self._silent):
            self._cluster.membership.answered(server)

    def run(self) -> None:
        period = self._limit / 10
        last = time.monotonic()
        while not self._ended.wait(period):
            now = time.monotonic()
            # If this process stood still itself, that says nothing about servers.
            passed, last = min(now - last, 2 * period), now
            self._ask(set(self._suspects()), passed)

    def _ask(self, suspects: set[Server], passed: float) -> None:
        for server in [s for s in self._silent if s not in suspects]:
            del self._silent[server]
            self._cluster.membership.answered(server)  # Nobody waits for it any more.
        for server in sorted(suspects):
            probe = self._probes.get(server)
            if probe is None or probe.answered:
                self._cluster.membership.answered(server)
                self._silent[server] = 0.0
                self._probes[server] = self._cluster.probe(*server)
                continue
            # One whose connections were cut, by whomever, can't be reached, and may still have
            # callers elsewhere wait.
            if not probe.is_alive():
                self._probes[server] = self._cluster.probe(*server)
            self._cluster.membership.suspected(server)
            self._silent[server] = self._silent.get(server, 0.0) + passed
            if self._silent[server] >= self._limit:
                self._give_up(server, self._silent.pop(server))
                del self._probes[server]
