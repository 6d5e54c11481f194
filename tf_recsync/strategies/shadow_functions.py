"""What Keras calls to train under a `ShadowSyncStrategy`."""

from __future__ import annotations

from collections.abc import Callable

import keras

from tf_recsync.strategies.copied_functions import CopiedTrainFunction
from tf_recsync.strategies.distributed_dataset import DistributedIterator
from tf_recsync.strategies.model_functions import Settings
from tf_recsync.strategies.model_variables import OnServers, copied_variables, optimizers_of
from tf_recsync.strategies.slots import Slot
from tf_recsync.synchronization.copies import Copies, is_copied
from tf_recsync.synchronization.group_variables import OnCopies
from tf_recsync.synchronization.pull_push import Layout
from tf_recsync.synchronization.shadow import ShadowGroup


class ShadowTrainFunction(CopiedTrainFunction):
    """`model.train_function`: steps pull and push a copy of the worker's own, and tables.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        make_group: makes the group of trainers, of what they have copies of, how many of
            those are parameters, and which of them count the staleness of dense variables.
        threads: of each trainer.
        counts_steps: whether synchronization is due after a number of steps.
        read: what users see of the copies, see `Copies`.
    """

    group: ShadowGroup | None
    local_batch_size: int | None = None  # Of the data that were trained on last.

    def __init__(
        self,
        model: keras.Model,
        settings: Settings,
        make_group: Callable[[Copies, int, list[int]], ShadowGroup],
        threads: int,
        counts_steps: bool,
        read: str | int,
    ):
        super().__init__(model, settings, OnServers(model), read)
        self.threads = threads
        self._make = make_group
        self._counts_steps = counts_steps

    def _make_group(self, copies: Copies) -> ShadowGroup:
        dense = [v for v in self._model.trainable_variables if is_copied(v)]
        places = {id(v): i for i, v in enumerate(copies.variables)}
        states = [s for o in optimizers_of(self._model) for s in o.states if not s.is_table]
        return self._make(copies, len(dense), [places[id(s.counters._value)] for s in states])

    def _continue(self, iterator: DistributedIterator) -> Layout:
        self.local_batch_size = iterator.distributed.batch_size
        size = self.local_batch_size
        for optimizer in optimizers_of(self._model):
            optimizer.count_steps_of(size and size * self._settings.mode.capacity)
        return super()._continue(iterator)

    def _lengths(self, iterator: DistributedIterator) -> set[int]:
        lengths = super()._lengths(iterator)
        # A call ends where a synchronization is due.
        return lengths | {1} if self._counts_steps else lengths

    def _run_steps(self, slot: Slot, n: int) -> tuple[int, bool]:
        done, group = 0, self.group
        while done < n:
            left = group.steps_until_sync(slot.number)
            part = n - done if left is None else min(n - done, left)
            with group.training(slot.number):
                steps, ended = super()._run_steps(slot, part)
            done += steps
            group.trained(slot.number, steps)
            if ended:
                return done, True
        return done, False

    def _trace(self, layout: Layout, element_spec, steps, compute_time) -> Callable:
        concrete = super()._trace(layout, element_spec, steps, compute_time)
        arguments = 4 + len(layout.private)  # The iterator included.
        return OnCopies(concrete, arguments, copied_variables(self._model))
