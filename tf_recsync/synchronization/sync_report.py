"""What the synchronization of groups' copies has done."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class SyncReport:
    """What synchronization has done since the model began to train.

    Attributes:
        syncs: of each group of trainers, those that it took part in. Of a group on several
            servers, which are synchronized by themselves, their mean, rounded down.
        seconds: of each group, the time that they took; under a `HopStrategy`, where they are a
            part of steps, what workers have waited in them.
        steps: of all threads of all trainers, those that they have finished.
        trained_seconds: the seconds that trainers trained: the length of all epochs.
        elements: the parameters that are synchronized.
        sync_ps_bytes: what the sync PSs have received and sent, as they have counted; of the time
            before the loss of a parameter server, as last read, which is done after each epoch.
        local_batch_size: the examples of a step, or None if they are not known.
    """

    syncs: list[int]
    seconds: list[float]
    steps: int
    trained_seconds: float
    elements: int
    sync_ps_bytes: int
    local_batch_size: int | None = None

    @property
    def examples_per_second(self) -> float | None:
        """EPS, of all trainers together, as if all batches were full; None if that is not known."""
        if self.local_batch_size is None:
            return None
        return per_second(self.steps * self.local_batch_size, self.trained_seconds)

    @property
    def syncs_per_second(self) -> float:
        """Of all groups together."""
        return per_second(sum(self.syncs), self.trained_seconds)


def per_second(count: float, seconds: float) -> float:
    """How many there are in a second; infinitely many if some take no time."""
    if seconds:
        return count / seconds
    return math.inf if count else 0.0


class SyncCounts:
    """Counts what synchronization does. Thread-safe.

    Args:
        groups: how many groups of trainers there are.

    Attributes:
        synced: is told of each synchronization that took a time: the group, the seconds, the
            shard; None (the default): nobody is.
        is_recorded: whether somebody wants to know of each by itself; default: nobody does.
    """

    def __init__(self, groups: int):
        self.synced: Callable[[int, float, int], object] | None = None
        self.is_recorded: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        # Of each group, all its shards together.
        self._syncs = [0] * groups
        self._seconds = [0.0] * groups
        self._steps = 0
        self._trained = 0.0
        self._began: float | None = None
        # What the sync PSs have counted, as last read, and what of it is of earlier variables.
        self._bytes = self._earlier_bytes = 0

    def begin(self) -> None:
        """Trainers train from now on, if they did not before."""
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()

    def end(self) -> None:
        """They have stopped."""
        with self._lock:
            if self._began is not None:
                self._trained += time.monotonic() - self._began
                self._began = None

    def count_steps(self, steps: int) -> None:
        """A thread of a trainer has finished so many."""
        with self._lock:
            self._steps += steps

    def count_sync(
        self, groups: Sequence[int], seconds: float, times: int = 1, shard: int = 0
    ) -> None:
        """A shard of these groups was synchronized so often, in so many seconds."""
        with self._lock:
            for group in groups:
                self._syncs[group] += times
                self._seconds[group] += seconds
        for group in groups if self.synced is not None and seconds else ():
            self.synced(group, seconds, shard)

    def note_bytes(self, counted: int) -> None:
        """What the variables of the sync PSs have counted up to now."""
        with self._lock:
            self._bytes = self._earlier_bytes + counted

    def begin_bytes_anew(self) -> None:
        """The sync PSs count from 0 again, in other variables: what was last read of them stays."""
        with self._lock:
            self._earlier_bytes = self._bytes

    def report(self, shards: int, elements: int) -> SyncReport:
        """What was counted.

        Args:
            shards: of each group, that are synchronized by themselves.
            elements: the parameters that are synchronized.
        """
        with self._lock:
            running = 0.0 if self._began is None else time.monotonic() - self._began
            return SyncReport(
                syncs=[syncs // max(shards, 1) for syncs in self._syncs],
                seconds=list(self._seconds),
                steps=self._steps,
                trained_seconds=self._trained + running,
                elements=elements,
                sync_ps_bytes=self._bytes,
            )
