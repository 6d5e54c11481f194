"""Slowdowns of `recsync.testing` outside of workers' graphs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_recsync.testing.slowdown import Slowdown

_ASKED_AT_ONCE = 1 << 16


class Factors:
    """The factors of a slowdown, as numbers.

    Args:
        slowdown: by which steps are multiplied.
        workers: how many workers there are, an int.
        steps: about how many steps each of them does; so many are computed at once at most.

    Attributes:
        depend_on_time: whether they depend on the seconds since all began.

    Raises:
        ValueError: if `slowdown` is none, or names a worker that does not exist.
    """

    def __init__(self, slowdown: Slowdown, workers: int, steps: int):
        if not isinstance(slowdown, Slowdown):
            raise ValueError(
                f"slowdown must be a Slowdown of recsync.testing or None, not {slowdown!r}"
            )
        slowdown.check_workers(workers)
        self._workers = workers
        self._block_steps = max(1, min(steps, _ASKED_AT_ONCE // workers))

        def factor(worker: tf.Tensor, step: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.cast(slowdown.factor(worker, step, seconds), tf.float32), [])

        number, time = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)
        self._one = tf.function(factor, autograph=False).get_concrete_function(number, number, time)
        self.depend_on_time = bool(self._one.inputs[2].consumers())
        if not self.depend_on_time:
            self._several = self._trace_several()

    def _trace_several(self) -> tf.types.experimental.ConcreteFunction:
        zero = np.zeros([], np.float64)

        def several(workers: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
            def factor(one):
                return self._one(one[0], one[1], zero)

            return tf.vectorized_map(factor, (workers, steps), warn=False)

        numbers = tf.TensorSpec([None], tf.int64)
        return tf.function(several, autograph=False).get_concrete_function(numbers, numbers)

    def one(self, worker: int, step: int, seconds: float) -> float:
        """The factor of a worker's step that it computes from so many seconds on."""
        arguments = np.int64(worker), np.int64(step), np.float64(seconds)
        return float(self._one(*map(tf.constant, arguments)))

    def block(self, first: int) -> np.ndarray:
        """The factors of some steps from `first` on, if they do not depend on the time.

        Returns:
            float32 [workers, steps].
        """
        steps = np.arange(first, first + self._block_steps, dtype=np.int64)
        workers = np.arange(self._workers, dtype=np.int64)
        found = self._several(
            tf.constant(np.repeat(workers, len(steps))), tf.constant(np.tile(steps, len(workers)))
        )
        return found.numpy().reshape(len(workers), len(steps))
