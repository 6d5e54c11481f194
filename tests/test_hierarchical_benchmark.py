"""What the benchmark of Hierarchical Training makes of measurements, and how it goes on."""

import pytest
from test_mode_benchmarks import check_picture, run

# Speeds of two rounds, qualities of two seeds; the first setting of each experiment is the base.
SCRIPT = """
import hierarchical_pictures
from hierarchical_laboratory import Laboratory, Quality, Speed
from mode_runs import plot_module

def speed(setting, number):
    rate = 100.0 * setting.nodes * (1.0 if setting.plan == "search" else 0.5) * (1 + number)
    if not setting.syncs:
        rate /= 0.98
    busy = 0.8 if setting.name == "no compression" else 0.3
    gap = 5.0 if setting.syncs else float("inf")
    of_ps = tuple(0.5 + 0.1 * j + 0.1 * number for j in range(setting.ps))
    return Speed(rate, 0.9, of_ps, 0.2, of_ps, gap, 0.2, busy, 0.1)

def quality(setting, seed):
    worse = 0.01 * (1 + seed) if setting.groups else 0.0
    curve = tuple(1.0 - 0.01 * i + worse for i in range(10))
    ne = 0.9 + 0.05 * seed + worse
    return Quality(curve, curve[-1], ne, 3.0, 0.2, 0.3)

calls = []

class Measured(Laboratory):
    def _speed(self, setting, number):
        calls.append((setting.name, number))
        return speed(setting, number)

    def _quality(self, setting, seed):
        calls.append((setting.name, seed))
        return quality(setting, seed)

def rows_of(laboratory):
    return {
        name: benchmark.make_rows(name, *benchmark.measure(laboratory, name))
        for name in benchmark.EXPERIMENTS
    }

runs = str(out / "runs.jsonl")
by_name = rows_of(Measured(runs))
first = len(calls)
assert rows_of(Measured(runs)) == by_name
again = len(calls) - first
benchmark.FLAGS.rounds = 3
rows_of(Measured(runs))
more = len(calls) - first - again
benchmark.FLAGS.rounds = 2
for name, rows in by_name.items():
    benchmark.show(name, rows)
rows = [row for of in by_name.values() for row in of]
if plot_module() is not None:
    hierarchical_pictures.plot(rows, out / "hierarchical.png")
counts = [first, again, more]
(out / "result.json").write_text(json.dumps([*rows, benchmark.summarize(rows), counts]))
"""


def test_rows_say_what_was_measured_once(tmp_path):
    arguments = (
        *("--easgd_trainers=4", "--easgd_ps=4", "--easgd_groups=2", "--groups=1,2,4"),
        *("--ablation_size=2", "--rounds=2", "--seeds=2", "--top_layers=2", "--rows=64"),
        "--search_seconds=0",
    )
    *rows, summary, counts = run("hierarchical", tmp_path, SCRIPT, *arguments)
    found = {(row["experiment"], row["setting"]): row for row in rows}
    assert len(found) == len(rows) == 2 + 3 + 3 + 5 + 2
    easgd, grouped = found["easgd", "EASGD 4t"], found["easgd", "HT 2g"]
    assert (easgd["groups"], easgd["ps"], easgd["nodes"], easgd["ps_compute"]) == (0, 0, 4, [])
    assert (grouped["groups"], grouped["trainers"], grouped["ps"]) == (2, 2, 2)
    # Of two rounds, 800 and 1600.
    assert (grouped["eps"], grouped["eps_min"], grouped["eps_max"]) == (1200.0, 800.0, 1600.0)
    assert grouped["relative_to_first"] == 2.0
    assert grouped["ps_compute"] == pytest.approx([0.55, 0.65])
    # Both seeds' differences, 0.01 and 0.02; the half-width is 12.71 times their distance from it.
    assert grouped["less_easgd_eval"] == pytest.approx([0.015, 12.71 * 0.005], abs=1e-5)
    assert grouped["upper_less_easgd_eval"] == pytest.approx(0.015 + 12.71 * 0.005, abs=1e-5)
    assert easgd["relative_loss_percent"] == [0.0] * 10
    assert grouped["relative_loss_percent"][0] == pytest.approx(1.5)
    assert found["groups", "4 groups"]["predicted_relative"] == 4.0
    assert found["sync", "no synchronization"]["sync_gap"] is None
    assert not found["ablations", "no compression"]["counts"] and grouped["counts"]
    assert summary["easgd_ratio"] == {"HT 2g": 2.0}
    assert summary["groups_ratio"] == 4.0
    assert summary["no_tagging_loss_percent"] == 50.0
    assert summary["sync_cost_percent"] == pytest.approx(2.0)
    assert summary["counts"] is False
    # HT 2g is the setting of 2 groups, S-EASGD that of 4; (2, 2) has other links than 1 group.
    settings = 1 + 3 + 3 + 5 + 1
    assert counts == [2 * settings + 2 * 2, 0, settings]
    check_picture(tmp_path / "hierarchical.png")
