"""Turns the benchmarks' JSON lines into a page of Markdown.

The ratios come first, since they depend on the machine the least. Below are the figures of each
system, and at the end what they were measured on. `make bench` runs it.

    python benchmarks/summarize.py --output=benchmarks/results.md build/benchmarks/*.json
"""

from __future__ import annotations

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
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "torch")
# Summary keys that have a column of their own; those before the ratios.
_SETTINGS = ("benchmark", "batch_size", "mode", "cluster", "experiment", "variant")


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
    return (
        "ratio" in key or "percent" in key or key.startswith("relative_to_") or key == "efficiency"
    )


def page(paths: list[pathlib.Path]) -> str:
    """The page."""
    blocks = [block for path in paths for block in read(path)]
    text = [
        "# Benchmark results",
        "",
        "Written by `make bench`. The programs in this folder say what they measure and how.",
        "Ratios are those of systems that took turns on the same machine, ours over the other one",
        "unless the program says otherwise, and medians of their rounds.",
        "",
        "## Ratios",
        "",
    ]
    names = list(dict.fromkeys(summary["benchmark"] for summary, _ in blocks))
    for name in names:
        own = [summary for summary, _ in blocks if summary["benchmark"] == name]
        settings = [{k: v for k, v in line.items() if not is_ratio(k)} for line in own]
        ratios = [{k: v for k, v in line.items() if is_ratio(k)} for line in own]
        first = [{k: s[k] for k in _SETTINGS if k in s} for s in settings]
        rest = [{k: v for k, v in s.items() if k not in _SETTINGS} for s in settings]
        merged = [{**f, **r, **o} for f, r, o in zip(first, ratios, rest, strict=True)]
        text += [*table(merged), ""]
    text += ["## Figures of this machine", "", machine(), ""]
    for name in names:
        lines = [
            line for summary, systems in blocks if summary["benchmark"] == name for line in systems
        ]
        if lines:
            text += [f"### {name}", "", *table(lines), ""]
    return "\n".join(text)


def main(argv: list[str]) -> None:
    paths = [pathlib.Path(name) for name in argv[1:]]
    if not paths:
        raise app.UsageError("name the files that benchmarks wrote with --json")
    pathlib.Path(FLAGS.output).write_text(page(paths))


if __name__ == "__main__":
    app.run(main)
