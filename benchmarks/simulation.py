"""How far simulated clusters are from real ones: speed and staleness, in every mode.

What is measured: workers with artificial compute times (`recsync.testing`), tens of times as long
as what a step costs otherwise, on a `LocalCluster` and in `recsync.simulation.run`. Every fourth
worker takes `--slow` times as long, and three of ten steps 1.3 times. Of a pass, the first and the
last fifth of the steps are left out, on both sides.

How: for each mode and each number of workers a pass of `fit`; steps a second and the mean staleness
from readings at two moments of the pass. `speed_ratio` and `staleness_ratio` are those of the
simulation to the real cluster.

    python benchmarks/simulation.py --json=simulation.json
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

import common
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_recsync as recsync
from tf_recsync import modes, simulation
from tf_recsync._figures import new_figure
from tf_recsync.staleness import Statistics

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["4", "8"], "Numbers of workers.")
flags.DEFINE_integer("ps", 2, "Parameter servers.", lower_bound=1)
flags.DEFINE_float("compute_seconds", 0.3, "Artificial compute time.", lower_bound=0.001)
flags.DEFINE_float("slow", 2.0, "How many times as long slow workers take.", lower_bound=1)
flags.DEFINE_integer("steps_per_worker", 40, "Of a pass, on average.", lower_bound=10)
flags.DEFINE_integer("rounds", 1, "Passes of each mode.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the results.")
flags.DEFINE_string("png", None, "Gets the picture. Default: beside --json.")

BATCH = 8


def modes_of(workers: int) -> dict[str, modes.ModeConfig]:
    """The modes, and what they are called."""
    sizes = {"local_batch_size": BATCH, "global_batch_size": BATCH * workers}
    return {
        "async": modes.Async(local_batch_size=BATCH),
        "sync": modes.Sync(local_batch_size=BATCH),
        "bsp": modes.BSP(**sizes),
        "gba": modes.GBA(**sizes, staleness_tolerance=1),
        "backup_workers": modes.BackupWorkers(backup_workers=workers // 4, local_batch_size=BATCH),
        "bounded_staleness": modes.BoundedStaleness(staleness_bound=2, local_batch_size=BATCH),
    }


def strategy_of(cluster: recsync.LocalCluster, mode: modes.ModeConfig) -> Any:
    """The strategy of a mode."""
    made = {
        modes.Async: lambda: recsync.AsyncStrategy(cluster),
        modes.Sync: lambda: recsync.SyncStrategy(cluster),
        modes.BSP: lambda: recsync.BSPStrategy(
            cluster, global_batch_size=mode.global_batch_size, local_batch_size=BATCH
        ),
        modes.GBA: lambda: recsync.GBAStrategy(
            cluster,
            global_batch_size=mode.global_batch_size,
            local_batch_size=BATCH,
            staleness_tolerance=mode.staleness_tolerance,
        ),
        modes.BackupWorkers: lambda: recsync.BackupWorkersStrategy(
            cluster, backup_workers=mode.backup_workers
        ),
        modes.BoundedStaleness: lambda: recsync.BoundedStalenessStrategy(
            cluster, staleness_bound=mode.staleness_bound
        ),
    }
    return made[type(mode)]()


def slowdown(workers: int) -> recsync.testing.Slowdown:
    """Slow workers, and steps that differ."""
    slow = recsync.testing.SlowWorkers(FLAGS.slow, range(3, workers, 4))
    return slow * recsync.testing.RandomSlowdown(1.3, probability=0.3, seed=1)


class Readings(keras.callbacks.Callback):
    """Reads the clock, the steps and the staleness when a fifth of a pass is done, and four."""

    def __init__(self, steps: int):
        super().__init__()
        self._due = [steps // 5, steps - steps // 5]
        self.taken: list[tuple[float, int, Statistics]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = self.model.train_function.epoch_steps
        if len(self.taken) < 2 and done >= self._due[len(self.taken)]:
            strategy = self.model.distribute_strategy
            dense = strategy.staleness(self.model).dense
            self.taken.append((time.monotonic(), sum(strategy.worker_steps(self.model)), dense))


def real(cluster: recsync.LocalCluster, mode: modes.ModeConfig, steps: int) -> tuple[float, float]:
    """Steps a second and the mean staleness on a cluster."""
    strategy = strategy_of(cluster, mode)
    recsync.testing.set_compute_time(strategy, FLAGS.compute_seconds, slowdown(cluster.workers))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.01), "mse")
    x = np.ones((BATCH * 64, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH).repeat()
    model.fit(data, steps_per_epoch=cluster.workers, verbose=0)  # Traces, and connects.
    readings = Readings(steps)
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[readings])
    (began, before, first), (ended, after, second) = readings.taken
    return (after - before) / (ended - began), second.since(first).mean


def simulated(mode: modes.ModeConfig, workers: int, steps: int) -> tuple[float, float]:
    """The same of a simulation."""
    result = simulation.run(
        mode,
        workers=workers,
        ps=FLAGS.ps,
        compute_seconds=FLAGS.compute_seconds,
        slowdown=slowdown(workers),
        steps=steps,
        warmup_steps=steps // 5,
        cooldown_steps=steps // 5,
    )
    return result.steps_per_second, result.staleness.dense.mean


def draw(lines: list[dict[str, Any]], path: str) -> None:
    """The ratios of the simulation to the real cluster."""
    figure = new_figure(9.0, 4.0, "benchmarks/simulation.py")
    for axes, name in zip(figure.subplots(1, 2), ("speed", "staleness"), strict=True):
        for workers in sorted({line["workers"] for line in lines}):
            mine = [line for line in lines if line["workers"] == workers]
            axes.plot(
                [line["mode"] for line in mine],
                [line[f"{name}_ratio"] for line in mine],
                "o",
                label=f"{workers} workers",
            )
        axes.axhline(1.0, color="#888888", lw=0.8)
        axes.set_ylim(0.8, 1.2)
        axes.tick_params(axis="x", rotation=30, labelsize=8)
        axes.set_title(f"{name}: simulated / real", fontsize=10)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    lines = []
    for workers in sorted(int(number) for number in FLAGS.workers):
        steps = FLAGS.steps_per_worker * workers
        with recsync.LocalCluster(workers=workers, ps=FLAGS.ps) as cluster:
            for name, mode in modes_of(workers).items():
                found = [real(cluster, mode, steps) for _ in range(FLAGS.rounds)]
                speed, stale = (float(np.median(values)) for values in zip(*found, strict=True))
                of_simulation = simulated(mode, workers, steps)
                line = {
                    "benchmark": "simulation",
                    "mode": name,
                    "workers": workers,
                    "steps_per_second": round(speed, 3),
                    "simulated_steps_per_second": round(of_simulation[0], 3),
                    "speed_ratio": round(of_simulation[0] / speed, 4),
                    "staleness": round(stale, 4),
                    "simulated_staleness": round(of_simulation[1], 4),
                    "staleness_ratio": round(of_simulation[1] / stale, 4),
                }
                common.report(line)
                lines.append(line)
    if FLAGS.json:
        draw(lines, FLAGS.png or str(pathlib.Path(FLAGS.json).with_suffix(".png")))


if __name__ == "__main__":
    app.run(main)
