"""Continual training that switches from synchronous to another mode and back: AUC of each day.

The experiment of figure 6 of the GBA paper (Su et al. 2022, section 5.2). A model trains
synchronously on the first days of clicks; then, from that checkpoint, in each of the modes for some
days; and then, from theirs, synchronously again. All hyper-parameters stay as they are. After each
day the model is tested on the next day's clicks. What it is compared with stays synchronous all the
time. The cluster has stragglers while a mode is tried: every fourth worker takes `--slow` times as
long, by artificial compute time.

The clicks are synthetic, and what makes people click drifts from day to day; with `--data_location`
they are those of the Adult data set in equal parts. A seed is one of the model's initial weights
and of the clicks (Adult: of their order). Differences are those to staying synchronous with the
same seed; given are their means and 95 % confidence intervals over the seeds. The mode sync is the
control: it stops and goes on as the others do.

The tolerance iota of GBA is chosen as in modes.py. Columns (and keys of the JSON list, one object
for each `mode`, named as by the examples' --strategy). AUC and loss are those of the next day, for
the first day, the last day and all days of a phase, as in appendix C of the paper:

- `at_switch`: difference of the AUC after the first day in the mode; `loss_at_switch` of the loss;
- `last_in_mode`: of the AUC after the last day in the mode;
- `in_mode`: of the mean AUC of all days in the mode; `absolute_in_mode` is its absolute value;
- `at_return`, `last_after_return`, `after_return`: of the first and the last day, and the mean of
  all days, back in synchronous mode;
- `auc`: the mean AUC of each day; `auc_of_seeds` those of each seed; `sync_auc` and
  `sync_auc_of_seeds` of staying synchronous.

    python benchmarks/switching.py --seeds=5 --json=switching.json
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
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
mode_runs.define_mode_flags()
flags.adopt_module_key_flags(mode_runs)  # So that --help has them.
flags.DEFINE_list("modes", list(mode_runs.MODES), "The modes to switch to.")
flags.DEFINE_integer("seeds", 5, "How often all is done.", lower_bound=1)
flags.DEFINE_integer("sync_days", 3, "Days before the switch.", lower_bound=1)
flags.DEFINE_integer("mode_days", 3, "Days in each mode.", lower_bound=1)
flags.DEFINE_integer("return_days", 3, "Days after the return.", lower_bound=1)
flags.DEFINE_integer("rows", 40_960, "Clicks of a synthetic day.", lower_bound=1)
flags.DEFINE_float("drift", 0.04, "Of the synthetic clicks, per day.", lower_bound=0)
flags.DEFINE_string("data_location", None, "The Adult data set's folder, to train on that.")
flags.DEFINE_integer("workers", 8, "Workers.", lower_bound=2)
flags.DEFINE_float("learning_rate", 0.2, "Of Adagrad, in all modes.", lower_bound=0)
flags.DEFINE_float("compute_seconds", 0.05, "Artificial compute time of a step.", lower_bound=0)

SIZES = (5000, 1000, 200, 100, 50, 20, 10)  # Ids of the synthetic categorical features.


def day_count() -> int:
    """The days to train on."""
    return FLAGS.sync_days + FLAGS.mode_days + FLAGS.return_days


def make_days(seed: int) -> continual.Days:
    """The clicks of a seed."""
    if FLAGS.data_location:
        return continual.adult(FLAGS.data_location, day_count(), FLAGS.batch_size, seed)
    return continual.synthetic(
        day_count(),
        FLAGS.rows,
        FLAGS.batch_size,
        FLAGS.drift,
        seed,
        cardinalities=SIZES,
        numeric=4,
    )


class Experiment:
    """The cluster and a system for each mode; `run` does all for one seed."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._cluster = mode_runs.start_cluster(FLAGS.workers, FLAGS.ps, FLAGS.processes)
        first = make_days(0)
        self._spec = first.spec
        self._judge = continual.Judge(mode_runs.small_model(self._spec), folder)
        slow = range(min(3, FLAGS.workers - 1), FLAGS.workers, 4)
        backup = FLAGS.backup_workers
        self._options = {
            "local_batch_size": FLAGS.batch_size,
            "batches": FLAGS.workers,
            "backup_workers": len(slow) if backup is None else backup,
            "staleness_bound": FLAGS.staleness_bound,
        }
        self._slowdown = recsync.testing.SlowWorkers(FLAGS.slow, slow)
        iota = FLAGS.iota
        if iota is None and "gba" in FLAGS.modes:
            bsp = self._system("bsp", None)
            steps = max(16 * FLAGS.workers, min(400, first.steps))
            iota = mode_runs.choose_iota(bsp, first.train(0).repeat(), steps)
        # The one that stays synchronous is not slowed: stragglers change nothing but its speed.
        self._sync = self._system("sync", None, slowed=False)
        self._systems = {mode: self._system(mode, iota) for mode in FLAGS.modes}
        self.iota = iota

    def run(self, seed: int) -> dict[str, list[continual.Score]]:
        """The scores of each day and mode, and of staying synchronous ("")."""
        days = make_days(seed)
        return_day = FLAGS.sync_days + FLAGS.mode_days
        self._sync.restart(lambda: self._build(seed), self._folder / "initial.weights.h5")
        before = self._train(self._sync, days, range(FLAGS.sync_days))
        switch = self._save(self._sync, "switch")
        stay = self._train(self._sync, days, range(FLAGS.sync_days, day_count()))
        scores = {"": before + stay}
        for mode, system in self._systems.items():
            system.model.load_weights(switch)
            scores[mode] = before + self._train(system, days, range(FLAGS.sync_days, return_day))
            self._sync.model.load_weights(self._save(system, "return"))
            scores[mode] += self._train(self._sync, days, range(return_day, day_count()))
            done = f"seed {seed + 1} of {FLAGS.seeds}, {mode}"
            aucs = " ".join(f"{score.auc:.4f}" for score in scores[mode])
            print(f"{done}: {aucs}", file=sys.stderr)
        return scores

    def _system(self, mode: str, iota: int | None, slowed: bool = True) -> mode_runs.System:
        options = mode_runs.Options(iota=iota, **self._options)
        system = mode_runs.System(mode, self._cluster, options, lambda: self._build(0))
        if slowed and FLAGS.compute_seconds:
            recsync.testing.set_compute_time(system.strategy, FLAGS.compute_seconds, self._slowdown)
        system.strategy.attach(system.model)
        return system

    def _build(self, seed: int) -> keras.Model:
        model = mode_runs.small_model(self._spec, common.SEED + seed)
        model.compile(recsync.optimizers.Adagrad(FLAGS.learning_rate), "binary_crossentropy")
        return model

    def _save(self, system: mode_runs.System, name: str) -> pathlib.Path:
        path = self._folder / f"{name}.weights.h5"
        system.model.save_weights(path)
        return path

    def _train(self, system: mode_runs.System, days: continual.Days, which: range) -> list:
        scores = []
        for day in which:
            system.model.fit(days.train(day), verbose=0, shuffle=False)
            scores.append(self._judge.score(system.model, days, day + 1))
        return scores


def summarize(mode: str, seeds: list[dict[str, list[continual.Score]]], iota: int | None) -> dict:
    """The object of a mode."""
    switch, back = FLAGS.sync_days, FLAGS.sync_days + FLAGS.mode_days

    def table(which: str, field: str) -> np.ndarray:
        return np.array([[getattr(score, field) for score in seed[which]] for seed in seeds])

    auc, loss = ({m: table(m, field) for m in (mode, "")} for field in ("auc", "loss"))
    gain = auc[mode] - auc[""]
    worse = loss[mode] - loss[""]

    def mean(values: np.ndarray) -> list[float]:
        return continual.Mean.of(values).as_list()

    return {
        "benchmark": "switching",
        "mode": mode,
        "data": "adult" if FLAGS.data_location else "synthetic",
        "at_switch": mean(gain[:, switch]),
        "loss_at_switch": mean(worse[:, switch]),
        "last_in_mode": mean(gain[:, back - 1]),
        "in_mode": mean(gain[:, switch:back].mean(axis=1)),
        "absolute_in_mode": round(abs(float(gain[:, switch:back].mean())), 6),
        "at_return": mean(gain[:, back]),
        "last_after_return": mean(gain[:, -1]),
        "after_return": mean(gain[:, back:].mean(axis=1)),
        "iota": iota if mode == "gba" else None,
        "workers": FLAGS.workers,
        "seeds": len(seeds),
        "auc": np.round(auc[mode].mean(axis=0), 5).tolist(),
        "sync_auc": np.round(auc[""].mean(axis=0), 5).tolist(),
        "auc_of_seeds": np.round(auc[mode], 5).tolist(),
        "sync_auc_of_seeds": np.round(auc[""], 5).tolist(),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the tables."""

    def cell(values: list[float], factor: float = 100.0) -> str:
        mean, *rest = (factor * value for value in values)
        return f"{continual.Mean(mean, rest[0] if rest else None):+.3f}"

    keys = {
        "at_switch": "at the switch",
        "last_in_mode": "last day in the mode",
        "in_mode": "all days in the mode",
        "at_return": "at the return",
        "last_after_return": "last day after",
        "after_return": "all days after",
    }
    mode_runs.print_table(
        f"AUC of the next day, difference to staying synchronous, in points (1 = 0.01); "
        f"{rows[0]['seeds']} seeds, 95 % intervals",
        [
            {
                "mode": row["mode"],
                **{name: cell(row[key]) for key, name in keys.items()},
                "loss at the switch": cell(row["loss_at_switch"], 1.0),
            }
            for row in rows
        ],
    )
    stay = {"mode": "stays sync", **_by_day(rows[0]["sync_auc"])}
    mode_runs.print_table(
        f"AUC of the next day; synchronous to day {FLAGS.sync_days}, in the mode to day "
        f"{FLAGS.sync_days + FLAGS.mode_days}, then synchronous",
        [stay, *({"mode": row["mode"], **_by_day(row["auc"])} for row in rows)],
    )


def _by_day(values: list[float]) -> dict[str, str]:
    return {f"day {day + 1}": f"{value:.4f}" for day, value in enumerate(values)}


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """AUC by day, and the differences with their intervals."""
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    days = np.arange(1, day_count() + 1)
    axes[0].plot(days, rows[0]["sync_auc"], "k--", label="stays sync", zorder=5)
    for number, row in enumerate(rows):
        axes[0].plot(days, row["auc"], marker="o", markersize=3, label=row["mode"])
        gains = 100 * (np.array(row["auc_of_seeds"]) - np.array(row["sync_auc_of_seeds"]))
        means = [continual.Mean.of(list(day)) for day in gains.T]
        # Side by side, so that their intervals can be told apart.
        places = days + (number - (len(rows) - 1) / 2) * 0.09
        axes[1].errorbar(
            places,
            [m.mean for m in means],
            yerr=[m.half_width or 0.0 for m in means],
            marker="o",
            markersize=4,
            linewidth=1,
            capsize=2,
            label=row["mode"],
        )
    axes[1].axhline(0, color="black", linestyle="--", linewidth=1)
    axes[0].set(ylabel="AUC of the next day", title="AUC")
    axes[1].set(ylabel="points (0.01 of AUC)", title="Difference to staying synchronous")
    for axis in axes:
        axis.set(xlabel="day", xticks=days)
        for change in (FLAGS.sync_days, FLAGS.sync_days + FLAGS.mode_days):
            axis.axvline(change + 0.5, color="gray", linestyle=":")
    axes[0].legend(fontsize=8)
    seeds = rows[0]["seeds"]
    figure.suptitle(
        f"Synchronous | in the mode | synchronous; {seeds} seed{'s' if seeds > 1 else ''}"
        + (", 95 % intervals" if seeds > 1 else "")
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    common.check_arguments(argv, needs_one=True, modes=mode_runs.MODES)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(pathlib.Path(folder))
        seeds = [experiment.run(seed) for seed in range(FLAGS.seeds)]
    rows = [summarize(mode, seeds, experiment.iota) for mode in FLAGS.modes]
    show(rows)
    mode_runs.write_json(FLAGS.json, rows)
    png = mode_runs.png_path(FLAGS.png, FLAGS.json)
    if png is not None:
        plot(rows, png)


if __name__ == "__main__":
    app.run(main)
