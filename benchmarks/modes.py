"""Speed and staleness of the six training modes, with and without stragglers.

The shape of tables 5.2 and 5.3 of the GBA paper (Su et al. 2022). Each mode trains a small model
with `model.fit` on one local cluster; they take turns, so that all see the same machine, and what
is compared is the speed within a round. Clusters:

- even: all workers' steps take the same artificial compute time (`--compute_seconds`);
- stragglers: those of every fourth worker take `--slow` times as long;
- changing: as figure 2 of the paper, a cluster that others use by day: every fourth worker gets
  slower, up to `--slow` times, and then faster again, and the others a little. A turn is one day
  of `--day_seconds`.

The artificial time uses no processor, so that many workers overlap on a few cores as machines of
their own would, as long as the real work does not fill the cores: `cpu_share` is the part of them
that the benchmark used, and `of_ideal` the speed over the one that the artificial time alone
would allow. If `of_ideal` of async is much below 0.9, the machine is the bottleneck: choose a
longer `--compute_seconds`.

The tolerance iota of GBA is chosen from a staleness report, as a user would: BSP, which is GBA
without a tolerance, trains on the cluster with stragglers for a while, and iota is the age that 99
of 100 of its gradients do not exceed (the 0.99 quantile of the staleness in global steps, less 1).
Backup workers are as many as there are slow ones.

`--json=modes.json` gets the even cluster and that with stragglers: one object for each `mode`
(named as by the examples' --strategy) and `stragglers` (true or false: whether every fourth worker
is slow all the time). The changing cluster's objects go into `modes_changing.json` beside it.
Columns and keys:

- `queries_per_second`: examples that all workers together went through, the median of the rounds;
  `deviation` is that between windows of four of the slowest steps. With backup workers and GBA
  some of these examples are not learned from: `applied_per_second` leaves them out.
- `worker_queries_per_second` and `worker_deviation`: of single workers, and between them.
- `staleness_mean`, `staleness_max`: in updates of the dense variables (`staleness_unit`: single
  pushes, or global batches where these are applied together); 1 is fresh.
  `staleness_in_global_batches` says it in one unit for all modes, 0 being fresh as in table 5.3.
- `longest_pause`: seconds in which no worker finished a step; much more than a slow step's time
  means that the machine was busy with something else.
- `excluded`: batches whose gradients were left out (GBA) or dropped (backup workers), of `batches`.

    python benchmarks/modes.py --workers=16 --compute_seconds=0.4 --json=modes.json
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from typing import Any

import common  # First: it finds the package and the examples.
import keras
import mode_runs
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import tf_recsync as recsync
from tf_recsync.testing import ChangingSlowdown, Slowdown, SlowWorkers

FLAGS = flags.FLAGS
mode_runs.define_flags()
mode_runs.define_mode_flags()
flags.adopt_module_key_flags(mode_runs)  # So that --help has them.
CLUSTERS = ("even", "stragglers", "changing")
flags.DEFINE_list("modes", list(mode_runs.MODES), "The modes to run.")
flags.DEFINE_list("clusters", list(CLUSTERS), "The clusters to run them on.")
flags.DEFINE_integer("workers", 16, "Workers.", lower_bound=2)
flags.DEFINE_float("compute_seconds", 0.4, "Artificial compute time of a step.", lower_bound=0.001)
flags.DEFINE_integer("steps", 960, "Steps of a turn, of all workers together.", lower_bound=1)
flags.DEFINE_float("day_seconds", 48.0, "The length of a day.", lower_bound=1)
flags.DEFINE_integer("rounds", 3, "Rounds that count.", lower_bound=1)

DATA_BATCHES = 64
SIZES = (1000, 200, 50, 10)  # Ids of the categorical features.
# How busy a shared cluster is by the hour of the day: vacant at night, full from late morning on.
_BUSY = [(0, 0.3), (3, 0.0), (7, 0.0), (11, 1.0), (15, 0.8), (21, 1.0), (24, 0.3)]
_BUSY_FOR_ALL = 0.5  # By how much busy hours slow those workers down that are not the slow ones.


class OnlyWorkers(Slowdown):
    """A slowdown that holds for some of the workers."""

    def __init__(self, slowdown: Slowdown, workers: list[int]):
        self._slowdown = slowdown
        self._workers = workers

    def factor(self, worker, step, seconds):
        is_named = tf.reduce_any(tf.equal(worker, tf.constant(self._workers, tf.int64)))
        return tf.where(is_named, self._slowdown.factor(worker, step, seconds), 1.0)


def slow_workers() -> list[int]:
    """Every fourth worker."""
    return list(range(min(3, FLAGS.workers - 1), FLAGS.workers, 4))


def slowdown_of(cluster: str) -> Slowdown | None:
    """By what the artificial compute time is multiplied."""
    if cluster == "even":
        return None
    if cluster == "stragglers":
        return SlowWorkers(FLAGS.slow, slow_workers())

    def day(most: float) -> ChangingSlowdown:
        hour = FLAGS.day_seconds / 24
        return ChangingSlowdown([(h * hour, 1 + (most - 1) * busy) for h, busy in _BUSY])

    slow = slow_workers()
    others = sorted(set(range(FLAGS.workers)) - set(slow))
    return OnlyWorkers(day(FLAGS.slow), slow) * OnlyWorkers(day(1 + _BUSY_FOR_ALL), others)


def ideal_speed(mode: str, cluster: str) -> float | None:
    """Steps per second if nothing but the artificial time took any; None if that is not known."""
    if cluster == "changing" or mode == "backup_workers":
        return None
    workers, seconds = FLAGS.workers, FLAGS.compute_seconds
    slow = len(slow_workers()) if cluster == "stragglers" else 0
    if mode in ("sync", "bounded_staleness"):
        return workers / (seconds * (FLAGS.slow if slow else 1.0))
    return (workers - slow + slow / FLAGS.slow) / seconds


def make_systems(modes: list[str]) -> tuple[dict[str, mode_runs.System], tf.data.Dataset]:
    """The modes' systems, on one cluster, and batches; chooses iota if it is not given."""
    cluster = mode_runs.start_cluster(FLAGS.workers, FLAGS.ps, FLAGS.processes)
    data = recsync.data.Synthetic(
        DATA_BATCHES * FLAGS.batch_size, test_rows=0, cardinalities=SIZES, numeric=4
    )
    batches = mode_runs.memory_of(data, FLAGS.batch_size)

    def build() -> keras.Model:
        model = mode_runs.small_model(data.spec)
        model.compile(recsync.optimizers.Adagrad(0.01), "binary_crossentropy")
        return model

    def make(mode: str, iota: int | None) -> mode_runs.System:
        backup = FLAGS.backup_workers
        options = mode_runs.Options(
            FLAGS.batch_size,
            FLAGS.workers,
            iota,
            len(slow_workers()) if backup is None else backup,
            FLAGS.staleness_bound,
        )
        return mode_runs.System(mode, cluster, options, build)

    iota = FLAGS.iota
    if iota is None and "gba" in modes:
        bsp = make("bsp", None)
        set_cluster(bsp, "stragglers")
        steps = max(FLAGS.steps // 2, 8 * FLAGS.workers)
        iota = mode_runs.choose_iota(bsp, batches, steps)
    return {mode: make(mode, iota) for mode in modes}, batches


def set_cluster(system: mode_runs.System, cluster: str) -> None:
    """Has a system's workers be those of a cluster."""
    recsync.testing.set_compute_time(system.strategy, FLAGS.compute_seconds, slowdown_of(cluster))


def measure(
    systems: dict[str, mode_runs.System], batches: tf.data.Dataset, cluster: str
) -> dict[str, list[mode_runs.Turn]]:
    """The turns of all modes on one kind of cluster."""
    turns: dict[str, list[mode_runs.Turn]] = {mode: [] for mode in systems}
    for system in systems.values():
        set_cluster(system, cluster)
    for number in range(FLAGS.rounds):
        for mode, system in systems.items():
            if cluster == "changing":
                most = int(2 * FLAGS.workers * FLAGS.day_seconds / FLAGS.compute_seconds)
                turn = system.turn(batches, 0, most, FLAGS.day_seconds)
            else:
                turn = system.turn(batches, 4 * FLAGS.workers, FLAGS.steps)
            turns[mode].append(turn)
            where = f"{cluster}, round {number + 1} of {FLAGS.rounds}"
            print(f"{where}: {mode} {turn.speed:.1f} steps/s", file=sys.stderr)
    return turns


def row(
    system: mode_runs.System, cluster: str, turns: dict[str, list[mode_runs.Turn]]
) -> dict[str, Any]:
    """The object of one mode on one kind of cluster."""
    mode = system.mode
    mine = turns[mode]
    examples = FLAGS.batch_size
    speed = statistics.median(turn.speed for turn in mine)
    window = 4 * FLAGS.slow * FLAGS.compute_seconds
    windows = np.concatenate([turn.window_speeds(window) for turn in mine])
    workers = np.concatenate([turn.worker_speeds for turn in mine])
    staleness = recsync.staleness.Statistics.sum([turn.staleness for turn in mine])
    excluded = sum(turn.excluded for turn in mine)
    batches = sum(turn.batches for turn in mine)
    pushes_at_once = mode in ("async", "bounded_staleness")
    ideal = ideal_speed(mode, cluster)

    def relative_to(other: str) -> float | None:
        if other not in turns:
            return None
        ratios = [a.speed / b.speed for a, b in zip(mine, turns[other], strict=True)]
        return round(statistics.median(ratios), 3)

    return {
        "benchmark": "modes",
        "mode": mode,
        "cluster": cluster,
        "stragglers": cluster == "stragglers",
        "workers": FLAGS.workers,
        "queries_per_second": round(examples * speed, 1),
        "deviation": round(examples * float(windows.std()), 1),
        "applied_per_second": round(examples * speed * (1 - excluded / batches), 1),
        "relative_to_async": relative_to("async"),
        "relative_to_sync": relative_to("sync"),
        "worker_queries_per_second": round(examples * float(workers.mean()), 1),
        "worker_deviation": round(examples * float(workers.std()), 1),
        "staleness_mean": round(staleness.mean, 3),
        "staleness_max": staleness.max,
        "staleness_unit": "push" if pushes_at_once else "global batch",
        "staleness_in_global_batches": round(
            (staleness.mean - 1) / (FLAGS.workers if pushes_at_once else 1), 3
        ),
        "excluded": round(excluded, 1),
        "batches": batches,
        "iota": system.options.iota if mode == "gba" else None,
        "of_ideal": None if ideal is None else round(speed / ideal, 3),
        "cpu_share": round(statistics.median(turn.cpu_share for turn in mine), 2),
        "queries_per_second_of_rounds": [round(examples * turn.speed, 1) for turn in mine],
        "longest_pause": round(max(turn.longest_pause for turn in mine), 2),
        "compute_seconds": FLAGS.compute_seconds,
        "rounds": FLAGS.rounds,
    }


def show(cluster: str, rows: list[dict[str, Any]]) -> None:
    """Prints the rows of one kind of cluster."""

    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    mode_runs.print_table(
        f"Cluster: {cluster}, {FLAGS.workers} workers",
        [
            {
                "mode": r["mode"],
                "examples/s": f"{r['queries_per_second']:,.0f} ({r['deviation']:,.0f})",
                "applied/s": f"{r['applied_per_second']:,.0f}",
                "/ async": ratio(r["relative_to_async"]),
                "/ sync": ratio(r["relative_to_sync"]),
                "a worker's": f"{r['worker_queries_per_second']:,.0f} "
                f"({r['worker_deviation']:,.0f})",
                "staleness": f"{r['staleness_mean']:.2f} ({r['staleness_max']})",
                "in global batches": f"{r['staleness_in_global_batches']:.2f}",
                "excluded": f"{r['excluded']:,.0f} of {r['batches']:,}",
                "of ideal": ratio(r["of_ideal"]),
                "cpu": f"{100 * r['cpu_share']:.0f} %",
            }
            for r in rows
        ],
    )


def plot(
    rows: list[dict[str, Any]], day: dict[str, list[mode_runs.Turn]], path: pathlib.Path
) -> None:
    """Speeds and staleness of the modes; the speed over a day on the changing cluster."""
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    clusters = list(dict.fromkeys(r["cluster"] for r in rows))
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    figure, axes = pyplot.subplots(
        1, 3 if day else 2, figsize=(17 if day else 11, 4.8), layout="constrained"
    )
    width = 0.8 / len(clusters)
    for number, cluster in enumerate(clusters):
        mine = {r["mode"]: r for r in rows if r["cluster"] == cluster}
        places = np.arange(len(modes)) + (number - (len(clusters) - 1) / 2) * width
        speeds = [mine[mode]["queries_per_second"] for mode in modes]
        deviations = [mine[mode]["deviation"] for mode in modes]
        axes[0].bar(places, speeds, width, yerr=deviations, capsize=2, label=cluster)
        ages = [mine[mode]["staleness_in_global_batches"] for mode in modes]
        axes[1].bar(places, ages, width, label=cluster)
    axes[0].set(
        ylabel="examples per second",
        ylim=(0, None),
        title="Speed of all workers (deviation over time)",
    )
    axes[1].set(ylabel="global batches", title="Mean staleness of gradients, 0 is fresh")
    for axis in axes[:2]:
        axis.set_xticks(np.arange(len(modes)), modes, rotation=25, ha="right")
    figure.legend(
        *axes[0].get_legend_handles_labels(), title="cluster", loc="outside lower left", ncols=3
    )
    if day:
        plot_day(axes[2], day)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_day(axis: Any, day: dict[str, list[mode_runs.Turn]]) -> None:
    """The speeds over the day, smoothed over an hour, and how busy the cluster is."""
    hours = np.linspace(0, 24, 49)
    for mode, turns in day.items():
        series = []
        for turn in turns:
            times = 24 * turn.times / FLAGS.day_seconds
            totals = turn.steps.sum(axis=1)
            ahead, behind = np.minimum(hours + 1, times[-1]), np.maximum(hours - 1, 0)
            steps = np.interp(ahead, times, totals) - np.interp(behind, times, totals)
            series.append(steps / np.maximum(ahead - behind, 0.5) / (FLAGS.day_seconds / 24))
        axis.plot(hours, FLAGS.batch_size * np.mean(series, axis=0), label=mode)
    axis.set(xlabel="hour of the day", ylabel="examples per second")
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])  # Room for the legend.
    axis.set(title="Changing cluster", xlim=(0, 24), xticks=range(0, 25, 4))
    busy = axis.twinx()
    busy.fill_between(*zip(*_BUSY, strict=True), color="gray", alpha=0.15, label="others' load")
    busy.set(ylim=(0, 2.0), yticks=[])
    lines, names = axis.get_legend_handles_labels()
    areas, others = busy.get_legend_handles_labels()
    busy.legend(lines + areas, names + others, fontsize=8, ncols=2, loc="upper center")


def write(rows: list[dict[str, Any]], path: str | None) -> None:
    """Writes the objects; those of the changing cluster into a file of their own."""
    if path is None:
        return
    changing = [r for r in rows if r["cluster"] == "changing"]
    steady = [r for r in rows if r["cluster"] != "changing"]
    one = pathlib.Path(path)
    for mine, where in ((steady, one), (changing, one.with_stem(f"{one.stem}_changing"))):
        if mine:
            mode_runs.write_json(str(where), mine)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    common.check_arguments(argv, needs_one=True, modes=mode_runs.MODES, clusters=CLUSTERS)
    systems, batches = make_systems(FLAGS.modes)
    rows: list[dict[str, Any]] = []
    day: dict[str, list[mode_runs.Turn]] = {}
    for cluster in FLAGS.clusters:
        turns = measure(systems, batches, cluster)
        if cluster == "changing":
            day = turns
        mine = [row(system, cluster, turns) for system in systems.values()]
        show(cluster, mine)
        rows += mine
        write(rows, FLAGS.json)
        png = mode_runs.png_path(FLAGS.png, FLAGS.json)
        if png is not None:
            plot(rows, day, png)


if __name__ == "__main__":
    app.run(main)
