"""The functions that workers run, traced once for all workers.

Each takes the worker's iterator, its index, when the pass began, and handles of its counts and
of the variables that it keeps for itself, so that a call takes and returns next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync.cluster import Server
from tf_recsync.strategies.step_counts import DataWait, Reports, add_applied, add_step, read_steps
from tf_recsync.strategies.step_events import NotedEvents, StepEvents
from tf_recsync.strategies.step_logs import Logged, StepLogs
from tf_recsync.strategies.worker_state import WorkerState
from tf_recsync.synchronization import links
from tf_recsync.synchronization.at_once import AT_ONCE, AtOnce
from tf_recsync.synchronization.batches import tensors_of
from tf_recsync.synchronization.lookups import Lookups, find_lookups
from tf_recsync.synchronization.pull_plan import PullPlan
from tf_recsync.synchronization.pull_push import Layout, Step, pull_ahead

# Computes the artificial compute time of a step, a float32 scalar in seconds, from
# the worker's index, the steps that it has done in the pass (int64 scalars), and a
# function that gives the seconds since the pass began (a float64 scalar).
ComputeTime = Callable[[tf.Tensor, tf.Tensor, Callable[[], tf.Tensor]], tf.Tensor]


# More steps than these are a loop: their operations take time to make, and the gain is small.
MOST_UNROLLED = 8

# Of the arguments beside the iterator: where the handles begin of the counts, the row, the log, and
# the worker's variables.
_HANDLES = 2


def turns(
    once: Callable[[tf.Tensor | None], tf.Tensor | None],
    times: tf.Tensor,
    seconds: float,
    told: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Does something again and again, in a function of a worker.

    Whoever waits for the call's end, as to save the model, does not wait for a worker that has
    become slow: it ends early, but not before the first time, after a while or when it is told to.

    Args:
        once: does it, while it is traced, of what the worker was told before; if it can be told
            to end a call, it returns what it is told then, see `Reports.read_told`.
        times: how often, an int64 scalar.
        seconds: for so long at most.
        told: what it was told before the call, if it can be; else None.

    Returns:
        How often it was done, an int64 scalar, and what the worker was told at last.
    """
    began = tf.timestamp()

    def goes_on(i, now):
        may = tf.timestamp() - began < seconds
        if told is not None:
            may &= now[0] == told[0]
        return (i < times) & ((i == 0) | may)

    def turn(i, now):
        found = once(None if told is None else now)
        return i + 1, now if told is None else found

    zero = tf.zeros([], tf.int64)
    begin = [zero, zero if told is None else told]
    done, last = tf.while_loop(goes_on, turn, begin, parallel_iterations=1)
    return done, None if told is None else last


class Repeated:
    """What a worker does once, or again and again in one call.

    Args:
        once: a function of (iterator, *inputs of the worker's state).
        loop: one of (iterator, how often, *the same inputs), which returns how often it did it;
            None if nobody asks for more than once.
    """

    def __init__(self, once: Callable, loop: Callable | None):
        self._once = once
        self._loop = loop
        self._built: dict[Server, int] = {}  # By the worker, in which lives of servers.

    def build(
        self, iterator: tf.data.Iterator, state: WorkerState, worker: Server, lives_begun: int
    ) -> None:
        """Has servers build their parts of it, unless they have, without doing it.

        It shows whether the worker has all functions. Call it in the worker's device scope.

        Args:
            iterator: on the worker, without batches.
            state: the worker's.
            worker: the worker.
            lives_begun: see `Membership`: when a server that was lost is taken into the cluster
                again, the others forget what they have built.
        """
        if self._built.get(worker) != lives_begun:
            with contextlib.suppress(tf.errors.OutOfRangeError):
                self._once(iterator, *state.inputs)
            self._built[worker] = lives_begun

    def __call__(self, iterator: tf.data.Iterator, times: int, state: WorkerState) -> Any:
        """Calls a worker, in its device scope.

        Args:
            iterator: the worker's.
            times: how often.
            state: the worker's.

        Returns:
            How often it did it, an int or an int64 scalar on the worker.

        Raises:
            tf.errors.OutOfRangeError: at the end of the data.
        """
        if times == 1 or self._loop is None:
            # A loop would cost a message to each server.
            self._once(iterator, *state.inputs)
            return 1
        return self._loop(iterator, state.number(times), *state.inputs)


def trace_loop(
    body: Callable, specs: Sequence[Any], seconds: float, reports: Reports | None = None
) -> Callable:
    """Has a worker call a function of steps again and again by itself.

    Args:
        body: a concrete function of an iterator and more, such as `trace_steps` gave.
        specs: of its arguments.
        seconds: see `turns`.
        reports: the worker is told when to end, and reports at the end of the call; default None:
            neither.

    Returns:
        A concrete function of (iterator, how often, *the others), which returns how often it
        called `body`. How often is an int64 scalar on the worker.
    """

    def loop(iterator, times, *arguments):
        _, row, *_ = arguments[_HANDLES:]
        told = None if reports is None else reports.read_told(row)

        def once(told):
            return body(iterator, *([] if told is None else [told]), *arguments)

        # What `body` does on servers is part of each turn: that costs a message for each.
        done, last = turns(once, times, seconds, told)
        if reports is not None:
            with tf.control_dependencies([done]):
                reports.send(last, *arguments[_HANDLES:], is_last=True)
        return done

    first, *others = specs
    return tf.function(loop, autograph=False).get_concrete_function(
        first, tf.TensorSpec([], tf.int64), *others
    )


def trace_once(body: Callable, specs: Sequence[Any], reports: Reports) -> Callable:
    """Has a worker call a function of steps, and report then.

    Args:
        body: see `trace_loop`, like the others.
        specs: of its arguments.
        reports: has it report.

    Returns:
        A concrete function of the same arguments.
    """

    def once(iterator, *arguments):
        told = body(iterator, tf.zeros([2], tf.int64), *arguments)
        with tf.control_dependencies([told]):
            reports.send(told, *arguments[_HANDLES:], is_last=True)

    return tf.function(once, autograph=False).get_concrete_function(*specs)


def trace_steps(
    model: keras.Model,
    layout: Layout,
    method: str,
    element_spec: Any,
    lookups: Lookups,
    unrolled: int,
    compute_time: ComputeTime | None,
    aggregation: AtOnce = AT_ONCE,
    prefetch_lookups: bool = False,
    step_logs: StepLogs | None = None,
    hogwild: bool = False,
    is_numbered: bool = False,
    is_recorded: bool = False,
    reports: Reports | None = None,
) -> Callable:
    """Traces `model.train_step` or `model.test_step` for the workers.

    Args:
        model: a built, compiled model.
        layout: its layout.
        method: "train_step" or "test_step".
        element_spec: the type spec of the batches.
        lookups: of the step.
        unrolled: how many steps one call runs. They are unrolled, so that a server begins the
            next one when it is done with the last.
        compute_time: of the artificial compute time of training steps, or None.
        aggregation: see `Step`.
        prefetch_lookups: whether a step pulls the lookups of the next unrolled one
            before it computes.
        step_logs: is told what the steps return; default None.
        hogwild: see `Step`.
        is_numbered: whether the iterators give pairs of a batch's number and the batch.
        is_recorded: whether the worker notes in its log what the steps do when.
        reports: the worker reports now and then, how it was before the steps, and is told when
            to end; default None: neither.

    Returns:
        A concrete function of (iterator, with `reports` what the worker was told before, its
        index, when the pass began, handles of its counts, row and log (see step_counts.py),
        *handles of the worker's private variables) that runs the steps, and raises
        OutOfRangeError at the end of the data; the counts tell how many steps it
        ran. It returns nothing, or what the worker is told, see `Reports.read_told`.
        The index is an int64 scalar; the beginning a float64 scalar, seconds of the
        Unix epoch.

    Raises:
        ValueError: if the model's own step can't be run on workers.
    """
    is_training = method == "train_step"
    step_logs = step_logs or StepLogs(model, method, element_spec, Logged())

    def pull(batch, worker, handles, before) -> Step:
        return Step(
            layout,
            read_private(layout, handles),
            lookups,
            batch.data,
            worker,
            aggregation,
            batch.ahead,
            before,
            hogwild,
        )

    def steps(iterator, *arguments):
        before = None
        if reports is not None:
            before, *arguments = arguments
        worker, *_ = arguments
        with links.of_trainer(worker):
            return all_steps(iterator, before, *arguments)

    def all_steps(iterator, before, worker, began, count, row, log, *handles):
        if reports is not None:
            # The operations below that change what it reads wait until it has been read, and
            # nothing waits on the way to the server and back.
            reports.send(before, count, row, log, *handles, is_last=False)
        counted: list[tf.Operation] = []  # The steps before.
        operations: list[tf.Operation] = []  # What is left to do of the last step.
        computed: list[tf.Tensor] = []  # What the worker has done for it.
        number: tf.Tensor | None = None  # Of its batch.
        waited: tf.Tensor | None = None  # For its batch.
        following: BatchAhead | None = None
        events = NotedEvents(log, count) if is_recorded else StepEvents()
        for i in range(unrolled):
            step = None
            wait: DataWait | None = None
            if following is not None and not aggregation.takes_tokens:
                # The pull needs the batch, and says when the last step is done: the wait for the
                # batch begins when the worker has computed. Of what servers compute it hears later.
                wait = None if layout.placed.layers else DataWait(computed)
                # A server answers the pull when the last step is done there, and so says that
                # it is. Of a step that takes a token, the pull has to wait for the token.
                step = pull(following, worker, handles, _by_device(operations))
                heard = step.arrived
                operations = [o for o in operations if o.device not in heard]
                operations += [tensor.op for tensor in heard.values()]
            is_joint = step is not None
            if i:
                counted = [add_step(count, operations, waited, log, number)]
                events.counted(counted[0], is_joint)
            wait = wait or DataWait(counted)
            with tf.control_dependencies(counted):
                if following is None:
                    batch = Batch(iterator.get_next(), is_numbered)
                    arrived = batch.evidence
                else:
                    batch, arrived = following, following.evidence
                    following.check()  # Its evidence waits for more than the batch.
            number = batch.number
            waited = wait.until(arrived)
            events.waited(wait)
            # Without a batch nothing may happen, not even what needs none of it.
            with tf.control_dependencies(batch.evidence):
                if step is None:
                    step = pull(batch, worker, handles, {})
                events.pulled(step, batch.evidence, is_joint)
                following = None
                if i + 1 < unrolled and (prefetch_lookups or not aggregation.takes_tokens):
                    following = BatchAhead(iterator, batch)
                if following is not None and prefetch_lookups:
                    # Traced before this step's updates, so that it does not wait for them.
                    following.ahead = pull_ahead(layout, lookups, following.data)
                seconds = None
                if is_training and compute_time is not None:
                    done = read_steps(count)
                    seconds = compute_time(worker, done, lambda: tf.timestamp() - began)
                operations, computed = compute(
                    model, layout, method, step, batch.data, seconds, handles, step_logs
                )
                events.computed(computed)
                if is_training and layout.owner:
                    operations.append(add_applied(row, layout.owner, operations))
        told = None if reports is None else reports.read_told(row)
        counted = [add_step(count, operations, waited, log, number)]
        events.counted(counted[0], is_joint=False)
        with tf.control_dependencies(counted):
            if told is not None:
                return tf.identity(told)
            tf.no_op()
            return None

    first, *specs = worker_specs(layout, given_spec(element_spec, is_numbered))
    told = [] if reports is None else [tf.TensorSpec([2], tf.int64)]
    return tf.function(steps, autograph=False).get_concrete_function(first, *told, *specs)


def given_spec(element_spec: Any, is_numbered: bool) -> Any:
    """The type spec of what the workers' iterators give, by that of batches."""
    return (tf.TensorSpec([], tf.int64), element_spec) if is_numbered else element_spec


def read_private(layout: Layout, handles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values of a worker's own copies of `layout.private`, from their handles."""
    return [
        tf.ensure_shape(
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable._value.dtype), variable.shape
        )
        for handle, variable in zip(handles, layout.private, strict=True)
    ]


def compute(
    model: keras.Model,
    layout: Layout,
    method: str,
    step: Step,
    data: Any,
    seconds: tf.Tensor | None,
    handles: Sequence[tf.Tensor],
    step_logs: StepLogs,
) -> tuple[list[tf.Operation], list[tf.Tensor]]:
    """Traces what follows a step's pull, up to its end.

    Args:
        model: a built, compiled model.
        layout: its layout.
        method: the model's method that takes a batch.
        step: the step, which has pulled.
        data: its batch.
        seconds: of artificial compute time, or None.
        handles: of the worker's own copies of `layout.private`.
        step_logs: is told what the method returns.

    Returns:
        The operations that are the step's end, and what the worker computes for them.

    Raises:
        ValueError: if the model's own step can't be run on workers.
    """
    with step.computing():
        step_logs.check(getattr(model, method)(data), step.is_assigned)
    if method == "train_step" and layout.optimizers and not step.pushed:
        raise ValueError(
            f"{type(model).__name__}.train_step applied no gradients; it has to call "
            "self.optimizer.apply_gradients or self.optimizer.apply"
        )
    kept, operations = step.finish(seconds)
    operations += _keep(handles, step.private, kept)
    return operations, [*step.computed, *kept]


def _keep(
    handles: Sequence[tf.Tensor], before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]
) -> list[tf.Operation]:
    """Has the worker keep what is other than before of its own copies of `layout.private`."""
    return [
        tf.raw_ops.AssignVariableOp(resource=handle, value=new)
        for handle, old, new in zip(handles, before, after, strict=True)
        if new is not old
    ]


class Batch:
    """A worker's batch, while its step is traced.

    Args:
        given: what the iterator gave.
        is_numbered: whether that is a pair of a number and the batch.

    Attributes:
        number: the batch's, an int64 scalar; None if it has none.
        data: the batch.
        ahead: the lookups pulled for it already, or None.
        evidence: tensors that are there only if the batch is.
    """

    def __init__(self, given: Any, is_numbered: bool):
        self.is_numbered = is_numbered
        self.number, self.data = given if is_numbered else (None, given)
        self.ahead: dict[str, PullPlan] | None = None
        self.evidence = tensors_of(given)
        self._given = given

    @functools.cached_property
    def optional(self) -> tf.experimental.Optional:
        """What the iterator gave as an optional."""
        return tf.experimental.Optional.from_value(self._given)


class BatchAhead(Batch):
    """The batch of the next step, taken before it is its turn; it need not be there.

    At the end of the data it is the one before, as any model can look up its rows; until `check`,
    evidence is there then, too.

    Args:
        iterator: the worker's iterator.
        last: the batch before.
    """

    def __init__(self, iterator: tf.data.Iterator, last: Batch):
        optional = iterator.get_next_as_optional()
        self._iterator = iterator
        self._exists = optional.has_value()
        # Of the optionals: a conditional on the batch would be three ops for each tensor in it.
        before = last.optional
        self.optional = tf.cond(self._exists, lambda: optional, lambda: before)
        super().__init__(self.optional.get_value(), last.is_numbered)

    def check(self) -> None:
        """It is its turn: from now on its evidence is not there at the end of the data."""

        def end():
            # The iterator is at its end, and says so again.
            with tf.control_dependencies(tensors_of(self._iterator.get_next())):
                return tf.constant(False)

        self.evidence = [tf.cond(self._exists, lambda: tf.constant(True), end)]


def trace_predict(model: keras.Model, layout: Layout, element_spec: Any) -> Callable:
    """Traces `model.predict_step` for the workers.

    Returns:
        A concrete function of the same arguments as those of `trace_steps` that
        returns (the batch's number, its outputs) and raises OutOfRangeError at
        the end of the data.
    """
    lookups = find_lookups(model, layout, "predict_step", element_spec[1])

    def predict(iterator, worker, began, count, row, log, *handles):
        del began, count, row, log
        number, data = iterator.get_next()
        with links.of_trainer(worker):
            step = Step(layout, read_private(layout, handles), lookups, data, worker)
            with step.computing():
                outputs = model.predict_step(data)
            _keep(handles, step.private, step.kept())  # The next batch has other seeds.
        return number, outputs

    specs = worker_specs(layout, element_spec)
    return tf.function(predict, autograph=False).get_concrete_function(*specs)


def _by_device(operations: list[tf.Operation]) -> dict[str, list[tf.Operation]]:
    """Operations, by the device that they run on."""
    found: dict[str, list[tf.Operation]] = {}
    for operation in operations:
        found.setdefault(operation.device, []).append(operation)
    return found


def worker_specs(layout: Layout, element_spec: Any) -> list[Any]:
    """Of the iterator, the worker's index, the pass's beginning, the two counts, the log, the
    private variables."""
    handles = [tf.TensorSpec([], tf.resource) for _ in range(3 + len(layout.private))]
    iterator = tf.data.IteratorSpec(element_spec)
    return [iterator, tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64), *handles]
