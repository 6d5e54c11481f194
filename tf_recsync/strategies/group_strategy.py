"""The strategies' common base: plain Keras `model.fit` on workers and parameter servers."""

from __future__ import annotations

import contextlib

import keras
import numpy as np

from tf_recsync import staleness
from tf_recsync.cluster import Cluster
from tf_recsync.modes import ModeConfig
from tf_recsync.strategies.fit_strategy import (
    FitStrategy,
    check_cluster,
    check_optimizers,
    check_timeouts,
)
from tf_recsync.strategies.model_variables import OnServers, optimizers_of
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
        prefetch_lookups: whether a step pulls the rows that the next one looks up.
    """

    pushes_gradients = True  # Optimizers are applied in the workers' steps only.

    def __init__(
        self,
        cluster: Cluster,
        mode: ModeConfig,
        worker_timeout: float,
        silence_timeout: float | None,
        prefetch_lookups: bool = False,
    ):
        check_cluster(type(self).__name__, cluster)
        if not isinstance(prefetch_lookups, bool):
            raise ValueError(f"prefetch_lookups must be a bool, not {prefetch_lookups!r}")
        check_timeouts(worker_timeout, silence_timeout)
        super().__init__(
            cluster,
            mode.local_batch_size,
            worker_timeout,
            silence_timeout,
            one_group(cluster.workers, cluster.ps),
            mode.on(cluster.workers),
            prefetch_lookups,
        )

    @property
    def embedding_ps(self) -> tuple[int, ...]:
        """The task indices of the servers that embedding tables are placed on: all."""
        return tuple(range(self._cluster.ps))

    def placed_on(self, ps: int) -> contextlib.AbstractContextManager:
        """A context in which variables are made on one parameter server.

        Args:
            ps: its task index. Without this context variables go round robin.

        Raises:
            ValueError: if there is no such server.
        """
        if not 0 <= ps < self._cluster.ps:
            raise ValueError(f"ps must be from 0 to {self._cluster.ps - 1}, not {ps!r}")
        return self.extended.placed_on(ps)

    def staleness(self, model: keras.Model) -> staleness.Report:
        """The staleness measured by the servers since the model's optimizer was built.

        Where servers collect pushes, that of dense variables is in global steps, of each
        push counted since the model began to train here; that of rows, and of single
        variables, is of each application, for the oldest gradient in it.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Statistics of the dense variables, of the rows of embedding tables,
            and of each variable.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.
        """
        states = [s for o in optimizers_of(model) for s in o.states]
        with self._guard.watched():
            counters = {s.variable.path: np.asarray(s.counters._value.read_value()) for s in states}
        of = staleness.Statistics.from_counters
        dense = of(counters[s.variable.path] for s in states if not s.is_table)
        if self.mode.uses_buffers:
            pushes = self.aggregation(model)
            dense = pushes.staleness if pushes is not None else of([])
        return staleness.Report(
            dense=dense,
            rows=of(counters[s.variable.path] for s in states if s.is_table),
            variables={path: of([values]) for path, values in counters.items()},
        )

    def _put_functions(self, model: keras.Model) -> None:
        variables = OnServers(model)
        model.train_function = TrainFunction(model, self._settings, variables)
        self._put_reading_functions(model, variables)

    def _check_optimizer(self, model: keras.Model) -> None:
        check_optimizers(self, model)

    def aggregation(self, model: keras.Model) -> aggregation.Report | None:
        """What became of the workers' pushes since the model began to train.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Counts of pushes included, decayed, excluded, dropped and lost, ages of
            tokens, staleness in global steps; None before the model trains, and where
            servers apply each push at once and no tokens are used.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.
        """
        live = getattr(model.train_function, "aggregations", {})
        if not live:
            return None
        with self._guard.watched():
            return live[0].report()
