"""The simulated figures of the papers on parameter servers, and the programs that make them."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


# What makes each part.
PROGRAMS = {
    "staleness": "results_on_servers",
    "weights": "results_on_servers",
    "normalization": "results_on_servers",
    "swap": "results_on_servers",
    "gba": "results_on_gba",
}


def program(name):
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Where dataclasses look for their annotations.
    spec.loader.exec_module(module)
    return module


def kept(name):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    assert found["simulated"] is True
    assert {"command", "paper", "fitted", "predicted", "rows"} <= found.keys()
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_gives_the_rows_that_are_kept(tmp_path, name):
    module = program(PROGRAMS[name])
    found = getattr(module, name)(1, 0.05)
    rows = kept(name)["rows"]
    assert [sorted(row) for row in found["rows"]] == [sorted(row) for row in rows]
    for key in ("mode", "weights", "normalization", "learning_rate", "optimizer", "status"):
        assert [row.get(key) for row in found["rows"]] == [row.get(key) for row in rows]
    getattr(module, f"draw_{name}")(found, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_staleness_is_fitted_and_that_of_three_times_as_many_workers_predicted():
    few, many, fitted = kept("staleness")["rows"]
    assert few["mean"] == pytest.approx(875, rel=0.02)
    assert few["variance"] == pytest.approx(4770, rel=0.05)
    assert many["mean"] == pytest.approx(3 * few["mean"], rel=0.01)
    assert fitted["mean"] == pytest.approx(2090, rel=0.02)
    assert fitted["variance"] == pytest.approx(11300, rel=0.05)


def test_linear_weights_learn_least():
    auc = {(row["workers"], row["weights"]): row["auc"] for row in kept("weights")["rows"]}
    of_many = {name: value for (workers, name), value in auc.items() if workers == 3000}
    assert min(of_many, key=of_many.get) == "linear"
    assert auc[1000, "no weights"] > of_many["no weights"]


def test_the_modes_are_as_fast_as_in_the_paper_but_for_sync():
    rows = {row["mode"]: row for row in kept("gba")["rows"] if "mode" in row}
    for mode in ("GBA", "BSP", "backup workers", "bounded staleness"):
        assert rows[mode]["ratio"] == pytest.approx(rows[mode]["paper_ratio"], rel=0.15), mode
    assert rows["sync"]["ratio"] < rows["bounded staleness"]["ratio"]
    speeds = [row["global_batches_per_second"] for row in kept("gba")["rows"] if "figure" in row]
    assert speeds == sorted(speeds) and speeds[-1] > 4 * speeds[0]


def test_in_a_busier_cluster_tokens_are_older_and_gba_excludes_more():
    busy, usual, idle = (row for row in kept("gba")["rows"] if row.get("table") == "5.3")
    for name in ("gba", "excluded"):
        assert busy[name] > usual[name] > idle[name]
        assert busy[f"paper_{name}"] > usual[f"paper_{name}"] > idle[f"paper_{name}"]
    assert usual["bsp"] == pytest.approx(usual["paper_bsp"], rel=0.15)
    for row in (busy, usual, idle):
        assert row["speed"] == pytest.approx(row["paper_speed"], rel=0.06)
        assert row["excluded"] < 0.01  # Of what backup workers drop.


def test_workers_that_are_slow_stay_so_for_some_steps():
    module = program("results_on_gba")
    spells = module.Spells(module.Cluster(slow=0.1, multiple=3.0), 40, seed=1)
    factors = np.array(
        [[spells.factor(*map(tf.constant, (w, s)), None) for s in range(250)] for w in range(4)]
    )
    assert set(np.unique(factors)) == {1.0, 3.0}
    changes = np.flatnonzero(np.diff(factors[factors.std(axis=1).argmax()]))
    assert set(np.diff(changes) % module.STRETCH) <= {0}
    assert spells.factor(tf.constant(3), tf.constant(251), None) == factors[3, 1]


def test_swap_is_better_than_adagrad_in_the_end_and_a_decay_after_each_step_is_not():
    rows = {(row["workers"], row["optimizer"]): row for row in kept("swap")["rows"]}
    swap, adagrad = rows[1000, "SWAP"], rows[1000, "Adagrad"]
    assert all(np.array(swap["auc_by_seed"]) > np.array(adagrad["auc_by_seed"]) + 0.01)
    assert np.argmax(adagrad["curve"]) == 3  # It gains nothing after the fourth day.
    for workers in (1000, 3000):
        each = rows[workers, "decay after each step"]["auc"]
        assert each < rows[workers, "Adagrad"]["auc"] - 0.01


def test_mean_normalization_gains_with_many_workers_and_more_than_with_fewer():
    auc = {
        (row["learning_rate"], row["workers"], row["normalization"]): row["auc"]
        for row in kept("normalization")["rows"]
    }
    for rate in (0.1, 0.02):
        few, many = (
            auc[rate, workers, "mean-normalization"] - auc[rate, workers, "none"]
            for workers in (1000, 3000)
        )
        assert many > 0.02
        assert abs(few) < 0.01
