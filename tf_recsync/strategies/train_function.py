"""What Keras calls to train, whatever the groups of workers, their mode and their synchronizer."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Server
from tf_recsync.shown_variable import shown
from tf_recsync.strategies.distributed_dataset import DistributedIterator
from tf_recsync.strategies.group_crew import GroupCrew
from tf_recsync.strategies.model_functions import Settings, Steps
from tf_recsync.strategies.model_variables import OnServers, copied_variables, peeked_variables
from tf_recsync.strategies.pass_iterator import PassIterator
from tf_recsync.strategies.slots import Crew, Slot
from tf_recsync.strategies.watched_calls import check_parameter_servers, lose_the_gone
from tf_recsync.strategies.worker_run import WorkerRun
from tf_recsync.strategies.worker_state import WorkerState
from tf_recsync.synchronization.aggregation import Aggregation
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.copies import Copies, is_copied
from tf_recsync.synchronization.group_variables import GroupVariables
from tf_recsync.synchronization.pull_push import Layout
from tf_recsync.synchronization.synchronizer import Synchronizer


class TrainFunction(Steps):
    """`model.train_function`.

    An epoch begins with the copies, which take over what users have assigned, then the
    synchronizer, then what groups take their tokens from; it ends the other way round.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        variables: where its steps find the model's variables.
        make_synchronizer: makes what keeps the groups' copies together; None where there is one
            group, whose copy is the model's own variables.
        read: what users see of the copies, see `Copies`.
        threads: that call each worker.
    """

    method = "train_step"

    def __init__(
        self,
        model: keras.Model,
        settings: Settings,
        variables: OnServers,
        make_synchronizer: Callable[[Copies], Synchronizer] | None = None,
        read: str | int = "mean",
        threads: int = 1,
    ):
        super().__init__(model, settings, variables)
        self.threads = threads
        self.synchronizer: Synchronizer | None = None
        self.aggregations: dict[int, Aggregation] = {}  # By group, in modes that use tokens.
        self.local_batch_size: int | None = None  # Of the data that were trained on last.
        self._make_synchronizer = make_synchronizer
        self._arrangement = settings.arrangement
        self._read = read
        self._is_open = False  # Between an epoch's begin and its end.
        self._flushing = threading.RLock()
        # Of each group: one worker at a time makes what it shares with others.
        self._opening = [threading.Lock() for _ in settings.arrangement.groups]
        self._suspended: set[int] = set()  # Workers whose tokens are not given back yet.
        # Keras drops it when it leaves a pass.
        self._iterator: weakref.ref[DistributedIterator] | None = None

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
        if self.synchronizer is not None:
            self.synchronizer.release()

    # The groups, and what keeps them together.

    def ensure_synchronizer(self) -> Synchronizer | None:
        """Made at the first call, when the model and its optimizer are built; None without."""
        if self.synchronizer is None and self._make_synchronizer is not None:
            self._variables.place(self._arrangement.shards)
            peeked = [variable._value for variable in peeked_variables(self._model)]
            copies = Copies(
                copied_variables(self._model),
                self._settings.cluster,
                self._arrangement.groups,
                self._read,
                self._hold,
                peeked,
                self.watched,
                self._variables.pieces,
            )
            self.synchronizer = self._make_synchronizer(copies)
        return self.synchronizer

    def _copies(self) -> Copies | None:
        return None if self.synchronizer is None else self.synchronizer.copies

    def _crew(self) -> Crew | None:
        if not self.aggregations:
            return self.synchronizer
        return GroupCrew(
            self._arrangement,
            self.synchronizer,
            self.aggregations,
            self.threads,
            self._suspended,
            self._opening,
        )

    def _group_of(self, worker: int) -> Group:
        return self._arrangement.group_of(worker)

    def _groups(self) -> Sequence[Group]:
        return self._arrangement.groups

    def _aggregation_of(self, layout: Layout) -> Aggregation | None:
        mode, group = self._settings.mode, layout.group
        if mode.uses_tokens and group.index not in self.aggregations:
            variables = GroupVariables(group, self._copies())
            can_come_back = bool(self._spared().intersection(group.holders))
            states = {o: layout.states_of(o) for o in layout.optimizers}
            self.aggregations[group.index] = Aggregation(
                mode, states, variables, group.device(0), can_come_back
            )
        return self.aggregations.get(group.index)

    def _replaced(self, layout: Layout) -> list[tf.Tensor]:
        copies = self._copies()
        if copies is None:
            return []
        # As `_State.inputs` has them.
        replaced = [variable.handle for variable in copies.variables]
        if layout.group.index in self.aggregations:
            replaced += self.aggregations[layout.group.index].handles
        return replaced

    def _lengths(self, iterator: DistributedIterator) -> set[int]:
        lengths = super()._lengths(iterator)
        # A call ends where a synchronization is due.
        counts = self.synchronizer is not None and self.synchronizer.counts_steps
        return lengths | {1} if counts else lengths

    def _teller_of(self, layout: Layout) -> str:
        synchronizer = self.synchronizer
        ends_calls = synchronizer is not None and (
            synchronizer.counts_steps or synchronizer.most_steps is not None
        )
        return "" if ends_calls else layout.owner

    def _most_per_call(self) -> int | None:
        most = None if self.synchronizer is None else self.synchronizer.most_steps
        return None if most is None else max(most, self._model.steps_per_execution)

    def _run_steps(self, slot: Slot, n: int) -> tuple[int, bool]:
        synchronizer = self.synchronizer
        if synchronizer is None:
            return super()._run_steps(slot, n)
        if self._calls_are_told:
            with synchronizer.training(slot.number):
                return super()._run_steps(slot, n)
        done, began = 0, time.monotonic()
        while done < n:
            left = synchronizer.steps_until_sync(slot.number)
            part = n - done if left is None else min(n - done, left)
            with synchronizer.training(slot.number):
                steps, ended = super()._run_steps(slot, part)
            done += steps
            synchronizer.trained(slot.number, steps)
            if ended or steps < part or time.monotonic() - began > self.call_limit:
                return done, ended
        return done, False

    def _note_steps(self, slot: Slot, steps: int) -> None:
        if self.synchronizer is not None and self._calls_are_told:
            self.synchronizer.trained(slot.number, steps)

    # A pass, and its epochs.

    def _should_stop(self) -> bool:
        return bool(self._model.stop_training)

    def _start(self, iterator: DistributedIterator) -> WorkerRun:
        run = super()._start(iterator)
        if self.synchronizer is not None:
            self.synchronizer.fail = run.fail
        # The copies see to it themselves.
        apart = {id(variable) for variable in peeked_variables(self._model)}
        for variable in [*self._model.variables, *self._model.optimizer.variables]:
            found = shown(variable._value)
            if found is not None and id(variable) not in apart and not is_copied(variable):
                found.before_read = self._hold
        run.when_done(lambda: self._all_done(run))
        return run

    def _open(
        self, worker: int, iterator: PassIterator, private, before: WorkerState | None, owner: str
    ) -> WorkerState:
        group = self._group_of(worker)
        aggregation = self.aggregations.get(group.index)
        # What was lost may have been the connection, and the call have gone on for a while.
        may_hold = before is not None and aggregation is not None
        if self.synchronizer is None:
            if may_hold:
                aggregation.forget(worker)
            return super()._open(worker, iterator, private, before, owner)
        with self._opening[group.index]:
            self.synchronizer.open(worker)
            if aggregation is not None:
                self._renew(group.index, aggregation)
                if may_hold:
                    aggregation.forget(worker)
                away = self._settings.cluster.membership.is_away
                for other in self._suspended.intersection(group.trainers):
                    # If the group's servers only fell silent, they have all tokens that they
                    # had; what these workers were at is lost.
                    if other == worker or away(("worker", other)):
                        aggregation.lose(other)
                        self._suspended.discard(other)
        return _State(
            self.synchronizer, aggregation, worker, group.index, iterator, private, before, owner
        )

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Inside, all is as between two epochs, in the middle of one, too; for a callback of `fit`.

        No step is in flight, and servers hold nothing back.
        """
        self._hold()
        is_within = self._is_open
        with self.watched():
            self._flush()
            if is_within:
                self._refresh(self._run)  # Of workers that begin anew, nobody could later.
        yield
        iterator = None if self._iterator is None else self._iterator()
        if is_within and iterator is not None:
            with self.watched():
                self._continue(iterator)

    def put_aside(self, group: int, restarted: Iterable[int]) -> None:
        """The holders of a group's copy are about to end: keeps what they have; call it
        `interrupted`.

        Args:
            group: its number.
            restarted: the workers that end, too. Others of the group go on with their data.
        """
        copies = self._copies()
        if copies is not None and group in copies.there:
            with self.watched():
                copies.put_aside(group)
        if self._run is not None:
            self._run.keep_data(set(self._arrangement.groups[group].trainers) - set(restarted))

    def _continue(self, iterator: DistributedIterator) -> Layout:
        self._iterator = weakref.ref(iterator)
        is_new = iterator.run is None
        if is_new and self._run is not None:
            self._run.stop()  # It may have been left early; its steps come to an end.
            if self.synchronizer is not None:
                self._flush()
        if self._settings.prefetch_lookups and self._model.steps_per_execution == 1:
            raise ValueError(
                "prefetch_lookups=True needs steps_per_execution above 1 in compile: only steps "
                "that are unrolled can prefetch"
            )
        self.local_batch_size = size = iterator.distributed.batch_size
        for optimizer in self._variables.optimizers:
            optimizer.count_steps_of(size and size * self._settings.mode.capacity)
        self.ensure_synchronizer()
        layout = super()._continue(iterator)
        if self.synchronizer is not None:
            for begin in (self.synchronizer.copies.begin, self.synchronizer.begin):
                self._begin_without_the_gone(begin)
        # Within a run, clocks go on.
        if is_new or self._settings.mode.uses_buffers:
            self._of_each_group(Aggregation.begin)
        self._is_open = True
        return layout

    def _of_each_group(self, action: Callable[[Aggregation], None]) -> None:
        """Acts on the aggregations of all groups that have their copy."""
        for group, aggregation in self.aggregations.items():
            try:
                with self._opening[group]:  # A worker may be about to make it anew.
                    if self.synchronizer is None or group in self.synchronizer.copies.there:
                        self._renew(group, aggregation)
                        action(aggregation)
            except tf.errors.OpError:
                if not self._lose_the_gone():
                    raise
                logging.warning("What group %d had collected of a step is lost.", group)

    def _renew(self, group: int, aggregation: Aggregation) -> None:
        """Makes an aggregation anew if the group's copies were; under `_opening`."""
        copies = None if self.synchronizer is None else self.synchronizer.copies.of(group)
        if aggregation.made_for is not None and aggregation.made_for is not copies:
            aggregation.renew()
        aggregation.made_for = copies  # Not earlier: if that fails, it is done again.

    def _begin_without_the_gone(self, begin: Callable[[], None]) -> None:
        """Begins an epoch with the workers that there are: nobody has called them since the last.

        Args:
            begin: may be called again when it has failed.
        """
        while True:
            self._lose_the_gone()
            try:
                return begin()
            except tf.errors.OpError as error:
                check_parameter_servers(self._settings.cluster, error, self._spared())
                if not self._lose_the_gone():
                    raise

    def _lose_the_gone(self) -> bool:
        """Finds groups whose copies are gone; whether there are any."""
        if self.synchronizer is None:
            return False
        cluster, limit = self._settings.cluster, self._settings.silence_timeout
        copies, spared = self.synchronizer.copies, self._spared()
        known = {*self.synchronizer.there, *copies.there}
        groups = [group for group in self._arrangement.groups if group.index in known]

        def asked(group: Group) -> list[Server]:
            if copies.is_of_earlier_life(group.index):
                return []
            # Others end training, with an error that names them.
            return [h for h in group.holders if h[0] == "worker" or h in spared]

        def is_gone(group: Group) -> bool:
            is_earlier = copies.is_of_earlier_life(group.index)
            return is_earlier or any(map(cluster.membership.is_away, asked(group)))

        lose_the_gone(cluster, [holder for group in groups for holder in asked(group)], limit)
        gone = [group for group in groups if is_gone(group)]
        cluster.tell_members()  # If a pass goes on, it tells the synchronizer.
        for group in gone:
            if group.servers:
                logging.warning("The copy of group %d is gone with its server.", group.index)
                self.synchronizer.lose_group(group.index)
            elif group.index in self.synchronizer.there:
                self.synchronizer.lose(group.trainers[0])
        return bool(gone)

    def _spared(self) -> set[tuple[str, int]]:
        """The parameter servers without which others go on."""
        if self.synchronizer is None:
            return set()
        workers = range(self._settings.cluster.workers)
        return {holder for w in workers for holder in self.synchronizer.holders_of(w)}

    def _flush(self) -> None:
        """All steps are done: what servers hold back of them is applied, and copies are shown."""
        # The coordinator, or whoever reads a variable, or the thread of the worker that was last.
        with self._flushing:
            if not self._is_open:
                return
            self._is_open = False
            self._of_each_group(Aggregation.flush)
            if self.synchronizer is not None:
                self.synchronizer.end()
                self.synchronizer.copies.settled()

    def _hold(self) -> bool:
        # If fit was stopped within an epoch, its steps have come to an end.
        if self._run is not None and self._should_stop():
            self._settle(self._run)
            return False
        return super()._hold()

    def _go_on(self) -> None:
        copies = self._copies()
        if copies is not None:
            copies.carried_on()
        super()._go_on()

    def _all_done(self, run: WorkerRun) -> None:
        """No thread of a worker is at work any more."""
        # Keras calls nobody if it was stopped within an epoch, or a callback has raised an error.
        is_left = self._should_stop() or (self.synchronizer is not None and run.is_left)
        if not is_left or run is not self._run or self._settings.cluster.is_closed:
            return
        try:
            self._flush()
        except (tf.errors.OpError, RuntimeError) as error:
            logging.warning("After a pass that was stopped: %s", error)


class _State(WorkerState):
    """What lives on a worker during a pass, where its group has a copy."""

    def __init__(
        self,
        synchronizer: Synchronizer,
        aggregation: Aggregation | None,
        worker: int,
        group: int,
        iterator,
        private,
        before,
        owner,
    ):
        super().__init__(worker, iterator, private, before, owner)
        self._synchronizer = synchronizer
        self._aggregation = aggregation
        self._index = worker
        self._group = group
        self._copies = synchronizer.copies.of(group)

    @property
    def inputs(self) -> list[tf.Tensor]:
        shared = [] if self._aggregation is None else self._aggregation.handles
        return [*super().inputs, *self._synchronizer.handles(self._index), *shared]

    def begin(self, time: float) -> None:
        super().begin(time)
        copies = self._synchronizer.copies
        if self._copies is None or copies.of(self._group) is not self._copies:
            # It was given up, and answers again: with copies that nobody synchronizes.
            raise tf.errors.UnavailableError(None, None, "it was lost between two epochs")
        copies.touched()
        # All workers are open by now.
        self._synchronizer.carry_on()
