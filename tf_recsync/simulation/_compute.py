"""How long the steps of simulated workers compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tf_recsync._checks import check_at_least, check_seed
from tf_recsync.simulation._factors import Factors
from tf_recsync.simulation._settings import MOST_NOISE, MOST_SECONDS, check_number
from tf_recsync.testing.slowdown import Slowdown


class StepFactor:
    """Gives by how many times as long a worker computes in a step.

    That is the factor of a slowdown, times a lognormal factor of mean 1.

    Args:
        workers: how many workers there are, an int of at least 1.
        slowdown: of `recsync.testing`; None (the default) for none.
        noise: sigma of the lognormal factor, from 0, the default, to 5.
        seed: of that, an int of 64 bits. Defaults to 0.

    Raises:
        ValueError: if an argument is wrong; or by a call, if the slowdown gives what is no factor.
    """

    def __init__(
        self, workers: int, slowdown: Slowdown | None = None, noise: float = 0.0, seed: int = 0
    ):
        check_at_least("workers", workers, 1)
        check_number("noise", noise, most=MOST_NOISE)
        check_seed(seed)
        self._noise = float(noise)
        self._random = [np.random.default_rng([seed, worker]) for worker in range(workers)]
        self._factors = None if slowdown is None else Factors(slowdown, workers, 1 << 10)
        self._blocks: dict[int, np.ndarray] = {}
        self._block_steps = 0

    def __call__(self, worker: int, step: int, now: float) -> float:
        """The factor of a worker's step.

        Args:
            worker: its index.
            step: the steps that it has done.
            now: the seconds since training began.
        """
        factor = 1.0
        if self._factors is not None:
            factor = self._of_slowdown(worker, step, now)
            if not 0 <= factor < math.inf:
                raise ValueError(
                    f"a slowdown's factor must be finite and at least 0, not {factor} of worker "
                    f"{worker} in step {step}"
                )
        if self._noise:
            # A step is asked for once, so that the same seed gives the same times.
            normal = self._random[worker].standard_normal()
            factor *= math.exp(self._noise * normal - 0.5 * self._noise**2)
        return factor

    def _of_slowdown(self, worker: int, step: int, now: float) -> float:
        if self._factors.depend_on_time:
            return self._factors.one(worker, step, now)
        if not self._block_steps:
            self._blocks[0] = self._factors.block(0)
            self._block_steps = self._blocks[0].shape[1]
        block, within = divmod(step, self._block_steps)
        if block not in self._blocks:
            self._blocks[block] = self._factors.block(block * self._block_steps)
        return float(self._blocks[block][worker, within])


class ComputeTime:
    """Gives the seconds that a worker computes in a step.

    They are a base time, times a `StepFactor`.

    Args:
        seconds: the base time, from 0 to a million: a number, or one for each worker.
        workers: as of `StepFactor`, as are the three that follow.
        slowdown: see there.
        noise: see there.
        seed: see there.
        argument: the name of the argument that has `seconds`; default "compute_seconds".

    Raises:
        ValueError: if an argument is wrong.

    >>> from tf_recsync import testing
    >>> from tf_recsync.simulation._compute import ComputeTime
    >>> compute = ComputeTime(0.5, workers=4, slowdown=testing.SlowWorkers(6.0, [1]))
    >>> compute(0, 0, 0.0), compute(1, 0, 0.0)
    (0.5, 3.0)
    """

    def __init__(
        self,
        seconds: float | Sequence[float],
        workers: int,
        slowdown: Slowdown | None = None,
        noise: float = 0.0,
        seed: int = 0,
        argument: str = "compute_seconds",
    ):
        check_at_least("workers", workers, 1)
        each = np.ndim(seconds) > 0
        given = list(seconds) if each else [seconds] * workers
        if len(given) != workers:
            raise ValueError(
                f"{argument} must be a number, or one for each of {workers} workers, not "
                f"{len(given)} numbers"
            )
        for worker, value in enumerate(given):
            name = f"{argument}[{worker}]" if each else argument
            check_number(name, value, most=MOST_SECONDS)
        self._base = [float(value) for value in given]
        self._factor = StepFactor(workers, slowdown, noise, seed)

    def __call__(self, worker: int, step: int, now: float) -> float:
        """The seconds of a worker's step.

        Args:
            worker: its index.
            step: the steps that it has done.
            now: the seconds since training began.
        """
        return self._base[worker] * self._factor(worker, step, now)
