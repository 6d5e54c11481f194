"""The batches of one pass over a dataset: where workers get them, and which are done."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.done_batches import DoneBatches
from tf_recsync.strategies.pass_iterator import PassIterator
from tf_recsync.strategies.slots import Slot
from tf_recsync.strategies.worker_datasets import WorkerDatasets

if TYPE_CHECKING:
    from tf_recsync.strategies.distributed_dataset import DistributedDataset
    from tf_recsync.strategies.registered_dataset import RegisteredDataset


class PassBatches:
    """Makes the iterators of a pass. Where batches have numbers, it keeps which of them are done.

    When all have seen the end of the data, what was lost with workers is missing: `open_rest` has
    them go on with that. Where workers make their batches, each of their threads has a part of the
    data, which it goes through in order, so that a count says what is done.

    Args:
        distributed: the dataset.
        slots: how many threads call workers.
        position: where the pass begins, if that is not the beginning of a new one; see
            `DistributedDataset.reachable`.
        is_read_between: whether of a worker that is lost only that counts which was read of it,
            between two calls, where workers make their batches. Default False.

    Attributes:
        distributed: as above.
        begin: where it begins.
        number: of the pass over the dataset, from 0.
        data: as workers get at it.
        done: the batches that are done; None where they have no numbers.
        retries: whether what is lost is done by others at the end.
        recounts: whether what nobody knows of a worker that is lost counts as done no more.
        are_noted: whether slots note what is known to be done.
        round: how often the rest was opened.
        parts: in how many parts the batches have numbers, see data_parts.py.
    """

    def __init__(
        self,
        distributed: DistributedDataset,
        slots: int,
        position: DataPosition | None = None,
        is_read_between: bool = False,
    ):
        self.begin = position or DataPosition()
        self.data: RegisteredDataset | WorkerDatasets
        self.data, self.number = distributed.shared(position)
        self.parts = distributed.parts_at(self.begin)
        self.retries = distributed.retries
        self.done: DoneBatches | None = None
        if distributed.is_numbered:
            self.done = DoneBatches(self.begin.prefix, self.begin.done)
        # In data without an end, others do as many of later ones.
        self.recounts = self.retries or (is_read_between and distributed.is_endless)
        self.are_noted = self.done is not None or (self.recounts and is_read_between)
        self.round = 0
        self.distributed = distributed
        self._slots = slots
        self._job = _new_job()
        self._lock = threading.Lock()
        # Where workers make their batches: each slot's part; the batches that it had when it began
        # with that; of each part, those that other slots have done; and the parts that have ended.
        self._parts: list[int | None] = list(range(slots))
        self._before = [0] * slots
        self._by_others = list(self.begin.pipelines or [0] * slots)
        self._ended: set[int] = set()

    def iterator(self, slot: Slot) -> PassIterator:
        """Joins the pass; call it under the worker's device scope."""
        if not isinstance(self.data, WorkerDatasets):
            with self._lock:
                data, job = self.data, self._job
            return data.iterator(job)
        with self._lock:
            part = self._parts[slot.number]
            has_none = part is None or part in self._ended
            earlier = 0 if has_none else self._by_others[part]
            taken = slot.taken - self._before[slot.number]
        if has_none:
            return self.data.empty()
        return self.data.iterator(slot.index, part, self._slots, taken, earlier)

    def note(self, slot: Slot, numbers: Sequence[int] | np.ndarray) -> None:
        """A thread's worker has done these batches."""
        slot.noted += self.done.add(numbers)

    def ended(self, slot: Slot) -> None:
        """A thread has seen the end of its data."""
        with self._lock:
            part = self._parts[slot.number]
            if part is not None:
                self._ended.add(part)

    def taken(self, slots: Sequence[Slot]) -> tuple[int, ...]:
        """Where workers make their batches: how many of each part they have had."""
        with self._lock:
            counts = list(self._by_others)
            for slot in slots:
                part = self._parts[slot.number]
                if part is not None:
                    counts[part] += slot.taken - self._before[slot.number]
            return tuple(counts)

    def open_rest(self, slots: Sequence[Slot], has_lost: bool) -> bool:
        """Whether some batches are not done; from now on iterators are of these.

        Args:
            slots: the threads that call workers, each of which has seen the end of its data, or
                is lost. What they have done is noted.
            has_lost: whether batches were lost since.
        """
        if isinstance(self.data, WorkerDatasets):
            has_more = self._hand_on(slots)
        elif not has_lost or self.done.count >= self.distributed.batches_of(self.parts):
            has_more = False
        else:
            rest = self.distributed.rest(self.number, self.done, self.parts)
            with self._lock:  # One that comes back may be about to join.
                self.data, self._job = rest, _new_job()
            has_more = True
        self.round += has_more
        return has_more

    def _hand_on(self, slots: Sequence[Slot]) -> bool:
        """Gives parts of workers that are lost to others; whether there were any."""
        with self._lock:
            left = [
                (slot, part)
                for slot, part in zip(slots, self._parts, strict=True)
                if part is not None and part not in self._ended and slot.is_counted
            ]
            others = [slot for slot in slots if slot.ended and not slot.lost]
            pairs = list(zip(left, others, strict=False))
            for (lost, part), other in pairs:
                self._leave(lost)
                self._leave(other)
                self._parts[other.number] = part
            return bool(pairs)

    def _leave(self, slot: Slot) -> None:
        """A thread has no part any more; under _lock."""
        part = self._parts[slot.number]
        if part is not None:
            self._by_others[part] += slot.taken - self._before[slot.number]
        self._parts[slot.number], self._before[slot.number] = None, slot.taken

    @property
    def has_all_parts(self) -> bool:
        """Whether all parts have ended, if workers make their batches."""
        if not isinstance(self.data, WorkerDatasets):
            return True
        with self._lock:
            return len(self._ended) == self._slots


def _new_job() -> str:
    """The name of a new pass in the service: readers may have served other coordinators."""
    return f"recsync_{uuid.uuid4().hex}"
