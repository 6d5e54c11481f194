"""What the papers' methods do on real servers, with five seeds: into docs/results/clusters.

Each experiment is one of the benchmarks, as a user starts it, with servers on this machine: 8 or 16
workers whose steps have artificial compute times. Its file has the command, how long it took and
all figures; what is there already is not run again, unless its file is removed. So a run can be cut
into pieces:

    python scripts/results_on_clusters.py --minutes=20
    python scripts/results_on_clusters.py --only=swap

and at the end each piece writes the tables of docs/cluster_results.md anew. All of it takes hours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "results" / "clusters"
PAGE = ROOT / "docs" / "cluster_results.md"
sys.path[:0] = [str(ROOT / "benchmarks")]

import summarize  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run of a benchmark.

    Attributes:
        benchmark: its name.
        arguments: of the command line.
        columns: the keys of its lines that the page shows.
    """

    benchmark: str
    arguments: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def command(self) -> str:
        """As a user types it."""
        return " ".join(("python", f"benchmarks/{self.benchmark}.py", *self.arguments))


_QUALITY = ("variant", "workers", "auc", "mean_difference")
EXPERIMENTS = {
    "weights": Experiment(
        "async_quality", ("--experiments=weights", "--workers=4,16", "--seeds=5"), _QUALITY
    ),
    "normalization": Experiment(
        "async_quality", ("--experiments=normalization", "--workers=4,16", "--seeds=5"), _QUALITY
    ),
    "swap": Experiment(
        "async_quality", ("--experiments=swap", "--workers=2,8", "--seeds=5"), _QUALITY
    ),
    "switching": Experiment(
        "switching",
        ("--workers=8", "--seeds=5", "--modes=sync,async,bsp,gba", "--rows=20480"),
        ("mode", "at_switch", "in_mode", "after_return", "iota"),
    ),
    "modes": Experiment(
        "modes",
        ("--workers=16", "--rounds=3"),
        ("cluster", "mode", "relative_to_async", "staleness_mean", "excluded", "cpu_share"),
    ),
    "hop": Experiment(
        "hop",
        ("--workers=16", "--compute_seconds=0.4", "--experiments=random,straggler"),
        ("experiment", "graph", "setting", "speedup", "ideal_speedup", "cpu_share"),
    ),
    "shadowsync": Experiment(
        "shadowsync",
        ("--experiments=easgd", "--quality_trainers=4,8", "--seeds=5"),
        ("setting", "trainers", "quality_sync_gap", "eval_ne", "less_s_easgd_eval"),
    ),
}


def main() -> None:
    """Runs what is missing, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=480.0, help="After which no other one is begun."
    )
    parser.add_argument("--only", choices=EXPERIMENTS, help="The experiment to run.")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        for name, experiment in EXPERIMENTS.items():
            is_due = arguments.only in (None, name) and not (FOLDER / f"{name}.json").exists()
            if is_due and time.monotonic() - began < 60 * arguments.minutes:
                run(name, experiment)
    finally:  # Also where one has failed.
        PAGE.write_text(with_tables(PAGE.read_text()))
    missing = [name for name in EXPERIMENTS if not (FOLDER / f"{name}.json").exists()]
    if missing:
        print("Not run yet:", ", ".join(missing))


def run(name: str, experiment: Experiment) -> None:
    """Runs an experiment; its file and picture are there when it has succeeded."""
    print(f"== {name}: {experiment.command}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder, f"{name}.json")
        program = str(ROOT / "benchmarks" / f"{experiment.benchmark}.py")
        arguments = (*experiment.arguments, f"--json={found}")
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


def with_tables(page: str) -> str:
    """The page with the tables of what has been run, between `<!-- NAME -->` and `<!-- end -->`."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        path = FOLDER / f"{name}.json"
        if not path.exists():
            return f"<!-- {name} -->\nNot run yet.\n<!-- end -->"
        found = json.loads(path.read_text())
        columns = EXPERIMENTS[name].columns
        rows = [
            {column: summarize.show(row.get(column)) for column in columns}
            for row in found["rows"]
            if any(row.get(column) is not None for column in columns[1:])
        ]
        lines = summarize.table(rows)
        picture = path.with_suffix(".png")
        if picture.exists():
            lines += ["", f"![{name}](results/clusters/{picture.name})"]
        how = f"`{found['command']}`, {found['minutes']:.0f} minutes on {found['machine']}"
        return "\n".join([f"<!-- {name} -->", *lines, "", how, "<!-- end -->"])

    names = "|".join(EXPERIMENTS)
    return re.sub(rf"<!-- ({names}) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    main()
