"""Artificial compute time."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_recsync._checks import number
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.testing.slowdown import Slowdown


@dataclasses.dataclass(frozen=True)
class _ComputeTime:
    """The seconds of each step; see `synchronization.pull_push.ComputeTime`."""

    seconds: float
    slowdown: Slowdown | None

    def __call__(self, worker, step, elapsed):
        seconds = tf.constant(self.seconds, tf.float32)
        if self.slowdown is None:
            return seconds
        return seconds * self.slowdown.factor(worker, step, elapsed())


def set_compute_time(
    strategy: FitStrategy, seconds: float | None, slowdown: Slowdown | None = None
) -> None:
    """Adds an artificial time to every worker's training step.

    The step waits, without using a processor, after its gradients are computed
    and before it pushes them, so that workers on one machine overlap as they
    would on machines of their own. The real step is done all the same.

    Args:
        strategy: the strategy whose workers are slowed, from the next epoch's
            start on.
        seconds: a float of at least 0, or None for no artificial time.
        slowdown: by which the seconds of each worker's each step are multiplied:
            `SlowWorkers`, `RandomSlowdown`, `ChangingSlowdown` or a product of
            them. Default None: every step takes the same time.

    Raises:
        ValueError: if `seconds` is negative, or `slowdown` is none, or is given
            without seconds that it could multiply, or names a worker that does
            not exist.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.AsyncStrategy(cluster)
    ...     slow = recsync.testing.SlowWorkers(4.0, [1])  # Worker 1 takes four times as long.
    ...     recsync.testing.set_compute_time(strategy, 0.03, slow)
    """
    if seconds is not None:
        number("seconds", seconds, least=0, allowed="at least 0 or None")
    if slowdown is not None and not isinstance(slowdown, Slowdown):
        raise ValueError(f"slowdown must be a Slowdown or None, not {slowdown!r}")
    if seconds is None and slowdown is not None:
        raise ValueError(f"slowdown multiplies seconds, which must not be None with {slowdown!r}")
    if slowdown is not None:
        slowdown.check_workers(strategy.cluster.workers)
    made = None if seconds is None else _ComputeTime(float(seconds), slowdown)
    strategy._settings.compute_time = made
