"""The strategies that users choose from: one for each training mode.

They differ in their mode only, see `tf_recsync.modes`.
"""

from __future__ import annotations

from tf_recsync import modes, staleness
from tf_recsync._deprecation import keywords_after
from tf_recsync.cluster import Cluster
from tf_recsync.strategies.checks import OnBatchLost
from tf_recsync.strategies.group_strategy import GroupStrategy
from tf_recsync.synchronization.modes import LastGlobalBatch

_WORKER_TIMEOUT = 600.0


class AsyncStrategy(GroupStrategy):
    """Staleness-aware asynchronous training on parameter servers.

    Variables live on the parameter servers. Every worker repeats, without
    waiting for the others: pull the parameters with their versions, compute,
    push the gradients with those versions. The servers weigh each gradient by
    its staleness (the optimizer's `staleness` policy) and apply it at once.

    A `tf.distribute` strategy on which `model.fit`, `evaluate`
    and `predict` of Keras 3 work: build and compile the model in `scope()`, with
    an optimizer of `tf_recsync.optimizers`, and call them as usual, with a
    batched tf.data.Dataset. Each batch goes to one worker, and a faster worker
    takes more. Metrics are kept by each worker and merged when read.

    When a worker is lost, the others go on, and train on the batches that were in
    its hands, too; it takes part again when it is back. A lost parameter server ends
    the training with an error, unless there is a `callbacks.Checkpoint`.

    Reference: Liu and Zhao 2021, "Asynchronous Stochastic Gradient Descent for
    Extreme-Scale Recommender Systems".

    Args:
        cluster: a `LocalCluster`, or what `cluster_from_tf_config` returned, with
            at least one worker and one parameter server.
        local_batch_size: examples of the dataset's batches, an int, or None (the
            default). Only needed to convert SWAP's period and the global step when a
            checkpoint was made with another batch size or mode.
        prefetch_lookups: whether each of the unrolled steps (`steps_per_execution`, 8 at most)
            but the last pulls the rows that the next one looks up before it computes, so
            that they travel meanwhile. They miss this step's update, which their
            staleness tells. Defaults to False.
        worker_timeout: seconds without any reachable worker after which training
            fails. Defaults to 600.
        silence_timeout: seconds after which a server that somebody waits for, and that gives
            no sign of life, is given up: because its machine hangs, or the network is cut. None
            (the default): `worker_timeout`, but at least 10 and at most 60.
        on_batch_lost: what becomes of batches that are lost with a worker. "retry" (the default):
            they are trained on at the end of the pass over the data, at least once each. For
            that, the order of the dataset has to be the same when it is read again: a shuffle
            needs a seed, and of several readers it must be known which one reads what (see
            docs/cluster.md). Else a warning says why they are dropped. "drop": they are left
            out. Nothing is retried in data without an end: others do the steps on later batches.

    Raises:
        ValueError: if the cluster lacks workers or parameter servers.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_recsync as recsync
    >>> x = np.arange(64, dtype=np.float32)[:, None] / 64
    >>> dataset = tf.data.Dataset.from_tensor_slices((x, x > 0.5)).batch(8)
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.AsyncStrategy(cluster)
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
    ...         model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy")
    ...     history = model.fit(dataset, verbose=0)
    ...     updates = int(model.optimizer.iterations)
    ...     staleness = strategy.staleness(model)
    >>> updates  # One of each batch.
    8
    >>> staleness.dense.count  # Updates of a kernel and a bias.
    16
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        local_batch_size: int | None = None,
        prefetch_lookups: bool = False,
        worker_timeout: float = _WORKER_TIMEOUT,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        mode = modes.Async(local_batch_size=local_batch_size)
        super().__init__(
            cluster, mode, worker_timeout, silence_timeout, on_batch_lost, prefetch_lookups
        )


class SyncStrategy(GroupStrategy):
    """Synchronous training on parameter servers.

    The servers apply the mean of the gradients of a global batch, all computed on
    the same parameters: step by step what one process does with the global batch.
    A worker takes a token for each batch, and waits until every server has done
    the step that the token names. A fast worker may compute several of a step's
    batches. The tokens of a worker that is lost go to the others, with other
    batches, so a step always has its global batch; its own batches are done at the end.

    `fit`, `evaluate` and `predict` as in `AsyncStrategy`. The optimizer's `staleness`
    policy is not used, as nothing is stale.

    Reference: Su et al. 2022, "GBA", section 5.1, where it is the baseline.

    Args:
        cluster: as in `AsyncStrategy`.
        global_batch_size: examples that are applied together, a multiple of
            `local_batch_size`. Defaults to None: one batch of each worker.
        local_batch_size: examples of the dataset's batches; needed with
            `global_batch_size`. Defaults to None.
        last_global_batch: what becomes of the batches at the end of an epoch that do not
            fill a global batch. "weigh" (the default): they are applied at their share of
            it, their sum divided by as many as a global batch has. "drop": they are left
            out.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: if the cluster lacks workers or parameter servers, or the batch
            sizes do not fit together.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.SyncStrategy(cluster)
    ...     mode = strategy.mode
    >>> mode.capacity  # Batches that are applied together: one of each worker.
    2
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        global_batch_size: int | None = None,
        local_batch_size: int | None = None,
        last_global_batch: LastGlobalBatch = "weigh",
        worker_timeout: float = _WORKER_TIMEOUT,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        mode = modes.Sync(
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            last_global_batch=last_global_batch,
        )
        super().__init__(cluster, mode, worker_timeout, silence_timeout, on_batch_lost)


class BSPStrategy(GroupStrategy):
    """Asynchronous bulk-synchronous training: gradients are applied a global batch at a time.

    Nobody waits; the servers collect pushes, however stale, and apply the mean of
    each global batch. GBA without the control of staleness.

    Reference: Su et al. 2022, "GBA", section 3.2 and 5.1.

    Args:
        cluster: as in `AsyncStrategy`.
        global_batch_size: examples that are applied together, a multiple of
            `local_batch_size`.
        local_batch_size: examples of the dataset's batches.
        last_global_batch: as in `SyncStrategy`.
        prefetch_lookups: as in `AsyncStrategy`.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: as in `SyncStrategy`.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.BSPStrategy(cluster, global_batch_size=64, local_batch_size=16)
    ...     mode = strategy.mode
    >>> mode.capacity  # Batches that are applied together.
    4
    """

    def __init__(
        self,
        cluster: Cluster,
        global_batch_size: int,
        local_batch_size: int,
        *,
        last_global_batch: LastGlobalBatch = "weigh",
        prefetch_lookups: bool = False,
        worker_timeout: float = _WORKER_TIMEOUT,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        mode = modes.BSP(
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            last_global_batch=last_global_batch,
        )
        super().__init__(
            cluster, mode, worker_timeout, silence_timeout, on_batch_lost, prefetch_lookups
        )


class GBAStrategy(GroupStrategy):
    """Global batch gradient aggregation: the speed of asynchronous training, tuned as synchronous.

    Nobody waits. Each batch comes with a token, the number of the global step that
    it would belong to in synchronous training. The servers collect pushes and apply
    the mean of a global batch at a time; gradients whose tokens are too old count,
    but are left out. With the global batch of synchronous training its
    hyper-parameters carry over: switch at a checkpoint.

    The paper runs as many workers as a global batch has batches. Other numbers
    work: with more workers tokens are older when they arrive.

    Reference: Su et al. 2022, "GBA: A Tuning-free Approach to Switch between
    Synchronous and Asynchronous Training for Recommendation Models".

    Args:
        cluster: as in `AsyncStrategy`.
        global_batch_size: examples that are applied together, a multiple of
            `local_batch_size`.
        local_batch_size: examples of the dataset's batches.
        staleness_tolerance: iota of Eq. 1, an int of at least 0: the largest age of a
            token, in global steps, whose gradient counts in full. Defaults to None: 4, or
            what a policy as `decay` says.
        decay: what becomes of older gradients. "threshold" (the default): left out.
            "inverse_power": weighted by ((iota + 1) / (age + 1))^2. Or a policy of
            `tf_recsync.staleness`, of tau = age + 1; `staleness_tolerance` must then be
            None.
        last_global_batch: as in `SyncStrategy`.
        prefetch_lookups: as in `AsyncStrategy`.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: if the cluster lacks workers or parameter servers, the batch sizes
            do not fit together, or the tolerance is negative.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_recsync as recsync
    >>> x = np.arange(64, dtype=np.float32)[:, None] / 64
    >>> dataset = tf.data.Dataset.from_tensor_slices((x, x > 0.5)).batch(8)
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.GBAStrategy(cluster, global_batch_size=16, local_batch_size=8)
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
    ...         model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy")
    ...     history = model.fit(dataset, verbose=0)
    ...     updates = int(model.optimizer.iterations)
    >>> updates  # One of each two batches.
    4
    """

    @keywords_after(3)
    def __init__(
        self,
        cluster: Cluster,
        global_batch_size: int,
        local_batch_size: int,
        *,
        staleness_tolerance: int | None = None,
        decay: str | staleness.Policy = "threshold",
        last_global_batch: LastGlobalBatch = "weigh",
        prefetch_lookups: bool = False,
        worker_timeout: float = _WORKER_TIMEOUT,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        mode = modes.GBA(
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            staleness_tolerance=staleness_tolerance,
            decay=decay,
            last_global_batch=last_global_batch,
        )
        super().__init__(
            cluster, mode, worker_timeout, silence_timeout, on_batch_lost, prefetch_lookups
        )


class BackupWorkersStrategy(GroupStrategy):
    """Synchronous training that does not wait for its slowest workers (Hop-BW).

    Of n workers' batches in a step the first n - b are applied, as their mean; what
    comes later is dropped. No gradient is stale, but the work of slow workers is lost.

    Reference: Su et al. 2022, "GBA", section 5.1; Luo et al. 2019, "Hop".

    Args:
        cluster: as in `AsyncStrategy`.
        backup_workers: b, how many workers are not waited for, from 0 to the
            cluster's workers less 1.
        local_batch_size: as in `AsyncStrategy`.
        last_global_batch: as in `SyncStrategy`.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: if the cluster lacks workers or parameter servers, or
            `backup_workers` is out of range.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.BackupWorkersStrategy(cluster, backup_workers=1)
    ...     mode = strategy.mode
    >>> mode.capacity  # Batches that are applied together.
    1
    """

    def __init__(
        self,
        cluster: Cluster,
        backup_workers: int,
        *,
        local_batch_size: int | None = None,
        last_global_batch: LastGlobalBatch = "weigh",
        worker_timeout: float = _WORKER_TIMEOUT,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        mode = modes.BackupWorkers(
            backup_workers=backup_workers,
            local_batch_size=local_batch_size,
            last_global_batch=last_global_batch,
        )
        super().__init__(cluster, mode, worker_timeout, silence_timeout, on_batch_lost)


class BoundedStalenessStrategy(GroupStrategy):
    """Asynchronous training in which fast workers wait for slow ones (Hop-BS).

    As `AsyncStrategy`, but a worker may be at most `staleness_bound` batches ahead of
    the slowest one: then it waits. A worker that is lost is not waited for.

    Reference: Su et al. 2022, "GBA", section 5.1; Ho et al. 2013, "More effective
    distributed ML via a stale synchronous parallel parameter server".

    Args:
        cluster: as in `AsyncStrategy`.
        staleness_bound: b1, in batches, an int of at least 0.
        local_batch_size: as in `AsyncStrategy`.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: if the cluster lacks workers or parameter servers, or the bound is
            negative.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.BoundedStalenessStrategy(cluster, staleness_bound=2)
    ...     mode = strategy.mode
    >>> mode.capacity  # Each push is applied by itself.
    1
    """

    def __init__(
        self,
        cluster: Cluster,
        staleness_bound: int,
        *,
        local_batch_size: int | None = None,
        worker_timeout: float = _WORKER_TIMEOUT,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        mode = modes.BoundedStaleness(
            staleness_bound=staleness_bound,
            local_batch_size=local_batch_size,
        )
        super().__init__(cluster, mode, worker_timeout, silence_timeout, on_batch_lost)
