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
        self._delay: tf.Operation | None = None
        self._pushed: set[int] = set()
        # Versions of tables whose gradients have every row once (for clipping).
        self._summed: dict[int, tf.Tensor] = {}
        self._tables = {
            id(s.variable): PulledTable(
                s, pull_rows, whole=lookups.whole is None or i in lookups.whole
            )
            for i, s in enumerate(layout.tables)
        }
        ids: list[tf.Tensor] = []
        if lookups.tables:
            ids = lookups.ids(*tf.nest.flatten(batch, expand_composites=True))
        states = [layout.tables[i] for i in lookups.tables]
        pulled, rows = self._pull(states, [tf.cast(tf.reshape(i, [-1]), tf.int64) for i in ids])
        # In the order of the step's lookups, whatever the servers are.
        for state, row in zip(states, rows, strict=True):
            self._tables[id(state.variable)].prefetched(*row)
        self._shared = [pulled[id(v)] for v in layout.shared]
        self._scope = PulledScope(
            dense=[
                (s.variable, pulled[id(s.variable)])
                for dense in layout.dense.values()
                for s in dense
            ],
            tables=[(s.variable, self._tables[id(s.variable)]) for s in layout.tables],
            others=[
                *zip(layout.private, private, strict=True),
                *zip(layout.shared, self._shared, strict=True),
                *((v, pulled[id(v)]) for o in layout.optimizers for v in schedule_variables(o)),
            ],
        )

    def _pull(
        self, tables: list[base.VariableState], ids: list[tf.Tensor]
    ) -> tuple[dict[int, tf.Tensor], list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]]:
        """Pulls all that the step reads, in one message there and back for each server.

        Args:
            tables: the table of each lookup.
            ids: int64 [n_i], the rows of each lookup.

        Returns:
            The values of variables, by the variables' ids; and for each lookup
            (ids, values [n_i, ...], versions [n_i]).
        """
        plans: dict[str, PullPlan] = {}

        def plan_of(variable: keras.Variable) -> PullPlan:
            return plans.setdefault(device_of(variable), PullPlan())

        for device, states in self._layout.dense.items():
            plans.setdefault(device, PullPlan()).dense.extend(states)
        unversioned = [*self._layout.shared]
        for optimizer in self._layout.optimizers:
            unversioned += schedule_variables(optimizer)
        for variable in unversioned:
            plan_of(variable).unversioned.append(variable)
        for i, state in enumerate(tables):
            plan_of(state.variable).lookups.append((i, state, ids[i]))
        values: dict[int, tf.Tensor] = {}
        rows: list = [None] * len(tables)
        for device, plan in plans.items():
            plan.pull(device, values, self._versions, rows)
        return values, rows

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
        for table in self._tables.values():
            table.check()
        for variable, old in zip(self._layout.shared, self._shared, strict=True):
            new = self._scope.get_current_value(variable)
            if new is old:
                continue
            if variable.dtype != "bool":
                # What this step added: others may have added meanwhile.
                new = tf.cast(new, old.dtype) - old
            with tf.device(device_of(variable)):
                if variable.dtype == "bool":
                    update = variable._value.assign(new, read_value=False)
                else:
                    update = variable._value.assign_add(new, read_value=False)
            self._operations.append(update)
        private = [self._scope.get_current_value(v) for v in self._layout.private]
        return private, self._operations

    # The push (see `context.Push`).

    @contextlib.contextmanager
    def pushing(self, optimizer: base.Optimizer, grads) -> Iterator[None]:
        if self._compute_time is not None and self._delay is None:
            computed = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
            with tf.control_dependencies([g for g in computed if g is not None]):
                self._delay = ops.delay(self._compute_time)
        with tf.control_dependencies([] if self._delay is None else [self._delay]):
            yield

    def sum_repeated_rows(self, grads, variables) -> list:
        summed = []
        for gradient, variable in zip(grads, variables, strict=True):
            table = self._tables.get(id(variable))
            if table is not None and gradient is not None:
                values, ids, versions = table.resolve(gradient)
                ids, positions = tf.unique(ids)
                count = tf.size(ids)
                values = tf.math.unsorted_segment_sum(values, positions, count)
                # The staleness of a row is that of its oldest pull.
                oldest = tf.math.unsorted_segment_min(versions, positions, count)
                self._summed[id(variable)] = oldest
                gradient = tf.IndexedSlices(values, ids, tf.constant(table.shape.as_list()))
            summed.append(gradient)
        return summed

    def push(self, optimizer: base.Optimizer, grads, variables, learning_rate) -> None:
        plans: dict[str, PushPlan] = {}
        for gradient, variable in zip(grads, variables, strict=True):
            state = optimizer.state_of(variable)
            self._pushed.add(id(state.variable))
            plan = plans.setdefault(device_of(state.variable), PushPlan())
            table = self._tables.get(id(state.variable))
            if table is None:
                gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                plan.dense.append((state, gradient, self._versions[id(state.variable)]))
            else:
                versions = self._summed.get(id(state.variable))
                if versions is None:
                    plan.rows.append((state, *table.resolve(gradient)))
                else:
                    plan.rows.append((state, gradient.values, gradient.indices, versions))
        arrived = {device: plan.send(device, learning_rate) for device, plan in plans.items()}
        # The owner of the global step counts the push when it has arrived there;
        # an owner without parameters counts it when it has arrived anywhere.
        owner = device_of(optimizer._iterations)
        evidence = arrived.get(owner) or next(iter(arrived.values()))
        with tf.control_dependencies([evidence.floats]), tf.device(owner):
            step = ops.next_global_step(optimizer._iterations._value.handle)
        for device, plan in plans.items():
            with tf.device(device):
                self._operations += plan.apply(optimizer, arrived[device], step)

    def decay_weights(self, variables, rate) -> None:
        for variable in variables:
            with tf.device(device_of(variable)):
                value = variable._value
                self._operations.append(
                    value.assign_sub(
                        tf.cast(rate, value.dtype) * value.read_value(), read_value=False
                    )
                )


def schedule_variables(optimizer: base.Optimizer) -> list[keras.Variable]:
    """What the learning rate of a step is computed from.

    The learning rate's own variable or, with a schedule, the global step: as
    pulled with the parameters, so that a schedule costs no round trip.
    """
    if isinstance(optimizer._learning_rate, keras.Variable):
        return [optimizer._learning_rate]
    return [optimizer._iterations]


class PullPlan:
    """What one server is asked for, and how its answer is taken apart."""

    def __init__(self):
        self.dense: list[base.VariableState] = []
        self.unversioned: list[keras.Variable] = []
        self.lookups: list[tuple[int, base.VariableState, tf.Tensor]] = []

    def pull(self, device: str, values: dict, versions: dict, rows: list) -> None:
        """Adds what was pulled to `values` and `versions` (by id) and `rows`."""
        floats: list[tf.Tensor] = []
        integers: list[tf.Tensor] = []
        tables = [state for _, state, _ in self.lookups]
        ids = [i for _, _, i in self.lookups]
        if self.lookups:
            counts = tf.stack([tf.size(i, out_type=tf.int64) for i in ids])
            request = tf.concat([counts, *ids], 0)
        others = [v for v in self.unversioned if v.dtype != "float32"]
        scalars = [v for v in self.unversioned if v.dtype == "float32"]
        with tf.device(device):
            if self.dense:
                packed, pulled = ops.pull_dense(
                    base.handles([s.variable for s in self.dense]),
                    base.handles([s.versions for s in self.dense]),
                )
                floats.append(packed)
                integers.append(pulled)
            floats += [tf.reshape(v._value.read_value(), [-1]) for v in scalars]
            if self.lookups:
                request = tf.identity(request)
                packed, pulled = ops.gather_rows(
                    base.handles([s.variable for s in tables]),
                    base.handles([s.versions for s in tables]),
                    request[len(ids) :],
                    request[: len(ids)],
                )
                floats.append(packed)
                integers.append(pulled)
            float_message = tf.concat(floats, 0) if floats else None
            integer_message = tf.concat(integers, 0) if integers else None
            direct = [v._value.read_value() for v in others]
        values.update((id(v), tf.identity(t)) for v, t in zip(others, direct, strict=True))
        # What follows runs on the worker.
        shapes = [tuple(s.variable.shape) for s in self.dense] + [tuple(v.shape) for v in scalars]
        shapes += [tuple(s.variable.shape[1:]) for s in tables]
        sizes: list = [tf.TensorShape(shape).num_elements() for shape in shapes]
        first = len(self.dense) + len(scalars)
        if ids:
            sizes[first:] = tf.unstack(counts * tf.constant(sizes[first:], tf.int64))
        pieces = (
            []
            if float_message is None
            else tf.split(
                float_message, tf.stack([tf.cast(s, tf.int64) for s in sizes]), num=len(sizes)
            )
        )
        fixed = [s.variable for s in self.dense] + scalars
        for variable, piece in zip(fixed, pieces, strict=False):
            values[id(variable)] = tf.reshape(piece, tuple(variable.shape))
        for i, state in enumerate(self.dense):
            versions[id(state.variable)] = integer_message[i]
        if ids:
            row_versions = tf.split(integer_message[len(self.dense) :], counts, num=len(ids))
            for j, (number, state, looked_up) in enumerate(self.lookups):
                shape = tuple(state.variable.shape[1:])
                rows[number] = (
                    looked_up,
                    tf.reshape(pieces[first + j], [-1, *shape]),
                    row_versions[j],
                )


@dataclasses.dataclass(frozen=True)
class Message:
    """A push as it arrives at a server."""

    floats: tf.Tensor  # the learning rate, then gradients: dense, then rows
    integers: tf.Tensor  # versions of dense variables, counts of rows, row ids, row versions


class PushPlan:
    """What is sent to one server, and how it is taken apart and applied there."""

    def __init__(self):
        self.dense: list[tuple[base.VariableState, tf.Tensor, tf.Tensor]] = []
        self.rows: list[tuple[base.VariableState, tf.Tensor, tf.Tensor, tf.Tensor]] = []

    def send(self, device: str, learning_rate) -> Message:
        """Packs the push on the worker and sends it to the server."""
        floats = [tf.reshape(tf.cast(learning_rate, tf.float32), [1])]
        floats += [tf.reshape(gradient, [-1]) for _, gradient, _ in self.dense]
        floats += [tf.reshape(tf.cast(values, tf.float32), [-1]) for _, values, _, _ in self.rows]
        integers = [tf.reshape(version, [1]) for _, _, version in self.dense]
        integers += [tf.size(ids, out_type=tf.int64)[tf.newaxis] for _, _, ids, _ in self.rows]
        integers += [ids for _, _, ids, _ in self.rows]
        integers += [versions for _, _, _, versions in self.rows]
        packed = tf.concat(floats, 0), tf.concat(integers, 0)
        with tf.device(device):
            return Message(tf.identity(packed[0]), tf.identity(packed[1]))

    def apply(self, optimizer: base.Optimizer, message: Message, step) -> list[tf.Operation]:
        """Applies the push; call it under the server's device scope."""
        operations = []
        learning_rate = message.floats[0]
        dense_size = 1 + sum(s.variable.shape.num_elements() for s, _, _ in self.dense)
        n, m = len(self.dense), len(self.rows)
        if self.dense:
            operations.append(
                optimizer.apply_dense(
                    [state for state, _, _ in self.dense],
                    message.floats[1:dense_size],
                    message.integers[:n],
                    learning_rate,
                    step,
                )
            )
        if self.rows:
            ids, versions = tf.split(message.integers[n + m :], 2)
            operations.append(
                optimizer.apply_rows(
                    [state for state, _, _, _ in self.rows],
                    message.floats[dense_size:],
                    ids,
                    message.integers[n : n + m],
                    versions,
                    learning_rate,
                    step,
                )
            )
        return operations


def pull_rows(state: base.VariableState, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Pulls rows of one table by themselves: (values [n, ...], versions [n]).

    Args:
        state: the table's state.
        ids: int64 [n].
    """
    plan = PullPlan()
    plan.lookups.append((0, state, ids))
    rows: list = [None]
    plan.pull(device_of(state.variable), {}, {}, rows)
    return rows[0][1:]
