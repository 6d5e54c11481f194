"""What workers hold during a pass, and what becomes of their metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import fetch
from tf_recsync.ops import events as events_ops
from tf_recsync.strategies.call_board import Row
from tf_recsync.strategies.pass_iterator import PassIterator
from tf_recsync.strategies.step_counts import COUNTS
from tf_recsync.synchronization.remote_values import (
    Answer,
    PackedReader,
    assign_variables,
    make_variables,
    on_worker,
)

_FORGET = 512  # Numbers that a worker keeps for longer than it has to: telling it is a call.
_read_counts = PackedReader([COUNTS])
_ECHO_SECONDS = 0.05  # What is on its way to a server arrives within.


class WorkerState:
    """What lives on a worker during a pass; make it in the worker's device scope.

    Args:
        worker: the worker's index.
        iterator: its iterator.
        private: the initial values of the variables that it keeps for itself.
        before: its state earlier in the pass, before it was lost; or None.
        row: its row on the board of the server that counts its steps; None if none does.
        log: whether it has a log in which it notes the numbers of its batches; None where there is
            nothing to log. While somebody records, it notes what its steps do there, too.

    Attributes:
        iterator: as above; None from `close` on, or where another state takes it over.
        steps: how many steps it has done in the pass, as far as known.
        steps_at_call: the same when the call in flight began, or the last one.
        counted: the steps that it had done when it was last read; -1 if it never was.
        waited: how many microseconds it has waited for batches in the pass, as far as known.
        row: as above.
        unrolled: how many steps the function has that the call in flight calls; 0 before.
    """

    def __init__(
        self,
        worker: int,
        before: WorkerState | None,
        iterator: PassIterator,
        private: list[np.ndarray],
        row: Row | None = None,
        log: bool | None = None,
    ):
        self.iterator: PassIterator | None = iterator
        self.unrolled = 0
        self.reset_metrics = False
        self.steps = 0 if before is None else before.steps
        self.waited = 0 if before is None else before.waited
        self._has_begun = False
        self._numbers: dict[int, tf.Tensor] = {}
        self._has_numbers = bool(log)
        self._reading = threading.Lock()
        # Of its log: how many numbers are known; how many have to be known before the worker is
        # told again how many it is to forget.
        self._known = self._forgotten = 0
        self._tell_again = _FORGET
        self.counted, self._values = -1, []  # What was read last.
        self._is_settled = False
        self._steps_before = self.steps_at_call = self.steps
        self._reset_at = self.steps  # When its metrics were reset, or made.
        self.row = row
        constants = np.array(worker), np.array(0.0), np.array(0)
        variables = np.array([self.steps, self.waited]), *private
        made, self._log = make_variables(
            [*constants, *variables], len(constants), has_log=log is not None
        )
        # The third is how many numbers it was told to forget.
        self._worker, self._began, self._told, self._counts, *self._variables = made

    def close(self, is_reachable: bool) -> None:
        """Leaves the data; the pipeline of a pass that all workers have left is ended.

        Args:
            is_reachable: whether the worker answers. If not, its iterator ends at some time.

        Raises:
            tf.errors.OpError: it does not.
        """
        iterator, self.iterator = self.iterator, None
        if iterator is not None and is_reachable:
            iterator.close()

    @property
    def inputs(self) -> list[tf.Tensor]:
        """What its functions take besides an iterator (see `worker_functions.trace_steps`)."""
        row = self._counts if self.row is None else self.row.handle
        log = self._counts if self._log is None else self._log
        return [self._worker, self._began, self._counts, row, log, *self._variables]

    def number(self, value: int) -> tf.Tensor:
        """A number as an int64 scalar on the worker; call it in its device scope."""
        if value not in self._numbers:
            self._numbers[value] = on_worker(np.int64(value))
        return self._numbers[value]

    def begin(self, time: float | None) -> None:
        """A call begins.

        Args:
            time: when the pass began, in seconds of the Unix epoch; the worker is told once. None
                if no step asks for it.
        """
        self.steps_at_call, self.unrolled = self.steps, 0
        if time is not None and not self._has_begun:
            self._began = on_worker(np.float64(time))
            self._has_begun = True

    def reset(self, values: list[np.ndarray]) -> None:
        """Sets the first of the worker's variables, those of its metrics, between two calls."""
        assign_variables(self._variables[: len(values)], values)
        with self._reading:
            self._reset_at, self.reset_metrics = self.steps, False

    @property
    def counted_and_waited(self) -> tuple[int, int]:
        """Its counted steps, and the microseconds that it had waited for data until then."""
        with self._reading:
            return self.counted, self.waited

    @property
    def has_counted(self) -> bool:
        """Whether it had done steps since its metrics were reset, or made, as far as was read."""
        return not self.reset_metrics and self._reset_at < self.counted

    @property
    def is_known(self) -> bool:
        """Whether its metrics are those of all that it has done since then."""
        return self.has_counted and self.counted == self.steps

    def may_forget(self) -> int | None:
        """How many numbers the worker is to forget; None while they are too few to tell it."""
        if self._known - self._forgotten < _FORGET:
            return None
        self._forgotten = self._known
        return self._known

    def asked(self, count: int, device: str) -> list[tf.Tensor]:
        """What `PackedReader.read` asks of the worker: what it has counted, the first of its
        variables, and its log.

        Args:
            count: how many variables.
            device: the worker's.
        """
        handles = [self._counts, *self._variables[:count]]
        if not self._has_numbers:
            return handles
        # Of two threads the latter may tell it a smaller number, which the log takes.
        known = self._known
        if known >= self._tell_again:
            with tf.device(device):
                self._told, self._tell_again = on_worker(np.int64(known)), known + _FORGET
        return [*handles, self._log, self._told]

    def first_answer(self, initial: Sequence[np.ndarray]) -> Answer:
        """What the worker answers before its first step.

        Args:
            initial: the initial values of those of its variables that are asked for.
        """
        counts = np.array([self.steps, self.waited])
        return Answer([counts, *map(np.array, initial)], 0, np.zeros([0], np.int64))

    def take(
        self,
        answer: Answer,
        note: Callable[[np.ndarray], None],
        merge: Callable[[list[np.ndarray]], None],
        is_report: bool = False,
    ) -> bool:
        """Takes what a worker says, or has reported; the latest counts, by whichever thread.

        Args:
            answer: of the counts and the variables; if there is a log, of that, too.
            note: is told the numbers of the batches that were done since it was last read, if they
                have numbers.
            merge: gets the variables' latest values, unless they are those of before its metrics
                were reset.
            is_report: whether it may be of before that. Default False.

        Returns:
            Whether it counts: nothing does of a worker that was lost.
        """
        with self._reading:
            if self._is_settled:
                return False
            news = answer.numbers[self._known - answer.first :]
            if self._has_numbers:
                note(news)
            self._known += len(news)
            counts, *values = answer.values
            if counts[0] >= self.counted:
                self.counted, self.waited = (int(count) for count in counts)
                self._values = values
            is_of_before = is_report and self.counted <= self._reset_at
            if not (self.reset_metrics or is_of_before):
                merge(self._values)
            return True

    def settle(self) -> None:
        """The worker was lost: of its batches, what is not known by now counts as not done."""
        with self._reading:
            self._is_settled = True

    def take_events(self, device: str) -> tuple[np.ndarray, int] | None:
        """What the worker has noted of its steps since the last time, and how much is missing.

        Args:
            device: the worker's.

        Returns:
            As `ops.events.take`; None if it has no log.

        Raises:
            tf.errors.OpError: it does not answer.
        """
        if self._log is None:
            return None
        with tf.device(device):
            events, lost = fetch(events_ops.take()(self._log))
        return events, int(lost)

    def join(self, iterator: PassIterator) -> None:
        """Goes on with other batches; call it in the worker's device scope.

        Raises:
            tf.errors.OpError: the worker can't be reached.
        """
        before, self.iterator = self.iterator, iterator
        if before is not None:
            before.close()

    def account_lost(
        self, taken: int, known: int, seconds: float, read: Callable[[], Mapping[int, int]]
    ) -> tuple[int, int]:
        """The worker was lost in a call, or only the connection to it; servers may know more.

        Args:
            taken: the steps of the call.
            known: how many of them are known to be done.
            seconds: for how long it may go on; 0 if the server that counts its steps is gone, too.
            read: reads what it has reported; gives the steps that were applied, by rows' keys.

        Returns:
            How many of them were done, and how many more had begun.
        """
        done, begun = known, taken - known
        if self.row is not None:
            try:
                if seconds:
                    done = max(done, min(self.in_call(self._read_applied(seconds, read)), taken))
            # The latter of numpy, for what comes from a server that is being cut off.
            except (tf.errors.OpError, ValueError) as error:
                logging.debug("what became of the last call is not known: %s", error)
            begun = min(taken - done, self.unrolled)
        self.steps = self.steps_at_call + done
        return done, begun

    def in_call(self, applied: int) -> int:
        """How many steps of the last call were applied, of those since the worker was opened."""
        return max(applied - (self.steps_at_call - self._steps_before), 0)

    def _read_applied(self, seconds: float, read: Callable[[], Mapping[int, int]]) -> int:
        """The steps that were applied since it was opened, when nothing comes any more."""
        deadline, last = time.monotonic() + seconds, -1
        # If it is not gone, it ends the call, whose results nobody gets.
        self.row.board.tell([self.row])
        while True:
            applied = read().get(self.row.key, 0)
            if applied == last or time.monotonic() > deadline:
                return applied
            last = applied
            time.sleep(min(_ECHO_SECONDS, seconds))

    def read_steps(self) -> int:
        """The steps that the worker has done."""
        return int(_read_counts([self._counts])[0][0])


def initial_values(variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    """What variables have that each worker keeps for itself, when it begins.

    Raises:
        RuntimeError: if one was made before this process connected to the cluster.
    """
    values = []
    for variable in variables:
        try:
            values.append(fetch(variable._value.read_value()))
        except tf.errors.InvalidArgumentError as error:
            raise RuntimeError(
                f"{variable.path} can't be used, because it was made before this process connected "
                "to the cluster: make the strategy first, and all layers after it"
            ) from error
    return values


class MetricsMerger:
    """Merges metric variables that workers accumulated apart.

    A variable is merged by its Keras aggregation: "sum" adds what each worker
    added to the initial value, "mean" averages, "only_first_replica" takes the
    first worker's. The last two are those of workers that have done a step.

    Args:
        variables: metric variables of the model, and what else workers accumulate.
        shown: so many of them get what was merged; the others keep their initial values.

    Attributes:
        initial: what they have when it is made, and workers have when they begin.
    """

    def __init__(self, variables: list[keras.Variable], shown: int):
        self._variables = variables
        self._shown = shown
        self.initial = initial_values(variables)
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, WorkerState], list[np.ndarray]] = {}

    def update(self, worker: int, state: WorkerState, values: list[np.ndarray]) -> None:
        """Sets what a worker has accumulated in a state; in one of earlier it was something else.

        Args:
            worker: its number; that of a thread, if it has several.
            state: where it accumulates since it started, or started anew.
            values: what was read of the state, one for each variable.
        """
        with self._lock:
            self._parts[worker, state] = values

    @property
    def has_steps(self) -> bool:
        """Whether there are steps of some worker in what it has."""
        with self._lock:
            return any(state.has_counted for _, state in self._parts)

    def assign(self) -> list[np.ndarray]:
        """Writes the merged values into the variables; returns those of variables not shown."""
        with self._lock:
            keys = sorted(self._parts, key=lambda key: key[0])
            parts = [self._parts[key] for key in keys]
            counted = [self._parts[key] for key in keys if key[1].has_counted]
        merged = []
        for i, (variable, initial) in enumerate(zip(self._variables, self.initial, strict=True)):
            is_sum = variable.aggregation not in ("mean", "only_first_replica")
            values = [part[i] for part in (parts if is_sum else counted)]
            if not values:
                merged.append(initial)
            elif is_sum:
                merged.append(initial + np.sum([v - initial for v in values], axis=0))
            elif variable.aggregation == "mean":
                merged.append(np.mean(values, axis=0).astype(initial.dtype))
            else:
                merged.append(values[0])
        for variable, value in zip(self._variables[: self._shown], merged, strict=False):
            variable.assign(value)
        return merged[self._shown :]
