"""What decentralized training tells of itself: recordings, timelines, reports."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, events

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.synchronization.events import Recordings
from tf_recsync.synchronization.hop_reports import Reports, State, WorkerReport

WORKERS, BATCH, WIDTH = 4, 4, 3
BATCHES = 16


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, processes=0)


def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


def dataset(batches=BATCHES):
    random = np.random.default_rng(1)
    x = random.normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


# Recordings.


def rows(first, count):
    """Events that are numbered by their iterations."""
    found = np.zeros((count, 5), np.int64)
    found[:, 3] = np.arange(first, first + count)
    return found


def test_a_recording_keeps_the_latest_events_and_counts_the_others():
    log = Recordings()
    recording = log.record(5, lambda: None)
    log.add(0, rows(0, 3), 0)
    log.add(1, rows(3, 4), 2)
    assert [event[4] for event in recording.events()] == [2, 3, 4, 5, 6]
    assert [event[0] for event in recording.events()] == [0, 1, 1, 1, 1]
    assert recording.lost == 2 + 2
    log.add(0, rows(7, 9), 0)  # More at once than are kept.
    assert [event[4] for event in recording.events()] == [11, 12, 13, 14, 15]
    assert recording.lost == 4 + 9


def test_events_that_workers_lost_count_while_it_records():
    log = Recordings()
    log.add(0, rows(0, 3), 7)
    recording = log.record(50, lambda: None)
    log.add(0, rows(3, 1), 2)
    assert recording.lost == 2
    log.add(0, rows(0, 1), 1)
    assert recording.lost == 3
    recording.stop()
    log.add(0, rows(1, 1), 100)
    assert recording.lost == 3 and len(list(recording.events())) == 2


@pytest.mark.full
def test_nothing_is_kept_of_what_nobody_records(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)
    model.fit(dataset(), verbose=0)
    with (
        strategy.record_events(model) as whole,
        strategy.record_events(model, limit=25) as limited,
    ):
        assert list(whole.events()) == []
        model.fit(dataset(), verbose=0)
    count = len(list(whole.events()))
    computed = [event for event in whole.events() if event.name == "compute"]
    assert len(computed) == BATCHES
    assert whole.lost == 0
    assert list(limited.events()) == list(whole.events())[-25:]
    assert limited.lost == count - 25
    model.fit(dataset(), verbose=0)
    assert len(list(whole.events())) == count
    with pytest.raises(ValueError, match="limit must be an integer of at least 1, got 0"):
        strategy.record_events(model, 0)


def test_a_timeline_says_how_much_of_it_is_missing(cluster, tmp_path, caplog):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)
    paths = tmp_path / "whole.json", tmp_path / "part.json"
    timelines = [
        recsync.callbacks.Timeline(paths[0]),
        recsync.callbacks.Timeline(paths[1], limit=30),
    ]
    model.fit(dataset(), verbose=0, callbacks=timelines)
    whole, part = (json.loads(path.read_text()) for path in paths)
    spans = [
        [event for event in trace["traceEvents"] if event["ph"] == "X"] for trace in (whole, part)
    ]
    assert whole["otherData"] == {"lost_events": 0}
    assert part["otherData"] == {"lost_events": len(spans[0]) - 30}
    assert len(spans[1]) == 30
    assert f"part.json is not complete: {len(spans[0]) - 30} events were lost" in caplog.text
    assert "whole.json" not in caplog.text
    threads = [e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["step", "send", "receive", "data"] * WORKERS


def test_a_timeline_is_there_when_training_has_failed(cluster, tmp_path):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)

    def fail():
        model.train_function.synchronizer.fail(RuntimeError("a bug"))

    timeline = recsync.callbacks.Timeline(tmp_path / "t.json")
    with pytest.raises(RuntimeError, match="a bug"):
        model.fit(dataset(4000), verbose=0, callbacks=[AtBatch(8, fail), timeline])
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["name"] == "compute" for event in trace) >= 8
    # The next one is about the next training alone.
    model.fit(dataset(), verbose=0, callbacks=[timeline])
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["name"] == "compute" for event in trace) == BATCHES


# Reports.

SUMS = {
    *("iterations_per_second", "waiting", "data_wait", "updates_used", "sends_saved"),
    *("stale_updates", "jumps"),
}
FIELDS = {
    *("iteration", "waited_for_updates", "waited_for_tokens", "waiting_seconds"),
    *("updates_used", "stale_updates_dropped", "superseded_updates_dropped", "sends_saved"),
    *("updates_sent", "jumps", "iterations_skipped"),
}
PER_WORKER = {f"worker_{worker}/{field}" for worker in range(WORKERS) for field in FIELDS}
EPOCHS = 2


class AtEpochEnds(keras.callbacks.Callback):
    """Notes what the strategy reports at the ends of epochs."""

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy
        self.ends = []

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(self._strategy.hop_report(self.model))


def test_history_and_tensorboard_have_what_each_worker_did_in_each_epoch(cluster, tmp_path):
    strategy = recsync.HopStrategy(
        cluster, topology.ring(WORKERS), max_iteration_gap=4, backup_workers=1, skip=recsync.Skip(5)
    )
    # Others do several steps meanwhile, on however busy a machine.
    slow = recsync.testing.SlowWorkers(25.0, [1])
    recsync.testing.set_compute_time(strategy, 0.02, slow)
    model = make_model(strategy)
    reports = AtEpochEnds(strategy)
    callbacks = [
        recsync.callbacks.HopReport(str(tmp_path), per_worker=True),
        reports,
    ]
    history = model.fit(dataset(32), epochs=EPOCHS, verbose=0, callbacks=callbacks).history
    assert set(history) == {"loss"} | SUMS | PER_WORKER
    before = [WorkerReport()] * WORKERS
    for epoch, ends in enumerate(reports.ends):
        found = {name: values[epoch] for name, values in history.items()}
        for worker, (then, now) in enumerate(zip(before, ends, strict=True)):
            for field in FIELDS - {"iteration", "waiting_seconds"}:
                gained = getattr(now, field) - getattr(then, field)
                assert found[f"worker_{worker}/{field}"] == pytest.approx(gained), field
            assert found[f"worker_{worker}/iteration"] == now.iteration
            waited = found[f"worker_{worker}/waited_for_updates"]
            waited += found[f"worker_{worker}/waited_for_tokens"]
            assert found[f"worker_{worker}/waiting_seconds"] == pytest.approx(waited)
        before = ends
        assert found["updates_used"] == sum(
            found[f"worker_{worker}/updates_used"] for worker in range(WORKERS)
        )
        assert 0 < found["waiting"] < 1 and 0 <= found["data_wait"] < 1
    # The slow one skips.
    assert sum(history["worker_1/jumps"]) > 0
    assert sum(history["worker_1/iterations_skipped"]) >= sum(history["worker_1/jumps"])

    scalars = events(tmp_path)
    assert {tag for plugin, tag in scalars if plugin == "scalars"} == PER_WORKER | {
        f"recsync/{name}" for name in SUMS
    }
    for name in PER_WORKER:
        np.testing.assert_allclose(scalars["scalars", name], history[name], rtol=1e-5)
    for name in SUMS:
        np.testing.assert_allclose(scalars["scalars", f"recsync/{name}"], history[name], rtol=1e-5)


def test_by_default_history_has_the_sums_alone(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)
    report = recsync.callbacks.HopReport()
    history = model.fit(dataset(), verbose=0, callbacks=[report]).history
    assert set(history) == {"loss"} | SUMS
    # Each has two in-neighbors; until the first has no more data, all wait for all.
    assert 0 < history["updates_used"][0] <= 2 * BATCHES
    with pytest.raises(ValueError, match="per_worker must be a bool, not 1"):
        recsync.callbacks.HopReport(per_worker=1)


@pytest.mark.parametrize("kind", ["TrainingReport", "HopReport", "ShadowReport"])
def test_the_folder_for_tensorboard_may_be_any_path_and_nothing_else(tmp_path, kind):
    report = getattr(recsync.callbacks, kind)
    callback = report(tmp_path)
    callback.on_train_begin()
    callback.on_train_end()
    assert list(tmp_path.iterdir())
    for wrong in (3, ""):
        with pytest.raises(
            ValueError, match=f"log_dir must be the path of a folder, not {wrong!r}"
        ):
            report(log_dir=wrong)


def test_a_report_has_every_field():
    assert {field.name for field in dataclasses.fields(WorkerReport)} == FIELDS - {
        "waiting_seconds"
    }


def state(iteration, declined=(0, 0), **counts):
    """A worker's, with these of its counts."""
    names = ("entered", "used", "jumps", "skipped", "sent", "replaced", "updates", "tokens")
    told = [counts.get(name, 0) for name in (*names, "late", "superseded", "queued", "lost")]
    return State(iteration, "idle", 0.0, (), (), declined, tuple(told))


def test_reports_of_a_worker_go_on_where_they_were_when_it_is_back():
    ring = [[2, 1], [0, 2], [1, 0]]
    reports = Reports(ring)
    reports.update(1, state(7, (3, 4), used=5, sent=9, replaced=1, updates=2_000_000, jumps=1))
    reports.restarted(1)
    assert reports.all()[1].updates_used == 5
    reports.update(1, state(-1))
    report = reports.all()[1]
    assert (report.iteration, report.updates_used, report.jumps) == (7, 5, 1)
    assert report.waited_for_updates == pytest.approx(2.0)
    reports.update(1, state(12, (1, 0), used=2, sent=3, replaced=2, updates=500_000, late=6))
    report = reports.all()[1]
    assert (report.iteration, report.updates_used, report.jumps) == (12, 7, 1)
    assert (report.updates_sent, report.sends_saved) == (12, 3)
    assert report.waited_for_updates == pytest.approx(2.5)
    assert report.stale_updates_dropped == 6
    # What it declined, its senders did not send, before and after.
    assert [reports.all()[sender].sends_saved for sender in (0, 2)] == [3 + 1, 4]
    reports.update(0, state(12, sent=20))
    assert reports.all()[0].updates_sent == 20 - 4
    # A receiver that has told already what the sender will tell.
    reports.update(1, state(13, (2, 0)))
    assert reports.all()[0].updates_sent == 20 - 4
    reports.restore([1, 2, 3])
    assert [report.iteration for report in reports.all()] == [1, 2, 3]


def test_a_training_report_has_the_speed_of_all_workers_and_of_one(cluster):
    model = make_model(recsync.HopStrategy(cluster, topology.ring(WORKERS)))
    report = recsync.callbacks.TrainingReport()
    logs = model.fit(dataset(), epochs=2, callbacks=[report], verbose=0).history
    for of_all, of_one in zip(
        logs["batches_per_second"], logs["global_steps_per_second"], strict=True
    ):
        assert 0 <= of_one < of_all
    # They share no parameters.
    assert logs["staleness"] == logs["staleness_max"] == [0.0, 0.0]
    assert logs["lost_steps"] == [0, 0] and all(0 <= share <= 1 for share in logs["data_wait"])


def test_what_all_strategies_with_copies_report_is_reported_of_exchanges_too(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)
    assert strategy.sync_report(model).syncs == [0] * WORKERS
    logs = model.fit(dataset(), callbacks=[recsync.callbacks.ShadowReport()], verbose=0).history
    report = strategy.sync_report(model)
    # Each step has an exchange of all parameters.
    assert report.syncs == strategy.worker_steps(model)
    assert report.elements == sum(w.size for w in model.get_weights()[:2])
    assert logs["average_sync_gap"] == [1.0] == [strategy.average_sync_gap(model)]
    waits = [r.waited_for_updates + r.waited_for_tokens for r in strategy.hop_report(model)]
    assert report.seconds == waits
    assert report.sync_ps_bytes == 0 and strategy.average_sync_gap(model, "bytes") == float("inf")
    # What has been counted stays when another synchronizer takes its place.
    before = strategy.hop_report(model)
    model.train_function.leave_pass(None)  # As after the loss of a parameter server.
    model.fit(dataset(WORKERS), verbose=0)
    after = strategy.hop_report(model)
    assert sum(r.updates_used for r in after) >= sum(r.updates_used for r in before)
    assert max(r.iteration for r in after) > max(r.iteration for r in before)
    later = strategy.sync_report(model).seconds
    assert all(now >= then for now, then in zip(later, report.seconds, strict=True))


def test_a_callback_that_can_not_report_on_a_strategy_says_which_one_can(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.ModelAveraging(0.5))
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.1), "mse")
    message = "can't report on a ShadowSyncStrategy; use TrainingReport or ShadowReport"
    with pytest.raises(ValueError, match=message):
        model.fit(dataset(), callbacks=[recsync.callbacks.HopReport()], verbose=0)
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    for callback in (recsync.callbacks.HopReport, recsync.callbacks.TrainingReport):
        with pytest.raises(ValueError, match="OneDeviceStrategy; it is none of this package's"):
            callback().set_model(other)
