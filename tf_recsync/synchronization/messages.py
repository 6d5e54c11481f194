"""What travels between a worker and one server in a step.

There: what to look up. Back: dense values and pooled vectors, packed in one. There
again: their gradients, packed. Versions and row ids stay on the server, which
has them since the pull; they travel only if the worker asks for them. So do
vectors of which the worker only wants something computed: the result travels.

On the server's side messages pass its artificial link (`links.passed`), if it has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.ops.bags import Bags, Computation, PackedBags, Request, merge
from tf_recsync.ops.gradient_buffer import Aggregate
from tf_recsync.ops.tokens import Token
from tf_recsync.optimizers import base
from tf_recsync.synchronization import links
from tf_recsync.synchronization.gradient_buffer import GradientBuffer
from tf_recsync.synchronization.pulled import (
    Computed,
    GradientPart,
    PulledLookup,
    PulledRequest,
)

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
    """What one server is asked for, and how its answer is taken apart."""

    def __init__(self):
        self.dense: list[base.VariableState] = []
        self.unversioned: list[keras.Variable] = []
        # By table, in the order of the first lookup. A lookup's key is the number of its
        # request, and its place there.
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
        fixed = self._read_variables(device, pull, values, after)
        _answer(device, pull, [part for part in (fixed, rows) if part is not None])
        return pull

    def pull_variables(
        self,
        device: str,
        pull: ServerPull,
        values: dict,
        after: Sequence[tf.Tensor | tf.Operation] = (),
    ) -> None:
        """Pulls the variables, which may be done before or after the rows; see `pull`."""
        fixed = self._read_variables(device, pull, values, after)
        if fixed is not None:
            _answer(device, pull, [fixed])

    def pull_rows(self, device: str, pull: ServerPull, found: dict) -> None:
        """Pulls what was looked up; see `pull`."""
        rows = self._read_rows(device, pull, found, [])
        if rows is not None:
            _answer(device, pull, [rows])

    def _read_variables(
        self, device: str, pull: ServerPull, values: dict, after: Sequence
    ) -> _Part | None:
        """Reads on the server what is read whatever the batch is.

        It waits for nothing but `after` and the last update of the same variables,
        which tf.function sees to: not for the worker to hear of that update.
        """
        pull.dense = self.dense
        others = [v for v in self.unversioned if v.dtype != "float32"]
        scalars = [v for v in self.unversioned if v.dtype == "float32"]
        floats: list[tf.Tensor] = []
        with tf.control_dependencies(None), tf.control_dependencies(after), tf.device(device):
            if self.dense:
                dense, pull.dense_versions = ops.pull_dense(
                    base.handles([s.variable for s in self.dense]),
                    base.handles([s.versions for s in self.dense]),
                )
                floats.append(dense)
            floats += [tf.reshape(v._value.read_value(), [-1]) for v in scalars]
            direct = [links.passed(v._value.read_value()) for v in others]
        # What follows runs on the worker.
        values.update((id(v), tf.identity(t)) for v, t in zip(others, direct, strict=True))
        if not floats:
            return None
        fixed = [*(s.variable for s in self.dense), *scalars]

        def take(pieces: list[tf.Tensor]) -> None:
            for variable, piece in zip(fixed, pieces, strict=True):
                values[id(variable)] = tf.reshape(piece, tuple(variable.shape))

        return _Part(floats, [v.shape.num_elements() for v in fixed], take)

    def _read_rows(
        self, device: str, pull: ServerPull, found: dict[int, PulledRequest], after: Sequence
    ) -> _Part | None:
        """Asks for rows of all tables, in one message, and looks them up on the server."""
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
            gathered, pull.row_versions = ops.gather_rows(
                base.handles([s.variable for s in states]),
                base.handles([s.versions for s in states]),
                pull.rows.ids,
                pull.rows.counts,
                **pull.rows.inputs(),
            )
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
        own = [sizes[key] for key in keys] + [c.count * c.width for c in computations.values()]

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

        return _Part(floats, own, take)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of what a server answers.

    Attributes:
        floats: what is sent, vectors on the server.
        sizes: the elements of the pieces that the worker takes it apart into.
        take: takes the pieces, on the worker.
    """

    floats: list[tf.Tensor]
    sizes: list[int | tf.Tensor]
    take: Callable[[list[tf.Tensor]], None]


def _answer(device: str, pull: ServerPull, parts: list[_Part]) -> None:
    """Sends what a server answers, in one message, and hands it out on the worker."""
    floats = [tensor for part in parts for tensor in part.floats]
    with tf.control_dependencies(None), tf.device(device):
        message = links.passed(tf.concat(floats, 0) if len(floats) > 1 else floats[0])
    # What follows runs on the worker.
    pull.arrived = message = tf.identity(message)
    sizes = [size for part in parts for size in part.sizes]
    pieces = _cut(message, sizes, len(sizes))
    for part in parts:
        part.take(pieces[: len(part.sizes)])
        pieces = pieces[len(part.sizes) :]


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
    return _shaped(_cut(packed, sizes, len(shapes)), shapes)


def _cut(packed: tf.Tensor, sizes: tf.Tensor | list, count: int) -> list[tf.Tensor]:
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
        versions = tf.identity(links.passed(self.pull.row_versions))
        lookups = [lookup for table in self.pull.lookups for lookup in table]
        sizes = tf.stack([tf.size(lookup.bags.ids, out_type=tf.int64) for lookup in lookups])
        position = lookups.index(self.pull.lookups[self.table][self.lookup])
        return tf.split(versions, sizes, num=len(lookups))[position]


class PushPlan:
    """What is sent to one server, and how it is taken apart and applied there.

    Args:
        pull: what the step pulled from that server.
    """

    def __init__(self, pull: ServerPull):
        self._pull = pull
        self._dense: list[tuple[int, tf.Tensor]] = []
        self._pooled: list[tuple[int, list[GradientPart]]] = []
        self._rows: list[tuple[base.VariableState, tf.Tensor, tf.Tensor, tf.Tensor]] = []
        # What travels; see `pack`.
        self.packed: list[tf.Tensor] = []
        self._floats: tf.Tensor | None = None
        self._integers: tf.Tensor | None = None

    def add_dense(self, state: base.VariableState, gradient: tf.Tensor) -> None:
        """Adds the gradient of a dense variable."""
        self._dense.append((_index(self._pull.dense, state), tf.reshape(gradient, [-1])))

    def add_lookups(self, state: base.VariableState, parts: list[GradientPart]) -> bool:
        """Adds the gradient of a table's pooled vectors, if they are all that was pulled of it.

        Args:
            state: the table's state.
            parts: the gradients of lookups.
        """
        if any(part.lookup.message is not self._pull for part in parts):
            return False
        table = _index(self._pull.tables, state)
        by_lookup = {id(part.lookup): part for part in parts}
        pulled = self._pull.lookups[table]
        if set(by_lookup) != {id(lookup) for lookup in pulled}:
            return False
        self._pooled.append((table, [by_lookup[id(lookup)] for lookup in pulled]))
        return True

    def add_rows(self, state: base.VariableState, values, ids, versions) -> None:
        """Adds the gradient of rows of a table, with all that the server needs to know."""
        self._rows.append((state, tf.reshape(tf.cast(values, tf.float32), [-1]), ids, versions))

    def pack(self, learning_rate) -> None:
        """Packs on the worker all that was added."""
        floats = [tf.reshape(tf.cast(learning_rate, tf.float32), [1])]
        floats += [gradient for _, gradient in self._dense]
        floats += self._sent_gradients()
        floats += [values for _, values, _, _ in self._rows]
        self.packed = [tf.concat(floats, 0)]
        if self._rows:
            counts = [tf.size(ids, out_type=tf.int64)[tf.newaxis] for _, _, ids, _ in self._rows]
            ids = [ids for _, _, ids, _ in self._rows]
            self.packed.append(tf.concat([*counts, *ids, *(v for _, _, _, v in self._rows)], 0))

    def send(self, device: str) -> tf.Tensor:
        """Sends what was packed; returns a tensor that exists on arrival."""
        with tf.device(device):
            sent = [links.received(tensor) for tensor in self.packed]
        self._floats, self._integers = sent if self._rows else (*sent, None)
        return self._floats

    def apply(self, optimizer: base.Optimizer, step, hogwild: bool) -> list[tf.Operation]:
        """Applies what was sent; call it under the server's device scope.

        Args:
            optimizer: whose rule it is.
            step: the global step.
            hogwild: whether dense variables are updated without locks.
        """
        learning_rate, operations = self.learning_rate, []
        dense, pooled, rows = self._split()
        if self._dense:
            states, versions = self._dense_versions()
            operations.append(
                optimizer.apply_dense(states, dense, versions, learning_rate, step, hogwild=hogwild)
            )
        for states, values, bags, versions in self._updates_of_rows(pooled, rows):
            operations.append(
                optimizer.apply_rows(states, values, bags, versions, learning_rate, step)
            )
        return operations

    def collect(self, buffer: GradientBuffer, start: Token, pulled_step: tf.Tensor) -> Aggregate:
        """Puts what was sent into a gradient buffer; call it under the server's device scope.

        Args:
            buffer: the buffer of all variables that the push's optimizer has there.
            start: the step's token, on the server.
            pulled_step: the buffer's step when the parameters were pulled.

        Returns:
            What the buffer gives out.
        """
        dense, pooled, rows = self._split()
        arguments: dict[str, Any] = {}
        if self._dense:
            _, versions = self._dense_versions()
            arguments.update(dense=dense, dense_versions=versions)
        parts = self._updates_of_rows(pooled, rows)
        if parts:
            states, values, bags, versions = zip(*parts, strict=True)
            arguments.update(
                tables=[state for some in states for state in some],
                values=tf.concat(values, 0) if len(values) > 1 else values[0],
                rows=PackedBags.join(bags),
                row_versions=tf.concat(versions, 0) if len(versions) > 1 else versions[0],
            )
        return buffer.push(start.index, start.value, pulled_step, **arguments)

    @property
    def learning_rate(self) -> tf.Tensor:
        """What was sent as the learning rate."""
        return self._floats[0]

    @property
    def dense(self) -> list[base.VariableState]:
        """The states of the dense variables whose gradients were added, in their order."""
        return [self._pull.dense[number] for number, _ in self._dense]

    def _dense_versions(self) -> tuple[list[base.VariableState], tf.Tensor]:
        """The dense variables, and their versions as pulled."""
        numbers = [number for number, _ in self._dense]
        versions = self._pull.dense_versions
        if numbers != list(range(len(self._pull.dense))):
            versions = tf.gather(versions, numbers)
        return self.dense, versions

    def _updates_of_rows(self, pooled: tf.Tensor, rows: tf.Tensor) -> list[tuple]:
        """(states of tables, gradients, bags, versions) of pooled vectors and of rows."""
        parts = []
        if self._pooled:
            tables = [table for table, _ in self._pooled]
            bags, versions = self._pull.rows.select(tables, self._pull.row_versions)
            states = [self._pull.tables[table] for table in tables]
            parts.append((states, self._pooled_gradients(pooled), bags, versions))
        if self._rows:
            n = len(self._rows)
            ids, versions = tf.split(self._integers[n:], 2)
            states = [state for state, _, _, _ in self._rows]
            parts.append((states, rows, PackedBags(self._integers[:n], ids), versions))
        return parts

    def _parts(self) -> list[GradientPart]:
        return [part for _, parts in self._pooled for part in parts]

    def _sources(self) -> dict[_Key, tuple[Computed, tf.Tensor]]:
        """What is differentiated on the server: results, and their gradients, each once."""
        sources = [part.source for part in self._parts() if part.source is not None]
        return {(id(c), id(gradient)): (c, gradient) for c, gradient, _ in sources}

    def _sent_gradients(self) -> list[tf.Tensor]:
        """Flattened gradients of pooled vectors, and of what was computed from others."""
        sent = [part.values for part in self._parts() if part.source is None]
        sent += [gradient for _, gradient in self._sources().values()]
        return [tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in sent]

    def _pooled_gradients(self, sent: tf.Tensor) -> tf.Tensor:
        """The gradients of all pooled vectors, of what `_sent_gradients` sent; on the server."""
        sources = self._sources()
        if not sources:
            return sent
        numbers = {id(k): i for i, k in enumerate(k for ks in self._pull.lookups for k in ks)}
        direct = [part for part in self._parts() if part.source is None]
        sizes = [self._pull.sizes[numbers[id(part.lookup)]] for part in direct]
        sizes += [tf.size(computed.result, out_type=tf.int64) for computed, _ in sources.values()]
        pieces = _cut(sent, sizes, len(sizes))
        values = {id(part): piece for part, piece in zip(direct, pieces, strict=False)}
        pulled_back = {
            key: computed.pull_back(tf.reshape(piece, tf.shape(computed.result)))
            for (key, (computed, _)), piece in zip(
                sources.items(), pieces[len(direct) :], strict=True
            )
        }
        for part in self._parts():
            if part.source is not None:
                computed, gradient, place = part.source
                gradients = pulled_back[id(computed), id(gradient)]
                values[id(part)] = tf.reshape(gradients[place], [-1])
        return tf.concat([values[id(part)] for part in self._parts()], 0)

    def _split(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The gradients of dense variables, of pooled vectors and of rows."""
        dense = sum(
            self._pull.dense[number].variable.shape.num_elements() for number, _ in self._dense
        )
        first = 1 + dense
        if not self._rows:
            return self._floats[1:first], self._floats[first:], self._floats[:0]
        # Counted from the end, by what the server knows of the rows.
        n = len(self._rows)
        widths = [
            tf.TensorShape(state.variable.shape[1:]).num_elements() for state, _, _, _ in self._rows
        ]
        size = tf.reduce_sum(self._integers[:n] * tf.constant(widths, tf.int64))
        last = tf.size(self._floats, out_type=tf.int64) - size
        return self._floats[1:first], self._floats[first:last], self._floats[last:]


def _index(states: list[base.VariableState], state: base.VariableState) -> int:
    return next(i for i, s in enumerate(states) if s is state)
