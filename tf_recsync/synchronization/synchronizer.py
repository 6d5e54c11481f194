"""What keeps the copies of several groups of trainers together, whatever the algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Server
from tf_recsync.synchronization.arrangement import Arrangement, Group
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.staleness_counts import StalenessCounts
from tf_recsync.synchronization.sync_report import SyncCounts, SyncReport


class Crew:
    """Workers that may wait for each other.

    The threads that drive the workers call this. As it is here, none ever waits for another.

    Attributes:
        has_waits: whether one may.
    """

    has_waits = False

    def lose(self, worker: int) -> None:
        """A worker is gone, and its step with it."""

    def suspend(self, worker: int) -> None:
        """A worker is there, but what it trains on is gone, and its step with it."""

    def leave(self, thread: int) -> None:
        """A worker's thread has nothing to do at the moment; threads of all workers are counted."""

    def resume(self, thread: int) -> None:
        """A thread that may have left is about to take steps, which others have given back."""

    def release(self) -> None:
        """Ends all waits of workers, with errors."""

    def pause(self) -> contextlib.AbstractContextManager:
        """Inside, no worker calls another."""
        return contextlib.nullcontext()

    def holders_of(self, worker: int) -> Sequence[Server]:
        """The parameter servers, job and index, that hold what a worker trains on, and without
        which others go on; none if they can't."""
        return ()

    def waits_for(self, seconds: float) -> list[Server]:
        """The servers, job and index, that calls besides the steps have waited for so long."""
        return []

    def describe(self) -> str:
        """Who waits for whom, in words; empty if nobody ever does."""
        return ""


class Synchronizer(Crew):
    """Groups of trainers that have copies of the parameters, while they train.

    It makes what groups need, mixes their copies, and is told who is gone. As it is here, it has
    the groups' copies made, and leaves each to its group: an algorithm overrides when and how they
    are mixed. An epoch is `begin`, then `carry_on` whenever a worker is about to train, and `end`;
    between the two the threads of trainers call `steps_until_sync`, `training` and `trained`
    around their calls.

    Args:
        arrangement: the groups.
        copies: their parameters and what belongs to them.
        threads: of each trainer.
        counters: which of the copied variables count the staleness of updates; by default none.

    Attributes:
        copies: as above.
        fail: ends the pass with an error.
        counts_steps: whether a synchronization is due after a number of steps.
        most_steps: how many steps a call to a worker may have, as a synchronization waits for
            its end; None if none does.
    """

    counts_steps = False
    most_steps: int | None = None

    def __init__(
        self,
        arrangement: Arrangement,
        copies: Copies,
        threads: int = 1,
        counters: Sequence[int] = (),
    ):
        self.copies = copies
        self.fail: Callable[[Exception], None] = _raise
        self._arrangement = arrangement
        self._threads = threads
        self._counts = SyncCounts(len(arrangement.groups))
        self._staleness = StalenessCounts(copies, counters)

    def count_on(self, other: Synchronizer) -> None:
        """Goes on with what another one has counted, whose place it takes."""
        self._counts = other._counts  # They tell the same one of synchronizations.
        self._counts.begin_bytes_anew()

    def tell_of_syncs(
        self, synced: Callable[[int, float, int], object], is_recorded: Callable[[], bool]
    ) -> None:
        """Tells somebody of synchronizations; see `SyncCounts`."""
        self._counts.synced, self._counts.is_recorded = synced, is_recorded

    @property
    def there(self) -> list[int]:
        """The groups that have what was made for them, as far as known."""
        return self.copies.there

    # A trainer's life.

    def open(self, worker: int) -> None:
        """Makes what a trainer's group needs: at the start, or when it is back."""
        self._ensure_group(self._number_of(worker))

    def _ensure_group(self, group: int) -> None:
        if self.copies.is_of_earlier_life(group):
            self.lose_group(group)
        self._open_group(group)

    def _open_group(self, group: int) -> None:
        """Makes what a group needs, if it has not got it."""
        self.copies.ensure(group)

    def handles(self, worker: int) -> list[tf.Tensor]:
        """What a trainer's steps take, besides what every worker's do: its group's copies."""
        return self.copies.handles(self._number_of(worker))

    def lose(self, worker: int) -> None:
        """A trainer is gone, and what it held; the others go on."""
        group = self._arrangement.group_of(worker)
        if not group.servers:
            self.lose_group(group.index)
        for thread in self._threads_of(worker):
            self.leave(thread)

    def suspend(self, worker: int) -> None:
        """A trainer is there, but its group's copy is gone; the other groups go on."""
        self.lose(worker)

    def lose_group(self, group: int) -> None:
        """The copy of a group is gone."""
        self.copies.drop(group)
        self._staleness.lost(group)

    def put_aside(self, group: int) -> None:
        """Keeps what a group has here, as its servers are about to end; nobody may train it.

        It begins with that when it is opened the next time.
        """
        self.copies.put_aside(group)

    def _number_of(self, worker: int) -> int:
        """That of a worker's group."""
        return self._arrangement.group_of(worker).index

    def _threads_of(self, worker: int) -> range:
        return range(worker * self._threads, (worker + 1) * self._threads)

    # An epoch.

    def begin(self) -> None:
        """Makes ready for an epoch; nobody is at work."""
        for group in self._arrangement.groups:
            if group.servers:  # Trainers that hold a copy get it when they are opened.
                self._open_held(group)

    def _open_held(self, group: Group) -> None:
        """Makes what a group needs on its servers, if they are there."""
        is_needed = group.index not in self.copies.there and self.holders_of(group.trainers[0])
        # Asked before they are called: one that stands still would hold all others.
        if is_needed and not self.copies.are_reachable(group.index):
            logging.warning("Group %d begins when its servers are back.", group.index)
            self._begin_without(group.index)
        else:
            self._ensure_group(group.index)

    def _begin_without(self, group: int) -> None:
        """An epoch begins whose others do not wait for a group: it joins as one that was lost."""
        self.lose_group(group)

    def carry_on(self) -> None:
        """All workers are open, and one of them is about to train."""
        self._counts.begin()

    def end(self) -> None:
        """The epoch's steps are done."""
        self._counts.end()

    def steps_until_sync(self, thread: int) -> int | None:
        """The steps of a thread before it synchronizes; None if it need not count them."""
        return None

    def training(self, thread: int) -> contextlib.AbstractContextManager:
        """Inside, a thread trains."""
        return contextlib.nullcontext()

    def trained(self, thread: int, steps: int) -> None:
        """A thread has done so many steps: synchronizes if it is time."""
        self._counts.count_steps(steps)

    # What has been done.

    def report(self) -> SyncReport:
        """What synchronization has done."""
        return self._counts.report(shards=1, elements=0)

    def counted(self) -> list[list[np.ndarray]]:
        """What each group has counted of staleness; see `StalenessCounts.all`."""
        return self._staleness.all()

    # Checkpoints.

    def extras(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps besides the copies, under names without a slash."""
        return {}

    def restore(
        self, values: Mapping[int, Sequence[np.ndarray]], extras: Mapping[str, np.ndarray]
    ) -> None:
        """Groups go on with these copies, by group, and extras; nobody may be at work.

        Args:
            values: by group.
            extras: as above, and "groups": how many groups there were. Older checkpoints lack it.
        """
        if values:
            self._load(values, int(extras.get("groups", max(values) + 1)))

    def _load(self, values: Mapping[int, Sequence[np.ndarray]], count: int) -> None:
        """Loads the copies of a checkpoint of so many groups; if there are more or fewer, the mean.

        A group whose copy the checkpoint lacks, as its holder did not answer, gets the mean, too.
        """
        groups = range(len(self._arrangement.groups))
        are_all_there = count == len(groups) == len(values)
        mean = None if are_all_there else self.copies.mean(values.values())
        if count == len(groups):
            self.copies.load({group: values.get(group, mean) for group in groups})
            return
        noun = "group" if self._arrangement.groups[0].servers else "worker"
        logging.warning(
            "The checkpoint holds the parameters of %d %ss, and there are %d: all of them begin "
            "with the mean.",
            count,
            noun,
            len(groups),
        )
        self.copies.load(dict.fromkeys(groups, mean), merged=values.values())


def _raise(error: Exception) -> None:
    raise error
