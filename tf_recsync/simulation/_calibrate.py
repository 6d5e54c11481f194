"""What a simulation needs to know of steps, measured on a real run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_recsync._checks import check_at_least
from tf_recsync.optimizers.base import parts_of
from tf_recsync.strategies.fit_strategy import FitStrategy

_ROW_EXTRA_BYTES = 8  # Of a row's number.
_LEAST = 3  # Steps of a worker that are measured.
# It is given up after so many times as many steps as are asked for, and so many seconds: workers
# tell of their waits twice a second.
_MOST = 20
_MOST_SECONDS = 60.0
_WITHOUT_END = 2**40  # Steps.


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured of a model's steps, as `run` takes it.

    Attributes:
        compute_seconds: of a step of each worker, without waits for data; what the messages of the
            cluster on which it was measured cost is in it.
        pull_bytes: what a step pulls from all servers together.
        push_bytes: what it pushes to them.
        steps_per_second: of all workers together.
        ps: how many parameter servers there were.

    Example:

    >>> import tf_recsync as recsync
    >>> measured = recsync.simulation.Calibration((0.1, 0.3), 4000, 4000, 13.3, ps=1)
    >>> measured.arguments(workers=3)["compute_seconds"]
    [0.1, 0.3, 0.1]
    """

    compute_seconds: tuple[float, ...]
    pull_bytes: int
    push_bytes: int
    steps_per_second: float
    ps: int

    def arguments(self, workers: int | None = None, ps: int | None = None) -> dict[str, Any]:
        """Arguments of `run`, for as many machines.

        Args:
            workers: how many, an int of at least 1; None (the default): as many as there were. If
                they are more, the measured ones are repeated in their order.
            ps: how many parameter servers; None (the default): as many as there were.

        Returns:
            `workers`, `ps`, `compute_seconds`, `pull_bytes` and `push_bytes`.

        Raises:
            ValueError: if an argument is wrong.
        """
        measured = self.compute_seconds
        workers = len(measured) if workers is None else workers
        ps = self.ps if ps is None else ps
        check_at_least("workers", workers, 1)
        check_at_least("ps", ps, 1)
        return {
            "workers": workers,
            "ps": ps,
            "compute_seconds": [measured[i % len(measured)] for i in range(workers)],
            "pull_bytes": self.pull_bytes,
            "push_bytes": self.push_bytes,
        }

    def __str__(self) -> str:
        least, most = min(self.compute_seconds), max(self.compute_seconds)
        return (
            f"measured with {len(self.compute_seconds)} workers, {self.ps} parameter servers: "
            f"a step computes {least:.4g} to {most:.4g} s, pulls {self.pull_bytes:,} bytes and "
            f"pushes {self.push_bytes:,}; {self.steps_per_second:.4g} steps a second"
        )


def calibrate(model: keras.Model, dataset: tf.data.Dataset, steps: int = 200) -> Calibration:
    """Measures steps on a real cluster, to simulate a larger one.

    It trains the model for some steps, under an `AsyncStrategy`, in which no worker waits for
    another.

    Args:
        model: compiled in the scope of an `AsyncStrategy`.
        dataset: as of `fit`; it is repeated.
        steps: that are measured at least, of all workers together; an int of at least 10 for each
            worker. Half as many come before them, and more if a worker has done none by then. Steps
            go on until each worker has told of its waits for data, which it does twice a second.

    Returns:
        What was measured. The bytes are those of the dense variables, and of the rows of tables
        that a step has updated on average.

    Raises:
        ValueError: if the model's strategy is another one, or there are too few steps.
        RuntimeError: if a worker does none of twenty times as many steps, and none in a minute.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_recsync as recsync
    >>> x = np.ones((64, 3), np.float32)
    >>> dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.AsyncStrategy(cluster)
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...         model.compile(recsync.optimizers.SGD(0.01), "mse")
    ...     measured = recsync.simulation.calibrate(model, dataset, steps=40)
    >>> measured.pull_bytes  # Of three weights and a bias.
    16
    >>> result = recsync.simulation.run(
    ...     recsync.modes.Async(), steps=1000, **measured.arguments(workers=100)
    ... )
    """
    strategy = model.distribute_strategy
    if not isinstance(strategy, FitStrategy) or strategy.mode.name != "async":
        raise ValueError(
            "model must be compiled in the scope of an AsyncStrategy, in which no worker waits "
            f"for another, not of a {type(strategy).__name__}"
        )
    workers = strategy.cluster.workers
    check_at_least("steps", steps, 10 * workers)
    readings = _Readings(steps)
    # The end of the pass, at which fast workers wait for slow ones, is not measured.
    model.fit(dataset.repeat(), steps_per_epoch=_WITHOUT_END, verbose=0, callbacks=[readings])
    if len(readings.taken) < 2:
        raise RuntimeError(
            f"some workers have done less than {_LEAST} steps: by worker they did "
            f"{strategy.worker_steps(model)}"
        )
    first, last = readings.taken
    done = last.steps - first.steps
    seconds = last.time - first.time
    dense, rows = 0, 0.0
    for state in (state for one in parts_of(model.optimizer) for state in one.states):
        size = math.prod(state.variable.shape)
        if not state.is_table:
            dense += 4 * size
            continue
        path = state.variable.path
        updates = last.updates[path] - first.updates.get(path, 0)
        width = size // max(state.variable.shape[0], 1)
        rows += updates / done.sum() * (4 * width + _ROW_EXTRA_BYTES)
    return Calibration(
        compute_seconds=_compute_seconds(first, last),
        pull_bytes=dense + round(rows),
        push_bytes=dense + round(rows),
        steps_per_second=float(done.sum() / seconds),
        ps=strategy.cluster.ps,
    )


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What is known at one moment of a pass; arrays are by worker."""

    time: float
    steps: np.ndarray
    known: np.ndarray  # Those of the steps of which the waits are known.
    waited: np.ndarray  # The seconds that it has waited for data in these.
    updates: dict[str, int]  # By variable, of rows one by one.


def _compute_seconds(first: _Reading, last: _Reading) -> tuple[float, ...]:
    """How long a step of each worker takes, without its waits."""
    each = (last.time - first.time) / (last.steps - first.steps)
    # What is known of waits is of fewer steps than those that are done by now.
    waits = (last.waited - first.waited) / (last.known - first.known)
    return tuple(np.maximum(each - waits, 0.0).tolist())


class _Readings(keras.callbacks.Callback):
    """Reads how far workers are after some steps, and again after more; then training ends.

    In between, each worker has told of its waits.
    """

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic):
        super().__init__()
        self._steps = steps
        self._now = now
        self._began = now()
        self.taken: list[_Reading] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if len(self.taken) == 2:
            self.model.stop_training = True
            return
        steps = np.array(strategy.worker_steps(self.model))
        known, waited = map(
            np.array, zip(*self.model.train_function.steps_and_waits(), strict=True)
        )
        if self.taken and np.any(known < self.taken[0].known):
            self.taken.clear()  # A worker was lost, and another one counts in its place.
        more, more_known = steps, known
        if self.taken:
            more, more_known = steps - self.taken[0].steps, known - self.taken[0].known
        least = self._steps / (1 if self.taken else 2)
        if more.sum() < least or min(*more, *more_known) < _LEAST:
            is_late = self._now() - self._began >= _MOST_SECONDS
            self.model.stop_training = is_late and steps.sum() >= _MOST * self._steps
            return
        variables = strategy.staleness(self.model).variables
        self.taken.append(
            _Reading(
                self._now(),
                steps,
                known,
                waited,
                {path: found.count for path, found in variables.items()},
            )
        )
