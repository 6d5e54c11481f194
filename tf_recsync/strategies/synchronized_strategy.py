"""The common base of strategies whose groups of workers have copies that are synchronized."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal

import keras
import numpy as np

from tf_recsync import staleness
from tf_recsync._checks import check_at_least
from tf_recsync.cluster import Cluster
from tf_recsync.strategies.copied_strategy import CopiedStrategy
from tf_recsync.strategies.fit_strategy import check_optimizers, checked_output
from tf_recsync.strategies.hop_between_groups import Hop
from tf_recsync.strategies.model_variables import AsShown, OnServers, optimizers_of
from tf_recsync.strategies.server_threads import check_threads
from tf_recsync.strategies.train_function import TrainFunction
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import Copies, is_copied
from tf_recsync.synchronization.modes import Mode
from tf_recsync.synchronization.shadow import ShadowSynchronizer
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow
from tf_recsync.synchronization.sync_report import SyncReport
from tf_recsync.synchronization.synchronizer import Synchronizer


class SynchronizedStrategy(CopiedStrategy):
    """Groups of trainers, each with a copy of the dense parameters, kept together by an algorithm.

    Args:
        cluster: the cluster.
        arrangement: the groups, and the servers that belong to none.
        mode: when the trainers of a group start, and how its copy is updated.
        algorithm: how copies are synchronized.
        schedule: when, if the algorithm does not say that itself.
        threads: that train for each trainer.
        output: what reading a variable gives: "first", "mean", or the number of a group.
        local_batch_size: examples of a batch, or None if fit shall find out.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.

    Raises:
        ValueError: if the output is wrong.
    """

    pushes_gradients = True  # Optimizers are applied in the workers' steps only.

    linked_jobs = ("ps", "worker")

    def __init__(
        self,
        cluster: Cluster,
        arrangement: Arrangement,
        mode: Mode,
        algorithm: Algorithm | Hop,
        schedule: Shadow | Foreground,
        threads: int,
        output: Literal["first", "mean"] | int,
        local_batch_size: int | None,
        worker_timeout: float,
        silence_timeout: float | None,
    ):
        self._algorithm = algorithm
        self._schedule = schedule
        read = checked_output(output, len(arrangement.groups))
        self.threads_per_worker = threads
        cluster.connect()
        # Its threads' steps, a synchronization of its own, and its part in another one's.
        check_threads(cluster, [threads + 2] * cluster.workers, "for other servers")
        super().__init__(
            cluster, arrangement, mode, read, local_batch_size, worker_timeout, silence_timeout
        )

    @property
    def algorithm(self) -> Algorithm | Hop:
        """How copies are synchronized."""
        return self._algorithm

    @property
    def sync_ps(self) -> tuple[int, ...]:
        """The task indices of the sync PSs."""
        return self._arrangement.sync_ps

    def sync_report(self, model: keras.Model) -> SyncReport:
        """What synchronization has done since the model began to train.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Counts and times, all 0 before the model has trained.

        Raises:
            RuntimeError: if a sync PS is lost, or silent for `silence_timeout` seconds.
        """
        synchronizer = self._synchronizer(model)
        if synchronizer is None:
            nothing = [0] * len(self._arrangement.groups)
            return SyncReport(nothing, [0.0 for _ in nothing], 0, 0.0, 0, 0)
        batch = model.train_function.local_batch_size
        with self._guard.watched():
            return dataclasses.replace(synchronizer.report(), local_batch_size=batch)

    def average_sync_gap(
        self, model: keras.Model, by: Literal["counters", "bytes"] = "counters"
    ) -> float:
        """The steps that a group does from one synchronization to the next, on average.

        Under a `ShadowSyncStrategy` each trainer is a group.

        Reference: section 4.1.1 of the paper, which measures it in both ways.

        Args:
            model: a model that was compiled in this strategy's scope.
            by: "counters" (the default): steps over synchronizations, as they were counted;
                "bytes": steps over what the sync PSs have received and sent, in sizes of the
                parameters, there and back.

        Returns:
            The gap in steps; infinite before the first synchronization, and by bytes where
            there are no sync PSs.

        Raises:
            ValueError: if `by` is anything else.
        """
        if by not in ("counters", "bytes"):
            raise ValueError(f'by must be "counters" or "bytes", not {by!r}')
        report = self.sync_report(model)
        syncs = sum(report.syncs)
        if by == "bytes":
            syncs = report.sync_ps_bytes / (8 * report.elements) if report.elements else 0
        return report.steps / syncs if syncs else float("inf")

    def staleness(self, model: keras.Model) -> staleness.Report:
        """The staleness measured since the model's optimizer was built.

        Where servers collect pushes, that of dense variables is in global steps of the group, of
        each push counted since the model began to train here.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Statistics of dense variables, which is that inside a group, and of the rows of
            embedding tables, among all.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.
        """
        states = [s for o in optimizers_of(model) for s in o.states]
        synchronizer = self._synchronizer(model)
        of = staleness.Statistics.from_counters
        found: dict[str, list[np.ndarray]] = {}
        dense = [state for state in states if not state.is_table]
        with self._guard.watched():
            for state in states:
                if state.is_table or synchronizer is None:
                    found[state.variable.path] = [np.asarray(state.counters._value.read_value())]
            for counts in [] if synchronizer is None else synchronizer.counted():
                for state, counters in zip(dense, counts, strict=True):
                    found.setdefault(state.variable.path, []).append(counters)
            collected = of([c for s in dense for c in found.get(s.variable.path, [])])
            if self.mode.uses_buffers:
                live = getattr(model.train_function, "aggregations", {}).values()
                collected = staleness.Statistics.sum(a.report().staleness for a in live)
        rows = [c for s in states if s.is_table for c in found[s.variable.path]]
        return staleness.Report(
            dense=collected,
            rows=of(rows),
            variables={path: of(counters) for path, counters in found.items()},
        )

    def _put_functions(self, model: keras.Model) -> None:
        model.train_function = TrainFunction(
            model,
            self._settings,
            self._on_servers(model),
            lambda copies: self._make_synchronizer(model, copies),
            self._read,
            self.threads_per_worker,
        )
        self._put_reading_functions(model, AsShown(model))

    def _on_servers(self, model: keras.Model) -> OnServers:
        """Where training steps find a model's variables."""
        return OnServers(model)

    def _make_synchronizer(self, model: keras.Model, copies: Copies) -> Synchronizer:
        return ShadowSynchronizer(
            self._algorithm,
            self._schedule,
            self._cluster,
            self._arrangement,
            copies,
            parameters_among(copies, model),
            counters_among(copies, model),
            self.threads_per_worker,
            self._settings.bandwidths,
        )

    def _check_optimizer(self, model: keras.Model) -> None:
        check_optimizers(self, model)


def parameters_among(copies: Copies, model: keras.Model) -> int:
    """How many of the copied variables are parameters: the first ones."""
    copied = [variable for variable in model.trainable_variables if is_copied(variable)]
    return sum(len(copies.places(variable._value)) for variable in copied)


def counters_among(copies: Copies, model: keras.Model) -> list[int]:
    """Which of the copied variables count the staleness of updates.

    All pieces of a variable are pushed together: the first one's stand for it.
    """
    states = [s for o in optimizers_of(model) for s in o.states if not s.is_table]
    return [copies.places(state.counters._value)[0] for state in states]


def checked_schedule(schedule: Literal["shadow"] | Shadow | Foreground) -> Shadow | Foreground:
    """When copies are synchronized; raises a ValueError if an argument does not say it."""
    if schedule == "shadow":
        return Shadow()
    if not isinstance(schedule, (Shadow, Foreground)):
        raise ValueError(f'mode must be "shadow", a Shadow or a Foreground, not {schedule!r}')
    return schedule


def check_algorithm(algorithm: Algorithm) -> None:
    """Raises a ValueError if an argument is no algorithm that synchronizes trainers."""
    if isinstance(algorithm, Hop):
        raise ValueError(
            "algorithm must not be Hop under a ShadowSyncStrategy: use a HopStrategy, or Hop "
            "between the groups of a HierarchicalStrategy"
        )
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"algorithm must be EASGD, ModelAveraging, BMUF or another Algorithm, not {algorithm!r}"
        )


def checked_sync_ps(sync_ps: Any, algorithm: Algorithm | Hop, servers: int) -> list[int]:
    """The task indices of the sync PSs, if there are as many as the algorithm needs."""
    name = type(algorithm).__name__
    if sync_ps is None:
        sync_ps = 1 if algorithm.is_central else 0
    if isinstance(sync_ps, Integral) and not isinstance(sync_ps, bool):
        check_at_least("sync_ps", int(sync_ps), 0)
        if sync_ps > servers:
            raise ValueError(
                f"sync_ps={sync_ps} needs as many parameter servers, the cluster has ps={servers}"
            )
        indices = list(range(servers - int(sync_ps), servers))
    else:
        if not isinstance(sync_ps, Sequence) or isinstance(sync_ps, (str, bytes)):
            raise ValueError(f"sync_ps must be a number or task indices, not {sync_ps!r}")
        indices = list(sync_ps)
        for index in indices:
            if isinstance(index, bool) or not isinstance(index, Integral):
                raise ValueError(f"sync_ps must be a number or task indices, not {sync_ps!r}")
            if not 0 <= index < servers:
                raise ValueError(f"sync_ps names ps:{index}, the cluster has ps={servers}")
        if len(set(indices)) < len(indices):
            raise ValueError(f"sync_ps must name each server once, not {sync_ps!r}")
    if algorithm.is_central and not indices:
        raise ValueError(
            f"{name} needs at least one sync PS: sync_ps={sync_ps!r}, the cluster has ps={servers}"
        )
    if not algorithm.is_central and indices:
        raise ValueError(
            f"{name} synchronizes trainers directly and has no use for sync PSs: sync_ps must be "
            f"0, not {sync_ps!r}"
        )
    return [int(index) for index in indices]
