"""The training modes that users choose from, with the arguments of the strategies.

A mode says when a worker may start on a batch, and when the servers apply what workers push. For
each mode there is a strategy of one group of workers:

- `Async` (`AsyncStrategy`): no worker waits, and the servers apply each push.
- `Hogwild` (`ShadowSyncStrategy`, for the threads of a trainer): no thread waits, and each push is
  applied without locks.
- `Sync` (`SyncStrategy`): workers wait, and the servers apply a global batch, all of it computed on
  the same parameters.
- `BSP` (`BSPStrategy`): no worker waits, and the servers apply a global batch, however stale.
- `GBA` (`GBAStrategy`): no worker waits, and the servers apply a global batch, without what is too
  stale.
- `BackupWorkers` (`BackupWorkersStrategy`): workers wait, and the servers apply the batches of all
  workers but the slowest.
- `BoundedStaleness` (`BoundedStalenessStrategy`): workers wait if they are too far ahead, and the
  servers apply each push.

A mode can be made, and with it its arguments checked, before there is a cluster.

>>> import tf_recsync as recsync
>>> mode = recsync.modes.GBA(global_batch_size=2048, local_batch_size=512, staleness_tolerance=4)
>>> mode.on(workers=4).capacity  # How many pushes are applied together.
4
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from tf_recsync import staleness
from tf_recsync._checks import check_at_least, plain_values
from tf_recsync.synchronization.modes import LastGlobalBatch, Mode, check_last_global_batch

__all__ = [
    "Async",
    "BSP",
    "BackupWorkers",
    "BoundedStaleness",
    "GBA",
    "Hogwild",
    "ModeConfig",
    "Sync",
]

_TOLERANCE = 4  # Of GBA, where nothing else is said.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModeConfig(abc.ABC):
    """The base of the modes: what a group of workers does, whatever their number.

    Args:
        local_batch_size: examples of the dataset's batches, an int, or None (the default) if
            that is not known.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.modes.Async(local_batch_size=512).local_batch_size
    512
    """

    local_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        plain_values(self)
        if self.local_batch_size is not None:
            check_at_least("local_batch_size", self.local_batch_size, 1)

    def on(self, workers: int) -> Mode:
        """The mode on so many workers, as a row of the table in `synchronization.modes`.

        Args:
            workers: an int of at least 1.

        Returns:
            The row: how tokens are given out, how many pushes are applied together, how they are
            weighed, and what a worker waits for.

        Raises:
            ValueError: if there are too few workers.
        """
        check_at_least("workers", workers, 1)
        return self._on(workers)

    @abc.abstractmethod
    def _on(self, workers: int) -> Mode: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GlobalBatches(ModeConfig):
    """A mode in which servers apply global batches."""

    last_global_batch: LastGlobalBatch = "weigh"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_last_global_batch(self.last_global_batch)

    def _batches_of(self, global_batch_size: int) -> int:
        """How many local batches a global batch has."""
        check_at_least("global_batch_size", global_batch_size, 1)
        check_at_least("local_batch_size", self.local_batch_size, 1)
        if global_batch_size % self.local_batch_size:
            raise ValueError(
                f"global_batch_size must be a multiple of local_batch_size="
                f"{self.local_batch_size}, not {global_batch_size}"
            )
        return global_batch_size // self.local_batch_size

    def _mode(self, name: str, repeats: int, capacity: int, **others: Any) -> Mode:
        """A row of the table in which servers have buffers."""
        last = self.last_global_batch
        return Mode(name, repeats, capacity, uses_buffers=True, last_global_batch=last, **others)


class Async(ModeConfig):
    """Each push is applied at once, weighed by the optimizer's `staleness` policy.

    Reference: Liu and Zhao 2021, "Asynchronous Stochastic Gradient Descent for Extreme-Scale
    Recommender Systems", algorithms 1 and 2.

    Args:
        local_batch_size: as in `ModeConfig`.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.modes.Async().on(workers=4).name
    'async'
    """

    def _on(self, workers: int) -> Mode:
        return Mode("async")


class Hogwild(ModeConfig):
    """As `Async`, but pushes to dense parameters are applied side by side, without locks.

    Of two that come at the same time one may overwrite what the other adds to an element. Rows
    of embedding tables are updated under their locks all the same.

    Reference: Zheng et al. 2021, "ShadowSync", section 3.1; Recht et al. 2011, "Hogwild".

    Args:
        local_batch_size: as in `ModeConfig`.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.modes.Hogwild().on(workers=4).hogwild
    True
    """

    def _on(self, workers: int) -> Mode:
        return Mode("hogwild", hogwild=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync(_GlobalBatches):
    """The mean of a global batch's gradients is applied, all computed on the same parameters.

    Reference: Su et al. 2022, "GBA", section 5.1.

    Args:
        global_batch_size: examples that are applied together, a multiple of `local_batch_size`,
            which it needs. Defaults to None: one batch of each worker.
        local_batch_size: as in `ModeConfig`.
        last_global_batch: what becomes of the batches at the end of an epoch that do not fill a
            global batch. "weigh" (the default): they are applied at their share of it. "drop":
            they are left out. The share is that of the batches, not of the examples: each
            batch pushes the mean gradient of its own examples, and all pushes count alike, so
            that a last batch of fewer examples counts as much as a whole one.
            `dataset.batch(n, drop_remainder=True)` leaves it out.

    Raises:
        ValueError: if an argument is wrong, or the sizes do not fit together.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.modes.Sync().on(workers=4).capacity  # One batch of each worker.
    4
    """

    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_batch_size is not None:
            self._batches_of(self.global_batch_size)

    def _on(self, workers: int) -> Mode:
        size = self.global_batch_size
        batches = workers if size is None else self._batches_of(size)
        return self._mode("sync", batches, batches, gate="step", drop_late=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BSP(_GlobalBatches):
    """The mean of a global batch's gradients is applied, however stale; nobody waits.

    Reference: Su et al. 2022, "GBA", sections 3.2 and 5.1.

    Args:
        global_batch_size: examples that are applied together, a multiple of `local_batch_size`.
        local_batch_size: examples of the dataset's batches.
        last_global_batch: as in `Sync`.

    Raises:
        ValueError: if an argument is wrong, or the sizes do not fit together.

    Example:

    >>> import tf_recsync as recsync
    >>> mode = recsync.modes.BSP(global_batch_size=1024, local_batch_size=512)
    >>> mode.on(workers=4).capacity  # Batches that are applied together.
    2
    """

    global_batch_size: int
    local_batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._batches_of(self.global_batch_size)

    def _on(self, workers: int) -> Mode:
        batches = self._batches_of(self.global_batch_size)
        return self._mode("BSP", batches, batches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GBA(BSP):
    """BSP with control of staleness: gradients whose tokens are too old are left out.

    Reference: Su et al. 2022, "GBA", section 4.

    Args:
        global_batch_size: as in `BSP`.
        local_batch_size: as in `BSP`.
        staleness_tolerance: iota of Eq. 1, an int of at least 0: the largest age of a token, in
            global steps, whose gradient counts in full. Defaults to None: 4, or what a policy as
            `decay` says.
        decay: what becomes of older gradients. "threshold" (the default): left out.
            "inverse_power": weighted by ((iota + 1) / (age + 1))^2. Or a policy of
            `tf_recsync.staleness`, of tau = age + 1; `staleness_tolerance` must then be None.
        last_global_batch: as in `Sync`.

    Raises:
        ValueError: if an argument is wrong, or the sizes do not fit together.

    Example:

    >>> import tf_recsync as recsync
    >>> mode = recsync.modes.GBA(
    ...     global_batch_size=1024, local_batch_size=512, staleness_tolerance=3
    ... )
    >>> weight = mode.on(workers=4).weight  # Of tau, which is the age and 1.
    >>> weight(4), weight(5)
    (1.0, 0.0)
    """

    staleness_tolerance: int | None = None
    decay: str | staleness.Policy = "threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weight()

    def _on(self, workers: int) -> Mode:
        return dataclasses.replace(super()._on(workers), name="GBA", weight=self._weight())

    def _weight(self) -> staleness.Policy:
        """The weight of a token's age."""
        tolerance, decay = self.staleness_tolerance, self.decay
        if isinstance(decay, staleness.Policy):
            if tolerance is not None:
                raise ValueError(
                    f"staleness_tolerance must be None with a policy as decay, not {tolerance!r}"
                )
            if decay.uses_last_update or getattr(decay, "rescale", None) is not None:
                raise ValueError(f"decay must depend on the token's age alone, not {decay!r}")
            return decay
        if tolerance is None:
            tolerance = _TOLERANCE
        check_at_least("staleness_tolerance", tolerance, 0)
        if decay == "threshold":
            return staleness.Threshold(iota=tolerance)
        if decay == "inverse_power":
            return staleness.InversePower(k=2, baseline=tolerance + 1)
        raise ValueError(
            "decay must be 'threshold', 'inverse_power' or a policy of tf_recsync.staleness, "
            f"not {decay!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackupWorkers(_GlobalBatches):
    """Of n workers' batches in a step the first n - b are applied; what comes later is dropped.

    Reference: Su et al. 2022, "GBA", section 5.1; Luo et al. 2019, "Hop".

    Args:
        backup_workers: b, how many workers are not waited for, an int from 0 to the number of
            workers less 1.
        local_batch_size: as in `ModeConfig`.
        last_global_batch: as in `Sync`.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.modes.BackupWorkers(backup_workers=1).on(workers=4).capacity
    3
    """

    backup_workers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("backup_workers", self.backup_workers, 0)

    def _on(self, workers: int) -> Mode:
        if self.backup_workers >= workers:
            raise ValueError(
                f"backup_workers must be less than the cluster's {workers} workers, "
                f"not {self.backup_workers}"
            )
        capacity = workers - self.backup_workers
        return self._mode("backup-worker", workers, capacity, gate="step", drop_late=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedStaleness(ModeConfig):
    """As `Async`, but a worker may be so many batches ahead of the slowest one, and then waits.

    Reference: Su et al. 2022, "GBA", section 5.1; Ho et al. 2013, "More effective distributed ML
    via a stale synchronous parallel parameter server".

    Args:
        staleness_bound: b1, in batches, an int of at least 0.
        local_batch_size: as in `ModeConfig`.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.modes.BoundedStaleness(staleness_bound=2).on(workers=4).name
    'bounded-staleness'
    """

    staleness_bound: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("staleness_bound", self.staleness_bound, 0)

    def _on(self, workers: int) -> Mode:
        return Mode("bounded-staleness", gate="clock", clock_bound=self.staleness_bound)
