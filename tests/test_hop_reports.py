"""What decentralized training tells of itself: recordings, timelines, reports."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.ops import hop
from tf_recsync.synchronization.hop_events import EventLog

WORKERS, BATCH, WIDTH = 4, 4, 3


@pytest.fixture(scope="module")
def cluster():
    with recsync.LocalCluster(workers=WORKERS, processes=0) as cluster:
        cluster.connect()
        yield cluster


def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


def dataset(batches=40):
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
    log = EventLog()
    recording = log.record(5, lambda: None)
    log.add(0, rows(0, 3), 0)
    log.add(1, rows(3, 4), 2)
    assert [event[4] for event in recording.events()] == [2, 3, 4, 5, 6]
    assert [event[0] for event in recording.events()] == [0, 1, 1, 1, 1]
    assert recording.lost == 2 + 2
    log.add(0, rows(7, 9), 0)  # More at once than are kept.
    assert [event[4] for event in recording.events()] == [11, 12, 13, 14, 15]
    assert recording.lost == 4 + 9


def test_events_that_workers_lost_count_from_when_it_began_and_go_on_when_one_is_back():
    log = EventLog()
    log.add(0, rows(0, 3), 7)
    recording = log.record(50, lambda: None)
    log.add(0, rows(3, 1), 9)
    assert recording.lost == 2
    log.restarted(0)
    log.add(0, rows(0, 1), 1)
    assert recording.lost == 3
    recording.stop()
    log.add(0, rows(1, 1), 100)
    assert recording.lost == 3 and len(list(recording.events())) == 2


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
    computed = [event for event in whole.events() if hop.SPANS[event[1]] == "compute"]
    assert len(computed) == 40
    assert whole.lost == 0
    assert list(limited.events()) == list(whole.events())[-25:]
    assert limited.lost == count - 25
    model.fit(dataset(), verbose=0)
    assert len(list(whole.events())) == count
    with pytest.raises(ValueError, match="limit must be an int of at least 1, not 0"):
        strategy.record_events(model, 0)


def test_a_timeline_says_how_much_of_it_is_missing(cluster, tmp_path, caplog):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)
    paths = tmp_path / "whole.json", tmp_path / "part.json"
    timelines = [
        recsync.callbacks.HopTimeline(strategy, paths[0]),
        recsync.callbacks.HopTimeline(strategy, paths[1], limit=30),
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
    assert threads == ["step", "send", "receive"] * WORKERS


def test_a_timeline_is_there_when_training_has_failed(cluster, tmp_path):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)

    def fail():
        model.train_function.group.fail(RuntimeError("a bug"))

    timeline = recsync.callbacks.HopTimeline(strategy, tmp_path / "t.json")
    with pytest.raises(RuntimeError, match="a bug"):
        model.fit(dataset(4000), verbose=0, callbacks=[AtBatch(20, fail), timeline])
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["name"] == "compute" for event in trace) >= 20
    # The next one is about the next training alone.
    model.fit(dataset(), verbose=0, callbacks=[timeline])
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["name"] == "compute" for event in trace) == 40
