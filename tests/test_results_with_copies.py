"""The simulated figures of the papers on training with copies, and the program that makes them."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def program():
    path = ROOT / "scripts" / "results_with_copies.py"
    spec = importlib.util.spec_from_file_location("results_with_copies", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name, **wanted):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    assert found["simulated"] is True
    assert {"command", "paper", "fitted", "predicted"} <= found.keys()
    return [r for r in found["rows"] if all(r.get(key) == v for key, v in wanted.items())]


def test_a_run_gives_the_rows_that_are_kept(program, tmp_path):
    compute, draw = program.PARTS["hop"]
    found = compute(1, 3)
    kept = json.loads((RESULTS / "hop.json").read_text())
    names = ("figure", "graph", "setting")
    assert [[row[name] for name in names] for row in found["rows"]] == [
        [row[name] for name in names] for row in kept["rows"]
    ]
    draw(found, str(tmp_path / "hop.png"))
    assert (tmp_path / "hop.png").stat().st_size > 10_000


def test_hops_figures_have_the_order_of_the_paper():
    def seconds(figure, graph, setting):
        (row,) = rows("hop", figure=figure, graph=graph, setting=setting)
        return row["seconds_per_iteration"]

    # Figure 12: sparser graphs suffer less.
    slow = [seconds("12", g, "random slowdown") for g in ("ring", "ring_based", "double_ring")]
    assert slow == sorted(slow)
    # Figures 14 to 17: both ways help on both graphs.
    for graph in ("ring_based", "double_ring"):
        standard = seconds("14-17", graph, "standard")
        for setting in ("backup worker", "staleness bound 5"):
            assert 1.2 < standard / seconds("14-17", graph, setting) < 1.81
    # Figure 18: 3.9 becomes 1.1.
    base = seconds("12", "ring_based", "no slowdown")
    assert seconds("18-19", "ring_based", "standard") / base == pytest.approx(3.9, rel=0.05)
    assert seconds("18-19", "ring_based", "skip at most 10") / base == pytest.approx(1.1, rel=0.1)
    # Figure 19: every loss is reached, and by those that skip most first.
    settings = ("skip at most 10", "skip at most 2", "backup worker", "standard")
    reached = [rows("hop", figure="18-19", setting=s)[0]["seconds_to_target"] for s in settings]
    assert reached == sorted(reached)
    # Figure 20.
    ring = seconds("20", "ring_based", "uneven machines")
    assert seconds("20", "hierarchical", "uneven machines") < ring


def test_shadowsyncs_figures_have_the_knee_of_the_paper():
    def speeds(setting):
        mine = rows("shadowsync", figure="5", setting=setting)
        return {row["trainers"]: row["examples_per_second"] for row in mine}

    foreground, thirty, shadow = map(speeds, ("FR-EASGD-5", "FR-EASGD-30", "S-EASGD"))
    assert shadow[20] / shadow[5] == pytest.approx(4.0, rel=0.01)
    assert thirty[20] / thirty[5] == pytest.approx(4.0, rel=0.03)
    assert foreground[12] / foreground[5] == pytest.approx(12 / 5, rel=0.03)
    assert foreground[20] / foreground[15] < 1.05


def test_groups_scale_linearly_and_their_devices_less():
    groups = rows("hierarchical", figure="10a")
    first = groups[0]["examples_per_second"] / groups[0]["groups"]
    for row in groups:
        assert row["examples_per_second"] / row["groups"] == pytest.approx(first, rel=0.02)
    fewest, *_, most = rows("hierarchical", figure="10b")
    assert 1.2 < most["examples_per_second"] / fewest["examples_per_second"] < 5
