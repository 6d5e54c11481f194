"""Variables of which every group of trainers has a copy of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tf_recsync._instead import instead
from tf_recsync.cluster import Cluster, ask, fetch, reason
from tf_recsync.shown_variable import ShownVariable
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.remote_values import PackedReader, at, on_worker

_Answer = TypeVar("_Answer")


class CopiedVariable(ShownVariable):
    """What users see of a variable of which every group has a copy.

    Reading it gives what the copies come to, their mean as a rule: whoever owns the
    copies refreshes it first. What is assigned to it the copies take over before they
    are trained again.

    Attributes:
        shard: which part of a group's copy it belongs to, in all groups.
        when_assigned: is called with it when this process has assigned it; None: nobody asks.
    """

    shard = 0
    when_assigned: Callable[[tf.Variable], None] | None = None

    def assign(self, *args, **kwargs):
        """As TensorFlow's; whoever owns the copies learns of it."""
        return self._assigned(super().assign(*args, **kwargs))

    def assign_add(self, *args, **kwargs):
        """As TensorFlow's, likewise; adds to what the copies come to by now."""
        with self.told():
            return self._assigned(super().assign_add(*args, **kwargs))

    def assign_sub(self, *args, **kwargs):
        """As TensorFlow's, likewise."""
        with self.told():
            return self._assigned(super().assign_sub(*args, **kwargs))

    def _assigned(self, result):
        if self.when_assigned is not None and tf.executing_eagerly():
            self.when_assigned(self)
        return result


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """What servers of a group have of a variable that users see as one.

    Attributes:
        variables: one for each server, in order.
        axis: along which it is divided; None if each has all of it.
    """

    variables: tuple[CopiedVariable, ...]
    axis: int | None

    def join(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The whole, of the values of the pieces."""
        return values[0] if self.axis is None else np.concatenate(values, self.axis)

    def divide(self, value: np.ndarray) -> list[np.ndarray]:
        """The values of the pieces, of the whole."""
        if self.axis is None:
            return [value] * len(self.variables)
        sizes = [variable.shape[self.axis] for variable in self.variables]
        return np.split(value, np.cumsum(sizes)[:-1], self.axis)


def is_copied(variable: keras.Variable) -> bool:
    """Whether every group has a copy of it; else there is one, on a server."""
    return isinstance(variable._value, CopiedVariable)


def device_for(variable: keras.Variable, group: Group | None, shards: Mapping[int, int]) -> str:
    """The device that holds a variable for a group, whatever scope Keras is in.

    Args:
        variable: any of the model's or its optimizer's.
        group: whose trainers ask; None where no variable is copied.
        shards: those of the model's copies, as `Copies.shards`.

    Returns:
        Its device; "" for where the step runs that asks.
    """
    value = variable._value
    if not is_copied(variable):
        return value.device
    return group.device(shards.get(id(value), value.shard))


class Copies:
    """The groups' copies of some variables.

    Args:
        variables: what users see of them, in an order that all copies keep.
        cluster: the connected cluster.
        groups: who has copies, and where; a group's number is its place here.
        read: "mean", or the number of the group whose copy is read.
        hold: is called before users see them; returns whether no worker trains them until
            `carried_on` is called.
        peeked: those of the variables that are read without it.
        watched: returns a context in which calls to a server that is silent end.
        pieces: of those of which servers have pieces, by their ids.

    Attributes:
        seen: what users see of the variables.
        variables: the same, but for those of which servers have pieces: there are these in
            their place.
        shards: the number of the holder of each of these, by its id. Another model that shares
            layers may place their variables elsewhere: these copies stay where they are.
    """

    def __init__(
        self,
        variables: Sequence[CopiedVariable],
        cluster: Cluster,
        groups: Sequence[Group],
        read: str | int = "mean",
        hold: Callable[[], bool] = lambda: False,
        peeked: Collection[tf.Variable] = (),
        watched: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        pieces: Mapping[int, Pieces] | None = None,
    ):
        self.seen = list(variables)
        self.variables: list[CopiedVariable] = []
        # Of each variable that users see, by its id: its pieces, and where these are.
        self._pieces: dict[int, Pieces] = {}
        self._places: dict[int, range] = {}
        for variable in variables:
            own = (pieces or {}).get(id(variable)) or Pieces((variable,), None)
            first = len(self.variables)
            self.variables += own.variables
            self._pieces[id(variable)] = own
            self._places[id(variable)] = range(first, len(self.variables))
        self.groups = list(groups)
        self._cluster = cluster
        self._read = read
        self._hold = hold
        self._peeked = {id(variable) for variable in peeked}
        self._watched = watched
        self._is_held = False  # And users see them as they are.
        self._reading = threading.RLock()  # Taken before the other one.
        self._lock = threading.RLock()  # Under it, nobody reads: a server may be silent.
        self._copies: dict[int, list[tf.Variable]] = {}  # By group.
        # Those of its holders when they were made.
        self._lives: dict[int, list[tuple[int, int]]] = {}
        # What groups begin with that have none yet, if it is not what users see.
        self._loaded: dict[int, list[np.ndarray]] = {}
        # What was assigned since somebody began to read what a group's copies are made of.
        self._owed: dict[int, list[np.ndarray | None]] = {}
        self._shown: list[np.ndarray] = []  # What users see, as far as is known.
        # The copies of a checkpoint of other groups, whose mean is loaded.
        self._merged: list[Sequence[np.ndarray]] = []
        # Of each variable, whether users had assigned it when copies last took that over.
        self.assigned: list[bool] = []
        self._stale = False
        # Ids of what users have assigned, which copies take over when they are trained again.
        self._kept: set[int] = set()
        self._listen()
        self.shards = {id(variable): variable.shard for variable in self.variables}
        # The variables of each shard, by their numbers.
        self._shards: list[list[int]] = [[] for _ in range(len(groups[0].holders))]
        for i, variable in enumerate(self.variables):
            self._shards[variable.shard].append(i)
        looked_at = [variable for variable in self.seen if id(variable) in self._peeked]
        numbers = [i for variable in looked_at for i in self.places(variable)]
        # One object, by which it is known whose hook a variable has.
        self._look = functools.partial(self._peek, numbers)

    def whole(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What users see of values of `variables`, or of the first of them."""
        there = [v for v in self.seen if self._places[id(v)].stop <= len(values)]
        return [self._joined(variable, values) for variable in there]

    def _joined(
        self, variable: CopiedVariable, values: Sequence[np.ndarray] | Mapping[int, np.ndarray]
    ) -> np.ndarray:
        """What users see of a variable, of values of `variables`."""
        return self._pieces[id(variable)].join([values[i] for i in self.places(variable)])

    def divided(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The values of `variables`, of what users see of them, or of the first of these."""
        pairs = zip(self._pieces.values(), values, strict=False)
        return [value for pieces, whole in pairs for value in pieces.divide(whole)]

    def places(self, variable: CopiedVariable) -> range:
        """Where among `variables` one that users see is, or its pieces."""
        if id(variable) not in self._places:
            raise ValueError(f"groups have no copies of {variable.name}")
        return self._places[id(variable)]

    @property
    def there(self) -> list[int]:
        """The groups that have copies."""
        with self._lock:
            return sorted(self._copies)

    @property
    def shown(self) -> list[np.ndarray]:
        """What users see, as far as is known."""
        return list(self._shown)

    def handles(self, group: int) -> list[tf.Tensor]:
        """The handles of a group's copies.

        Raises:
            tf.errors.UnavailableError: if it has none at the moment.
        """
        copies = self.of(group)
        if copies is None:
            raise tf.errors.UnavailableError(None, None, f"group {group} has no copies")
        return [copy.handle for copy in copies]

    def of(self, group: int) -> list[tf.Variable] | None:
        """A group's copies, the same list as long as it has them; None if it has none."""
        with self._lock:
            return self._copies.get(group)

    def is_of_earlier_life(self, group: int) -> bool:
        """Whether a group's copies, if it has any, are gone although their holders answer.

        One was started again, and somebody has readmitted it.
        """
        with self._lock:
            made_in = self._lives.get(group)
        return made_in is not None and made_in != self._lives_of(group)

    def are_current(self, group: int) -> bool:
        """Whether a group has copies, and its holders live on since they were made."""
        return self.of(group) is not None and not self.is_of_earlier_life(group)

    def are_gone(self, group: int) -> bool:
        """Whether a group's copies are known to be gone, or can't be reached for now, or nothing
        listens where one of their holders was."""
        is_away, is_up = self._cluster.membership.is_away, self._cluster.is_up
        gone = (is_away(holder) or not is_up(*holder) for holder in self.groups[group].holders)
        return self.is_of_earlier_life(group) or any(gone)

    def answers(self, group: int) -> bool:
        """Whether a group's holders give signs of life soon, and of the life of its copies."""
        return not self.is_of_earlier_life(group) and self.are_reachable(group)

    def are_reachable(self, group: int) -> bool:
        """Whether all that hold a group's copies give signs of life soon."""
        asked = ask(self._cluster, self.groups[group].holders)
        return all(probe.reachable for probe in asked)

    def at(self, group: int, shard: int) -> contextlib.AbstractContextManager[None]:
        """Inside, this thread calls on the holder of a shard of a group; see `remote_values.at`."""
        job, index = self.groups[group].holders[shard]
        return at(self._cluster, index, job)

    def _lives_of(self, group: int) -> list[tuple[int, int]]:
        if not self.variables:
            return []  # Nothing is lost with a holder.
        return [self._cluster.life(job, index) for job, index in self.groups[group].holders]

    def will_make(self, group: int) -> None:
        """Somebody begins to read what a group's copies are made of.

        When they are made, they get what is assigned from now on, too.
        """
        with self._lock:
            self._owed[group] = [None] * len(self.variables)

    def make(self, group: int, values: Sequence[np.ndarray]) -> None:
        """Makes a group's copies anew, with these values; see `will_make`."""
        lives = self._lives_of(group)
        made: list[tf.Variable] = [None] * len(self.variables)
        for number, shard in enumerate(self._shards):
            with self.at(group, number):
                for i in shard:
                    value, shape = on_worker(values[i]), self.variables[i].shape
                    # No variable of the strategy, in whose scope this may be.
                    made[i] = ResourceVariable(value, trainable=False, shape=shape)
        while True:
            with self._lock:
                owed = self._owed.pop(group, [])
                if all(value is None for value in owed):
                    self._copies[group] = made
                    self._lives[group] = lives
                    return
                self.will_make(group)
            self._write(group, made, owed)

    def drop(self, group: int) -> None:
        """Forgets the copies of a group, one of whose holders is lost."""
        with self._lock:
            self._copies.pop(group, None)
            self._lives.pop(group, None)

    def put_aside(self, group: int) -> None:
        """Keeps a group's copies here, as their holders are about to end; nobody may train them.

        It begins with them when it is opened the next time.
        """
        values = self.values(group)
        with self._lock:
            self._loaded[group] = values
        self.drop(group)

    def values(self, group: int, numbers: Sequence[int] | None = None) -> list[np.ndarray]:
        """A group's copies: of all variables, or of those with these numbers, in their order."""
        handles = self.handles(group)
        numbers = range(len(handles)) if numbers is None else numbers
        wanted, found = set(numbers), {}
        with self._cluster.dispatch_scope():
            for shard in self._shards:
                own = [i for i in shard if i in wanted]
                read = PackedReader([self.variables[i] for i in own])([handles[i] for i in own])
                found.update(zip(own, read, strict=True))
        return [found[i] for i in numbers]

    def all_values(self) -> dict[int, list[np.ndarray]]:
        """The copies by group, of those that have some or will begin with some: as they go on.

        Those of one that does not answer are left out. Workers are held first, as before
        users read a variable.

        Raises:
            tf.errors.OpError: if none of them answers.
        """
        if self._stale and not _refreshing.active:
            self._hold()
        with self._lock:
            found = {group: list(values) for group, values in self._loaded.items()}
        failed: tf.errors.OpError | None = None
        for group in self.there:
            try:
                found[group] = self.values(group)
            except tf.errors.OpError as error:
                logging.warning("%s; its copies are left out.", self._silent(group))
                failed = error
        if failed is not None and not found:
            raise failed
        for i, value in enumerate(self.assigned_since()):
            if value is not None:
                for values in found.values():
                    values[i] = value
        return found

    def current(self) -> list[np.ndarray]:
        """The values of `variables` that users see at the moment."""
        with _refreshing():
            return self.divided(fetch([variable.read_value() for variable in self.seen]))

    def assigned_since(self) -> list[np.ndarray | None]:
        """What users have assigned and copies take over when they are trained again, by variable.

        Empty while they are trained, or if there are none.
        """
        if self._stale or not self.has_any:
            return []
        return self._assigned(self.current())

    def _silent(self, group: int) -> str:
        """Who does not answer, in words."""
        job, index = self.groups[group].holders[0]
        if job == "worker":
            return f"Worker {index} does not answer"
        return f"A server of group {group} does not answer"

    def by_group(self, variables: Sequence[CopiedVariable]) -> list[list[np.ndarray] | None]:
        """The copies of some variables of each group, as users see such variables.

        None for one that has none, or does not answer.
        """
        found = self.all_values()
        return [
            [self._joined(v, found[group]) for v in variables] if group in found else None
            for group in range(len(self.groups))
        ]

    def begin(self) -> None:
        """Has the copies take over what users have assigned; nobody may train them."""
        shown = self.current()
        with self._reading, self._lock:
            self.assigned = [False] * len(shown)
            if self._copies or self._loaded or self._owed:
                assigned = self._assigned(shown)
                self.assigned = [value is not None for value in assigned]
                for group in self._copies:
                    self._assign(group, assigned)
                for values in (*self._loaded.values(), *self._owed.values()):
                    for i, value in enumerate(assigned):
                        values[i] = values[i] if value is None else value
                if self._merged:  # Not earlier: it may fail, and is called again then.
                    pairs = zip(assigned, self._shown, strict=True)
                    shown = [old if new is None else new for new, old in pairs]
                    self._show(shown)
                    self._merged = []
            self._shown = shown
            self._kept.clear()

    def _assigned(self, shown: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """What users have assigned since they saw the copies last, by variable.

        Args:
            shown: what users see now.
        """
        # The ops that restore a checkpoint tell nobody. That of a model has the output of its
        # groups, which may be one's copy, and may be restored after their states.
        known = [self._shown, *self._merged]
        told = {i for v in self.seen if id(v) in self._kept for i in self.places(v)}

        def is_known(i: int) -> bool:
            if i in told:
                return False
            # What is no number is the same as itself here: nobody assigned it.
            equal_nan = self.variables[i].dtype.is_floating
            return any(np.array_equal(shown[i], old[i], equal_nan=equal_nan) for old in known)

        return [None if is_known(i) else value for i, value in enumerate(shown)]

    def load(
        self,
        values: Mapping[int, Sequence[np.ndarray]],
        merged: Iterable[Sequence[np.ndarray]] = (),
    ) -> None:
        """Gives groups copies of these values; nobody may train them.

        One that does not answer gets them when it is opened the next time.

        Args:
            values: by group.
            merged: the copies that they are the mean of, if a checkpoint has those of other groups.
        """
        with self._reading, self._lock:
            self._merged = list(merged)
            for group, copies in values.items():
                self._loaded[group] = list(copies)
                if group not in self._copies:
                    continue
                try:
                    self._assign(group, copies)
                    del self._loaded[group]
                except tf.errors.OpError as error:
                    logging.warning("%s: %s", self._silent(group), reason(error))
                    self.drop(group)
            self._kept.clear()
            shown = [values[self._read]] if self._read in values else list(values.values())
            self._show(self.mean(shown))

    def ensure(self, group: int) -> None:
        """Makes a group's copies if it has none, of what was loaded for it or users see."""
        with self._lock:
            if group in self._copies:
                return
            values = self._loaded.get(group, self._shown)
            self.will_make(group)
        self.make(group, values)
        with self._lock:
            self._loaded.pop(group, None)

    @property
    def has_any(self) -> bool:
        """Whether groups have copies, or values to begin with; else these are what users see."""
        with self._lock:
            return bool(self._copies or self._loaded)

    def is_loaded(self, group: int) -> bool:
        """Whether there are values that a group begins with when it is opened."""
        with self._lock:
            return group in self._loaded

    def touched(self) -> None:
        """The copies are being trained: what users see is no longer what they are."""
        if self._stale:
            return
        self._stale = True
        self._listen()  # Another model that has a layer, too, may have been trained meanwhile.
        for variable in self.seen:
            is_peeked = id(variable) in self._peeked
            variable.before_read = self._look if is_peeked else self.refresh

    def carried_on(self) -> None:
        """The copies are trained again after users have seen them, with what these have assigned
        meanwhile that acts on steps alone: learning rates."""
        self._is_held = False
        if not self._stale or self._kept.isdisjoint(self._peeked):
            return
        due = [
            variable
            for variable in self.seen
            if id(variable) in self._kept & self._peeked
            and variable.dtype.is_floating
            and variable.shape == ()
        ]
        values: list[np.ndarray | None] = [None] * len(self.variables)
        with _refreshing(), self._watched():
            # Nobody shows what copies come to before it is read what users have assigned.
            with self._reading:
                for variable in due:
                    (place,) = self.places(variable)
                    values[place] = fetch(variable.read_value())
                    with self._lock:
                        waiting = (self._shown, *self._loaded.values(), *self._owed.values())
                        for some in waiting:
                            some[place] = values[place]
            there = self.there
            # One of which only the connection broke gets them the next time.
            reached = list(answered(there, lambda group: self._assign(group, values)))
        if len(reached) == len(there):
            self._kept.difference_update(map(id, due))

    def settled(self) -> None:
        """Nobody trains the copies any more; after one more refresh nothing changes."""
        self._peek()
        self._is_held = False
        self._rest()

    def let_go(self) -> None:
        """Others take its place: what users see stays as it is."""
        self._rest()
        for variable in self.seen:
            if variable.when_assigned == self._note_assigned:
                variable.when_assigned = None

    def _listen(self) -> None:
        for variable in self.seen:
            variable.when_assigned = self._note_assigned

    def _note_assigned(self, variable: CopiedVariable) -> None:
        self._kept.add(id(variable))

    def _rest(self) -> None:
        self._stale = False
        for variable in self.seen:
            if variable.before_read in (self._look, self.refresh):  # Not another model's.
                variable.before_read = None

    def refresh(self) -> None:
        """Writes what the copies come to into what users see."""
        if not self._stale or _refreshing.active:
            return
        is_held = self._hold()
        if is_held and self._is_held:
            return
        self._peek()
        self._is_held = is_held

    def _peek(self, numbers: Sequence[int] | None = None) -> None:
        """Writes what the copies come to, which may be trained meanwhile, into what users see.

        Args:
            numbers: those of all pieces of some variables, which alone are read; others may be
                large. Default None: all.
        """
        if _refreshing.active:
            return
        with self._reading, _refreshing(), self._watched():
            found = self._combined(numbers)
            if found is not None:
                with self._lock:
                    self._show(found, numbers)

    def _show(self, values: list[np.ndarray], numbers: Sequence[int] | None = None) -> None:
        every = range(len(self.variables))
        new = dict(zip(every if numbers is None else numbers, values, strict=True))
        self._shown = [new[i] if i in new else self._shown[i] for i in every]
        for variable in self.seen:
            if id(variable) not in self._kept and self.places(variable)[0] in new:
                value = self._joined(variable, new)
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    def _combined(self, numbers: Sequence[int] | None = None) -> list[np.ndarray] | None:
        """What the copies of some variables come to, or of all; None if nobody answers."""

        def mean_of(groups: Iterable[int]) -> list[np.ndarray] | None:
            found = answered(groups, lambda group: self.values(group, numbers))
            return self.mean((values for _, values in found), numbers)

        groups = self.there
        if self._read in groups:
            found = mean_of([self._read])
            if found is not None:
                return found
            groups.remove(self._read)
        return mean_of(groups)

    def mean(
        self, copies: Iterable[Sequence[np.ndarray]], numbers: Sequence[int] | None = None
    ) -> list[np.ndarray] | None:
        """The mean; of whole numbers, which have none, the largest of a count (a scalar) and else
        the first. None of no copies.

        Tables that copies share have been trained by the one that has counted the most steps.
        """
        variables = self.variables if numbers is None else [self.variables[i] for i in numbers]
        sums: list[np.ndarray] = []
        count = 0
        for values in copies:
            count += 1
            if not sums:
                sums = [
                    np.array(value, np.float64) if variable.dtype.is_floating else value
                    for variable, value in zip(variables, values, strict=True)
                ]
                continue
            for i, (variable, value) in enumerate(zip(variables, values, strict=True)):
                if variable.dtype.is_floating:
                    sums[i] += value
                elif variable.dtype.is_integer and value.shape == ():
                    sums[i] = max(sums[i], value)
        if not sums:
            return None
        return [
            np.asarray(value / count, variable.dtype.as_numpy_dtype)
            if variable.dtype.is_floating
            else value
            for variable, value in zip(variables, sums, strict=True)
        ]

    def _assign(self, group: int, values: Sequence[np.ndarray | None]) -> None:
        self._write(group, self._copies[group], values)

    def _write(
        self, group: int, copies: Sequence[tf.Variable], values: Sequence[np.ndarray | None]
    ) -> None:
        for number, shard in enumerate(self._shards):
            with self.at(group, number):
                for i in shard:
                    if values[i] is not None:
                        copies[i].assign(on_worker(values[i]), read_value=False)


def answered(
    groups: Iterable[int], ask_group: Callable[[int], _Answer]
) -> Iterator[tuple[int, _Answer]]:
    """What each of some groups is asked for, one after the other, with the groups.

    Those that are lost are left out: their own threads find out.

    Args:
        groups: their numbers.
        ask_group: asks one of them.
    """
    for group in groups:
        with contextlib.suppress(tf.errors.OpError, KeyError):
            yield group, ask_group(group)


class _Refreshing(threading.local):
    """Whether this thread refreshes already: then reads are plain reads."""

    active = False

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return instead(self, "active", True)


_refreshing = _Refreshing()
