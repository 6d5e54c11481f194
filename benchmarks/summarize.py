"""Turns the benchmarks' JSON lines into a page of Markdown.

Each benchmark is a short table: the figure that depends on the machine the least comes first,
mostly a ratio, and a sentence says what it means. All other figures are in a JSON file beside the
page. `make bench` runs it.

    python benchmarks/summarize.py --output=benchmarks/results.md build/benchmarks/*.json
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("output", None, "The page to write.", required=True)

Line = dict[str, Any]
_MOST_COLUMNS = 6
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "torch")


@dataclasses.dataclass(frozen=True)
class Summary:
    """How the page shows a benchmark.

    Attributes:
        says: what the first column means.
        columns: the keys of its lines that are shown, the figure first. Lines without that one are
            left out.
    """

    says: str
    columns: tuple[str, ...]


# By the names of the programs. One that is not here has its ratios and settings.
SUMMARIES = {
    "adam_staleness": Summary("The error of each variant.", ()),
    "all_reduce": Summary(
        "The speed of our all-reduce of workers' copies over that of TensorFlow's collectives.",
        ("ratio", "ratio_min", "ratio_max", "elements", "workers"),
    ),
    "async_quality": Summary(
        "By how much the AUC differs from that of the first line of the same experiment.",
        ("difference", "experiment", "variant", "workers", "auc", "seeds"),
    ),
    "coordinator": Summary(
        "The workers' speed over that of workers which wait for nothing but their computing.",
        ("of_ideal", "workers", "coordinator_ms", "worker_kilobytes", "start_seconds"),
    ),
    "hierarchical": Summary(
        "The speed over that of the first line of the same experiment.",
        ("relative_to_first", "experiment", "setting", "groups", "trainers", "ps"),
    ),
    "hop": Summary(
        "How much shorter an iteration is than in the first line of the same experiment and graph.",
        ("speedup", "ideal_speedup", "experiment", "graph", "setting", "workers"),
    ),
    "hop_accuracy": Summary(
        "By how much the accuracy on the test file differs from that of one process.",
        ("difference", "setting", "accuracy", "jumps"),
    ),
    "hop_queues": Summary(
        "Our speed over that of TensorFlow's queues, for each part of an exchange.",
        ("ratio", "variant", "ratio_min", "ratio_max"),
    ),
    "interpolation": Summary(
        "The speed of moving two copies towards each other, over TensorFlow's and a plain loop's.",
        ("ratio_tensorflow", "ratio_plain_loop", "megabytes", "threads"),
    ),
    "local_adagrad": Summary(
        "The speed of training in one process with our Adagrad, over that with Keras's.",
        ("ratio", "ratio_min", "ratio_max", "cpu_ratio", "batch_size"),
    ),
    "local_throughput": Summary(
        "The speed of a step in one process over that of plain Keras.",
        ("ratio", "ratio_min", "ratio_max", "batch_size"),
    ),
    "metrics_cost": Summary(
        "The speed with AUC and NormalizedEntropy over that without metrics.",
        ("ratio", "ratio_min", "ratio_max", "cost_percent", "batch_size"),
    ),
    "modes": Summary(
        "The examples per second over those of asynchronous training on the same cluster.",
        ("relative_to_async", "mode", "cluster", "workers", "staleness_mean", "excluded"),
    ),
    "ps_throughput": Summary(
        "The speed of training on parameter servers over that of TensorFlow's own strategy.",
        ("ratio", "ratio_a", "ratio_b", "ratio_one_process", "batch_size"),
    ),
    "recording": Summary(
        "The speed while a timeline is recorded over that without.",
        ("ratio", "ratio_min", "ratio_max", "microseconds", "batch_size"),
    ),
    "scaling": Summary(
        "The speed of several workers over that of one, and by how many there are.",
        ("ratio", "efficiency", "workers", "compute_ms", "batch_size"),
    ),
    "shadowsync": Summary(
        "The examples per second over those without synchronization.",
        ("relative_to_no_synchronization", "experiment", "setting", "trainers", "sync_gap"),
    ),
    "simulation": Summary(
        "The simulated speed over that of the real cluster, and the same for the staleness.",
        ("speed_ratio", "staleness_ratio", "mode", "workers"),
    ),
    "switching": Summary(
        "By how much the mean AUC of the days in a mode differs from staying synchronous.",
        ("in_mode", "mode", "at_switch", "after_return", "workers", "seeds"),
    ),
}


def read(path: pathlib.Path) -> list[tuple[Line, list[Line]]]:
    """The summaries of a file, each with the lines of systems before it.

    A list in a file is one of summaries; lists in these (figures of each seed) are left out.

    Raises:
        ValueError: a summary does not name its benchmark.
    """
    text = path.read_text()
    if text.startswith("["):
        lines = json.loads(text)
        for line in lines:
            if "benchmark" not in line:
                raise ValueError(f"{path}: a summary must have a benchmark, got {line}")
        return [({k: v for k, v in line.items() if not _is_series(v)}, []) for line in lines]
    blocks: list[tuple[Line, list[Line]]] = []
    systems: list[Line] = []
    for one in text.splitlines():
        line = json.loads(one)
        if "benchmark" in line:
            blocks.append((line, systems))
            systems = []
        else:
            systems.append(line)
    return blocks


def _is_series(value: Any) -> bool:
    """Whether a value is more than a figure with its interval."""
    return isinstance(value, list) and (len(value) > 2 or any(isinstance(v, list) for v in value))


def show(value: Any) -> str:
    """A value in a cell."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(show(one) for one in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def table(lines: list[Line]) -> list[str]:
    """A Markdown table; its columns are the keys of all lines."""
    columns = list(dict.fromkeys(key for line in lines for key in line))
    rows = [columns, ["---"] * len(columns)]
    rows += [[show(line.get(column)) for column in columns] for line in lines]
    return ["| " + " | ".join(row) + " |" for row in rows]


def machine() -> str:
    """What the figures were measured on."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    models = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((m.partition(": ")[2] for m in models if m.startswith("model name")), "CPU")
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}; {', '.join(versions)}."


def is_ratio(key: str) -> bool:
    """Whether a summary's figure depends little on the machine."""
    return "ratio" in key or "percent" in key or "_to_" in key or key == "efficiency"


def columns_of(name: str, lines: list[Line]) -> tuple[str, ...]:
    """The keys that are shown of a benchmark's lines."""
    if name in SUMMARIES and SUMMARIES[name].columns:
        return SUMMARIES[name].columns
    keys = [key for key in dict.fromkeys(k for line in lines for k in line) if key != "benchmark"]
    return tuple(sorted(keys, key=lambda key: not is_ratio(key))[:_MOST_COLUMNS])


def title_of(name: str) -> str:
    """The first sentence of what the program says of itself."""
    source = pathlib.Path(__file__).with_name(f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def page(lines: list[Line]) -> str:
    """The page of all benchmarks' summaries."""
    text = [
        "# Benchmark results",
        "",
        "Written by `make bench`, on a machine whose speed others may share. The programs in this",
        "folder say what they measure and how; [results.json](results.json) has all figures.",
        "The runs are small, so that figures of quality are within what seeds differ by:",
        "[results on real servers](../docs/cluster_results.md) has five seeds.",
        "Ratios are those of systems that took turns on the same machine, medians of their rounds.",
        "",
        machine(),
        "",
    ]
    for name in dict.fromkeys(line["benchmark"] for line in lines):
        own = [line for line in lines if line["benchmark"] == name]
        columns = columns_of(name, own)
        shown = [
            {column: line.get(column) for column in columns}
            for line in own
            if line.get(columns[0]) is not None
        ]
        text += [f"## {name}", "", title_of(name), ""]
        if name in SUMMARIES:
            text += [SUMMARIES[name].says, ""]
        text += [*table(shown), ""]
    return "\n".join(text)


def main(argv: list[str]) -> None:
    paths = [pathlib.Path(name) for name in argv[1:]]
    if not paths:
        raise app.UsageError("name the files that benchmarks wrote with --json")
    blocks = [block for path in paths for block in read(path)]
    output = pathlib.Path(FLAGS.output)
    output.write_text(page([summary for summary, _ in blocks]))
    kept = [{**summary, "systems": systems} for summary, systems in blocks]
    text = ",\n".join(json.dumps(one) for one in kept)
    output.with_suffix(".json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    app.run(main)
