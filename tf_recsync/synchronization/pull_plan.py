"""What travels between a worker and one server at the beginning of a step.

There: what to look up. Back: dense values and pooled vectors, packed in one.
Versions and row ids stay on the server for the push (push_plan.py); they travel only
if the worker asks for them. So do vectors of which the worker only wants something
computed: the result travels.

On the server's side messages pass its artificial link (`links.passed`), if it has one.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(eq=False)
class ServerPull:
    """What stays on the server of what a step has pulled from it.

    Attributes:
        dense: the states of the dense variables pulled.
        dense_versions: int64 [len(dense)], or None without any.
        tables: the states of the tables looked up.
        rows: what was looked up in them, or None without any.
        row_versions: int64 [n], the versions of `rows.ids`.
        lookups: the lookups of each table.
        sizes: int64, the elements of the vectors of each lookup, table by table; None
            if nothing was computed from any.
        arrived: what exists on the worker when the server's answer is there; None
            without any.
    """

    dense: list[base.VariableState] = dataclasses.field(default_factory=list)
    dense_versions: tf.Tensor | None = None
    tables: list[base.VariableState] = dataclasses.field(default_factory=list)
    rows: PackedBags | None = None
    row_versions: tf.Tensor | None = None
    lookups: list[list[PulledLookup]] = dataclasses.field(default_factory=list)
    sizes: tf.Tensor | None = None
    arrived: tf.Tensor | None = None


class PullPlan:
    """What one server is asked for, and how its answer is taken apart.

    Args:
        inserts: whether keys that have no row in their table may be given one.
    """

    def __init__(self, inserts: bool):
        self._inserts = inserts
        self.dense: list[base.VariableState] = []
        self.unversioned: list[keras.Variable] = []
        # By table, in the order of the first lookup.
        self._tables: dict[int, tuple[base.VariableState, list[tuple[_Key, Bags]]]] = {}
        self._requests: dict[int, Request] = {}

    def look_up(self, number: int, states: list[base.VariableState], request: Request) -> None:
        """Adds a request for rows of these tables, by its number in the step."""
        self._requests[number] = request
        for place, (state, bags) in enumerate(zip(states, request.bags, strict=True)):
            entries = self._tables.setdefault(id(state), (state, []))[1]
            entries.append(((number, place), bags))

    def pull(
        self,
        device: str,
        values: dict,
        found: dict[int, PulledRequest],
        after: Sequence[tf.Tensor | tf.Operation] = (),
    ) -> ServerPull:
        """Pulls; adds to `values` by the variables' ids, and to `found` by number.

        Args:
            device: the server.
            values: gets the values of variables.
            found: gets what was looked up.
            after: what must be there, or have happened, on the server before.
        """
        pull = ServerPull()
        # Variables are read with the rows, and not before the request is there.
        rows = self._read_rows(device, pull, found, after)
        if rows is not None:
            after = [*after, pull.rows.ids]
        self._read_variables(device, pull, values, after, rows)
        return pull

    def pull_variables(
        self,
        device: str,
        pull: ServerPull,
        values: dict,
        after: Sequence[tf.Tensor | tf.Operation] = (),
    ) -> None:
        """Pulls the variables, which may be done before or after the rows; see `pull`."""
        self._read_variables(device, pull, values, after)

    def pull_rows(self, device: str, pull: ServerPull, found: dict) -> None:
        """Pulls what was looked up; see `pull`."""
        rows = self._read_rows(device, pull, found, [])
        if rows is not None:
            floats, part = rows
            with tf.control_dependencies(None), tf.device(device):
                packed = ops.pack([[tensor] for tensor in floats])
            _answer(device, pull, packed, [part])

    def _read_variables(
        self,
        device: str,
        pull: ServerPull,
        values: dict,
        after: Sequence,
        rows: tuple[list[tf.Tensor], _Part] | None = None,
    ) -> None:
        """Reads on the server what is read whatever the batch is; the answer has `rows`, too.

        It waits for nothing but `after` and the last update of the same variables,
        which tf.function sees to: not for the worker to hear of that update.
        """
        pull.dense = self.dense
        not_floats = [v for v in self.unversioned if v.dtype != "float32"]
        scalars = [v for v in self.unversioned if v.dtype == "float32"]
        packed: tf.Tensor | None = None
        with tf.control_dependencies(None), tf.control_dependencies(after), tf.device(device):
            floats = [v._value.read_value() for v in scalars]
            floats += rows[0] if rows is not None else []
            if self.dense:
                packed, pull.dense_versions = ops.pull_dense(
                    base.handles([s.variable for s in self.dense]),
                    base.handles([s.versions for s in self.dense]),
                    floats,
                )
            elif floats:
                packed = ops.pack([[tensor] for tensor in floats])
            direct = [links.passed(v._value.read_value()) for v in not_floats]
        # What follows runs on the worker.
        values.update((id(v), links.arrived(t)) for v, t in zip(not_floats, direct, strict=True))
        if packed is None:
            return
        fixed = [*(s.variable for s in self.dense), *scalars]

        def take(pieces: list[tf.Tensor]) -> None:
            for variable, piece in zip(fixed, pieces, strict=True):
                values[id(variable)] = tf.reshape(piece, tuple(variable.shape))

        sizes = [[v.shape.num_elements()] for v in fixed]
        parts = [_Part(sizes, take)] if rows is None else [_Part(sizes, take), rows[1]]
        _answer(device, pull, packed, parts)

    def _read_rows(
        self, device: str, pull: ServerPull, found: dict[int, PulledRequest], after: Sequence
    ) -> tuple[list[tf.Tensor], _Part] | None:
        """Asks for rows of all tables, in one message, and looks them up on the server.

        Returns:
            What the server has to send, and the part of the answer that this is; None if there
            is nothing to look up.
        """
        if not self._tables:
            return None
        states = pull.tables = [state for state, _ in self._tables.values()]
        asked = [entries for _, entries in self._tables.values()]
        packed = PackedBags.pack([merge([bags for _, bags in entries]) for entries in asked])
        rows = {
            key: list(state.variable.shape[1:])
            for state, entries in self._tables.values()
            for key, _ in entries
        }
        sizes = {
            key: bags.size * tf.TensorShape(rows[key]).num_elements()
            for entries in asked
            for key, bags in entries
        }
        computations = {n: r.computation for n, r in self._requests.items() if r.computation}
        more = [tf.stack(list(sizes.values()))] if computations else []
        more += [tensor for computation in computations.values() for tensor in computation.inputs]
        pull.rows, arrived = packed.sent(device, more, links.received)
        # The request's arrival, and `after`, is all there is to wait for.
        with tf.control_dependencies(None), tf.control_dependencies(after), tf.device(device):
            pull.rows, found_versions = find_rows(states, pull.rows, self._inserts)
            gathered, pull.row_versions = ops.gather_rows(
                base.handles([s.variable for s in states]),
                base.handles([s.versions for s in states]),
                pull.rows.ids,
                pull.rows.counts,
                **pull.rows.inputs(),
                **base.log_decays_of(states),
            )
            if found_versions is not None:
                pull.row_versions = in_same_life(pull.row_versions, found_versions)
            floats, kept, results = [gathered], {}, {}
            if computations:
                pull.sizes, *inputs = arrived
                pieces = _pieces(gathered, pull.sizes, list(rows.values()))
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
            for i, entries in enumerate(asked):
                for j, (key, bags) in enumerate(entries):
                    lookups[key] = PulledLookup(bags, values[key], _VersionsOf(pull, i, j), pull)
                pull.lookups.append([lookups[key] for key, _ in entries])
            for number, request in self._requests.items():
                bags_of = [lookups[number, place] for place in range(len(request.bags))]
                found[number] = PulledRequest(bags_of, results.get(number))

        if computations:
            return floats, _Part([[size] for size in [*own, *results_of]], take)
        return floats, _Part([own], take)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of what a server answers.

    Attributes:
        sizes: for each tensor that is sent, the elements of the pieces that the worker takes it
            apart into.
        take: takes all pieces, vectors on the worker.
    """

    sizes: list[list[int | tf.Tensor]]
    take: Callable[[list[tf.Tensor]], None]


def _answer(device: str, pull: ServerPull, packed: tf.Tensor, parts: Sequence[_Part]) -> None:
    """Sends what a server answers, and hands it out on the worker.

    Args:
        device: the server.
        pull: learns of the arrival.
        packed: what `ops.pack` makes of the parts, each tensor in a group of its own.
        parts: the parts.
    """
    with tf.control_dependencies(None), tf.device(device):
        message = links.passed(packed)
    # What follows runs on the worker.
    pull.arrived = message = links.arrived(message)
    pieces = ops.unpack(message, [sizes for part in parts for sizes in part.sizes])
    for part in parts:
        count = sum(len(sizes) for sizes in part.sizes)
        part.take(pieces[:count])
        pieces = pieces[count:]


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


def _pieces(packed: tf.Tensor, sizes: tf.Tensor, shapes: list[list[int]]) -> list[tf.Tensor]:
    """Takes apart what was packed: pieces of so many elements, [any, *shape] each."""
    return _shaped(cut(packed, sizes, len(shapes)), shapes)


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


@dataclasses.dataclass(frozen=True)
class _VersionsOf:
    """The versions of one lookup of one table of a pull, brought to the worker when called."""

    pull: ServerPull
    table: int
    lookup: int

    def __call__(self) -> tf.Tensor:
        versions = links.arrived(links.passed(self.pull.row_versions))
        lookups = [lookup for table in self.pull.lookups for lookup in table]
        sizes = tf.stack([tf.size(lookup.bags.ids, out_type=tf.int64) for lookup in lookups])
        position = lookups.index(self.pull.lookups[self.table][self.lookup])
        return tf.split(versions, sizes, num=len(lookups))[position]
