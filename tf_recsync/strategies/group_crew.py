"""Those on whom workers wait: others of their group, and other groups."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Server
from tf_recsync.synchronization.aggregation import Aggregation
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.at_once import AT_ONCE, AtOnce
from tf_recsync.synchronization.synchronizer import Crew, Synchronizer

_ATTEMPTS, _RETRY_SECONDS = 5, 0.5  # To call a server that is there.


@dataclasses.dataclass(frozen=True, eq=False)
class GroupCrew(Crew):
    """What groups take their tokens from, and the synchronizer.

    Attributes:
        arrangement: the groups.
        synchronizer: keeps their copies together.
        aggregations: of each group that takes tokens, by its number.
        threads: of each worker.
        suspended: gets the workers that were suspended, and hold tokens that they may not push.
        opening: of each group, what is held by whoever makes what it shares.
    """

    arrangement: Arrangement
    synchronizer: Synchronizer
    aggregations: Mapping[int, Aggregation]
    threads: int
    suspended: set[int]
    opening: Sequence[threading.Lock]

    @property
    def has_waits(self) -> bool:
        """Whether a worker may wait for another: for a token, or to synchronize."""
        return bool(self.aggregations) or self.synchronizer.has_waits

    def _of(self, worker: int) -> AtOnce:
        return self.aggregations.get(self.arrangement.group_of(worker).index, AT_ONCE)

    def lose(self, worker: int) -> None:
        """A worker is gone, and its step with it."""
        self.synchronizer.lose(worker)
        aggregation = self._of(worker)
        if not aggregation.takes_tokens:
            return  # Without waiting for whoever opens a worker of the group.
        with self.opening[self.arrangement.group_of(worker).index]:
            if self._gives_back(aggregation, worker):
                self.suspended.discard(worker)
            else:
                self.suspended.add(worker)

    def _gives_back(self, aggregation: Aggregation, worker: int) -> bool:
        """Whether the tokens of a worker that is gone are given back, for which others wait.

        Else the group's server is gone, too, or was, and whoever begins with what is there now
        does it.

        Raises:
            tf.errors.OpError: it can't be done, though the server is there; or nobody goes on
                without that.
        """
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_RETRY_SECONDS)
            try:
                aggregation.lose(worker)
                return True
            except tf.errors.OpError as error:
                if not self.holders_of(worker):
                    raise
                group, copies = self.arrangement.group_of(worker).index, self.synchronizer.copies
                failed, is_current = error, aggregation.is_made_for(copies.of(group))
                if copies.are_gone(group) or not is_current:
                    break
                # As when the connection broke: for a second after that gRPC refuses calls.
                logging.info("The tokens of worker:%d are not given back yet: %s", worker, error)
        else:
            if copies.answers(group):
                raise failed
        logging.debug("worker:%d keeps its tokens: %s", worker, failed)
        return False

    def suspend(self, worker: int) -> None:
        """A worker is there, but what it trains on is gone or silent, the tokens' list, too."""
        self.suspended.add(worker)
        self.synchronizer.suspend(worker)

    def leave(self, thread: int) -> None:
        """A worker's thread has nothing to do at the moment."""
        worker = thread // self.threads
        self._of(worker).leave(worker)
        self.synchronizer.leave(thread)

    def resume(self, thread: int) -> None:
        """A worker's thread that may have left takes steps; with its next token it is one more."""
        self.synchronizer.resume(thread)

    def release(self) -> None:
        """Ends all waits of workers, with errors."""
        for waited_for in [self.synchronizer, *self.aggregations.values()]:
            try:
                waited_for.release()
            except tf.errors.OpError as error:
                # What keeps the list is gone, and with it all waits.
                logging.debug("waits could not be ended: %s", error)

    def pause(self) -> contextlib.AbstractContextManager:
        """Inside, no group calls another; parameter servers, which workers call, stay there."""
        return self.synchronizer.pause()

    def holders_of(self, worker: int) -> Sequence[Server]:
        """The servers that hold a worker's group's copy, if others go on without them."""
        return self.synchronizer.holders_of(worker)

    def waits_for(self, seconds: float) -> list[Server]:
        """The servers, job and index, that calls besides the steps have waited for so long."""
        return self.synchronizer.waits_for(seconds)

    def describe(self) -> str:
        """Who waits for whom, in words."""
        of_groups = {n: aggregation.describe() for n, aggregation in self.aggregations.items()}
        is_one = len(self.arrangement.groups) == 1
        parts = [text if is_one else f"group {n}: {text}" for n, text in of_groups.items()]
        return "; ".join(filter(None, [*parts, self.synchronizer.describe()]))
