"""What the benchmark of ShadowSync makes of measurements: objects, tables and pictures."""

import pytest
from test_mode_benchmarks import check_picture, run

# Speeds of two rounds with 2, 4 and 8 trainers, qualities of two seeds with 2 and 4.
SCRIPT = """
import mode_runs
import shadow_pictures
from shadow_laboratory import Quality, Speed

PER_TRAINER = {
    benchmark.NO_SYNC: (100.0, 110.0),
    "S-EASGD": (99.0, 110.0),
    "FR-EASGD-5": (50.0, 50.0),
}

def speed(name, trainers, eps):
    never = name == benchmark.NO_SYNC
    gap = float("inf") if never else 5.0
    return Speed(eps * trainers, gap, 1.1 * gap, 0.0 if never else 8.0, 0.5)

def quality(setting, seed):
    worse = {"S-EASGD": 0.0, "FR-EASGD-5": 0.01}.get(setting.name, 0.02) * (1 + seed)
    ne = 0.8 + 0.1 * seed + 0.004 * (setting.trainers - 2) + worse
    return Quality(ne + 0.01, ne, 5.0)

wanted = [s for s in benchmark.settings("speed") if s.name in PER_TRAINER]
speeds = {s: [speed(s.name, s.trainers, eps) for eps in PER_TRAINER[s.name]] for s in wanted}
rows = benchmark.make_rows("speed", speeds, {})
wanted = [s for s in benchmark.settings("easgd") if s.name in PER_TRAINER]
qualities = {s: [quality(s, seed) for seed in range(2)] for s in wanted}
rows += benchmark.make_rows("easgd", {}, qualities)
wanted = benchmark.settings("decentralized")
speeds = {s: [speed(s.name, s.trainers, 90.0)] for s in wanted}
qualities = {s: [quality(s, seed) for seed in range(2)] for s in wanted if s.syncs}
rows += benchmark.make_rows("decentralized", speeds, qualities)
for experiment in ("speed", "easgd", "decentralized"):
    benchmark.show(experiment, [row for row in rows if row["experiment"] == experiment])
if mode_runs.plot_module() is not None:
    shadow_pictures.plot(rows, out / "shadow.png")
(out / "result.json").write_text(json.dumps([*rows, benchmark.summarize(rows)]))
"""


def test_rows_of_shadowsync_say_what_was_measured(tmp_path):
    arguments = ("--trainers=2,4,8", "--quality_trainers=2,4", "--threads=3")
    *rows, summary = run("shadowsync", tmp_path, SCRIPT, *arguments)
    found = {(row["experiment"], row["setting"], row["trainers"]): row for row in rows}
    assert len(found) == len(rows) == 3 * 3 + 2 * 2 + 2 * 7
    assert {row["threads"] for row in rows} == {3}
    shadow = found["speed", "S-EASGD", 4]
    assert shadow["eps"] == 4 * (99 + 110) / 2
    assert (shadow["eps_min"], shadow["eps_max"]) == (4 * 99, 4 * 110)
    # The median of the ratios of rounds, 0.99 and 1.
    assert shadow["relative_to_no_synchronization"] == 0.995
    assert shadow["relative_to_fewest"] == 2.0
    assert (shadow["sync_gap"], shadow["sync_gap_by_bytes"]) == (5.0, 5.5)
    assert found["speed", "no synchronization", 8]["sync_gap"] is None
    assert found["speed", "no synchronization", 8]["sync_ps"] == 0
    # Both seeds' differences, 0.01 and 0.02; the half-width is 12.71 times their distance from it.
    foreground = found["easgd", "FR-EASGD-5", 4]
    assert foreground["eval_ne"] == pytest.approx([0.873, 12.71 * 0.055], abs=1e-5)
    assert foreground["less_s_easgd_eval"] == pytest.approx([0.015, 12.71 * 0.005], abs=1e-5)
    assert found["easgd", "S-EASGD", 4]["less_s_easgd_eval"] == [0.0, 0.0]
    # From 0.85 with two trainers to 0.858 with four.
    assert found["easgd", "S-EASGD", 4]["increase_percent_eval"] == pytest.approx(0.941)
    averaging = found["decentralized", "S-MA", 4]
    assert (averaging["eps"], averaging["sync_ps"]) == (4 * 90, 0)
    assert averaging["relative_to_no_synchronization"] == 1.0
    assert averaging["less_s_easgd_eval"][0] == pytest.approx(0.03)
    assert "eval_ne" not in found["decentralized", "no synchronization", 4]
    assert summary["r_squared"] == {
        "no synchronization": 1.0,
        "S-EASGD": 1.0,
        "FR-EASGD-5": 1.0,
    }
    assert summary["cost_percent"] == summary["cost_percent_most"] == 0.5
    check_picture(tmp_path / "shadow.png")
