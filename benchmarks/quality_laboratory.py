"""What experiments on the quality of asynchronous training share: variants, clusters, checkpoints.

A cluster has at most 32 workers, which share a few processes. Steps have an artificial compute
time, of which every fourth worker needs `--slow` times as much. It is the shorter the fewer workers
there are, so that all their steps together come as fast: what counts is in which order gradients
arrive.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import common
import continual
import keras
import mode_runs
from absl import flags

import tf_recsync as recsync

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of what is trained and how, those of `mode_runs` included."""
    mode_runs.define_flags()
    flags.adopt_module_key_flags(mode_runs)  # So that --help has them.
    FLAGS.set_default("processes", 4)
    flags.DEFINE_list("workers", ["2", "8", "32"], "Numbers of workers.")
    flags.DEFINE_integer("seeds", 3, "How often each model is trained.", lower_bound=1)
    flags.DEFINE_integer("rows", 32_768, "Clicks of a day.", lower_bound=1)
    flags.DEFINE_float("drift", 0.04, "Of the clicks, per day.", lower_bound=0)
    flags.DEFINE_float("learning_rate", 0.3, "Of Adagrad.", lower_bound=0)
    flags.DEFINE_float(
        "compute_seconds",
        0.2,
        "Artificial compute time of a step with the most workers.",
        lower_bound=0.001,
    )
    flags.DEFINE_integer("steps", 600, "Steps in which staleness is measured.")
    flags.DEFINE_float("speed_seconds", 8.0, "How long a speed is measured.", lower_bound=0.1)
    flags.DEFINE_integer("iota", 3, "Of GBA.", lower_bound=0)


SIZES = (5000, 1000, 200, 100, 50, 20, 10)  # Ids of the categorical features.


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: in tables.
        workers: how many.
        optimizer: makes it.
        mode: "async", "sync" or "gba".
        local_batch: examples of a step; None for `--batch_size`.
        normalization: whether the model has MeanNormalization.
    """

    name: str
    workers: int
    optimizer: Callable[[], keras.optimizers.Optimizer]
    mode: str = "async"
    local_batch: int | None = None
    normalization: bool = False

    @property
    def batch_size(self) -> int:
        """Examples of a step."""
        return self.local_batch or FLAGS.batch_size

    @property
    def global_batch(self) -> int:
        """Examples that are applied together."""
        return self.batch_size * (1 if self.mode == "async" else self.workers)


class Laboratory:
    """Runs variants, on one cluster at a time."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._cluster: recsync.LocalCluster | None = None
        self._judges: dict[bool, continual.Judge] = {}  # With normalization and without.
        self._starts: dict[tuple[str, int, int, int, float], list[pathlib.Path]] = {}

    def cluster(self, workers: int) -> recsync.LocalCluster:
        """A cluster; an earlier one of another size is closed."""
        if self._cluster is None or self._cluster.workers != workers:
            self.close()
            processes = FLAGS.processes
            if processes is not None:
                processes = min(processes, workers + FLAGS.ps)
            self._cluster = mode_runs.start_cluster(workers, FLAGS.ps, processes)
        return self._cluster

    def close(self) -> None:
        """Ends the cluster, if there is one."""
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = None

    def system(self, variant: Variant) -> mode_runs.System:
        """A variant, ready to train, with the initial weights of the first seed."""
        options = mode_runs.Options(variant.batch_size, variant.workers, FLAGS.iota)
        cluster = self.cluster(variant.workers)
        system = mode_runs.System(variant.mode, cluster, options, lambda: self._build(variant, 0))
        system.strategy.attach(system.model)
        return system

    def train(
        self,
        system: mode_runs.System,
        variant: Variant,
        seed: int,
        clicks: continual.Days,
        days: range,
        start: pathlib.Path | None = None,
    ) -> list[float]:
        """The AUC on the next day after each of some days.

        Args:
            system: of the variant.
            variant: what trains.
            seed: of the initial weights.
            clicks: of all days.
            days: those to train on.
            start: a checkpoint to go on from; None for initial weights.
        """
        if start is None:
            path = self._folder / "initial.weights.h5"
            system.restart(lambda: self._build(variant, seed), path)
        else:
            system.model.load_weights(start)
        # Stragglers change nothing in synchronous training but its speed.
        slow = range(min(3, variant.workers - 1), variant.workers, 4)
        slowdown = recsync.testing.SlowWorkers(FLAGS.slow, slow) if variant.mode != "sync" else None
        set_compute_time(system, slowdown=slowdown)
        judge = self._judge(variant)
        scores = []
        for day in days:
            system.model.fit(clicks.train(day), verbose=0, shuffle=False)
            scores.append(judge.score(system.model, clicks, day + 1).auc)
        return scores

    def starts(
        self, first: Variant, days: int, clicks_days: int, drift: float
    ) -> list[pathlib.Path]:
        """For each seed a checkpoint to go on from; what was trained before is not trained again.

        Args:
            first: what trains until then.
            days: how many.
            clicks_days: of all clicks, with those that variants will train on.
            drift: of the clicks.
        """
        key = (first.name, first.batch_size, days, clicks_days, drift)
        if key not in self._starts:
            system = self.system(first)
            paths = []
            for seed in range(FLAGS.seeds):
                clicks = make_days(clicks_days, drift, seed, first.batch_size)
                scores = self.train(system, first, seed, clicks, range(days))
                print(f"before, {first.name}, seed {seed + 1}: {scores[-1]:.4f}", file=sys.stderr)
                paths.append(self._folder / f"start_{len(self._starts)}_{seed}.weights.h5")
                system.model.save_weights(paths[-1])
            self._starts[key] = paths
        return self._starts[key]

    def measure_staleness(self, variant: Variant) -> recsync.staleness.Statistics:
        """That of equal workers."""
        system = self.system(variant)
        set_compute_time(system)
        clicks = make_days(1, 0.0, 0, variant.batch_size)
        turn = system.turn(clicks.train(0).repeat(), 4 * variant.workers, FLAGS.steps)
        check_seen(variant, turn.staleness.count, FLAGS.steps)
        return turn.staleness

    def measure_speed(self, system: mode_runs.System, variant: Variant, smallest: int) -> float:
        """Examples per second of equal workers.

        Args:
            system: of the variant.
            variant: what is measured.
            smallest: the local batch whose step takes `--compute_seconds`; others take the longer
                the larger they are.
        """
        seconds = FLAGS.compute_seconds * variant.batch_size / smallest
        recsync.testing.set_compute_time(system.strategy, seconds)
        clicks = make_days(1, 0.0, 0, variant.batch_size)
        workers = variant.workers
        steps = workers * max(4, round(FLAGS.speed_seconds / seconds))
        turn = system.turn(clicks.train(0).repeat(), 2 * workers, steps)
        check_seen(variant, int(turn.steps[-1].sum()), steps)
        return turn.speed * variant.batch_size

    def _judge(self, variant: Variant) -> continual.Judge:
        kind = variant.normalization
        if kind not in self._judges:
            self._judges[kind] = continual.Judge(self._model(variant, 0), self._folder)
        return self._judges[kind]

    def _build(self, variant: Variant, seed: int) -> keras.Model:
        model = self._model(variant, seed)
        model.compile(variant.optimizer(), "binary_crossentropy")
        return model

    def _model(self, variant: Variant, seed: int) -> keras.Model:
        spec = make_days(1, 0.0, 0, FLAGS.batch_size).spec
        layer = mean_normalization if variant.normalization else None
        return mode_runs.small_model(spec, common.SEED + seed, normalization=layer)


def check_seen(variant: Variant, seen: int, steps: int) -> None:
    """An error if too few of the steps to be measured were.

    Callbacks, which tell when to begin, lag behind workers that are short of nothing else.
    """
    if seen < steps / 2:
        raise RuntimeError(
            f"of {steps} steps of {variant.name}, {seen} were measured: "
            "the machine is too busy, or --compute_seconds too short"
        )


def set_compute_time(
    system: mode_runs.System, slowdown: recsync.testing.Slowdown | None = None
) -> None:
    """The shorter the fewer workers there are, so that all their steps together come as fast."""
    seconds = FLAGS.compute_seconds * system.strategy.cluster.workers / numbers()[-1]
    recsync.testing.set_compute_time(system.strategy, seconds, slowdown)


@functools.lru_cache(maxsize=8)
def make_days(count: int, drift: float, seed: int, batch_size: int) -> continual.Days:
    """Days of synthetic clicks."""
    return continual.synthetic(
        count, FLAGS.rows, batch_size, drift, seed, cardinalities=SIZES, numeric=4
    )


def numbers() -> list[int]:
    """The numbers of workers, ascending."""
    return sorted({int(number) for number in FLAGS.workers})


def middle() -> int:
    """The number of workers that others are compared with."""
    return numbers()[len(numbers()) // 2]


def adagrad(**options: Any) -> Callable[[], keras.optimizers.Optimizer]:
    """Makes Adagrad."""
    return lambda: recsync.optimizers.Adagrad(FLAGS.learning_rate, **options)


def mean_normalization() -> keras.layers.Layer:
    """For days of some hundred batches: the moving average follows within tens of them."""
    return recsync.layers.MeanNormalization(momentum=0.9, epsilon=0.1)
