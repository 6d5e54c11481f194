"""What groups of trainers have, and what a synchronization does with it (ShadowSync).

Each group has a copy of the parameters and vectors of the algorithm, the sync PSs a central copy
in parts. What lies on one of a group's servers is a shard, and shards are synchronized by
themselves, each with those of the other groups: algorithms act on elements. When that is done,
and what becomes of those that don't answer, is shadow.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tf_recsync import ops
from tf_recsync.cluster import Cluster, fetch, processor_of
from tf_recsync.cluster.making_functions import making_functions
from tf_recsync.synchronization import links
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.remote_values import at, on_worker
from tf_recsync.synchronization.shadow_algorithms import Algorithm, Center, Trainer
from tf_recsync.synchronization.staleness_counts import StalenessCounts

# Servers build their parts of a function at the first call, one after the other.
_building = threading.Lock()

_Vectors = dict[str, np.ndarray]  # The algorithm's, by name.

# Between two synchronizations of a call, at least: of a small model they would else take all the
# time of a processor.
_REST_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Turns:
    """How a server synchronizes again and again in one call.

    Attributes:
        seconds: for how long; it ends what it has begun.
        interval: from the begin of one to the begin of the next, at least.
    """

    seconds: float
    interval: float


@dataclasses.dataclass
class _Held:
    """What a group has for a shard, on the shard's server.

    Attributes:
        vectors: the algorithm's, by name.
        limit: for how many seconds a call goes on, see `Turns`; 0 at first: the servers build
            their parts of a function in its first call, which shall be short.
    """

    vectors: dict[str, tf.Variable]
    limit: tf.Variable


class _Shard:
    """The parameters on one server of each group, as one vector.

    Args:
        number: its number in each group.
        parameters: the numbers of its parameters among the copied variables.
        sizes: their elements.
    """

    def __init__(self, number: int, parameters: Sequence[int], sizes: Sequence[int]):
        self.number = number
        self.parameters = list(parameters)
        self.sizes = list(sizes)
        self.elements = sum(sizes)
        # The algorithm's vectors of groups while there is no other group to have them from.
        self.first_vectors: _Vectors = {}
        self.parts: list[tf.Variable] = []  # Of the center.
        self.traffic: list[tf.Variable] = []
        self.functions: dict[tuple[tuple[int, ...], Turns | None], Callable] = {}
        self.called: set[tuple[tuple[int, ...], Turns | None]] = set()

    def pack(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The shard's, of values of all copied variables."""
        if not self.parameters:
            return np.zeros([0], np.float32)
        return np.concatenate([np.ravel(values[i]) for i in self.parameters]).astype(np.float32)

    def unpack(self, vector: np.ndarray) -> dict[int, np.ndarray]:
        """The values in a vector of the shard, flat, by the numbers of their variables."""
        pieces = np.split(vector, np.cumsum(self.sizes)[:-1]) if self.parameters else []
        return dict(zip(self.parameters, pieces, strict=True))

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """Which elements each of so many sync PSs has."""
        bounds = [self.elements * i // count for i in range(count + 1)] if count else []
        return list(zip(bounds, bounds[1:], strict=False))


class Trainers:
    """The groups of a model: their copies and vectors, and the central copy.

    Thread-safe, but for what says that nobody may be at work.

    Args:
        algorithm: how copies are synchronized.
        cluster: the connected cluster.
        copies: the groups' parameters, and what belongs to them.
        parameters: how many of the copied variables are parameters: the first ones.
        counters: which of the copied variables count the staleness of updates.
        sync_ps: the task indices of the sync PSs.
        bandwidths: returns artificial bandwidths, in bytes per second by server's device.

    Attributes:
        elements: the parameters that are synchronized.
        shards: the numbers of the shards that have some.
        staleness: what groups have counted.
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
        self._shards = []
        for number in range(len(copies.groups[0].holders)):
            own = [i for i in range(parameters) if copies.variables[i].shard == number]
            sizes = [copies.variables[i].shape.num_elements() for i in own]
            self._shards.append(_Shard(number, own, sizes))
        self.elements = sum(shard.elements for shard in self._shards)
        self.shards = [shard.number for shard in self._shards if shard.elements]
        self.staleness = StalenessCounts(copies, counters)
        self._lock = threading.RLock()
        # Of each group: one thread at a time makes what it needs.
        self._opening = [threading.Lock() for _ in copies.groups]
        self._there: dict[int, list[_Held]] = {}  # Of each group that is not lost, by shard.
        self._lost: set[int] = set()
        # Whether the last one was lost, and with it the algorithm's vectors.
        self._all_gone = False
        self._has_begun = False
        self._restored: dict[str, np.ndarray] | None = None  # The extras of a checkpoint.
        self._limits: dict[str, float] = {}

    @property
    def there(self) -> list[int]:
        """The groups that are not lost, as far as known, in their order."""
        # Not under the lock, which is held while functions are traced.
        return sorted(list(self._there))

    def open(self, group: int) -> bool:
        """Makes what a group needs: at the start, or when it is back.

        Returns:
            Whether it had nothing.
        """
        with self._opening[group]:
            with self._lock:
                if group in self._there and group in self.copies.there:
                    return False
                was_lost = group in self._lost and not self.copies.is_loaded(group)
            if was_lost:
                self._come_back(group)
            else:
                self.copies.ensure(group)
            made = []
            for shard, (job, index) in self._held(group):
                vectors = self._current_vectors(shard)
                with at(self._cluster, index, job):
                    # No variables of the strategy, in whose scope this may be.
                    own = {
                        name: ResourceVariable(on_worker(value), trainable=False)
                        for name, value in vectors.items()
                    }
                    limit = ResourceVariable(on_worker(np.float64(0.0)), trainable=False)
                    made.append(_Held(own, limit))
            with self._lock:
                self._there[group] = made
                self._lost.discard(group)
                self._all_gone = False
            return True

    def lose(self, group: int) -> None:
        """A group is gone, with all that it had."""
        with self._lock:
            if self._there.pop(group, None) is not None and not self._there:
                self._all_gone = True
            self._lost.add(group)
            self.copies.drop(group)
            # The next one's server has to build its parts of functions again.
            for shard in self._shards:
                shard.called = {key for key in shard.called if group not in key[0]}
            self.staleness.lost(group)

    def begin(self) -> None:
        """Makes ready for an epoch; nobody may be at work."""
        limits = self._bandwidths()
        with self._lock:
            if limits != self._limits:
                for shard in self._shards:
                    shard.functions.clear()
                    shard.called.clear()
            self._limits = limits
            self._follow_users()

    def sync(
        self, members: Sequence[int], number: int, turns: Turns | None = None
    ) -> tuple[int, float]:
        """Synchronizes a shard of groups, from this thread.

        Args:
            members: the groups.
            number: the shard's.
            turns: how it is done again and again, of one group and a central algorithm; default
                None: once.

        Returns:
            How often it was done, and the seconds that this took; nothing if a group is gone.

        Raises:
            tf.errors.OpError: if a server is lost, or a connection broke.
        """
        shard, key = self._shards[number], (tuple(members), turns)
        with self._lock:
            if any(group not in self._there for group in members):
                return 0, 0.0
            handles = [h for group in members for h in self._handles(group, shard)]
            function = self._function(members, shard, turns)
            is_new = key not in shard.called
            limit = self._there[members[0]][number].limit
        began = time.monotonic()
        with _building if is_new else contextlib.nullcontext():
            if turns is None:
                function(*handles)
            else:
                if is_new:
                    limit.assign(on_worker(np.float64(0.0)))
                times, seconds = fetch(function(limit.handle, *handles))
        if turns is not None and is_new:
            limit.assign(on_worker(np.float64(turns.seconds)))
        with self._lock:
            # Not of one that was lost meanwhile: the next one's server has not been called.
            if all(group in self._there for group in members):
                shard.called.add(key)
        return (1, time.monotonic() - began) if turns is None else (int(times), float(seconds))

    def sync_ps_bytes(self) -> int:
        """What the sync PSs have received and sent, as they have counted.

        Raises:
            tf.errors.OpError: if one is lost.
        """
        counted = [variable for shard in self._shards for variable in shard.traffic]
        return sum(int(fetch(variable.read_value())) for variable in counted)

    def extras(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps besides the copies: the center, and the algorithm's vectors.

        Each is one vector, in the order of the parameters, whatever shards there are.
        """
        if self._restored is not None:
            return dict(self._restored)  # Nobody has trained since.
        assigned = self.copies.assigned_since()[: self._parameters]
        is_assigned = any(value is not None for value in assigned)
        if is_assigned:
            # As `begin` does before anybody trains again.
            shown = self.copies.current()
            starts = [shard.pack(shown) for shard in self._shards]
            vectors = [self._checked_vectors(start) for start in starts]
        else:
            vectors = [self._current_vectors(shard) for shard in self._shards]
        kept = {f"state_{name}": self._joined([v[name] for v in vectors]) for name in vectors[0]}
        if self._algorithm.is_central and self._has_begun:
            centers = starts if is_assigned else [self._center(shard) for shard in self._shards]
            kept["center"] = self._joined(centers)
        return kept

    def restore(self, extras: Mapping[str, np.ndarray]) -> None:
        """Groups, which have their copies, go on with this center; nobody may be at work.

        Args:
            extras: as above; those of another algorithm are left out.
        """
        with self._lock:
            self._restored = {
                name: value
                for name, value in extras.items()
                if name == "center" or name.startswith("state_")
            }

    # Inside.

    def _held(self, group: int) -> list[tuple[_Shard, tuple[str, int]]]:
        """A group's shards, and who holds them: job and index."""
        return list(zip(self._shards, self.copies.groups[group].holders, strict=True))

    def _handles(self, group: int, shard: _Shard) -> list[tf.Tensor]:
        vectors = self._there[group][shard.number].vectors
        handles = self.copies.handles(group)
        own = [handles[i] for i in shard.parameters]
        return [*own, *(vectors[name].handle for name in sorted(vectors))]

    def _function(
        self, members: Sequence[int], shard: _Shard, turns: Turns | None = None
    ) -> Callable:
        """What synchronizes a shard of these groups; of the handles of all of them."""
        # One for any group where they synchronize by themselves.
        groups = () if self._algorithm.is_central else tuple(members)
        key = groups, turns
        if key in shard.functions:
            return shard.functions[key]
        names = sorted(shard.first_vectors)
        count = len(shard.parameters)
        each = count + len(names)
        holders = [self.copies.groups[group].holders[shard.number] for group in groups]
        devices = [processor_of(*holder) for holder in holders] or [""]

        def sync(*handles):
            trainers = []
            for i, device in enumerate(devices):
                own = handles[i * each : (i + 1) * each]
                vectors = dict(zip(names, own[count:], strict=True))
                trainers.append(Trainer(device, own[:count], shard.sizes, vectors))
            center = Center(shard.parts, shard.traffic) if shard.parts else None
            self._algorithm.sync(trainers, center)

        specs = [tf.TensorSpec([], tf.resource)] * (each * len(devices))
        with tf.device(None), links.limited(self._limits):
            # Another thread may take in a server meanwhile.
            function = making_functions(
                lambda: (
                    tf.function(sync, autograph=False).get_concrete_function(*specs)
                    if turns is None
                    else _in_turns(sync, specs, turns.interval)
                )
            )
        shard.functions[key] = function
        return function

    def _follow_users(self) -> None:
        """Begins with the parameters as users see them, or takes over what they assigned.

        What came from a checkpoint takes the place of both.
        """
        if not self._parameters:
            return
        self._follow_assignments()
        if self._restored is None:
            return
        # A checkpoint of another algorithm has no center, or other vectors.
        restored = {name: self._divided(vector) for name, vector in self._restored.items()}
        for shard in self._shards:
            number, start = shard.number, shard.pack(self.copies.shown)
            vectors = self._checked_vectors(start)
            for name in vectors:
                if f"state_{name}" in restored:
                    vectors[name] = restored[f"state_{name}"][number]
            center = restored["center"][number] if "center" in restored else start
            self._set(shard, center, vectors)
        self._restored = None  # Not earlier: if a server is lost, all of this is done again.

    def _joined(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """One vector, in the order of the parameters that users see, of one for each shard."""
        pieces: dict[int, np.ndarray] = {}
        for shard, vector in zip(self._shards, vectors, strict=True):
            pieces.update(shard.unpack(vector))
        variables = self.copies.variables[: self._parameters]
        values = [pieces[i].reshape(variable.shape) for i, variable in enumerate(variables)]
        return np.concatenate([np.ravel(value) for value in self.copies.whole(values)])

    def _divided(self, vector: np.ndarray) -> list[np.ndarray]:
        """The other way round."""
        values, rest = [], vector
        for variable in self.copies.seen:
            if rest.size:
                value, rest = np.split(rest, [variable.shape.num_elements()])
                values.append(value.reshape(variable.shape))
        pieces = self.copies.divided(values)
        return [shard.pack(pieces) for shard in self._shards]

    def _checked_vectors(self, start: np.ndarray) -> _Vectors:
        """The algorithm's vectors for a group that begins with these parameters."""
        vectors = dict(self._algorithm.states(start))
        for name, value in vectors.items():
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
        return vectors

    def _follow_assignments(self) -> None:
        is_assigned = any(self.copies.assigned[: self._parameters])
        for shard in self._shards:
            start = shard.pack(self.copies.shown)
            if not shard.parts and self._algorithm.is_central:
                ranges = shard.ranges(len(self._sync_ps))
                for ps, (first, last) in zip(self._sync_ps, ranges, strict=True):
                    with tf.device(processor_of("ps", ps)):
                        # Not a variable of the strategy, in whose scope this may be.
                        shard.parts.append(ResourceVariable(start[first:last], trainable=False))
                        shard.traffic.append(ResourceVariable(np.int64(0), trainable=False))
            if is_assigned or not self._has_begun:
                self._set(shard, start, self._checked_vectors(start))
        self._has_begun = True

    def _set(self, shard: _Shard, center: np.ndarray, vectors: _Vectors) -> None:
        """Sets the sync PSs' copy, if there is one, and the vectors of every group."""
        shard.first_vectors = vectors
        self._all_gone = False
        for part, (first, last) in zip(shard.parts, shard.ranges(len(shard.parts)), strict=True):
            part.assign(center[first:last])
        for group, own in self._there.items():
            job, index = self.copies.groups[group].holders[shard.number]
            with at(self._cluster, index, job):
                for name, value in vectors.items():
                    own[shard.number].vectors[name].assign(on_worker(value))

    def _center(self, shard: _Shard) -> np.ndarray:
        """The sync PSs' copy of a shard."""
        return np.concatenate([fetch(part.read_value()) for part in shard.parts])

    def _current_vectors(self, shard: _Shard) -> _Vectors:
        """The algorithm's vectors for a group that has none: another's, if there is one."""
        with self._lock:
            others = list(self._there.items())
        for group, held in others:
            job, index = self.copies.groups[group].holders[shard.number]
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError), at(self._cluster, index, job):
                own = held[shard.number].vectors
                shard.first_vectors = {n: fetch(v.read_value()) for n, v in own.items()}
                return shard.first_vectors
        if self._all_gone or others:
            # They are gone with the groups that had them, and begin anew, with the parameters.
            shard.first_vectors = self._checked_vectors(shard.pack(self.copies.shown))
        return shard.first_vectors

    def _come_back(self, group: int) -> None:
        """A lost group begins with the mean of the others, or with what users see."""
        with self._lock:
            others = list(self._there)
        taken = []
        for other in others:
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError, KeyError):
                taken.append(self.copies.values(other))
        values = self.copies.mean(taken) if taken else list(self.copies.shown)
        has_center = self._algorithm.is_central and self._has_begun
        if has_center:
            # The center has what the lost one had learned, too.
            for shard in self._shards:
                for i, piece in shard.unpack(self._center(shard)).items():
                    values[i] = piece.reshape(self.copies.variables[i].shape)
        self.staleness.begin(values)
        self.copies.make(group, values)
        job, index = self.copies.groups[group].holders[0]
        source = "the others" if taken else "the last reading"
        logging.warning(
            "%s goes on with the parameters of %s, and the slots and moving averages of %s.",
            f"Worker {index}" if job == "worker" else f"Group {group}",
            "the sync PSs" if has_center else source,
            source,
        )


def _in_turns(sync: Callable, specs: Sequence[tf.TensorSpec], interval: float) -> Callable:
    """What synchronizes again and again.

    Args:
        sync: synchronizes once, of handles.
        specs: of these.
        interval: see `Turns`.

    Returns:
        A concrete function of the handle of a limit in seconds, and of the others, which returns
        how often it was done and the seconds that this took, float64 [2].
    """

    def once(*handles):
        sync(*handles)
        return tf.zeros([])

    once = tf.function(once, autograph=False).get_concrete_function(*specs)

    def rounds(limit, *handles):
        end = tf.timestamp() + tf.raw_ops.ReadVariableOp(resource=limit, dtype=tf.float64)

        def goes_on(done):
            return (done[0] == 0) | (tf.timestamp() < end)

        def turn(done):
            start = tf.timestamp()
            with tf.control_dependencies([start]):
                synced = once(*handles)
            with tf.control_dependencies([synced]):
                seconds = tf.timestamp() - start
            rest = tf.cast(tf.maximum(interval - seconds, _REST_SECONDS), tf.float32)
            with tf.control_dependencies([ops.delay(rest)]):
                return (done + tf.stack([tf.ones_like(seconds), seconds]),)

        return tf.while_loop(goes_on, turn, (tf.zeros([2], tf.float64),), parallel_iterations=1)[0]

    return tf.function(rounds, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.resource), *specs
    )
