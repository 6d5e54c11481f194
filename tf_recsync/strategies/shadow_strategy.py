"""Training with a copy of the parameters for each trainer, synchronized in the background."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tf_recsync import staleness
from tf_recsync._checks import check_at_least
from tf_recsync.cluster import Cluster
from tf_recsync.strategies import copied_functions, shadow_functions
from tf_recsync.strategies.copies_extended import CopiesExtended
from tf_recsync.strategies.fit_strategy import (
    FitStrategy,
    check_is_cluster,
    check_optimizers,
    check_timeouts,
)
from tf_recsync.strategies.model_variables import AsShown, optimizers_of
from tf_recsync.strategies.server_threads import check_threads
from tf_recsync.synchronization.modes import Mode
from tf_recsync.synchronization.pull_push import LOCAL, device_of
from tf_recsync.synchronization.shadow import ShadowGroup, SyncReport
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow
from tf_recsync.synchronization.worker_states import WorkerStates


class ShadowSyncStrategy(FitStrategy, tf.distribute.Strategy):
    """Trainers with copies of their own, synchronized in the background (ShadowSync).

    Every worker of the cluster is a trainer: it has its own copy of the dense parameters and
    of the optimizer's state, which its threads train side by side without locks (Hogwild).
    Embedding tables, of `EmbeddingCollection` or `keras.layers.Embedding`, exist once, on the
    embedding PSs, and all trainers update their rows. Meanwhile a loop for each trainer, which
    knows nothing of training, synchronizes the copies.

    `fit`, `evaluate` and `predict` of Keras 3 work as usual: build and compile the model in
    `scope()`, with an optimizer of `tf_recsync.optimizers`. A step of Keras is a batch of one
    thread. Variables read outside of training, and what is saved, are the first trainer's copy
    or the mean; assigning a variable assigns all copies.

    Reference: Zheng et al. 2021, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training".

    Args:
        cluster: a `LocalCluster`, or what `cluster_from_tf_config` returned: its workers are
            the trainers, its parameter servers the embedding PSs and the sync PSs.
        algorithm: how copies are synchronized: `EASGD`, `ModelAveraging`, `BMUF`, or an
            `Algorithm` of your own.
        mode: "shadow" (the default) or a `Shadow`: in the background; or a `Foreground`: as a
            part of training.
        threads_per_trainer: threads that train a trainer's copy side by side, an int of at
            least 1. Default 1.
        sync_ps: the parameter servers that hold the central copy: how many, the last ones of
            the cluster, or their task indices. All others are embedding PSs. Default: 1 with
            a central algorithm, as EASGD is, else 0.
        output: what reading a variable gives: "first" (the default) for the first trainer's
            copy, or "mean" for that of all.
        local_batch_size: examples of a batch, or None (the default) if fit shall find out.
        worker_timeout: seconds without any reachable worker after which training fails.
            Defaults to 600.
        silence_timeout: seconds after which a server that somebody waits for, and that gives
            no sign of life, is given up: because its machine hangs, or the network is cut. None
            (the default): `worker_timeout`, but at least 10 and at most 60.

    Raises:
        ValueError: if an argument is wrong or does not go with another one.

    Example:

    ```python
    cluster = recsync.LocalCluster(workers=4, ps=3)
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(alpha=0.3), threads_per_trainer=2, sync_ps=1
    )
    with strategy.scope():
        model = build_model()
        model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy")
    model.fit(dataset)
    print(strategy.average_sync_gap(model))
    ```
    """

    pushes_gradients = True  # Optimizers are applied in the workers' steps only.

    linked_jobs = ("ps", "worker")

    def __init__(
        self,
        cluster: Cluster,
        algorithm: Algorithm,
        mode: Literal["shadow"] | Shadow | Foreground = "shadow",
        *,
        threads_per_trainer: int = 1,
        sync_ps: int | Sequence[int] | None = None,
        output: Literal["first", "mean"] = "first",
        local_batch_size: int | None = None,
        worker_timeout: float = 600.0,
        silence_timeout: float | None = None,
    ):
        check_is_cluster(cluster)
        if not isinstance(algorithm, Algorithm):
            raise ValueError(
                "algorithm must be EASGD, ModelAveraging, BMUF or another Algorithm, not "
                f"{algorithm!r}"
            )
        if mode == "shadow":
            mode = Shadow()
        if not isinstance(mode, (Shadow, Foreground)):
            raise ValueError(f'mode must be "shadow", a Shadow or a Foreground, not {mode!r}')
        check_at_least("threads_per_trainer", threads_per_trainer, 1)
        if output not in ("first", "mean"):
            raise ValueError(f'output must be "first" or "mean", not {output!r}')
        if local_batch_size is not None:
            check_at_least("local_batch_size", local_batch_size, 1)
        check_timeouts(worker_timeout, silence_timeout)
        check_at_least("cluster.workers", cluster.workers, 1)
        self._sync_ps = _checked_sync_ps(sync_ps, algorithm, cluster.ps)
        self._embedding_ps = [ps for ps in range(cluster.ps) if ps not in self._sync_ps]
        self._algorithm = algorithm
        self._schedule = mode
        self.threads_per_worker = threads_per_trainer
        self._read = 0 if output == "first" else "mean"
        cluster.connect()
        # Its threads' steps, a synchronization of its own, and its part in another one's.
        check_threads(cluster, [threads_per_trainer + 2] * cluster.workers, "for other servers")
        super().__init__(CopiesExtended(self, cluster.check_open, self._embedding_ps))
        self._init_fit(cluster, local_batch_size, worker_timeout, silence_timeout, Mode("shadow"))

    @property
    def algorithm(self) -> Algorithm:
        """How copies are synchronized."""
        return self._algorithm

    @property
    def sync_ps(self) -> tuple[int, ...]:
        """The task indices of the sync PSs."""
        return tuple(self._sync_ps)

    @property
    def embedding_ps(self) -> tuple[int, ...]:
        """The task indices of the embedding PSs."""
        return tuple(self._embedding_ps)

    def placed_on(self, ps: int) -> contextlib.AbstractContextManager:
        """A context in which variables are made on one embedding PS, once for all trainers.

        Args:
            ps: its place among `embedding_ps`.

        Raises:
            ValueError: if there is no such server.
        """
        if not self._embedding_ps:
            raise ValueError(f"ps must be an embedding PS, not {ps!r}: there are none")
        if ps not in range(len(self._embedding_ps)):
            raise ValueError(
                f"ps must be from 0 to {len(self._embedding_ps) - 1}, not {ps!r}: there are "
                f"{len(self._embedding_ps)} embedding PSs"
            )
        return self.extended.placed_on(ps)

    def sync_report(self, model: keras.Model) -> SyncReport:
        """What synchronization has done since the model began to train.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Counts and times, all 0 before the model has trained.

        Raises:
            RuntimeError: if a sync PS is lost, or silent for `silence_timeout` seconds.
        """
        group = self._group(model)
        if group is None:
            nothing = [0] * self._cluster.workers
            return SyncReport(nothing, [0.0 for _ in nothing], 0, 0.0, 0, 0)
        batch = model.train_function.local_batch_size
        with self._watched(model):
            return dataclasses.replace(group.report(), local_batch_size=batch)

    def average_sync_gap(
        self, model: keras.Model, by: Literal["counters", "bytes"] = "counters"
    ) -> float:
        """The steps that a trainer does from one synchronization to the next, on average.

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

    def copies(self, model: keras.Model) -> list[list[np.ndarray] | None]:
        """The dense parameters of each trainer.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            For each trainer, by its index, arrays like those of `model.trainable_variables`
            that are not on embedding PSs; all the same before the model has trained. None for
            a trainer that is lost.
        """
        group = self._group(model)
        dense = [v for v in model.trainable_variables if device_of(v) == LOCAL]
        if group is None or not group.copies.workers:
            return [[np.asarray(v) for v in dense]] * self._cluster.workers
        with self._watched(model):
            return group.copies.by_worker(len(dense))

    def worker_states(self, model: keras.Model) -> WorkerStates:
        """The copies of each trainer and of the sync PSs, for a `tf.train.Checkpoint`.

        What a checkpoint keeps of the model alone is the output: one trainer's copy, or the
        mean, and the tables. With this, each trainer goes on with its own copy, optimizer state
        included, and the central copy, or BMUF's global parameters, with theirs. On another
        number of trainers all begin with the mean; the number of sync PSs may change. Save and
        restore between epochs.

        Args:
            model: a built model that was compiled in this strategy's scope.

        Returns:
            What goes into the checkpoint, beside the model.

        Raises:
            ValueError: if the model is not built, or from elsewhere.

        Example:

        ```python
        checkpoint = tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model))
        checkpoint.save("checkpoints/clicks")
        checkpoint.restore(tf.train.latest_checkpoint("checkpoints")).assert_consumed()
        ```
        """
        return copied_functions.worker_states(self, model)

    def staleness(self, model: keras.Model) -> staleness.Report:
        """The staleness measured since the model's optimizer was built.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Statistics of dense variables, which is that among the threads of a trainer, and of
            the rows of embedding tables, among all.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.
        """
        states = [s for o in optimizers_of(model) for s in o.states]
        group = self._group(model)
        of = staleness.Statistics.from_counters
        found: dict[str, list[np.ndarray]] = {}
        dense = [state for state in states if not state.is_table]
        with self._watched(model):
            for state in states:
                if state.is_table or group is None:
                    found[state.variable.path] = [np.asarray(state.counters._value.read_value())]
            for counted in [] if group is None else group.counted():
                for state, counters in zip(dense, counted, strict=True):
                    found.setdefault(state.variable.path, []).append(counters)
        dense = [c for s in dense for c in found.get(s.variable.path, [])]
        rows = [c for s in states if s.is_table for c in found[s.variable.path]]
        return staleness.Report(
            dense=of(dense),
            rows=of(rows),
            variables={path: of(counters) for path, counters in found.items()},
        )

    def _group(self, model: keras.Model) -> ShadowGroup | None:
        return getattr(model.train_function, "group", None)

    def _put_functions(self, model: keras.Model) -> None:
        counts_steps = getattr(self._schedule, "gap", None) is not None
        model.train_function = shadow_functions.ShadowTrainFunction(
            model,
            self._settings,
            self._make_group,
            self.threads_per_worker,
            counts_steps,
            self._read,
        )
        self._put_reading_functions(model, AsShown(model))

    def _make_group(self, copies, parameters: int, counters: list[int]) -> ShadowGroup:
        return ShadowGroup(
            self._algorithm,
            self._schedule,
            self._cluster,
            copies,
            parameters,
            counters,
            self._sync_ps,
            self.threads_per_worker,
            self._settings.bandwidths,
        )

    def _check_optimizer(self, model: keras.Model) -> None:
        check_optimizers(self, model)


def _checked_sync_ps(sync_ps: Any, algorithm: Algorithm, servers: int) -> list[int]:
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
