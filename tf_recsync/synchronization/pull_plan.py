"""What travels between a worker and one server at the beginning of a step.

There: what to look up. Back: dense values and pooled vectors, packed in one.
Versions and row ids stay on the server for the push (push_plan.py); they travel only
if the worker asks for them. So do vectors of which the worker only wants something
computed: the result travels.

On the server's side messages pass its artificial link (`links.passed`), if it has one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.embedding.keys import in_same_life
from tf_recsync.ops.bags import Bags, Computation, PackedBags, Request, merge
from tf_recsync.optimizers import base
from tf_recsync.synchronization import links
from tf_recsync.synchronization.pulled import (
    Computed,
    PulledLookup,
    PulledRequest,
)

# Of a lookup: the number of its request, and its place there.
_Key = tuple[int, int]


class PullPlan:
    """What one server is asked for, how its answer is taken apart, and what stays there of it.

    Args:
        inserts: whether keys that have no row in their table may be given one.

    Attributes:
        dense: the states of the dense variables to pull.
        unversioned: other variables to pull.
        values: of the variables that were pulled, by their ids.
        found: what was looked up, by the numbers of the requests.
        dense_versions: int64 [len(dense)], or None without any.
        rows: what was looked up in `tables`, or None without any.
        row_versions: int64 [n], the versions of `rows.ids`.
        lookups: the lookups of each table, by its state.
        sizes: int64, the elements of the vectors of each lookup, table by table; None
            if nothing was computed from any.
        arrived: what exists on the worker when the server's answer is there; None
            without any.
    """

    def __init__(self, inserts: bool):
        self._inserts = inserts
        self.dense: list[base.VariableState] = []
        self.unversioned: list[keras.Variable] = []
        # By table, in the order of the first lookup.
        self._tables: dict[base.VariableState, list[tuple[_Key, Bags]]] = {}
        self._requests: dict[int, Request] = {}
        self.values: dict[int, tf.Tensor] = {}
        self.found: dict[int, PulledRequest] = {}
        self.dense_versions: tf.Tensor | None = None
        self.rows: PackedBags | None = None
        self.row_versions: tf.Tensor | None = None
        self.lookups: dict[base.VariableState, list[PulledLookup]] = {}
        self.sizes: tf.Tensor | None = None
        self.arrived: tf.Tensor | None = None

    @property
    def tables(self) -> list[base.VariableState]:
        """The states of the tables looked up."""
        return list(self._tables)

    def look_up(self, number: int, states: list[base.VariableState], request: Request) -> None:
        """Adds a request for rows of these tables, by its number in the step."""
        self._requests[number] = request
        for place, (state, bags) in enumerate(zip(states, request.bags, strict=True)):
            self._tables.setdefault(state, []).append(((number, place), bags))

    def pull_rows(self, device: str) -> None:
        """Pulls what was looked up before `pull` pulls the variables; see there."""
        part = self._read_rows(device, [])
        with tf.control_dependencies(None), tf.device(device):
            packed = ops.pack([[tensor] for tensor in part.floats])
        self._answer(device, packed, [part])

    def pull(self, device: str, after: Sequence[tf.Tensor | tf.Operation] = ()) -> None:
        """Pulls.

        What is read whatever the batch is waits for nothing but `after`, the request for rows that
        are read with it, and the last update of the same variables, which tf.function sees to: not
        for the worker to hear of that update.

        Args:
            device: the server.
            after: what must be there, or have happened, on the server before.
        """
        self.arrived = None  # Rows that came ahead came before what the step waits for.
        parts = []
        if self._tables and self.rows is None:
            parts = [self._read_rows(device, after)]
            # Variables are read with the rows, and not before the request is there.
            after = [*after, self.rows.ids]
        not_floats = [v for v in self.unversioned if v.dtype != "float32"]
        scalars = [v for v in self.unversioned if v.dtype == "float32"]
        packed: tf.Tensor | None = None
        with tf.control_dependencies(None), tf.control_dependencies(after), tf.device(device):
            own = [v._value.read_value() for v in scalars]
            floats = [*own, *(tensor for part in parts for tensor in part.floats)]
            if self.dense:
                handles = base.read_handles(self.dense)
                packed, self.dense_versions = ops.pull_dense(*handles, floats)
            elif floats:
                packed = ops.pack([[tensor] for tensor in floats])
            direct = [links.passed(v._value.read_value()) for v in not_floats]
        # What follows runs on the worker.
        for variable, tensor in zip(not_floats, direct, strict=True):
            self.values[id(variable)] = links.arrived(tensor)
        if packed is None:
            return
        fixed = [*(s.variable for s in self.dense), *scalars]

        def take(pieces: list[tf.Tensor]) -> None:
            for variable, piece in zip(fixed, pieces, strict=True):
                self.values[id(variable)] = tf.reshape(piece, tuple(variable.shape))

        variables = _Part(own, [[v.shape.num_elements()] for v in fixed], take)
        self._answer(device, packed, [variables, *parts])

    def _read_rows(self, device: str, after: Sequence) -> _Part:
        """Asks for rows of all tables, in one message, and looks them up on the server.

        Returns:
            The part of the answer that this is.
        """
        states = self.tables
        asked = [merge([bags for _, bags in entries]) for entries in self._tables.values()]
        packed = PackedBags.pack(asked)
        rows, sizes = {}, {}
        for state, entries in self._tables.items():
            for key, bags in entries:
                rows[key] = list(state.variable.shape[1:])
                sizes[key] = bags.size * state.width
        computations = {n: r.computation for n, r in self._requests.items() if r.computation}
        more = [tf.stack(list(sizes.values()))] if computations else []
        more += [tensor for computation in computations.values() for tensor in computation.inputs]
        self.rows, arrived = packed.sent(device, more, links.received)
        # The request's arrival, and `after`, is all there is to wait for.
        with tf.control_dependencies(None), tf.control_dependencies(after), tf.device(device):
            self.rows, found_versions = find_rows(states, self.rows, self._inserts)
            gathered, self.row_versions = ops.gather_rows(
                *base.read_handles(states),
                self.rows.ids,
                self.rows.counts,
                **self.rows.inputs(),
                **base.log_decays_of(states),
            )
            if found_versions is not None:
                self.row_versions = in_same_life(self.row_versions, found_versions)
            floats, kept, results = [gathered], {}, {}
            if computations:
                self.sizes, *inputs = arrived
                pieces = _shaped(cut(gathered, self.sizes, len(rows)), list(rows.values()))
                there = dict(zip(rows, pieces, strict=True))
                kept = {key: piece for key, piece in there.items() if key[0] in computations}
                results = _compute(device, computations, kept, inputs)
                sent = [piece for key, piece in there.items() if key not in kept]
                sent += [computed.result for computed in results.values()]
                floats = [tf.reshape(piece, [-1]) for piece in sent]
        # What follows runs on the worker.
        keys = [key for key in rows if key not in kept]
        shapes = [rows[key] for key in keys] + [[c.width] for c in computations.values()]
        own = [sizes[key] for key in keys]
        results_of = [c.count * c.width for c in computations.values()]

        def take(pieces: list[tf.Tensor]) -> None:
            pieces = _shaped(pieces, shapes)
            values = {**kept, **dict(zip(keys, pieces, strict=False))}
            for computed, piece in zip(results.values(), pieces[len(keys) :], strict=True):
                computed.values = piece
            lookups: dict[_Key, PulledLookup] = {}
            for state, entries in self._tables.items():
                for key, bags in entries:
                    number = len(lookups)
                    versions = functools.partial(self._versions_of, number)
                    lookups[key] = PulledLookup(bags, values[key], versions, self, number)
                self.lookups[state] = [lookups[key] for key, _ in entries]
            for number, request in self._requests.items():
                bags_of = [lookups[number, place] for place in range(len(request.bags))]
                self.found[number] = PulledRequest(bags_of, results.get(number))

        pieces_of = [[size] for size in [*own, *results_of]] if computations else [own]
        return _Part(floats, pieces_of, take)

    def _versions_of(self, number: int) -> tf.Tensor:
        """The versions of a lookup, by its number among all of them, brought to the worker."""
        versions = links.arrived(links.passed(self.row_versions))
        lookups = [lookup for of_table in self.lookups.values() for lookup in of_table]
        sizes = tf.stack([tf.size(lookup.bags.ids, out_type=tf.int64) for lookup in lookups])
        return tf.split(versions, sizes, num=len(lookups))[number]

    def _answer(self, device: str, packed: tf.Tensor, parts: Sequence[_Part]) -> None:
        """Sends what a server answers, and hands it out on the worker.

        Args:
            device: the server.
            packed: what `ops.pack` makes of the parts, each tensor in a group of its own.
            parts: the parts.
        """
        with tf.control_dependencies(None), tf.device(device):
            message = links.passed(packed)
        # What follows runs on the worker.
        self.arrived = message = links.arrived(message)
        pieces = ops.unpack(message, [sizes for part in parts for sizes in part.sizes])
        for part in parts:
            count = sum(len(sizes) for sizes in part.sizes)
            part.take(pieces[:count])
            pieces = pieces[count:]


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of what a server answers.

    Attributes:
        floats: what is sent, but for dense variables, which `ops.pull_dense` reads.
        sizes: for each tensor that is sent, the elements of the pieces that the worker takes it
            apart into.
        take: takes all pieces, vectors on the worker.
    """

    floats: list[tf.Tensor]
    sizes: list[list[int | tf.Tensor]]
    take: Callable[[list[tf.Tensor]], None]


def _compute(
    device: str,
    computations: dict[int, Computation],
    kept: dict[_Key, tf.Tensor],
    inputs: list[tf.Tensor],
) -> dict[int, Computed]:
    """Computes what is wanted of looked-up vectors; call it under the server's device scope.

    Args:
        device: the server's.
        computations: by the numbers of their requests.
        kept: the vectors of each lookup.
        inputs: what else the computations take, one after the other.
    """
    results = {}
    for number, computation in computations.items():
        vectors = [kept[key] for key in sorted(kept) if key[0] == number]
        own, inputs = inputs[: len(computation.inputs)], inputs[len(computation.inputs) :]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(vectors)
            result = computation.function(vectors, own)
        results[number] = Computed(device, vectors, result, tape, result)
    return results


def find_rows(
    states: Sequence[base.VariableState],
    asked: PackedBags,
    inserts: bool,
    expected: tf.Tensor | None = None,
) -> tuple[PackedBags, tf.Tensor | None]:
    """Finds the rows of keys; call it under the server's device scope.

    Args:
        states: the states of the tables.
        asked: bags of rows, or of keys where a table has keys.
        inserts: whether keys that have no row may be given one.
        expected: the versions of the keys' rows when they were found before; None: nobody has.

    Returns:
        The same bags of rows, and of which life these are, by a version; None if no table has
        keys.
    """
    if not any(state.keyed for state in states):
        return asked, None
    parts = tf.split(asked.ids, asked.counts, num=len(states))
    before = [None] * len(states)
    if expected is not None:
        before = tf.split(expected, asked.counts, num=len(states))
    # Rows of other tables have one life only.
    found = [
        state.keyed.find(ids, inserts, own) if state.keyed else (ids, tf.zeros_like(ids))
        for state, ids, own in zip(states, parts, before, strict=True)
    ]
    rows, versions = (tf.concat(own, 0) for own in zip(*found, strict=True))
    return dataclasses.replace(asked, ids=rows), versions


def cut(packed: tf.Tensor, sizes: tf.Tensor | list, count: int) -> list[tf.Tensor]:
    """Cuts a vector into `count` pieces of so many elements."""
    return tf.split(packed, tf.convert_to_tensor(sizes), num=count) if count > 1 else [packed]


def _shaped(pieces: list[tf.Tensor], shapes: list[list[int]]) -> list[tf.Tensor]:
    """Pieces of vectors as [any, *shape] each."""
    return [tf.reshape(piece, [-1, *shape]) for piece, shape in zip(pieces, shapes, strict=True)]
