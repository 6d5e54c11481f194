"""The example that trains on an endless stream of raw ids."""

import os
import re

import pytest
from absl import app, flags
from absl.testing import flagsaver
from programs import EXAMPLES, imported, run, run_here, strict_json

STREAM = EXAMPLES / "stream_ctr.py"
SMALL = ["--epochs=2", "--steps_per_epoch=12", "--test_steps=4", "--batch_size=64"]
# Of `make soak`; CONTRIBUTING.md has it.
SOAK_MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))


@pytest.fixture
def example():
    with imported(STREAM) as module:
        yield module


def figures_of(done, path):
    """What a program has written that should have ended well."""
    assert done.returncode == 0, done.stderr[-3000:]
    return strict_json(path)


def check_counts(tables, refused):
    """Checks that what a report says of tables adds up."""
    assert tables.keys() == {"embeddings/users", "embeddings/ads"}
    for counts in tables.values():
        assert 0 < counts["used"] <= counts["capacity"]
        assert counts["admitted"] - counts["evicted"] == counts["used"]
        assert (counts["refused"] > 0) == refused
        assert counts["expired"] == 0


def test_the_stream_is_trained_on_servers_and_its_report_adds_up(tmp_path):
    out, folder = tmp_path / "metrics.json", tmp_path / "out"
    done = run_here(
        STREAM,
        *("--workers=2", "--ps=2", "--rows=101", "--min_count=2", "--active_ids=400", *SMALL),
        *("--policy=least_frequent", "--half_life=100", "--unknown=trained"),
        *(f"--output_dir={folder}", f"--metrics_json={out}"),
    )
    figures = figures_of(done, out)
    assert figures["examples"] == 2 * 12 * 64
    assert [epoch["steps"] for epoch in figures["epochs"]] == [12, 24]
    for epoch in figures["epochs"]:
        check_counts(epoch["tables"], refused=True)
        assert 0 <= epoch["auc"] <= 1 and 0.8 < epoch["best_auc"] < 1
        servers = epoch["memory"]
        assert [own["job"] for own in servers] == ["ps", "ps", "worker", "worker"]
        assert sum(own["tables"] for own in servers) == 2 * 101 * 8 * 4
        assert all(own["resident"] > own["total"] for own in servers)
    last = figures["epochs"][-1]["tables"]["embeddings/ads"]
    assert last["capacity"] == 100 and last["evicted"] > 0
    assert f"{last['used']:,} of 100 rows used; {last['admitted']:,} admitted" in done.stdout
    scores = figures["scores"]
    assert scores["exported"] == pytest.approx(scores["predicted"], abs=1e-5)
    assert len(set(scores["exported"])) > 1
    assert all(user.startswith("user-") for user in scores["user"])
    assert f"{scores['user'][0]}, {scores['ad'][0]}: {scores['exported'][0]:.4f}" in done.stdout
    assert list(folder.rglob("events.out.tfevents*"))


def test_where_all_ids_fit_each_has_a_row(tmp_path):
    out = tmp_path / "metrics.json"
    done = run_here(STREAM, "--strategy=local", "--rows=5000", *SMALL, f"--metrics_json={out}")
    (_, last) = figures_of(done, out)["epochs"]
    check_counts(last["tables"], refused=False)
    with imported(STREAM) as module:
        stream = module.Stream(64, 20_000, 10.0, are_strings=True, seed=1)
        trained = [features for features, _ in stream.batches(steps=24)]
    for feature, table in (("user", "users"), ("ad", "ads")):
        ids = {id for features in trained for id in features[feature].numpy()}
        assert last["tables"][f"embeddings/{table}"]["used"] == len(ids)


def test_numbered_ids_have_no_report_of_keys(tmp_path):
    out = tmp_path / "metrics.json"
    done = run_here(
        *(STREAM, "--strategy=local", "--ids=numbers", "--rows=60000"),
        *(*SMALL, f"--metrics_json={out}"),
    )
    figures = figures_of(done, out)
    assert [epoch["tables"] for epoch in figures["epochs"]] == [{}, {}]
    assert figures["scores"]["exported"] == pytest.approx(figures["scores"]["predicted"], abs=1e-5)


def test_the_stream_is_the_same_from_wherever_it_is_read_and_its_ids_come_and_go(example):
    def ids(begin, steps, are_strings=True):
        stream = example.Stream(64, 300, 3.0, are_strings, seed=2)
        return [f["user"].numpy().tolist() for f, _ in stream.batches(begin, steps)]

    assert ids(0, 12)[5:] == ids(5, 7)
    numbers = ids(0, 12, are_strings=False)
    assert ids(0, 12) == [[b"user-%d" % n for n in step] for step in numbers]

    # All 300 are replaced in 100 steps, and each is there for twice as long.
    def some(begin):
        return {id for step in ids(begin, 10) for id in step}

    assert some(0) & some(20) and not some(0) & some(220)


def test_a_table_has_a_row_for_each_number_of_the_stream(example):
    def largest(stream, first, steps):
        batches = [features for features, _ in stream.batches(first, steps)]
        return max(int(ids.numpy().max()) for features in batches for ids in features.values())

    (command,) = re.findall(r"stream_ctr\.py (--ids=numbers .*)", example.__doc__)
    with flagsaver.flagsaver():
        flags.FLAGS(["stream_ctr.py", *command.split(), "--batch_size=2048"])
        example.check_flags()
        steps = 3 * flags.FLAGS.steps_per_epoch + flags.FLAGS.test_steps
        last = largest(example.make_stream(), steps - 50, 50)
    assert 50_000 < last < 60_000
    # Ten ids, all of which are replaced in five steps.
    stream = example.Stream(4096, 10, 2.0, are_strings=False, seed=3)
    for steps in (1, 2, 5, 6, 7, 11, 12):
        most = stream.most_ids(steps)
        assert most - 10 <= largest(stream, 0, steps) < most


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs=3", "--minutes=1"], "--epochs and --minutes exclude each other"),
        (["--strategy=hop"], "--strategy=hop needs --ps, where the tables are"),
        (["--ids=numbers", "--min_count=2"], "--min_count applies only with --ids=strings"),
        (["--ids=numbers", "--minutes=1"], "--minutes applies only with --ids=strings"),
        (
            ["--ids=numbers", "--rows=59999"],
            "--rows must be at least 60000 with --ids=numbers, as the ids of 1700 steps go up to "
            "59999, not 59999",
        ),
        (["--ids=numbers", "--rows=60000", "--epochs=5"], "--rows must be at least 80000 with"),
        (["--half_life=5"], "half_life must be None with policy='least_recent', not 5"),
        (["--min_count=256"], "min_count must be an integer from 1 to 255, got 256"),
        (["--strategy=local", "--workers=3"], "--workers applies only with --strategy=async"),
    ],
)
def test_flags_that_would_be_ignored_or_refused_later_are_errors(example, arguments, message):
    with flagsaver.flagsaver():
        flags.FLAGS(["stream_ctr.py", *arguments])
        with pytest.raises(app.UsageError, match=message):
            example.check_flags()


@pytest.mark.soak
@pytest.mark.timeout(120 + 120 * SOAK_MINUTES)
def test_the_memory_of_servers_stays_while_the_stream_goes_on(tmp_path):
    out = tmp_path / "metrics.json"
    done = run(
        STREAM,
        *("--workers=2", "--ps=2", "--rows=9000", "--min_count=2", "--new_ids_per_step=50"),
        *(f"--minutes={SOAK_MINUTES}", f"--metrics_json={out}"),
        timeout=90 + 60 * SOAK_MINUTES,
    )
    figures = figures_of(done, out)
    epochs = figures["epochs"]
    check_counts(epochs[-1]["tables"], refused=True)
    assert epochs[-1]["tables"]["embeddings/ads"]["evicted"] > 10 * 9000 * SOAK_MINUTES / 10
    # Until then tables are filled, and allocators get what they need.
    settled = next(e for e in epochs if e["seconds"] > 60 * SOAK_MINUTES / 4)
    for before, after in zip(settled["memory"], epochs[-1]["memory"], strict=True):
        assert after["total"] == before["total"]
        assert after["resident"] < 1.05 * before["resident"], (before, after)
