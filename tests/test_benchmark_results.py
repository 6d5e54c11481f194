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


def test_ratios_come_before_the_figures_of_each_system(tmp_path):
    lines = [
        {"system": "recsync", "examples_per_second": 98765.0},
        {"benchmark": "speed", "batch_size": 512, "ratio": 1.25},
    ]
    rows = [{"benchmark": "rows", "variant": "narrow", "ratio_bound": 0.5, "seeds": [1, 2, 3]}]
    done, page = summarize(
        tmp_path, speed="\n".join(map(json.dumps, lines)) + "\n", rows=json.dumps(rows)
    )
    assert done.returncode == 0, done.stderr
    ratios, figures = page.split("## Figures of this machine")
    assert "| speed | 512 | 1.25 |" in ratios and "| rows | narrow | 0.5 |" in ratios
    assert "98765" in figures.replace(",", "") and "98765" not in ratios
    assert "seeds" not in page


def test_a_summary_without_its_benchmark_is_refused_by_file(tmp_path):
    done, page = summarize(tmp_path, rows=json.dumps([{"variant": "narrow", "ratio": 1.0}]))
    assert done.returncode != 0 and page is None
    assert "rows.json: a summary must have a benchmark, got {'variant': 'narrow'" in done.stderr
