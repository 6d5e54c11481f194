"""What Keras calls to train under a `HopStrategy`: a step with the exchange around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.ops import hop
from tf_recsync.strategies import worker_functions
from tf_recsync.strategies.model_functions import Settings
from tf_recsync.strategies.model_variables import OnWorkers, copied_variables
from tf_recsync.strategies.step_counts import DataWait, add_step, read_steps
from tf_recsync.strategies.step_events import NotedEvents
from tf_recsync.strategies.step_logs import StepLogs
from tf_recsync.strategies.train_function import TrainFunction
from tf_recsync.strategies.worker_functions import Repeated
from tf_recsync.synchronization import links
from tf_recsync.synchronization.copies import Copies, is_copied
from tf_recsync.synchronization.hop import HopSynchronizer
from tf_recsync.synchronization.hop_protocol import Protocol
from tf_recsync.synchronization.lookups import Lookups
from tf_recsync.synchronization.pull_push import Layout, Step
from tf_recsync.synchronization.pulled import unknown_assigned
from tf_recsync.synchronization.remote_functions import RemoteFunction
from tf_recsync.synchronization.remote_values import packed
from tf_recsync.synchronization.seeds import drawing_from


def exchanged(model: keras.Model) -> list[tf.Variable]:
    """The parameters that workers have copies of, which are of one type.

    Raises:
        ValueError: if they can't be averaged as one.
    """
    copied = list(filter(is_copied, model.trainable_variables))
    dtypes = {}
    for variable in copied:
        if variable.dtype not in ("float32", "float64"):
            raise ValueError(
                "trainable variables must be float32 or float64 to be averaged; "
                f"{variable.path} is {variable.dtype}"
            )
        dtypes.setdefault(variable.dtype, variable.path)
    if len(dtypes) != 1:
        raise ValueError(
            f"trainable variables must be of one type to be exchanged as one; there are {dtypes}"
            if dtypes
            else "the model has no trainable variables that workers could exchange"
        )
    return [variable._value for variable in copied]


class HopTrainFunction(TrainFunction):
    """`model.train_function` under a `HopStrategy`.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        protocol: how workers exchange.
        stall_seconds: after which somebody's wait is logged.
        read: what users see of the copies, see `Copies`.
    """

    most_unrolled = 1  # A step is on its worker alone, where a loop costs next to nothing.

    def __init__(
        self,
        model: keras.Model,
        settings: Settings,
        protocol: Protocol,
        stall_seconds: float,
        read: str | int,
    ):
        self._protocol = protocol

        def make(copies: Copies) -> HopSynchronizer:
            return HopSynchronizer(
                protocol,
                settings.cluster,
                settings.arrangement,
                copies,
                exchanged(model),
                stall_seconds,
                settings.bandwidths.copy,
                self.recordings,
            )

        super().__init__(model, settings, OnWorkers(model), make, read)

    def _collect_events(self) -> None:
        super()._collect_events()
        if self.synchronizer is not None:
            self.synchronizer.reports()

    def _trace(self, layout: Layout, element_spec, lookups, steps, compute_time) -> Repeated:
        """Traces `model.train_step` and the exchange around it, once for all workers."""
        del steps
        model = self._model
        parameters = exchanged(model)
        handles = [variable.handle for variable in parameters]
        dtype = parameters[0].dtype
        constrained = [v for v in model.trainable_variables if v.constraint is not None]
        if layout.optimizers:  # Some variables lie on servers.
            train = _with_servers(model, layout, lookups, self._step_logs)
        else:
            train = _by_itself(model, layout, self._step_logs)

        def run_step(batch, waited, worker, began, count, log, hop_handle):
            iteration = hop.next_iteration(hop_handle, handles, dtype)
            with tf.control_dependencies([iteration]):
                # What a worker sends in parallel order is also what the average takes the place of.
                base = tf.zeros([0], dtype) if self._protocol.is_serial else packed(handles, dtype)
                entered = hop.enter(hop_handle, iteration, base, send=not self._protocol.is_serial)
                seconds = None
                if compute_time is not None:
                    seconds = compute_time(
                        worker, read_steps(count), lambda: tf.timestamp() - began
                    )
                done = [entered, *train(batch.data, worker, seconds)]
            # The exchange does not wait for what servers do, and the next step does.
            with tf.control_dependencies([one for one in done if not one.device]):
                if self._protocol.is_serial:
                    hop.send(hop_handle, packed(handles, dtype))
                received = hop.receive(
                    hop_handle, iteration, base, handles, relative=not self._protocol.is_serial
                )
            with tf.control_dependencies([received]):
                for variable in constrained:
                    variable._value.assign(variable.constraint(variable._value.read_value()))
                counted = add_step(count, [received, *done], waited, log, batch.number)
            return counted, iteration

        def step(iterator, worker, began, count, log, hop_handle):
            wait = DataWait()
            batch = worker_functions.Batch(iterator.get_next(), self._is_numbered)
            # Without a batch nothing may happen, not even what needs none of it.
            with tf.control_dependencies(batch.evidence):
                waited = wait.until(batch.evidence)
                counted, iteration = run_step(batch, waited, worker, began, count, log, hop_handle)
                if self._notes_events:
                    # What comes after it the worker of Hop notes itself.
                    events = NotedEvents(log, count)
                    events.waited(wait)
                    events.counted(counted, is_joint=True, iteration=iteration)

        specs = [
            tf.data.IteratorSpec(worker_functions.given_spec(element_spec, self._is_numbered)),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([], tf.float64),
            *[tf.TensorSpec([], tf.resource)] * 3,
        ]
        once = tf.function(step, autograph=False).get_concrete_function(*specs)
        loop = worker_functions.trace_loop(once, specs, self.call_limit)
        private = [variable._value for variable in layout.private]
        # The copies come in this order, whichever layers are trained by now.
        copied = self.synchronizer.copies.variables
        replaced = [variable.handle for variable in [*private, *copied]]

        def of_state(concrete: Callable, before: int) -> Callable:
            """Takes an iterator, so many arguments besides, and `inputs` of a worker's state."""
            function = RemoteFunction(concrete, replaced)

            def call(iterator, *arguments):
                own, (worker, began, count, _, log, *rest) = arguments[:before], arguments[before:]
                # The worker's own variables, what it keeps beside its parameters, its copies.
                kept, (hop_handle, *copies) = rest[: len(private)], rest[len(private) :]
                return function(
                    iterator, *own, worker, began, count, log, hop_handle, *kept, *copies
                )

            return call

        return Repeated(of_state(once, 0), of_state(loop, 1))


# What trains on a batch: of (the batch, the worker's index, seconds of artificial compute time or
# None), it gives the operations and tensors that are there when that is done.
_Train = Callable[[Any, tf.Tensor, tf.Tensor | None], Sequence[tf.Operation | tf.Tensor]]


# Ops that leave a variable as it is; branches and functions may update it.
_READING = ("ReadVariableOp", "ResourceGather", "VariableShape")
_ASSIGNING = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


def _by_itself(model: keras.Model, layout: Layout, step_logs: StepLogs) -> _Train:
    """The model's own `train_step`, where a worker has a copy of all variables."""
    strategy = model.distribute_strategy

    @tf.function(autograph=False)
    def compute(data):
        with drawing_from(layout.unseeded):
            logs = strategy.run(model.train_step, args=(data,))
        graph = tf.compat.v1.get_default_graph()

        def is_assigned(variable: keras.Variable) -> bool:
            users = graph.capture(variable._value.handle).consumers()
            return any(user.type not in _READING for user in users)

        own = [*(v._value for v in layout.private), *copied_variables(model)]
        known = {id(variable.handle) for variable in own}
        for captured, inside in graph.captures:
            assigned = any(user.type in _ASSIGNING for user in inside.consumers())
            if assigned and id(captured) not in known:
                raise unknown_assigned(captured._parent_trackable().name)
        step_logs.check(logs, is_assigned)
        return logs

    def train(data, worker, seconds):
        del worker
        done = tf.nest.flatten(compute(data))
        if seconds is None:
            return done
        with tf.control_dependencies(done):
            return [ops.delay(seconds)]

    return train


def _with_servers(
    model: keras.Model, layout: Layout, lookups: Lookups, step_logs: StepLogs
) -> _Train:
    """A step that pulls tables from servers and pushes to them, and updates the worker's copy."""

    def train(data, worker, seconds):
        handles = [variable._value.handle for variable in layout.private]
        private = worker_functions.read_private(layout, handles)
        with links.of_trainer(worker):
            step = Step(layout, private, lookups, data, worker)
            operations, _ = worker_functions.compute(
                model, layout, "train_step", step, data, seconds, handles, step_logs
            )
        return operations

    return train
