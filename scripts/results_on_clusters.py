"""What the papers' methods do on real servers, with five seeds: into docs/results/clusters.

Each experiment is one of the benchmarks, as a user starts it, with servers on this machine: 8 or 16
workers whose steps have artificial compute times. Its file has the command, how long it took and
all figures; what is there already is not run again, unless its file is removed. So a run can be cut
into pieces:

    python scripts/results_on_clusters.py --minutes=20
    python scripts/results_on_clusters.py --only=swap

and at the end each piece writes the page about all that has been run. All of it takes hours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "results" / "clusters"
PAGE = ROOT / "docs" / "cluster_results.md"
sys.path[:0] = [str(ROOT / "benchmarks")]

import summarize  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run of a benchmark.

    Attributes:
        title: of its section of the page.
        text: what the paper says, and what is to be known of the experiment; Markdown.
        seen: what the figures show, and why they differ from the paper's, if they do.
        benchmark: its name.
        arguments: of the command line.
        columns: the keys of its lines that the page shows.
    """

    title: str
    text: str
    seen: str
    benchmark: str
    arguments: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def command(self) -> str:
        """As a user types it."""
        return " ".join(("python", f"benchmarks/{self.benchmark}.py", *self.arguments))


_INTRODUCTION = (
    "The figures on this page come from real servers: up to 16 workers on one machine, whose steps "
    "have artificial compute times, so that they overlap as on machines of their own. What a model "
    "learns is measured with five seeds, of the data and of the initial weights: differences are "
    "to the first line with the same seed, as means with 95 % confidence intervals. Speeds are "
    "medians of rounds in which the settings took turns; `cpu_share` is the part of the machine's "
    "cores that was busy. `scripts/results_on_clusters.py` runs what has no file in "
    "`docs/results/clusters` yet, and writes the tables. What needs more workers than a machine "
    "has is on the page of [simulated results](simulated_results.md)."
)
_QUALITY = ("variant", "workers", "last_auc", "difference", "mean_difference")
EXPERIMENTS = {
    "weights": Experiment(
        "Staleness weights",
        "Liu and Zhao 2021, figure 5. The paper trains with 3,000 workers, where weights that "
        "are normalized to 1,000 workers make up for a part of what staleness costs; here weights "
        "are normalized to 4 of 16 workers.",
        "16 workers learn as much as four, so that weights have nothing to make up for, and take "
        "away: linear ones 0.003, normalized ones less. [The "
        "simulation](simulated_results.md#asynchronous-training) shows them at the paper's size, "
        "where they help.",
        "async_quality",
        ("--experiments=weights", "--workers=2,4,16", "--seeds=5"),
        _QUALITY,
    ),
    "normalization": Experiment(
        "Mean-normalization",
        "Liu and Zhao 2021, figure 6. Local mean-normalization shall make hidden layers less "
        "sensitive to staleness, which grows with the number of workers.",
        "Here it makes no difference that is larger than that between seeds, with four workers or "
        "16; the paper's gain is largest with 3,000 workers, and so is that of [the "
        "simulation](simulated_results.md#asynchronous-training). 16 workers learn less than "
        "four, because their gradients are weighed by staleness.",
        "async_quality",
        ("--experiments=normalization", "--workers=2,4,16", "--seeds=5"),
        _QUALITY,
    ),
    "swap": Experiment(
        "SWAP",
        "Liu and Zhao 2021, figure 7. The clicks change from day to day. Accumulators of "
        "Adagrad only grow, so that its steps become too small for what is new; SWAP shrinks "
        "them once in a period.",
        "SWAP gains 0.008 on the last day, and so does a decay at each step, which the paper has "
        "behind SWAP. A decay at each step harms where gradients are much staler: see [the "
        "simulation with 1,000 workers](simulated_results.md#asynchronous-training).",
        "async_quality",
        ("--experiments=swap", "--workers=2,8", "--seeds=5"),
        _QUALITY,
    ),
    "switching": Experiment(
        "Switching from synchronous training",
        "Su et al. 2022, figure 6. A model that was trained synchronously goes on in another "
        "mode with all hyper-parameters as they are, and later synchronously again. The "
        "paper's claim is that GBA changes the AUC least.",
        "As in the paper, GBA changes the AUC by less than 0.001, which is within what stopping "
        "and going on synchronously changes. Asynchronous training is better here and not worse, "
        "because it updates the parameters eight times as often on data that drift.",
        "switching",
        ("--workers=8", "--seeds=5", "--modes=sync,async,bsp,gba", "--rows=20480"),
        ("mode", "at_switch", "in_mode", "after_return", "iota"),
    ),
    "modes": Experiment(
        "Modes",
        "Su et al. 2022, table 5.2. Under `stragglers`, every fourth worker takes several "
        "times as long as the others.",
        "GBA and BSP are as fast as asynchronous training here, and 3.2 times as fast as "
        "synchronous training where a quarter of the workers is slow; the paper says at least 2.4 "
        "times. Bounded staleness is as slow as synchronous training, because the same workers "
        "are slow all the time. Backup workers drop a fifth of the batches.",
        "modes",
        ("--workers=16", "--clusters=even,stragglers", "--steps=480", "--rounds=3"),
        ("cluster", "mode", "relative_to_async", "staleness_mean", "excluded", "cpu_share"),
    ),
    "hop": Experiment(
        "Decentralized training",
        "Luo et al. 2019, figures 14 to 19. `ideal_speedup` is what the same protocol would "
        "reach if communication were free.",
        "With random slowdowns, iterations are 1.3 to 1.4 times as fast with one backup worker "
        "and 1.4 to 1.6 times with bounded staleness; the paper says up to 1.81. A worker that is "
        "four times as slow makes iterations 4.0 times as long, and 1.03 times where it may skip "
        "ten; in the paper 3.9 and 1.1 times. seconds_to_loss are those to a loss of 0.55; an "
        "empty cell says that 40 iterations did not reach it.",
        "hop",
        (
            "--workers=16",
            "--compute_seconds=0.4",
            "--iterations=40",
            "--experiments=random,straggler",
        ),
        ("experiment", "graph", "setting", "speedup", "ideal_speedup", "seconds_to_loss"),
    ),
    "hop_accuracy": Experiment(
        "Accuracy of decentralized training",
        "Luo et al. 2019, section 7.2: a support vector machine, here on the LIBSVM data set a9a, "
        "three epochs, eight workers. `difference` is the accuracy on the test file less that of "
        "one process.",
        "No setting loses accuracy beyond what seeds differ by, in three epochs; skipping workers "
        "jumped 23 times.",
        "hop_accuracy",
        ("--workers=8", "--epochs=3", "--seeds=5", "--settings=2,7,8,12", "--data_location=A9A"),
        ("setting", "accuracy", "difference", "log_loss", "jumps"),
    ),
    "shadowsync": Experiment(
        "ShadowSync",
        "Zheng et al. 2021, tables 1 and 2: the normalized entropy (NE) on data that the "
        "model was not trained on, by algorithm and by sync gap. Less is better.",
        "Background synchronization has the lowest loss, as in the paper. Most differences are "
        "within what seeds differ by: training is short, and the trainers are few. FR-EASGD-100 "
        "has no sync gap, because a trainer does less than 100 steps.",
        "shadowsync",
        ("--experiments=easgd", "--quality_trainers=4,8", "--seeds=5"),
        ("setting", "trainers", "quality_sync_gap", "eval_ne", "less_s_easgd_eval"),
    ),
    "hierarchical": Experiment(
        "Hierarchical Training",
        "Huang et al. 2021, figures 7, 8, 10 and 11. EASGD with eight trainers, each of which "
        "holds the model, against as many trainers in two groups, whose servers compute as well; "
        "then more groups, larger groups, a group without one of the "
        "optimizations each, and four groups without synchronization. EPS are examples per second; "
        "`predicted_relative` is what the plans say.",
        "Two groups are 1.8 times as fast as EASGD with as many trainers (paper: 1.6 to 1.9), and "
        "four are 4.0 times as fast as one. Of a group's speed, 65 % goes without tagging (paper: "
        "more than 40 %), 60 % without the refinement, a fifth without divided layers and a tenth "
        "without compression. Synchronization costs nothing that shows. The normalized entropy "
        "(NE) of groups is that of EASGD within 0.0006 with four of five seeds; with the fifth, "
        "where the model was still learning fast, it is 0.004 more, so that five seeds do not "
        "exclude a loss.",
        "hierarchical",
        ("--easgd_groups=2",),
        (
            *("experiment", "setting", "nodes", "eps", "relative_to_first"),
            *("predicted_relative", "sync_gap", "machine_share", "eval_ne", "less_easgd_eval"),
        ),
    ),
    "hierarchical_quality": Experiment(
        "Quality of Hierarchical Training",
        "The same EASGD and the same two groups, where the model has seen thirty days of clicks "
        "before: after four, above, it learns so fast that what a group is ahead or behind hides "
        "the difference.",
        "The groups' NE is EASGD's within 0.0005 with 95 % confidence, at 1.6 times the speed "
        "(trainers have three nets here). Two pairs of runs were measured again, since others "
        "had the machine busier than it may be for a figure to count.",
        "hierarchical",
        (
            *("--experiments=easgd", "--easgd_groups=2", "--rounds=1", "--seeds=5"),
            *("--warm_days=30", "--nets=3", "--learning_rate=0.01", "--quality_faster=1.2"),
        ),
        (
            *("setting", "nodes", "eps", "relative_to_first", "sync_gap", "train_ne", "eval_ne"),
            *("less_easgd_eval", "upper_less_easgd_eval", "quality_counts"),
        ),
    ),
}


def main() -> None:
    """Runs what is missing, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=480.0, help="After which no other one is begun."
    )
    parser.add_argument("--a9a", help="The folder with the data set a9a, for hop_accuracy.")
    parser.add_argument("--only", choices=EXPERIMENTS, help="The experiment to run.")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        for name, experiment in EXPERIMENTS.items():
            is_due = arguments.only in (None, name) and not (FOLDER / f"{name}.json").exists()
            if name == "hop_accuracy" and arguments.a9a is None:
                continue
            if is_due and time.monotonic() - began < 60 * arguments.minutes:
                run(name, experiment, arguments.a9a)
    finally:  # Also where one has failed.
        if any(FOLDER.glob("*.json")):
            PAGE.write_text(page())
    missing = [name for name in EXPERIMENTS if not (FOLDER / f"{name}.json").exists()]
    if missing:
        print("Not run yet:", ", ".join(missing))


def run(name: str, experiment: Experiment, a9a: str | None) -> None:
    """Runs an experiment; its file and picture are there when it has succeeded."""
    print(f"== {name}: {experiment.command}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder, f"{name}.json")
        program = str(ROOT / "benchmarks" / f"{experiment.benchmark}.py")
        given = [argument.replace("A9A", str(a9a)) for argument in experiment.arguments]
        arguments = (*given, f"--json={found}")
        subprocess.run([sys.executable, program, *arguments], check=True, cwd=ROOT)
        kept = {
            "command": experiment.command,
            "machine": summarize.machine(),
            "minutes": round((time.monotonic() - began) / 60, 1),
            "rows": [summary for summary, _ in summarize.read(found)],
        }
        picture = found.with_suffix(".png")
        if picture.exists():
            (FOLDER / picture.name).write_bytes(picture.read_bytes())
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def _show(value: Any) -> str:
    """A value in a cell; a mean with half of its interval."""
    if isinstance(value, list) and len(value) == 2:
        mean, half = value
        return f"{summarize.show(mean)} ± {half:.2g}" if half else summarize.show(mean)
    return summarize.show(value)


def page() -> str:
    """The page about what has been run."""
    parts = ["# Results on real servers", _INTRODUCTION]
    for name, experiment in EXPERIMENTS.items():
        path = FOLDER / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        rows = [
            {column: _show(row.get(column)) for column in experiment.columns}
            for row in found["rows"]
            if any(row.get(column) is not None for column in experiment.columns[1:])
        ]
        parts += [
            f"## {experiment.title}",
            f"{experiment.text} {experiment.seen}",
            "\n".join(summarize.table(rows)),
        ]
        picture = path.with_suffix(".png")
        if picture.exists():
            parts.append(f"![{experiment.title}](results/clusters/{picture.name})")
        parts.append(f"`{found['command']}`, {found['minutes']:.0f} minutes on {found['machine']}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
