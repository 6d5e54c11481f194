"""A worker in a pass, whom it waits for, and what is lost with it."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorflow.python.eager import cancellation

from tf_recsync.cluster import Server, device_of

if TYPE_CHECKING:
    from tf_recsync.strategies.worker_state import WorkerState


@dataclasses.dataclass(frozen=True)
class Losses:
    """What was lost with workers while a model trained.

    Attributes:
        workers: how often a worker was lost, killed or silent, and how often a pass began
            without one.
        steps: the steps that they had in flight. None of them counts as done, though servers
            may have got some of their pushes. Where workers have their own copies of the
            parameters, all of the call in flight, which are gone with the copy. A step counts
            as done when the server has applied it that counts global steps.
        batches: batches that no step that counts was done on: those of the steps in flight,
            and those that a worker had fetched ahead. Known, and counted, at the end of an
            epoch whose number of batches is known; with `steps_per_epoch` others do the steps
            on later batches, and none are counted.
        retried: batches that were lost with a worker, and that others, or the same one when it
            was back, have trained on at the end of the pass over the data.
        repeated: how many of these count as trained on twice: servers had applied the step of
            the lost worker, but nobody knew of which batch.
    """

    workers: int = 0
    steps: int = 0
    batches: int = 0
    retried: int = 0
    repeated: int = 0

    def __add__(self, other: Losses) -> Losses:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Losses(*map(operator.add, mine, others))


class Slot:
    """A worker's thread as the run sees it; the thread writes, the coordinator reads.

    Args:
        number: counts the threads of all workers.
        index: the worker's task index.

    Attributes:
        number: as above.
        index: as above.
        thread: what the membership knows the thread by; it refers to nothing.
        worker: the same as a server of the cluster.
        device: its device name.
        state: what `open_worker` returned and the calls then updated.
        busy_since: when its call in flight began (time.monotonic), or None.
        lost: whether it, or what it trains on, is gone at the moment.
        is_counted: whether it is, and what was lost with it is counted.
        lives: those of the servers that it needs when the thread opened it, see
            `Membership.life`: of those that hold what it trains on, then its own.
        breaks: how often its connection broke while it lived, since it last finished a call.
        lost_steps: how many steps were lost in it, and are not done by others.
        credited: how many steps of its calls that have ended count as done.
        noted: how many batches it is known to have done, where they have numbers.
        read_at: when its metrics were last read between two calls (time.monotonic), if they are.
        round: in which round of the pass it is, see `PassBatches`.
        kept_data: the worker's life in which its thread goes on with its iterator, if what it
            trains on is made anew; None: it gets another one.
        has_kept: whether its iterator is one that it kept, and has given no batch since.
        ended: whether it has seen the end of its data.
        call: the steps of its call in flight; 0 between calls.
        calls: counts the calls that had steps.
        read_calls: the same when somebody asked what its worker has done, and was told.
        shall_read: whether somebody asks for that.
        called: when the last of them began (time.monotonic).
        progress: how many of its steps are known to be done, but for the last one.
        progressed: when that was last seen to grow (time.monotonic), or the call began or ended.
        told: when the call was told to end (time.monotonic); 0 if it was not.
        cancellation: ends its call in flight, whose worker may wait for a batch that never comes.
        waits: whether its thread waits for steps.
        left_at: how many had been granted when it last left.
        running: whether its thread is still at work.
        pass_began: when the workers began together (time.time()).
    """

    def __init__(self, number: int, index: int):
        self.number = number
        self.index = index
        self.thread = object()
        self.worker: Server = ("worker", index)
        self.device = device_of(*self.worker)
        self.state: WorkerState | None = None
        self.busy_since: float | None = None
        self.lost = self.is_counted = False
        self.lives: dict[Server, int] = {}
        self.breaks = 0
        self.lost_steps = 0
        self.credited = self.noted = self.round = 0
        self.left_at = 0.0
        self.read_at = 0.0
        self.kept_data: int | None = None
        self.has_kept = False
        self.ended = False
        self.call = self.calls = self.read_calls = self.progress = 0
        self.shall_read = False
        self.called = self.told = 0.0
        self.progressed = time.monotonic()
        self.cancellation = cancellation.CancellationManager()
        self.waits = False
        self.running = True
        self.pass_began = 0.0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, its thread, or another one for it, calls servers."""
        self.busy_since = time.monotonic()
        try:
            yield
        finally:
            self.busy_since = None

    def begin_call(self, steps: int) -> None:
        """A call of so many steps begins; its state knows."""
        self.calls += 1
        self.progress, self.told = 0, 0.0
        self.called = self.progressed = time.monotonic()
        self.call = steps  # Now others look at it.

    def seen(self, progress: int, now: float) -> int:
        """The call is seen to be so far, by this time; how many steps that is more than before."""
        more = max(progress - self.progress, 0)
        if more:
            self.progress, self.progressed = progress, now
        return more

    def end_call(self) -> int:
        """The call has ended; how many of its steps had been seen."""
        seen = self.progress
        self.call = self.progress = 0
        return seen

    def go_on(self, other: Slot) -> tuple[int, int]:
        """Takes over what a slot of the same number had, in a pass that has failed.

        Returns:
            Of its call in flight, the steps that are known to be done, and those that were lost.
        """
        self.state, self.lost_steps, self.kept_data = other.state, other.lost_steps, other.kept_data
        self.ended, self.has_kept = other.ended, other.kept_data is not None
        self.credited, self.noted, self.round = other.credited, other.noted, other.round
        if not other.call or other.state is None:
            return 0, 0
        done, lost = other.state.account_lost(other.call, other.progress, 0.0, lambda: {})
        self.lost_steps += lost
        self.credited += done
        return done, lost

    @property
    def taken(self) -> int:
        """The batches that it has had in the pass: trained on, or lost with it."""
        return self.lost_steps + (0 if self.state is None else self.state.steps)

    @property
    def known_steps(self) -> int:
        """The steps that its worker has done for it, as far as known; others may begin a call."""
        before = self.state.steps_at_call  # Not after the progress, which may be of the next call.
        return max(self.state.steps, before + self.progress)

    @property
    def idle_since(self) -> float | None:
        """Since when its call in flight has not been seen to go on; None if there is none."""
        since = self.busy_since  # Its thread sets it at any time.
        return since if since is None or not self.call else max(since, self.progressed)
