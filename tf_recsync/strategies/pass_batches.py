"""The batches of one pass over a dataset: where workers get them, and which are done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.done_batches import DoneBatches
from tf_recsync.strategies.pass_iterator import PassIterator
from tf_recsync.strategies.slots import Slot

if TYPE_CHECKING:
    from tf_recsync.strategies.distributed_dataset import DistributedDataset, RegisteredDataset
    from tf_recsync.strategies.worker_datasets import WorkerDatasets


class PassBatches:
    """Makes the iterators of a pass. Where batches have numbers, it keeps which of them are done.

    When all have seen the end of the data, what was lost with workers is missing: `open_rest` has
    them go on with that.

    Args:
        distributed: the dataset.
        slots: how many threads call workers.
        position: where the pass begins, if that is not the beginning of a new one; see
            `DistributedDataset.reachable`.

    Attributes:
        begin: as above.
        number: of the pass over the dataset, from 0.
        data: as workers get at it.
        done: the batches that are done; None where they have no numbers.
        retries: whether what is lost is done by others.
        round: how often the rest was opened.
    """

    def __init__(
        self, distributed: DistributedDataset, slots: int, position: DataPosition | None = None
    ):
        self.begin = position or DataPosition()
        self.data: RegisteredDataset | WorkerDatasets
        self.data, self.number = distributed.shared(position)
        self.retries = distributed.retries
        self.done: DoneBatches | None = None
        if distributed.is_numbered:
            self.done = DoneBatches(self.begin.prefix, self.begin.done)
        self.round = 0
        self._distributed = distributed
        self._slots = slots
        self._job = self.data.new_job()

    @property
    def readers(self) -> int:
        """How many readers may have parts of the data."""
        return self.data.readers

    def iterator(self, slot: Slot) -> PassIterator:
        """Joins the pass; call it under the worker's device scope."""
        skipped = self.begin.pipelines[slot.number] if self.begin.pipelines else 0
        return self.data.iterator(self._job, slot.number, self._slots, slot.taken, skipped)

    def note(self, slot: Slot, numbers: Sequence[int] | np.ndarray) -> None:
        """A thread's worker has done these batches."""
        slot.noted += self.done.add(numbers)

    def open_rest(self) -> bool:
        """Whether some batches are not done; from now on iterators are of these.

        All that is done is noted.
        """
        if self.done is None or self.done.count >= self._distributed.known_batches:
            return False
        self.data = self._distributed.rest(self.number, self.done)
        self._job = self.data.new_job()
        self.round += 1
        return True
