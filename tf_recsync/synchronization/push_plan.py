"""What travels between a worker and one server at the end of a step, and what becomes of it.

Gradients, packed in one message. Versions and row ids are on the server since the pull;
they come along only for gradients that are not those of whole lookups.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tf_recsync import ops
from tf_recsync.embedding.keys import in_same_life
from tf_recsync.ops.bags import PackedBags
from tf_recsync.ops.gradient_buffer import Aggregate
from tf_recsync.ops.tokens import Token
from tf_recsync.optimizers import base
from tf_recsync.synchronization import links
from tf_recsync.synchronization.gradient_buffer import GradientBuffer
from tf_recsync.synchronization.pull_plan import PullPlan, cut, find_rows
from tf_recsync.synchronization.pulled import Computed, GradientPart


class PushPlan:
    """What is sent to one server, and how it is taken apart and applied there.

    Args:
        pull: what the step pulled from that server.
    """

    def __init__(self, pull: PullPlan):
        self._pull = pull
        self._dense: list[tuple[base.VariableState, tf.Tensor]] = []
        self._added: list[base.VariableState] = []  # Of all dense variables, in their order.
        # What is there already: gradients, and the versions that they were computed on.
        self._placed: list[tuple[base.VariableState, tf.Tensor, tf.Tensor]] = []
        self._pooled: list[tuple[base.VariableState, list[GradientPart]]] = []
        self._rows: list[tuple[base.VariableState, tf.Tensor, tf.Tensor, tf.Tensor]] = []
        # What travels; see `pack`.
        self.packed: list[tf.Tensor] = []
        # What has arrived on the server; see `send`.
        self._sent: list[tf.Tensor] = []
        self._row_bags: PackedBags | None = None
        self._row_versions: tf.Tensor | None = None

    def add_dense(self, state: base.VariableState, gradient: tf.Tensor) -> None:
        """Adds the gradient of a dense variable."""
        self._dense.append((state, gradient))
        self._added.append(state)

    def add_placed(
        self, state: base.VariableState, gradient: tf.Tensor, version: tf.Tensor
    ) -> None:
        """Adds the gradient of a dense variable that was computed on the server.

        Args:
            state: the variable's.
            gradient: on the server, shaped like the variable.
            version: the variable's when it was read, int64 [1], on the server.
        """
        self._placed.append((state, gradient, version))
        self._added.append(state)

    def add_lookups(self, state: base.VariableState, parts: list[GradientPart]) -> bool:
        """Adds the gradient of a table's pooled vectors, if they are all that was pulled of it.

        Args:
            state: the table's state.
            parts: the gradients of lookups.
        """
        if any(part.lookup.message is not self._pull for part in parts):
            return False
        by_lookup = {part.lookup: part for part in parts}
        pulled = self._pull.lookups[state]
        if set(by_lookup) != set(pulled):
            return False
        self._pooled.append((state, [by_lookup[lookup] for lookup in pulled]))
        return True

    def add_rows(self, state: base.VariableState, values, ids, versions) -> None:
        """Adds the gradient of rows of a table, with all that the server needs to know."""
        self._rows.append((state, tf.cast(values, tf.float32), ids, versions))

    def pack(self, learning_rate) -> None:
        """Packs on the worker all that was added."""
        self.packed = [
            ops.pack(
                [
                    [tf.cast(learning_rate, tf.float32)],
                    [gradient for _, gradient in self._dense],
                    [values for _, values, _, _ in self._rows],
                    self._sent_gradients(),
                ]
            )
        ]
        if self._rows:
            counts = [tf.size(ids, out_type=tf.int64) for _, _, ids, _ in self._rows]
            ids = [ids for _, _, ids, _ in self._rows]
            versions = [versions for _, _, _, versions in self._rows]
            self.packed.append(ops.pack([[tf.stack(counts)], [*ids, *versions]]))

    @property
    def computed(self) -> list[tf.Tensor]:
        """All that is there before the push, what was packed included."""
        return [*self.packed, *(gradient for _, gradient, _ in self._placed)]

    def send(self, device: str) -> tf.Tensor:
        """Sends what was packed; returns a tensor that exists on arrival."""
        with tf.device(device):
            floats, *integers = [links.received(tensor) for tensor in self.packed]
            if self._rows:
                n = len(self._rows)
                counts, ids_and_versions = ops.unpack(integers[0], [[n], [-1]])
                ids, self._row_versions = tf.split(ids_and_versions, 2)
                self._row_bags = PackedBags(counts, ids)
            self._sent = self._split(floats)
        return floats

    def apply(
        self, optimizer: base.Optimizer, step, decayed: Collection[int], hogwild: bool
    ) -> list[tf.Operation]:
        """Applies what was sent; call it under the server's device scope.

        Args:
            optimizer: whose rule it is.
            step: the global step.
            decayed: the ids of the variables whose weights decay.
            hogwild: whether dense variables are updated without locks.
        """
        learning_rate = self.learning_rate
        _, dense, rows, pooled = self._sent
        tables = [state for state, *_ in [*self._pooled, *self._rows]]
        states = [*self._added, *tables]
        operations = optimizer.decay_weights(
            [state for state in states if id(state.variable) in decayed], learning_rate
        )
        updates: list[tuple[list[base.VariableState], tf.Tensor, tf.Tensor]] = []
        if self._placed and optimizer.nonfinite == "error":
            # All of them or none.
            updates.append((self._added, *self._all_dense(dense)))
        else:
            if self._dense:
                states, versions = self._dense_versions()
                updates.append((states, dense, versions))
            updates += [([s], tf.reshape(g, [-1]), version) for s, g, version in self._placed]
        for states, gradients, versions in updates:
            operations.append(
                optimizer.apply_dense(
                    states, gradients, versions, learning_rate, step, hogwild=hogwild
                )
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
        _, dense, rows, pooled = self._sent
        arguments: dict[str, Any] = {}
        if self.dense:
            dense, versions = self._all_dense(dense)
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
        arguments["ticket"] = start.ticket
        return buffer.push(start.index, start.value, pulled_step, **arguments)

    @property
    def learning_rate(self) -> tf.Tensor:
        """What was sent as the learning rate."""
        return tf.reshape(self._sent[0], [])

    @property
    def dense(self) -> list[base.VariableState]:
        """The states of the dense variables whose gradients were added, in their order."""
        return self._added

    def _dense_versions(self) -> tuple[list[base.VariableState], tf.Tensor]:
        """The dense variables whose gradients were sent, and their versions as pulled."""
        states = [state for state, _ in self._dense]
        versions, pulled = self._pull.dense_versions, self._pull.dense
        if states != pulled:
            versions = tf.gather(versions, [pulled.index(state) for state in states])
        return states, versions

    def _all_dense(self, sent: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The gradients of all dense variables, flattened, and the variables' versions."""
        found = {state: (gradient, version) for state, gradient, version in self._placed}
        if self._dense:
            states, versions = self._dense_versions()
            if not found:
                return sent, versions
            sizes = [state.variable.shape.num_elements() for state in states]
            pieces = zip(cut(sent, sizes, len(sizes)), tf.split(versions, len(sizes)), strict=True)
            found |= dict(zip(states, pieces, strict=True))
        gradients, versions = zip(*(found[state] for state in self._added), strict=True)
        return ops.pack([gradients]), tf.concat(versions, 0)

    def _updates_of_rows(self, pooled: tf.Tensor, rows: tf.Tensor) -> list[tuple]:
        """(states of tables, gradients, bags, versions) of pooled vectors and of rows."""
        parts = []
        if self._pooled:
            states = [state for state, _ in self._pooled]
            tables = [self._pull.tables.index(state) for state in states]
            bags, versions = self._pull.rows.select(tables, self._pull.row_versions)
            parts.append((states, self._pooled_gradients(pooled), bags, versions))
        if self._rows:
            states = [state for state, _, _, _ in self._rows]
            versions = self._row_versions
            bags, found = find_rows(states, self._row_bags, inserts=False, expected=versions)
            if found is not None:
                versions = in_same_life(versions, found)
            parts.append((states, rows, bags, versions))
        return parts

    def _parts(self) -> list[GradientPart]:
        return [part for _, parts in self._pooled for part in parts]

    def _sources(self) -> dict[tuple[int, int], tuple[Computed, tf.Tensor]]:
        """What is differentiated on the server: results, and their gradients, each once."""
        sources = [part.source for part in self._parts() if part.source is not None]
        return {(id(c), id(gradient)): (c, gradient) for c, gradient, _ in sources}

    def _sent_gradients(self) -> list[tf.Tensor]:
        """Flattened gradients of pooled vectors, and of what was computed from others."""
        sent = [part.values for part in self._parts() if part.source is None]
        sent += [gradient for _, gradient in self._sources().values()]
        return [tf.cast(gradient, tf.float32) for gradient in sent]

    def _pooled_gradients(self, sent: tf.Tensor) -> tf.Tensor:
        """The gradients of all pooled vectors, of what `_sent_gradients` sent; on the server."""
        sources = self._sources()
        if not sources:
            return sent
        direct = [part for part in self._parts() if part.source is None]
        sizes = [self._pull.sizes[part.lookup.number] for part in direct]
        sizes += [tf.size(computed.result, out_type=tf.int64) for computed, _ in sources.values()]
        pieces = cut(sent, sizes, len(sizes))
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

    def _split(self, floats: tf.Tensor) -> list[tf.Tensor]:
        """The learning rate, and the gradients of dense variables, rows, and pooled vectors."""
        dense = sum(state.variable.shape.num_elements() for state, _ in self._dense)
        rows: int | tf.Tensor = 0
        if self._rows:
            widths = [state.width for state, _, _, _ in self._rows]
            rows = tf.reduce_sum(self._row_bags.counts * tf.constant(widths, tf.int64))
        return ops.unpack(floats, [[1], [dense], [rows], [-1]])
