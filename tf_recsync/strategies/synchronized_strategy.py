"""The common base of strategies whose groups of workers have copies that are synchronized."""

from __future__ import annotations

from typing import Literal

import keras

from tf_recsync.cluster import Cluster
from tf_recsync.strategies.between_groups import Between
from tf_recsync.strategies.checks import OnBatchLost, check_optimizers, checked_output
from tf_recsync.strategies.copied_strategy import CopiedStrategy
from tf_recsync.strategies.hop_between_groups import Hop
from tf_recsync.strategies.model_variables import AsShown, OnServers
from tf_recsync.strategies.operators import Operators
from tf_recsync.strategies.server_threads import check_threads
from tf_recsync.strategies.train_function import TrainFunction
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.modes import Mode
from tf_recsync.synchronization.shadow_algorithms import Algorithm


class SynchronizedStrategy(CopiedStrategy):
    """Groups of trainers, each with a copy of the dense parameters, kept together by an algorithm.

    Args:
        cluster: the cluster.
        arrangement: the groups, and the servers that belong to none.
        mode: when the trainers of a group start, and how its copy is updated.
        between: what keeps copies together.
        threads: that train for each trainer.
        output: what reading a variable gives: "first", "mean", or the number of a group.
        local_batch_size: examples of a batch, or None if fit shall find out.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: if the output is wrong.
    """

    pushes_gradients = True  # Optimizers are applied in the workers' steps only.

    linked_jobs = ("ps", "worker")
    _operators: Operators | None = None  # Where layers run; None: on the trainers.

    def __init__(
        self,
        cluster: Cluster,
        arrangement: Arrangement,
        mode: Mode,
        between: Between,
        threads: int,
        output: Literal["first", "mean"] | int,
        local_batch_size: int | None,
        worker_timeout: float,
        silence_timeout: float | None,
        on_batch_lost: OnBatchLost,
    ):
        self._between = between
        self._read = checked_output(output, len(arrangement.groups))
        self.threads_per_worker = threads
        super().__init__(
            cluster,
            local_batch_size,
            worker_timeout,
            silence_timeout,
            on_batch_lost,
            arrangement,
            mode,
        )

    @property
    def algorithm(self) -> Algorithm | Hop:
        """How copies are synchronized."""
        return self._between.algorithm

    @property
    def sync_ps(self) -> tuple[int, ...]:
        """The task indices of the sync PSs."""
        return self._arrangement.sync_ps

    def _check_servers(self, cluster: Cluster, arrangement: Arrangement) -> None:
        threads = self.threads_per_worker
        # Its threads' steps, a synchronization of its own, and its part in another one's.
        check_threads(cluster, [threads + 2] * cluster.workers, "for other servers")
        self._between.check_servers(cluster, arrangement, threads)

    def _put_functions(self, model: keras.Model) -> None:
        model.train_function = TrainFunction(
            model,
            self._settings,
            OnServers(model, self._operators, self._local_batch_size),
            lambda copies: self._between.synchronizer(
                model, copies, self._settings, self.threads_per_worker
            ),
            self._read,
            self.threads_per_worker,
        )
        self._put_reading_functions(model, AsShown(model))

    def _check_optimizer(self, model: keras.Model) -> None:
        check_optimizers(self, model)
