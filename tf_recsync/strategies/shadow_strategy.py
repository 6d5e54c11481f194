"""Training with a copy of the parameters for each trainer, synchronized in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tf_recsync._checks import check_at_least
from tf_recsync._deprecation import keywords_after
from tf_recsync.cluster import Cluster
from tf_recsync.modes import Hogwild
from tf_recsync.strategies.between_groups import checked_between_trainers, checked_sync_ps
from tf_recsync.strategies.checks import OnBatchLost, check_is_cluster, check_timeouts
from tf_recsync.strategies.synchronized_strategy import SynchronizedStrategy
from tf_recsync.synchronization.arrangement import each_worker
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow


class ShadowSyncStrategy(SynchronizedStrategy):
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
            copy, "mean" for that of all, or the index of a trainer.
        local_batch_size: examples of a batch, or None (the default) if fit shall find out.
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
    >>> with recsync.LocalCluster(workers=2, ps=0, processes=0) as cluster:
    ...     strategy = recsync.ShadowSyncStrategy(cluster, recsync.ModelAveraging(alpha=0.5))
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
    ...         model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy")
    ...     history = model.fit(dataset, verbose=0)
    ...     copies = strategy.copies(model)
    >>> len(copies)  # Each trainer has one.
    2
    """

    @keywords_after(2)
    def __init__(
        self,
        cluster: Cluster,
        algorithm: Algorithm,
        *,
        mode: Literal["shadow"] | Shadow | Foreground = "shadow",
        threads_per_trainer: int = 1,
        sync_ps: int | Sequence[int] | None = None,
        output: Literal["first", "mean"] | int = "first",
        local_batch_size: int | None = None,
        worker_timeout: float = 600.0,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        check_is_cluster(cluster)
        between = checked_between_trainers(algorithm, mode)
        check_at_least("threads_per_trainer", threads_per_trainer, 1)
        config = Hogwild(local_batch_size=local_batch_size)
        check_timeouts(worker_timeout, silence_timeout)
        check_at_least("cluster.workers", cluster.workers, 1)
        on_sync_ps = checked_sync_ps(sync_ps, algorithm, cluster.ps)
        super().__init__(
            cluster,
            each_worker(
                cluster.workers,
                embedding_ps=[ps for ps in range(cluster.ps) if ps not in on_sync_ps],
                sync_ps=on_sync_ps,
            ),
            config.on(threads_per_trainer),
            between,
            threads_per_trainer,
            output,
            local_batch_size,
            worker_timeout,
            silence_timeout,
            on_batch_lost,
        )
