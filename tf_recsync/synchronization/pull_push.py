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
from tf_recsync.ops.bags import Request
from tf_recsync.optimizers import base
from tf_recsync.synchronization import context
from tf_recsync.synchronization.lookups import Lookups
from tf_recsync.synchronization.messages import PullPlan, PushPlan, ServerPull
from tf_recsync.synchronization.pulled import PulledRequest, PulledScope, PulledTable


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
            elif variable.dtype not in ("float32", "bfloat16" if state.is_table else "float32"):
                raise ValueError(
                    "trainable variables must be float32 under a parameter-server strategy, and "
                    f"tables float32 or bfloat16; {variable.path} is {variable.dtype}"
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
        self._pulls: dict[str, ServerPull] = {}
        self._operations: list[tf.Operation] = []
        self._delay: tf.Operation | None = None
        self._pushed: set[int] = set()
        # Versions of tables whose gradients have every row once (for clipping).
        self._summed: dict[int, tf.Tensor] = {}
        self._tables = {
            id(s.variable): PulledTable(
                s, pull_request, whole=lookups.whole is None or i in lookups.whole
            )
            for i, s in enumerate(layout.tables)
        }
        requests = []
        if lookups.tables:
            requests = lookups.requests(*tf.nest.flatten(batch, expand_composites=True))
        states = [[layout.tables[i] for i in tables] for tables in lookups.tables]
        pulled, found = self._pull(states, requests)
        for tables, request in zip(states, found, strict=True):
            self._tables[id(tables[0].variable)].prefetched(request)
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
        self, tables: list[list[base.VariableState]], requests: list[Request]
    ) -> tuple[dict[int, tf.Tensor], list[PulledRequest]]:
        """Pulls all that the step reads, in one message there and back for each server.

        Args:
            tables: the tables of each request, on one server.
            requests: what is looked up in them.

        Returns:
            The values of variables, by the variables' ids; and the answers.
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
        for i, (states, request) in enumerate(zip(tables, requests, strict=True)):
            plan_of(states[0].variable).look_up(i, states, request)
        values: dict[int, tf.Tensor] = {}
        found: dict[int, PulledRequest] = {}
        for device, plan in plans.items():
            self._pulls[device] = plan.pull(device, values, found)
        return values, [found[i] for i in range(len(tables))]

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
            device = device_of(state.variable)
            if device not in plans:
                plans[device] = PushPlan(self._pulls.get(device, ServerPull(dense=[])))
            plan = plans[device]
            table = self._tables.get(id(state.variable))
            if table is None:
                plan.add_dense(state, tf.cast(tf.convert_to_tensor(gradient), tf.float32))
            elif id(state.variable) in self._summed:
                versions = self._summed[id(state.variable)]
                plan.add_rows(state, gradient.values, gradient.indices, versions)
            else:
                parts = None
                if isinstance(gradient, tf.IndexedSlices):
                    parts = table.complete(gradient)
                if parts is None or not plan.add_lookups(state, parts):
                    plan.add_rows(state, *table.resolve(gradient))
        arrived = {device: plan.send(device, learning_rate) for device, plan in plans.items()}
        # The owner of the global step counts the push when it has arrived there;
        # an owner without parameters counts it when it has arrived anywhere.
        owner = device_of(optimizer._iterations)
        evidence = arrived.get(owner, next(iter(arrived.values())))
        with tf.control_dependencies([evidence]), tf.device(owner):
            step = ops.next_global_step(optimizer._iterations._value.handle)
        self._operations.append(step.op)
        for device, plan in plans.items():
            with tf.device(device):
                # Where nobody asks for it, nobody waits for its owner.
                number = step if optimizer.uses_global_step else tf.ones([], tf.int64)
                self._operations += plan.apply(optimizer, number)

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


def pull_request(states: list[base.VariableState], request: Request) -> PulledRequest:
    """Pulls what one request needs by itself."""
    plan = PullPlan()
    plan.look_up(0, states, request)
    found: dict[int, PulledRequest] = {}
    plan.pull(device_of(states[0].variable), {}, found)
    # Not to be pushed in place: the step's own pull is another message.
    own = [dataclasses.replace(lookup, message=None) for lookup in found[0].lookups]
    return dataclasses.replace(found[0], lookups=own)
