"""What a worker's steps do when, noted by the worker itself while somebody records it.

An activity begins when what was before it is there, and ends when its own results are, on the
worker: so those of a step follow each other without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_recsync.ops import events
from tf_recsync.strategies.step_counts import DataWait, read_steps
from tf_recsync.synchronization.pull_push import Step


class StepEvents:
    """Nothing is noted of the steps of a function, while they are traced: nobody records.

    Of each step it is told in this order: `waited`, `pulled`, `computed`, `counted`.
    """

    def waited(self, wait: DataWait) -> None:
        """The step has its batch."""

    def pulled(self, step: Step, evidence: Iterable[tf.Tensor], is_joint: bool) -> None:
        """The step has its parameters.

        Args:
            step: the step.
            evidence: what is there only if its batch is.
            is_joint: whether servers answer its pull when they have applied the push before it, so
                that both are one.
        """

    def computed(self, tensors: Iterable[tf.Tensor]) -> None:
        """The step has computed these, and pushes."""

    def counted(
        self, done: tf.Operation, is_joint: bool, iteration: tf.Tensor | None = None
    ) -> None:
        """The step is done.

        Args:
            done: counts it.
            is_joint: whether the pull of the next step says when its push was applied.
            iteration: its number, an int64 scalar; by default its place in the pass.
        """


class NotedEvents(StepEvents):
    """Everything is noted in the worker's log.

    Args:
        log: its handle.
        count: the handle of the worker's counts.
    """

    def __init__(self, log: tf.Tensor, count: tf.Tensor):
        self._log, self._count = log, count
        self._did: list[tuple[str, tf.Tensor, tf.Tensor]] = []  # Of the step.
        self._at = tf.zeros([], tf.float64)  # When what was noted last had ended.
        self._computed_at = self._at  # Of the step before, or this one.

    def waited(self, wait: DataWait) -> None:
        self._did = [("wait for a batch", wait.since, wait.ended)]
        self._at = wait.ended

    def pulled(self, step: Step, evidence: Iterable[tf.Tensor], is_joint: bool) -> None:
        if step.token is not None:
            # It is on the servers alone: on the worker it is a message more.
            self._add("wait for tokens", [tf.identity(step.token)])
        if is_joint:
            self._at = self._computed_at
        name = "push and pull" if is_joint else "pull"
        self._add(name, [*step.arrived.values(), *evidence])

    def computed(self, tensors: Iterable[tf.Tensor]) -> None:
        self._add("compute", tensors)
        self._computed_at = self._at

    def counted(
        self, done: tf.Operation, is_joint: bool, iteration: tf.Tensor | None = None
    ) -> None:
        if not is_joint:
            self._add("push", [done])
        with tf.control_dependencies([done]):
            if iteration is None:
                iteration = read_steps(self._count) - 1
            events.note(self._log, iteration, self._did)

    def _add(self, name: str, evidence: Iterable[tf.Operation | tf.Tensor]) -> None:
        """Something that began when the last one had ended, and ends when all of this is there."""
        with tf.control_dependencies([self._at, *evidence]):
            ended = tf.timestamp()
        self._did.append((name, self._at, ended))
        self._at = ended
