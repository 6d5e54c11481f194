"""The schedule of decentralized training if communication were free, for comparison.

Workers compute for given times and otherwise follow the protocol (Hop, sections 3 to 5), in
parallel order: an update is at its receivers when its sender enters the iteration. Written apart
from the package's own protocol, in terms of the paper.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from tf_recsync.topology import Topology


class Schedule:
    """Runs workers until one of them has entered a number of iterations.

    Args:
        topology: who sends to whom.
        max_iteration_gap: of the token queues; None without.
        backup_workers: of every worker.
        staleness_bound: or None.
        max_jump: how many iterations a worker goes forward at a time; 1 if it never skips.
        notify_ack: whether a worker sends only when its updates before have been used.
        seconds: computes the time that a worker's n-th step takes, from (worker, n).
    """

    def __init__(
        self,
        topology: Topology,
        max_iteration_gap: int | None,
        seconds: Callable[[int, int], float],
        *,
        backup_workers: int = 0,
        staleness_bound: int | None = None,
        max_jump: int = 1,
        notify_ack: bool = False,
    ):
        self._topology = topology
        self._gap = max_iteration_gap
        self._seconds = seconds
        self._backups = backup_workers
        self._staleness = staleness_bound
        self._max_jump = max_jump
        self._notify_ack = notify_ack
        workers = topology.size
        self.iterations = [0] * workers
        self.entered: list[list[float]] = [[] for _ in range(workers)]
        self._steps = [0] * workers
        self._sent: list[set[int]] = [set() for _ in range(workers)]
        self._used = [-1] * workers  # The iteration whose updates were averaged last.
        self._waiting: dict[int, str] = {}
        self._finished: list[tuple[float, int]] = []

    def run(self, iterations: int) -> np.ndarray:
        """Runs until everybody is at an iteration; gives the seconds at which each was entered.

        Returns:
            [workers, iterations], NaN where an iteration was skipped.
        """
        self._times = np.full((self._topology.size, iterations + 1), np.nan)
        for worker in range(self._topology.size):
            self._enter(worker, 0, 0.0)
        while min(self.iterations) < iterations and self._finished:
            now, worker = heapq.heappop(self._finished)
            self._waiting[worker] = "updates"
            self._settle(now)
        return self._times[:, :iterations]

    def _settle(self, now: float) -> None:
        """Lets everybody go on who can."""
        moved = True
        while moved:
            moved = False
            for worker in list(self._waiting):
                moved = self._go_on(worker, now) or moved

    def _go_on(self, worker: int, now: float) -> bool:
        iteration = self.iterations[worker]
        if self._waiting[worker] == "updates":
            if not self._has_updates(worker, iteration):
                return False
            self._used[worker] = iteration
            self._waiting[worker] = "next"
            return True
        target = iteration + 1
        if self._max_jump > 1:
            out = self._topology.out_neighbors(worker)
            behind = min(self.iterations[j] for j in out) - iteration
            target = iteration + max(1, min(behind, self._max_jump))
            if target > iteration + 1 and not self._has_updates(worker, target - 1):
                return False
        for j in self._topology.out_neighbors(worker):
            if self._gap is not None and target - self.iterations[j] > self._gap:
                return False
            if self._notify_ack and self._used[j] < target - 1:
                return False
        del self._waiting[worker]
        self._enter(worker, target, now)
        return True

    def _has_updates(self, worker: int, iteration: int) -> bool:
        senders = self._topology.in_neighbors(worker)
        if self._staleness is None:
            there = sum(iteration in self._sent[j] for j in senders)
        else:
            oldest = iteration - self._staleness
            there = sum(max(self._sent[j], default=-1) >= oldest for j in senders)
        return there >= len(senders) - self._backups

    def _enter(self, worker: int, iteration: int, now: float) -> None:
        self.iterations[worker] = iteration
        self._sent[worker].add(iteration)
        if iteration < self._times.shape[1]:
            self._times[worker, iteration] = now
        seconds = self._seconds(worker, self._steps[worker])
        self._steps[worker] += 1
        heapq.heappush(self._finished, (now + seconds, worker))


def iteration_seconds(times: np.ndarray) -> float:
    """The mean seconds of an iteration, over the second half of all workers' schedules."""
    half = times.shape[1] // 2
    means = []
    for row in times:
        known = np.flatnonzero(~np.isnan(row))
        known = known[known >= half] if (known >= half).sum() > 1 else known
        first, last = known[0], known[-1]
        means.append((row[last] - row[first]) / (last - first))
    return float(np.mean(means))
