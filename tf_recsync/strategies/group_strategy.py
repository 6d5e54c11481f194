"""The strategies' common base: plain Keras `model.fit` on workers and parameter servers."""

from __future__ import annotations

import keras

from tf_recsync._checks import check_bool
from tf_recsync.cluster import Cluster
from tf_recsync.modes import ModeConfig
from tf_recsync.strategies.checks import (
    OnBatchLost,
    check_cluster,
    check_optimizers,
    check_timeouts,
)
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.strategies.model_variables import OnServers
from tf_recsync.strategies.train_function import TrainFunction
from tf_recsync.synchronization import aggregation
from tf_recsync.synchronization.arrangement import one_group


class GroupStrategy(FitStrategy):
    """One group of workers, which share the parameters on the servers.

    A `tf.distribute` strategy on which `model.fit`, `evaluate` and `predict`
    of Keras 3 work: build and compile the model in `scope()`, with
    an optimizer of `tf_recsync.optimizers`, and call them as usual, with a
    batched tf.data.Dataset. Each batch goes to one worker, and a faster worker
    takes more. Metrics are kept by each worker and merged when read.

    The base of the strategies, which differ in their mode: when a worker may start on
    a batch, and when the servers apply what workers push.

    Args:
        cluster: a `LocalCluster`, or what `cluster_from_tf_config` returned, with
            at least one worker and one parameter server.
        mode: one of `tf_recsync.modes`.
        worker_timeout: seconds without any reachable worker after which training
            fails.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.
        prefetch_lookups: whether a step pulls the rows that the next one looks up.
    """

    pushes_gradients = True  # Optimizers are applied in the workers' steps only.

    def __init__(
        self,
        cluster: Cluster,
        mode: ModeConfig,
        worker_timeout: float,
        silence_timeout: float | None,
        on_batch_lost: OnBatchLost,
        prefetch_lookups: bool = False,
    ):
        check_cluster(type(self).__name__, cluster)
        check_bool("prefetch_lookups", prefetch_lookups)
        check_timeouts(worker_timeout, silence_timeout)
        super().__init__(
            cluster,
            mode.local_batch_size,
            worker_timeout,
            silence_timeout,
            on_batch_lost,
            one_group(cluster.workers, cluster.ps),
            mode.on(cluster.workers),
            prefetch_lookups,
        )

    def _put_functions(self, model: keras.Model) -> None:
        variables = OnServers(model)
        model.train_function = TrainFunction(model, self._settings, variables)
        self._put_reading_functions(model, variables)

    def _check_optimizer(self, model: keras.Model) -> None:
        check_optimizers(self, model)

    def aggregation(self, model: keras.Model) -> aggregation.Report | None:
        """What became of the workers' pushes since the model began to train.

        When training goes on after the loss of a parameter server, this has what was counted up
        to the end of the epoch before, or up to the last call of this method or of `staleness`.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Counts of pushes included, decayed, excluded, dropped and lost, ages of
            tokens, staleness in global steps; None before the model trains, and where
            servers apply each push at once and no tokens are used.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.
        """
        reports = getattr(model.train_function, "aggregation_reports", list)
        with self._guard.watched():
            return next(iter(reports()), None)
