"""Decentralized training: every worker has its own parameters and talks to its neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import keras

from tf_recsync._checks import check_seconds
from tf_recsync._deprecation import keywords_after, renamed, renamed_method
from tf_recsync.cluster import Cluster
from tf_recsync.strategies import hop_checks
from tf_recsync.strategies.checks import (
    OnBatchLost,
    check_is_cluster,
    check_timeouts,
    checked_output,
)
from tf_recsync.strategies.copied_strategy import CopiedStrategy
from tf_recsync.strategies.hop_functions import HopTrainFunction
from tf_recsync.strategies.model_variables import AsShown
from tf_recsync.strategies.server_threads import check_threads
from tf_recsync.synchronization.arrangement import Arrangement, each_worker
from tf_recsync.synchronization.hop import threads_needed
from tf_recsync.synchronization.hop_protocol import Skip
from tf_recsync.synchronization.hop_reports import WorkerReport
from tf_recsync.synchronization.modes import Mode
from tf_recsync.topology import Topology


class HopStrategy(CopiedStrategy):
    """Decentralized training that tolerates slow workers (Hop).

    Every worker holds its own copy of the parameters, and trains it with any Keras
    optimizer but Ftrl on its own batches. In each iteration it sends its parameters to its
    out-neighbors, and averages those of its in-neighbors into its own.

    There need be no parameter servers. If the cluster has some, they hold the tables of
    `EmbeddingCollection`, which there are once: all workers pull and push their rows, without
    waiting for each other, and exchange all other parameters. A model with such tables needs an
    optimizer of `tf_recsync.optimizers`, whose staleness policy weighs pushes to rows.

    `fit`, `evaluate` and `predict` of Keras 3 work as usual: build and compile the model in
    `scope()`. A step of Keras is a batch of one worker. Variables read outside of training
    are the mean of the workers' copies, and so is what is saved; assigning a variable
    assigns all copies. Workers begin an epoch together, with their own copies.

    What a worker waits for before it goes on to the next iteration:

    - By default, the updates of this iteration of all its in-neighbors.
    - `backup_workers=b`: of all but b of them; those that are there are averaged.
    - `staleness_bound=s`: from each in-neighbor an update of at most s iterations ago; newer
      ones weigh more.
    - Both: that from all but b of them.
    - And with token queues, until it is at most `max_iteration_gap` iterations ahead of any
      out-neighbor.

    Reference: Luo et al. 2019, "Hop: Heterogeneity-aware Decentralized Training".

    Args:
        cluster: a `LocalCluster`, or what `cluster_from_tf_config` returned, with as many
            workers as the topology. Its parameter servers, if it has any, are embedding PSs;
            without any, every worker has a copy of all tables. Those of
            `keras.layers.Embedding` are copied in any case.
        topology: who sends to whom, with which weights: see `tf_recsync.topology`.
        max_iteration_gap: how many iterations a worker may be ahead of an out-neighbor, an
            int of at least 1. None: without token queues; the topology bounds the gap.
            Defaults to 5, and to None with "notify_ack".
        backup_workers: an int, or one for each worker: less than the in-neighbors of the
            worker, itself included. Defaults to 0.
        staleness_bound: an int of at least 0, or None (the default): updates must be of the
            receiver's iteration.
        skip: a `Skip`, by which a slow worker skips iterations; or None (the default). It
            needs backup workers or a staleness bound: without, a worker is at most one
            iteration behind, and a log entry says that nobody will skip any.
        order: "parallel" (the default): a worker sends the parameters that it computes
            gradients on, meanwhile. "serial": it computes and applies them first.
        protocol: "token_queue" (the default), or "notify_ack", in which a worker sends only
            when all out-neighbors have used what it sent before.
        output: what reading a variable gives: "mean" (the default) of the workers' copies,
            "first" for the first worker's, or the index of a worker.
        check_invariants: whether iterations and tokens are compared with the bounds of the
            paper's table 1 while training runs, up to 20 times a second; a violation, which
            would be a bug, ends it with an error. Defaults to False.
        stall_seconds: after how many seconds of waiting a log entry names the worker, whom it
            waits for and for which iteration. Defaults to 60.
        worker_timeout: seconds without any reachable worker after which training fails.
            Defaults to 600.
        silence_timeout: seconds after which a server that somebody waits for, and that gives
            no sign of life, is given up: because its machine hangs, or the network is cut. None
            (the default): `worker_timeout`, but at least 10 and at most 60.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: if an argument is wrong or does not go with another one.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_recsync as recsync
    >>> x = np.arange(64, dtype=np.float32)[:, None] / 64
    >>> dataset = tf.data.Dataset.from_tensor_slices((x, x > 0.5)).batch(8)
    >>> with recsync.LocalCluster(workers=3, ps=0, processes=0) as cluster:
    ...     strategy = recsync.HopStrategy(cluster, recsync.topology.ring(3))
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
    ...         model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    ...     history = model.fit(dataset, verbose=0)
    ...     copies = strategy.copies(model)
    >>> len(copies)  # Each worker has one.
    3
    """

    copies_tables = True

    @renamed("read", "output")
    @keywords_after(2)
    def __init__(
        self,
        cluster: Cluster,
        topology: Topology,
        *,
        max_iteration_gap: int | None | Literal["default"] = "default",
        backup_workers: int | Sequence[int] = 0,
        staleness_bound: int | None = None,
        skip: Skip | None = None,
        order: Literal["parallel", "serial"] = "parallel",
        protocol: Literal["token_queue", "notify_ack"] = "token_queue",
        output: Literal["mean", "first"] | int = "mean",
        check_invariants: bool = False,
        stall_seconds: float = 60.0,
        worker_timeout: float = 600.0,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        check_is_cluster(cluster)
        hop_checks.check_topology(topology, cluster.workers, "the cluster")
        self._read = checked_output(output, cluster.workers)
        check_seconds("stall_seconds", stall_seconds)
        check_timeouts(worker_timeout, silence_timeout)
        ahead = max_iteration_gap, backup_workers, staleness_bound, skip
        self._stall_seconds = stall_seconds
        self._protocol = hop_checks.checked_protocol(
            topology, *ahead, order, protocol, check_invariants
        )
        super().__init__(
            cluster,
            None,
            worker_timeout,
            silence_timeout,
            on_batch_lost,
            each_worker(cluster.workers, embedding_ps=range(cluster.ps)),
            Mode("local"),  # Each worker applies the model's own optimizer.
        )

    computing_jobs = ()  # The model's own optimizer ends a step, not a push.

    @property
    def linked_jobs(self) -> tuple[str, ...]:
        """Whose links may be limited: the workers', on which they exchange, and the servers'."""
        return ("worker", "ps") if self._cluster.ps else ("worker",)

    @property
    def topology(self) -> Topology:
        """Who sends to whom."""
        return self._protocol.topology

    def hop_report(self, model: keras.Model) -> list[WorkerReport]:
        """What each worker has done since the model began to train.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            A report for each worker, by its index.
        """
        synchronizer = self._synchronizer(model)
        if synchronizer is None:
            return [WorkerReport()] * self.topology.size
        with self._guard.watched():
            return synchronizer.reports()

    @renamed_method("hop_report")
    def workers(self, model: keras.Model) -> list[WorkerReport]:
        """The earlier name of `hop_report`."""
        return self.hop_report(model)

    def _check_servers(self, cluster: Cluster, arrangement: Arrangement) -> None:
        needed = [threads_needed(self.topology, worker) for worker in range(self.topology.size)]
        check_threads(cluster, needed, "for neighbors")

    def _put_functions(self, model: keras.Model) -> None:
        exchange = self._protocol, self._stall_seconds
        model.train_function = HopTrainFunction(model, self._settings, *exchange, self._read)
        self._put_reading_functions(model, AsShown(model))

    def _check_optimizer(self, model: keras.Model) -> None:
        hop_checks.check_optimizer(model, self)
