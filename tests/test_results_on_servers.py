"""The simulated figures of the papers on parameter servers, and the program that makes them."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def program():
    path = ROOT / "scripts" / "results_on_servers.py"
    spec = importlib.util.spec_from_file_location("results_on_servers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept(name):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    assert found["simulated"] is True
    assert {"command", "paper", "fitted", "predicted", "rows"} <= found.keys()
    return found


@pytest.mark.parametrize("name", ["staleness", "weights", "gba"])
def test_a_run_gives_the_rows_that_are_kept(program, tmp_path, name):
    found = getattr(program, name)(1, 0.05)
    rows = kept(name)["rows"]
    assert [sorted(row) for row in found["rows"]] == [sorted(row) for row in rows]
    for key in ("mode", "weights"):
        assert [row.get(key) for row in found["rows"]] == [row.get(key) for row in rows]
    getattr(program, f"draw_{name}")(found, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_staleness_of_a_thousand_workers_is_fitted_and_three_times_as_many_follow():
    few, many = kept("staleness")["rows"]
    assert few["mean"] == pytest.approx(875, rel=0.02)
    assert few["variance"] == pytest.approx(4770, rel=0.05)
    assert many["mean"] == pytest.approx(3 * few["mean"], rel=0.01)


def test_linear_weights_learn_least():
    auc = {(row["workers"], row["weights"]): row["auc"] for row in kept("weights")["rows"]}
    of_many = {name: value for (workers, name), value in auc.items() if workers == 3000}
    assert min(of_many, key=of_many.get) == "linear"
    assert auc[1000, "no weights"] > of_many["no weights"]


def test_gba_is_as_fast_as_async_and_backup_workers_lie_between():
    rows = {row["mode"]: row for row in kept("gba")["rows"] if "mode" in row}
    assert rows["sync"]["ratio"] == pytest.approx(rows["sync"]["paper_ratio"], rel=0.02)
    for mode in ("GBA", "BSP", "backup workers"):
        assert rows[mode]["ratio"] == pytest.approx(rows[mode]["paper_ratio"], rel=0.15), mode
    speeds = [row["global_batches_per_second"] for row in kept("gba")["rows"] if "figure" in row]
    assert speeds == sorted(speeds) and speeds[-1] > 4 * speeds[0]
