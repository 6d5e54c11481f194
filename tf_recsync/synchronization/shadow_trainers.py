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
from tf_recsync.synchronization.copies import CopiedVariable, Copies, answered
from tf_recsync.synchronization.remote_values import on_worker
from tf_recsync.synchronization.shadow_algorithms import Algorithm, Center, Trainer
from tf_recsync.synchronization.staleness_counts import StalenessCounts

_Vectors = dict[str, np.ndarray]  # The algorithm's, by name.

# Between two synchronizations of a call, at least: of a small model they would else take all the
# time of a processor. As in cc/simulation/copy_synchronizer.cc.
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
        parameters: the copied variables that are parameters, of all shards.
    """

    def __init__(self, number: int, parameters: Sequence[CopiedVariable]):
        self.number = number
        # The numbers of its own, by which they are known among the copied variables.
        self.parameters = [i for i, own in enumerate(parameters) if own.shard == number]
        self.shapes = [parameters[i].shape for i in self.parameters]
        self.sizes = [shape.num_elements() for shape in self.shapes]
        self.elements = sum(self.sizes)
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
        """The values in a vector of the shard, by the numbers of their variables."""
        pieces = np.split(vector, np.cumsum(self.sizes)[:-1]) if self.parameters else []
        own = zip(self.parameters, pieces, self.shapes, strict=True)
        return {i: piece.reshape(shape) for i, piece, shape in own}

    def where(self, assigned: Sequence[bool]) -> np.ndarray:
        """Which of the shard's elements are of variables that users have assigned."""
        own = [assigned[i] for i in self.parameters]
        return np.repeat(np.array(own, bool), self.sizes)

    def divided(self, vector: np.ndarray, count: int) -> list[np.ndarray]:
        """What each of so many sync PSs has of a vector of the shard."""
        return np.split(vector, [self.elements * i // count for i in range(1, count)])


@dataclasses.dataclass(frozen=True)
class _Restored:
    """What a checkpoint has besides the copies.

    Attributes:
        center: by shard; None if it has none.
        vectors: the algorithm's by name, of each group by shard.
    """

    center: list[np.ndarray] | None
    vectors: dict[str, list[list[np.ndarray]]]


class Trainers:
    """The groups of a model: their copies and vectors, and the central copy.

    Thread-safe, but for what says that nobody may be at work.

    Args:
        algorithm: how copies are synchronized.
        cluster: the connected cluster.
        copies: the groups' parameters, and what belongs to them.
        parameters: how many of the copied variables are parameters: the first ones.
        staleness: what groups have counted of it.
        sync_ps: the task indices of the sync PSs.
        bandwidths: returns artificial bandwidths, in bytes per second by server's device.

    Attributes:
        elements: the parameters that are synchronized.
        shards: the numbers of the shards that have some.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        cluster: Cluster,
        copies: Copies,
        parameters: int,
        staleness: StalenessCounts,
        sync_ps: Sequence[int],
        bandwidths: Callable[[], dict[str, float]],
    ):
        self.copies = copies
        self._algorithm = algorithm
        self._cluster = cluster
        self._sync_ps = list(sync_ps)
        self._bandwidths = bandwidths
        self._parameters = parameters
        shards = range(len(copies.groups[0].holders))
        self._shards = [_Shard(number, copies.variables[:parameters]) for number in shards]
        self.elements = sum(shard.elements for shard in self._shards)
        self.shards = [shard.number for shard in self._shards if shard.elements]
        self._staleness = staleness
        self._lock = threading.RLock()
        # Of each group: one thread at a time makes what it needs.
        self._opening = [threading.Lock() for _ in copies.groups]
        self._there: dict[int, list[_Held]] = {}  # Of each group that is not lost, by shard.
        self._lost: set[int] = set()
        # The vectors that groups begin with which have none yet, by shard.
        self._first: dict[int, list[_Vectors]] = {}
        self._has_begun = False
        self._restored: _Restored | None = None
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
            first = None
            if was_lost:
                self._come_back(group)
            else:
                self.copies.ensure(group)
                first = self._first.get(group)
            made = []
            for shard in self._shards:
                vectors = self._mean_vectors(shard) if first is None else first[shard.number]
                with self.copies.at(group, shard.number):
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
                self._first.pop(group, None)
            return True

    def lose(self, group: int) -> None:
        """A group is gone, with all that it had."""
        with self._lock:
            self._forget(group)
            self._lost.add(group)
            self.copies.drop(group)
            self._staleness.lost(group)

    def _forget(self, group: int) -> None:
        self._there.pop(group, None)
        # The next one's server has to build its parts of functions again.
        for shard in self._shards:
            shard.called = {key for key in shard.called if group not in key[0]}

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
        with self._cluster.building.turn() if is_new else contextlib.nullcontext():
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

        The center is one vector, in the order of the parameters, whatever shards there are; each
        of the algorithm's is [groups, elements], of the groups that "groups_with_states" names.
        """
        if not self._parameters or not (self._has_begun or self._restored is not None):
            return {}
        assigned = [value is not None for value in self.copies.assigned_since()]
        shown = self.copies.shown
        if any(assigned) or not shown:  # Nobody has trained yet.
            shown = self.copies.current()
        found = [self._goes_on_with(shard, shown, assigned, spares=True) for shard in self._shards]
        kept = {}
        groups = sorted(set.intersection(*(set(vectors) for _, vectors in found)))
        for name in found[0][1][groups[0]] if groups else ():
            of_each = [self._joined([vectors[g][name] for _, vectors in found]) for g in groups]
            kept[f"state_{name}"] = np.stack(of_each)
        if kept:
            kept["groups_with_states"] = np.array(groups, np.int64)
        if self._algorithm.is_central:
            kept["center"] = self._joined([center for center, _ in found])
        return kept

    def restore(self, extras: Mapping[str, np.ndarray]) -> None:
        """Groups, which have their copies, go on with this center; nobody may be at work.

        Args:
            extras: as above, and "groups", how many there were; those of another algorithm are
                left out. Groups of another number, and those whose vectors are missing, begin with
                the mean of the vectors. Older checkpoints have one vector, of all groups.
        """
        count = len(self.copies.groups)

        def of_each(vectors: np.ndarray) -> list[np.ndarray]:
            if vectors.ndim == 1:
                return [vectors] * count
            mean = _mean(vectors)
            saved = dict(zip(extras["groups_with_states"].tolist(), vectors, strict=True))
            is_alike = int(extras.get("groups", count)) == count
            return [saved.get(group, mean) if is_alike else mean for group in range(count)]

        center = self._divided(extras["center"]) if "center" in extras else None
        vectors = {
            name.removeprefix("state_"): [self._divided(vector) for vector in of_each(value)]
            for name, value in extras.items()
            if name.startswith("state_")
        }
        with self._lock:
            self._restored = _Restored(center, vectors)

    def put_aside(self, group: int) -> None:
        """Keeps what a group has here, as its servers are about to end; nobody may train it.

        It begins with that when it is opened the next time.
        """
        vectors = None
        if group in self._there:
            vectors = [self._vectors_of(group, shard) for shard in self._shards]
        self.copies.put_aside(group)
        with self._lock:
            if vectors is not None:
                self._first[group] = vectors
            self._forget(group)

    # Inside.

    def _handles(self, group: int, shard: _Shard) -> list[tf.Tensor]:
        vectors = self._there[group][shard.number].vectors
        handles = self.copies.handles(group)
        own = [handles[i] for i in shard.parameters]
        return [*own, *(vectors[name].handle for name in sorted(vectors))]

    def _function(self, members: Sequence[int], shard: _Shard, turns: Turns | None) -> Callable:
        """What synchronizes a shard of these groups; of the handles of all of them."""
        # One for any group where they synchronize by themselves.
        groups = () if self._algorithm.is_central else tuple(members)
        key = groups, turns
        if key in shard.functions:
            return shard.functions[key]
        names = sorted(self._there[members[0]][shard.number].vectors)
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

        What came from a checkpoint takes the place of all but these.
        """
        if not self._parameters:
            return
        shown, assigned = self.copies.shown, self.copies.assigned[: self._parameters]
        if self._algorithm.is_central:
            for shard in self._shards:
                self._ensure_center(shard, shard.pack(shown))
        if self._has_begun and self._restored is None and not any(assigned):
            return
        found = [self._goes_on_with(shard, shown, assigned) for shard in self._shards]
        for shard, (center, vectors) in zip(self._shards, found, strict=True):
            self._set(shard, center, vectors)
        # Not earlier: if a server is lost, all of this is done again.
        is_there = {*self._there}.intersection(self.copies.there)
        for group in set(found[0][1]) - is_there:
            self._first[group] = [vectors[group] for _, vectors in found]
        self._restored, self._has_begun = None, True

    def _goes_on_with(
        self,
        shard: _Shard,
        shown: Sequence[np.ndarray],
        assigned: Sequence[bool],
        spares: bool = False,
    ) -> tuple[np.ndarray, dict[int, _Vectors]]:
        """What a shard goes on with: what was restored, or is there, but for what users assigned.

        Args:
            shard: it.
            shown: what users see of all copied variables.
            assigned: which of these they have assigned; none if it is empty.
            spares: whether groups that don't answer are left out.

        Returns:
            The center, and the algorithm's vectors by group.
        """
        start = shard.pack(shown)
        new = self._checked_vectors(start)
        groups = range(len(self.copies.groups))
        restored = self._restored
        if restored is not None:
            # A checkpoint of another algorithm has no center, or other vectors.
            center = start if restored.center is None else restored.center[shard.number]
            names = restored.vectors.keys() & new.keys()
            vectors = {
                g: {**new, **{n: restored.vectors[n][g][shard.number] for n in names}}
                for g in groups
            }
        elif not self._has_begun:
            return start, dict.fromkeys(groups, new)
        else:
            center = self._center(shard) if self._algorithm.is_central else start
            vectors = {group: first[shard.number] for group, first in dict(self._first).items()}
            if spares:
                vectors.update(answered(self.there, lambda g: self._vectors_of(g, shard)))
            else:
                vectors.update({g: self._vectors_of(g, shard) for g in self.there})
        if not any(assigned):
            return center, vectors
        is_new = shard.where(assigned)
        taken = {
            group: {name: np.where(is_new, new[name], value) for name, value in own.items()}
            for group, own in vectors.items()
        }
        return np.where(is_new, start, center), taken

    def _joined(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """One vector, in the order of the parameters that users see, of one for each shard."""
        pieces: dict[int, np.ndarray] = {}
        for shard, vector in zip(self._shards, vectors, strict=True):
            pieces.update(shard.unpack(vector))
        values = [pieces[i] for i in range(self._parameters)]
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
        what = f"{type(self._algorithm).__name__}.states must give"
        for name, value in vectors.items():
            if "/" in name:
                raise ValueError(f"{what} names without a slash, not {name!r}")
            shape, dtype = np.shape(value), np.asarray(value).dtype
            if shape != start.shape or dtype != np.float32:
                raise ValueError(
                    f"{what} float32 arrays of {start.size} elements; {name!r} has the shape "
                    f"{shape} and the type {dtype}"
                )
        return vectors

    def _ensure_center(self, shard: _Shard, start: np.ndarray) -> None:
        """Makes the sync PSs' copy of a shard, if it is not there."""
        if shard.parts:
            return
        values = shard.divided(start, len(self._sync_ps))
        for ps, value in zip(self._sync_ps, values, strict=True):
            with tf.device(processor_of("ps", ps)):
                # Not a variable of the strategy, in whose scope this may be.
                shard.parts.append(ResourceVariable(value, trainable=False))
                shard.traffic.append(ResourceVariable(np.int64(0), trainable=False))

    def _set(self, shard: _Shard, center: np.ndarray, vectors: Mapping[int, _Vectors]) -> None:
        """Sets the sync PSs' copy, if there is one, and the vectors of groups that are there."""
        if shard.parts:
            values = shard.divided(center, len(shard.parts))
            for part, value in zip(shard.parts, values, strict=True):
                part.assign(value)
        for group, held in self._there.items():
            with self.copies.at(group, shard.number):
                for name, value in vectors[group].items():
                    held[shard.number].vectors[name].assign(on_worker(value))

    def _center(self, shard: _Shard) -> np.ndarray:
        """The sync PSs' copy of a shard."""
        return np.concatenate([fetch(part.read_value()) for part in shard.parts])

    def _vectors_of(self, group: int, shard: _Shard) -> _Vectors:
        """The algorithm's vectors of a group that is there."""
        held = self._there[group][shard.number]
        with self.copies.at(group, shard.number):
            return {name: fetch(value.read_value()) for name, value in held.vectors.items()}

    def _mean_vectors(self, shard: _Shard) -> _Vectors:
        """The algorithm's vectors for a group that has lost its own: the mean of the others'."""
        asked = answered(self.there, lambda group: self._vectors_of(group, shard))
        found = [vectors for _, vectors in asked]
        if not found:
            # They are gone with the groups that had them, and begin anew, with the parameters.
            return self._checked_vectors(shard.pack(self.copies.shown))
        return {name: _mean([vectors[name] for vectors in found]) for name in found[0]}

    def _come_back(self, group: int) -> None:
        """A lost group begins with the mean of the others, or with what users see."""
        with self._lock:
            others = list(self._there)
        self.copies.will_make(group)
        taken = [values for _, values in answered(others, self.copies.values)]
        values = self.copies.mean(taken) if taken else list(self.copies.shown)
        has_center = self._algorithm.is_central and self._has_begun
        if has_center:
            # The center has what the lost one had learned, too.
            for shard in self._shards:
                for i, piece in shard.unpack(self._center(shard)).items():
                    values[i] = piece
        self._staleness.begin(values)
        self.copies.make(group, values)
        job, index = self.copies.groups[group].holders[0]
        source = "the others" if taken else "the last reading"
        logging.warning(
            "%s goes on with the parameters of %s, and the slots and moving averages of %s.",
            f"Worker {index}" if job == "worker" else f"Group {group}",
            "the sync PSs" if has_center else source,
            source,
        )


def _mean(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of vectors: of equal ones, exactly what each of them is."""
    return np.mean(vectors, axis=0, dtype=np.float64).astype(np.float32)


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
