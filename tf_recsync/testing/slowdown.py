"""By which factors the artificial compute time of a step is multiplied.

A slowdown is asked in the worker's own graph, at the beginning of each step,
which worker's step it is, the how manieth, and how long the pass has lasted.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from numbers import Integral

import tensorflow as tf

from tf_recsync._checks import integer, list_of, number


class Slowdown(abc.ABC):
    """A factor for each worker and step; `a * b` multiplies the factors of two.

    Example:
        >>> slow = SlowWorkers(4.0, [1]) * RandomSlowdown(3.0, probability=1.0)
        >>> float(slow.factor(tf.constant(1, tf.int64), tf.constant(0, tf.int64), 0.0))
        12.0
    """

    @abc.abstractmethod
    def factor(self, worker: tf.Tensor, step: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
        """The factor of one step; called once, while the workers' function is traced.

        Args:
            worker: the worker's index, an int64 scalar.
            step: the steps that the worker has done in this pass, an int64 scalar.
            seconds: the time since the pass began, a float64 scalar.

        Returns:
            A float32 scalar of at least 0; 1 is the worker's usual speed.
        """

    def check_workers(self, workers: int) -> None:  # noqa: B027, most hold for any number.
        """Checks that all workers exist that the slowdown names; by default it names none.

        Args:
            workers: how many workers there are.

        Raises:
            ValueError: if one that the slowdown names does not exist.
        """

    def __mul__(self, other: Slowdown) -> Slowdown:
        if not isinstance(other, Slowdown):
            return NotImplemented
        return _Product(self, other)


@dataclasses.dataclass(frozen=True)
class _Product(Slowdown):
    """Two slowdowns at once."""

    first: Slowdown
    second: Slowdown

    def factor(self, worker, step, seconds):
        both = (self.first, self.second)
        one, other = (slowdown.factor(worker, step, seconds) for slowdown in both)
        return one * other

    def check_workers(self, workers):
        self.first.check_workers(workers)
        self.second.check_workers(workers)


@dataclasses.dataclass(frozen=True)
class SlowWorkers(Slowdown):
    """Some workers are always slower (or faster) than the others.

    Attributes:
        multiple: the factor of their steps, at least 0.
        workers: their indices.

    Raises:
        ValueError: if an attribute is wrong.

    Example:
        Every fourth of 16 workers takes four times as long:

        >>> slow = SlowWorkers(4.0, range(3, 16, 4))
        >>> slow.workers
        (3, 7, 11, 15)
    """

    multiple: float
    workers: Sequence[int]

    def __post_init__(self):
        _check_multiple(self.multiple)
        workers = list_of("workers", self.workers, Integral)
        workers = tuple(integer("each of workers", worker, 0) for worker in workers)
        object.__setattr__(self, "workers", workers)

    def factor(self, worker, step, seconds):
        is_slow = tf.reduce_any(tf.equal(worker, tf.constant(self.workers, tf.int64)))
        return tf.where(is_slow, tf.constant(self.multiple, tf.float32), 1.0)

    def check_workers(self, workers):
        for worker in self.workers:
            if worker >= workers:
                raise ValueError(
                    f"a slowdown has worker {worker}, and there are {workers}: workers must be "
                    f"indices below {workers}"
                )


@dataclasses.dataclass(frozen=True)
class RandomSlowdown(Slowdown):
    """Any step may be slower, by chance.

    Whether it is depends on the seed, the worker and the step alone, so that a
    run can be repeated. Two of the same seed, multiplied, have the same chance:
    give them seeds of their own.

    Attributes:
        multiple: the factor of a slow step, at least 0.
        probability: of a step to be slow, from 0 to 1.
        seed: an integer of 64 bits; default 0.

    Raises:
        ValueError: if an attribute is wrong.

    Example:
        >>> slow = RandomSlowdown(5.0, probability=0.1, seed=7)
    """

    multiple: float
    probability: float
    seed: int = 0

    def __post_init__(self):
        _check_multiple(self.multiple)
        number("probability", self.probability, least=0, most=1)
        integer("seed", self.seed, -(2**63), 2**63 - 1)

    def factor(self, worker, step, seconds):
        # No two steps of two workers share a number: few workers, and steps below 2 ** 40.
        number = tf.bitwise.left_shift(worker, tf.constant(40, tf.int64)) + step
        uniform = tf.random.stateless_uniform(
            [], tf.stack([tf.constant(self.seed, tf.int64), number]), alg="philox"
        )
        return tf.where(uniform < self.probability, tf.constant(self.multiple, tf.float32), 1.0)


@dataclasses.dataclass(frozen=True)
class ChangingSlowdown(Slowdown):
    """All workers get slower and faster in the course of a pass, as a shared cluster does.

    Figure 2 of the GBA paper (Su et al. 2022, section 3.1) shows the utilisation of
    a cluster over a day; what others use, a training lacks.

    Attributes:
        points: (time, factor) pairs, at least one, in the order of time. The factor
            between two is on the line that joins them; before the first and after
            the last, it stays. Two points of one time make a jump, from
            the first one's factor to the second one's.
        unit: the unit of the times: "seconds" since the pass began, when all workers
            were ready (default), or "steps" that the worker itself has done in it.
        period: after how much time everything begins again; None (default) for never.

    Raises:
        ValueError: if an attribute is wrong.

    Example:
        A day that lasts a minute, busiest at noon:

        >>> day = ChangingSlowdown([(0, 1.0), (30, 4.0), (60, 1.0)], period=60)
    """

    points: Sequence[tuple[float, float]]
    unit: str = "seconds"
    period: float | None = None

    def __post_init__(self):
        try:
            points = tuple((float(time), float(multiple)) for time, multiple in self.points)
        except (TypeError, ValueError):
            raise ValueError(
                f"points must be pairs of time and factor, got {self.points!r}"
            ) from None
        times = [time for time, _ in points]
        if not points or times != sorted(times) or not all(map(math.isfinite, times)):
            raise ValueError(
                f"points must be at least one, in the order of time, got {self.points!r}"
            )
        for _, multiple in points:
            _check_multiple(multiple)
        if self.unit not in ("seconds", "steps"):
            raise ValueError(f"unit must be 'seconds' or 'steps', got {self.unit!r}")
        if self.period is not None:
            number("period", self.period, above=0)
        object.__setattr__(self, "points", points)

    def factor(self, worker, step, seconds):
        time = tf.cast(seconds if self.unit == "seconds" else step, tf.float64)
        if self.period is not None:
            time = tf.math.floormod(time, tf.constant(self.period, tf.float64))
        points = tf.constant(self.points, tf.float64)
        after = tf.searchsorted(points[:, 0], time[tf.newaxis], side="right")[0]
        left = tf.gather(points, tf.maximum(after - 1, 0))
        right = tf.gather(points, tf.minimum(after, len(self.points) - 1))
        part = tf.math.divide_no_nan(time - left[0], right[0] - left[0])
        return tf.cast(left[1] + part * (right[1] - left[1]), tf.float32)


def _check_multiple(multiple: float) -> None:
    number("a factor", multiple, least=0)
