"""What asynchronous training does to a model's quality, and what helps: five small experiments.

Those of Liu and Zhao 2021, "Asynchronous Stochastic Gradient Descent for Extreme-Scale
Recommender Systems", and one of the GBA paper (Su et al. 2022), with up to 32 workers, which share
a few processes. A small model trains on days of synthetic clicks, with an artificial compute time
(of which every fourth worker needs `--slow` times as much), and after each day is tested on the
next day's clicks. The compute time is the shorter the fewer workers there are, so that all their
steps together come as fast: what counts here is in which order gradients arrive.

- staleness (figure 3): its distribution for some numbers of equal workers.
- weights (figure 5): stale gradients counted in full, weighed by 1 / tau (linear), and by
  InversePower with k=2 and a baseline of the smallest number of workers (normalized); and what
  that smallest number of workers reaches. Clicks without drift.
- normalization (figure 6): MeanNormalization or not, with the fewest and the most workers,
  gradients weighed as in "normalized" above.
- swap (figure 7): Adagrad, SWAP with a period of a fifth of a day, and Adagrad whose accumulators
  decay at each step, as much in a period as with SWAP. Clicks drift from day to day.
- global_batch (figure 8 of the GBA paper): a model trains synchronously for `--sync_days`; from
  that checkpoint it goes on for `--days`, on clicks that drift, synchronously and with GBA: with
  some numbers of workers at the same global batch, their local batches the smaller the more there
  are; then with the same number of workers and other local batches, and so other global batches.
  All hyper-parameters stay. The speed is that of equal workers whose compute time is in proportion
  to their local batch.

Differences are those to the first line of each experiment with the same seed (clicks and initial
weights); given are means and 95 % confidence intervals over the seeds.

With its defaults it takes about a quarter of an hour on two cores; for narrower intervals:

    python benchmarks/async_quality.py --workers=2,4,8,16,32 --seeds=5 --json=async_quality.json
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import common
import continual
import keras
import mode_runs
import numpy as np
from absl import app, flags, logging

import tf_recsync as recsync

FLAGS = flags.FLAGS
mode_runs.define_flags()
flags.adopt_module_key_flags(mode_runs)  # So that --help has them.
EXPERIMENTS = ("staleness", "weights", "normalization", "swap", "global_batch")
flags.DEFINE_list("experiments", list(EXPERIMENTS), "Those to run.")
FLAGS.set_default("processes", 4)
flags.DEFINE_list("workers", ["2", "8", "32"], "Numbers of workers.")
flags.DEFINE_integer("seeds", 3, "How often each model is trained.", lower_bound=1)
flags.DEFINE_integer("days", 3, "Days of clicks.", lower_bound=1)
flags.DEFINE_integer("swap_days", 6, "Days of clicks of the experiment swap.", lower_bound=1)
flags.DEFINE_integer("sync_days", 2, "Days before the switch in global_batch.", lower_bound=1)
flags.DEFINE_integer("rows", 16_384, "Clicks of a day.", lower_bound=1)
flags.DEFINE_float("drift", 0.04, "Of clicks in swap and global_batch, per day.", lower_bound=0)
flags.DEFINE_float("learning_rate", 0.2, "Of Adagrad.", lower_bound=0)
flags.DEFINE_float(
    "compute_seconds",
    0.2,
    "Artificial compute time of a step with the most workers.",
    lower_bound=0.001,
)
flags.DEFINE_integer("steps", 600, "Steps in which staleness is measured.")
flags.DEFINE_integer("iota", 3, "Of GBA.", lower_bound=0)

SIZES = (5000, 1000, 200, 100, 50, 20, 10)  # Ids of the categorical features.
SWAP_DECAY = 0.8  # Of a period, the paper's choice.
PERIODS = 5  # Of SWAP, in a day.


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
        slow = range(min(3, variant.workers - 1), variant.workers, 4)
        # Stragglers change nothing in synchronous training but its speed.
        slowdown = recsync.testing.SlowWorkers(FLAGS.slow, slow) if variant.mode != "sync" else None
        set_compute_time(system, slowdown=slowdown)
        judge = self._judge(variant)
        scores = []
        for day in days:
            system.model.fit(clicks.train(day), verbose=0, shuffle=False)
            scores.append(judge.score(system.model, clicks, day + 1).auc)
        return scores

    def save(self, system: mode_runs.System, name: str) -> pathlib.Path:
        """A checkpoint of what has been trained."""
        path = self._folder / f"{name}.weights.h5"
        system.model.save_weights(path)
        return path

    def measure_staleness(self, variant: Variant) -> recsync.staleness.Statistics:
        """That of equal workers."""
        system = self.system(variant)
        set_compute_time(system)
        clicks = make_days(1, 0.0, 0, variant.batch_size)
        turn = system.turn(clicks.train(0).repeat(), 4 * variant.workers, FLAGS.steps)
        # Callbacks, which tell when to begin, lag behind workers that are short of nothing else.
        if turn.staleness.count < FLAGS.steps / 2:
            raise RuntimeError(
                f"of {FLAGS.steps} steps of {variant.name}, {turn.staleness.count} were measured: "
                "the machine is too busy, or --compute_seconds too short"
            )
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
        turn = system.turn(clicks.train(0).repeat(), variant.workers, 4 * variant.workers)
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
        layer = recsync.layers.MeanNormalization if variant.normalization else None
        return mode_runs.small_model(spec, common.SEED + seed, normalization=layer)


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


def adagrad(**options: Any) -> Callable[[], keras.optimizers.Optimizer]:
    """Makes Adagrad."""
    return lambda: recsync.optimizers.Adagrad(FLAGS.learning_rate, **options)


def normalized() -> recsync.staleness.Policy:
    """The weight of stale gradients, normalized to the smallest number of workers."""
    return recsync.staleness.InversePower(k=2, baseline=numbers()[0])


def staleness(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Its distribution for each number of workers."""
    rows = []
    for workers in numbers():
        variant = Variant(f"{workers} workers", workers, adagrad())
        measured = laboratory.measure_staleness(variant)
        rows.append(
            {
                "benchmark": "async_quality",
                "experiment": "staleness",
                "variant": variant.name,
                "workers": workers,
                "mean": round(measured.mean, 3),
                "deviation": round(measured.deviation, 3),
                "quantile_99": measured.quantile(0.99),
                "max": measured.max,
                "histogram": [[int(tau), int(count)] for tau, count in measured.histogram],
            }
        )
    return rows


def weights(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Weights of stale gradients."""
    most, fewest = numbers()[-1], numbers()[0]
    linear = recsync.staleness.InversePower(k=1, baseline=1)
    return compare(
        laboratory,
        "weights",
        [
            Variant("no weights", most, adagrad()),
            Variant("linear", most, adagrad(staleness=linear)),
            Variant("normalized", most, adagrad(staleness=normalized())),
            Variant(f"no weights, {fewest} workers", fewest, adagrad()),
        ],
        FLAGS.days,
    )


def normalization(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Mean-normalization of hidden layers."""
    optimizer = adagrad(staleness=normalized())
    variants = [
        Variant(
            f"{workers} workers{', MeanNormalization' if on else ''}",
            workers,
            optimizer,
            "async",
            None,
            on,
        )
        for workers in dict.fromkeys([numbers()[-1], numbers()[0]])
        for on in (False, True)
    ]
    return compare(laboratory, "normalization", variants, FLAGS.days)


def swap(laboratory: Laboratory) -> list[dict[str, Any]]:
    """SWAP, and decay at each step."""
    period = max(1, FLAGS.rows // FLAGS.batch_size // PERIODS)
    most = numbers()[-1]
    each_step = recsync.Swap(1, SWAP_DECAY ** (1 / period))
    return compare(
        laboratory,
        "swap",
        [
            Variant("Adagrad", most, adagrad()),
            Variant("SWAP", most, adagrad(swap=recsync.Swap(period, SWAP_DECAY))),
            Variant("decay at each step", most, adagrad(swap=each_step)),
        ],
        FLAGS.swap_days,
        FLAGS.drift,
    )


def global_batch(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Local and global batches of GBA, after synchronous training."""
    middle = numbers()[len(numbers()) // 2]
    size = middle * FLAGS.batch_size
    sync = Variant(f"sync, {middle} x {FLAGS.batch_size} = {size}", middle, adagrad(), "sync")
    variants = [
        Variant(f"{n} x {size // n} = {size}", n, adagrad(), "gba", size // n) for n in numbers()
    ]
    for local in (FLAGS.batch_size // 4, FLAGS.batch_size * 4):
        name = f"{middle} x {local} = {middle * local}"
        variants.append(Variant(name, middle, adagrad(), "gba", local))
    # Those on one cluster after each other, that of the first synchronous days first.
    variants.sort(key=lambda variant: (variant.workers != middle, variant.workers))
    system = laboratory.system(sync)
    starts = []
    for seed in range(FLAGS.seeds):
        clicks = make_days(FLAGS.sync_days + FLAGS.days, FLAGS.drift, seed, sync.batch_size)
        laboratory.train(system, sync, seed, clicks, range(FLAGS.sync_days))
        starts.append(laboratory.save(system, f"switch_{seed}"))
    smallest = min(variant.batch_size for variant in variants)
    return compare(
        laboratory,
        "global_batch",
        [sync, *variants],
        FLAGS.days,
        FLAGS.drift,
        starts=starts,
        first_day=FLAGS.sync_days,
        smallest=smallest,
    )


def compare(
    laboratory: Laboratory,
    experiment: str,
    variants: Sequence[Variant],
    days: int,
    drift: float = 0.0,
    *,
    starts: Sequence[pathlib.Path] | None = None,
    first_day: int = 0,
    smallest: int | None = None,
) -> list[dict[str, Any]]:
    """Trains variants with all seeds; the objects of an experiment.

    Args:
        laboratory: where they are trained.
        experiment: its name.
        variants: the first is what others are compared with.
        days: how many each is trained on.
        drift: of the clicks.
        starts: for each seed a checkpoint to go on from; None for initial weights.
        first_day: of those trained on.
        smallest: the smallest local batch, to measure speeds too; None for no speeds.
    """
    rows: list[dict[str, Any]] = []
    which = range(first_day, first_day + days)
    for variant in variants:
        system = laboratory.system(variant)
        runs = []
        for seed in range(FLAGS.seeds):
            clicks = make_days(which.stop, drift, seed, variant.batch_size)
            start = None if starts is None else starts[seed]
            runs.append(laboratory.train(system, variant, seed, clicks, which, start))
            aucs = " ".join(f"{auc:.4f}" for auc in runs[-1])
            print(f"{experiment}, {variant.name}, seed {seed + 1}: {aucs}", file=sys.stderr)
        auc = np.array(runs)
        first = np.array(rows[0]["auc_of_seeds"]) if rows else auc
        row = {
            "benchmark": "async_quality",
            "experiment": experiment,
            "variant": variant.name,
            "mode": variant.mode,
            "workers": variant.workers,
            "local_batch": variant.batch_size,
            "global_batch": variant.global_batch,
            "seeds": FLAGS.seeds,
            "auc": np.round(auc.mean(axis=0), 5).tolist(),
            "last_auc": continual.Mean.of(auc[:, -1]).as_list(),
            "mean_auc": continual.Mean.of(auc.mean(axis=1)).as_list(),
            "difference": continual.Mean.of(auc[:, -1] - first[:, -1]).as_list(),
            "mean_difference": continual.Mean.of((auc - first).mean(axis=1)).as_list(),
            "auc_of_seeds": np.round(auc, 6).tolist(),
        }
        if smallest is not None:
            speed = laboratory.measure_speed(system, variant, smallest)
            row["queries_per_second"] = round(speed, 1)
        rows.append(row)
    return rows


def show(experiment: str, rows: list[dict[str, Any]]) -> None:
    """Prints the table of an experiment."""
    if experiment == "staleness":
        mode_runs.print_table(
            "Staleness of dense variables, equal workers",
            [
                {
                    "": row["variant"],
                    "mean": f"{row['mean']:.2f}",
                    "deviation": f"{row['deviation']:.2f}",
                    "99 of 100": str(row["quantile_99"]),
                    "max": str(row["max"]),
                }
                for row in rows
            ],
        )
        return

    def points(values: list[float]) -> str:
        mean, *rest = (100 * value for value in values)
        return f"{continual.Mean(mean, rest[0] if rest else None):+.3f}"

    mode_runs.print_table(
        f"{experiment}: AUC of the next day; differences to the first line in points (1 = 0.01), "
        f"{rows[0]['seeds']} seeds, 95 % intervals",
        [
            {
                "": row["variant"],
                "first day": f"{row['auc'][0]:.4f}",
                "last day": f"{row['auc'][-1]:.4f}",
                "difference": points(row["difference"]) if number else "",
                "of all days": points(row["mean_difference"]) if number else "",
                **(
                    {"examples/s": f"{row['queries_per_second']:,.0f}"}
                    if "queries_per_second" in row
                    else {}
                ),
            }
            for number, row in enumerate(rows)
        ],
    )


def plot(results: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """A picture for each experiment."""
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    count = len(results)
    columns = min(count, 3)
    figure, axes = pyplot.subplots(
        -(-count // columns),
        columns,
        figsize=(5.4 * columns, 4.2 * -(-count // columns)),
        layout="constrained",
        squeeze=False,
    )
    for axis in axes.flat[count:]:
        axis.axis("off")
    for axis, (experiment, rows) in zip(axes.flat, results.items(), strict=False):
        if experiment == "staleness":
            plot_staleness(axis, rows)
        elif experiment == "global_batch":
            plot_batches(axis, rows)
        else:
            for row in rows:
                days = np.arange(1, len(row["auc"]) + 1)
                axis.plot(days, row["auc"], marker="o", markersize=3, label=row["variant"])
            axis.set(xlabel="day", ylabel="AUC of the next day", title=experiment, xticks=days)
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_staleness(axis: Any, rows: list[dict[str, Any]]) -> None:
    """The shares of the updates with each staleness."""
    for row in rows:
        taus, counts = np.array(row["histogram"], dtype=float).T
        shares = counts / counts.sum()
        label = f"{row['variant']}: mean {row['mean']:.1f}"
        axis.plot(taus, 100 * shares, marker="o", markersize=3, label=label)
    axis.set(xlabel="staleness", ylabel="% of updates", title="staleness", ylim=(0, None))
    axis.legend(fontsize=8)


def plot_batches(axis: Any, rows: list[dict[str, Any]]) -> None:
    """AUC and speed by workers and local batch."""
    order = sorted(rows, key=lambda row: (row["global_batch"], row["workers"]))
    places = np.arange(len(order))
    speeds = [row["queries_per_second"] for row in order]
    axis.bar(places, speeds, color="lightgray", label="examples per second")
    axis.set(ylabel="examples per second", title="global_batch")
    axis.set_xticks(places, [row["variant"] for row in order], rotation=25, ha="right", fontsize=8)
    axis.set_xlabel("workers x local batch = global batch")
    auc = axis.twinx()
    means = [continual.Mean(*[*row["mean_auc"], None][:2]) for row in order]
    auc.errorbar(
        places,
        [mean.mean for mean in means],
        yerr=[mean.half_width or 0.0 for mean in means],
        fmt="o",
        capsize=3,
        color="tab:blue",
        label="AUC",
    )
    auc.axhline(rows[0]["mean_auc"][0], color="tab:blue", linestyle="--", linewidth=1)  # Of sync.
    auc.set_ylabel("mean AUC of the days after the switch", color="tab:blue")
    auc.margins(y=0.3)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    unknown = set(FLAGS.experiments) - set(EXPERIMENTS)
    if unknown or not FLAGS.experiments:
        raise app.UsageError(f"--experiments: {sorted(unknown)} unknown; there are {EXPERIMENTS}")
    run = {
        "staleness": staleness,
        "weights": weights,
        "normalization": normalization,
        "swap": swap,
        "global_batch": global_batch,
    }
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(pathlib.Path(folder))
        laboratory.cluster(numbers()[0])  # Connects before any data are made.
        for experiment in FLAGS.experiments:
            results[experiment] = run[experiment](laboratory)
            show(experiment, results[experiment])
            mode_runs.write_json(FLAGS.json, [row for rows in results.values() for row in rows])
        laboratory.close()
    png = mode_runs.png_path(FLAGS.png, FLAGS.json)
    if png is not None:
        plot(results, png)


if __name__ == "__main__":
    app.run(main)
