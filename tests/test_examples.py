"""The Wide & Deep example, its flags and what it writes; and DLRM."""

import contextlib
import json
import math
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import app, flags
from absl.testing import flagsaver
from data_files import WRITERS
from programs import EXAMPLES, imported, run, run_here, strict_json

import tf_recsync as recsync
from tf_recsync.run_status import RunStatus

WIDE_DEEP = EXAMPLES / "wide_deep_ctr.py"
KEYS = {
    "strategy",
    "workers",
    "ps",
    "examples",
    "batches",
    "steps",
    "wall_seconds",
    "examples_per_second",
    "auc",
    "log_loss",
    "normalized_entropy",
    "staleness_mean",
    "staleness_p99",
    "staleness_max",
}


@pytest.fixture
def example():
    with imported(WIDE_DEEP) as module:
        yield module


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--strategy=local", "--workers=3"], "--workers applies only with --strategy=async"),
        (["--strategy=local", "--compute_seconds=0.1"], "--compute_seconds applies only"),
        (["--data_location=x"], "--data_location applies only with --dataset=criteo or adult"),
        (["--dataset=adult"], "--dataset=adult needs --data_location"),
        (["--dataset=adult", "--data_location=x", "--rows=5"], "--rows applies only"),
        (["--hash_buckets=5"], "--hash_buckets applies only with --dataset=criteo"),
        (["--label=y"], "--label applies only with --dataset=csv or parquet or tfrecord"),
        (["--dataset=csv", "--data_location=x"], "--dataset=csv needs --categorical, for the"),
        (
            ["--dataset=tfrecord", "--data_location=x", "--numeric=age"],
            "--dataset=tfrecord needs --categorical, for the tables",
        ),
        (["--dataset=adult", "--data_location=x", "--test_rows=5"], "--test_rows applies only"),
        (["--dataset=adult", "--data_location=x", "--cardinalities=5"], "--cardinalities applies"),
        (["--cardinalities=5,0"], "--cardinalities must be integers of at least 1, not 5,0"),
        (["--cardinalities=x"], "--cardinalities must be integers of at least 1, not x"),
        (["--cardinalities="], "--cardinalities must be integers of at least 1, not $"),
        (["--swap_period=5"], "--swap_period applies only with --optimizer=swap_adagrad"),
        (["--staleness_power=3"], "--staleness_power applies only with --staleness=inverse_power"),
        (["--tf"], "--tf needs --strategy=local"),
        (["--tf", "--strategy=local", "--optimizer=swap_adagrad"], "--tf has no --optimizer"),
        (["--tf", "--strategy=local", "--mean_normalization"], "--tf has no --mean_norm"),
        (["--bind_address=127.0.0.1"], "--bind_address applies only with TF_CONFIG"),
        (["--connect_seconds=600"], "--connect_seconds applies only with TF_CONFIG"),
        (["--min_workers=1"], "--min_workers applies only with TF_CONFIG"),
        (["--alpha=0.5"], "--alpha applies only with --strategy=shadow_easgd or"),
        (["--strategy=shadow_easgd", "--alpha=0"], r"alpha must be in \(0, 1\], not 0.0"),
        (["--strategy=shadow_ma", "--sync_ps=1"], "--sync_ps applies only with"),
        (["--strategy=shadow_ma", "--eta=0.5"], "--eta applies only with"),
        (["--strategy=shadow_ma", "--sync_gap=5"], "--sync_gap applies only with"),
        (["--strategy=fr_bmuf", "--eta=-1"], "eta must be a finite number above 0, not -1.0"),
        (["--strategy=fr_ma", "--sync_per_minute=0"], "per_minute must be a positive number"),
        (["--strategy=fr_ma", "--sync_gap=5", "--sync_per_minute=1"], "exclude each other"),
        (["--global_batch_size=256"], "--global_batch_size applies only with --strategy=sync or"),
        (["--strategy=gba", "--staleness_tolerance=1"], "--strategy=gba needs --global_batch"),
        (["--strategy=sync", "--staleness=inverse_power"], "--staleness applies only"),
        (["--groups=3"], "--groups applies only with --strategy=hierarchical"),
        (["--placement=auto"], "--placement applies only with --strategy=hierarchical"),
        (["--compression=int8"], "--compression applies only with --strategy=hierarchical"),
        (
            ["--strategy=hierarchical", "--workers=4", "--ps=4", "--compression=int8"],
            "--compression=int8 needs --placement=auto, or the file",
        ),
        (["--nets_per_trainer=2"], "--nets_per_trainer applies only with --strategy=hierarchical"),
        (
            ["--strategy=hierarchical", "--workers=4", "--ps=4", "--placement=nowhere.json"],
            '--placement must be "trainers", "auto" or the file of an OperatorPlan: .*nowhere.json',
        ),
        (["--strategy=hierarchical", "--eta=0.5"], "--eta applies only with --algorithm=bmuf"),
        (
            ["--strategy=hierarchical", "--algorithm=ma", "--sync_ps=1"],
            "--sync_ps applies only with --algorithm=easgd, not with --algorithm=ma",
        ),
        (["--strategy=hierarchical", "--topology=ring"], "--topology applies only with --algor"),
        (
            ["--strategy=hierarchical", "--algorithm=hop", "--backup_groups=2"],
            "backup_workers must be less than the in-neighbors",
        ),
        (
            ["--strategy=hierarchical", "--algorithm=hop", "--alpha=0.5"],
            "--alpha applies only with --algorithm=easgd or ma or bmuf, not with --algorithm=hop",
        ),
        (
            ["--strategy=hierarchical", "--global_batch_size=256"],
            "applies only with --aggregation=sync or bsp or gba, not with --aggregation=hogwild",
        ),
        (["--strategy=hierarchical", "--aggregation=gba"], "--aggregation=gba needs --global_batc"),
        (
            ["--strategy=hierarchical", "--aggregation=sync", "--staleness=inverse_power"],
            "--staleness applies only with --aggregation=hogwild or async or bounded_staleness",
        ),
        (["--slow_workers=1"], "--slow_workers and --slow_factor need --compute_seconds"),
        (["--slow_workers=3", "--compute_seconds=0.1"], "must be at most --workers=2, not 3"),
        (["--slow_factor=2", "--compute_seconds=0.1"], "--slow_factor needs --slow_workers"),
        (["--strategy=local", "--topology=ring"], "--topology applies only with --strategy=hop"),
        (["--strategy=hop", "--jump_trigger=3"], "--jump_trigger applies only with --max_jump"),
        (["--strategy=hop", "--staleness=inverse_power"], "only to tables on --ps"),
        (
            ["--strategy=hop", "--protocol=notify_ack", "--max_iteration_gap=3"],
            "--max_iteration_gap applies only",
        ),
        (["--restore_from=nowhere"], "--restore_from=nowhere has no model.weights.h5"),
        (["--metrics_json=nowhere/m.json"], "--metrics_json=nowhere/m.json must be a file that"),
        (["--metrics_json=nowhere/"], "--metrics_json=nowhere/ must be a file that"),
        (["--metrics_json=."], "--metrics_json=. must be a file that this program can write"),
        (["--output_dir=/dev/null"], "--output_dir=/dev/null must be a folder that this program"),
        (["--output_dir=/dev/null/out"], "--output_dir=/dev/null/out must be a folder that"),
        (["--publish_keep=2"], "--publish_keep applies only with --publish"),
        (["--publish_tables=apart"], "--publish_tables applies only with --publish"),
        (
            ["--publish=m", "--publish_full_every=2"],
            "--publish_full_every applies only with --publish_tables=apart",
        ),
        (
            ["--checkpoint=x", "--restore_from=y"],
            "--restore_from can't be used with --checkpoint, which restores",
        ),
        (
            ["--strategy=sync", "--global_batch_size=500", "--batch_size=128"],
            "global_batch_size must be a multiple of local_batch_size=128, not 500",
        ),
        (
            ["--strategy=bsp", "--global_batch_size=64", "--batch_size=128"],
            "global_batch_size must be a multiple of local_batch_size=128, not 64",
        ),
        (
            ["--strategy=gba", "--global_batch_size=300", "--staleness_tolerance=1"],
            "global_batch_size must be a multiple of local_batch_size=128, not 300",
        ),
        (
            ["--strategy=backup_workers", "--backup_workers=4", "--workers=4"],
            "backup_workers must be less than the cluster's 4 workers, not 4",
        ),
        (["--strategy=backup_workers", "--workers=1"], "backup_workers must be less than .* 1 "),
        (
            ["--slow_workers=1", "--compute_seconds=0.1", "--slow_factor=-1"],
            "factor must be a finite number of at least 0, not -1.0",
        ),
        (
            ["--optimizer=swap_adagrad", "--swap_decay=2"],
            "decay must be a finite number above 0 and of at most 1, not 2.0",
        ),
        (["--staleness=inverse_power", "--staleness_baseline=-1"], "baseline must be"),
    ],
)
def test_flags_that_would_be_ignored_or_refused_later_are_errors(example, arguments, message):
    with flagsaver.flagsaver():
        flags.FLAGS(["wide_deep_ctr.py", *arguments])
        with pytest.raises(app.UsageError, match=message):
            example.check_flags()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--strategy=local"],
        ["--strategy=sync", "--workers=3", "--cardinalities=10,1", "--test_rows=50"],
        ["--strategy=gba", "--global_batch_size=512"],
        ["--strategy=backup_workers", "--workers=4", "--backup_workers=3"],
        ["--strategy=bounded_staleness", "--staleness_bound=0"],
        ["--strategy=hop", "--workers=4", "--backup_workers=4"],
        ["--strategy=shadow_easgd", "--alpha=1", "--sync_ps=2", "--threads=4"],
        ["--strategy=fr_bmuf", "--eta=0.9", "--sync_per_minute=2"],
        ["--strategy=hierarchical", "--algorithm=bmuf", "--eta=0.9", "--ps_per_group=2"],
        ["--strategy=hierarchical", "--placement=auto"],
        ["--strategy=hierarchical", "--placement=auto", "--compression=bfloat16"],
        ["--strategy=hierarchical", "--aggregation=gba", "--global_batch_size=256"],
        ["--strategy=hierarchical", "--aggregation=async", "--staleness=inverse_power"],
        ["--strategy=hierarchical", "--algorithm=hop", "--groups=4", "--backup_groups=1"],
    ],
)
def test_flags_that_go_together_pass(example, arguments):
    with flagsaver.flagsaver():
        flags.FLAGS(["wide_deep_ctr.py", *arguments])
        example.check_flags()


def test_an_output_dir_without_the_package_tensorboard_is_refused(example, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with flagsaver.flagsaver():
        flags.FLAGS(["wide_deep_ctr.py", f"--output_dir={tmp_path / 'out'}"])
        with pytest.raises(app.UsageError, match=r"pip install 'tf_recsync\[tensorboard\]'"):
            example.check_flags()
        flags.FLAGS(["wide_deep_ctr.py", "--output_dir="])
        example.check_flags()


def test_figures_that_are_no_finite_numbers_are_written_as_null(example, tmp_path):
    with flagsaver.flagsaver():
        flags.FLAGS(["wide_deep_ctr.py", f"--metrics_json={tmp_path / 'm.json'}"])
        sys.modules["strategy_flags"].write_figures({"a": [{"b": math.nan}, (math.inf, 2.5)]})
    assert strict_json(tmp_path / "m.json") == {"a": [{"b": None}, [None, 2.5]]}


def test_with_tf_config_the_number_of_workers_is_not_checked_beforehand(example, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    with flagsaver.flagsaver():
        # More than the flag's default of 2 workers, which mean nothing here.
        flags.FLAGS(["wide_deep_ctr.py", "--strategy=backup_workers", "--backup_workers=3"])
        example.check_flags()


@pytest.mark.parametrize(
    ("arguments", "raised"),
    [
        (["--connect_seconds=0.25"], (RuntimeError, r"not up within timeout=0.25 s: worker:0 \(")),
        (["--min_workers=3"], (app.UsageError, "min_workers must be .* 1 to 2, got 3")),
    ],
)
def test_with_tf_config_flags_say_how_long_and_how_many_servers_are_waited_for(
    example, monkeypatch, arguments, raised
):
    servers = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    config = {"cluster": servers, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with flagsaver.flagsaver(), contextlib.ExitStack() as stack:
        flags.FLAGS(["wide_deep_ctr.py", *arguments])
        example.check_flags()
        with pytest.raises(raised[0], match=raised[1]):
            example.click_training.strategy_flags.make_strategy(stack)


# Three features where their number does not matter: tracing a model takes time for each.
SMALL = [
    *("--cardinalities=1000,50,3", "--rows=4000", "--test_rows=10000"),
    *("--batch_size=200", "--deep_learning_rate=0.1"),
]


def figures_of(done, path):
    """What a program has written that should have ended well."""
    assert done.returncode == 0, done.stderr[-3000:]
    return strict_json(path)


@pytest.mark.cases("True")
@pytest.mark.parametrize("stock", [False, True])
def test_it_trains_locally_and_reports(tmp_path, stock):
    out = tmp_path / "metrics.json"
    more = ["--tf"] if stock else []
    done = run_here(WIDE_DEEP, "--strategy=local", *SMALL, f"--metrics_json={out}", *more)
    figures = figures_of(done, out)
    assert set(figures) >= KEYS
    assert (figures["examples"], figures["steps"]) == (4000, 20)
    assert (figures["staleness_mean"], figures["workers"], figures["ps"]) == (1.0, 1, 0)
    assert 0.5 < figures["auc"] < 1 and math.isfinite(figures["normalized_entropy"])
    assert "the best possible" in done.stdout


@pytest.mark.parametrize("program", ["wide_deep_ctr.py", "hop_svm.py"])
def test_what_was_trained_is_saved_though_it_can_not_be_tested(tmp_path, monkeypatch, program):
    def fail(*unused, **also_unused):
        raise RuntimeError("worker:1 is gone")

    monkeypatch.setattr(keras.Model, "evaluate", fail)
    (tmp_path / "task.svm").write_text("1 1:1\n-1 2:1\n")
    data = SMALL if program == "wide_deep_ctr.py" else [f"--data_location={tmp_path / 'task.svm'}"]
    with pytest.raises(RuntimeError, match="worker:1 is gone"):
        run_here(EXAMPLES / program, "--strategy=local", *data, f"--output_dir={tmp_path / 'out'}")
    assert (tmp_path / "out" / "model.weights.h5").exists()
    assert list((tmp_path / "out").rglob("events.out.tfevents*"))


def test_a_run_that_goes_on_counts_what_it_does_itself(tmp_path):
    out = tmp_path / "metrics.json"

    def figures(epochs):
        done = run_here(
            *(WIDE_DEEP, "--strategy=local", *SMALL, f"--metrics_json={out}"),
            *("--steps=8", f"--epochs={epochs}", f"--checkpoint={tmp_path / 'checkpoints'}"),
        )
        found = figures_of(done, out)
        return [found[name] for name in ("steps", "batches", "examples")]

    assert figures(epochs=1) == [8, 8, 1600]
    assert figures(epochs=1) == [0, 0, 0]
    assert strict_json(out)["examples_per_second"] == 0
    assert figures(epochs=2) == [8, 8, 1600]


def test_batches_that_an_earlier_process_did_are_not_counted(example):
    counts = sys.modules["click_training"].Counts()
    counts.set_model(
        types.SimpleNamespace(
            optimizer=types.SimpleNamespace(iterations=tf.Variable(13)),
            train_function=types.SimpleNamespace(skipped_batches=3),
        )
    )
    with flagsaver.flagsaver():
        flags.FLAGS(["wide_deep_ctr.py", "--batch_size=10"])
        counts.on_train_begin()
        assert counts.of_data(rows=95) == (0, 0)
        for epoch in (1, 2):
            counts.on_epoch_begin(epoch)
        assert counts.of_data(rows=95) == (2 * 10 - 3, 2 * 95 - 3 * 10)
        flags.FLAGS(["wide_deep_ctr.py", "--batch_size=10", "--steps=7"])
        assert counts.of_data(rows=95) == (2 * 7 - 3, 10 * (2 * 7 - 3))


@pytest.mark.cases("Csv", "Parquet")
@pytest.mark.parametrize("kind", ["Csv", "Parquet", "TfRecord"])
def test_it_trains_on_files_in_each_format(tmp_path, kind):
    values = [{"click": i % 2, "age": i % 7, "country": "CHUS"[i % 2 :]} for i in range(200)]
    path = WRITERS[kind](tmp_path / "clicks", values)
    out = tmp_path / "metrics.json"
    done = run_here(
        EXAMPLES / "dlrm_ctr.py" if kind == "TfRecord" else WIDE_DEEP,
        "--strategy=local",
        f"--dataset={kind.lower()}",
        f"--data_location={path}",
        "--label=click",
        "--numeric=age",
        "--categorical=country",
        "--hash_buckets=100",
        "--on_error=skip",
        "--batch_size=20",
        "--steps=8",
        f"--metrics_json={out}",
    )
    figures = figures_of(done, out)
    assert (figures["dataset"], figures["steps"]) == (kind.lower(), 8)
    assert figures["auc"] > 0.9, "the country tells the label"


def test_it_trains_on_a_cluster_with_all_its_options_and_saves(tmp_path):
    out = tmp_path / "metrics.json"
    done = run(
        WIDE_DEEP,
        "--strategy=async",
        "--workers=2",
        "--ps=2",
        "--optimizer=swap_adagrad",
        "--swap_period=5",
        "--swap_decay=0.9",
        "--linear_learning_rate=0.02",
        "--staleness=inverse_power",
        "--staleness_baseline=2",
        "--update_sensitivity=1.0",
        "--mean_normalization",
        "--compute_seconds=0.01",
        "--steps=12",
        "--epochs=2",
        "--steps_per_execution=3",
        f"--output_dir={tmp_path / 'out'}",
        f"--metrics_json={out}",
        f"--publish={tmp_path / 'published'}",
        "--publish_every_seconds=3600",
        "--publish_keep=2",
        f"--checkpoint={tmp_path / 'checkpoints'}",
        "--checkpoint_every_seconds=3600",
        *SMALL,
    )
    figures = figures_of(done, out)
    assert (tmp_path / "published" / "1" / "saved_model.pb").exists()
    latest = recsync.checkpoint.open(recsync.checkpoint.latest(tmp_path / "checkpoints"))
    assert (latest.global_step, latest.metadata["epoch"]) == (24, 2)
    assert f"in {tmp_path / 'checkpoints'}; training paused for" in done.stdout
    assert (figures["strategy"], figures["workers"], figures["ps"]) == ("async", 2, 2)
    assert (figures["steps"], figures["examples"]) == (24, 24 * 200)
    assert 1 <= figures["staleness_mean"] <= figures["staleness_max"]
    assert (tmp_path / "out" / "model.weights.h5").exists()
    assert (tmp_path / "out" / "saved_model" / "saved_model.pb").exists()
    assert list((tmp_path / "out").rglob("events.out.tfevents*"))
    assert "staleness" in done.stdout


@pytest.mark.full
def test_it_goes_on_in_another_mode_from_what_an_earlier_run_saved(tmp_path):
    out, saved = tmp_path / "metrics.json", tmp_path / "out"
    batches = [*SMALL, "--batch_size=100", "--global_batch_size=200", "--steps_per_execution=1"]
    batches.append(f"--metrics_json={out}")
    done = run_here(WIDE_DEEP, "--strategy=sync", f"--output_dir={saved}", *batches)
    figures = figures_of(done, out)
    assert (figures["steps"], figures["excluded"], figures["staleness_max"]) == (20, 0, 1)
    out.unlink()
    done = run_here(
        WIDE_DEEP,
        "--strategy=gba",
        "--staleness_tolerance=3",
        "--workers=3",
        "--ps=2",
        "--compute_seconds=0.02",
        "--slow_workers=1",
        f"--restore_from={saved}",
        *batches,
    )
    figures = figures_of(done, out)
    assert (figures["strategy"], figures["steps"], figures["examples"]) == ("gba", 20, 4000)
    # Each of the 40 batches reaches both servers.
    assert figures["included"] + figures["excluded"] == 80
    assert figures["auc"] > 0.55 and "excluded" in done.stdout


@pytest.mark.cases("bsp", "shadow easgd")
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        # With all 26 features of the synthetic data.
        (["--strategy=bsp", "--global_batch_size=400"], [10]),
        # Of the two batches of a step, one may be dropped.
        (["--strategy=backup_workers"], range(10, 21)),
        (["--strategy=bounded_staleness", "--staleness_bound=1"], [20]),
        (["--strategy=shadow_easgd", "--threads=2", "--staleness=inverse_power"], [20]),
        (["--strategy=fr_ma", "--sync_gap=2"], [20]),
        (["--strategy=fr_bmuf"], [20]),
    ],
    ids=["bsp", "backup workers", "bounded staleness", "shadow easgd", "fr ma", "fr bmuf"],
)
def test_it_trains_in_the_other_modes(tmp_path, monkeypatch, arguments, steps):
    shown = []  # By `python -m tf_recsync.status`.
    monkeypatch.setattr(RunStatus, "write", lambda status, path: shown.append(status))
    out = tmp_path / "metrics.json"
    small = SMALL[1:] if arguments[0] == "--strategy=bsp" else SMALL
    done = run_here(
        WIDE_DEEP, f"--metrics_json={out}", *arguments, *small, "--steps_per_execution=1"
    )
    figures = figures_of(done, out)
    assert f"--strategy={figures['strategy']}" == arguments[0]
    assert figures["steps"] in steps
    assert (figures["workers"], figures["examples"]) == (2, 4000)
    assert [status.doing for status in (shown[0], shown[-1])] == ["train", "end"]
    # Once a minute, by default.
    has_none = "synchronizations         none" in done.stdout
    assert has_none == (figures["strategy"] == "fr_bmuf")
    # Twenty steps teach little, and less if the machine is busy.
    assert 0.45 < figures["auc"] < 1 and figures["staleness_mean"] >= 1


@pytest.mark.full
def test_dlrm_trains_with_trainers_that_synchronize_in_the_background(tmp_path):
    out = tmp_path / "metrics.json"
    done = run_here(
        EXAMPLES / "dlrm_ctr.py",
        *("--strategy=shadow_easgd", "--workers=2", "--threads=2", "--sync_ps=2", "--epochs=3"),
        *(f"--publish={tmp_path / 'published'}", "--publish_tables=apart"),
        *("--publish_full_every=2", "--publish_every_seconds=3600"),
        *(*SMALL, "--batch_size=100", f"--metrics_json={out}"),
    )
    figures = figures_of(done, out)
    served = recsync.serving.TableReader(tmp_path / "published")
    signature = served.model.signatures["serving_default"].structured_input_signature[1]
    assert {spec.shape.rank for spec in signature.values()} == {2}  # Vectors in place of ids.
    assert served.lookup("C1", [0]).shape == (1, 16)
    assert (
        "DLRM on synthetic, shadow_easgd: 2 workers, 3 ps; 120 batches, 120 iterations"
        in done.stdout
    )
    # The trainer whose parameters these are takes fewer steps if the machine is busy.
    assert 0.45 < figures["auc"] < 1
    # Counted by the coordinator and, in bytes, by the sync PSs.
    assert figures["average_sync_gap"] == figures["average_sync_gap_by_bytes"]
    assert f"average sync gap {figures['average_sync_gap']:.1f} steps" in done.stdout


def test_dlrm_trains_in_groups_of_trainers(tmp_path):
    out = tmp_path / "metrics.json"
    done = run_here(
        EXAMPLES / "dlrm_ctr.py",
        *("--strategy=hierarchical", "--workers=4", "--ps=4", "--trainers_per_group=2"),
        *("--placement=auto", "--compression=int8"),
        *("--aggregation=gba", "--global_batch_size=200", "--epochs=2"),
        *(*SMALL, "--batch_size=100", "--steps_per_execution=1", f"--metrics_json={out}"),
    )
    figures = figures_of(done, out)
    assert "DLRM on synthetic, hierarchical: 4 workers, 4 ps; 80 batches" in done.stdout
    # Twenty global steps of a group teach little.
    assert 0.3 < figures["auc"] < 1 and figures["staleness_mean"] >= 1
    assert len(figures["syncs"]) == 2  # One number for each group.
    assert "for each copy" in done.stdout


def test_dlrm_is_the_papers_formula():
    """The dot products of all pairs of vectors, each pair once, and the dense vector."""
    spec = recsync.data.Synthetic(10, seed=1).spec
    with imported(EXAMPLES / "dlrm_model.py") as module:
        model = module.build_dlrm(spec, embedding_dimension=4)
    batch = 3
    random = np.random.default_rng(0)
    inputs = {"numeric": random.normal(size=(batch, len(spec.numeric))).astype(np.float32)}
    inputs |= {n: random.integers(0, size, batch) for n, size in spec.categorical.items()}
    inner = keras.Model(
        model.input,
        [model.get_layer(n).output for n in ("bottom_2", "embeddings", "top_inputs")],
    )
    dense, embedded, found = [np.asarray(t) for t in inner(inputs)]
    vectors = np.concatenate([dense, embedded], 1).reshape(batch, -1, 4)
    pairs = [(i, j) for i in range(vectors.shape[1]) for j in range(i)]
    expected = [[v[i] @ v[j] for i, j in pairs] for v in vectors]
    np.testing.assert_allclose(found[:, 4:], expected, atol=1e-5)
    np.testing.assert_array_equal(found[:, :4], dense)
