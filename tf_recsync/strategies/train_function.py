"""What Keras calls to train, whatever the groups of workers, their mode and their synchronizer."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Server, reason
from tf_recsync.optimizers.base import Optimizer, parts_of
from tf_recsync.placement import OperatorPlan
from tf_recsync.shown_variable import ShownVariable, shown
from tf_recsync.strategies.checks import warn_of_moving_averages
from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.distributed_dataset import DistributedDataset, DistributedIterator
from tf_recsync.strategies.group_crew import GroupCrew
from tf_recsync.strategies.model_functions import Settings, Steps
from tf_recsync.strategies.model_variables import OnServers, copied_variables, peeked_variables
from tf_recsync.strategies.operators import Batches
from tf_recsync.strategies.pass_batches import PassBatches
from tf_recsync.strategies.recovery import Recovery, find_lost, make_anew, names_of, recovered
from tf_recsync.strategies.slots import Slot
from tf_recsync.strategies.watched_calls import check_parameter_servers, lose_the_gone
from tf_recsync.strategies.worker_datasets import WorkerDatasets
from tf_recsync.strategies.worker_run import WorkerRun
from tf_recsync.strategies.worker_state import WorkerState
from tf_recsync.synchronization.aggregation import Aggregation, Counted, Report
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.at_once import AT_ONCE, AtOnce
from tf_recsync.synchronization.copies import Copies, is_copied
from tf_recsync.synchronization.events import Recordings
from tf_recsync.synchronization.group_variables import GroupVariables
from tf_recsync.synchronization.modes import Mode
from tf_recsync.synchronization.pull_push import Layout
from tf_recsync.synchronization.remote_values import Answer
from tf_recsync.synchronization.synchronizer import Crew, Synchronizer


class TrainFunction(Steps):
    """`model.train_function`.

    An epoch begins with the copies, which take over what users have assigned, then the
    synchronizer, then what groups take their tokens from; it ends the other way round.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        variables: where its steps find the model's variables.
        make_synchronizer: makes what keeps the groups' copies together; by default nothing does,
            as for one group, whose copy is the model's own variables.
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
        self.synchronizer: Synchronizer | None = None  # From `ensure_synchronizer` on.
        self.aggregations: dict[int, Aggregation] = {}  # By group, in modes that use tokens.
        self.local_batch_size: int | None = None  # Of the data that were trained on last.
        self.recordings = Recordings()  # Of what workers do.
        self.cluster = settings.cluster
        self._make_synchronizer = make_synchronizer or (
            lambda copies: Synchronizer(settings.arrangement, copies, threads)
        )
        self._arrangement = settings.arrangement
        self._read = read
        self._is_open = False  # Between an epoch's begin and its end.
        self._flushing = threading.RLock()
        # Of each group: one worker at a time makes what it shares with others.
        self._opening = [threading.Lock() for _ in settings.arrangement.groups]
        self.recovery: Recovery | None = None  # From the loss of a parameter server; none without.
        self._is_recovering = False
        self.unrestored: set[Server] = set()  # That were lost.
        # Of the parameter servers, since they have the variables.
        self.lives = settings.cluster.lives("ps")
        # What was used before a server was lost, and what aggregations had counted then.
        self._before: Synchronizer | None = None
        self._counted: dict[int, Counted] = {}
        self._suspended: set[int] = set()  # Workers whose tokens are not given back yet.
        # Keras drops it when it leaves a pass.
        self._iterator: weakref.ref[DistributedIterator] | None = None
        # Whether users have assigned the global step while workers are held.
        self._is_moved = False
        self._has_warned = False  # Of moving averages.
        self._accumulated: int | None = None  # Batches that servers add up in the place of one.

    @property
    def mode(self) -> Mode:
        """When servers apply what workers push: the strategy's mode, for accumulated batches."""
        optimizers = self._variables.optimizers
        batches = optimizers[0].accumulated_batches if optimizers else 1
        if self._accumulated is None:
            self._accumulated = batches
        if batches != self._accumulated:
            raise ValueError(
                f"gradient_accumulation_steps of the optimizer was set to {batches} after the "
                f"model had been trained with {self._accumulated}: compile the model again"
            )
        return super().mode.accumulating(batches)

    def _call(self, iterator: Any) -> dict[str, Any]:
        self.check_restored()
        return super()._call(iterator)

    def _goes_on(self, error: BaseException, iterator: Any) -> bool:
        if self.synchronizer is not None:  # As before the model was built.
            self.synchronizer.release()
        return self._recovered(error, iterator, iterator)

    # Where it is in the data.

    def go_on_at(self, position: DataPosition | None) -> None:
        """The next pass goes on in the data where an earlier process was.

        Keras asks for all steps of its first epoch; those that were done then it gets at once.

        Args:
            position: of that process; None: the pass begins anew, and a call of `fit`.
        """
        self._position, self.beginning = position, None

    def position(self, is_epoch_over: bool) -> DataPosition:
        """Where another process goes on; no worker may be in a step.

        Args:
            is_epoch_over: whether it begins with the next epoch.
        """
        run = self._run
        if self._position is not None or run is None:
            return self._position or DataPosition()  # Nothing of the pass was trained on.
        self._batches.distributed.check_position()
        done, steps = self._batches.done, run.completed
        if done is None:
            batches, beyond = self._uncounted + steps, ()
        else:
            with self.watched():
                self._read_done(run)
            batches, beyond = done.counted
            if self._batches.retries:  # What nobody knows of is trained on again.
                steps = batches - self._uncounted
        if is_epoch_over and (batches >= self._pass_batches or run.has_seen_end):
            return DataPosition(self._passes_before + 1, batch_size=self.local_batch_size)
        pipelines = ()
        if isinstance(run.data, WorkerDatasets):
            pipelines = self._batches.taken(run.slots)
        return DataPosition(
            self._passes_before,
            batches,
            0 if is_epoch_over else max(int(steps - self._epoch_began), 0),
            pipelines,
            self.local_batch_size,
            beyond,
            self._batches.parts,
        )

    def _read_done(self, run: WorkerRun) -> None:
        """Has all be known that workers have done; no worker may be in a step."""
        if self._calls_are_told:
            self._read_rows(run.slots, self._batches)
        for slot in run.slots:
            if slot.state is not None and not slot.lost and slot.noted != slot.credited:
                with contextlib.suppress(tf.errors.OpError):  # Its thread finds out.
                    self._read_worker(slot, self._batches)

    # After the loss of a parameter server; see recovery.py.

    def _can_recover(self) -> bool:
        return self.recovery is not None

    def check_restored(self) -> None:
        """Raises a RuntimeError if variables of lost servers are not restored yet."""
        if self.unrestored:
            raise RuntimeError(
                f"parameter server {names_of(self.unrestored)} was lost, and its parameters with "
                "it, which could not be restored; load a checkpoint into a new model"
            )

    def recovered_between(self, error: Exception) -> bool:
        """Whether a parameter server was lost between two epochs, and what it had is restored.

        The next epoch goes on with the batches that workers have.

        Args:
            error: of a call of this process, or of a pass that is no training.
        """
        if not self._can_recover():
            return False
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None and iterator.run is not None and iterator.run.is_open:
            # Its workers wait for steps, and keep their data if it has failed.
            self._end_failed(iterator.run, error)
            _leave_run(iterator)
        return self._recovered(error, None, iterator)

    def end_recovery(self) -> None:
        """`fit` ends: from now on nobody goes on after the loss of a parameter server."""
        self.recovery = None
        if self._run is not None:
            with self.watched():
                self._run.close_kept()

    def has_lost_servers(self, error: Exception) -> bool:
        """Whether an error comes from the loss of a parameter server without which nobody goes on.

        Args:
            error: of a call of this process.
        """
        with self.watched():
            return bool(find_lost(self.cluster, error, self.spared(), self.lives))

    def _recovered(
        self,
        error: BaseException,
        iterator: DistributedIterator | None,
        kept: DistributedIterator | None,
    ) -> bool:
        """Whether training has failed as a parameter server was lost, and goes on; if it does not,
        workers leave the data that they have kept.

        Args:
            error: by which it has failed.
            iterator: whose pass has failed; None: training stood between two epochs.
            kept: the iterator of the pass whose data workers have kept, if there is one.
        """
        goes_on = False
        try:
            if isinstance(error, Exception) and self._can_recover() and not self.cluster.is_closed:
                self._is_recovering = True
                goes_on = recovered(self, error, iterator)
        finally:
            self._is_recovering = False
            if not goes_on:
                self._leave_kept(kept)
        return goes_on

    def leave_pass(self, iterator: DistributedIterator | None) -> None:
        """A pass has failed: all that was made for it ends, but for the data that workers have."""
        if iterator is not None:
            _leave_run(iterator)
        synchronizer, self.synchronizer = self.synchronizer, None
        self._counted.update({n: one.counted for n, one in self.aggregations.items()})
        self.aggregations.clear()
        self._suspended.clear()
        self._is_open = False
        if synchronizer is None:
            return
        try:
            with self.watched():
                synchronizer.end()
        except (tf.errors.OpError, RuntimeError) as error:
            logging.debug("after the loss of a server: %s", error)
        synchronizer.copies.let_go()
        self._before = synchronizer

    def make_anew(self, lost: set[Server]) -> list[ShownVariable]:
        """Makes the variables anew that lost servers had, and has all functions traced again."""
        # Before anything is zeros, so that nobody takes it for what the model has learned. Other
        # models may share layers with this one.
        self._model.distribute_strategy.renewals += 1
        made = make_anew(self._model, lost)
        for function in (self, self._model.test_function, self._model.predict_function):
            function.forget_traced()
        return made

    def go_on_with_pass(
        self, iterator: DistributedIterator | None, position: DataPosition | None
    ) -> None:
        """The steps of a pass that has failed go on, or begin once more where it was."""
        if iterator is None or iterator.failed is None:
            self._tell_of_loss(position)
            return  # It had not begun.
        failed = iterator.failed
        # Keras can't be told to begin an epoch again that is over.
        is_over = self._target >= self._epoch_end or not iterator.distributed.can_go_back
        if position is not None and (is_over or not self._is_of_pass(position)):
            self._tell_of_loss(position)
            position = None
        if position is not None:
            failed.close_kept()
            iterator.distributed.check_order(position)
        self._position = position
        iterator.run = self._start(iterator)
        if position is not None:
            iterator.run.grant(failed.granted - iterator.run.completed)

    def _tell_of_loss(self, position: DataPosition | None) -> None:
        """The model is as it was at a position, and the data are further on."""
        if position is None or self._run is None:
            return
        batches = self._uncounted + self._run.completed
        of_pass = position.batches if position.passes == self._passes_before else -1
        is_next = position.passes == self._passes_before + 1 and position.batches == 0
        if of_pass < batches and not is_next:
            logging.warning("What was trained on since the checkpoint is not trained on again.")

    @property
    def is_epoch_done(self) -> bool:
        """Whether workers have done all steps of the epoch, though Keras may not know yet."""
        run = self._run
        return run is not None and (run.completed >= self._epoch_end or run.has_seen_end)

    def _is_of_pass(self, position: DataPosition) -> bool:
        """Whether it is in the pass that runs, and no further than that."""
        steps = position.batches - self._uncounted
        return position.passes == self._passes_before and 0 <= steps <= self._run.completed

    def _leave_kept(self, iterator: Any) -> None:
        """Nobody goes on with a pass that has failed."""
        for run in (getattr(iterator, "run", None), getattr(iterator, "failed", None)):
            if run is not None:
                with self.watched():
                    run.close_kept()

    def _end_failed(self, run: WorkerRun, error: BaseException) -> None:
        # Workers that wait for steps keep their data only if the pass has failed.
        if isinstance(error, Exception) and self._can_recover():
            run.fail(error)
        else:
            super()._end_failed(run, error)

    # What is recorded of its steps.

    @property
    def is_recorded(self) -> bool:
        return self.recordings.are_made

    def collect_events(self) -> None:
        """Has the workers tell what they have done up to now, those that answer."""
        # Who needs a server that is gone finds out, and raises an error that says so.
        with contextlib.suppress(tf.errors.OpError, RuntimeError), self.watched():
            self._collect_events()

    def _collect_events(self) -> None:
        for slot in [] if self._run is None else self._run.slots:
            state = slot.state
            if state is not None and not slot.lost:
                with contextlib.suppress(tf.errors.OpError):
                    self._take_events(slot, state)

    def _take_events(self, slot: Slot, state: WorkerState) -> None:
        told = state.take_events(slot.device)
        if told is not None:
            self.recordings.add(slot.index, *told, thread=slot.number % self.threads)

    def _note_sync(self, group: int, seconds: float, shard: int) -> None:
        self.recordings.add_sync(self._arrangement.groups[group].trainers[0], seconds, shard)

    def _read_worker(self, slot: Slot, batches: PassBatches, answer: Answer | None = None) -> None:
        if self.is_recorded and answer is None:
            self._take_events(slot, slot.state)
        super()._read_worker(slot, batches, answer)

    # The groups, and what keeps them together.

    def know_batches(self, data: DistributedDataset) -> None:
        """The model is going to train on data: by their batches layers are placed."""
        self._variables.batches = Batches(data.element_spec, data.batch_size)

    def ensure_synchronizer(self) -> Synchronizer:
        """Made at the first call, when the model and its optimizer are built."""
        if self.synchronizer is None:
            self._variables.place(self._arrangement.shards)
            peeked = [variable._value for variable in peeked_variables(self._model)]
            copies = Copies(
                copied_variables(self._model),
                self.cluster,
                self._arrangement.groups,
                self._read,
                self._hold,
                peeked,
                self.watched,
                self._variables.pieces,
            )
            self._variables.shards = copies.shards
            self.synchronizer = self._make_synchronizer(copies)
            self.synchronizer.tell_of_syncs(self._note_sync, lambda: self.is_recorded)
            if self._before is not None:
                self.synchronizer.count_on(self._before)
                self._before = None
        return self.synchronizer

    @property
    def operator_plan(self) -> OperatorPlan | None:
        """The plan by which layers run on servers, once that is decided."""
        return self._variables.plan

    def _crew(self) -> Crew:
        return GroupCrew(
            self._arrangement,
            self.synchronizer,
            dict(self.aggregations),
            self.threads,
            self._suspended,
            self._opening,
        )

    def _group_of(self, worker: int) -> Group:
        return self._arrangement.group_of(worker)

    def _groups(self) -> Sequence[Group]:
        return self._arrangement.groups

    def _aggregation_of(self, layout: Layout) -> AtOnce:
        mode, group = self.mode, layout.group
        if mode.uses_tokens and group.index not in self.aggregations:
            variables = GroupVariables(group, self.synchronizer.copies)
            can_come_back = bool(self.spared().intersection(group.holders))
            states = {o: layout.states_of(o) for o in layout.optimizers}
            before = self._counted.get(group.index, Counted())
            self.aggregations[group.index] = Aggregation(
                mode, states, variables, group.device(0), can_come_back, before
            )
        return self._shared_by(group.index)

    def aggregation_reports(self) -> list[Report]:
        """What became of the pushes of each group; none in modes without tokens.

        While a parameter server is lost, what was known before.
        """
        known = {**self._counted, **self.aggregations}
        return [known[group].report() for group in sorted(known)]

    def _shared_by(self, group: int) -> AtOnce:
        """What the trainers of a group share."""
        return self.aggregations.get(group, AT_ONCE)

    def _replaced(self, layout: Layout) -> list[tf.Tensor]:
        # As `_State.inputs` has them.
        replaced = [variable.handle for variable in self.synchronizer.copies.variables]
        return [*replaced, *self._shared_by(layout.group.index).handles]

    def _lengths(self, iterator: DistributedIterator) -> set[int]:
        lengths = super()._lengths(iterator)
        # A call ends where a synchronization is due.
        return lengths | {1} if self.synchronizer.counts_steps else lengths

    def _teller_of(self, layout: Layout) -> str:
        synchronizer = self.synchronizer
        ends_calls = synchronizer.counts_steps or synchronizer.most_steps is not None
        return "" if ends_calls else layout.owner

    def _most_per_call(self) -> int | None:
        most = self.synchronizer.most_steps
        return None if most is None else max(most, self._model.steps_per_execution)

    def _run_steps(self, slot: Slot, n: int) -> tuple[int, bool]:
        synchronizer = self.synchronizer
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
        if self._calls_are_told:
            self.synchronizer.trained(slot.number, steps)

    # A pass, and its epochs.

    def _should_stop(self) -> bool:
        return bool(self._model.stop_training)

    def _start(self, iterator: DistributedIterator) -> WorkerRun:
        run = super()._start(iterator)
        self.synchronizer.fail = run.fail
        run.when_done(lambda: self._all_done(run))
        return run

    def _listen(self) -> None:
        """Has variables tell of their use, and optimizers wait for steps at the end of `fit`.

        Another model that has some of them, too, may have been trained meanwhile.
        """
        for optimizer in self._variables.optimizers:
            optimizer.wait_for_steps = self._settle
        # The copies see to it themselves.
        apart = {id(variable) for variable in peeked_variables(self._model)}
        for variable in [*self._model.variables, *self._model.optimizer.variables]:
            found = shown(variable._value)
            if found is not None and id(variable) not in apart and not is_copied(variable):
                found.before_read = found.before_assign = self._hold
        for optimizer in parts_of(self._model.optimizer):
            found = shown(optimizer._iterations._value)
            if found is not None and not is_copied(optimizer._iterations):
                found.before_assign = self._hold_to_move

    def _open(self, worker: int, before: WorkerState | None, *parts: Any) -> WorkerState:
        group = self._group_of(worker)
        aggregation = self._shared_by(group.index)
        away = self.cluster.membership.is_away
        with self._opening[group.index]:
            self.synchronizer.open(worker)
            aggregation.ensure(self.synchronizer.copies.of(group.index))
            if before is not None:
                # What was lost may have been the connection, and the call have gone on for a while.
                aggregation.forget(worker)
            for other in self._suspended.intersection(group.trainers):
                # If the group's servers only fell silent, they have all tokens that they
                # had; what these workers were at is lost.
                if other == worker or away(("worker", other)):
                    aggregation.lose(other)
                    self._suspended.discard(other)
        return _State(self.synchronizer, aggregation, group.index, worker, before, *parts)

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Inside, all is as between two epochs, in the middle of one, too; for a callback of `fit`.

        No step is in flight, and servers hold nothing back.
        """
        self._hold()
        self._end_pause()
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
        if self.synchronizer is not None and group in self.synchronizer.copies.there:
            with self.watched():
                self.synchronizer.put_aside(group)
        if self._run is not None:
            self._run.keep_data(set(self._arrangement.groups[group].trainers) - set(restarted))

    def _continue(self, iterator: DistributedIterator) -> Layout:
        self._iterator = weakref.ref(iterator)
        is_new = iterator.run is None
        if is_new and self._run is not None:
            self._run.stop()  # It may have been left early; its steps come to an end.
            if self.is_recorded:
                self.collect_events()
            if self._run is not iterator.failed:
                self._run.close_kept()
            if self._arrangement.has_copies:
                self._flush()
        if self._settings.prefetch_lookups and self._model.steps_per_execution == 1:
            raise ValueError(
                "prefetch_lookups=True needs steps_per_execution above 1 in compile: only steps "
                "that are unrolled can prefetch"
            )
        self.local_batch_size = size = iterator.distributed.batch_size
        for optimizer in self._variables.optimizers:
            optimizer.count_steps_of(size and size * self.mode.capacity)
            for state in optimizer.states:
                if state.keyed:
                    state.keyed.train_with(state)
        self._set_back()
        self.know_batches(iterator.distributed)
        if not self._has_warned:
            self._has_warned = True
            sizes = (len(group.trainers) for group in self._arrangement.groups)
            warn_of_moving_averages(self._model, max(sizes) * self.threads)
        self.ensure_synchronizer()
        layout = super()._continue(iterator)
        self._listen()
        for begin in (self.synchronizer.copies.begin, self.synchronizer.begin):
            self._begin_without_the_gone(begin)
        # Within a run, clocks go on.
        if is_new or self.mode.uses_buffers:
            self._of_each_group(Aggregation.begin)
        if not is_new:
            self._begin_without_the_gone(iterator.run.leave_again)
        self._is_open = True
        return layout

    def _of_each_group(self, action: Callable[[Aggregation], None]) -> None:
        """Acts on the aggregations of all groups that have their copy."""
        copies = self.synchronizer.copies

        def act(group: int, aggregation: Aggregation) -> None:
            with self._opening[group]:  # A worker may be about to make it anew.
                mine = copies.of(group)
                if mine is not None:
                    aggregation.ensure(mine)
                    action(aggregation)

        for group, aggregation in self.aggregations.items():
            was_there = group in copies.there
            self._without_the_gone(functools.partial(act, group, aggregation))
            if was_there and group not in copies.there:
                logging.warning("What group %d had collected of a step is lost.", group)

    def _begin_without_the_gone(self, begin: Callable[[], None]) -> None:
        """Begins an epoch with the workers that there are: nobody has called them since the last.

        Args:
            begin: may be called again when it has failed.
        """
        self._lose_the_gone()
        self._without_the_gone(begin)

    def _without_the_gone(self, action: Callable[[], None]) -> None:
        """Does what fails when a server is lost meanwhile; then it is done without that one.

        Args:
            action: may be called again when it has failed.
        """
        cluster = self.cluster
        while True:
            lives = cluster.membership.lives
            try:
                return action()
            except tf.errors.OpError as error:
                check_parameter_servers(cluster, error, self.spared())
                # Another thread may have found it out, and dropped what was there.
                if not self._lose_the_gone() and cluster.membership.lives == lives:
                    raise

    def _lose_the_gone(self) -> bool:
        """Finds groups whose copies are gone; whether there are any."""
        cluster, limit = self.cluster, self._settings.silence_timeout
        copies, spared = self.synchronizer.copies, self.spared()
        known = {*self.synchronizer.there, *copies.there}
        groups = [group for group in self._arrangement.groups if group.index in known]

        def is_earlier(group: Group) -> bool:
            return copies.is_of_earlier_life(group.index)

        def holders(group: Group) -> list[Server]:
            # Others end training, with an error that names them.
            return [h for h in group.holders if h[0] == "worker" or h in spared]

        def is_gone(group: Group) -> bool:
            return is_earlier(group) or any(map(cluster.membership.is_away, holders(group)))

        asked = [h for group in groups if not is_earlier(group) for h in holders(group)]
        lose_the_gone(cluster, asked, limit)
        gone = [group for group in groups if is_gone(group)]
        cluster.tell_members()  # If a pass goes on, it tells the synchronizer.
        for group in gone:
            with self._opening[group.index]:
                if not is_gone(group):
                    continue  # A worker's own thread has opened it anew meanwhile.
                if group.servers:
                    logging.warning("The copy of group %d is gone with its server.", group.index)
                    self.synchronizer.lose_group(group.index)
                elif group.index in self.synchronizer.there:
                    self.synchronizer.lose(group.trainers[0])
        return bool(gone)

    def spared(self) -> set[Server]:
        """The parameter servers that nobody needs, or without which others go on."""
        unneeded = self.unneeded()
        if self.synchronizer is None:
            return unneeded
        workers = range(self.cluster.workers)
        return unneeded.union(*map(self.synchronizer.holders_of, workers))

    def _own_servers(self) -> list[Server]:
        # Copies, the central one, and the list of a group whose workers take tokens.
        arrangement = self._arrangement
        found = [("ps", server) for server in arrangement.sync_ps]
        for group in arrangement.groups:
            if arrangement.has_copies:
                found += [holder for holder in group.holders if holder[0] == "ps"]
            elif self.mode.uses_tokens:
                found.append(group.holders[0])
        return found

    def _end_pass(self, run: WorkerRun) -> None:
        # After the copies have been shown, nobody may train what was lost.
        if self._pass_batches == 0:
            run.end_of_data()

    def _flush(self) -> None:
        """All steps are done: what servers hold back of them is applied, and copies are shown."""
        # The coordinator, or whoever reads a variable, or the thread of the worker that was last.
        with self._flushing:
            if not self._is_open:
                return
            self._is_open = False
            self._of_each_group(Aggregation.flush)
            self.synchronizer.end()
            self._settle_tables()
            self.synchronizer.copies.settled()

    def _settle_tables(self) -> None:
        """Brings tables up to date whose rows decay when they are needed: others may read them."""
        settled: dict[str, list[ShownVariable]] = {}
        for optimizer in parts_of(self._model.optimizer):
            for state in getattr(optimizer, "states", ()):
                if state.log_decays:
                    table = shown(state.variable._value)
                    settled.setdefault(table.device, []).append(table)

        def settle(tables: list[ShownVariable]) -> None:
            with self.cluster.dispatch_scope():
                for table in tables:
                    table.settle()

        if settled:
            # All servers side by side.
            with futures.ThreadPoolExecutor(len(settled), "recsync_settle") as threads:
                list(threads.map(settle, settled.values()))

    def _hold(self) -> bool:
        if self._is_recovering or self.synchronizer is None:
            return False  # Nobody is at work.
        # If fit was stopped within an epoch, its steps have come to an end.
        if self._run is not None and self._should_stop():
            self._settle()
            return False
        return super()._hold()

    def _settle(self) -> None:
        """If `fit` was stopped within an epoch, waits for the steps in flight, and applies all."""
        if self._run is not None:
            self._run.settle()
            with self.watched():
                self._flush()

    def leave(self) -> None:
        """Another function takes its place, as the model was compiled again: the steps in flight of
        a pass that was left come to an end, and users see them."""
        if self._run is not None:
            self._run.stop()
            if self.is_recorded:
                self.collect_events()
            with self.watched():
                self._run.close_kept()
            self._all_done(self._run)
        with self._flushing:
            self._is_open = False  # Whatever comes to an end later.
        if self.synchronizer is not None:
            self.synchronizer.copies.let_go()

    def _hold_to_move(self) -> None:
        """Users are about to assign the global step, as when they load a checkpoint."""
        was_moved, self._is_moved = self._is_moved, True
        if not self._hold():
            self._is_moved = was_moved
        if not self._is_recovering:
            for optimizer, step in self._steps().items():
                optimizer.note_step(step)

    def _set_back(self) -> None:
        """Has all parts of the optimizer take notice if users have set the global step back."""
        for optimizer, step in self._steps().items():
            optimizer.set_back(step)

    def _steps(self) -> dict[Optimizer, int]:
        """The global step that updates by each part of the optimizer go by; none if none asks."""
        trained = [one for one in self._variables.optimizers if one.states]
        if not any(one.can_be_set_back for one in trained):
            return {}
        steps = {one: one.finished_steps for one in trained}
        # Servers that collect pushes go by the step of the part that is ahead.
        return dict.fromkeys(steps, max(steps.values())) if self.mode.uses_buffers else steps

    def _go_on(self) -> None:
        if self.synchronizer is not None:  # From the first call on.
            self.synchronizer.copies.carried_on()
        if self.is_held and self._is_moved:
            with self.watched():
                self._set_back()
                if self.mode.uses_buffers:
                    self._of_each_group(Aggregation.begin)
            self._is_moved = False
        super()._go_on()

    def _all_done(self, run: WorkerRun) -> None:
        """No thread of a worker is at work any more."""
        # Keras calls nobody if it was stopped within an epoch, or a callback has raised an error.
        is_left = self._should_stop() or (self._arrangement.has_copies and run.is_left)
        if not is_left or run is not self._run or self.cluster.is_closed:
            return
        try:
            with self.watched():
                self._flush()
        except (tf.errors.OpError, RuntimeError) as error:
            logging.warning("After a pass that was stopped: %s", reason(error))


def _leave_run(iterator: DistributedIterator) -> None:
    """The pass of an iterator has failed: it ends, and another one may go on with its steps."""
    if iterator.run is not None:
        iterator.run.stop()
        iterator.run, iterator.failed = None, iterator.run


class _State(WorkerState):
    """What lives on a worker during a pass, where its group has a copy."""

    def __init__(
        self, synchronizer: Synchronizer, aggregation: AtOnce, group: int, worker: int, *parts: Any
    ):
        super().__init__(worker, *parts)
        self._synchronizer = synchronizer
        self._aggregation = aggregation
        self._index = worker
        self._group = group
        self._copies = synchronizer.copies.of(group)

    @property
    def inputs(self) -> list[tf.Tensor]:
        copies = self._synchronizer.handles(self._index)
        return [*super().inputs, *copies, *self._aggregation.handles]

    def begin(self, time: float | None) -> None:
        super().begin(time)
        copies = self._synchronizer.copies
        if self._copies is None or copies.of(self._group) is not self._copies:
            # It was given up, and answers again: with copies that nobody synchronizes.
            raise tf.errors.UnavailableError(None, None, "it was lost between two epochs")
        copies.touched()
        # All workers are open by now.
        self._synchronizer.carry_on()
