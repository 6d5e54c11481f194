"""Pull, compute, push: a worker's step against parameter servers.

The step's parameters are read together with their versions, packed into one
tensor per server; the gradients go back packed, with those versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.optimizers import base
from tf_recsync.synchronization import context
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
        compute_time: artificial compute time in seconds to add before the push,
            or None.
    """

    def __init__(self, layout: Layout, private: Sequence[tf.Tensor], compute_time=None):
        self._layout = layout
        self._compute_time = compute_time
        self._versions: dict[int, tf.Tensor] = {}
        self._tables: dict[int, PulledTable] = {}
        self._operations: list[tf.Operation] = []
        self._step: tf.Tensor | None = None
        self._delay: tf.Operation | None = None
        self._pushed: set[int] = set()
        dense = self._pull_dense()
        for state in layout.tables:
            table = PulledTable(state, device_of(state.variable))
            self._tables[id(state.variable)] = table
        self._shared = []
        for variable in layout.shared:
            with tf.device(device_of(variable)):
                self._shared.append(variable._value.read_value())
        self._shared = [tf.identity(value) for value in self._shared]
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
        for gradient, variable in zip(grads, variables, strict=True):
            state = optimizer.state_of(variable)
            self._pushed.add(id(state.variable))
            table = self._tables.get(id(state.variable))
            if table is None:
                gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                dense.setdefault(device_of(state.variable), []).append((state, gradient))
                continue
            values, ids, versions = table.resolve(gradient)
            with tf.device(device_of(state.variable)):
                self._operations.append(
                    optimizer.apply_rows(state, values, ids, versions, learning_rate, self._step)
                )
        for device, pairs in dense.items():
            packed = tf.concat([tf.reshape(gradient, [-1]) for _, gradient in pairs], 0)
            versions = tf.stack([self._versions[id(s.variable)] for s, _ in pairs])
            with tf.device(device):
                self._operations.append(
                    optimizer.apply_dense(
                        [s for s, _ in pairs], packed, versions, learning_rate, self._step
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
