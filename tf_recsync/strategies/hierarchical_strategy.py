"""Groups of trainers and parameter servers, which hold the parameters of their group."""

from __future__ import annotations

from typing import Literal

import keras

from tf_recsync._checks import check_at_least
from tf_recsync.cluster import Cluster
from tf_recsync.compression import Compression
from tf_recsync.modes import ModeConfig
from tf_recsync.placement import OperatorPlan
from tf_recsync.strategies.between_groups import (
    checked_between_groups,
    checked_inside_group,
    checked_sync_ps,
)
from tf_recsync.strategies.checks import OnBatchLost, check_is_cluster, check_timeouts
from tf_recsync.strategies.hop_between_groups import Hop
from tf_recsync.strategies.operators import checked_operators
from tf_recsync.strategies.synchronized_strategy import SynchronizedStrategy
from tf_recsync.synchronization import aggregation as aggregations
from tf_recsync.synchronization.arrangement import hierarchical
from tf_recsync.synchronization.hop_groups import GroupHopSynchronizer
from tf_recsync.synchronization.hop_reports import WorkerReport
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow
from tf_recsync.synchronization.units import Plan


class HierarchicalStrategy(SynchronizedStrategy):
    """Groups of trainers that share parameters on servers of their own, kept together by loops.

    Each group has one copy of the dense parameters, divided among its parameter servers, which
    all of its trainers pull and push. Embedding tables exist once, on the embedding PSs, and the
    trainers of all groups update their rows. Meanwhile a loop for each server of a group
    synchronizes its shard with those of the other groups, and knows nothing of training.

    The two choices are independent: `aggregation` says what happens inside a group, and
    `algorithm` what happens between groups. So a group may train synchronously, or by GBA,
    while the groups are kept together by elastic averaging, or each with its neighbors in a
    graph (`Hop`).

    Worker w is a trainer of group w // `trainers_per_group`. Of the cluster's parameter servers
    the groups' come first, group by group, then the embedding PSs, and the sync PSs are last.
    Without embedding PSs each group has a copy of the tables of `keras.layers.Embedding`, too, and
    an `EmbeddingCollection` is refused.

    A trainer that is lost leaves its group training. A group whose server is lost waits until it
    is back while the others go on, and then begins with the central copy, or the mean of the
    others; with `Hop`, of its in-neighbors, who need a backup worker to go on without it.
    Training ends with an error when another parameter server is lost, or the server of an
    only group that has no central copy.

    `fit`, `evaluate` and `predict` of Keras 3 work as usual: build and compile the model in
    `scope()`, with an optimizer of `tf_recsync.optimizers`. Variables read outside of training,
    and what is saved, are the first group's copy or the mean; assigning a variable assigns all
    copies.

    With `placement` dense layers run on the server of the group that holds their weights: forward,
    backward and the update. Activations and their gradients travel then, weights and theirs don't.

    Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on
    Large CPU Clusters", section 3 for the placement. Zheng et al. 2021, "ShadowSync".

    Args:
        cluster: a `LocalCluster`, or what `cluster_from_tf_config` returned, with
            `groups * trainers_per_group` workers and at least `groups * ps_per_group + sync_ps`
            parameter servers; the embedding PSs are those that are left.
        algorithm: how the groups' copies are synchronized: `EASGD`, `ModelAveraging`, `BMUF`, an
            `Algorithm` of your own, or `Hop`, whose topology has as many workers as there are
            groups.
        groups: how many groups there are, an int of at least 1.
        trainers_per_group: an int of at least 1.
        ps_per_group: an int of at least 1.
        nets_per_trainer: nets that each trainer trains side by side, each on batches of its own, an
            int of at least 1; 1 is the default. More than one where pushes are applied at once.
        aggregation: a mode of `tf_recsync.modes`: when the trainers of a group start, and when
            its servers apply what they push. Its batch sizes are those of one group. Defaults to
            None: `modes.Hogwild()`, each push at once and without locks.
        mode: "shadow" (the default) or a `Shadow`: synchronization in the background; or a
            `Foreground`: as a part of training. With `Hop`, which counts updates, only "shadow".
        sync_ps: how many of the parameter servers hold the central copy, an int. Default: 1
            with a central algorithm, as EASGD is, else 0.
        placement: where layers run in training. "trainers" (the default): on the trainers, which
            pull the weights. "auto": where `OperatorPlan.search` finds it best when the model
            begins to train, see `operator_plan`. Or a mapping from paths of layers with dense
            weights, `layer.path`, and "#2" after it for the second layer of a path, to the number
            of the server in its group, from 0 to `ps_per_group - 1`; or "columns" or "rows" for a
            `Dense` layer of which each server of the group gets some of the columns or rows of the
            kernel and computes with these; or None for the trainers, where layers run that it does
            not name. Or an `OperatorPlan` for groups of this size.
        splits: "auto" (the default): with the placement "auto", `Dense` layers are divided among
            a group's servers that have more than one server's part of the weights, by columns
            if they give more features than they take, else by rows. "off": they stay whole.
        compression: how activations and their gradients are compressed that travel to layers on
            servers and from them, between a trainer and a server or two servers; None (the
            default) for not at all.
        output: what reading a variable gives: "first" (the default) for the first group's
            copy, "mean" for that of all, or the number of a group.
        local_batch_size: examples of a batch, or None (the default) if the mode says it or fit
            shall find out.
        worker_timeout: as in `AsyncStrategy`.
        silence_timeout: as in `AsyncStrategy`.
        on_batch_lost: as in `AsyncStrategy`.

    Raises:
        ValueError: if an argument is wrong or does not go with another one; from `fit`, before it
            trains, if `placement` names a layer that is not there, or has no dense weights, or
            if `compression` would do nothing since no layer runs on a server; with "auto", that is
            logged as a warning.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=4, ps=2, processes=0) as cluster:
    ...     strategy = recsync.HierarchicalStrategy(
    ...         cluster,
    ...         recsync.ModelAveraging(alpha=0.5),
    ...         groups=2,
    ...         trainers_per_group=2,
    ...         ps_per_group=1,
    ...     )
    ...     groups = strategy.arrangement.groups
    >>> [group.trainers for group in groups]
    [(0, 1), (2, 3)]
    """

    computing_jobs = ("worker", "ps")  # Layers may run on the servers of groups.

    def __init__(
        self,
        cluster: Cluster,
        algorithm: Algorithm | Hop,
        *,
        groups: int,
        trainers_per_group: int,
        ps_per_group: int,
        nets_per_trainer: int = 1,
        aggregation: ModeConfig | None = None,
        mode: Literal["shadow"] | Shadow | Foreground = "shadow",
        sync_ps: int | None = None,
        placement: Literal["trainers", "auto"] | Plan | OperatorPlan = "trainers",
        splits: Literal["auto", "off"] = "auto",
        compression: Compression | None = None,
        output: Literal["first", "mean"] | int = "first",
        local_batch_size: int | None = None,
        worker_timeout: float = 600.0,
        silence_timeout: float | None = None,
        on_batch_lost: OnBatchLost = "retry",
    ):
        check_is_cluster(cluster)
        between = checked_between_groups(algorithm, mode, groups)
        check_timeouts(worker_timeout, silence_timeout)
        check_at_least("nets_per_trainer", nets_per_trainer, 1)
        if sync_ps is not None:
            check_at_least("sync_ps", sync_ps, 0)
        central = checked_sync_ps(sync_ps, algorithm, cluster.ps)
        counts = groups, trainers_per_group, ps_per_group
        arrangement = hierarchical(*counts, cluster.workers, cluster.ps, len(central))
        self._operators = checked_operators(
            placement, splits, compression, trainers_per_group, ps_per_group, nets_per_trainer
        )
        inside = checked_inside_group(
            aggregation, local_batch_size, trainers_per_group, nets_per_trainer
        )
        super().__init__(
            cluster,
            arrangement,
            inside.on(trainers_per_group * nets_per_trainer),
            between,
            nets_per_trainer,
            output,
            inside.local_batch_size,
            worker_timeout,
            silence_timeout,
            on_batch_lost,
        )

    def aggregation(self, model: keras.Model) -> list[aggregations.Report] | None:
        """What became of the pushes of each group's trainers since the model began to train.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            A report for each group, as of `GBAStrategy.aggregation`; None before the model
            trains, and where servers apply each push at once and no tokens are used.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.
        """
        reports = getattr(model.train_function, "aggregation_reports", list)
        with self._guard.watched():
            return reports() or None

    def hop_report(self, model: keras.Model) -> list[list[WorkerReport]] | None:
        """What the servers of each group have done in `Hop` since the model began to train.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            For each group, a report like those of `HopStrategy.hop_report` for each of its servers
            that hold parameters; None before the model trains, and with another algorithm.
        """
        synchronizer = self._synchronizer(model)
        if not isinstance(synchronizer, GroupHopSynchronizer):
            return None
        with self._guard.watched():
            return synchronizer.server_reports()

    def operator_plan(self, model: keras.Model) -> OperatorPlan | None:
        """The plan by which the layers of a model run on trainers and servers of their group.

        With `placement="auto"` a step of the model is counted when it begins to train, by the
        first batches' shapes, and a plan is searched for groups of this size, with the compression
        and with the speeds that `placement.Resources` has by default.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            The plan; None before the model trains, and where no plan says where layers run: with
            the placement "trainers" or a mapping, and with "auto" for a model whose step can't be
            counted, for which a log line says why.
        """
        return getattr(model.train_function, "operator_plan", None)
