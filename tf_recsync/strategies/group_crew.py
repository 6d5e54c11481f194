"""Those on whom workers wait: others of their group, and other groups."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

import tensorflow as tf
from absl import logging

from tf_recsync.synchronization.aggregation import Aggregation
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.synchronizer import Synchronizer


class GroupCrew:
    """A `slots.Crew` of what groups take their tokens from, and of the synchronizer.

    Args:
        arrangement: the groups.
        synchronizer: keeps their copies together; None if there is one group.
        aggregations: of each group, by its number.
        threads: of each worker.
        suspended: gets the workers that were suspended, and hold tokens that they may not push.
        opening: of each group, what is held by whoever makes what it shares.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        synchronizer: Synchronizer | None,
        aggregations: Mapping[int, Aggregation],
        threads: int,
        suspended: set[int],
        opening: Sequence[threading.Lock],
    ):
        self._arrangement = arrangement
        self._between = [] if synchronizer is None else [synchronizer]
        self._aggregations = dict(aggregations)
        self._threads = threads
        self._suspended = suspended
        self._opening = opening

    def _of(self, worker: int) -> Aggregation:
        return self._aggregations[self._arrangement.group_of(worker).index]

    def lose(self, worker: int) -> None:
        """A worker is gone, and its step with it."""
        for synchronizer in self._between:
            synchronizer.lose(worker)
        with self._opening[self._arrangement.group_of(worker).index]:
            try:
                self._of(worker).lose(worker)
                self._suspended.discard(worker)
            except tf.errors.OpError as error:
                if not self.holders_of(worker):
                    raise
                # The group's server is gone, too. Whoever begins with the next one gives the
                # worker's tokens back.
                logging.debug("worker:%d keeps its tokens: %s", worker, error)
                self._suspended.add(worker)

    def suspend(self, worker: int) -> None:
        """A worker is there, but what it trains on is gone or silent, the tokens' list, too."""
        self._suspended.add(worker)
        for synchronizer in self._between:
            synchronizer.suspend(worker)

    def leave(self, thread: int) -> None:
        """A worker's thread has nothing to do at the moment."""
        worker = thread // self._threads
        self._of(worker).leave(worker)
        for synchronizer in self._between:
            synchronizer.leave(thread)

    def resume(self, thread: int) -> None:
        """A worker's thread that may have left takes steps; with its next token it is one more."""
        for synchronizer in self._between:
            synchronizer.resume(thread)

    def release(self) -> None:
        """Ends all waits of workers, with errors."""
        for waited_for in [*self._between, *self._aggregations.values()]:
            try:
                waited_for.release()
            except tf.errors.OpError as error:
                # What keeps the list is gone, and with it all waits.
                logging.debug("waits could not be ended: %s", error)

    @contextlib.contextmanager
    def pause(self):
        """Inside, no group calls another; parameter servers, which workers call, stay there."""
        with contextlib.ExitStack() as stack:
            for synchronizer in self._between:
                stack.enter_context(synchronizer.pause())
            yield

    def holders_of(self, worker: int) -> Sequence[tuple[str, int]]:
        """The servers that hold a worker's group's copy, if others go on without them."""
        return [holder for one in self._between for holder in one.holders_of(worker)]

    def waits_for(self, seconds: float) -> list[tuple[str, int]]:
        """The servers, job and index, that calls besides the steps have waited for so long."""
        return [server for one in self._between for server in one.waits_for(seconds)]

    def describe(self) -> str:
        """Who waits for whom, in words."""
        of_groups = {n: aggregation.describe() for n, aggregation in self._aggregations.items()}
        if len(of_groups) == 1:
            return next(iter(of_groups.values()))
        parts = [f"group {number}: {text}" for number, text in of_groups.items()]
        return "; ".join([*parts, *(one.describe() for one in self._between)])
