"""What travels between a worker and one server in a step.

There: what to look up. Back: dense values and pooled vectors, packed. There
again: their gradients, packed. Versions and row ids stay on the server, which
has them since the pull; they travel only if the worker asks for them.

On the server's side messages pass its artificial link (`links.passed`), if it has one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.ops.bags import Bags, PackedBags, merge
from tf_recsync.ops.gradient_buffer import Aggregate
from tf_recsync.ops.tokens import Token
from tf_recsync.optimizers import base
from tf_recsync.synchronization import links
from tf_recsync.synchronization.gradient_buffer import GradientBuffer
from tf_recsync.synchronization.pulled import PulledLookup


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
    """

    dense: list[base.VariableState]
    dense_versions: tf.Tensor | None = None
    tables: list[base.VariableState] = dataclasses.field(default_factory=list)
    rows: PackedBags | None = None
    row_versions: tf.Tensor | None = None
    lookups: list[list[PulledLookup]] = dataclasses.field(default_factory=list)


class PullPlan:
    """What one server is asked for, and how its answer is taken apart."""

    def __init__(self):
        self.dense: list[base.VariableState] = []
        self.unversioned: list[keras.Variable] = []
        # By table, in the order of the first lookup: (state, (number, bags) of each lookup).
        self._tables: dict[int, tuple[base.VariableState, list[tuple[int, Bags]]]] = {}

    def look_up(self, number: int, state: base.VariableState, bags: Bags) -> None:
        """Adds a lookup, by its number in the step."""
        self._tables.setdefault(id(state), (state, []))[1].append((number, bags))

    def pull(
        self,
        device: str,
        values: dict,
        lookups: dict[int, PulledLookup],
        after: tf.Tensor | None = None,
    ) -> ServerPull:
        """Pulls; adds to `values` by the variables' ids, and to `lookups` by number.

        Args:
            device: the server.
            values: gets the values of variables.
            lookups: gets the lookups.
            after: a tensor on the server that must be there before; None for none.
        """
        pull = ServerPull(dense=self.dense)
        after = [] if after is None else [after]
        self._pull_fixed(device, pull, values, after)
        if self._tables:
            self._pull_rows(device, pull, lookups, after)
        return pull

    def _pull_fixed(self, device: str, pull: ServerPull, values: dict, after: list) -> None:
        """Pulls what is pulled whatever the batch is.

        It waits for nothing but `after` and the last update of the same variables,
        which tf.function sees to: not for the batch, and not for the worker to hear
        of that update. So without a token a pull follows the push before it at once.
        """
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
            message = links.passed(tf.concat(floats, 0)) if floats else None
            direct = [links.passed(v._value.read_value()) for v in others]
        # What follows runs on the worker.
        values.update((id(v), tf.identity(t)) for v, t in zip(others, direct, strict=True))
        if message is None:
            return
        fixed = [*(s.variable for s in self.dense), *scalars]
        pieces = tf.split(message, [v.shape.num_elements() for v in fixed])
        for variable, piece in zip(fixed, pieces, strict=True):
            values[id(variable)] = tf.reshape(piece, tuple(variable.shape))

    def _pull_rows(
        self, device: str, pull: ServerPull, lookups: dict[int, PulledLookup], after: list
    ) -> None:
        """Looks up rows of all tables: a message there, and one back."""
        states = pull.tables = [state for state, _ in self._tables.values()]
        asked = [entries for _, entries in self._tables.values()]
        packed = PackedBags.pack([merge([bags for _, bags in entries]) for entries in asked])
        pull.rows = packed.sent(device, links.received)
        # The request's arrival, and the token's, is all there is to wait for.
        with tf.control_dependencies(None), tf.control_dependencies(after), tf.device(device):
            pooled, pull.row_versions = ops.gather_rows(
                base.handles([s.variable for s in states]),
                base.handles([s.versions for s in states]),
                pull.rows.ids,
                pull.rows.counts,
                **pull.rows.inputs(),
            )
            pooled = links.passed(pooled)
        # What follows runs on the worker.
        widths = [tf.TensorShape(s.variable.shape[1:]).num_elements() for s in states]
        sizes = packed.sizes * tf.constant(widths, tf.int64)
        pieces = tf.split(pooled, sizes, num=len(states)) if len(states) > 1 else [pooled]
        for i, (state, entries) in enumerate(zip(states, asked, strict=True)):
            piece = tf.reshape(pieces[i], [-1, *state.variable.shape[1:]])
            parts = [piece]
            if len(entries) > 1:
                parts = tf.split(piece, tf.stack([b.size for _, b in entries]), num=len(entries))
            found = [
                PulledLookup(bags, part, _VersionsOf(pull, i, j), pull)
                for j, ((_, bags), part) in enumerate(zip(entries, parts, strict=True))
            ]
            pull.lookups.append(found)
            for (number, _), lookup in zip(entries, found, strict=True):
                lookups[number] = lookup


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
        self._pooled: list[tuple[int, tf.Tensor]] = []
        self._rows: list[tuple[base.VariableState, tf.Tensor, tf.Tensor, tf.Tensor]] = []
        # What travels; see `pack`.
        self.packed: list[tf.Tensor] = []
        self._floats: tf.Tensor | None = None
        self._integers: tf.Tensor | None = None

    def add_dense(self, state: base.VariableState, gradient: tf.Tensor) -> None:
        """Adds the gradient of a dense variable."""
        self._dense.append((_index(self._pull.dense, state), tf.reshape(gradient, [-1])))

    def add_lookups(
        self, state: base.VariableState, lookups: list[PulledLookup], values: tf.Tensor
    ) -> bool:
        """Adds the gradient of a table's pooled vectors, if they are all that was pulled of it.

        Args:
            state: the table's state.
            lookups: the lookups whose gradients `values` are, one after the other.
            values: [bags, ...].
        """
        if any(lookup.message is not self._pull for lookup in lookups):
            return False
        table = _index(self._pull.tables, state)
        pulled = self._pull.lookups[table]
        if {id(lookup) for lookup in lookups} != {id(lookup) for lookup in pulled}:
            return False
        if lookups != pulled:
            sizes = tf.stack([lookup.bags.size for lookup in lookups])
            parts = dict(zip(map(id, lookups), tf.split(values, sizes), strict=True))
            values = tf.concat([parts[id(lookup)] for lookup in pulled], 0)
        self._pooled.append((table, tf.reshape(tf.cast(values, tf.float32), [-1])))
        return True

    def add_rows(self, state: base.VariableState, values, ids, versions) -> None:
        """Adds the gradient of rows of a table, with all that the server needs to know."""
        self._rows.append((state, tf.reshape(tf.cast(values, tf.float32), [-1]), ids, versions))

    def pack(self, learning_rate) -> None:
        """Packs on the worker all that was added."""
        floats = [tf.reshape(tf.cast(learning_rate, tf.float32), [1])]
        floats += [gradient for _, gradient in self._dense]
        floats += [values for _, values in self._pooled]
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

    def apply(self, optimizer: base.Optimizer, step) -> list[tf.Operation]:
        """Applies what was sent; call it under the server's device scope."""
        learning_rate, operations = self.learning_rate, []
        dense, pooled, rows = self._split()
        if self._dense:
            states, versions = self._dense_versions()
            operations.append(optimizer.apply_dense(states, dense, versions, learning_rate, step))
        for states, values, bags, versions in self._parts(pooled, rows):
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
        parts = self._parts(pooled, rows)
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

    def _parts(self, pooled: tf.Tensor, rows: tf.Tensor) -> list[tuple]:
        """(states of tables, gradients, bags, versions) of pooled vectors and of rows."""
        parts = []
        if self._pooled:
            tables = [table for table, _ in self._pooled]
            bags, versions = self._pull.rows.select(tables, self._pull.row_versions)
            parts.append(([self._pull.tables[table] for table in tables], pooled, bags, versions))
        if self._rows:
            n = len(self._rows)
            ids, versions = tf.split(self._integers[n:], 2)
            states = [state for state, _, _, _ in self._rows]
            parts.append((states, rows, PackedBags(self._integers[:n], ids), versions))
        return parts

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
