"""How far simulated clusters are from real ones: speed and staleness, in every mode.

What is measured: workers with artificial compute times (`recsync.testing`), tens of times as long
as what a step costs otherwise, on a `LocalCluster` and in `recsync.simulation.run`, or `run_hop`
for Hop on a ring-based graph. Every fourth worker takes `--slow` times as long, and steps have
eight different lengths. Of a pass, the first and the last fifth of the steps are left out, on both
sides.

How: for each mode and each number of workers a pass of `fit`; steps a second and the mean staleness
from readings at two moments of the pass. `speed_ratio` and `staleness_ratio` are those of the
simulation to the real cluster. More than eight workers compute longer in proportion to their
number, as they share the machine's processors otherwise. `load` is how many processes wanted a
processor in the minute before, for each that there is.

    python benchmarks/simulation.py --json=simulation.json
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
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
flags.DEFINE_list("workers", ["4", "8", "16"], "Numbers of workers.")
flags.DEFINE_integer("ps", 2, "Parameter servers.", lower_bound=1)
flags.DEFINE_float("compute_seconds", 0.3, "Of up to eight workers.", lower_bound=0.001)
flags.DEFINE_float("slow", 2.0, "How many times as long slow workers take.", lower_bound=1)
flags.DEFINE_integer("steps_per_worker", 40, "Of a pass, on average.", lower_bound=10)
flags.DEFINE_integer("processes", None, "Of servers. Default: one for each server.", lower_bound=0)
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


def hop_strategy_of(cluster: recsync.LocalCluster) -> recsync.HopStrategy:
    """Hop, with its defaults."""
    return recsync.HopStrategy(cluster, recsync.topology.ring_based(cluster.workers))


def slowdown(workers: int) -> recsync.testing.Slowdown:
    """Slow workers, and steps that differ."""
    slow: recsync.testing.Slowdown = recsync.testing.SlowWorkers(FLAGS.slow, range(3, workers, 4))
    # Their lengths have no common measure. Workers whose steps are equally long would push at the
    # same moments: then the milliseconds until a worker pulls again, which a simulation does not
    # have, let the pushes of all others in, and gradients are less stale.
    for seed, multiple in enumerate((1.31, 1.17, 1.07)):
        slow = slow * recsync.testing.RandomSlowdown(multiple, probability=0.5, seed=seed)
    return slow


def compute_seconds(workers: int) -> float:
    """Of a step, before slowdowns."""
    return FLAGS.compute_seconds * max(1.0, workers / 8)


class Readings(keras.callbacks.Callback):
    """Reads the clock, the steps and the staleness when a fifth of a pass is done, and four.

    Args:
        steps: of the pass.
        staleness: gives it; None where there is none.
    """

    def __init__(self, steps: int, staleness: Callable[[], Statistics] | None):
        super().__init__()
        self._due = [steps // 5, steps - steps // 5]
        self._staleness = staleness
        self.taken: list[tuple[float, int, Statistics | None]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = self.model.train_function.epoch_steps
        if len(self.taken) < 2 and done >= self._due[len(self.taken)]:
            steps = sum(self.model.distribute_strategy.worker_steps(self.model))
            found = self._staleness() if self._staleness else None
            self.taken.append((time.monotonic(), steps, found))


def real(strategy: Any, workers: int, steps: int) -> tuple[float, float | None]:
    """Steps a second and the mean staleness on a cluster."""
    recsync.testing.set_compute_time(strategy, compute_seconds(workers), slowdown(workers))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.01), "mse")
    x = np.ones((BATCH * 64, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH).repeat()
    model.fit(data, steps_per_epoch=workers, verbose=0)  # Traces, and connects.
    is_hop = isinstance(strategy, recsync.HopStrategy)
    readings = Readings(steps, None if is_hop else lambda: strategy.staleness(model).dense)
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[readings])
    (began, before, first), (ended, after, second) = readings.taken
    stale = second.since(first).mean if first and second else None
    return (after - before) / (ended - began), stale


def simulated(mode: modes.ModeConfig, workers: int, steps: int) -> tuple[float, float]:
    """The same of a simulation."""
    result = simulation.run(
        mode,
        workers=workers,
        ps=FLAGS.ps,
        compute_seconds=compute_seconds(workers),
        slowdown=slowdown(workers),
        steps=steps,
        warmup_steps=steps // 5,
        cooldown_steps=steps // 5,
    )
    return result.steps_per_second, result.staleness.dense.mean


def simulated_hop(workers: int, steps: int) -> tuple[float, None]:
    """Steps a second of Hop, between a fifth and four fifths of a pass."""
    ends = (steps // 5, steps - steps // 5)
    began, ended = (
        simulation.run_hop(
            recsync.topology.ring_based(workers),
            compute_seconds=compute_seconds(workers),
            slowdown=slowdown(workers),
            steps=end,
        ).seconds
        for end in ends
    )
    return (ends[1] - ends[0]) / (ended - began), None


def line_of(
    name: str, workers: int, found: list[tuple[float, Any]], of_simulation: tuple[float, Any]
) -> dict[str, Any]:
    """What was measured, beside what was simulated."""
    speed = float(np.median([one for one, _ in found]))
    line = {
        "benchmark": "simulation",
        "mode": name,
        "workers": workers,
        "load": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        "steps_per_second": round(speed, 3),
        "simulated_steps_per_second": round(of_simulation[0], 3),
        "speed_ratio": round(of_simulation[0] / speed, 4),
    }
    if of_simulation[1] is not None:
        stale = float(np.median([one for _, one in found]))
        line["staleness"] = round(stale, 4)
        line["simulated_staleness"] = round(of_simulation[1], 4)
        line["staleness_ratio"] = round(of_simulation[1] / stale, 4)
    return line


def draw(lines: list[dict[str, Any]], path: str) -> None:
    """The ratios of the simulation to the real cluster."""
    figure = new_figure(9.0, 4.0, "benchmarks/simulation.py")
    for axes, name in zip(figure.subplots(1, 2), ("speed", "staleness"), strict=True):
        for workers in sorted({line["workers"] for line in lines}):
            mine = [
                line for line in lines if line["workers"] == workers and f"{name}_ratio" in line
            ]
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
        kinds: dict[str, modes.ModeConfig | None] = {**modes_of(workers), "hop": None}
        with recsync.LocalCluster(workers, FLAGS.ps, processes=FLAGS.processes) as cluster:
            for name, mode in kinds.items():
                found = [
                    real(
                        strategy_of(cluster, mode) if mode else hop_strategy_of(cluster),
                        workers,
                        steps,
                    )
                    for _ in range(FLAGS.rounds)
                ]
                line = line_of(
                    name,
                    workers,
                    found,
                    simulated(mode, workers, steps) if mode else simulated_hop(workers, steps),
                )
                common.report(line)
                lines.append(line)
    if FLAGS.json:
        draw(lines, FLAGS.png or str(pathlib.Path(FLAGS.json).with_suffix(".png")))


if __name__ == "__main__":
    app.run(main)
