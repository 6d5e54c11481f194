"""What the benchmarks of the training modes make of measurements: objects, files and pictures."""

import json
import pathlib
import types

import pytest
from programs import BENCHMARKS, imported

PNG = b"\x89PNG\r\n"


def run(program: str, folder: pathlib.Path, script: str, *arguments: str) -> dict:
    """What a script writes as JSON that has a benchmark's module, with these flags."""
    with imported(BENCHMARKS / f"{program}.py") as benchmark:
        benchmark.FLAGS([program, *arguments])
        exec(script, {"benchmark": benchmark, "out": folder, "json": json, "types": types})
    return json.loads((folder / "result.json").read_text())


# Four workers, 10 s of samples: each does `rate` steps a second, of 8 examples.
MODES = """
import numpy as np
from mode_runs import Options, Turn, plot_module
from tf_recsync import staleness

counters = np.zeros([staleness.COUNTERS], np.int64)
nothing = staleness.Statistics.from_counters([counters])

def turn(rates):
    times = np.linspace(0.0, 10.0, 101)
    steps = np.floor(times[:, None] * np.array(rates) + 1e-9)
    return Turn(times, steps, nothing, batches=int(steps[-1].sum()), excluded=5.0, cpu_share=0.25)

turns = {
    "async": [turn([10, 10, 10, 5]), turn([10, 10, 10, 10]), turn([10, 10, 10, 8])],
    "sync": [turn([5] * 4), turn([5] * 4), turn([4] * 4)],
    "gba": [turn([10, 10, 10, 5]), turn([10, 10, 10, 2]), turn([10, 10, 10, 8])],
}
options = Options(8, 4, iota=3)
rows = [
    benchmark.row(types.SimpleNamespace(mode=mode, options=options), cluster, turns)
    for cluster in benchmark.CLUSTERS
    for mode in turns
]
benchmark.show("even", rows[:3])
benchmark.write(rows, str(out / "modes.json"))
if plot_module() is not None:
    benchmark.plot(rows, turns, out / "modes.png")
(out / "result.json").write_text(json.dumps(rows))
"""


def test_rows_of_modes_say_what_turns_measured(tmp_path):
    arguments = ("--workers=4", "--batch_size=8", "--compute_seconds=0.1", "--day_seconds=10")
    rows = run("modes", tmp_path, MODES, *arguments)
    for row in rows:
        assert isinstance(row["stragglers"], bool)
        assert row["stragglers"] == (row["cluster"] == "stragglers")
        for key in ("queries_per_second", "relative_to_async", "relative_to_sync", "deviation"):
            assert isinstance(row[key], float), key
        for key in ("worker_queries_per_second", "worker_deviation", "staleness_mean", "excluded"):
            assert isinstance(row[key], float), key
        assert isinstance(row["staleness_max"], int) and isinstance(row["batches"], int)
    asynchronous, sync, gba = rows[:3]
    # Medians of 35, 40 and 38 steps a second; of 20, 20 and 16; and of 35, 32 and 38.
    assert [row["queries_per_second"] for row in rows[:3]] == [8 * 38, 8 * 20, 8 * 35]
    # Of 20 / 35, 20 / 40 and 16 / 38.
    assert sync["relative_to_async"] == 0.5
    assert gba["relative_to_async"] == 1.0
    assert gba["relative_to_sync"] == round(35 / 20, 3)
    # Of 12 workers' turns.
    speeds = [10, 10, 10, 5, 10, 10, 10, 2, 10, 10, 10, 8]
    assert gba["worker_queries_per_second"] == round(8 * sum(speeds) / 12, 1)
    assert (gba["excluded"], gba["batches"], gba["iota"]) == (15.0, 350 + 320 + 380, 3)
    assert gba["applied_per_second"] == round(8 * 35 * (1 - 15 / 1050), 1)
    assert (gba["staleness_unit"], asynchronous["staleness_unit"]) == ("global batch", "push")
    # Steady speeds: windows differ by the rounding of samples alone.
    assert sync["deviation"] < 8 * 20 * 0.2
    written = json.loads((tmp_path / "modes.json").read_text())
    assert [(r["mode"], r["stragglers"]) for r in written] == [
        (mode, stragglers) for stragglers in (False, True) for mode in ("async", "sync", "gba")
    ]
    changing = json.loads((tmp_path / "modes_changing.json").read_text())
    assert [r["cluster"] for r in changing] == ["changing"] * 3
    check_picture(tmp_path / "modes.png")


# A day synchronously, two in the mode, two back.
SWITCHING = """
from continual import Score
from mode_runs import plot_module

def scores(*aucs):
    return [Score(auc, 1 - auc) for auc in aucs]

seeds = [
    {"": scores(0.6, 0.7, 0.7, 0.7, 0.7), "gba": scores(0.6, 0.71, 0.72, 0.69, 0.7)},
    {"": scores(0.5, 0.6, 0.6, 0.6, 0.6), "gba": scores(0.5, 0.63, 0.6, 0.61, 0.62)},
]
rows = [benchmark.summarize("gba", seeds, 4)]
benchmark.show(rows)
if plot_module() is not None:
    benchmark.plot(rows, out / "switching.png")
(out / "result.json").write_text(json.dumps(rows))
"""


def test_the_summary_of_switching_has_the_first_the_last_and_all_days(tmp_path):
    arguments = ("--sync_days=1", "--mode_days=2", "--return_days=2", "--workers=4")
    (row,) = run("switching", tmp_path, SWITCHING, *arguments)
    # The mean of two seeds, and the half-width of its 95 % interval: 12.71 times their
    # distance from the mean.
    for key, (one, other) in {
        "at_switch": (0.01, 0.03),
        "last_in_mode": (0.02, 0.0),
        "in_mode": (0.015, 0.015),
        "at_return": (-0.01, 0.01),
        "last_after_return": (0.0, 0.02),
        "after_return": (-0.005, 0.015),
        "loss_at_switch": (-0.01, -0.03),
    }.items():
        expected = [(one + other) / 2, 12.71 * abs(one - other) / 2]
        assert row[key] == pytest.approx(expected, abs=1e-6), key
    assert row["absolute_in_mode"] == pytest.approx(0.015)
    assert (row["mode"], row["iota"], row["seeds"], row["data"]) == ("gba", 4, 2, "synthetic")
    assert row["auc"] == pytest.approx([0.55, 0.67, 0.66, 0.65, 0.66])
    assert row["sync_auc_of_seeds"] == [[0.6, 0.7, 0.7, 0.7, 0.7], [0.5, 0.6, 0.6, 0.6, 0.6]]
    check_picture(tmp_path / "switching.png")


# Two seeds, of which each variant trains two days after one.
QUALITY = """
from mode_runs import plot_module
from quality_laboratory import Variant

scores = {
    "sync": {"seed 0": [0.70, 0.72], "seed 1": [0.60, 0.61]},
    "gba": {"seed 0": [0.71, 0.72], "seed 1": [0.61, 0.63]},
}

class Laboratory:
    def starts(self, first, days, clicks_days, drift):
        assert (first.name, days, clicks_days, drift) == ("sync", 1, 3, 0.5)
        return ["seed 0", "seed 1"]

    def system(self, variant):
        return None

    def train(self, system, variant, seed, clicks, days, start):
        assert start == f"seed {seed}" and days == range(1, 3)
        return scores[variant.name][start]

    def measure_speed(self, system, variant, smallest):
        return 1000.0 * variant.workers

sync = Variant("sync", 2, benchmark.adagrad(), "sync")
variants = [sync, Variant("gba", 4, benchmark.adagrad(), "gba", 8)]
rows = benchmark.compare(
    Laboratory(), "global_batch", variants, 2, lambda variant: sync, drift=0.5, smallest=8
)
staleness = {"variant": "4 workers", "mean": 33.0, "deviation": 1.0, "quantile_99": 33, "max": 33}
staleness["histogram"] = [[31, 5], [35, 7]]
results = {"staleness": [staleness], "swap": rows, "global_batch": rows}
for name, part in results.items():
    benchmark.show(name, part)
if plot_module() is not None:
    benchmark.plot(results, out / "quality.png")
(out / "result.json").write_text(json.dumps(rows))
"""


@pytest.mark.full
def test_differences_of_quality_are_those_of_pairs_that_go_on_from_the_same_checkpoint(tmp_path):
    arguments = ("--workers=2,4", "--rows=64", "--batch_size=16")
    sync, gba = run("async_quality", tmp_path, QUALITY, *arguments)
    assert gba["auc"] == pytest.approx([0.66, 0.675])
    assert gba["auc_of_seeds"] == [[0.71, 0.72], [0.61, 0.63]]
    # The last days differ by 0 and 0.02, the means of both days by 0.005 and 0.015.
    assert gba["difference"] == pytest.approx([0.01, 12.71 * 0.01], abs=1e-6)
    assert gba["mean_difference"] == pytest.approx([0.01, 12.71 * 0.005], abs=1e-6)
    assert sync["difference"] == sync["mean_difference"] == [0.0, 0.0]
    assert (sync["global_batch"], gba["global_batch"], gba["local_batch"]) == (32, 32, 8)
    assert (sync["queries_per_second"], gba["queries_per_second"]) == (2000.0, 4000.0)
    check_picture(tmp_path / "quality.png")


def check_picture(path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    content = path.read_bytes()
    assert content.startswith(PNG) and len(content) > 10_000
