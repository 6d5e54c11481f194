"""Figures of the GBA paper, simulated: speeds of the modes, staleness, numbers of workers.

    python scripts/results_on_gba.py --output=docs/results

writes gba.json with its picture; everything in it is simulated. It says what was fitted to the
paper, and what the simulation predicts with that. `--seeds` are averaged; what is there already is
not computed again, unless it is removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path[:0] = [str(folder) for folder in pathlib.Path(__file__).resolve().parents[:2]]

import kept_results  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tf_recsync import modes, simulation  # noqa: E402
from tf_recsync._figures import new_figure  # noqa: E402
from tf_recsync.testing import Slowdown  # noqa: E402

Row = kept_results.Row

# Su et al. 2022, table 5.2, "Private": queries per second relative to asynchronous training.
_PAPER_SPEEDS = {
    "async": 1.0,
    "GBA": 87 / 90,
    "BSP": 88 / 90,
    "backup workers": 66 / 90,
    "bounded staleness": 29 / 90,
    "sync": 43 / 90,
}
# Table 5.3, by the queries per second of asynchronous training, in thousands: the speed of GBA
# relative to that, what it excludes of what backup workers drop, and the mean staleness of GBA,
# BSP and bounded staleness.
_PAPER_STATUSES: dict[int, Row] = {
    78: {"speed": 74 / 78, "excluded": 1454 / 300e3, "gba": 0.21, "bsp": 2.61, "bs": 0.06},
    90: {"speed": 87 / 90, "excluded": 898 / 300e3, "gba": 0.15, "bsp": 1.92, "bs": 0.04},
    99: {"speed": 98 / 99, "excluded": 786 / 300e3, "gba": 0.12, "bsp": 1.62, "bs": 0.03},
}
_USUAL = 90  # That of table 5.2.
_WORKERS = 400


def main() -> None:
    """Writes what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="Of workers.")
    parts: dict[str, kept_results.Part] = {"gba": (gba, draw_gba)}
    kept_results.write(parser, "results_on_gba.py", parts)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How the steps of a shared cluster differ, besides a lognormal noise.

    Attributes:
        noise: its sigma.
        slow: the share of stretches of a worker's steps in which it is slow.
        multiple: by how much, then.
    """

    noise: float = 0.2
    slow: float = 0.02
    multiple: float = 3.0

    def busier(self, load: float) -> Cluster:
        """With so many times as much that differs."""
        return dataclasses.replace(self, noise=self.noise * load, slow=self.slow * load)


STRETCH = 25  # Steps: a worker stays slow far longer than a bound of staleness.


class Spells(Slowdown):
    """The factors of a cluster's steps, drawn from a seed, again from the start after 250 steps.

    Args:
        cluster: says how steps differ.
        workers: how many there are.
        seed: of what is drawn.
    """

    def __init__(self, cluster: Cluster, workers: int, seed: int):
        random = np.random.default_rng(seed)
        is_slow = np.repeat(random.random((workers, 11)) < cluster.slow, STRETCH, axis=1)
        # Stretches of two workers begin at different steps.
        begin = random.integers(STRETCH, size=workers)
        shifted = np.stack(
            [row[b : b + 10 * STRETCH] for row, b in zip(is_slow, begin, strict=True)]
        )
        self._factors = np.where(shifted, cluster.multiple, 1.0).astype(np.float32)

    def factor(self, worker: tf.Tensor, step: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
        steps = self._factors.shape[1]
        return tf.gather(tf.constant(self._factors.ravel()), worker * steps + step % steps)


class Study:
    """Runs the modes on clusters.

    Args:
        workers: how many there are.
        seeds: of the runs that are averaged.
    """

    def __init__(self, workers: int, seeds: int):
        self.workers = workers
        self.seeds = seeds
        sizes = {"local_batch_size": 1, "global_batch_size": workers}
        self.kinds: dict[str, modes.ModeConfig] = {
            "async": modes.Async(),
            "GBA": modes.GBA(**sizes, staleness_tolerance=4),
            "BSP": modes.BSP(**sizes),
            "backup workers": modes.BackupWorkers(backup_workers=workers // 10),
            "bounded staleness": modes.BoundedStaleness(staleness_bound=2),
            "sync": modes.Sync(),
        }

    def run(self, name: str, cluster: Cluster, seed: int) -> simulation.Result:
        """One run of a mode."""
        return simulation.run(
            self.kinds[name],
            workers=self.workers,
            compute_seconds=1.0,
            noise=cluster.noise,
            slowdown=Spells(cluster, self.workers, seed),
            steps=140 * self.workers,
            warmup_steps=20 * self.workers,
            cooldown_steps=20 * self.workers,
            seed=seed,
        )

    def runs(self, name: str, cluster: Cluster) -> list[simulation.Result]:
        """One for each seed."""
        return [self.run(name, cluster, seed) for seed in range(self.seeds)]

    def speed(self, name: str, cluster: Cluster) -> float:
        """Relative to asynchronous training."""
        mine, base = (
            statistics.fmean(one.steps_per_second for one in self.runs(mode, cluster))
            for mode in (name, "async")
        )
        return mine / base

    def excluded(self, cluster: Cluster) -> float:
        """What GBA excludes, as a share of what backup workers drop."""
        return _share(self.runs("GBA", cluster)) / _share(self.runs("backup workers", cluster))

    def age(self, cluster: Cluster) -> float:
        """The mean age of tokens of GBA."""
        return _mean(one.aggregation.age_mean for one in self.runs("GBA", cluster))


def _share(results: list[simulation.Result]) -> float:
    """Of the pushes, those that do not count."""
    counts = [one.aggregation for one in results if one.aggregation is not None]
    lost = sum(one.excluded + one.late for one in counts)
    return lost / sum(one.included + one.excluded + one.late for one in counts)


def _fit(
    low: float, high: float, rises: bool, target: float, of: Callable[[float], float]
) -> float:
    """Where a function that rises or falls has a value, by halving an interval."""
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if (of(middle) < target) == rises else (low, middle)
    return (low + high) / 2


def fit(study: Study) -> Cluster:
    """The cluster of table 5.2, each number of it from a figure of the paper."""
    cluster, change = Cluster(), dataclasses.replace

    def speed_with(mode: str, name: str) -> Callable[[float], float]:
        return lambda value: study.speed(mode, change(cluster, **{name: value}))

    for _ in range(2):  # Each depends little on the other one.
        mode = "backup workers"
        noise = _fit(0.05, 0.5, False, _PAPER_SPEEDS[mode], speed_with(mode, "noise"))
        cluster = change(cluster, noise=noise)
        mode = "bounded staleness"
        multiple = _fit(1.0, 6.0, False, _PAPER_SPEEDS[mode], speed_with(mode, "multiple"))
        cluster = change(cluster, multiple=multiple)
    return cluster


def gba(seeds: int, scale: float) -> Row:
    """Tables 5.2 and 5.3 and figure 8 of Su et al. 2022."""
    study = Study(max(int(_WORKERS * scale), 20), seeds)
    cluster = fit(Study(study.workers, 1))
    rows = [*speeds(study, cluster), *statuses(study, cluster), *scaling(seeds, scale, cluster)]
    return {
        "paper": "Su et al. 2022, tables 5.2 and 5.3, figure 8",
        "fitted": {
            **{name: round(value, 5) for name, value in dataclasses.asdict(cluster).items()},
            "load": {str(row["status"]): row["load"] for row in rows if "load" in row},
        },
        "fitted_to": "noise to the speed of backup workers in table 5.2, and multiple, by how "
        "much slow workers are slower, to that of bounded staleness; the load of the other rows "
        "of table 5.3, by which noise and slow are multiplied, to how much older tokens are than "
        "in the row of the cluster of table 5.2. Not fitted but set: slow, the share of stretches "
        "of 25 steps in which a worker is slow, to 0.02; a tenth of the workers are backup "
        "workers, the bound of staleness is 2, GBA's tolerance 4, and BSP's global batch that of "
        "GBA, none of which the paper says",
        "predicted": "the speed of GBA, BSP and sync; the age of tokens in the cluster of table "
        "5.2; what GBA excludes, of what backup workers drop; the staleness of BSP, and that of "
        "bounded staleness in whole rounds of all workers",
        "differs": "Sync is faster than bounded staleness in the paper. On the same workers with "
        "the same steps it cannot be: with a bound, a worker begins each step no later than in "
        "sync. The paper's synchronous training is one by all-reduce, on other workers with "
        "larger batches. The mean staleness of BSP is 1 more than the pushes under way divided by "
        "the global batch, 2 here, however fast workers are; the paper's varies from 1.62 to "
        "2.61. Tokens are 30 % younger than in the paper: they would be as old with more slow "
        "workers than there are backup workers, but then those would have half the speed of "
        "async, not 0.73. What is excluded depends more on the load than in the paper, as the "
        "longest steps decide. In bounded staleness, a busier cluster makes gradients less stale "
        "here, as all wait for slow workers, and more stale in the paper.",
        "rows": rows,
    }


def speeds(study: Study, cluster: Cluster) -> list[Row]:
    """Table 5.2."""
    rows = []
    for name, paper in _PAPER_SPEEDS.items():
        results = study.runs(name, cluster)
        row = {
            "table": "5.2",
            "mode": name,
            "steps_per_second": _mean(one.steps_per_second for one in results),
            "ratio": round(study.speed(name, cluster), 4),
            "paper_ratio": round(paper, 4),
        }
        rows.append(row)
    return rows


def statuses(study: Study, usual: Cluster) -> list[Row]:
    """Table 5.3: at other times, the cluster is as much busier as GBA's tokens are older."""
    rows = []
    age = study.age(usual)
    for status, paper in _PAPER_STATUSES.items():
        load = 1.0
        if status != _USUAL:
            target = age * paper["gba"] / _PAPER_STATUSES[_USUAL]["gba"]
            load = _fit(0.2, 3.0, True, target, lambda value: study.age(usual.busier(value)))
        cluster = usual.busier(load)
        of_bsp = study.runs("BSP", cluster)
        of_bounded = study.runs("bounded staleness", cluster)
        rows.append(
            {
                "table": "5.3",
                "status": status,
                "load": round(load, 3),
                "speed": round(study.speed("GBA", cluster), 4),
                "excluded": round(study.excluded(cluster), 6),
                "gba": study.age(cluster),
                "bsp": _mean(one.staleness.dense.mean for one in of_bsp),
                "bs": _mean(_whole_rounds(one, study.workers) for one in of_bounded),
                **{f"paper_{name}": round(value, 6) for name, value in paper.items()},
            }
        )
    return rows


def _whole_rounds(result: simulation.Result, workers: int) -> float:
    """The staleness in whole rounds of all workers, of updates that are applied one by one."""
    dense = result.staleness.dense
    return sum(count * ((tau - 1) // workers) for tau, count in dense.histogram) / dense.count


def scaling(seeds: int, scale: float, cluster: Cluster) -> list[Row]:
    """Figure 8: a fixed global batch, of more and smaller local batches."""
    rows = []
    for count in (100, 200, 400, 800):
        workers = max(int(count * scale), 4)
        # What each step costs anyway does not get less.
        seconds = 0.1 + 0.9 * _WORKERS * scale / workers
        results = [
            simulation.run(
                modes.GBA(local_batch_size=1, global_batch_size=workers, staleness_tolerance=4),
                workers=workers,
                compute_seconds=seconds,
                noise=cluster.noise,
                slowdown=Spells(cluster, workers, seed),
                steps=40 * workers,
                warmup_steps=8 * workers,
                cooldown_steps=8 * workers,
                seed=seed,
            )
            for seed in range(seeds)
        ]
        rows.append(
            {
                "figure": "8",
                "workers": workers,
                "global_batches_per_second": _mean(r.steps_per_second for r in results) / workers,
            }
        )
    return rows


def draw_gba(found: Row, path: str) -> None:
    """Speeds of the modes, and of GBA by the number of workers."""
    figure = new_figure(12.0, 3.8, "results_on_gba.py")
    left, middle, right = figure.subplots(1, 3)
    table = [row for row in found["rows"] if "mode" in row]
    places = range(len(table))
    left.barh([p - 0.2 for p in places], [r["ratio"] for r in table], 0.4, label="simulated")
    left.barh([p + 0.2 for p in places], [r["paper_ratio"] for r in table], 0.4, label="paper")
    left.set_yticks(list(places), [row["mode"] for row in table], fontsize=8)
    left.invert_yaxis()
    left.legend(fontsize=8)
    left.set_title("table 5.2: speed relative to async", fontsize=9)
    rows = [row for row in found["rows"] if row.get("table") == "5.3"]
    kinds = {"gba": "GBA, age of tokens", "bsp": "BSP", "bs": "bounded, whole rounds"}
    for i, (name, label) in enumerate(kinds.items()):
        color = f"C{i}"
        statuses = [row["status"] for row in rows]
        middle.plot(statuses, [row[name] for row in rows], "o-", color=color, label=label)
        middle.plot(statuses, [row[f"paper_{name}"] for row in rows], "x:", color=color)
    middle.set_yscale("log")
    middle.set_xlabel("speed of async in the paper, thousand queries a second")
    middle.legend(fontsize=7)
    middle.set_title("table 5.3: mean staleness (dotted: the paper)", fontsize=9)
    rows = [row for row in found["rows"] if row.get("figure") == "8"]
    right.plot(
        [row["workers"] for row in rows],
        [row["global_batches_per_second"] for row in rows],
        marker="o",
    )
    right.set_xlabel("workers; the global batch stays")
    right.set_ylabel("global batches a second")
    right.set_ylim(bottom=0)
    right.set_title("figure 8: GBA", fontsize=9)
    figure.suptitle("simulated: GBA", fontsize=11)
    figure.savefig(path, dpi=110)


def _mean(values: Any) -> float:
    return round(statistics.fmean(values), 6)


if __name__ == "__main__":
    main()
