"""What trainers have, and what a synchronization does with it (ShadowSync).

Each trainer has a copy of the parameters and vectors of the algorithm, the sync PSs a central copy
in parts. When trainers synchronize, and what becomes of those that don't answer, is shadow.py's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tf_recsync.cluster import Cluster, device_of
from tf_recsync.synchronization import links
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.remote_values import at, on_worker
from tf_recsync.synchronization.shadow_algorithms import Algorithm, Center, Trainer

# Servers build their parts of a function at the first call, one after the other.
_building = threading.Lock()


class Trainers:
    """The trainers of a model: their copies and vectors, and the central copy.

    Thread-safe, but for what says that nobody may be at work.

    Args:
        algorithm: how copies are synchronized.
        cluster: the connected cluster.
        copies: the trainers' parameters, and what belongs to them.
        parameters: how many of the copied variables are parameters: the first ones.
        counters: which of the copied variables count the staleness of updates.
        sync_ps: the task indices of the sync PSs.
        bandwidths: returns artificial bandwidths, in bytes per second by server's device.

    Attributes:
        elements: the parameters that are synchronized.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        cluster: Cluster,
        copies: Copies,
        parameters: int,
        counters: Sequence[int],
        sync_ps: Sequence[int],
        bandwidths: Callable[[], dict[str, float]],
    ):
        self.copies = copies
        self._algorithm = algorithm
        self._cluster = cluster
        self._sync_ps = list(sync_ps)
        self._bandwidths = bandwidths
        self._parameters = parameters
        self._sizes = [v.shape.num_elements() for v in copies.variables[:parameters]]
        self.elements = sum(self._sizes)
        self._counters = list(counters)
        # What each trainer had counted when it was last asked, and those that were lost.
        self._counted: dict[int, list[np.ndarray]] = {}
        self._counted_before: list[list[np.ndarray]] = []
        self._lock = threading.RLock()
        # Of each trainer that is not lost: the algorithm's vectors, by name.
        self._there: dict[int, dict[str, tf.Variable]] = {}
        self._lost: set[int] = set()
        # Whether the last one was lost, and with it the algorithm's vectors.
        self._all_gone = False
        self._has_begun = False
        # The algorithm's vectors of trainers while there is no other trainer to have them from.
        self._first_states: dict[str, np.ndarray] = {}
        self._restored: dict[str, np.ndarray] | None = None  # The extras of a checkpoint.
        # The copies of a checkpoint of other trainers, and their mean.
        self._merged: tuple[list[list[np.ndarray]], list[np.ndarray]] | None = None
        self._parts: list[tf.Variable] = []  # Of the center.
        self._traffic: list[tf.Variable] = []
        self._functions: dict[tuple[int, ...], Callable] = {}
        self._called: set[tuple[int, ...]] = set()
        self._limits: dict[str, float] = {}

    @property
    def there(self) -> list[int]:
        """The trainers that are not lost, as far as known, in their order."""
        # Not under the lock, which is held while functions are traced.
        return sorted(list(self._there))

    def open(self, worker: int) -> bool:
        """Makes what a trainer needs, in its device scope: at the start, or when it is back.

        Returns:
            Whether it had nothing; only one thread of a worker opens it at a time.
        """
        with self._lock:
            if worker in self._there and worker in self.copies.workers:
                return False
            was_lost = worker in self._lost and not self.copies.is_loaded(worker)
        if was_lost:
            self._come_back(worker)
        else:
            self.copies.ensure(worker)
        states = {
            name: tf.Variable(on_worker(value), trainable=False)
            for name, value in self._current_states().items()
        }
        with self._lock:
            self._there[worker] = states
            self._lost.discard(worker)
            self._all_gone = False
        return True

    def lose(self, worker: int) -> None:
        """A trainer is gone, with all that it had."""
        with self._lock:
            if self._there.pop(worker, None) is not None and not self._there:
                self._all_gone = True
            self._lost.add(worker)
            self.copies.drop(worker)
            # The next one's server has to build its parts of functions again.
            self._called.clear()
            if worker in self._counted:
                self._counted_before.append(self._counted.pop(worker))

    def begin(self) -> None:
        """Makes ready for an epoch; nobody may be at work."""
        limits = self._bandwidths()
        with self._lock:
            if limits != self._limits:
                self._functions.clear()
                self._called.clear()
            self._limits = limits
            self._follow_users()

    def sync(self, members: Sequence[int]) -> bool:
        """Synchronizes trainers once, from this thread; False if one of them is gone.

        Raises:
            tf.errors.OpError: if a server is lost, or a connection broke.
        """
        with self._lock:
            if any(worker not in self._there for worker in members):
                return False
            handles = [h for worker in members for h in self._handles(worker)]
            function = self._function(members)
            is_new = tuple(members) not in self._called
        with _building if is_new else contextlib.nullcontext():
            function(*handles)
        self._called.add(tuple(members))
        return True

    def sync_ps_bytes(self) -> int:
        """What the sync PSs have received and sent, as they have counted.

        Raises:
            tf.errors.OpError: if one is lost.
        """
        return sum(int(np.asarray(v.read_value())) for v in self._traffic)

    def counted(self) -> list[list[np.ndarray]]:
        """What each trainer has counted of the staleness of updates, those that were lost included.

        Returns:
            For each of them, an array for each of the counters; of a trainer that does not
            answer, and of one that was lost, what is known.
        """
        for worker in self.copies.workers:
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError, KeyError):
                values = self.copies.values(worker)
                with self._lock:
                    if worker not in self._lost:
                        self._counted[worker] = [values[i] for i in self._counters]
        with self._lock:
            return [*self._counted_before, *self._counted.values()]

    def extras(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps besides the copies: the center, and the algorithm's vectors."""
        if self._restored is not None:
            return dict(self._restored)  # Nobody has trained since.
        kept = {f"state_{name}": value for name, value in self._current_states().items()}
        if self._parts:
            kept["center"] = self._center()
        return kept

    def restore(
        self, values: Mapping[int, Sequence[np.ndarray]], extras: Mapping[str, np.ndarray]
    ) -> None:
        """Trainers go on with these copies, and this center; nobody may be at work.

        Args:
            values: by worker. If there were more or fewer, all begin with the mean.
            extras: as above; those of another algorithm are left out.
        """
        workers = range(self._cluster.workers)
        if values and set(values) != set(workers):
            logging.warning(
                "The checkpoint holds the parameters of %d trainers, and there are %d: all of "
                "them begin with the mean.",
                len(values),
                len(workers),
            )
            mean = self.copies.mean(list(values.values()))
            self._merged = [list(copy) for copy in values.values()], mean
            values = dict.fromkeys(workers, mean)
        if values:
            self.copies.load(values)
        with self._lock:
            self._restored = {
                name: value
                for name, value in extras.items()
                if name == "center" or name.startswith("state_")
            }

    # Inside.

    def _handles(self, worker: int) -> list[tf.Tensor]:
        states = self._there[worker]
        parameters = self.copies.handles(worker)[: self._parameters]
        return [*parameters, *(states[name].handle for name in sorted(states))]

    def _function(self, members: Sequence[int]) -> Callable:
        """What synchronizes these trainers; of the handles of all of them."""
        # One for any trainer where they synchronize by themselves.
        key = () if self._algorithm.is_central else tuple(members)
        if key in self._functions:
            return self._functions[key]
        names = sorted(self._first_states)
        each = self._parameters + len(names)
        devices = [device_of("worker", w) + "/device:CPU:0" for w in key] or [""]

        def sync(*handles):
            trainers = []
            for i, device in enumerate(devices):
                own = handles[i * each : (i + 1) * each]
                states = dict(zip(names, own[self._parameters :], strict=True))
                parameters = own[: self._parameters]
                trainers.append(Trainer(device, parameters, self._sizes, states))
            center = Center(self._parts, self._traffic) if self._parts else None
            self._algorithm.sync(trainers, center)

        specs = [tf.TensorSpec([], tf.resource)] * (each * len(devices))
        with tf.device(None), links.limited(self._limits):
            function = tf.function(sync, autograph=False).get_concrete_function(*specs)
        self._functions[key] = function
        return function

    def _follow_users(self) -> None:
        """Begins with the parameters as users see them, or takes over what they assigned.

        What came from a checkpoint takes the place of both.
        """
        if not self._parameters:
            return
        if self._merged is not None:
            self._begin_with_merged()
        self._follow_assignments()
        if self._restored is None:
            return
        restored = self._restored
        # A checkpoint of another algorithm has no center, or other vectors.
        start = self._packed()
        states = {
            name: restored.get(f"state_{name}", value)
            for name, value in self._checked_states(start).items()
        }
        self._set(restored.get("center", start), states)
        self._restored = None  # Not earlier: if a server is lost, all of this is done again.

    def _begin_with_merged(self) -> None:
        """All trainers begin with the mean of a checkpoint's.

        What users see is that of one of its trainers, perhaps: the checkpoint of the model
        writes that after the trainers' states were read. What they have assigned themselves
        stays.
        """
        (copies, mean), self._merged = self._merged, None
        values = []
        for i, shown in enumerate(self.copies.shown):
            is_of_checkpoint = any(np.array_equal(shown, copy[i]) for copy in copies)
            values.append(mean[i] if is_of_checkpoint else shown)
        self.copies.load(dict.fromkeys(range(self._cluster.workers), values))

    def _packed(self) -> np.ndarray:
        """The parameters as users see them, one after the other."""
        shown = self.copies.shown[: self._parameters]
        return np.concatenate([np.ravel(value) for value in shown]).astype(np.float32)

    def _checked_states(self, start: np.ndarray) -> dict[str, np.ndarray]:
        """The algorithm's vectors for a trainer that begins with these parameters."""
        states = self._algorithm.states(start)
        for name, value in states.items():
            if "/" in name:
                raise ValueError(
                    f"{type(self._algorithm).__name__}.states must give names without a slash, "
                    f"not {name!r}"
                )
            if np.shape(value) != start.shape or np.asarray(value).dtype != np.float32:
                raise ValueError(
                    f"{type(self._algorithm).__name__}.states must give float32 arrays of "
                    f"{start.size} elements; {name!r} has the shape {np.shape(value)} and the "
                    f"type {np.asarray(value).dtype}"
                )
        return states

    def _follow_assignments(self) -> None:
        start = self._packed()
        is_assigned = any(self.copies.assigned[: self._parameters])
        if not self._parts and self._algorithm.is_central:
            for ps, (first, last) in zip(self._sync_ps, self._ranges(), strict=True):
                with tf.device(device_of("ps", ps) + "/device:CPU:0"):
                    # Not a variable of the strategy, in whose scope this may be.
                    self._parts.append(ResourceVariable(start[first:last], trainable=False))
                    self._traffic.append(ResourceVariable(np.int64(0), trainable=False))
        if is_assigned or not self._has_begun:
            self._set(start, self._checked_states(start))
        self._has_begun = True

    def _set(self, center: np.ndarray, states: dict[str, np.ndarray]) -> None:
        """Sets the sync PSs' copy, if there is one, and the vectors of every trainer."""
        self._first_states = states
        self._all_gone = False
        for part, (first, last) in zip(self._parts, self._ranges(), strict=True):
            part.assign(center[first:last])
        for worker, own in self._there.items():
            with at(self._cluster, worker):
                for name, value in states.items():
                    own[name].assign(on_worker(value))

    def _center(self) -> np.ndarray:
        """The sync PSs' copy."""
        return np.concatenate([np.asarray(part.read_value()) for part in self._parts])

    def _ranges(self) -> list[tuple[int, int]]:
        """Which elements each sync PS has."""
        total, count = sum(self._sizes), len(self._sync_ps)
        if not count:
            return []
        bounds = [total * i // count for i in range(count + 1)]
        return list(zip(bounds, bounds[1:], strict=False))

    def _current_states(self) -> dict[str, np.ndarray]:
        """The algorithm's vectors for a trainer that has none: another's, if there is one."""
        with self._lock:
            others = list(self._there.items())
        for worker, states in others:
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError), at(self._cluster, worker):
                self._first_states = {n: np.asarray(v.read_value()) for n, v in states.items()}
                return self._first_states
        if self._all_gone:
            # They begin anew, with the parameters.
            self._first_states = self._checked_states(self._packed())
        return self._first_states

    def _come_back(self, worker: int) -> None:
        """A lost trainer begins with the mean of the others, or with what users see."""
        with self._lock:
            others = list(self._there)
        taken = []
        for other in others:
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError, KeyError):
                taken.append(self.copies.values(other))
        values = self.copies.mean(taken) if taken else list(self.copies.shown)
        if self._parts:
            # The center has what the lost one had learned, too.
            pieces = np.split(self._center(), np.cumsum(self._sizes)[:-1])
            for i, piece in enumerate(pieces):
                values[i] = piece.reshape(self.copies.variables[i].shape)
        for i in self._counters:
            values[i] = np.zeros_like(values[i])
        self.copies.make(worker, values)
        logging.warning(
            "Worker %d goes on with the parameters of %s.",
            worker,
            "the sync PSs" if self._parts else "the other trainers",
        )
