"""Values of variables on workers, there and back in few messages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import CHIEF, Cluster, fetch, processor_of


class PackedReader:
    """Reads variables of the same shapes and types from one worker or another.

    One call on the worker reads all of them, and each type comes back as one tensor: read
    one by one, a metric of many variables takes a worker tens of milliseconds.

    Args:
        like: variables of these shapes, which must be static, and types, in their order; if
            `reads_log`, at least one of them of int64.
        reads_log: whether it reads a log of batches, too: default False.
    """

    def __init__(self, like: Sequence[tf.Variable], reads_log: bool = False):
        self._shapes = [variable.shape.as_list() for variable in like]
        by_dtype: dict[tf.DType, list[int]] = {}
        for i, variable in enumerate(like):
            by_dtype.setdefault(variable.dtype, []).append(i)
        self._groups = list(by_dtype.values())

        def pack(handles):
            return [
                packed([handles[i] for i in indices], dtype) for dtype, indices in by_dtype.items()
            ]

        def pack_with_log(handles, log, known):
            numbers = ops.noted_batches(log, known)
            with tf.control_dependencies([numbers]):  # No more than what variables know of.
                parts = pack(handles)
            place = list(by_dtype).index(tf.int64)
            parts[place] = tf.concat([parts[place], numbers], 0)
            return parts

        handles = [tf.TensorSpec([], tf.resource)] * len(self._shapes)
        log = [tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int64)]
        # Concrete: called on one device after the other, a tf.function is traced for each.
        with tf.device(None):
            if reads_log:
                function = tf.function(pack_with_log, autograph=False)
                self._pack = function.get_concrete_function(handles, *log)
            else:
                self._pack = tf.function(pack, autograph=False).get_concrete_function(handles)

    def __call__(self, handles: Sequence[tf.Tensor], device: str) -> list[np.ndarray]:
        """Reads the variables behind these handles, which lie on this device."""
        if not handles:
            return []
        with tf.device(device):
            return self._split(self._pack(list(handles)))[0]

    def with_log(
        self, handles: Sequence[tf.Tensor], device: str, log: tf.Tensor, known: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Reads a log, too.

        Args:
            handles: of the variables.
            device: where they lie, and the log.
            log: its handle.
            known: how many of its numbers are known, see `ops.noted_batches`.

        Returns:
            The variables' values, and the log's other numbers, [n].
        """
        with tf.device(device):
            return self._split(self._pack(list(handles), log, on_worker(np.int64(known))))

    def _split(self, parts: Sequence[tf.Tensor]) -> tuple[list[np.ndarray], np.ndarray]:
        """The variables' values, and what comes after those of int64."""
        values: list[np.ndarray] = [None] * len(self._shapes)
        rest = np.zeros([0], np.int64)
        for indices, part in zip(self._groups, fetch(list(parts)), strict=True):
            sizes = [math.prod(self._shapes[i]) for i in indices]
            *split, more = np.split(part, np.cumsum(sizes))
            rest = more if more.size else rest
            for i, value in zip(indices, split, strict=True):
                values[i] = value.reshape(self._shapes[i])
        return values, rest


def packed(handles: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """The values of variables of one type, one after the other, [elements]."""
    read = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle in handles]
    return tf.concat([tf.reshape(value, [-1]) for value in read], 0)


def on_worker(value: np.ndarray) -> tf.Tensor:
    """Copies a value to the device of the current scope.

    A tf.constant there would hold Python's lock while it waits for the worker,
    and with it the threads that drive the other workers.
    """
    with tf.device(CHIEF):
        # Tensors of Python's numbers TensorFlow caches, np.float64 among them: two threads that
        # send the same one to a worker would share one copy there, which one of them may use
        # before the other has sent it.
        local = tf.constant(np.asarray(value))
    return tf.identity(local)


@contextlib.contextmanager
def at(cluster: Cluster, index: int, job: str = "worker") -> Iterator[None]:
    """Inside, this thread calls on a server's processor, and hinders no other thread.

    What it makes there, the ops of this package can use: they run on no other device.
    """
    with cluster.dispatch_scope(), tf.device(processor_of(job, index)):
        yield
