"""What is counted of a worker during a pass: the steps it has done, and its waits for data.

Both are in one variable on the worker, an int64 [2], which its calls update and the coordinator
reads now and then. If the worker is lost, it is gone. So the server that counts global steps
counts those of each worker, too: each has a row there in each of its lives (`CallBoard`), which
also says how often the worker was told to end the call that it is in, and where it reports of
itself, twice a second.

Where lost batches are done by others, the worker keeps the numbers of those that it has done, too,
in a log (`ops.worker_log`), until the coordinator has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_recsync import ops

COUNTS = tf.TensorSpec([2], tf.int64)  # Steps done, and microseconds of waits for batches.
_REPORT_SECONDS = 0.5  # From one report of a worker to the next, within a call.


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
    with (
        tf.device(owner),
        tf.control_dependencies(None),
        tf.control_dependencies(there or operations),
    ):
        return ops.count_step(row)


class Reports:
    """Has workers report of themselves to the server that counts their steps, and be told by it
    when to end a call, while their functions are traced.

    A report is a message of the counts, the first of a worker's variables, and the numbers of its
    batches that nobody knows yet.

    Args:
        owner: the device of that server.
        variables: how many of the worker's variables are in it.
        is_numbered: whether batches have numbers.
    """

    def __init__(self, owner: str, variables: int, is_numbered: bool):
        self._owner = owner
        self._variables = variables
        self._is_numbered = is_numbered

    def read_told(self, row: tf.Tensor) -> tf.Tensor:
        """What a worker is told, see `ops.read_row`, on the worker.

        Args:
            row: the handle of the worker's row.
        """
        with tf.device(self._owner):
            told = ops.read_row(row)
        return tf.identity(told)

    def send(
        self,
        told: tf.Tensor,
        count: tf.Tensor,
        row: tf.Tensor,
        log: tf.Tensor,
        *handles: tf.Tensor,
        is_last: bool,
    ) -> None:
        """Sends one, if it is time.

        Args:
            told: what the worker is told, see `read_told`.
            count: the handle of its counts.
            row: that of its row.
            log: that of its log.
            *handles: those of its variables.
            is_last: whether it is sent in any case.
        """

        def message():
            noted = []
            if self._is_numbered:
                numbers, first = ops.noted_batches(log, told[1])
                noted = [first, numbers]
            return ops.read_packed([count, *handles[: self._variables]], noted)

        if is_last:
            value = message()
        else:
            is_due = ops.report_is_due(log, seconds=_REPORT_SECONDS)
            value = tf.cond(is_due, message, lambda: tf.zeros([0], tf.uint8))
        with tf.device(self._owner):
            ops.report(row, value)


def read_steps(count: tf.Tensor) -> tf.Tensor:
    """The steps that a worker has done, an int64 scalar, from the handle of its counts."""
    counts = tf.raw_ops.ReadVariableOp(resource=count, dtype=COUNTS.dtype)
    return tf.ensure_shape(counts, COUNTS.shape)[0]
