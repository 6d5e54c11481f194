"""Variables of which every worker has a copy of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, device_of
from tf_recsync.shown_variable import ShownVariable
from tf_recsync.synchronization.remote_values import PackedReader, at, on_worker


class CopiedVariable(ShownVariable):
    """What users see of a variable of which every worker has a copy.

    Reading it gives what the copies come to, their mean as a rule: whoever owns the
    copies refreshes it first. What is assigned to it the copies take over before they
    are trained again.
    """


class Copies:
    """The workers' copies of some variables.

    Args:
        variables: what users see of them, in an order that all copies keep.
        cluster: the connected cluster.
        read: "mean", or the index of the worker whose copy is read.
        hold: is called before users see them; returns whether no worker trains them until
            `carried_on` is called.
        peeked: those of the variables that are read without it.
    """

    def __init__(
        self,
        variables: Sequence[CopiedVariable],
        cluster: Cluster,
        read: str | int = "mean",
        hold: Callable[[], bool] = lambda: False,
        peeked: Collection[tf.Variable] = (),
    ):
        self.variables = list(variables)
        self._cluster = cluster
        self._read = read
        self._hold = hold
        self._peeked = {id(variable) for variable in peeked}
        self._is_held = False  # And users see them as they are.
        self._lock = threading.RLock()
        self._copies: dict[int, list[tf.Variable]] = {}  # By worker.
        self._lives: dict[int, tuple[int, int]] = {}  # The workers' when theirs were made.
        # What workers begin with that have none yet, if it is not what users see.
        self._loaded: dict[int, list[np.ndarray]] = {}
        self._shown: list[np.ndarray] = []  # What users see, as far as is known.
        # Of each variable, whether users had assigned it when copies last took that over.
        self.assigned: list[bool] = []
        self._stale = False
        self._reader = PackedReader(self.variables)

    @property
    def workers(self) -> list[int]:
        """Those that have copies."""
        with self._lock:
            return sorted(self._copies)

    @property
    def shown(self) -> list[np.ndarray]:
        """What users see, as far as is known."""
        return list(self._shown)

    def handles(self, worker: int) -> list[tf.Tensor]:
        """The handles of a worker's copies."""
        with self._lock:
            return [copy.handle for copy in self._copies[worker]]

    def of(self, worker: int) -> list[tf.Variable] | None:
        """A worker's copies, the same list as long as it has them; None if it has none."""
        with self._lock:
            return self._copies.get(worker)

    def is_of_earlier_life(self, worker: int) -> bool:
        """Whether a worker's copies, if it has any, are gone although it answers.

        It was started again, and somebody has readmitted it.
        """
        with self._lock:
            made_in = self._lives.get(worker)
        return made_in is not None and made_in != self._cluster.life("worker", worker)

    def make(self, worker: int, values: Sequence[np.ndarray]) -> None:
        """Makes a worker's copies anew, with these values."""
        life = self._cluster.life("worker", worker)
        with at(self._cluster, worker):
            made = []
            for variable, value in zip(self.variables, values, strict=True):
                made.append(tf.Variable(on_worker(value), trainable=False, shape=variable.shape))
        with self._lock:
            self._copies[worker] = made
            self._lives[worker] = life

    def drop(self, worker: int) -> None:
        """Forgets the copies of a worker that is lost."""
        with self._lock:
            self._copies.pop(worker, None)
            self._lives.pop(worker, None)

    def values(self, worker: int) -> list[np.ndarray]:
        """A worker's copies."""
        with self._cluster.dispatch_scope():
            return self._reader(self.handles(worker), device_of("worker", worker))

    def all_values(self) -> dict[int, list[np.ndarray]]:
        """The copies by worker, of those that have some or will begin with some.

        Those of a worker that does not answer are left out. Workers are held first, as before
        users read a variable.

        Raises:
            tf.errors.OpError: if none of them answers.
        """
        if self._stale and not _refreshing.active:
            self._hold()
        with self._lock:
            found = dict(self._loaded)
        failed: tf.errors.OpError | None = None
        for worker in self.workers:
            try:
                found[worker] = self.values(worker)
            except tf.errors.OpError as error:
                logging.warning("Worker %d does not answer; its copies are left out.", worker)
                failed = error
        if failed is not None and not found:
            raise failed
        return found

    def by_worker(self, count: int) -> list[list[np.ndarray] | None]:
        """The first copies of each worker; None for one that has none, or does not answer."""
        found = self.all_values()
        return [
            found[worker][:count] if worker in found else None
            for worker in range(self._cluster.workers)
        ]

    def begin(self) -> None:
        """Has the copies take over what users have assigned; nobody may train them."""
        shown = self._current()
        with self._lock:
            self.assigned = [False] * len(shown)
            if self._copies or self._loaded:
                assigned = [
                    # What is no number is the same as itself here: nobody assigned it.
                    None if np.array_equal(new, old, equal_nan=variable.dtype.is_floating) else new
                    for variable, new, old in zip(self.variables, shown, self._shown, strict=True)
                ]
                self.assigned = [value is not None for value in assigned]
                for worker in self._copies:
                    self._assign(worker, assigned)
                for values in self._loaded.values():
                    for i, value in enumerate(assigned):
                        values[i] = values[i] if value is None else value
            self._shown = shown

    def load(self, values: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Gives workers copies of these values; nobody may train them.

        One that does not answer gets them when it is opened the next time.
        """
        with self._lock:
            for worker, copies in values.items():
                self._loaded[worker] = list(copies)
                if worker not in self._copies:
                    continue
                try:
                    self._assign(worker, copies)
                    del self._loaded[worker]
                except tf.errors.OpError as error:
                    logging.warning("Worker %d does not answer: %s", worker, error)
                    self.drop(worker)
            shown = [values[self._read]] if self._read in values else list(values.values())
            self._show(self.mean(shown))

    def ensure(self, worker: int) -> None:
        """Makes a worker's copies if it has none, of what was loaded for it or users see."""
        with self._lock:
            if worker in self._copies:
                return
            values = self._loaded.get(worker, self._shown)
        self.make(worker, values)
        with self._lock:
            self._loaded.pop(worker, None)

    def is_loaded(self, worker: int) -> bool:
        """Whether there are values that a worker begins with when it is opened."""
        with self._lock:
            return worker in self._loaded

    def touched(self) -> None:
        """The copies are being trained: what users see is no longer what they are."""
        self._stale = True
        for variable in self.variables:
            is_peeked = id(variable) in self._peeked
            variable.before_read = self._peek if is_peeked else self.refresh

    def carried_on(self) -> None:
        """The copies are trained again after users have seen them."""
        self._is_held = False

    def settled(self) -> None:
        """Nobody trains the copies any more; after one more refresh nothing changes."""
        self.refresh(force=True)
        self._stale = False
        for variable in self.variables:
            variable.before_read = None

    def refresh(self, force: bool = False) -> None:
        """Writes what the copies come to into what users see."""
        if not (self._stale or force) or _refreshing.active:
            return
        is_held = False
        if not force:
            is_held = self._hold()
            if is_held and self._is_held:
                return
        self._peek()
        self._is_held = is_held

    def _peek(self) -> None:
        """Writes what the copies come to, which may be trained meanwhile, into what users see."""
        if _refreshing.active:
            return
        with self._lock, _refreshing:
            found = self._combined()
            if found is not None:
                self._show(found)

    def _show(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
        self._shown = values

    def _combined(self) -> list[np.ndarray] | None:
        """What the copies come to; None if no worker answers."""
        workers = self.workers

        def answers(asked: Sequence[int]):
            for worker in asked:
                # One that is lost its own thread finds out.
                with contextlib.suppress(tf.errors.OpError, KeyError):
                    yield self.values(worker)

        if self._read in workers:
            found = self.mean(answers([self._read]))
            if found is not None:
                return found
            workers.remove(self._read)
        return self.mean(answers(workers))

    def mean(self, copies: Iterable[Sequence[np.ndarray]]) -> list[np.ndarray] | None:
        """The mean; of integers, which have none, the first. None of no copies."""
        sums: list[np.ndarray] = []
        count = 0
        for values in copies:
            count += 1
            if not sums:
                sums = [
                    np.array(value, np.float64) if variable.dtype.is_floating else value
                    for variable, value in zip(self.variables, values, strict=True)
                ]
                continue
            for variable, sum_, value in zip(self.variables, sums, values, strict=True):
                if variable.dtype.is_floating:
                    sum_ += value
        if not sums:
            return None
        return [
            np.asarray(value / count, variable.dtype.as_numpy_dtype)
            if variable.dtype.is_floating
            else value
            for variable, value in zip(self.variables, sums, strict=True)
        ]

    def _assign(self, worker: int, values: Sequence[np.ndarray | None]) -> None:
        with at(self._cluster, worker):
            for copy, value in zip(self._copies[worker], values, strict=True):
                if value is not None:
                    copy.assign(on_worker(value), read_value=False)

    def _current(self) -> list[np.ndarray]:
        with _refreshing:
            return [np.asarray(variable.read_value()) for variable in self.variables]


class _Refreshing(threading.local):
    """Whether this thread refreshes already: then reads are plain reads."""

    active = False

    def __enter__(self) -> None:
        self._before = getattr(self, "_before", [])
        self._before.append(self.active)
        self.active = True

    def __exit__(self, *exception_info) -> None:
        self.active = self._before.pop()


_refreshing = _Refreshing()
