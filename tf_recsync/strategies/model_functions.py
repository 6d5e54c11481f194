"""What Keras calls in place of its own train, test and predict functions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Server, fetch
from tf_recsync.cluster.making_functions import making_functions
from tf_recsync.optimizers.base import global_step_of
from tf_recsync.strategies import step_counts, watched_calls, worker_functions
from tf_recsync.strategies.call_board import CallBoard, CallBoards
from tf_recsync.strategies.checks import OnBatchLost
from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.distributed_dataset import DistributedIterator
from tf_recsync.strategies.leases import Leases, call_limit, call_seconds
from tf_recsync.strategies.model_variables import OnServers
from tf_recsync.strategies.pass_batches import PassBatches
from tf_recsync.strategies.slots import Losses, Slot
from tf_recsync.strategies.step_logs import Logged, NewLogged, StepLogs
from tf_recsync.strategies.worker_run import WorkerRun
from tf_recsync.strategies.worker_state import (
    MetricsMerger,
    WorkerState,
    initial_values,
)
from tf_recsync.synchronization import links, speeds
from tf_recsync.synchronization.arrangement import Arrangement, Group
from tf_recsync.synchronization.at_once import AT_ONCE, AtOnce
from tf_recsync.synchronization.lookups import Lookups, find_lookups
from tf_recsync.synchronization.modes import Mode
from tf_recsync.synchronization.pull_push import Layout
from tf_recsync.synchronization.remote_functions import RemoteFunction
from tf_recsync.synchronization.remote_values import Answer, PackedReader
from tf_recsync.synchronization.seeds import WorkerSeeds
from tf_recsync.synchronization.synchronizer import Crew

_READS_PER_SECOND = 10  # Of workers' metrics, at most: each costs this process milliseconds.
# Of calls that are told to end: none goes on for longer if its coordinator has died.
_LONGEST_CALL_SECONDS = 60.0
_UNROLL_SHARE = 16  # Steps of a call from which more steps are unrolled: they are short then.

# What workers call, by the servers of their group, which it names, and by the steps unrolled.
_Functions = dict[tuple[int, ...], dict[int, worker_functions.Repeated]]


@dataclasses.dataclass
class Settings:
    """What the functions need of the strategy. Only what is artificial changes.

    Attributes:
        cluster: the connected cluster.
        worker_timeout: seconds without any worker after which a pass fails.
        silence_timeout: seconds without a sign of life after which a server is given up.
        on_batch_lost: what becomes of batches that are lost with a worker while a model trains.
        arrangement: the groups of workers.
        mode: when workers of a group start and its servers apply.
        prefetch_lookups: whether steps pull the lookups of the next one.
        compute_time: computes the artificial compute time, or None.
        bandwidths: artificial ones, in bytes per second by server's device.
        speeds: artificial ones, in floating-point operations per second by device.
    """

    cluster: Cluster
    worker_timeout: float
    silence_timeout: float
    on_batch_lost: OnBatchLost
    arrangement: Arrangement
    mode: Mode
    prefetch_lookups: bool
    compute_time: worker_functions.ComputeTime | None = None
    bandwidths: dict[str, float] = dataclasses.field(default_factory=dict)
    speeds: dict[str, float] = dataclasses.field(default_factory=dict)


class Observer(Protocol):
    """Somebody who passes on what happens to workers, in the thread of `fit`."""

    def tell(self) -> None:
        """Passes on what has happened since."""

    def failed(self) -> None:
        """Training or evaluation ends with an error, and Keras calls no callback any more."""


class Steps:
    """Trains or evaluates: runs workers, and merges their metrics.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        variables: where its steps find the model's variables.
    """

    method = ""
    threads = 1  # That call each worker.
    most_unrolled = worker_functions.MOST_UNROLLED  # Steps of a function, at most.
    is_recorded = False  # Whether workers note what their steps do when.

    def __init__(self, model: keras.Model, settings: Settings, variables: OnServers):
        self._model = model
        self._settings = settings
        self._variables = variables
        self._functions: _Functions = {}
        self._key: Hashable = None  # What they were traced for.
        self._layouts: dict[tuple[int, ...], Layout] = {}  # By servers, as they are.
        self._calls_are_told = False  # To end, see `_teller_of`.
        self._boards = CallBoards(settings.cluster)
        self._unrolled: Callable[..., _Functions] | None = None  # Traces them with more steps.
        self._trace_seconds = 0.0  # It took to trace one step for each.
        self._step_logs: StepLogs | None = None
        self._logged = Logged()
        self._logs: dict[str, Any] = {}
        self._refresh_at = 0.0  # When the metrics that are shown are too old (time.monotonic()).
        self._is_final = False  # Whether the logs are those of all steps granted.
        self._merger: MetricsMerger | None = None
        self._batches: PassBatches | None = None  # Of the pass that runs, or ran last.
        self._is_numbered = False  # Whether those that functions were traced for last have numbers.
        self._notes_events = False  # Whether these note what steps do when.
        self._takes_time = False  # Whether their steps take an artificial time.
        self._reader: PackedReader | None = None  # Of the workers' metrics.
        self._initial: list[np.ndarray] = []  # Of what workers keep for themselves, in a pass.
        self._seeds = WorkerSeeds()
        self._steps_before = 0  # That the model had trained when the pass began.
        self._run: WorkerRun | None = None  # The pass that runs, or ran last.
        self._target = 0.0  # Steps that Keras has asked for.
        self._epoch_began = 0  # Steps at its beginning.
        self._epoch_end = float("inf")  # Steps at the end of the epoch, if known.
        self._expected = float("inf")  # Steps at its end, as Keras expects.
        self._epoch_batches = float("inf")  # Of an epoch, if known; of several readers, at least.
        self._position: DataPosition | None = None  # Where the next pass begins, if not anew.
        # Of the pass that runs, or ran last: the passes over its data before it, the batches of it
        # that the run does not count, and those of the first epoch that an earlier process did.
        self._passes_before = self._uncounted = self._skipped = 0
        self.beginning: DataPosition | None = None  # Where the first pass of `fit` began.
        self._pass_batches = 0.0  # See `DistributedDataset`.
        self._losses = Losses()  # Of earlier passes, and of batches.
        self._waited = [0.0] * settings.cluster.workers  # For batches, in earlier passes.
        self._is_advancing = False  # Whether Keras waits for steps.
        # Told about twice a second, by whoever waits for steps, to pass on what has happened.
        self.observers: weakref.WeakSet[Observer] = weakref.WeakSet()
        self._holding = threading.Lock()
        # What ends when workers go on, and when servers may call each other.
        self._held: contextlib.ExitStack | None = None
        self._paused = contextlib.ExitStack()

    @property
    def mode(self) -> Mode:
        """When workers start, and when servers apply what they push."""
        return self._settings.mode

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Waits until `steps_per_execution` more steps are finished; gives the metrics."""
        while True:
            try:
                return self._call(iterator)
            except StopIteration:
                raise
            except BaseException as error:  # Ctrl-C, too, after which the caller may go on.
                goes_on = False
                try:
                    goes_on = self._goes_on(error, iterator)
                finally:
                    if not goes_on:
                        self._give_up()
                if not goes_on:
                    raise

    def _call(self, iterator: Any) -> dict[str, Any]:
        if not isinstance(iterator, DistributedIterator):
            raise ValueError(
                "train_on_batch and test_on_batch can't be used under this strategy; use fit "
                "and evaluate with a dataset"
            )
        try:
            with self._holding:  # Another thread may want them to be held.
                self._go_on()
                self._is_advancing = True
            return self._advance(iterator)
        except StopIteration:
            raise
        except BaseException as error:
            if iterator.run is not None:
                self._end_failed(iterator.run, error)
            raise
        finally:
            self._is_advancing = False

    @property
    def is_held(self) -> bool:
        """Whether workers stand still until Keras asks for the next steps."""
        return self._held is not None

    def _hold(self) -> bool:
        """Lets the steps in flight end; none begins before Keras asks for the next ones.

        What this process reads until then, as to save it, is of one moment. Whether it is: not
        where Keras waits for steps now, as it does when another thread reads.
        """
        with self._holding:
            run = self._run
            if run is None or self._is_advancing:
                return False
            if self._held is None:
                with self.watched(), contextlib.ExitStack() as held:
                    held.callback(run.go_on)
                    run.hold()
                    held.callback(self._paused.close)
                    self._paused.enter_context(self._crew().pause())
                    self._held = held.pop_all()
            return True

    def _end_pause(self) -> None:
        """Workers stand still, but servers may call each other."""
        with self._holding:
            self._paused.close()

    def _go_on(self) -> None:
        """Workers that were held begin steps again; under _holding."""
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _advance(self, iterator: DistributedIterator) -> dict[str, Any]:
        steps = self._model.steps_per_execution
        if iterator.has_run_out and self._target >= self._epoch_end:
            iterator.run = iterator.batches = None  # The next epoch begins a pass.
            iterator.has_run_out = False
        run = iterator.run
        if run is None:
            with self.watched():
                run = iterator.run = self._start(iterator)
                self._begin_epoch(iterator)
        elif self._target >= self._epoch_end and not run.wait(0):
            # The next epoch on the same data (steps_per_epoch is set). A checkpoint may
            # have been loaded between.
            with self.watched():
                self._continue(iterator)
                self._begin_epoch(iterator)
        before, target = self._target, self._target + steps
        # The last time that Keras asks, all that there is left is done.
        is_last = target >= self._expected
        running = run.wait(self._epoch_end if is_last else min(target, self._epoch_end))
        done = run.completed
        finished = not running or done >= self._epoch_end
        if finished and not self._is_final:
            self._end_pass(run)
            with self.watched():
                self._count_lost_batches(run)
                self._flush()
                self._refresh(run)
        elif not finished and time.monotonic() > self._refresh_at:
            with self.watched():
                self._refresh(run, is_final=False)
                self._unroll(run)
        # Workers may be done long before Keras has counted their steps.
        self._is_final = finished
        self._target = target  # What comes after a call that has failed is the same one again.
        iterator.counted += steps
        # The end of data of unknown length shows when a call has no step left.
        # Not where Keras stops by itself, though there may have been less than it expects.
        ends = (self._epoch_end, self._expected)
        is_asked = any(before < end < float("inf") for end in ends)
        is_over = not running or before >= self._epoch_end  # As of a dataset without batches.
        if not is_over or done > before:
            return self._logs
        ends_early = not running and done < run.granted and not self._should_stop()
        if ends_early and iterator.distributed.has_open_end:
            # Keras would take what it has asked for since it began for the length of all passes.
            if self._uncounted or run.losses.workers:
                _run_out(iterator)
                return self._logs
        elif is_asked:
            return self._logs
        iterator.distributed.ended(int(self._target - self._epoch_began))
        raise StopIteration

    @property
    def _refresh_seconds(self) -> float:
        """How old the metrics of workers may be that are shown: of many, this process reads fewer
        at a time than it makes calls."""
        threads = self._settings.cluster.workers * self.threads
        seconds = 2 * call_seconds(threads)
        # What workers report is here without asking them.
        return seconds if self._is_reported else max(seconds, threads / _READS_PER_SECOND)

    @property
    def _is_reported(self) -> bool:
        """Whether workers report what they do; what is recorded of it has to be asked for."""
        return self._calls_are_told and not self.is_recorded

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this process calls servers: it shall not wait forever for one."""
        settings = self._settings
        return watched_calls.watched(settings.cluster, settings.silence_timeout, self.unneeded())

    def unneeded(self) -> set[Server]:
        """The parameter servers on which there is nothing of the model, nor of what runs it.

        If one is lost, that is not why something else has failed.
        """
        return self._variables.unneeded(self._settings.cluster.ps, self._own_servers())

    def _own_servers(self) -> Iterable[Server]:
        """The parameter servers that steps need for something else than the model's variables."""
        return ()

    def _end_pass(self, run: WorkerRun) -> None:
        """All steps of an epoch are done; its pass may end with it."""

    def _flush(self) -> None:
        """All steps are done."""

    def worker_steps(self) -> list[int]:
        """The steps that each worker has finished in the pass that runs, or ran last."""
        steps = [0] * self._settings.cluster.workers
        for slot, _ in self._states():
            steps[slot.index] += slot.known_steps
        return steps

    def _states(self) -> Iterator[tuple[Slot, WorkerState]]:
        """The workers' threads that are open in the pass that runs, or ran last, and their
        states."""
        for slot in [] if self._run is None else self._run.slots:
            # A worker's thread fills its slot when it has opened its iterator.
            state = slot.state
            if state is not None:
                yield slot, state

    @property
    def run(self) -> WorkerRun | None:
        """The pass that runs, or ran last; None before the first one."""
        return self._run

    @property
    def epoch_steps(self) -> int:
        """The steps of the epoch that runs, or ran last, that workers have finished."""
        if self._run is None:
            return 0
        return self._run.completed - self._epoch_began - self.skipped_batches

    def describe_waits(self) -> str:
        """Who waits for whom in the pass that runs, in words; empty if nobody ever does."""
        return "" if self._run is None else self._run.describe_waits()

    @property
    def skipped_batches(self) -> int:
        """The steps of the epoch to come, or that runs, that an earlier process has done."""
        if self._position is not None:
            return self._position.epoch_batches
        return self._skipped if self._epoch_began == 0 else 0

    def data_wait(self) -> list[float]:
        """The seconds that each worker has waited for batches in all passes."""
        waited = list(self._waited)
        for slot, state in self._states():
            waited[slot.index] += 1e-6 * state.waited / self.threads
        return waited

    def steps_and_waits(self) -> list[tuple[int, float]]:
        """Of each worker, the steps that it had done in the pass that runs when it was last read,
        -1 if it never was, and the seconds that it had waited for their batches."""
        found = [(-1, 0.0)] * self._settings.cluster.workers
        for slot, state in self._states():
            steps, waited = state.counted_and_waited
            found[slot.index] = steps, 1e-6 * waited
        return found

    @property
    def losses(self) -> Losses:
        """What was lost with workers in all passes."""
        return self._losses if self._run is None else self._losses + self._run.losses

    def _count_lost_batches(self, run: WorkerRun) -> None:
        """An epoch is over, the number of whose batches may be known."""
        missing = self._epoch_began + self._epoch_batches - run.completed
        has_lost = run.losses.workers or run.losses.steps
        if 0 < missing < float("inf") and has_lost and not self._should_stop():
            logging.warning("%d batches of the epoch were lost with servers.", missing)
            self._losses += Losses(batches=int(missing))

    def _begin_epoch(self, iterator: DistributedIterator) -> None:
        run, data = iterator.run, iterator.distributed
        steps = data.steps_per_epoch
        skipped, iterator.skipped = iterator.skipped, 0
        # Keras asks for what was skipped, too, and gets it at once. What a worker that was lost
        # since the last epoch has done in that may count as done no more: it is done in this one.
        before = run.completed if steps is None else max(run.completed, int(run.granted))
        self._epoch_began = done = before - skipped
        self._is_final = False
        self._refresh_at = 0.0  # The first call shows nothing of the epoch before.
        counted = iterator.counted - iterator.asked  # Before this epoch.
        self._target, iterator.asked = done + iterator.asked, 0
        self._epoch_end = done + data.length
        # The data may end within an epoch. Keras ends it when it has counted as many steps as they
        # have batches, and begins a pass.
        self._epoch_batches = min(data.batches, data.known_batches - self._uncounted - done)
        self._expected = done + min(data.expected, data.known_batches - counted)
        for slot in run.slots:
            if slot.state is not None:
                slot.state.reset_metrics = True
        self._merger = MetricsMerger(self._merged_variables, len(self._model.metrics_variables))
        # Each worker begins the epoch with what it is merged into; one that is opened later, too.
        self._initial[: len(self._merger.initial)] = self._merger.initial
        run.grant(float("inf") if steps is None else steps - skipped)

    def _start(self, iterator: DistributedIterator) -> WorkerRun:
        after, is_over = iterator.failed, iterator.distributed.is_over
        slots = self._settings.cluster.workers * self.threads
        is_anew, is_training = after is None, self.method == "train_step"
        goes_back = not is_anew and self._position is not None
        # Once, though a start that fails is made again.
        if iterator.batches is None or goes_back:
            position = self._position
            if position is not None and is_anew:
                position = iterator.distributed.reachable(position, slots)
            iterator.batches = PassBatches(
                iterator.distributed, slots, position, is_read_between=not is_training
            )
        self._batches = batches = iterator.batches
        begin = batches.begin
        completed = begin.epoch_batches
        if goes_back:
            completed, after = begin.batches - self._uncounted, None
        steps = self._model.steps_per_execution
        layout = self._continue(iterator)
        metrics = len(self._merged_variables)
        if is_anew:
            self._initial = initial_values(layout.private)
            if is_training:
                self._steps_before = global_step_of(self._model.optimizer)
        # Metrics have what was merged by then, where a pass goes on.
        initial = self._initial

        def open_worker(slot: Slot):
            before, kept = slot.state, None
            membership = self._settings.cluster.membership
            lives_begun = membership.lives_begun
            if slot.kept_data == membership.life(slot.worker):
                kept, before.iterator = before.iterator, None  # Nobody closes it with `before`.
            if kept is None:
                slot.kept_data = None
                slot.has_kept = False
            iterator = batches.iterator(slot) if kept is None else kept
            private = self._seeds.values(layout.private, initial, slot.number, self._steps_before)
            try:
                has_numbers = batches.done is not None
                log = has_numbers if has_numbers or is_training else None
                owner = self._owner_of(slot)
                row = self._boards.add_row(owner) if owner else None
                state = self._open(slot.index, before, iterator, private, row, log)
            except BaseException:
                if kept is not None:
                    before.iterator = kept
                raise
            slot.state = state  # From now on it is closed, whatever happens.
            for function in self._functions_of(slot).values():
                function.build(iterator.empty(), state, slot.worker, lives_begun)
            self._read_worker(slot, batches, state.first_answer(private[:metrics]))
            slot.kept_data = None

        def call(slot: Slot, n: int):
            state = slot.state
            state.begin(slot.pass_began if self._takes_time else None)
            slot.begin_call(n)
            if state.reset_metrics:
                state.reset([np.array(value) for value in initial[:metrics]])
            done, ended = self._run_steps(slot, n)
            self._after_call(slot, batches, ended)
            return done, ended, None

        if after is None:
            self._losses, self._waited = self.losses, self.data_wait()
        self._run = WorkerRun(
            self._settings.cluster,
            Leases(steps, self._most_per_call(), slots, self._calls_are_told, completed),
            batches,
            open_worker,
            call,
            lambda: self._should_stop() or is_over(),
            self._settings.worker_timeout,
            self._settings.silence_timeout,
            self._crew(),
            self.threads,
            lambda slot: self._read_worker(slot, batches),
            self.unneeded(),
            is_reading=not is_training,
            while_waiting=self.tell_observers,
            read_rows=lambda slots: self._read_rows(slots, batches),
            teller_of=self._owner_of if self._calls_are_told else None,
            note_steps=self._note_steps,
            after=after,
            keeps_data=self._can_recover,
            is_another=not is_anew,
        )
        if is_anew:
            iterator.skipped = self._skipped = completed
            self._passes_before = batches.number
            self._uncounted = begin.batches - completed
            self._pass_batches = iterator.distributed.pass_batches
            if self.beginning is None:
                self.beginning = dataclasses.replace(begin, passes=self._passes_before)
        self._position = iterator.failed = None
        self._run.when_done(self._go_on)
        return self._run

    def _end_failed(self, run: WorkerRun, error: BaseException) -> None:
        """A call of Keras has failed: the pass ends."""
        del error
        run.request_stop()

    def _goes_on(self, error: BaseException, iterator: Any) -> bool:
        """Whether a call of Keras that has failed is done once more, as what was lost is there."""
        raise NotImplementedError

    def _can_recover(self) -> bool:
        """Whether another pass takes over from one that fails, with the batches that workers
        have."""
        return False

    def forget_traced(self) -> None:
        """What functions refer to is made anew: they are traced again before they are used."""
        self._key = self._unrolled = None
        self._functions, self._layouts = {}, {}

    def _give_up(self) -> None:
        """An error goes to Keras, and to the user."""
        for observer in list(self.observers):
            observer.failed()

    def tell_observers(self) -> None:
        """Has them pass on what has happened; in the thread of `fit`."""
        for observer in list(self.observers):
            observer.tell()

    def _unroll(self, run: WorkerRun) -> None:
        """Traces functions of more steps, if there are many short ones: nobody waits for them.

        A server begins an unrolled step as soon as it is done with the one before.
        """
        most = self.most_unrolled
        # It takes time, and the pass might be over before that pays.
        if self._unrolled is None or run.seconds < 2 * most * self._trace_seconds:
            return
        if run.steps_per_call < _UNROLL_SHARE:
            return
        unrolled, self._unrolled = self._unrolled, None
        traced = making_functions(lambda: unrolled(most))
        for servers, functions in traced.items():
            # Workers' threads may have the ones of before in hand.
            self._functions[servers] = {**self._functions[servers], **functions}
        run.end_calls()

    def _run_steps(self, slot: Slot, n: int) -> tuple[int, bool]:
        """Has a worker's thread run at most n steps; (those done, whether the data has ended)."""
        state, functions = slot.state, self._functions_of(slot)
        before = state.steps
        # As many as fit the longest function, and the rest one by one.
        for unrolled in sorted(functions, reverse=True):
            times = (n - (state.steps - before)) // unrolled
            if not times:
                continue
            state.unrolled = unrolled
            called = time.monotonic()
            try:
                turns = functions[unrolled](state.iterator, times, state)
            except tf.errors.OutOfRangeError:
                if times * unrolled > 1 and self._is_reported:
                    # The end of the data has kept it from reporting.
                    self._read_worker(slot, self._batches)
                    state.steps = max(state.counted, state.steps)
                elif times * unrolled > 1:
                    state.steps = state.read_steps()
                return state.steps - before, True
            # What it returned is on the worker. Of a call that can be told to end it counts: who
            # told the one before may be late, and end this one.
            if not self._calls_are_told and time.monotonic() - called < self.call_limit:
                turns = times
            turns = int(fetch(turns))
            state.steps += turns * unrolled
            if turns < times:
                break  # The call has lasted long enough.
        return state.steps - before, False

    def _open(self, worker: int, before: WorkerState | None, *parts: Any) -> WorkerState:
        """What a worker needs for a pass; made in its device scope."""
        return WorkerState(worker, before, *parts)

    def _after_call(self, slot: Slot, batches: PassBatches, ended: bool) -> None:
        """A call of a worker has ended; in its thread."""

    def _crew(self) -> Crew:
        """Whom workers wait for; only those that train do."""
        return Crew()

    def _note_steps(self, slot: Slot, steps: int) -> None:
        """A worker's thread is known to have done so many more steps."""

    def _teller_of(self, layout: Layout) -> str:
        """The device that tells workers when to end a call; "" if calls end by themselves."""
        return ""

    @property
    def call_limit(self) -> float:
        """Seconds after which a call does no more steps."""
        if self._calls_are_told:
            return _LONGEST_CALL_SECONDS
        return call_limit(self._settings.cluster.workers * self.threads)

    def _most_per_call(self) -> int | None:
        """How many steps a call may have, if that does not depend on how long they take."""
        # Of a call that is lost because its connection broke, the metrics would be, too.
        return self._model.steps_per_execution

    def _should_stop(self) -> bool:
        raise NotImplementedError

    def _continue(self, iterator: DistributedIterator) -> Layout:
        """Makes ready to go on where the model stands; nobody may be in a step."""
        lengths = self._lengths(iterator)
        return making_functions(lambda: self._make_functions(iterator, tuple(sorted(lengths))))

    def _lengths(self, iterator: DistributedIterator) -> set[int]:
        """How many steps the functions have that workers call, again and again."""
        steps = self._model.steps_per_execution
        lengths = {min(steps, self.most_unrolled)}
        is_open = iterator.distributed.steps_per_epoch is not None
        if is_open or steps % max(lengths) or self.most_unrolled % max(lengths):
            lengths.add(1)  # What remains of a number of steps need not fill a function.
        return lengths

    @property
    def _merged_variables(self) -> list[keras.Variable]:
        """What each worker accumulates by itself: the variables of metrics, then of numbers."""
        return [*self._model.metrics_variables, *self._logged.variables.values()]

    def _functions_of(self, slot: Slot) -> dict[int, worker_functions.Repeated]:
        """The functions of a worker's thread, by their steps."""
        return self._functions[self._servers_of(slot)]

    def _owner_of(self, slot: Slot) -> str:
        """The device that counts the steps of a worker's thread; "" if none does."""
        layout = self._layouts[self._servers_of(slot)]
        return layout.owner if self.method == "train_step" else ""

    def _servers_of(self, slot: Slot) -> tuple[int, ...]:
        """The servers that the steps of a worker's thread name."""
        group = self._group_of(slot.index)
        return () if group is None else group.servers

    def _group_of(self, worker: int) -> Group | None:
        """Whose copy of the variables a worker's steps use; None where they use no copy."""
        return None

    def _groups(self) -> Sequence[Group | None]:
        """All of these."""
        return [None]

    def _make_functions(self, iterator: DistributedIterator, lengths: Sequence[int]) -> Layout:
        """Traces the functions of so many steps, unless they are there.

        Returns:
            The layout, in which groups differ by devices.
        """
        compute_time, bandwidths = self._settings.compute_time, self._settings.bandwidths.copy()
        spec = iterator.distributed.element_spec
        self._is_numbered = iterator.distributed.is_numbered
        # More steps may be unrolled when somebody has begun to record, or has stopped.
        self._notes_events = self.is_recorded
        limits = self._settings.speeds.copy() if self.method == "train_step" else {}
        key = self._variables.trace_key(
            spec,
            bandwidths,
            lengths,
            compute_time,
            tuple(limits.items()),
            (self._is_numbered, self._notes_events, self._most_per_call()),
        )
        if key != self._key:
            self._key = None
            self._takes_time = compute_time is not None
            self._step_logs = StepLogs(self._model, self.method, spec, self._logged)
            # Groups whose trainers hold their copies name the same devices.
            groups = {() if g is None else g.servers: g for g in self._groups()}

            @functools.cache
            def lookups() -> Lookups:
                """The same for all groups, and however many steps are unrolled."""
                layout = next(iter(self._layouts.values()))
                return find_lookups(self._model, layout, self.method, spec)

            def trace(*lengths: int) -> _Functions:
                with links.limited(bandwidths), speeds.limited(limits):
                    return {
                        servers: {
                            n: self._trace(layout, spec, lookups(), n, compute_time)
                            for n in lengths
                        }
                        for servers, layout in self._layouts.items()
                    }

            def trace_all() -> _Functions:
                logged = tuple(self._logged.variables.values())
                self._layouts = {s: self._variables.layout(g, logged) for s, g in groups.items()}
                self._calls_are_told = all(map(self._teller_of, self._layouts.values()))
                return trace(*lengths)

            began = time.monotonic()
            try:
                self._functions = trace_all()
            except NewLogged as found:  # Only a trace shows what steps return.
                self._logged.add(found.names)
                began = time.monotonic()
                self._functions = trace_all()
            self._trace_seconds = (time.monotonic() - began) / sum(lengths)
            # With lookups ahead, the number of unrolled steps is the user's choice.
            is_open = max(lengths) < self.most_unrolled and not self._settings.prefetch_lookups
            self._unrolled = trace if is_open else None
            variables = [variable._value for variable in self._merged_variables]
            self._reader = PackedReader([step_counts.COUNTS, *variables], self._is_numbered)
            self._key = key
        return next(iter(self._layouts.values()))

    def _trace(
        self,
        layout: Layout,
        element_spec: Any,
        lookups: Lookups,
        steps: int,
        compute_time: worker_functions.ComputeTime | None,
    ) -> worker_functions.Repeated:
        """Traces what does so many steps, again and again."""
        teller, reports = self._teller_of(layout), None
        if teller:
            merged = len(self._merged_variables)
            reports = step_counts.Reports(teller, merged, self._is_numbered)
        body = worker_functions.trace_steps(
            self._model,
            layout,
            self.method,
            element_spec,
            lookups,
            steps,
            compute_time,
            self._aggregation_of(layout),
            self.method == "train_step" and self._settings.prefetch_lookups,
            self._step_logs,
            self.mode.hogwild,
            self._is_numbered,
            self._notes_events,
            reports,
        )
        given = worker_functions.given_spec(element_spec, self._is_numbered)
        specs = worker_functions.worker_specs(layout, given)
        replaced = self._replaced(layout)
        once, most = body, self._most_per_call()
        if reports is not None:
            once = worker_functions.trace_once(body, specs, reports)
        once = RemoteFunction(once, replaced)
        if most is not None and most < 2 * steps:
            return worker_functions.Repeated(once, None)
        loop = worker_functions.trace_loop(body, specs, self.call_limit, reports)
        return worker_functions.Repeated(once, RemoteFunction(loop, replaced))

    def _replaced(self, layout: Layout) -> list[tf.Tensor]:
        """The handles for which workers' states have others, after the inputs of all states."""
        del layout
        return []

    def _aggregation_of(self, layout: Layout) -> AtOnce:
        """Where the model's steps take tokens, and what collects their pushes."""
        del layout
        return AT_ONCE

    def _refresh(self, run: WorkerRun, is_final: bool = True) -> None:
        """Reads the workers' metrics and merges them into the model's.

        Args:
            run: the pass.
            is_final: whether all steps that were granted are done. Default True.
        """
        self._read_all(run, is_final)
        self._logs = self._step_logs.results(self._merger.assign())
        self._refresh_at = time.monotonic() + self._refresh_seconds

    def _read_all(self, run: WorkerRun, is_final: bool) -> bool:
        """Reads the metrics of workers; False if some are lost, or could not be read."""
        can_be_read = True
        if self._is_reported and (is_final or not self._merger.has_steps):
            self._read_rows(run.slots, self._batches)
        # What they report is read as it comes; but what there is to show at first may not be.
        if self._is_reported and not is_final and self._merger.has_steps:
            return True
        for slot in run.slots:
            if slot.state is None or slot.lost:
                can_be_read &= not slot.lost
                continue
            if self._is_reported and slot.state.is_known:
                continue
            try:
                self._read_worker(slot, self._batches)
            except tf.errors.OpError:
                can_be_read = False  # Its thread finds out that the worker is lost.
        return can_be_read

    def _read_rows(self, slots: Sequence[Slot], batches: PassBatches) -> dict[int, int]:
        """Reads what the workers of slots have reported, by a call to each server that has it.

        Args:
            slots: all whose workers report to those servers: what others have reported is gone.
            batches: of the pass.

        Returns:
            The steps that were applied, by the keys of their rows, of servers that are there.
        """
        rows: dict[CallBoard, dict[int, tuple[Slot, WorkerState]]] = {}
        for slot in slots:
            state = slot.state
            if state is not None and state.row is not None:
                rows.setdefault(state.row.board, {})[state.row.key] = slot, state
        applied: dict[int, int] = {}
        for board, own in rows.items():
            if self._settings.cluster.membership.is_away(board.server):
                continue
            try:
                reading, known = board.read(), {}
                for key in reading.reports.keys() & own.keys():
                    slot, state = own[key]
                    answer = self._reader.answer(reading.reports[key])
                    self._take(slot, state, batches, answer, is_report=True)
                    count = state.may_forget()
                    if count is not None:
                        known[key] = count
                if known:
                    board.forget(known)
            # The latter of numpy, for what comes from a server that is being cut off.
            except (tf.errors.OpError, ValueError) as error:
                # Those who train there find out what is wrong.
                logging.log_every_n_seconds(
                    logging.DEBUG, "%s: reports can't be read: %s", 10, board.device, error
                )
            else:
                applied.update(reading.applied)
        return applied

    def _read_worker(self, slot: Slot, batches: PassBatches, answer: Answer | None = None) -> None:
        """Reads a worker's metrics, and which batches it has done.

        Args:
            slot: the worker's.
            batches: of the pass.
            answer: what the worker would say, if that is known; default None.

        Raises:
            tf.errors.OpError: if it is lost.
        """
        # A worker's thread may be late with what it has read, and another epoch or pass have begun
        # meanwhile, to which that does not belong.
        state = slot.state
        steps = state.steps
        if answer is None:
            answer = self._reader.read(state.asked(len(self._merged_variables), slot.device))
        counts = self._take(slot, state, batches, answer, is_report=False)
        # What a worker says that was given up does not count. Of batches without numbers, those of
        # the steps until then are done.
        if counts and batches.are_noted and batches.done is None:
            slot.noted = steps

    def _take(
        self, slot: Slot, state: WorkerState, batches: PassBatches, answer: Answer, is_report: bool
    ) -> bool:
        """Takes what a worker says, or has reported; whether that counts."""

        def merge(values: list[np.ndarray]) -> None:
            if batches is self._batches and self._merger is not None:
                self._merger.update(slot.number, state, values)

        return state.take(answer, functools.partial(batches.note, slot), merge, is_report)


def _run_out(iterator: DistributedIterator) -> None:
    """The data have ended within an epoch, and Keras is not told."""
    if not iterator.has_run_out:
        iterator.has_run_out = True
        logging.warning(
            "The data ended before the epoch had all of its steps, and the next epoch begins them "
            "anew; use repeat."
        )


class TestFunction(Steps):
    """`model.test_function` under a parameter-server strategy."""

    method = "test_step"

    def _goes_on(self, error: BaseException, iterator: Any) -> bool:
        """Whether a validation has failed as `fit` lost a parameter server, and begins anew.

        What was lost is restored. No batch counts twice: all that was done counts no more.
        """
        if not isinstance(error, Exception) or not isinstance(iterator, DistributedIterator):
            return False
        if not iterator.distributed.is_validation:
            return False
        run = iterator.run
        if run is not None:
            run.stop()
        if not self._model.train_function.recovered_between(error):
            return False
        if run is not None:  # Else it had not begun, or not for the second time.
            iterator.asked = int(self._target - self._epoch_began)
            iterator.run = iterator.batches = None
        self._model.reset_metrics()  # As Keras does when it begins.
        return True

    # Of a worker that is lost, what counts is what was read of it last, between two calls: its
    # metrics, and which batches they are of. Others do the rest.

    def _after_call(self, slot: Slot, batches: PassBatches, ended: bool) -> None:
        now = time.monotonic()
        if batches.are_noted and (ended or now - slot.read_at > self._refresh_seconds):
            self._read_worker(slot, batches)
            slot.read_at = now

    def _end_pass(self, run: WorkerRun) -> None:
        # Who has no steps any more reads nothing by itself.
        if self._batches.are_noted and run.granted < float("inf"):
            run.end_of_steps()

    def _read_all(self, run: WorkerRun, is_final: bool) -> bool:
        if not self._batches.are_noted:
            return super()._read_all(run, is_final)
        if is_final and (not super()._read_all(run, is_final) or run.losses.workers):
            run.wait(float("inf"))  # Until others have done what is lost now; they have read.
        return True

    def _should_stop(self) -> bool:
        return bool(getattr(self._model, "stop_evaluating", False))
