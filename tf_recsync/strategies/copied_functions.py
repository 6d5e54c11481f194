"""What Keras calls to train where every group of workers has its own parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_recsync.strategies.distributed_dataset import DistributedIterator
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.strategies.group_crew import GroupCrew
from tf_recsync.strategies.model_functions import Settings, Steps
from tf_recsync.strategies.model_variables import OnServers, copied_variables, peeked_variables
from tf_recsync.strategies.pass_iterator import PassIterator
from tf_recsync.strategies.silence_watch import silent_or_new
from tf_recsync.strategies.slots import Crew
from tf_recsync.strategies.watched_calls import check_parameter_servers
from tf_recsync.strategies.worker_run import WorkerRun
from tf_recsync.strategies.worker_state import WorkerState
from tf_recsync.synchronization.aggregation import Aggregation
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.group_variables import GroupVariables
from tf_recsync.synchronization.pull_push import Layout
from tf_recsync.synchronization.synchronizer import Synchronizer
from tf_recsync.synchronization.worker_states import WorkerStates


class CopiedTrainFunction(Steps):
    """`model.train_function` where every group of workers trains a copy of its own.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        variables: where its steps find the model's variables.
        read: what users see of the copies, see `Copies`.
    """

    method = "train_step"

    def __init__(
        self, model: keras.Model, settings: Settings, variables: OnServers, read: str | int
    ):
        super().__init__(model, settings, variables)
        self.group: Synchronizer | None = None
        self.aggregations: dict[int, Aggregation] = {}  # By group, in modes that use tokens.
        self._arrangement = settings.arrangement
        self._is_open = False  # Between an epoch's begin and its end.
        self._flushing = threading.RLock()
        self._read = read

    def __call__(self, iterator: Any) -> dict[str, Any]:
        try:
            return super().__call__(iterator)
        except StopIteration:
            raise
        except BaseException:
            self._failed()
            raise

    def _failed(self) -> None:
        """Training has failed; the error is raised next."""
        if self.group is not None:
            self.group.release()

    def _make_group(self, copies: Copies) -> Synchronizer:
        """Makes what synchronizes the workers' copies."""
        raise NotImplementedError

    def _crew(self) -> Crew:
        if not self.aggregations:
            return self.group
        return GroupCrew(self._arrangement, self.group, self.aggregations, self.threads)

    def _group_of(self, worker: int) -> Group:
        return self._arrangement.group_of(worker)

    def _groups(self) -> Sequence[Group]:
        return self._arrangement.groups

    def _aggregation_of(self, layout: Layout) -> Aggregation | None:
        mode, group = self._settings.mode, layout.group
        if mode.uses_tokens and group.index not in self.aggregations:
            variables = GroupVariables(group, self.group.copies)
            self.aggregations[group.index] = Aggregation(
                mode, layout.optimizers, variables, group.device(0)
            )
        return self.aggregations.get(group.index)

    def _flush(self) -> None:
        # The coordinator, or whoever reads a variable, or the thread of the worker that was last.
        with self._flushing:
            if self._is_open:
                self._is_open = False
                for aggregation in self.aggregations.values():
                    aggregation.flush()
                self.group.end()
                self.group.copies.settled()

    def _hold(self) -> bool:
        # If fit was stopped within an epoch, its steps have come to an end.
        if self._run is not None and self._should_stop():
            self._settle(self._run)
            return False
        return super()._hold()

    def _go_on(self) -> None:
        if self.group is not None:
            self.group.copies.carried_on()
        super()._go_on()

    def _all_done(self, run: WorkerRun) -> None:
        """No thread of a worker is at work any more."""
        # Keras calls nobody if it was stopped within an epoch.
        if not self._should_stop() or run is not self._run or self._settings.cluster.is_closed:
            return
        try:
            self._flush()
        except (tf.errors.OpError, RuntimeError) as error:
            logging.warning("After a pass that was stopped: %s", error)

    def _should_stop(self) -> bool:
        return bool(self._model.stop_training)

    def _continue(self, iterator: DistributedIterator) -> Layout:
        if iterator.run is None and self._run is not None:
            self._run.stop()  # It may have been left early.
            self._flush()
        self.ensure_group()
        layout = super()._continue(iterator)
        for begin in (self.group.copies.begin, self.group.begin):
            self._begin_without_the_gone(begin, iterator.run)
        for aggregation in self.aggregations.values():
            # Within a run, clocks go on.
            if iterator.run is None or self._settings.mode.uses_buffers:
                aggregation.begin()
        self._is_open = True
        return layout

    def _begin_without_the_gone(self, begin: Callable[[], None], run: WorkerRun | None) -> None:
        """Begins an epoch with the workers that there are: nobody has called them since the last.

        Args:
            begin: may be called again when it has failed.
            run: the pass that goes on, or None.
        """
        while True:
            self._lose_the_gone(run)
            try:
                return begin()
            except tf.errors.OpError as error:
                check_parameter_servers(self._settings.cluster, error)
                if not self._lose_the_gone(run):
                    raise

    def _lose_the_gone(self, run: WorkerRun | None) -> bool:
        """Tells the group which workers are gone with their copies; whether there are any."""
        cluster, limit = self._settings.cluster, self._settings.silence_timeout
        known = {*self.group.there, *self.group.copies.there}
        groups = [g for g in self._arrangement.groups if g.index in known and not g.servers]
        holders = {group.trainers[0]: group.index for group in groups}
        gone = {w for w, group in holders.items() if self.group.copies.is_of_earlier_life(group)}
        gone.update(silent_or_new(cluster, [w for w in holders if w not in gone], limit))
        for worker in sorted(gone):
            if run is not None:
                run.expect_loss(worker)
            self.group.lose(worker)
        return bool(gone)

    def ensure_group(self) -> Synchronizer:
        """The workers; made at the first call, when the model and its optimizer are built."""
        if self.group is None:
            variables, cluster = copied_variables(self._model), self._settings.cluster
            peeked = [variable._value for variable in peeked_variables(self._model)]
            groups = self._arrangement.groups
            copies = Copies(variables, cluster, groups, self._read, self._hold, peeked)
            self.group = self._make_group(copies)
        return self.group

    def _start(self, iterator: DistributedIterator) -> WorkerRun:
        run = super()._start(iterator)
        self.group.fail = run.fail
        run.when_done(lambda: self._all_done(run))
        return run

    def _open(
        self, worker: int, iterator: PassIterator, private, before: WorkerState | None
    ) -> WorkerState:
        group = self._group_of(worker)
        if not group.servers and self.group.copies.is_of_earlier_life(group.index):
            # Its server was readmitted by another thread; the group does not know yet.
            raise tf.errors.UnavailableError(None, None, "its copies were of an earlier life")
        self.group.open(worker)
        return _State(self.group, worker, group.index, iterator, private, before)


class _State(WorkerState):
    """What lives on a worker during a pass."""

    def __init__(self, group: Synchronizer, worker: int, number: int, iterator, private, before):
        super().__init__(worker, iterator, private, before)
        self._group = group
        self._index = worker
        self._number = number  # Of the worker's group.
        self._copies = group.copies.of(number)

    @property
    def inputs(self) -> list[tf.Tensor]:
        return [*super().inputs, *self._group.handles(self._index)]

    def begin(self, time: float) -> None:
        if self._copies is None or self._group.copies.of(self._number) is not self._copies:
            # It was given up, and answers again: with copies that nobody synchronizes.
            raise tf.errors.UnavailableError(None, None, "it was lost between two epochs")
        if not self._has_begun:
            self._group.copies.touched()
        # All workers are open by now.
        self._group.carry_on()
        super().begin(time)


def worker_states(strategy: FitStrategy, model: keras.Model) -> WorkerStates:
    """What a checkpoint keeps of the workers of a model.

    Args:
        strategy: whose train function is a `CopiedTrainFunction`.
        model: a built model that was compiled in its scope.

    Raises:
        ValueError: if the model is not built, or from elsewhere.
    """
    if not model.built or model.optimizer is None:
        raise ValueError(f"model {model.name} must be built and compiled")

    def group() -> Synchronizer:
        strategy.attach(model)
        return model.train_function.ensure_group()

    group()
    return WorkerStates(group)
