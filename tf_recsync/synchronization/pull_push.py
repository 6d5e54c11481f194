"""Pull, compute, push: a worker's step against parameter servers.

The step's parameters are read together with their versions, packed into one
tensor per server; the gradients go back packed, with those versions.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.embedding.keys import has_row
from tf_recsync.ops.bags import Bags, Request
from tf_recsync.ops.tokens import Token
from tf_recsync.optimizers import base
from tf_recsync.placement import flops
from tf_recsync.synchronization import context, speeds
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.at_once import AT_ONCE, AtOnce
from tf_recsync.synchronization.batches import tensors_of
from tf_recsync.synchronization.copies import device_for
from tf_recsync.synchronization.lookups import Lookups
from tf_recsync.synchronization.placed import NO_LAYERS, Placed, PlacedLayers
from tf_recsync.synchronization.pull_plan import PullPlan
from tf_recsync.synchronization.pulled import PulledLookup, PulledRequest, PulledScope, PulledTable
from tf_recsync.synchronization.push_plan import PushPlan
from tf_recsync.synchronization.seeds import drawing_from, is_seed


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which variables of a model a worker pulls, pushes, shares or keeps.

    Attributes:
        optimizers: the optimizers of this package that the model trains with.
        dense: states of dense trainable variables, pieces in place of those that are divided.
        tables: states of embedding tables.
        shared: non-trainable variables with one copy on a server; a step reads
            them and sends what it added.
        private: non-trainable variables of which every worker has its own copy
            (metrics, and seeds, which must differ between workers).
        group: whose trainers' steps they are; None where no variable is copied.
        placed: the layers that run on the servers of their weights.
        unseeded: from what steps draw that have no seed; its state is private. None: from
            Keras's own generator.
        unread: counts the steps of an optimizer that has those as its parts.
        shards: of what groups have copies of, as `Copies.shards`.
    """

    optimizers: tuple[base.Optimizer, ...]
    dense: list[base.VariableState]
    tables: list[base.VariableState]
    shared: list[keras.Variable]
    private: list[keras.Variable]
    group: Group | None = None
    placed: PlacedLayers = NO_LAYERS
    unseeded: keras.random.SeedGenerator | None = None
    unread: tuple[keras.Variable, ...] = ()
    shards: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def device(self, variable: keras.Variable) -> str:
        """The device that holds a variable; "" for where the step runs."""
        return device_for(variable, self.group, self.shards)

    @property
    def dense_variables(self) -> list[keras.Variable]:
        """The model's dense trainable variables, those included of which servers have pieces."""
        divided = self.placed.divided_variables
        pieces = {state for variable in divided for state in variable.states}
        others = [state.variable for state in self.dense if state not in pieces]
        return [*(variable.whole for variable in divided), *others]

    def states_of(self, optimizer: base.Optimizer) -> list[base.VariableState]:
        """Of what one of the optimizers trains, or of its pieces."""
        divided = self.placed.divided_states
        return [s for whole in optimizer.states for s in divided.get(id(whole.variable), [whole])]

    @property
    def owner(self) -> str:
        """The device that counts global steps; "" if that is where the step runs, or nobody."""
        return self.device(self.optimizers[0]._iterations) if self.optimizers else ""

    @classmethod
    def of(
        cls,
        model: keras.Model,
        optimizers: Sequence[base.Optimizer],
        group: Group | None = None,
        placed: PlacedLayers = NO_LAYERS,
        logged: Sequence[keras.Variable] = (),
        unseeded: keras.random.SeedGenerator | None = None,
        shards: Mapping[int, int] | None = None,
    ) -> Layout:
        """The layout of a built model.

        Args:
            model: a model whose variables exist.
            optimizers: its optimizers; none of them for a model that only
                predicts: then all its variables count as dense or shared.
            group: see above, like the next one.
            placed: see above.
            logged: variables that steps assign for the worker besides metrics.
            unseeded: see above.
            shards: see above; none by default.
        """
        shards = shards or {}
        states = {id(s.variable): s for o in optimizers for s in o.states}
        divided = placed.divided_states
        dense, tables, shared = [], [], []
        private = [*model.metrics_variables, *logged]
        for variable in model.variables:
            state = states.get(id(variable))
            if hasattr(variable, "beside_table"):
                continue  # Servers alone use it.
            if state is None and hasattr(variable, "keyed"):
                raise ValueError(
                    f"{variable.path}: a table with keys='any' must be trained by the model's "
                    "optimizer under this strategy: compile it, and leave the layer trainable"
                )
            if state is None:
                (private if is_seed(variable) else shared).append(variable)
            elif variable.dtype not in ("float32", "bfloat16" if state.is_table else "float32"):
                raise ValueError(
                    "trainable variables must be float32 under a parameter-server strategy, and "
                    f"tables float32 or bfloat16; {variable.path} is {variable.dtype}"
                )
            elif state.is_table:
                tables.append(state)
            else:
                dense += divided.get(id(variable), [state])
        private += [] if unseeded is None else [unseeded.state]
        known = {id(v) for v in private}
        shared = [v for v in shared if id(v) not in known]
        optimizers = tuple(optimizers)
        whole = getattr(model, "optimizer", None)
        is_divided = bool(optimizers) and all(whole is not part for part in optimizers)
        unread = (whole._iterations,) if is_divided else ()
        return cls(
            optimizers, dense, tables, shared, private, group, placed, unseeded, unread, shards
        )


def pull_ahead(layout: Layout, lookups: Lookups, batch: Any) -> dict[str, PullPlan]:
    """Pulls the lookups of a step before the step begins, while it is traced.

    Args:
        layout: the model's layout.
        lookups: the lookups of a step.
        batch: the step's batch.

    Returns:
        What was pulled, by the server's device.
    """
    plans = _plan_lookups(layout, lookups, batch)
    for device, plan in plans.items():
        plan.pull_rows(device)
    return plans


def _plan_lookups(layout: Layout, lookups: Lookups, batch: Any) -> dict[str, PullPlan]:
    """What a batch's lookups ask each server for."""
    plans: dict[str, PullPlan] = collections.defaultdict(
        functools.partial(PullPlan, lookups.inserts)
    )
    requests = lookups.requests(*tensors_of(batch))
    for i, (tables, request) in enumerate(zip(lookups.tables, requests, strict=True)):
        states = [layout.tables[table] for table in tables]
        plans[layout.device(states[0].variable)].look_up(i, states, request)
    return plans


class Step:
    """One worker's step, while it is traced: the scope to compute in, and the push.

    Args:
        layout: the model's layout.
        private: the values of `layout.private` on this worker.
        lookups: the lookups to pull at the start.
        batch: the step's batch.
        worker: the worker's index, an int64 scalar on the worker.
        aggregation: where the step gets its token, and what collects its pushes; by default
            the servers apply each push at once.
        ahead: the step's lookups if they were pulled already (`pull_ahead`), else None.
        before: what must have happened on a server before the step pulls from it, by
            the server's device.
        hogwild: whether pushes to dense variables are applied side by side, without locks.

    Attributes:
        private: the values of `layout.private`.
        placed: what runs on the servers that hold its weights.
    """

    is_dry = False

    def __init__(
        self,
        layout: Layout,
        private: Sequence[tf.Tensor],
        lookups: Lookups,
        batch: Any,
        worker: tf.Tensor,
        aggregation: AtOnce = AT_ONCE,
        ahead: dict[str, PullPlan] | None = None,
        before: Mapping[str, Sequence[tf.Operation]] | None = None,
        hogwild: bool = False,
    ):
        self._layout = layout
        self._aggregation = aggregation
        self._before = before or {}
        self._hogwild = hogwild
        self._inserts = lookups.inserts
        self._reached: dict[str, Token] = {}  # The token, on each server.
        self._pulled_steps: dict[int, tf.Tensor] = {}  # By the buffer's number.
        self.worker = worker
        self._batch = tensors_of(batch)
        self._made = 0  # Operations of the graph when the model begins to compute.
        self.private = list(private)
        # By the server's device.
        self._pushes: dict[base.Optimizer, dict[str, PushPlan]] = {}
        self._decayed: set[int] = set()  # Ids of variables whose weights decay with a push.
        # Versions of tables whose gradients have every row once (for clipping).
        self._summed: dict[int, tf.Tensor] = {}
        self._tables: dict[int, PulledTable] = {}
        for i, state in enumerate(layout.tables):
            is_whole = lookups.whole is None or i in lookups.whole
            pull_whole = self._pull_whole if is_whole else None
            self._tables[id(state.variable)] = PulledTable(state, self._pull_request, pull_whole)
        trained = [state.variable for state in layout.dense]
        variables = [*trained, *layout.shared]
        self.placed = Placed(layout.placed, variables, layout.dense, self._after, batch, worker)
        pulled, found = self._pull(lookups, batch, ahead)
        for i, request in found.items():
            first = layout.tables[lookups.tables[i][0]]
            self._tables[id(first.variable)].prefetched(request)
        self._shared = [(v, pulled[id(v)]) for v in layout.shared if id(v) in pulled]
        self._scope = PulledScope(
            dense=[(v, pulled[id(v)]) for v in trained if id(v) in pulled],
            tables=self._tables.values(),
            others=[
                *zip(layout.private, private, strict=True),
                *self._shared,
                *((v, pulled[id(v)]) for v in map(schedule_variable, layout.optimizers)),
                *((o._iterations, pulled[id(o._iterations)]) for o in layout.optimizers),
            ],
            late=[*self.placed.variables, *self.placed.wholes],
            trained=[*self.placed.trained, *self.placed.wholes],
            read=self.placed.read,
            unread=layout.unread,
        )

    def _pull(
        self, lookups: Lookups, batch: Any, ahead: dict[str, PullPlan] | None
    ) -> tuple[dict[int, tf.Tensor], dict[int, PulledRequest]]:
        """Pulls all that the step reads, in one message there and back for each server.

        Returns:
            The values of variables, by the variables' ids; and the answers to
            `lookups`, by their numbers.
        """
        plans = _plan_lookups(self._layout, lookups, batch) if ahead is None else ahead
        self._pulls = plans  # By the server's device.
        is_placed = self._layout.placed.devices.__contains__
        for state in self._layout.dense:
            if not is_placed(id(state.variable)):
                plans[self._layout.device(state.variable)].dense.append(state)
        unversioned = [v for v in self._layout.shared if not is_placed(id(v))]
        for variable in [*unversioned, *map(schedule_variable, self._layout.optimizers)]:
            plans[self._layout.device(variable)].unversioned.append(variable)
        values: dict[int, tf.Tensor] = {}
        found: dict[int, PulledRequest] = {}
        self._start(plans)
        for device, plan in plans.items():
            plan.pull(device, [*self._after(device), *self._before.get(device, [])])
            values |= plan.values
            found |= plan.found
        for variable in [optimizer._iterations for optimizer in self._layout.optimizers]:
            if id(variable) not in values:
                # It travels only if the step uses it.
                with tf.control_dependencies(None), tf.device(self._layout.device(variable)):
                    values[id(variable)] = variable._value.read_value()
        return values, dict(sorted(found.items()))

    @property
    def arrived(self) -> dict[str, tf.Tensor]:
        """What is on the worker when a server has answered the pull, by the server's device."""
        pulls = {device: pull.arrived for device, pull in self._pulls.items()}
        return {device: tensor for device, tensor in pulls.items() if tensor is not None}

    @property
    def token(self) -> tf.Tensor | None:
        """The step's token, on a server that has got it; None if it takes none."""
        return next((token.value for token in self._reached.values()), None)

    def _start(self, devices: Iterable[str]) -> None:
        """Takes the step's token, and notes how far the servers are before it pulls."""
        aggregation = self._aggregation
        tables = [self._layout.device(state.variable) for state in self._layout.tables]
        self._reached = aggregation.start(self.worker, {*devices, *tables, *aggregation.devices})
        for device, token in self._reached.items():
            with tf.control_dependencies(None), tf.control_dependencies([token.value]):
                for buffer in aggregation.buffers_of(device):
                    self._pulled_steps[buffer.number] = buffer.step().applied

    def _after(self, device: str) -> list[tf.Tensor]:
        """What pulls from a server must wait for there: the step's token, if it takes one, and
        until it is noted how far the server is."""
        if device not in self._reached:
            return []
        buffers = self._aggregation.buffers_of(device)
        noted = [self._pulled_steps[buffer.number] for buffer in buffers]  # With the token.
        return noted or [self._reached[device].value]

    def _pull_request(self, states: list[base.VariableState], request: Request) -> PulledRequest:
        """Pulls what one request needs by itself."""
        plan = PullPlan(self._inserts)
        plan.look_up(0, states, request)
        device = self._layout.device(states[0].variable)
        plan.pull(device, self._after(device))
        # Not to be pushed in place: the step's own pull is another message.
        own = [dataclasses.replace(lookup, message=None) for lookup in plan.found[0].lookups]
        return dataclasses.replace(plan.found[0], lookups=own)

    def _pull_whole(self, state: base.VariableState) -> PulledLookup:
        """Pulls all rows of a table."""
        device, shape = self._layout.device(state.variable), state.variable.shape
        (table,), (versions,) = base.read_handles([state])
        decays = base.log_decays_of([state])
        with tf.control_dependencies(self._after(device)), tf.device(device):
            values, pulled = ops.pull_table(table, versions, shape=shape, **decays)
        bags = Bags(tf.range(shape[0], dtype=tf.int64))
        return PulledLookup(bags, values, lambda: tf.identity(pulled), is_whole=True)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the model computes on what was pulled, and applying is pushing."""
        self._made = len(tf.compat.v1.get_default_graph().get_operations())
        unseeded = drawing_from(self._layout.unseeded)
        with context.pushing(self), self._scope, unseeded, self.placed.running():
            yield

    def is_assigned(self, variable: keras.Variable) -> bool:
        """Whether the model has assigned one of the variables that the worker keeps for itself."""
        kept = zip(self._layout.private, self.private, strict=True)
        old = next((value for one, value in kept if one is variable), None)
        return old is not None and self._scope.get_current_value(variable) is not old

    @property
    def pushed(self) -> bool:
        """Whether an optimizer has pushed gradients."""
        return bool(self._pushes)

    @property
    def computed(self) -> list[tf.Tensor]:
        """What a finished step sends to servers, on the worker."""
        return [tensor for plan in self._push_plans for tensor in plan.packed]

    @property
    def _push_plans(self) -> list[PushPlan]:
        return [plan for plans in self._pushes.values() for plan in plans.values()]

    def finish(
        self, compute_time: tf.Tensor | None = None
    ) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """Has the step end with its pushes.

        Args:
            compute_time: artificial compute time to add before the push, in seconds, a
                float32 scalar; or None.

        Returns:
            What the worker keeps (new values of `layout.private`), and the operations that
            are the step's end.
        """
        for table in self._tables.values():
            table.check()
        self._spend_time()
        if compute_time is not None and self._pushes:
            self._delay(compute_time)
        operations: list[tf.Operation] = []
        for variable, old in [*self._shared, *self.placed.moving]:
            new = self._scope.get_current_value(variable)
            if new is old:
                continue
            # Also a constant is assigned only if there is a batch.
            with self.placed.beside(old), tf.control_dependencies([old]):
                if variable.dtype != "bool":
                    # What this step added: others may have added meanwhile.
                    new = tf.cast(new, old.dtype) - old
                new = tf.identity(new)  # Only if there is a batch.
            with tf.control_dependencies(None), tf.device(self._layout.device(variable)):
                if variable.dtype == "bool":
                    update = variable._value.assign(new, read_value=False)
                else:
                    update = variable._value.assign_add(new, read_value=False)
            operations.append(update)
        if self._pulled_steps:
            self._check_pushes()
        # Servers wait for what they are sent, and need not be told of the batch besides.
        with tf.control_dependencies(None):
            for optimizer, plans in self._pushes.items():
                arrived = {device: plan.send(device) for device, plan in plans.items()}
                operations += self._apply(optimizer, plans, arrived)
        return self.kept(), operations

    def kept(self) -> list[tf.Tensor]:
        """What the worker keeps when it has computed: new values of `layout.private`."""
        return [self._scope.get_current_value(v) for v in self._layout.private]

    def _spend_time(self) -> None:
        """Has the pushes wait until the worker, by its artificial speed, has computed its part."""
        speed = speeds.of_trainer(self.worker) if self._pushes else None
        if speed is None:
            return
        packed, kept = self.computed, self.kept()
        new = tf.compat.v1.get_default_graph().get_operations()[self._made :]
        computed = [tensor for plan in self._push_plans for tensor in plan.computed]
        made = [op for op in flops.needed(new, [*computed, *kept]) if not op.device]
        used = {tensor.op.name for op in made for tensor in op.inputs}
        # All that it computes; what a layer on a server gets may not be part of a push.
        with tf.control_dependencies([op for op in made if op.name not in used]):
            done = iter(speeds.computed(packed, made, speed, self._batch))
        for plan in self._push_plans:
            plan.packed = [next(done) for _ in plan.packed]

    def _delay(self, seconds: float) -> None:
        """Has the pushes wait after they are computed."""
        computed = [tensor for plan in self._push_plans for tensor in plan.computed]
        with tf.control_dependencies(computed):
            delay = ops.delay(seconds)
        with tf.control_dependencies([delay]):
            for plan in self._push_plans:
                plan.packed = [tf.identity(tensor) for tensor in plan.packed]

    def _apply(self, optimizer, plans: dict[str, PushPlan], arrived) -> list[tf.Operation]:
        """Applies pushes that `arrived` on the servers."""
        if self._pulled_steps:
            return self._collect(optimizer, plans)
        # The owner of the global step counts the push when it has arrived there;
        # an owner without parameters counts it when it has arrived anywhere.
        owner = self._layout.device(optimizer._iterations)
        evidence = arrived.get(owner, next(iter(arrived.values())))
        with tf.control_dependencies([evidence]), tf.device(owner):
            step = ops.next_global_step(optimizer._iterations._value.handle)
        operations = [step.op]
        for device, plan in plans.items():
            with tf.device(device):
                # Where nobody asks for it, nobody waits for its owner.
                number = step if optimizer.uses_global_step else tf.ones([], tf.int64)
                operations += plan.apply(optimizer, number, self._decayed, hogwild=self._hogwild)
        return operations

    def _check_pushes(self) -> None:
        """Makes sure that each buffer gets what it waits for."""
        for buffer in self._aggregation.buffers:
            optimizer, device = buffer.optimizer, buffer.device
            plan = self._pushes.get(optimizer, {}).get(device)
            got = [] if plan is None else plan.dense
            if plan is None or got != buffer.dense:
                built = [s.variable.path for s in [*buffer.dense, *buffer.tables]]
                raise ValueError(
                    f"under {self._aggregation.mode.name} training every trainable variable needs "
                    f"a gradient, in the order of the optimizer; {optimizer.name} was built with "
                    f"{built} on {device} and got gradients for the dense variables "
                    f"{[s.variable.path for s in got]}: set trainable = False for layers "
                    "that get none, then compile again, with a new optimizer"
                )

    def _collect(self, optimizer, plans: dict[str, PushPlan]) -> list[tf.Operation]:
        """Has the servers' buffers collect pushes, and apply those that complete a step."""
        aggregation, operations = self._aggregation, []
        for device, plan in plans.items():
            buffer = aggregation.buffer(device, optimizer)
            with tf.device(device):
                pulled_step = self._pulled_steps[buffer.number]
                aggregate = plan.collect(buffer, self._reached[device], pulled_step)
                rate = plan.learning_rate
            operations += aggregation.apply(buffer, aggregate, rate)
        return operations

    # The push (see `context.Push`).

    def beside(self, gradient) -> contextlib.AbstractContextManager:
        return self.placed.beside(gradient)

    def for_clipping(self, grads, variables) -> list:
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
                if table.is_keyed:
                    # What is left out is in no norm, as in one process.
                    known = has_row(oldest)
                    values, ids, oldest = (tf.boolean_mask(t, known) for t in (values, ids, oldest))
                self._summed[id(variable)] = oldest
                gradient = tf.IndexedSlices(values, ids, tf.constant(table.shape.as_list()))
            device = self.placed.device(variable)
            if device is not None and gradient is not None:
                gradient = self.placed.lying(gradient, device)
            summed.append(gradient)
        return summed

    def push(self, optimizer: base.Optimizer, grads, variables, learning_rate) -> None:
        if optimizer in self._pushes:
            raise ValueError(
                f"train_step applied gradients by {optimizer.name} more than once: a step pulls "
                "the parameters once, so that what is computed for the second time knows nothing "
                "of the first; apply the gradients of the sum of the losses, with a "
                "recsync.optimizers.MultiOptimizer if parts of the model are to learn in "
                "different ways"
            )
        plans: dict[str, PushPlan] = {}

        def plan_of(device: str) -> PushPlan:
            return plans.setdefault(device, PushPlan(self._pulls[device]))

        for gradient, variable in zip(grads, variables, strict=True):
            if self.placed.has(variable):
                for state, device, there in self.placed.gradients(variable, gradient):
                    there = tf.cast(there, tf.float32)
                    plan_of(device).add_placed(state, there, self.placed.version(state))
                continue
            state = optimizer.state_of(variable)
            plan = plan_of(self._layout.device(state.variable))
            table = self._tables.get(id(state.variable))
            if table is None:
                plan.add_dense(state, tf.cast(tf.convert_to_tensor(gradient), tf.float32))
            elif id(state.variable) in self._summed:
                versions = self._summed[id(state.variable)]
                plan.add_rows(state, gradient.values, gradient.indices, versions)
            else:
                parts = table.complete(gradient)
                if parts is None or not plan.add_lookups(state, parts):
                    plan.add_rows(state, *table.resolve(gradient))
        for plan in plans.values():
            plan.pack(learning_rate)
        self._pushes[optimizer] = plans

    def decay_weights(self, variables) -> None:
        # Where buffers collect pushes, these decay weights when they apply a step.
        divided = self._layout.placed.divided_states
        for variable in variables:
            pieces = [id(state.variable) for state in divided.get(id(variable), [])]
            self._decayed.update(pieces or [id(variable)])


def schedule_variable(optimizer: base.Optimizer) -> keras.Variable:
    """What the learning rate of a step is computed from.

    The learning rate's own variable or, with a schedule, the global step: as
    pulled with the parameters, so that a schedule costs no round trip.
    """
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.Variable) else optimizer._iterations
