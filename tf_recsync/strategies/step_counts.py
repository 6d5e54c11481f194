"""What is counted of a worker during a pass: the steps it has done, and its waits for data.

Both are in one variable on the worker, an int64 [2], which its calls update and the coordinator
reads now and then. If the worker is lost, it is gone. So the server that counts global steps
counts those of each worker, too: each has a row there in each of its lives, an int64 [2], which
also says how often the worker was told to end the call that it is in.

Where lost batches are done by others, the worker keeps the numbers of those that it has done, too,
in a log (`ops.worker_log`), until the coordinator has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_recsync import ops

COUNTS = tf.TensorSpec([2], tf.int64)  # Steps done, and microseconds of waits for batches.
ROW = tf.TensorSpec([2], tf.int64)  # Steps applied, and how often told to end a call.


class DataWait:
    """The time that a worker waits for the batch of a step, while the step is traced.

    Args:
        ready: what has to be done before the step, its batch apart: operations or tensors.

    Attributes:
        since: when it begins, a float64 scalar, in seconds since the Unix epoch.
        ended: when it ends, likewise; None before `until`.
    """

    def __init__(self, ready: Iterable[tf.Operation | tf.Tensor] = ()):
        self.ended: tf.Tensor | None = None
        with tf.control_dependencies(list(ready)):
            self.since = tf.timestamp()

    def until(self, evidence: Iterable[tf.Tensor]) -> tf.Tensor:
        """The microseconds from then on until there is a batch, an int64 scalar.

        Args:
            evidence: tensors that are there only if the batch is.
        """
        with tf.control_dependencies([self.since, *evidence]):
            self.ended = tf.timestamp()
        seconds = self.ended - self.since
        # A machine's clock may be set back.
        return tf.cast(1e6 * tf.maximum(seconds, 0), tf.int64)


def add_step(
    count: tf.Tensor,
    done: Iterable[tf.Operation],
    waited: tf.Tensor,
    log: tf.Tensor,
    number: tf.Tensor | None,
) -> tf.Operation:
    """Counts a step when it is done.

    Args:
        count: the handle of the worker's counts.
        done: what belongs to the step.
        waited: for its batch, see `DataWait.until`.
        log: the handle of the worker's log of batches.
        number: the batch's, to be noted there; None if it has none.
    """
    # In a group, one message from each server says that it is done.
    with tf.control_dependencies([tf.group(*done)]):
        value = tf.stack([tf.ones([], tf.int64), waited])
        noted = [] if number is None else [ops.note_batch(log, number)]
        with tf.control_dependencies(noted):
            return tf.raw_ops.AssignAddVariableOp(resource=count, value=value)


def add_applied(row: tf.Tensor, owner: str, operations: Sequence[tf.Operation]) -> tf.Operation:
    """Counts a step where global steps are counted, when it is applied there.

    Args:
        row: the handle of the worker's row.
        owner: the device that has it.
        operations: what belongs to the step, on all servers.
    """
    # The others' take a message each.
    there = [operation for operation in operations if operation.device == owner]
    with tf.device(owner), tf.control_dependencies(None):
        one = tf.constant([1, 0], tf.int64)
        with tf.control_dependencies(there or operations):
            return tf.raw_ops.AssignAddVariableOp(resource=row, value=one)


def read_told(row: tf.Tensor, owner: str) -> tf.Tensor:
    """How often a worker was told to end its call, an int64 scalar on the worker.

    Args:
        row: the handle of the worker's row.
        owner: the device that has it.
    """
    with tf.device(owner):
        value = tf.raw_ops.ReadVariableOp(resource=row, dtype=ROW.dtype)
        told = tf.ensure_shape(value, ROW.shape)[1]
    return tf.identity(told)


def read_steps(count: tf.Tensor) -> tf.Tensor:
    """The steps that a worker has done, an int64 scalar, from the handle of its counts."""
    counts = tf.raw_ops.ReadVariableOp(resource=count, dtype=COUNTS.dtype)
    return tf.ensure_shape(counts, COUNTS.shape)[0]
