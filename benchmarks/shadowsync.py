"""ShadowSync's experiments (Zheng et al. 2021, section 4), on trainers of a local cluster.

- speed: examples per second (EPS) against the number of trainers: without synchronization, S-EASGD,
  FR-EASGD-5 and FR-EASGD-30, and FR-EASGD-5 with twice the sync PSs (figure 5, right);
- easgd: train NE and eval NE of S-EASGD and FR-EASGD against trainers, and in the middle one of
  these also with the other gaps of the paper (tables 2 and 3, figure 5, left);
- decentralized: EPS and NE of S-MA, S-BMUF with two elastic parameters, FR-MA and FR-BMUF beside
  S-EASGD, and EPS without synchronization (figures 6 and 7);
- threads: S-EASGD against the Hogwild threads of a trainer (figure 8).

All settings train the same Wide & Deep model with `model.fit` on synthetic clicks, once over. Train
NE is that of batches before they are trained on, eval NE that of other clicks with the first
trainer's copy. Seeds differ in clicks and initial weights; differences are those of pairs with the
same seed. shadow_laboratory.py says what is artificial, and how. Hogwild threads do not wait for
the processor or for memory here, as compute time is artificial: EPS against threads shows what the
package costs, and not where a machine's memory saturates. NE of easgd, decentralized and threads
comes from runs whose clock is scaled; see there.

Keys of the JSON list, an object for each setting of an experiment: experiment, setting, trainers,
threads, sync_ps. Of all but easgd: eps, eps_min, eps_max (the median, the smallest and the largest
of `--rounds`), relative_to_no_synchronization (the median of the rounds' ratios),
relative_to_fewest (over the setting with the fewest trainers, or threads), sync_gap,
sync_gap_by_bytes (steps for a synchronization, counted in both ways of section 4.1.1),
syncs_per_second, cpu_share. Of all but speed: train_ne, eval_ne (the mean and the half-width of its
95 % confidence interval), less_s_easgd_train, less_s_easgd_eval (the same of the differences from
S-EASGD with as many trainers), increase_percent_train, increase_percent_eval (from the fewest
trainers, as in table 3), quality_sync_gap. The last object, `summary`, has of speed r_squared (of a
line through the EPS of each setting against trainers), cost_percent (of EPS, what S-EASGD takes
from training without synchronization: the median of all trainers' medians) and cost_percent_most.

    python benchmarks/shadowsync.py --json=shadowsync.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import common  # First: it finds the package and the examples.
import continual
import mode_runs
import numpy as np
import shadow_laboratory
import shadow_pictures
from absl import app, flags, logging
from shadow_laboratory import NEVER, Laboratory, Quality, Setting, Speed

import tf_recsync as recsync

FLAGS = flags.FLAGS
EXPERIMENTS = ("speed", "easgd", "decentralized", "threads")
NO_SYNC, S_EASGD = "no synchronization", "S-EASGD"
shadow_laboratory.define_flags()
flags.adopt_module_key_flags(shadow_laboratory)  # So that --help has them.
flags.DEFINE_list("experiments", list(EXPERIMENTS), "What to run.")
flags.DEFINE_list("trainers", ["2", "5", "10", "15", "20"], "speed: numbers of trainers.")
flags.DEFINE_list("quality_trainers", ["5", "10", "20"], "easgd, decentralized: the same.")
flags.DEFINE_list("gaps", ["10", "100"], "easgd: further gaps, in the middle.")
flags.DEFINE_integer("threads", 2, "Of a trainer, but in threads.", lower_bound=1)
flags.DEFINE_list("thread_trainers", ["5", "10"], "threads: numbers of trainers.")
flags.DEFINE_list("thread_counts", ["1", "2", "4"], "threads: of a trainer.")
flags.DEFINE_float("fr_per_minute", 6.0, "decentralized: of FR-MA and FR-BMUF.")
flags.DEFINE_integer("rounds", 3, "How often speeds are measured.", lower_bound=1)
flags.DEFINE_integer("seeds", 5, "How often quality is measured.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the results, a list of objects.")
flags.DEFINE_string("png", None, "Gets the pictures. Default: beside --json.")

Row = dict[str, Any]


def easgd(name: str, mode: Any, trainers: int, sync_ps: int = 1, threads: int | None = None):
    """A setting with EASGD."""
    algorithm = recsync.EASGD(FLAGS.alpha)
    return Setting(name, algorithm, mode, trainers, threads or FLAGS.threads, sync_ps)


def never(trainers: int) -> Setting:
    """Without synchronization."""
    return easgd(NO_SYNC, recsync.Foreground(gap=NEVER), trainers)


def foreground(gap: int, trainers: int, sync_ps: int = 1) -> Setting:
    """FR-EASGD with a gap."""
    twice = f", {sync_ps} sync PSs" if sync_ps > 1 else ""
    return easgd(f"FR-EASGD-{gap}{twice}", recsync.Foreground(gap=gap), trainers, sync_ps)


def settings(experiment: str) -> list[Setting]:
    """All settings of an experiment, those with as many trainers beside each other."""
    found: list[Setting] = []
    if experiment == "speed":
        for trainers in mode_runs.numbers("trainers"):
            found += [
                never(trainers),
                easgd(S_EASGD, "shadow", trainers),
                *(foreground(gap, trainers) for gap in (5, 30)),
                foreground(5, trainers, sync_ps=2),
            ]
    if experiment == "easgd":
        several = mode_runs.numbers("quality_trainers")
        for trainers in several:
            is_middle = trainers == several[len(several) // 2]
            gaps = {5, 30} | (set(mode_runs.numbers("gaps")) if is_middle else set())
            found.append(easgd(S_EASGD, "shadow", trainers))
            found += [foreground(gap, trainers) for gap in sorted(gaps)]
    if experiment == "decentralized":
        for trainers in mode_runs.numbers("quality_trainers"):
            found += decentralized(trainers)
    if experiment == "threads":
        for trainers in mode_runs.numbers("thread_trainers"):
            for threads in mode_runs.numbers("thread_counts"):
                found.append(easgd(S_EASGD, "shadow", trainers, threads=threads))
    return found


def decentralized(trainers: int) -> list[Setting]:
    """S-EASGD, and algorithms without sync PSs."""
    ma = recsync.ModelAveraging(FLAGS.alpha)
    bmuf = recsync.BMUF(FLAGS.alpha, eta=1.0)
    aggressive = recsync.BMUF(FLAGS.large_alpha, eta=1.0)
    rate = recsync.Foreground(per_minute=FLAGS.fr_per_minute)
    options = trainers, FLAGS.threads
    return [
        never(trainers),
        easgd(S_EASGD, "shadow", trainers),
        Setting("S-MA", ma, "shadow", *options),
        Setting("S-BMUF", bmuf, "shadow", *options),
        Setting(f"S-BMUF, alpha {FLAGS.large_alpha:g}", aggressive, "shadow", *options),
        Setting("FR-MA", ma, rate, *options),
        Setting("FR-BMUF", bmuf, rate, *options),
    ]


def measure(
    laboratory: Laboratory, experiment: str
) -> tuple[dict[Setting, list[Speed]], dict[Setting, list[Quality]]]:
    """Runs an experiment: settings with as many trainers take turns."""
    speeds: dict[Setting, list[Speed]] = {}
    qualities: dict[Setting, list[Quality]] = {}
    everything = settings(experiment)
    for trainers in dict.fromkeys(setting.trainers for setting in everything):
        group = [setting for setting in everything if setting.trainers == trainers]
        if experiment != "easgd":
            for number in range(FLAGS.rounds):
                for setting in group:
                    speed = laboratory.speed(setting, FLAGS.compute_seconds)
                    speeds.setdefault(setting, []).append(speed)
                    _say(experiment, setting, f"round {number + 1}", f"{speed.eps:.0f} examples/s")
        if experiment != "speed":
            for seed in range(FLAGS.seeds):
                for setting in (setting for setting in group if setting.syncs):
                    quality = laboratory.quality(setting, seed)
                    qualities.setdefault(setting, []).append(quality)
                    _say(experiment, setting, f"seed {seed + 1}", f"eval NE {quality.eval_ne:.5f}")
    return speeds, qualities


def _say(experiment: str, setting: Setting, turn: str, result: str) -> None:
    print(
        f"{experiment}, {setting.trainers} trainers, {setting.threads} threads, {setting.name}, "
        f"{turn}: {result}",
        file=sys.stderr,
    )


def make_rows(
    experiment: str,
    speeds: dict[Setting, list[Speed]],
    qualities: dict[Setting, list[Quality]],
) -> list[Row]:
    """The objects of an experiment's settings."""
    rows: list[Row] = []
    for setting in [*speeds, *(s for s in qualities if s not in speeds)]:
        row: Row = {
            "benchmark": "shadowsync",
            "experiment": experiment,
            "setting": setting.name,
            "trainers": setting.trainers,
            "threads": setting.threads,
            "sync_ps": setting.sync_ps if setting.algorithm.is_central and setting.syncs else 0,
        }
        if setting in speeds:
            row |= _speed_figures(setting, speeds, experiment)
        if setting in qualities:
            row |= _quality_figures(setting, qualities)
        rows.append(row)
    return rows


def _speed_figures(setting: Setting, speeds: dict[Setting, list[Speed]], experiment: str) -> Row:
    mine = speeds[setting]
    alike = [s for s in speeds if s.name == setting.name]
    if experiment == "threads":
        alike = [s for s in alike if s.trainers == setting.trainers]
    fewest = min(alike, key=lambda s: s.trainers * s.threads)
    bases = [s for s in speeds if not s.syncs and s.trainers == setting.trainers]
    figures: Row = {
        "eps": round(statistics.median(s.eps for s in mine), 1),
        "eps_min": round(min(s.eps for s in mine), 1),
        "eps_max": round(max(s.eps for s in mine), 1),
        "relative_to_fewest": round(
            statistics.median(s.eps for s in mine)
            / statistics.median(s.eps for s in speeds[fewest]),
            3,
        ),
        "sync_gap": _finite(statistics.median(s.sync_gap for s in mine)),
        "sync_gap_by_bytes": _finite(statistics.median(s.sync_gap_by_bytes for s in mine)),
        "syncs_per_second": round(statistics.median(s.syncs_per_second for s in mine), 2),
        "cpu_share": round(statistics.median(s.cpu_share for s in mine), 2),
    }
    if bases:
        pairs = zip(mine, speeds[bases[0]], strict=True)
        ratio = statistics.median(one.eps / other.eps for one, other in pairs)
        figures["relative_to_no_synchronization"] = round(ratio, 4)
    return figures


def _quality_figures(setting: Setting, qualities: dict[Setting, list[Quality]]) -> Row:
    mine = qualities[setting]
    figures: Row = {"quality_sync_gap": _finite(statistics.median(q.sync_gap for q in mine))}
    same = (setting.trainers, setting.threads)
    bases = [s for s in qualities if s.name == S_EASGD and (s.trainers, s.threads) == same]
    alike = [s for s in qualities if s.name == setting.name and s.threads == setting.threads]
    fewest = min(alike, key=lambda s: s.trainers)
    for part in ("train", "eval"):
        values = _values(mine, part)
        figures[f"{part}_ne"] = continual.Mean.of(values).as_list()
        if bases:
            less = np.array(values) - _values(qualities[bases[0]], part)
            figures[f"less_s_easgd_{part}"] = continual.Mean.of(less).as_list()
        base = np.mean(_values(qualities[fewest], part))
        figures[f"increase_percent_{part}"] = round(100 * float(np.mean(values) / base - 1), 3)
    return figures


def _values(of: Sequence[Quality], part: str) -> np.ndarray:
    return np.array([q.train_ne if part == "train" else q.eval_ne for q in of])


def _finite(value: float) -> float | None:
    return round(value, 2) if np.isfinite(value) else None


def summarize(rows: list[Row]) -> Row | None:
    """What the experiment on speed says in all."""
    speed = [row for row in rows if row["experiment"] == "speed"]
    if not speed:
        return None
    lines = {}
    for name in dict.fromkeys(row["setting"] for row in speed):
        of = [row for row in speed if row["setting"] == name]
        if len(of) > 2:
            trainers, eps = np.array([(row["trainers"], row["eps"]) for row in of]).T
            lines[name] = round(float(np.corrcoef(trainers, eps)[0, 1] ** 2), 4)
    costs = [
        100 * (1 - row["relative_to_no_synchronization"])
        for row in speed
        if row["setting"] == S_EASGD
    ]
    return {
        "benchmark": "shadowsync",
        "experiment": "summary",
        "r_squared": lines,
        "cost_percent": round(statistics.median(costs), 2),
        "cost_percent_most": round(max(costs), 2),
    }


def show(experiment: str, rows: list[Row]) -> None:
    """Prints an experiment's table."""

    def number(value: Any, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    def mean(values: list[float] | None, form: str = ".5f") -> str:
        if values is None:
            return ""
        return " ± ".join(format(v, form if i == 0 else ".5f") for i, v in enumerate(values))

    lines = []
    for row in rows:
        line = {
            "setting": row["setting"],
            "trainers": str(row["trainers"]),
            "threads": str(row["threads"]),
        }
        if "eps" in row:
            line |= {
                "EPS": number(row["eps"], ",.0f"),
                "over fewest": number(row["relative_to_fewest"]),
                "of no sync": number(row.get("relative_to_no_synchronization"), ".3f"),
                "sync gap": number(row["sync_gap"]),
                "by bytes": number(row["sync_gap_by_bytes"]),
                "syncs/s": number(row["syncs_per_second"]),
                "cpu": f"{100 * row['cpu_share']:.0f} %",
            }
        if "eval_ne" in row:
            line |= {
                "gap": number(row["quality_sync_gap"]),
                "train NE": mean(row["train_ne"]),
                "eval NE": mean(row["eval_ne"]),
                "less S-EASGD": mean(row.get("less_s_easgd_eval"), "+.5f"),
                "train +%": number(row["increase_percent_train"], ".3f"),
                "eval +%": number(row["increase_percent_eval"], ".3f"),
            }
        lines.append(line)
    mode_runs.print_table(
        f"{experiment}: steps of {FLAGS.compute_seconds:g} s, links of sync PSs for "
        f"{FLAGS.sync_capacity:g} synchronizations a second",
        lines,
    )


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    common.check_arguments(argv, experiments=EXPERIMENTS)
    laboratory = Laboratory(servers=2 if "speed" in FLAGS.experiments else 1)
    found: list[Row] = []
    for experiment in FLAGS.experiments:
        rows = make_rows(experiment, *measure(laboratory, experiment))
        show(experiment, rows)
        found += rows
        # As it goes: the experiments take long.
        summary = summarize(found)
        mode_runs.write_json(FLAGS.json, [*found, *([summary] if summary else [])])
    laboratory.close()
    if summary:
        print(f"\n{summary}")
    path = mode_runs.png_path(FLAGS.png, FLAGS.json)
    if path is not None:
        shadow_pictures.plot(found, path)


if __name__ == "__main__":
    app.run(main)
