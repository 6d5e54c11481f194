"""Those on whom workers of several groups wait, inside a group and between groups."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from tf_recsync.synchronization.aggregation import Aggregation
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.synchronizer import Synchronizer


class GroupCrew:
    """A `slots.Crew` of the synchronizer, and of what each group takes its tokens from.

    Args:
        arrangement: the groups.
        synchronizer: keeps their copies together.
        aggregations: by group.
        threads: of each worker.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        synchronizer: Synchronizer,
        aggregations: Mapping[int, Aggregation],
        threads: int,
    ):
        self._arrangement = arrangement
        self._synchronizer = synchronizer
        self._aggregations = dict(aggregations)
        self._threads = threads

    def _of(self, worker: int) -> Aggregation:
        return self._aggregations[self._arrangement.group_of(worker).index]

    def lose(self, worker: int) -> None:
        """A worker is gone, and its step with it."""
        self._synchronizer.lose(worker)
        self._of(worker).lose(worker)

    def leave(self, thread: int) -> None:
        """A worker's thread has nothing to do at the moment."""
        self._of(thread // self._threads).leave(thread // self._threads)
        self._synchronizer.leave(thread)

    def resume(self, thread: int) -> None:
        """A worker's thread that may have left is about to take steps."""
        self._of(thread // self._threads).resume(thread // self._threads)
        self._synchronizer.resume(thread)

    def release(self) -> None:
        """Ends all waits of workers, with errors."""
        self._synchronizer.release()
        for aggregation in self._aggregations.values():
            aggregation.release()

    def pause(self) -> contextlib.AbstractContextManager:
        """Inside, no group calls another."""
        return self._synchronizer.pause()

    def waits_for(self, seconds: float) -> list[tuple[str, int]]:
        """The servers, job and index, that calls besides the steps have waited for so long."""
        return self._synchronizer.waits_for(seconds)

    def describe(self) -> str:
        """Who waits for whom, in words."""
        parts = [
            f"group {number}: {aggregation.describe()}"
            for number, aggregation in self._aggregations.items()
        ]
        return "; ".join([*parts, self._synchronizer.describe()])
