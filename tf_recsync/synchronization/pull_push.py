"""Pull, compute, push: a worker's step against parameter servers.

The step's parameters are read together with their versions, packed into one
tensor per server; the gradients go back packed, with those versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.optimizers import base
from tf_recsync.synchronization import context
from tf_recsync.synchronization.lookups import Lookups
from tf_recsync.synchronization.pulled import PulledScope, PulledTable


def device_of(variable: keras.Variable) -> str:
    """The device that holds a variable, whatever scope Keras is in."""
    return variable._value.device


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which variables of a model a worker pulls, pushes, shares or keeps.

    Attributes:
        optimizers: the optimizers of this package that the model trains with.
        dense: states of dense trainable variables, by the server's device.
        tables: states of embedding tables.
        shared: non-trainable variables with one copy on a server; a step reads
            them and sends what it added.
        private: non-trainable variables of which every worker has its own copy
            (metrics, and seeds, which must differ between workers).
    """

    optimizers: tuple[base.Optimizer, ...]
    dense: dict[str, list[base.VariableState]]
    tables: list[base.VariableState]
    shared: list[keras.Variable]
    private: list[keras.Variable]

    @classmethod
    def of(cls, model: keras.Model, optimizers: Sequence[base.Optimizer]) -> Layout:
        """The layout of a built model.

        Args:
            model: a model whose variables exist.
            optimizers: its optimizers; none of them for a model that only
                predicts: then all its variables count as dense or shared.
        """
        states = {id(s.variable): s for o in optimizers for s in o.states}
        dense: dict[str, list[base.VariableState]] = {}
        tables = []
        shared = []
        private = list(model.metrics_variables)
        for variable in model.variables:
            state = states.get(id(variable))
            if state is None:
                seed = variable.path.endswith("seed_generator_state")
                (private if seed else shared).append(variable)
            elif variable.dtype != "float32":
                raise ValueError(
                    f"trainable variables must be float32 under a parameter-server strategy, "
                    f"{variable.path} is {variable.dtype}"
                )
            elif state.is_table:
                tables.append(state)
            else:
                dense.setdefault(device_of(variable), []).append(state)
        known = {id(v) for v in private}
        shared = [v for v in shared if id(v) not in known]
        return cls(tuple(optimizers), dense, tables, shared, private)


class Step:
    """One worker's step, while it is traced: the scope to compute in, and the push.

    Args:
        layout: the model's layout.
        private: the values of `layout.private` on this worker.
        lookups: the lookups to pull at the start.
        batch: the step's batch.
        compute_time: artificial compute time in seconds to add before the push,
            or None.
    """

    is_dry = False

    def __init__(
        self,
        layout: Layout,
        private: Sequence[tf.Tensor],
        lookups: Lookups,
        batch: Any,
        compute_time: float | None = None,
    ):
        self._layout = layout
        self._compute_time = compute_time
        self._versions: dict[int, tf.Tensor] = {}
        self._operations: list[tf.Operation] = []
        self._step: tf.Tensor | None = None
        self._delay: tf.Operation | None = None
        self._pushed: set[int] = set()
        dense = self._pull_dense()
        self._tables = {id(s.variable): PulledTable(s, pull_rows) for s in layout.tables}
        self._prefetch(lookups, batch)
        self._shared = []
        for variable in layout.shared:
            with tf.device(device_of(variable)):
                value = variable._value.read_value()
            self._shared.append(tf.identity(value))
        rates = [
            (o._learning_rate, o._learning_rate._value.read_value())
            for o in layout.optimizers
            if isinstance(o._learning_rate, keras.Variable)
        ]
        self._scope = PulledScope(
            dense=dense,
            tables=[(s.variable, self._tables[id(s.variable)]) for s in layout.tables],
            others=[
                *zip(layout.private, private, strict=True),
                *zip(layout.shared, self._shared, strict=True),
                *rates,
            ],
        )

    def _prefetch(self, lookups: Lookups, batch: Any) -> None:
        """Pulls the rows of all lookups, in one message from each server."""
        if not lookups.tables:
            return
        all_ids = lookups.ids(*tf.nest.flatten(batch, expand_composites=True))
        states = [self._layout.tables[i] for i in lookups.tables]
        all_ids = [tf.cast(tf.reshape(ids, [-1]), tf.int64) for ids in all_ids]
        by_device: dict[str, list[int]] = {}
        for i, state in enumerate(states):
            by_device.setdefault(device_of(state.variable), []).append(i)
        pulled: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        for chosen in by_device.values():
            parts = pull_tables([states[i] for i in chosen], [all_ids[i] for i in chosen])
            pulled.update(zip(chosen, parts, strict=True))
        # In the order of the step's lookups, whatever the servers are.
        for i, state in enumerate(states):
            self._tables[id(state.variable)].prefetched(all_ids[i], *pulled[i])

    def _pull_dense(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        pulled = []
        for device, states in self._layout.dense.items():
            with tf.device(device):
                packed, versions = ops.pull_dense(
                    base.handles([s.variable for s in states]),
                    base.handles([s.versions for s in states]),
                )
            shapes = [tuple(s.variable.shape) for s in states]
            sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
            pieces = tf.split(packed, sizes)
            for i, (state, piece) in enumerate(zip(states, pieces, strict=True)):
                pulled.append((state.variable, tf.reshape(piece, shapes[i])))
                self._versions[id(state.variable)] = versions[i]
        return pulled

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the model computes on what was pulled, and applying is pushing."""
        with context.pushing(self), self._scope:
            yield

    @property
    def pushed(self) -> bool:
        """Whether an optimizer has pushed gradients."""
        return bool(self._pushed)

    def finish(self) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """What the worker keeps (new values of `layout.private`), and the pushes."""
        for variable, old in zip(self._layout.shared, self._shared, strict=True):
            new = self._scope.get_current_value(variable)
            if new is old:
                continue
            with tf.device(device_of(variable)):
                if variable.dtype == "bool":
                    update = variable._value.assign(new, read_value=False)
                else:
                    # What this step added: others may have added meanwhile.
                    update = variable._value.assign_add(
                        tf.cast(new, old.dtype) - old, read_value=False
                    )
            self._operations.append(update)
        private = [self._scope.get_current_value(v) for v in self._layout.private]
        return private, self._operations

    # The push (see `context.Push`).

    @contextlib.contextmanager
    def global_step(self, optimizer: base.Optimizer, grads) -> Iterator[None]:
        computed = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        computed = [g for g in computed if g is not None]
        if self._compute_time is not None and self._delay is None:
            with tf.control_dependencies(computed):
                self._delay = ops.delay(self._compute_time)
        if self._delay is not None:
            computed.append(self._delay)
        iterations = optimizer._iterations
        with tf.control_dependencies(computed), tf.device(device_of(iterations)):
            step = ops.next_global_step(iterations._value.handle)
        # Keras counts iterations from 0, before the update.
        self._scope.state_mapping[id(iterations)] = step - 1
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def push(self, optimizer: base.Optimizer, grads, variables, learning_rate) -> None:
        learning_rate = tf.cast(learning_rate, tf.float32)
        dense: dict[str, list[tuple[base.VariableState, tf.Tensor]]] = {}
        rows: dict[str, list[tuple[base.VariableState, tuple]]] = {}
        for gradient, variable in zip(grads, variables, strict=True):
            state = optimizer.state_of(variable)
            self._pushed.add(id(state.variable))
            device = device_of(state.variable)
            table = self._tables.get(id(state.variable))
            if table is None:
                gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                dense.setdefault(device, []).append((state, gradient))
            else:
                rows.setdefault(device, []).append((state, table.resolve(gradient)))
        for device, pairs in dense.items():
            packed = tf.concat([tf.reshape(gradient, [-1]) for _, gradient in pairs], 0)
            versions = tf.stack([self._versions[id(s.variable)] for s, _ in pairs])
            with tf.device(device):
                self._operations.append(
                    optimizer.apply_dense(
                        [s for s, _ in pairs], packed, versions, learning_rate, self._step
                    )
                )
        for device, pairs in rows.items():
            values, ids, versions = zip(*(part for _, part in pairs), strict=True)
            packed = tf.concat([tf.reshape(v, [-1]) for v in values], 0)
            counts = tf.stack([tf.size(i, out_type=tf.int64) for i in ids])
            ids, versions = tf.concat(ids, 0), tf.concat(versions, 0)
            with tf.device(device):
                self._operations.append(
                    optimizer.apply_rows(
                        [s for s, _ in pairs], packed, ids, counts, versions, learning_rate,
                        self._step,
                    )
                )

    def decay_weights(self, variables, rate) -> None:
        for variable in variables:
            with tf.device(device_of(variable)):
                value = variable._value
                self._operations.append(
                    value.assign_sub(
                        tf.cast(rate, value.dtype) * value.read_value(), read_value=False
                    )
                )


def pull_rows(state: base.VariableState, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Pulls rows of one table: (values [n, ...], versions [n]).

    Args:
        state: the table's state.
        ids: int64 [n].
    """
    return pull_tables([state], [ids])[0]


def pull_tables(
    states: Sequence[base.VariableState], ids: Sequence[tf.Tensor]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Pulls rows of tables on one server, in one message there and back.

    Args:
        states: the tables' states; a table may stand here more than once.
        ids: int64 [n_i] for each.

    Returns:
        (values [n_i, ...], versions [n_i]) for each.
    """
    counts = tf.stack([tf.size(i, out_type=tf.int64) for i in ids])
    with tf.device(device_of(states[0].variable)):
        packed, versions = ops.gather_rows(
            base.handles([s.variable for s in states]),
            base.handles([s.versions for s in states]),
            tf.concat(ids, 0),
            counts,
        )
    shapes = [tuple(s.variable.shape[1:]) for s in states]
    widths = tf.constant([tf.TensorShape(shape).num_elements() for shape in shapes], tf.int64)
    values = tf.split(packed, counts * widths, num=len(states))
    versions = tf.split(versions, counts, num=len(states))
    return [
        (tf.reshape(value, [-1, *shape]), version)
        for value, shape, version in zip(values, shapes, versions, strict=True)
    ]
