"""What the benchmarks of the training modes share: strategies by name, a small model, timed turns.

All modes run on one cluster, each with a strategy and a model of its own, and take turns. A turn is
a call of `model.fit`. While it runs, a thread reads every few milliseconds how many steps each
worker has finished; speeds come from these readings, between two moments in the middle of the
turn, so that neither its beginning nor its end (when fast workers wait for the last slow one) is
part of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import click_models
import common
import keras
import machine
import numpy as np
import tensorflow as tf
from absl import flags
from wide_deep_model import build_wide_deep

import tf_recsync as recsync
from tf_recsync.strategies.group_strategy import GroupStrategy

FLAGS = flags.FLAGS
# Named as by the examples' --strategy.
MODES = ("async", "sync", "bsp", "gba", "backup_workers", "bounded_staleness")
SERVER_BYTES = 400 << 20  # About what a server's process needs.
_SAMPLE_SECONDS = 0.02


def define_flags() -> None:
    """Defines the flags of all benchmarks that use this module."""
    flags.DEFINE_integer("ps", 1, "Parameter servers.", lower_bound=1)
    flags.DEFINE_integer("processes", None, "Processes of the servers. Default: one for each.")
    flags.DEFINE_integer("batch_size", 64, "Examples per step of a worker.", lower_bound=1)
    flags.DEFINE_float("slow", 4.0, "How many times as long slow workers take.", lower_bound=1)
    flags.DEFINE_string("json", None, "Gets the results, a list of objects.")
    flags.DEFINE_string("png", None, "Gets the picture. Default: beside --json.")


def define_mode_flags() -> None:
    """Defines the flags of the modes' options."""
    flags.DEFINE_integer("iota", None, "Of GBA. Default: chosen, see above.", lower_bound=0)
    flags.DEFINE_integer("backup_workers", None, "Default: as many as are slow.", lower_bound=0)
    flags.DEFINE_integer("staleness_bound", 2, "Of bounded staleness, in batches.", lower_bound=0)


def numbers(name: str) -> list[int]:
    """A list of a flag, ascending."""
    return sorted({int(value) for value in FLAGS[name].value})


def start_cluster(workers: int, ps: int, processes: int | None) -> recsync.LocalCluster:
    """Starts servers and connects; says so if the machine may not have the memory."""
    number = workers + ps if processes is None else processes
    available = machine.available_memory()
    if available is not None and available < number * SERVER_BYTES + (1 << 30):
        print(
            f"{number} server processes need about {number * SERVER_BYTES >> 20} MB, "
            f"{available >> 20} MB are available; --processes lets servers share some",
            file=sys.stderr,
        )
    cluster = recsync.LocalCluster(workers, ps, processes=processes, start_timeout=300.0)
    cluster.connect()  # Before any data are made.
    return cluster


def server_pids(cluster: recsync.LocalCluster) -> list[int]:
    """The processes of a cluster's servers, without this one."""
    jobs = {"worker": cluster.workers, "ps": cluster.ps}
    pids = {cluster.pid(job, index) for job, size in jobs.items() for index in range(size)}
    return sorted(pids - {os.getpid()})


@dataclasses.dataclass(frozen=True)
class Options:
    """What the modes need to know.

    Attributes:
        local_batch_size: examples of a worker's step.
        batches: the batches of a global batch, M.
        iota: of GBA.
        backup_workers: of the mode with that name.
        staleness_bound: of bounded staleness.
    """

    local_batch_size: int
    batches: int
    iota: int | None = None
    backup_workers: int = 0
    staleness_bound: int = 0

    def strategy(self, mode: str, cluster: recsync.Cluster) -> GroupStrategy:
        """The strategy of a mode."""
        local = self.local_batch_size
        sizes = {"global_batch_size": local * self.batches, "local_batch_size": local}
        if mode == "async":
            return recsync.AsyncStrategy(cluster, local_batch_size=local)
        if mode == "sync":
            return recsync.SyncStrategy(cluster, **sizes)
        if mode == "bsp":
            return recsync.BSPStrategy(cluster, **sizes)
        if mode == "gba":
            return recsync.GBAStrategy(cluster, **sizes, staleness_tolerance=self.iota)
        if mode == "backup_workers":
            return recsync.BackupWorkersStrategy(
                cluster, self.backup_workers, local_batch_size=local
            )
        if mode == "bounded_staleness":
            return recsync.BoundedStalenessStrategy(
                cluster, self.staleness_bound, local_batch_size=local
            )
        raise ValueError(f"mode must be one of {MODES}, not {mode!r}")


def small_model(spec: recsync.data.FeatureSpec, seed: int = common.SEED, **options: Any):
    """A Wide & Deep model that needs little of a processor."""
    keras.utils.set_random_seed(seed)
    return build_wide_deep(spec, embedding_dimension=8, hidden_units=(32, 16), **options)


class System:
    """A mode with its strategy and model, ready for turns.

    Args:
        mode: its name.
        cluster: where it runs.
        options: of the modes.
        build: makes the compiled model; called in the strategy's scope.
    """

    def __init__(
        self,
        mode: str,
        cluster: recsync.LocalCluster,
        options: Options,
        build: Callable[[], keras.Model],
    ):
        self.mode = mode
        self.options = options
        self.strategy = options.strategy(mode, cluster)
        self.pids = server_pids(cluster)
        with self.strategy.scope():
            self.model = build()

    def turn(
        self, data: tf.data.Dataset, warm_up: int, steps: int, seconds: float | None = None
    ) -> Turn:
        """Trains, and measures.

        Args:
            data: batches, endlessly.
            warm_up: steps of all workers together before the timed part.
            steps: steps of the timed part; with `seconds`, the most there may be.
            seconds: how long the timed part takes at most; None for no limit.
        """
        # Workers are busy to the last of the timed steps, the slowest ones included.
        drain = 2 * self.strategy.cluster.workers
        watch = _Watch(self, warm_up, seconds)
        self.model.fit(
            data,
            steps_per_epoch=warm_up + steps + drain,
            callbacks=[watch],
            verbose=0,
            shuffle=False,
        )
        return watch.turn(steps)

    def restart(self, build: Callable[[], keras.Model], path: pathlib.Path) -> None:
        """Gives the model initial weights and a new optimizer's state; it need not be traced anew.

        Args:
            build: makes another such model, of whose weights these are.
            path: of a file for weights on their way.
        """
        with self.strategy.scope():
            model = build()
        self.strategy.attach(model)
        model.save_weights(path)
        self.model.load_weights(path)

    def counters(self) -> Counters:
        """What the servers have counted so far."""
        return Counters(
            self.strategy.staleness(self.model).dense, self.strategy.aggregation(self.model)
        )


def choose_iota(bsp: System, data: tf.data.Dataset, steps: int) -> int:
    """The tolerance of GBA: the age of tokens that 99 of 100 gradients do not exceed.

    BSP, which is GBA without a tolerance, trains for a while, and its report says how stale its
    gradients are, in global steps; 1 is fresh, where an age is 0.

    Args:
        bsp: a system of that mode.
        data: batches, endlessly.
        steps: for how long, all workers together.
    """
    measured = bsp.turn(data, 4 * bsp.strategy.cluster.workers, steps).staleness
    iota = measured.quantile(0.99) - 1
    print(
        f"BSP: staleness mean {measured.mean:.2f}, 99 of 100 at most {measured.quantile(0.99)}, "
        f"max {measured.max}, in global steps; so GBA gets iota={iota}",
        flush=True,
    )
    return iota


@dataclasses.dataclass(frozen=True)
class Counters:
    """What the servers count: the staleness of versions, and what became of pushes."""

    versions: recsync.staleness.Statistics
    aggregation: Any


@dataclasses.dataclass(frozen=True)
class Turn:
    """What was measured in the timed part of a turn.

    Attributes:
        times: when steps were counted, in seconds from the beginning of the timed part.
        steps: the steps of each worker by then, `[times, workers]`, 0 at the beginning.
        staleness: of the gradients: in single updates where servers apply each push at once, else
            in global steps; 1 is fresh.
        batches: steps of all workers together in the timed part and after it.
        excluded: those of them whose gradients were left out or dropped, the mean over the servers.
        cpu_share: the share of the machine's cores that the servers and this process used.
    """

    times: np.ndarray
    steps: np.ndarray
    staleness: recsync.staleness.Statistics
    batches: int
    excluded: float
    cpu_share: float

    @property
    def speed(self) -> float:
        """Steps per second of all workers together."""
        return float(self.steps[-1].sum() / self.times[-1])

    @property
    def worker_speeds(self) -> np.ndarray:
        """Steps per second of each worker."""
        return self.steps[-1] / self.times[-1]

    @property
    def longest_pause(self) -> float:
        """The longest time in which no worker finished a step, in seconds."""
        moved = np.flatnonzero(np.diff(self.steps.sum(axis=1))) + 1
        return float(np.diff(self.times[np.r_[0, moved]]).max(initial=0.0))

    def window_speeds(self, seconds: float) -> np.ndarray:
        """Steps per second in windows of about so many seconds, at least one."""
        count = max(1, round(self.times[-1] / seconds))
        edges = np.linspace(0.0, self.times[-1], count + 1)
        totals = np.interp(edges, self.times, self.steps.sum(axis=1))
        return np.diff(totals) / np.diff(edges)


class StepWatch(keras.callbacks.Callback):
    """Reads the workers' steps while `fit` runs, from the end of the warm-up on.

    Args:
        strategy: whose workers they are.
        pids: of the servers' processes.
        warm_up: steps of all workers together before the timed part.
        seconds: how long the timed part takes at most; None for no limit.
    """

    def __init__(self, strategy: Any, pids: list[int], warm_up: int, seconds: float | None = None):
        super().__init__()
        self._strategy = strategy
        self._pids = pids
        self._warm_up = warm_up
        self._seconds = seconds
        self._samples: list[tuple[float, list[int]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras tells of several steps at once, if they are executed at once.
        if self._thread.ident is None and batch >= max(self._warm_up, 1) - 1:
            self._thread.start()
            self._cpu = machine.cpu_seconds(self._pids), time.perf_counter()
            self.before()
        if self._seconds is not None and self._samples:
            elapsed = time.perf_counter() - self._samples[0][0]
            self.model.stop_training = elapsed > self._seconds

    def on_train_end(self, logs: Any = None) -> None:
        self._ended.set()
        self._thread.join()
        seconds = time.perf_counter() - self._cpu[1]
        used = machine.cpu_seconds(self._pids) - self._cpu[0]
        self.cpu_share = used / seconds / machine.cores()
        self.after()

    def before(self) -> None:
        """The timed part begins."""

    def after(self) -> None:
        """Training has ended."""

    def readings(self, steps: int) -> tuple[np.ndarray, np.ndarray, int]:
        """What was read in the timed part.

        Args:
            steps: its length, of all workers together.

        Returns:
            Seconds since its beginning, [times]; the steps of each worker by then, [times,
            workers]; and those of all workers in it and after it.
        """
        times = np.array([time for time, _ in self._samples])
        counts = np.array([steps for _, steps in self._samples])
        times, counts = times - times[0], counts - counts[0]
        # The first reading with all the steps of the timed part is the last one that counts.
        length = int(np.searchsorted(counts.sum(axis=1), steps)) + 1
        if self._seconds is not None:
            length = min(length, int(np.searchsorted(times, self._seconds)) + 1)
        return times[:length], counts[:length], int(counts[-1].sum())

    def _sample(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_SAMPLE_SECONDS) if self._samples else False
            steps = self._strategy.worker_steps(self.model)
            self._samples.append((time.perf_counter(), steps))


class _Watch(StepWatch):
    """And the servers' counters."""

    def __init__(self, system: System, warm_up: int, seconds: float | None):
        super().__init__(system.strategy, system.pids, warm_up, seconds)
        self._system = system

    def before(self) -> None:
        self._before = self._system.counters()

    def after(self) -> None:
        self._after = self._system.counters()

    def turn(self, steps: int) -> Turn:
        times, counts, batches = self.readings(steps)
        return Turn(
            times=times,
            steps=counts,
            staleness=self._staleness(),
            batches=batches,
            excluded=self._excluded(),
            cpu_share=self.cpu_share,
        )

    def _staleness(self) -> recsync.staleness.Statistics:
        before, after = self._before, self._after
        if after.aggregation is None or not self._system.strategy.mode.uses_buffers:
            return after.versions.since(before.versions)
        return after.aggregation.staleness.since(before.aggregation.staleness)

    def _excluded(self) -> float:
        before, after = self._before.aggregation, self._after.aggregation
        if after is None:
            return 0.0
        lost = after.excluded + after.late - before.excluded - before.late
        return lost / self._system.strategy.cluster.ps


def memory_of(data: recsync.data.ClickData, batch_size: int) -> tf.data.Dataset:
    """The data's batches from memory, endlessly and in random order."""
    return click_models.in_memory(data.train(batch_size))


def print_table(title: str, rows: Sequence[dict[str, str]]) -> None:
    """Prints a table for people: the first column to the left, figures to the right."""
    columns = list(rows[0])
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    print(f"\n{title}\n")
    for row in [{c: c for c in columns}, *rows]:
        first, *rest = columns
        cells = [row[first].ljust(widths[first]), *(row[c].rjust(widths[c]) for c in rest)]
        print("  ".join(cells))
    sys.stdout.flush()


def plot_module() -> Any:
    """`matplotlib.pyplot`, without a screen; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no picture: pip install '.[plot]' for matplotlib", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_json(path: str | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a list of objects, a line each, if there is a path."""
    if path:
        text = ",\n".join(json.dumps(row) for row in rows)
        pathlib.Path(path).write_text(f"[\n{text}\n]\n")


def png_path(png: str | None, json_path: str | None) -> pathlib.Path | None:
    """Where the picture goes: `--png`, else beside `--json`, else nowhere."""
    if png:
        return pathlib.Path(png)
    return pathlib.Path(json_path).with_suffix(".png") if json_path else None
