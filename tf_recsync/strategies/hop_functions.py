"""What Keras calls to train, test and predict where every worker has its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import device_of
from tf_recsync.ops import hop
from tf_recsync.strategies import model_functions, worker_functions
from tf_recsync.strategies.distributed_dataset import DistributedIterator
from tf_recsync.strategies.model_functions import Settings, Steps
from tf_recsync.strategies.predict_function import PredictFunction
from tf_recsync.strategies.slots import Crew
from tf_recsync.strategies.worker_run import WorkerRun
from tf_recsync.strategies.worker_state import WorkerState
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.hop import HopGroup
from tf_recsync.synchronization.hop_events import EventLog
from tf_recsync.synchronization.hop_protocol import Protocol
from tf_recsync.synchronization.pull_push import Layout, is_seed
from tf_recsync.synchronization.remote_values import packed


def variables_of(model: keras.Model) -> list[tf.Variable]:
    """What every worker has a copy of: the parameters first, then what belongs to them.

    Metrics and the states of random generators are apart: they begin anew in each pass.
    """
    apart = {id(v) for v in _private(model)}
    found = [*model.trainable_variables, *model.non_trainable_variables]
    if model.optimizer is not None:
        found += model.optimizer.variables
    unique = {id(v): v for v in found if id(v) not in apart}
    return [v._value for v in unique.values()]


def exchange_dtype(model: keras.Model) -> tf.DType:
    """The type of the parameters.

    Raises:
        ValueError: if they can't be averaged as one.
    """
    dtypes = {}
    for variable in model.trainable_variables:
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
    return tf.as_dtype(*dtypes)


class HopTrainFunction(Steps):
    """`model.train_function` under a `HopStrategy`.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        make_group: makes the group of workers, of what they have copies of, the type of the
            parameters, and what gets the events.
        protocol: how workers exchange.
        read: what users see of the copies, see `Copies`.
    """

    method = "train_step"

    def __init__(
        self,
        model: keras.Model,
        settings: Settings,
        make_group: Callable[[Copies, tf.DType, EventLog], HopGroup],
        protocol: Protocol,
        read: str | int,
    ):
        super().__init__(model, settings)
        self.group: HopGroup | None = None
        self.events = EventLog()
        self._is_open = False  # Between an epoch's begin and its end.
        self._make_group = make_group
        self._protocol = protocol
        self._read = read

    def __call__(self, iterator: Any) -> dict[str, Any]:
        try:
            return super().__call__(iterator)
        except StopIteration:
            raise
        except BaseException:
            if self.group is not None:
                self.group.release()
            self.events.fail()
            raise

    def _optimizers(self) -> list:
        return []  # It is applied by each worker to its own copy.

    def _layout(self) -> Layout:
        return Layout((), {}, [], [], _private(self._model))

    def _crew(self) -> Crew:
        return self.group

    def _flush(self) -> None:
        if self._is_open:
            self._is_open = False
            self.group.end()
            self.group.copies.settled()

    def _should_stop(self) -> bool:
        return bool(self._model.stop_training)

    def _continue(self, iterator: DistributedIterator) -> Layout:
        if iterator.run is None and self._run is not None:
            self._run.stop()  # It may have been left early.
            self._flush()
        layout = super()._continue(iterator)
        self.ensure_group()
        self.group.copies.begin()
        self.group.begin()
        self._is_open = True
        return layout

    def ensure_group(self) -> HopGroup:
        """The workers; made at the first call, when the model and its optimizer are built."""
        if self.group is None:
            workers = range(self._settings.cluster.workers)
            devices = [device_of("worker", worker) for worker in workers]
            copies = Copies(
                variables_of(self._model),
                devices,
                self._settings.cluster.dispatch_scope,
                self._read,
            )
            self.group = self._make_group(copies, exchange_dtype(self._model), self.events)
        return self.group

    def collect_events(self) -> None:
        """Has the workers tell what they have done up to now."""
        if self.group is not None:
            self.group.reports()

    def _start(self, iterator: DistributedIterator) -> WorkerRun:
        run = super()._start(iterator)
        self.group.fail = run.fail
        return run

    def _open(self, worker: int, iterator: tf.data.Iterator, private, steps: int) -> WorkerState:
        self.group.open(worker)
        return _HopState(self.group, worker, iterator, private, steps)

    def _traced(self, iterator, lengths) -> tuple[dict[int, Callable], Layout]:
        spec = iterator.distributed.element_spec
        compute_time = self._settings.compute_time()
        key = (repr(spec), lengths, compute_time)
        if key not in self._functions:
            layout = self._layout()
            functions = {
                steps: _trace(self._model, layout, self._protocol, spec, steps, compute_time)
                for steps in lengths
            }
            self._functions = {key: (functions, layout)}
        return self._functions[key]


class HopTestFunction(model_functions.TestFunction):
    """`model.test_function` under a `HopStrategy`: workers test what users see of the model."""

    def _optimizers(self) -> list:
        return []

    def _layout(self) -> Layout:
        return _snapshot_layout(self._model)


class HopPredictFunction(PredictFunction):
    """`model.predict_function` under a `HopStrategy`."""

    def _layout(self) -> Layout:
        return _snapshot_layout(self._model)


class _HopState(WorkerState):
    """What lives on a worker during a pass."""

    def __init__(self, group: HopGroup, worker: int, iterator, private, steps: int):
        super().__init__(worker, iterator, private, steps)
        self._group = group
        self._handles = [group.handle(worker), *group.copies.handles(worker)]

    @property
    def inputs(self) -> list[tf.Tensor]:
        return [*super().inputs, *self._handles]

    def begin(self, time: float) -> None:
        if not self._has_begun:
            self._group.copies.touched()
        # All workers are open by now.
        self._group.carry_on()
        super().begin(time)


def _private(model: keras.Model) -> list[keras.Variable]:
    metrics = list(model.metrics_variables)
    known = {id(variable) for variable in metrics}
    seeds = [v for v in model.variables if is_seed(v) and id(v) not in known]
    return metrics + seeds


def _snapshot_layout(model: keras.Model) -> Layout:
    """Every worker gets all variables as they are when a pass begins."""
    metrics = list(model.metrics_variables)
    known = {id(variable) for variable in metrics}
    others = [v for v in model.variables if id(v) not in known]
    return Layout((), {}, [], [], metrics + others)


def _trace(
    model: keras.Model,
    layout: Layout,
    protocol: Protocol,
    element_spec: Any,
    steps_per_call: int,
    compute_time: worker_functions.ComputeTime | None,
) -> Callable:
    """Traces `model.train_step` and the exchange around it, once for all workers.

    Returns:
        A function of an iterator and the `inputs` of a worker's state that runs so many
        steps and raises OutOfRangeError at the end of the data.
    """
    strategy = model.distribute_strategy
    parameters = [variable._value for variable in model.trainable_variables]
    handles = [variable.handle for variable in parameters]
    dtype = exchange_dtype(model)
    known = {*model.get_metrics_result(), *(metric.name for metric in model.metrics)}
    constrained = [v for v in model.trainable_variables if v.constraint is not None]

    @tf.function(autograph=False)
    def compute(data):
        logs = strategy.run(model.train_step, args=(data,))
        worker_functions.check_logs(model, "train_step", logs, known)
        return logs

    def run_step(data, worker, began, count, hop_handle):
        iteration = hop.next_iteration(hop_handle, handles, dtype)
        # What a worker sends in parallel order is also what the average takes the place of.
        with tf.control_dependencies([iteration]):
            base = tf.zeros([0], dtype) if protocol.is_serial else packed(handles, dtype)
            entered = hop.enter(hop_handle, iteration, base, send=not protocol.is_serial)
        logs = compute(data)
        done = [entered, *tf.nest.flatten(logs)]
        if compute_time is not None:
            steps = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=count, dtype=tf.int64), [])
            seconds = compute_time(worker, steps, lambda: tf.timestamp() - began)
            with tf.control_dependencies(done):
                done = [ops.delay(seconds)]
        with tf.control_dependencies(done):
            if protocol.is_serial:
                hop.send(hop_handle, packed(handles, dtype))
            received = hop.receive(
                hop_handle, iteration, base, handles, relative=not protocol.is_serial
            )
        with tf.control_dependencies([received]):
            for variable in constrained:
                variable._value.assign(variable.constraint(variable._value.read_value()))
            one = tf.ones([], tf.int64)
            return tf.raw_ops.AssignAddVariableOp(resource=count, value=one)

    def steps(iterator, worker, began, count, hop_handle):
        def one_step(i):
            data = iterator.get_next()
            # Without a batch nothing may happen, not even what needs none of it.
            with tf.control_dependencies(tf.nest.flatten(data, expand_composites=True)):
                run_step(data, worker, began, count, hop_handle)
            return i + 1

        if steps_per_call == 1:
            one_step(tf.constant(0))
        else:
            tf.while_loop(
                lambda i: i < steps_per_call, one_step, [tf.constant(0)], parallel_iterations=1
            )

    with strategy.scope():
        concrete = tf.function(steps, autograph=False).get_concrete_function(
            tf.data.IteratorSpec(element_spec),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([], tf.float64),
            tf.TensorSpec([], tf.resource),
            tf.TensorSpec([], tf.resource),
        )
    own = [variable._value for variable in layout.private], variables_of(model)
    return _OnCopies(concrete, *own)


class _OnCopies:
    """A function of variables, called with other variables in their place.

    Args:
        concrete: a concrete function of (iterator, worker, began, count, hop).
        private: the variables whose replacements come after `count`.
        copied: those whose replacements come after `hop`.
    """

    def __init__(self, concrete, private: Sequence[tf.Variable], copied: Sequence[tf.Variable]):
        self._concrete = concrete
        self._private = len(private)
        place = {id(variable.handle): i for i, variable in enumerate([*private, *copied])}
        self._captures = [
            (place.get(id(captured)), captured) for captured in concrete.captured_inputs
        ]

    def __call__(self, iterator: tf.data.Iterator, worker, began, count, *rest) -> None:
        private, hop_handle, copied = (
            rest[: self._private],
            rest[self._private],
            rest[self._private + 1 :],
        )
        replacements = [*private, *copied]
        captured = [c if i is None else replacements[i] for i, c in self._captures]
        flat = tf.nest.flatten((iterator, worker, began, count, hop_handle), True)
        self._concrete._call_flat(flat, captured)
