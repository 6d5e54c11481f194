"""Hierarchical Training's experiments (Huang et al. 2021, section 5), on a local cluster.

- easgd: EASGD with trainers that each hold the model, against Hierarchical Training with as many
  trainers in groups, whose servers compute, too: train NE in the course of training, relative to
  EASGD's (figure 7), examples per second (EPS, figure 8), and eval NE;
- groups: EPS against the number of groups (figure 10a);
- nodes: EPS of one group against its trainers and group PSs, with links of limited bandwidth
  (figure 10b);
- ablations: EPS of a group that trains an unbalanced DLRM, with layers kept whole, without the
  greedy refinement, without any tagging (each layer on the next server, in turn), and without
  compression (figure 11);
- sync: EPS with synchronization in the background and without any.

hierarchical_laboratory.py says what is artificial, and how. Each device has the same artificial
speed, group PSs and trainers; EASGD's trainers have as many threads as other trainers have nets,
which share the device. EPS are medians of `--rounds`. Eval NE is that of clicks that were not
trained on; seeds differ in clicks and initial weights, and differences are those of pairs with the
same seed, with the half-width of their 95 % confidence interval.

A figure counts only if all programs together used less than 70 % of the machine's processors while
it was measured: `counts`. Else artificial times are not what steps took.

Keys of the JSON list, an object for each setting of an experiment: experiment, setting, groups,
trainers, ps (of a group), nodes (in all), eps, eps_min, eps_max, relative_to_first (of the first
setting of the experiment; the median of the rounds' ratios), predicted_relative (the same by the
plans' highest loads), trainer_compute, ps_compute, trainer_link, ps_link (the parts of artificial
speed and bandwidth in use, as in figure 9; of group PSs a list), sync_gap, cpu_share (what the
benchmark used of the machine's processors), machine_share (what all programs used), counts. Of
easgd, with --seeds: train_ne, eval_ne, less_easgd_eval, upper_less_easgd_eval (the upper end of its
interval), quality_counts, curve (train NE at tenths of the pass), relative_loss_percent (of the
curve, over EASGD's). The last object, `summary`, has the targets: easgd_ratio (at least 1.5) and
less_easgd_eval_upper (at most .0005) of each number of groups, groups_ratio (4 groups over one: at
least 3.8), no_tagging_loss_percent (at least 40), sync_cost_percent (at most 3).

With `--runs` the benchmark goes on where it was interrupted, and experiments can be measured one
after the other:

    python benchmarks/hierarchical.py --runs=runs.jsonl --experiments=groups --json=groups.json
    python benchmarks/hierarchical.py --runs=runs.jsonl --json=hierarchical.json
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import common  # First: it finds the package and the examples.
import continual
import hierarchical_laboratory
import hierarchical_pictures
import mode_runs
import numpy as np
from absl import app, flags, logging
from hierarchical_laboratory import MOST_BUSY, Laboratory, Quality, Setting, Speed

FLAGS = flags.FLAGS
EXPERIMENTS = ("easgd", "groups", "nodes", "ablations", "sync")
hierarchical_laboratory.define_flags()
flags.adopt_module_key_flags(hierarchical_laboratory)  # So that --help has them.
flags.DEFINE_list("experiments", list(EXPERIMENTS), "What to run.")
flags.DEFINE_list("easgd_groups", ["2", "4"], "easgd: numbers of groups against EASGD.")
flags.DEFINE_integer("easgd_trainers", 8, "easgd: of all groups together.", lower_bound=1)
flags.DEFINE_integer("easgd_ps", 8, "easgd: group PSs of all groups together.", lower_bound=1)
flags.DEFINE_list("groups", ["1", "2", "4"], "groups: how many.")
flags.DEFINE_integer("group_size", 2, "groups, sync: trainers, and PSs, of one.", lower_bound=1)
flags.DEFINE_list("nodes", ["1", "2", "3"], "nodes: trainers, and as many PSs, of the group.")
flags.DEFINE_float("nodes_bandwidth", 0.5, "nodes: a multiple of the links' bandwidth.")
flags.DEFINE_integer("ablation_size", 3, "ablations: trainers, and PSs, of the group.")
flags.DEFINE_float("ablation_bandwidth", 0.75, "ablations: a multiple of the bandwidth.")
flags.DEFINE_integer(
    "narrow_nets", 8, "nodes, ablations: nets of a trainer, of which more wait for links."
)
flags.DEFINE_integer("rounds", 3, "How often speeds are measured.", lower_bound=1)
flags.DEFINE_integer("seeds", 5, "easgd: how often quality is measured.", lower_bound=0)
flags.DEFINE_string("json", None, "Gets the results, a list of objects.")
flags.DEFINE_string("png", None, "Gets the pictures. Default: beside --json.")

Row = dict[str, Any]


def settings(experiment: str) -> list[Setting]:
    """All settings of an experiment; others are compared with the first."""
    size = FLAGS.group_size
    if experiment == "easgd":
        trainers, ps = FLAGS.easgd_trainers, FLAGS.easgd_ps
        grouped = [
            Setting(f"HT {groups}g", groups, trainers // groups, ps // groups)
            for groups in mode_runs.numbers("easgd_groups")
        ]
        return [Setting(f"EASGD {trainers}t", 0, trainers), *grouped]
    if experiment == "groups":
        return [
            Setting(f"{groups} groups", groups, size, size)
            for groups in mode_runs.numbers("groups")
        ]
    if experiment == "nodes":
        wide = FLAGS.nodes_bandwidth
        options = {"bandwidth": wide, "nets": FLAGS.narrow_nets}
        return [Setting(f"({n}, {n})", 1, n, n, **options) for n in mode_runs.numbers("nodes")]
    if experiment == "ablations":
        return ablations()
    most = max(mode_runs.numbers("groups"))
    return [
        Setting("no synchronization", most, size, size, syncs=False),
        Setting("S-EASGD", most, size, size),
    ]


def ablations() -> list[Setting]:
    """All optimizations, and all but one of them."""
    without: dict[str, dict[str, Any]] = {
        "all": {},
        "no splits": {"plan": "whole"},
        "no refinement": {"plan": "rules"},
        "no tagging": {"plan": "turn"},
        "no compression": {"compression": False},
    }
    size, wide = FLAGS.ablation_size, FLAGS.ablation_bandwidth
    options = {"compression": True, "bandwidth": wide, "unbalanced": True}
    options["nets"] = FLAGS.narrow_nets
    return [Setting(name, 1, size, size, **{**options, **own}) for name, own in without.items()]


Speeds = dict[Setting, list[Speed]]
Qualities = dict[Setting, list[Quality]]


def measure(laboratory: Laboratory, experiment: str) -> tuple[Speeds, Qualities]:
    """Runs an experiment: settings on clusters of the same size take turns."""
    speeds: Speeds = {setting: [] for setting in settings(experiment)}
    qualities: Qualities = {}
    for sizes in dict.fromkeys((s.all_trainers, s.groups * s.ps) for s in speeds):
        alike = [s for s in speeds if (s.all_trainers, s.groups * s.ps) == sizes]
        for number in range(FLAGS.rounds):
            for setting in alike:
                speed = laboratory.speed(setting, number)
                speeds[setting].append(speed)
                _say(experiment, setting, f"round {number + 1}", f"{speed.eps:.0f} examples/s")
        for seed in range(FLAGS.seeds if experiment == "easgd" else 0):
            for setting in alike:
                quality = laboratory.quality(setting, seed)
                qualities.setdefault(setting, []).append(quality)
                _say(experiment, setting, f"seed {seed + 1}", f"eval NE {quality.eval_ne:.5f}")
    return speeds, qualities


def _say(experiment: str, setting: Setting, turn: str, result: str) -> None:
    print(f"{experiment}, {setting.name}, {turn}: {result}", file=sys.stderr, flush=True)


def make_rows(experiment: str, speeds: Speeds, qualities: Qualities) -> list[Row]:
    """The objects of an experiment's settings."""
    first = next(iter(speeds))
    rows = []
    for setting in speeds:
        row: Row = {
            "benchmark": "hierarchical",
            "experiment": experiment,
            "setting": setting.name,
            "groups": setting.groups,
            "trainers": setting.trainers,
            "ps": setting.ps,
            "nodes": setting.nodes,
            **_speed_figures(setting, first, speeds),
        }
        if setting in qualities:
            row |= _quality_figures(qualities[setting], qualities[first])
        rows.append(row)
    return rows


def _speed_figures(setting: Setting, first: Setting, speeds: Speeds) -> Row:
    mine, base = speeds[setting], speeds[first]
    ratios = [one.eps / other.eps for one, other in zip(mine, base, strict=True)]

    def median(name: str, digits: int = 3) -> float | None:
        value = statistics.median(getattr(speed, name) for speed in mine)
        return round(value, digits) if np.isfinite(value) else None

    def medians(name: str) -> list[float]:
        each = np.array([getattr(speed, name) for speed in mine])
        return np.median(each, axis=0).round(3).tolist() if each.size else []

    busiest = max(speed.machine_share for speed in mine)
    return {
        "eps": median("eps", 1),
        "eps_min": round(min(s.eps for s in mine), 1),
        "eps_max": round(max(s.eps for s in mine), 1),
        "relative_to_first": round(statistics.median(ratios), 4),
        "predicted_relative": round(predicted(setting) / predicted(first), 4),
        "trainer_compute": median("trainer_compute"),
        "ps_compute": medians("ps_compute"),
        "trainer_link": median("trainer_link"),
        "ps_link": medians("ps_link"),
        "sync_gap": median("sync_gap", 2),
        "cpu_share": median("cpu_share"),
        "machine_share": round(busiest, 3),
        "counts": busiest < MOST_BUSY,
    }


def predicted(setting: Setting) -> float:
    """Examples per second if the busiest device of each group were always in use."""
    nets = setting.all_trainers * setting.nets_per_trainer
    if not setting.groups:
        return FLAGS.batch_size * setting.trainers / FLAGS.device_seconds
    return FLAGS.batch_size * nets / hierarchical_laboratory.planned(setting).highest_load


def _quality_figures(mine: list[Quality], base: list[Quality]) -> Row:
    less = np.array([q.eval_ne for q in mine]) - [q.eval_ne for q in base]
    mean = continual.Mean.of(less).as_list()
    curve = np.mean([q.curve for q in mine], axis=0)
    of_base = np.mean([q.curve for q in base], axis=0)
    return {
        "train_ne": continual.Mean.of([q.train_ne for q in mine]).as_list(),
        "eval_ne": continual.Mean.of([q.eval_ne for q in mine]).as_list(),
        "less_easgd_eval": mean,
        "upper_less_easgd_eval": round(sum(mean), 6) if len(mean) == 2 else None,
        "quality_counts": max(q.machine_share for q in mine) < MOST_BUSY,
        "curve": curve.round(5).tolist(),
        "relative_loss_percent": (100 * (curve / of_base - 1)).round(4).tolist(),
    }


def summarize(rows: list[Row]) -> Row:
    """The targets that there are figures for."""
    found = {(row["experiment"], row["setting"]): row for row in rows}
    summary: Row = {"benchmark": "hierarchical", "experiment": "summary"}
    grouped = [row for row in rows if row["experiment"] == "easgd" and row["groups"]]
    if grouped:
        summary["easgd_ratio"] = {row["setting"]: row["relative_to_first"] for row in grouped}
    tested = [row for row in grouped if row.get("upper_less_easgd_eval") is not None]
    if tested:
        summary["less_easgd_eval_upper"] = {
            row["setting"]: row["upper_less_easgd_eval"] for row in tested
        }
    groups = [row for row in rows if row["experiment"] == "groups"]
    if len(groups) > 1:
        summary["groups_ratio"] = groups[-1]["relative_to_first"]
    if ("ablations", "no tagging") in found:
        of = found["ablations", "no tagging"]["relative_to_first"]
        summary["no_tagging_loss_percent"] = round(100 * (1 - of), 2)
    if ("sync", "S-EASGD") in found:
        of = found["sync", "S-EASGD"]["relative_to_first"]
        summary["sync_cost_percent"] = round(100 * (1 - of), 2)
    measured = [row[key] for row in rows for key in ("counts", "quality_counts") if key in row]
    summary["counts"] = all(measured)
    return summary


def show(experiment: str, rows: list[Row]) -> None:
    """Prints an experiment's table."""

    def percent(value: float) -> str:
        return f"{100 * value:.0f} %"

    def most(values: list[float]) -> str:
        return percent(max(values)) if values else ""

    lines = []
    for row in rows:
        line = {
            "setting": row["setting"],
            "nodes": str(row["nodes"]),
            "EPS": f"{row['eps']:,.0f}",
            "of first": f"{row['relative_to_first']:.2f}",
            "by plans": f"{row['predicted_relative']:.2f}",
            "trainers": percent(row["trainer_compute"]),
            "PSs at most": most(row["ps_compute"]),
            "links": percent(row["trainer_link"]),
            "of PSs": most(row["ps_link"]),
            "sync gap": "" if row["sync_gap"] is None else f"{row['sync_gap']:.1f}",
            "cpu": percent(row["cpu_share"]),
            "machine": percent(row["machine_share"]),
        }
        if "eval_ne" in row:
            line["eval NE"] = f"{row['eval_ne'][0]:.5f}"
            line["less EASGD"] = " ± ".join(f"{v:.5f}" for v in row["less_easgd_eval"])
        lines.append(line)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    mode_runs.print_table(
        f"{experiment}: {FLAGS.device_seconds:g} s of one device for a step",
        [{column: line.get(column, "") for column in columns} for line in lines],
    )


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    common.check_arguments(argv, experiments=EXPERIMENTS)
    for groups in mode_runs.numbers("easgd_groups"):
        if FLAGS.easgd_trainers % groups or FLAGS.easgd_ps % groups:
            raise app.UsageError(
                f"--easgd_groups={groups} must divide --easgd_trainers and --easgd_ps"
            )
    laboratory = Laboratory(FLAGS.runs)
    found: list[Row] = []
    for experiment in FLAGS.experiments:
        rows = make_rows(experiment, *measure(laboratory, experiment))
        show(experiment, rows)
        found += rows
        # As it goes: the experiments take long.
        mode_runs.write_json(FLAGS.json, [*found, summarize(found)])
    laboratory.close()
    print(f"\n{summarize(found)}")
    path = mode_runs.png_path(FLAGS.png, FLAGS.json)
    if path is not None:
        hierarchical_pictures.plot(found, path)


if __name__ == "__main__":
    app.run(main)
