"""Values of variables on workers, there and back in few messages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.cluster import CHIEF, Cluster, processor_of


class PackedReader:
    """Reads variables of the same shapes and types from one worker or another.

    One call on the worker reads all of them, and each type comes back as one tensor: read
    one by one, a metric of many variables takes a worker tens of milliseconds.

    Args:
        like: variables of these shapes, which must be static, and types, in their order.
    """

    def __init__(self, like: Sequence[tf.Variable]):
        self._shapes = [variable.shape.as_list() for variable in like]
        by_dtype: dict[tf.DType, list[int]] = {}
        for i, variable in enumerate(like):
            by_dtype.setdefault(variable.dtype, []).append(i)
        self._groups = list(by_dtype.values())

        def pack(handles):
            return [
                packed([handles[i] for i in indices], dtype) for dtype, indices in by_dtype.items()
            ]

        # Concrete: called on one device after the other, a tf.function is traced for each.
        with tf.device(None):
            self._pack = tf.function(pack, autograph=False).get_concrete_function(
                [tf.TensorSpec([], tf.resource)] * len(self._shapes)
            )

    def __call__(self, handles: Sequence[tf.Tensor], device: str) -> list[np.ndarray]:
        """Reads the variables behind these handles, which lie on this device."""
        if not handles:
            return []
        values: list[np.ndarray] = [None] * len(handles)
        with tf.device(device):
            parts = self._pack(list(handles))
        for indices, part in zip(self._groups, parts, strict=True):
            sizes = [math.prod(self._shapes[i]) for i in indices]
            split = np.split(np.asarray(part), np.cumsum(sizes)[:-1])
            for i, value in zip(indices, split, strict=True):
                values[i] = value.reshape(self._shapes[i])
        return values


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
