"""Values of variables on workers, there and back in few messages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tf_recsync import ops
from tf_recsync.cluster import CHIEF, Cluster, processor_of
from tf_recsync.synchronization.remote_functions import RemoteFunction, traced_once


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server has.

    Attributes:
        values: of the variables; they may be written.
        first: how many numbers the log had before those that it still has.
        numbers: these, `[n]`. They are no more than what the variables know of.
    """

    values: list[np.ndarray]
    first: int
    numbers: np.ndarray


class PackedReader:
    """Reads variables of the same shapes and types from one server or another.

    One call on the server reads all of them, and they come back in one message: read one by one, a
    metric of many variables takes tens of milliseconds.

    Args:
        like: variables of these shapes, which must be static, and types, in their order.
        reads_log: whether it reads logs of batches, too: default False.
    """

    def __init__(self, like: Sequence[tf.Variable], reads_log: bool = False):
        dtypes = [np.dtype(variable.dtype.as_numpy_dtype) for variable in like]
        shapes = [variable.shape.as_list() for variable in like]
        sizes = [math.prod(shape) * d.itemsize for shape, d in zip(shapes, dtypes, strict=True)]
        begins = list(itertools.accumulate(map(padded, sizes), initial=0))
        # Where each is in a message, as what; the log comes behind them.
        self._places = list(zip(begins[:-1], sizes, dtypes, shapes, strict=True))
        self._log_begin = begins[-1]
        self._reads_log = reads_log

    def __call__(self, handles: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Reads the variables behind these handles, which lie on one server.

        Raises:
            tf.errors.OpError: if its server is gone.
        """
        return self.read(handles).values if handles else []

    def read(self, asked: Sequence[tf.Tensor]) -> Answer:
        """Reads variables of a server, and a log there if it reads logs.

        Args:
            asked: the handles of the variables, all on that server; and of a log of batches there,
                and an int64 scalar: how many numbers may be forgotten, see `ops.noted_batches`.

        Raises:
            tf.errors.OpError: if its server is gone.
        """
        with tf.device(CHIEF):
            message = _reader(len(self._places), self._reads_log)(*asked)
        return self.answer(np.array(message))  # What is fetched may not be written.

    def answer(self, message: np.ndarray) -> Answer:
        """What a message of such variables says; arrays in it share its memory."""
        values = [
            message[begin : begin + size].view(dtype).reshape(shape)
            for begin, size, dtype, shape in self._places
        ]
        first, numbers = 0, message[self._log_begin :].view(np.int64)
        if self._reads_log:
            first, numbers = int(numbers[0]), numbers[1:]
        return Answer(values, first, numbers)


@traced_once
def _reader(variables: int, reads_log: bool) -> RemoteFunction:
    """What reads so many variables, where they are, into one message, and brings it here.

    With the bringing a call of its own, a reading takes this process half as long again.
    """

    def read(*arguments):
        noted = []
        if reads_log:
            # Before the variables, as it is an input of what reads them.
            numbers, first = ops.noted_batches(*arguments[variables:])
            noted = [first, numbers]
        message = ops.read_packed(list(arguments[:variables]), noted)
        with tf.device(CHIEF):
            return tf.identity(message)

    specs = [tf.TensorSpec([], tf.resource)] * variables
    if reads_log:
        specs = [*specs, tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int64)]
    return RemoteFunction(tf.function(read, autograph=False).get_concrete_function(*specs))


def make_variables(
    values: Sequence[np.ndarray], constants: int = 0, has_log: bool = False
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Makes variables of numbers on the server in whose device scope it is called, in one call.

    Args:
        values: their initial values.
        constants: of so many of the first, tensors are made instead.
        has_log: whether a log of a worker (`ops.worker_log`) is made, too; default False.

    Returns:
        These tensors, and the variables' handles: a variable goes with the last one. And the log's
        handle, or None.

    Raises:
        tf.errors.OpError: the server is gone.
    """
    made = _maker(_layout(values), constants, has_log)(to_send(_message(values)))
    return (made[:-1], made[-1]) if has_log else (made, None)


def assign_variables(handles: Sequence[tf.Tensor], values: Sequence[np.ndarray]) -> None:
    """Assigns to variables of numbers in one call, in the device scope of their server.

    Raises:
        tf.errors.OpError: the server is gone.
    """
    if handles:
        _assigner(_layout(values))(to_send(_message(values)), *handles)


_Layout = tuple[tuple[tf.DType, tuple[int, ...]], ...]


def _layout(values: Sequence[np.ndarray]) -> _Layout:
    return tuple((tf.as_dtype(value.dtype), value.shape) for value in values)


def padded(size: int) -> int:
    """The bytes that so many take in a message, as `ops.read_packed` makes it, too."""
    return -(-size // 8) * 8


def _message(values: Sequence[np.ndarray]) -> np.ndarray:
    parts = []
    for value in values:
        data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        parts.append(np.pad(data, (0, padded(data.size) - data.size)))
    return np.concatenate(parts)


def _values_in(message: tf.Tensor, layout: _Layout) -> list[tf.Tensor]:
    values, begin = [], 0
    for dtype, shape in layout:
        size = math.prod(shape) * dtype.size
        data, begin = message[begin : begin + size], begin + padded(size)
        if dtype == tf.bool:
            values.append(tf.reshape(tf.cast(data, dtype), shape))
        else:
            wide = shape if dtype.size == 1 else [*shape, dtype.size]
            values.append(tf.bitcast(tf.reshape(data, wide), dtype))
    return values


@traced_once
def _maker(layout: _Layout, constants: int, has_log: bool) -> RemoteFunction:
    def make(message):
        with tf.device("CPU:0"):  # Where the operations of this package run.
            values = _values_in(message, layout)
            made = [tf.identity(value) for value in values[:constants]]
            for (dtype, shape), value in list(zip(layout, values, strict=True))[constants:]:
                handle = tf.raw_ops.VarHandleOp(
                    dtype=dtype, shape=shape, shared_name=context.anonymous_name()
                )
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
                made.append(handle)
            return [*made, ops.worker_log()] if has_log else made

    function = tf.function(make, autograph=False)
    return RemoteFunction(function.get_concrete_function(tf.TensorSpec([None], tf.uint8)))


@traced_once
def _assigner(layout: _Layout) -> RemoteFunction:
    def assign(message, *handles):
        for handle, value in zip(handles, _values_in(message, layout), strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    handles = [tf.TensorSpec([], tf.resource)] * len(layout)
    function = tf.function(assign, autograph=False)
    return RemoteFunction(function.get_concrete_function(tf.TensorSpec([None], tf.uint8), *handles))


def packed(handles: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """The values of variables of one type, one after the other, [elements]."""
    read = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle in handles]
    return tf.concat([tf.reshape(value, [-1]) for value in read], 0)


def on_worker(value: np.ndarray) -> tf.Tensor:
    """Copies a value to the device of the current scope, for several calls.

    A tf.constant there would hold Python's lock while it waits for the worker,
    and with it the threads that drive the other workers.
    """
    return tf.identity(to_send(value))


def to_send(value: np.ndarray) -> tf.Tensor:
    """A value as an argument of one call, which takes it to the device that it is made on."""
    with tf.device(CHIEF):
        # Tensors of Python's numbers TensorFlow caches, np.float64 among them: two threads that
        # send the same one to a worker would share one copy there, which one of them may use
        # before the other has sent it.
        return tf.constant(np.asarray(value))


@contextlib.contextmanager
def at(cluster: Cluster, index: int, job: str = "worker") -> Iterator[None]:
    """Inside, this thread calls on a server's processor, and hinders no other thread.

    What it makes there, the ops of this package can use: they run on no other device.
    """
    with cluster.dispatch_scope(), tf.device(processor_of(job, index)):
        yield
