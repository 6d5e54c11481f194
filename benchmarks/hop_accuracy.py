"""What decentralized training costs in accuracy: examples/hop_svm.py in every setting of Hop.

Each setting is a run of the example for each seed (of initial weights and of the order of the
data), as a user starts it, with the same data and epochs; the first trains in one process.
`difference` is the accuracy on the test file less that of one process with the same seed. With
several seeds, figures are means with half of their 95 % confidence intervals. With slow workers
(`slow` in a setting's name) the last worker's artificial compute time is four times the others'.

Without `--data_location` the data are synthetic: a linear task with noise, in LIBSVM's format.

    python benchmarks/hop_accuracy.py --data_location=DIR --seeds=5 --json=hop_accuracy.json
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import common
import continual
import mode_runs
import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("data_location", None, "As that of hop_svm.py. Default: synthetic.")
flags.DEFINE_integer("workers", 8, "Workers, a multiple of 4.", lower_bound=4)
flags.DEFINE_integer("epochs", 3, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("batch_size", 128, "Examples per step of a worker.", lower_bound=1)
flags.DEFINE_float("compute_seconds", 0.02, "Artificial compute time of a step.", lower_bound=0.001)
flags.DEFINE_list("settings", [], "The numbers of the settings to run, from 0. Default: all.")
flags.DEFINE_integer("seeds", 1, "How often each setting is run.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the results, a list of objects.")

_SLOW = ["--slow_workers=1", "--slow_factor=4"]
SETTINGS: list[tuple[str, list[str]]] = [
    ("one process", []),
    *((f"standard, {graph}", [f"--topology={graph}"]) for graph in ("ring", "ring_based")),
    ("standard, double_ring", ["--topology=double_ring"]),
    ("serial order", ["--order=serial"]),
    ("no token queues", ["--max_iteration_gap=0"]),
    ("notify-ack", ["--protocol=notify_ack"]),
    ("1 backup worker", ["--backup_workers=1"]),
    ("staleness 5", ["--staleness_bound=5"]),
    ("hybrid: 1 backup worker, staleness 5", ["--backup_workers=1", "--staleness_bound=5"]),
    ("1 backup worker, slow", ["--backup_workers=1", *_SLOW]),
    ("skip at most 2, slow", ["--backup_workers=1", "--max_jump=2", *_SLOW]),
    (
        "skip at most 10, slow",
        ["--backup_workers=1", "--max_jump=10", "--max_iteration_gap=10", *_SLOW],
    ),
    ("staleness 5, slow", ["--staleness_bound=5", *_SLOW]),
    (
        "hybrid: 1 backup worker, staleness 5, slow",
        ["--backup_workers=1", "--staleness_bound=5", *_SLOW],
    ),
]


def make_data(folder: pathlib.Path) -> None:
    """Writes a training file and a test file."""
    random = np.random.default_rng(common.SEED)
    truth = random.normal(size=100)
    for name, rows in (("synthetic.train", 16_000), ("synthetic.test", 8_000)):
        x = random.random((rows, len(truth))) < 0.12
        score = x @ truth
        y = score + random.logistic(size=rows) > np.median(score)
        lines = (
            " ".join(["+1" if label else "-1", *(f"{i + 1}:1" for i in np.flatnonzero(row))])
            for row, label in zip(x, y, strict=True)
        )
        (folder / name).write_text("\n".join(lines) + "\n")


def train(
    name: str, arguments: list[str], seed: int, data: str, folder: pathlib.Path
) -> dict[str, float]:
    """Runs the example in one setting; its figures."""
    cluster = ["--strategy=local"]
    if name != SETTINGS[0][0]:
        compute = f"--compute_seconds={FLAGS.compute_seconds}"
        cluster = ["--strategy=hop", f"--workers={FLAGS.workers}", compute]
    result = folder / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, str(common.ROOT / "examples" / "hop_svm.py")),
            *(f"--data_location={data}", f"--epochs={FLAGS.epochs}"),
            *(f"--batch_size={FLAGS.batch_size}", f"--metrics_json={result}", f"--seed={seed}"),
            *cluster,
            *arguments,
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name}: hop_svm.py failed:\n{done.stderr[-3000:]}")
    figures = json.loads(result.read_text())
    keys = ("accuracy", "log_loss", "wall_seconds", "jumps", "stale_updates_dropped")
    return {key: figures[key] for key in keys if key in figures}


def summarize(name: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    """The means of the figures of a setting's runs."""
    summary: dict[str, Any] = {"benchmark": "hop_accuracy", "setting": name, "seeds": len(runs)}
    for key in runs[0]:
        found = continual.Mean.of([run[key] for run in runs])
        values = found.mean, found.half_width
        summary[key] = values[0] if len(runs) == 1 else [round(value, 6) for value in values]
    return summary


def row(name: str, runs: list[dict[str, float]]) -> dict[str, str]:
    """A setting's row of the table."""

    def shown(key: str, form: str) -> str:
        values = [run[key] for run in runs if key in run]
        return format(continual.Mean.of(values), form) if values else ""

    return {
        "setting": name,
        "accuracy": shown("accuracy", ".4f"),
        "difference": shown("difference", "+.4f"),
        "log loss": shown("log_loss", ".4f"),
        "jumps": shown("jumps", ".1f"),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.workers % 4:
        raise app.UsageError(f"--workers={FLAGS.workers} must be a multiple of 4, for double_ring")
    numbers = [str(number) for number in range(len(SETTINGS))]
    if unknown := sorted(set(FLAGS.settings) - set(numbers)):
        raise app.UsageError(f"--settings: {unknown} are not numbers from 0 to {numbers[-1]}")
    chosen = {0, *(int(number) for number in FLAGS.settings or numbers)}
    results: list[dict[str, Any]] = []
    table: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        if FLAGS.data_location is None:
            (folder / "data").mkdir()
            make_data(folder / "data")
        data = FLAGS.data_location or str(folder / "data")
        alone: list[float] = []  # The accuracy of one process, by seed.
        for number in sorted(chosen):
            runs = []
            for seed in range(1, FLAGS.seeds + 1):
                run = train(*SETTINGS[number], seed, data, folder)
                if number == 0:
                    alone.append(run["accuracy"])
                runs.append({**run, "difference": run["accuracy"] - alone[seed - 1]})
                name = SETTINGS[number][0]
                print(f"{name}, seed {seed}: accuracy {run['accuracy']:.4f}", flush=True)
            results.append(summarize(name, runs))
            table.append(row(name, runs))
    mode_runs.print_table(f"Accuracy after {FLAGS.epochs} epochs, {FLAGS.workers} workers", table)
    mode_runs.write_json(FLAGS.json, results)


if __name__ == "__main__":
    app.run(main)
