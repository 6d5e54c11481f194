"""Decentralized training (Hop) on slow workers, beside the schedule it would have for free.

The experiments of the Hop paper (Luo et al. 2019), section 7.3, on 16 workers of a local cluster:

- random: each step of a worker takes 6 times as long with probability 1/n, on three graphs;
  standard training, one backup worker, a staleness bound of 5;
- straggler: one worker is always 4 times slower, on the ring-based graph; standard, one backup
  worker, and that with skipping at most 2 and at most 10 iterations at a time;
- servers: all workers alike, every server with a link of `--bandwidth` bytes per second; Hop on
  the ring-based graph against SyncStrategy with one parameter server;
- protocols: token queues against notify-ack, with the random slowdown of the first.

Each setting trains the same model with `model.fit`. The artificial compute time uses no processor,
so that many workers overlap on a few cores as machines of their own would. `ideal_seconds` is the
mean iteration of a simulation of the same protocol with the same compute times and communication
that costs nothing (hop_schedule.py); `of_ideal_speedup` is the speed-up over standard training as
a part of the simulation's. Settings of an experiment take turns, `--rounds` times.

Keys of the JSON list, an object for each setting: experiment, graph, setting, iteration_seconds
(the mean of a worker's, median of the rounds), ideal_seconds, speedup (over the experiment's first
setting on this graph), ideal_speedup, of_ideal_speedup, slowdown (over the undisturbed compute
time), loss (at the end), seconds_to_loss and steps_to_loss (when the loss first got to
`--target_loss`: median of the rounds, null if one did not; steps are a worker's, on average), curve
(of the last round: [[seconds, steps, loss], ...]), jumps, sends_saved, cpu_share.

    python benchmarks/hop.py --json=hop.json
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import common  # First: it finds the package and the examples.
import hop_schedule
import keras
import machine
import mode_runs
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.synchronization.events import Event
from tf_recsync.testing import RandomSlowdown, Slowdown, SlowWorkers

FLAGS = flags.FLAGS
EXPERIMENTS = ("random", "straggler", "servers", "protocols")
flags.DEFINE_list("experiments", list(EXPERIMENTS), "What to run.")
flags.DEFINE_integer("workers", 16, "Workers, a multiple of 4.", lower_bound=4)
flags.DEFINE_integer("processes", None, "Processes of the servers. Default: one for each.")
flags.DEFINE_float("compute_seconds", 0.3, "Artificial time of a step.", lower_bound=0.001)
flags.DEFINE_integer("iterations", 60, "Iterations of a worker in a turn.", lower_bound=8)
flags.DEFINE_integer("rounds", 1, "Rounds that count.", lower_bound=1)
flags.DEFINE_float("bandwidth", 2e6, "servers: of each server's link, bytes/s.", lower_bound=1)
flags.DEFINE_float("target_loss", 0.55, "See seconds_to_loss.")
flags.DEFINE_string("json", None, "Gets the results, a list of objects.")
flags.DEFINE_string("png", None, "Gets the picture. Default: beside --json.")

BATCH = 32
FEATURES = 64
HIDDEN = 128
GAP = 5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one run trains with; `options` go to HopStrategy, None is SyncStrategy."""

    experiment: str
    graph: str
    name: str
    options: dict[str, Any] | None
    slowdown: Slowdown | None = None
    bandwidth: float | None = None


def settings() -> list[Setting]:
    """All settings of the experiments chosen."""
    workers = FLAGS.workers
    random = RandomSlowdown(6.0, 1 / workers, seed=5)
    straggler = SlowWorkers(4.0, [3])
    backup = {"max_iteration_gap": GAP, "backup_workers": 1}
    standard = {"max_iteration_gap": GAP}
    found = []
    for graph in ("ring", "ring_based", "double_ring"):
        for name, options in (
            ("standard", standard),
            ("1 backup worker", backup),
            ("staleness 5", {"max_iteration_gap": GAP, "staleness_bound": 5}),
        ):
            found.append(Setting("random", graph, name, options, random))
    for name, options in (
        ("standard", standard),
        ("1 backup worker", backup),
        ("skip at most 2", {**backup, "skip": recsync.Skip(2)}),
        ("skip at most 10", {**backup, "max_iteration_gap": 10, "skip": recsync.Skip(10)}),
    ):
        found.append(Setting("straggler", "ring_based", name, options, straggler))
    bandwidth = FLAGS.bandwidth
    found.append(Setting("servers", "ring_based", "SyncStrategy, 1 ps", None, None, bandwidth))
    found.append(Setting("servers", "ring_based", "Hop", standard, None, bandwidth))
    for name, options in (
        ("notify-ack", {"protocol": "notify_ack"}),
        ("token queues", standard),
    ):
        found.append(Setting("protocols", "ring_based", name, options, random))
    return [setting for setting in found if setting.experiment in FLAGS.experiments]


class Curve(keras.callbacks.Callback):
    """When which loss was seen: the mean of the last eight steps of all workers.

    A single step's loss could not be told: Keras's is the mean since the epoch began, of as many
    batches as workers had done when they were asked.
    """

    def __init__(self):
        super().__init__()
        self.points: list[tuple[float, int, float]] = []  # seconds, batches, loss

    def on_train_begin(self, logs=None):
        self._began = time.monotonic()
        self._sums = [(0, 0.0)]  # Of batches, and of their losses.

    def on_train_batch_end(self, batch, logs=None):
        done, total = batch + 1, logs["loss"] * (batch + 1)
        if done - self._sums[-1][0] < 2 * FLAGS.workers:
            return
        self._sums = [*self._sums[-3:], (done, total)]
        (first, before), (last, now) = self._sums[0], self._sums[-1]
        self.points.append((time.monotonic() - self._began, done, (now - before) / (last - first)))


class Run:
    """A setting, with its model on the cluster."""

    def __init__(self, setting: Setting, cluster: recsync.LocalCluster, data: tf.data.Dataset):
        self.setting = setting
        self._cluster = cluster
        self._data = data
        self.graph = getattr(topology, setting.graph)(FLAGS.workers)
        if setting.options is None:
            self.strategy = recsync.SyncStrategy(cluster, local_batch_size=BATCH)
        else:
            self.strategy = recsync.HopStrategy(cluster, self.graph, **setting.options)
        recsync.testing.set_compute_time(self.strategy, FLAGS.compute_seconds, setting.slowdown)
        recsync.testing.set_bandwidth(self.strategy, setting.bandwidth)
        self.curves: list[list[tuple[float, int, float]]] = []
        self.iteration_seconds: list[float] = []
        self.cpu_shares: list[float] = []

    def turn(self) -> None:
        """Trains a fresh model once."""
        keras.utils.set_random_seed(1)
        sync = self.setting.options is None
        with self.strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((FEATURES,)),
                    keras.layers.Dense(HIDDEN, "relu"),
                    keras.layers.Dense(1, "sigmoid"),
                ]
            )
            optimizer = recsync.optimizers.SGD if sync else keras.optimizers.SGD
            model.compile(optimizer(0.1), "binary_crossentropy")
        steps = FLAGS.iterations * FLAGS.workers
        model.fit(self._data, steps_per_epoch=FLAGS.workers, verbose=0)  # Traces, and warms up.
        curve = Curve()
        pids = mode_runs.server_pids(self._cluster)
        began, cpu = time.monotonic(), machine.cpu_seconds(pids)
        recording = None if sync else self.strategy.record_events(model)
        model.fit(self._data, steps_per_epoch=steps, verbose=0, callbacks=[curve])
        seconds = time.monotonic() - began
        self.cpu_shares.append((machine.cpu_seconds(pids) - cpu) / seconds / machine.cores())
        self.curves.append(curve.points)
        if sync:
            self.iteration_seconds.append(_seconds_per_batch(curve.points) * FLAGS.workers)
            return
        recording.stop()
        self.reports = self.strategy.hop_report(model)
        self.iteration_seconds.append(_entered_seconds(recording.events()))

    def ideal_seconds(self) -> float | None:
        """The mean iteration of the same protocol if communication were free."""
        options = self.setting.options
        if options is None:
            return None
        factors = {}

        def seconds(worker: int, step: int) -> float:
            if self.setting.slowdown is None:
                return FLAGS.compute_seconds
            if (worker, step) not in factors:
                at = tf.constant(worker, tf.int64), tf.constant(step, tf.int64)
                with tf.device("/CPU:0"):
                    factors[worker, step] = float(self.setting.slowdown.factor(*at, 0.0))
            return FLAGS.compute_seconds * factors[worker, step]

        schedule = hop_schedule.Schedule(
            self.graph,
            options.get("max_iteration_gap"),
            seconds,
            backup_workers=options.get("backup_workers", 0),
            staleness_bound=options.get("staleness_bound"),
            max_jump=options["skip"].max_jump if "skip" in options else 1,
            notify_ack=options.get("protocol") == "notify_ack",
        )
        return hop_schedule.iteration_seconds(schedule.run(FLAGS.iterations))


def _seconds_per_batch(points: list[tuple[float, int, float]]) -> float:
    half = points[len(points) // 2 :]
    return (half[-1][0] - half[0][0]) / (half[-1][1] - half[0][1])


def _entered_seconds(events: Iterable[Event]) -> float:
    """The mean iteration of all workers, by when they entered the iterations of the last epoch."""
    entered: dict[int, list[tuple[int, float]]] = {}
    for event in events:
        if event.name == "compute":
            entered.setdefault(event.worker, []).append((event.iteration, event.begin * 1e-6))
    # As the simulation has it: over the second half of what all got to.
    last = min(max(iteration for iteration, _ in points) for points in entered.values())
    means = []
    for points in entered.values():
        kept = [p for p in sorted(points) if last - FLAGS.iterations // 2 <= p[0] <= last]
        if len(kept) < 2:
            kept = sorted(points)[-2:]
        means.append((kept[-1][1] - kept[0][1]) / (kept[-1][0] - kept[0][0]))
    return statistics.mean(means)


def _to_loss(
    curves: list[list[tuple[float, float, float]]],
) -> tuple[float | None, float | None]:
    """After how many seconds and steps the loss got to the target, as medians of the curves."""
    reached = [next((p for p in curve if p[2] <= FLAGS.target_loss), None) for curve in curves]
    if None in reached:
        return None, None
    seconds, steps, _ = zip(*reached, strict=True)
    return round(statistics.median(seconds), 2), round(statistics.median(steps), 2)


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """The objects of all settings."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    found = []
    for run in runs:
        setting = run.setting
        measured = statistics.median(run.iteration_seconds)
        ideal = run.ideal_seconds()
        curves = [
            [(seconds, batches / FLAGS.workers, loss) for seconds, batches, loss in curve]
            for curve in run.curves
        ]
        seconds_to_loss, steps_to_loss = _to_loss(curves)
        row = {
            "benchmark": "hop",
            "experiment": setting.experiment,
            "graph": setting.graph,
            "spectral_gap": round(run.graph.spectral_gap, 4),
            "setting": setting.name,
            "workers": FLAGS.workers,
            "compute_seconds": FLAGS.compute_seconds,
            "iteration_seconds": round(measured, 4),
            "ideal_seconds": None if ideal is None else round(ideal, 4),
            "slowdown": round(measured / FLAGS.compute_seconds, 3),
            "loss": round(run.curves[-1][-1][2], 4),
            "seconds_to_loss": seconds_to_loss,
            "steps_to_loss": steps_to_loss,
            "curve": [[round(at, 3), round(step, 2), round(x, 5)] for at, step, x in curves[-1]],
            "cpu_share": round(statistics.median(run.cpu_shares), 2),
        }
        if setting.options is not None:
            row["jumps"] = sum(worker.jumps for worker in run.reports)
            row["sends_saved"] = sum(worker.sends_saved for worker in run.reports)
        base = first.setdefault((setting.experiment, setting.graph), row)
        row["speedup"] = round(base["iteration_seconds"] / measured, 3)
        if ideal is not None and base["ideal_seconds"] is not None:
            row["ideal_speedup"] = round(base["ideal_seconds"] / ideal, 3)
            row["of_ideal_speedup"] = round(row["speedup"] / row["ideal_speedup"], 3)
        found.append(row)
    return found


def show(found: list[dict[str, Any]]) -> None:
    """Prints the rows, a table for each experiment."""

    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    for experiment in dict.fromkeys(row["experiment"] for row in found):
        mode_runs.print_table(
            f"{experiment}: {FLAGS.workers} workers, steps of {FLAGS.compute_seconds:g} s",
            [
                {
                    "graph": row["graph"],
                    "setting": row["setting"],
                    "iteration": number(row["iteration_seconds"], ".3f"),
                    "ideal": number(row["ideal_seconds"], ".3f"),
                    "speed-up": number(row["speedup"]),
                    "ideal speed-up": number(row.get("ideal_speedup")),
                    "of ideal": number(row.get("of_ideal_speedup")),
                    "slowdown": number(row["slowdown"]),
                    "loss": number(row["loss"], ".4f"),
                    f"to {FLAGS.target_loss:g}": number(row["seconds_to_loss"], ".1f"),
                    "jumps": str(row.get("jumps", "")),
                    "cpu": f"{100 * row['cpu_share']:.0f} %",
                }
                for row in found
                if row["experiment"] == experiment
            ],
        )


def plot(runs: list[Run], path: pathlib.Path) -> None:
    """Losses against wall time and against steps, a row of pictures for each experiment."""
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.setting.experiment, run.setting.graph), []).append(run)
    figure, axes = pyplot.subplots(
        len(groups), 2, figsize=(11, 3.3 * len(groups)), layout="constrained", squeeze=False
    )
    for (experiment, graph), pair in zip(groups, axes, strict=True):
        for run in groups[experiment, graph]:
            seconds, batches, losses = zip(*run.curves[-1], strict=True)
            pair[0].plot(seconds, losses, label=run.setting.name)
            pair[1].plot(np.array(batches) / FLAGS.workers, losses, label=run.setting.name)
        pair[0].set(xlabel="seconds", ylabel="training loss", title=f"{experiment}, {graph}")
        pair[1].set(xlabel="steps of a worker, on average", title=f"{experiment}, {graph}")
        pair[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    common.check_arguments(argv, experiments=EXPERIMENTS)
    if FLAGS.workers % 4:
        raise app.UsageError(f"--workers must be a multiple of 4, not {FLAGS.workers}")
    ps = 1 if "servers" in FLAGS.experiments else 0
    cluster = mode_runs.start_cluster(FLAGS.workers, ps, FLAGS.processes)
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * 512, FEATURES)).astype(np.float32)
    hidden = np.tanh(x @ random.normal(size=(FEATURES, 8)))
    y = (hidden.sum(1, keepdims=True) > 0).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True).repeat()
    runs = [Run(setting, cluster, data) for setting in settings()]
    for number in range(FLAGS.rounds):
        for run in runs:
            run.turn()
            print(
                f"round {number + 1} of {FLAGS.rounds}: {run.setting.experiment}, "
                f"{run.setting.graph}, {run.setting.name}: {run.iteration_seconds[-1]:.3f} s",
                file=sys.stderr,
            )
    found = rows(runs)
    show(found)
    mode_runs.write_json(FLAGS.json, found)
    path = mode_runs.png_path(FLAGS.png, FLAGS.json)
    if path is not None:
        plot(runs, path)


if __name__ == "__main__":
    app.run(main)
