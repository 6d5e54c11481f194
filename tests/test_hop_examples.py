"""The examples of decentralized training, as users start them."""

import gzip
import json
import re

import numpy as np
import pytest
from programs import EXAMPLES, run, run_here, strict_json

import tf_recsync as recsync

SVM = EXAMPLES / "hop_svm.py"
IMAGE = EXAMPLES / "hop_image.py"


@pytest.fixture(scope="module")
def libsvm(tmp_path_factory):
    """A folder with a task that a linear classifier can do, of which one file is gzip."""
    folder = tmp_path_factory.mktemp("libsvm")
    random = np.random.default_rng(3)
    truth = random.normal(size=12)
    for name, rows in (("task.train.gz", 2000), ("task.test", 500)):
        open_file = gzip.open if name.endswith(".gz") else open
        with open_file(folder / name, "wt") as file:
            for row in (random.random((rows, 12)) < 0.4).astype(int):
                label = "+1" if row @ truth > truth.sum() * 0.4 else "-1"
                pairs = " ".join(f"{i + 1}:1" for i in np.flatnonzero(row))
                file.write(f"{label} {pairs}\n")
    return folder


def test_the_svm_is_trained_with_slow_workers_and_leaves_a_timeline(libsvm, tmp_path):
    done = run(
        SVM,
        f"--data_location={libsvm}",
        *("--workers=4", "--topology=ring", "--backup_workers=1", "--max_iteration_gap=4"),
        *("--max_jump=4", "--epochs=2", "--batch_size=16", "--steps_per_execution=2"),
        # So slow that the others are ahead of it on a busy machine, too.
        *("--compute_seconds=0.01", "--slow_workers=1", "--slow_factor=20"),
        f"--output_dir={tmp_path / 'out'}",
        f"--metrics_json={tmp_path / 'h.json'}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = strict_json(tmp_path / "h.json")
    assert figures["accuracy"] > 0.9
    assert figures["jumps"] > 0
    assert "jumps" in done.stdout and "test accuracy" in done.stdout
    trace = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    names = {event["name"] for event in spans}
    assert {"compute", "wait for updates", "send", "receive", "jump"} <= names
    # A worker does one thing after the other: its steps do not overlap.
    for worker in range(4):
        rows = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == worker and e["tid"] == 0
        )
        assert all(end <= begin + 1 for (_, end), (begin, _) in zip(rows, rows[1:], strict=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=double_ring", "--workers=6"], "workers must be a multiple of 4, not 6"),
        (["--strategy=async"], "--strategy must be hop or local"),
        (["--ps=1"], "--ps applies only with --strategy=async"),
        (["--data_location=/nowhere"], "is no file and no folder"),
        (["--test_location=/x/task.test"], "--test_location applies only if --data_location is a"),
    ],
)
def test_wrong_flags_are_refused_before_training(libsvm, arguments, message):
    done = run_here(SVM, f"--data_location={libsvm}", *arguments)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("tested_on", ["test data", "training data"])
def test_the_svm_says_which_data_its_figures_are_of(tmp_path, tested_on):
    train, test = tmp_path / "some.svm", tmp_path / "other.svm"
    train.write_text("+1 1:1\n-1 2:1\n" * 50)
    test.write_text("-1 1:1\n+1 2:1\n" * 50)  # The contrary.
    out = tmp_path / "m.json"
    done = run_here(
        *(SVM, "--strategy=local", f"--data_location={train}", f"--metrics_json={out}"),
        *("--learning_rate=1", "--batch_size=10", "--epochs=3"),
        *([f"--test_location={test}"] if tested_on == "test data" else []),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = strict_json(out)
    assert (figures["tested_on"], figures["accuracy"]) == (tested_on, tested_on != "test data")
    lines = re.findall(r"^  (\w+) (accuracy|log loss) +[01]", done.stdout, re.M)
    assert lines == [(tested_on.split()[0], figure) for figure in ("accuracy", "log loss")]


@pytest.mark.parametrize("program", ["wide_deep_ctr.py", "hop_svm.py", "hop_image.py"])
def test_help_names_the_flags_of_strategies_too(program):
    text = run_here(EXAMPLES / program, "--help").stdout
    for flag in ("strategy", "workers", "topology", "epochs", "metrics_json"):
        assert f"--{flag}:" in text, text


@pytest.mark.full
def test_images_in_the_form_of_cifar_10_are_learned_without_any_click(tmp_path):
    random = np.random.default_rng(0)
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        records = random.integers(0, 256, (64, 3073), np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / name)
    arguments = f"--data_location={tmp_path}", "--workers=2", "--topology=ring"
    done = run(IMAGE, *arguments, "--batch_size=8", "--width=0.05")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "VGG11-style network" in done.stdout and "iterations" in done.stdout
    (tmp_path / "data_batch_3.bin").write_bytes(b"short")
    done = run_here(IMAGE, *arguments)
    assert done.returncode != 0
    assert "data_batch_3.bin: 5 bytes are not records of 3073" in done.stderr


@pytest.mark.full
def test_wide_and_deep_trains_decentralized(tmp_path):
    # A log of few categories: all tables travel whole.
    random = np.random.default_rng(5)
    with open(tmp_path / "log.tsv", "w") as file:
        for label in random.integers(0, 2, 1500):
            numbers = random.integers(0, 5, 13)  # They tell nothing: only the tables can learn it.
            categories = [f"{label}{random.integers(0, 4):x}"] * 26
            file.write("\t".join(map(str, [label, *numbers, *categories])) + "\n")
    done = run_here(
        EXAMPLES / "wide_deep_ctr.py",
        *("--dataset=criteo", f"--data_location={tmp_path / 'log.tsv'}", "--hash_buckets=1000"),
        *("--strategy=hop", "--workers=2", "--topology=ring", "--staleness_bound=1"),
        # Each step of an execution is traced, with 26 features.
        *("--batch_size=64", "--steps_per_execution=1"),
        f"--metrics_json={tmp_path / 'm.json'}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = strict_json(tmp_path / "m.json")
    assert figures["auc"] > 0.7
    assert len(figures["iterations"]) == 2


def test_dlrm_trains_decentralized_with_tables_on_servers(tmp_path):
    done = run_here(
        EXAMPLES / "dlrm_ctr.py",
        *("--strategy=hop", "--workers=2", "--ps=2", "--topology=ring", "--cardinalities=50,3"),
        *("--staleness=inverse_power", "--rows=4000", "--test_rows=1000"),
        f"--metrics_json={tmp_path / 'm.json'}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = strict_json(tmp_path / "m.json")
    assert figures["auc"] > 0.6
    assert (figures["ps"], len(figures["iterations"])) == (2, 2)
    assert figures["staleness_mean"] == 1 <= figures["row_staleness_mean"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 1:1\n", "line 1: the label must be -1, 0 or 1, not '2'"),
        ("1 1:1\n1 x:1\n", "line 2: 'x:1' must be index:value"),
        ("1 2:1 2:1\n", "line 1: the index of '2:1' must be above 2"),
        ("1 0:1\n", "line 1: the index of '0:1' must be above 0"),
        ("1 4:1\n", "line 1: the index of '4:1' must be above 0, at most 3"),
        ("1 1:1\n1 2:nan\n", "line 2: the value of '2:nan' must be a finite float32"),
        ("1 2:-inf\n", "line 1: the value of '2:-inf' must be a finite float32"),
        ("1 2:1e39\n", "line 1: the value of '2:1e39' must be a finite float32"),
    ],
)
def test_malformed_lines_name_file_and_line(tmp_path, text, message):
    path = tmp_path / "bad.svm"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        recsync.data.load_libsvm(path, features=3)
    assert str(path) in str(error.value)
