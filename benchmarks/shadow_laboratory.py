"""What the experiments on ShadowSync share: settings, clusters, a run's quality and speed.

Steps have an artificial compute time, which uses no processor, and the links of the sync PSs an
artificial bandwidth, so that many trainers overlap on a few cores and saturate sync PSs as on
machines of their own. The bandwidth is given as the synchronizations that a link carries in a
second: the parameters of the model go there and back. Where there are no sync PSs, it is the
trainers' links that are limited, on which all-reduce sends and receives the parameters twice; as in
the paper it comes less often.

Where quality is measured, the compute time is the shorter the fewer threads train, so that all
their steps together come as fast, and links are as much faster: what counts is in which order
steps and synchronizations come.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import common
import continual
import keras
import mode_runs
import numpy as np
from absl import flags

import tf_recsync as recsync

FLAGS = flags.FLAGS
SIZES = (5000, 1000, 200, 100, 50, 20, 10)  # Ids of the categorical features.
# A gap that no run gets to: trainers never synchronize.
NEVER = 1_000_000_000


def define_flags() -> None:
    """Defines the flags of what is trained and how."""
    flags.DEFINE_integer("processes", 6, "Of the servers; they share these.", lower_bound=1)
    flags.DEFINE_integer("embedding_ps", 2, "Embedding PSs.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 32, "Examples per step of a thread.", lower_bound=1)
    flags.DEFINE_float("alpha", 0.3, "The elastic parameter.")
    flags.DEFINE_float("large_alpha", 0.6, "Another one of S-BMUF.")
    flags.DEFINE_float("learning_rate", 0.1, "Of Adagrad.", lower_bound=0)
    flags.DEFINE_float(
        "compute_seconds", 0.5, "Artificial time of a step, with all threads.", lower_bound=0.001
    )
    flags.DEFINE_float(
        "sync_capacity",
        8.0,
        "Synchronizations per second that a sync PS's link carries.",
        lower_bound=0.001,
    )
    flags.DEFINE_float(
        "all_reduce_capacity",
        1.0,
        "Synchronizations per second that a trainer's link carries, without sync PSs.",
        lower_bound=0.001,
    )
    flags.DEFINE_float("speed_seconds", 33.0, "How long a speed is measured.", lower_bound=0.1)
    flags.DEFINE_integer("rows", 49_152, "Clicks to train on.", lower_bound=1)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to train.

    Attributes:
        name: as in the paper.
        algorithm: how copies are synchronized.
        mode: when.
        trainers: how many.
        threads: of a trainer.
        sync_ps: if the algorithm is central.
    """

    name: str
    algorithm: recsync.Algorithm
    mode: Any
    trainers: int
    threads: int
    sync_ps: int = 1

    @property
    def syncs(self) -> bool:
        """Whether copies are synchronized at all."""
        return getattr(self.mode, "gap", None) != NEVER


@dataclasses.dataclass(frozen=True)
class Speed:
    """What was measured while a setting trained.

    Attributes:
        eps: examples per second.
        sync_gap: steps per synchronization, by counters; infinite without any.
        sync_gap_by_bytes: by the sync PSs' network use.
        syncs_per_second: of all trainers together.
        cpu_share: of the machine's cores.
    """

    eps: float
    sync_gap: float
    sync_gap_by_bytes: float
    syncs_per_second: float
    cpu_share: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well a model predicted.

    Attributes:
        train_ne: the normalized entropy of training batches, before they were trained on.
        eval_ne: of clicks that were not trained on, by the model that was put out.
        sync_gap: steps per synchronization.
    """

    train_ne: float
    eval_ne: float
    sync_gap: float


class Laboratory:
    """Runs settings, on one cluster at a time.

    Args:
        servers: the most sync PSs that a setting has.
    """

    def __init__(self, servers: int):
        self._servers = servers
        self._cluster: recsync.LocalCluster | None = None

    def cluster(self, trainers: int) -> recsync.LocalCluster:
        """A cluster; an earlier one of another size is closed."""
        if self._cluster is None or self._cluster.workers != trainers:
            self.close()
            ps = FLAGS.embedding_ps + self._servers
            processes = min(FLAGS.processes, trainers + ps)
            self._cluster = mode_runs.start_cluster(trainers, ps, processes)
        return self._cluster

    def close(self) -> None:
        """Ends the cluster, if there is one."""
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = None

    def speed(self, setting: Setting, compute_seconds: float) -> Speed:
        """Trains a fresh model, and measures in the middle of the epoch.

        Args:
            setting: how it trains.
            compute_seconds: artificial time of a step.
        """
        strategy, model = self._make(setting, 0, compute_seconds, 1.0)
        threads = setting.trainers * setting.threads
        steps = max(8, round(FLAGS.speed_seconds / compute_seconds)) * threads
        watch = _SpeedWatch(strategy, mode_runs.server_pids(self._cluster), 4 * threads)
        model.fit(
            days(0).train(0).repeat(),
            steps_per_epoch=4 * threads + steps + 2 * threads,
            callbacks=[watch],
            verbose=0,
            shuffle=False,
        )
        return watch.speed(steps)

    def quality(self, setting: Setting, seed: int) -> Quality:
        """Trains a fresh model once on all clicks, and tests it on as many others."""
        clicks = days(seed)
        threads = setting.trainers * setting.threads
        # As if all settings had as many threads; see above.
        faster = most_threads() / threads
        strategy, model = self._make(setting, seed, FLAGS.compute_seconds / faster, faster)
        history = model.fit(clicks.train(0), verbose=0, shuffle=False).history
        features, labels = clicks.part(1)
        tested = model.evaluate(features, labels, batch_size=2048, verbose=0, return_dict=True)
        return Quality(
            train_ne=float(history["normalized_entropy"][0]),
            eval_ne=float(tested["normalized_entropy"]),
            sync_gap=strategy.average_sync_gap(model),
        )

    def _make(
        self, setting: Setting, seed: int, compute_seconds: float, faster: float
    ) -> tuple[recsync.ShadowSyncStrategy, keras.Model]:
        sync_ps = setting.sync_ps if setting.algorithm.is_central else 0
        cluster = self.cluster(setting.trainers)
        mode = setting.mode
        if getattr(mode, "per_minute", None) is not None:
            mode = recsync.Foreground(per_minute=mode.per_minute * faster)
        # As many embedding PSs whatever else there is.
        first = FLAGS.embedding_ps
        strategy = recsync.ShadowSyncStrategy(
            cluster,
            setting.algorithm,
            mode=mode,
            threads_per_trainer=setting.threads,
            sync_ps=list(range(first, first + sync_ps)),
            local_batch_size=FLAGS.batch_size,
        )
        recsync.testing.set_compute_time(strategy, compute_seconds)
        with strategy.scope():
            model = mode_runs.small_model(days(seed).spec, common.SEED + seed)
            model.compile(
                recsync.optimizers.Adagrad(FLAGS.learning_rate),
                "binary_crossentropy",
                metrics=[recsync.metrics.NormalizedEntropy()],
            )
        elements = sum(np.size(value) for value in strategy.copies(model)[0])
        parameters = faster * 8 * elements  # There and back.
        if sync_ps:
            bandwidth = FLAGS.sync_capacity * parameters
            recsync.testing.set_bandwidth(strategy, bandwidth, strategy.sync_ps)
        else:
            bandwidth = 2 * FLAGS.all_reduce_capacity * parameters
            recsync.testing.set_bandwidth(strategy, bandwidth, job="worker")
        return strategy, model


class _SpeedWatch(mode_runs.StepWatch):
    """Reads what synchronization does, too."""

    def before(self) -> None:
        self._before = self._strategy.sync_report(self.model)

    def after(self) -> None:
        self._after = self._strategy.sync_report(self.model)

    def speed(self, steps: int) -> Speed:
        times, counts, _ = self.readings(steps)
        before, after = self._before, self._after
        done = after.steps - before.steps
        syncs = sum(after.syncs) - sum(before.syncs)
        moved = (after.sync_ps_bytes - before.sync_ps_bytes) / (8 * after.elements)
        return Speed(
            eps=sum(_rate(times, of_worker) for of_worker in counts.T) * FLAGS.batch_size,
            sync_gap=done / syncs if syncs else float("inf"),
            sync_gap_by_bytes=done / moved if moved else float("inf"),
            syncs_per_second=syncs / (after.trained_seconds - before.trained_seconds),
            cpu_share=self.cpu_share,
        )


def _rate(times: np.ndarray, steps: np.ndarray) -> float:
    """A worker's steps per second, from the end of one step to that of another."""
    ends = np.flatnonzero(np.diff(steps)) + 1
    first, last = ends[0], ends[-1]
    return float((steps[last] - steps[first]) / (times[last] - times[first]))


@functools.lru_cache(maxsize=8)
def days(seed: int) -> continual.Days:
    """Clicks to train on, and as many to test on."""
    return continual.synthetic(
        1, FLAGS.rows, FLAGS.batch_size, 0.0, seed, cardinalities=SIZES, numeric=4
    )


def most_threads() -> int:
    """The threads of all trainers together in the largest setting of the experiments."""
    return max(int(number) for number in FLAGS.trainers) * FLAGS.threads
