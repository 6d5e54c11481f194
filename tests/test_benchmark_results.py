"""The page that `make bench` makes of what the benchmarks wrote."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def summarize(folder, **files):
    """Runs the program on files of these contents; returns how it ended, and the page."""
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    page = folder / "results.md"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "summarize.py"),
            f"--output={page}",
            *(str(folder / f"{name}.json") for name in files),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return done, page.read_text() if page.exists() else None


def test_a_benchmark_is_a_short_table_whose_figure_comes_first(tmp_path):
    lines = [
        {"system": "recsync", "examples_per_second": 98765.0},
        {"benchmark": "metrics_cost", "batch_size": 512, "rounds": 15, "ratio": 1.25},
    ]
    rows = [
        {"benchmark": "hop", "experiment": "random", "speedup": 1.5, "loss": 0.4},
        {"benchmark": "hop", "experiment": "summary", "loss": 0.3},
    ]
    unknown = [{"benchmark": "keys", "keys": 8, "found_to_map": 0.5, "seeds": [1, 2, 3]}]
    done, page = summarize(
        tmp_path,
        speed="\n".join(map(json.dumps, lines)) + "\n",
        rows=json.dumps(rows),
        more=json.dumps(unknown),
    )
    assert done.returncode == 0, done.stderr
    sections = {part.partition("\n")[0]: part for part in page.split("## ")[1:]}
    assert list(sections) == ["metrics_cost", "hop", "keys"]
    assert "What metrics cost" in sections["metrics_cost"]
    assert "\n| 1.25 |  |  |  | 512 |\n" in sections["metrics_cost"]
    assert "\n| 1.5 |  | random |  |  |  |\n" in sections["hop"]
    assert "summary" not in sections["hop"]  # It has no speedup.
    assert "| found_to_map | keys |\n| --- | --- |\n| 0.5 | 8 |" in sections["keys"]
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept[0]["systems"] == lines[:1] and kept[1]["loss"] == 0.4


def test_a_summary_without_its_benchmark_is_refused_by_file(tmp_path):
    done, page = summarize(tmp_path, rows=json.dumps([{"variant": "narrow", "ratio": 1.0}]))
    assert done.returncode != 0 and page is None
    assert "rows.json: a summary must have a benchmark, got {'variant': 'narrow'" in done.stderr
