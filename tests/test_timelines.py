"""What workers do when, recorded under every kind of strategy."""

import builtins
import collections
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, events
from tensorboard.plugins.custom_scalar import layout_pb2

import tf_recsync as recsync
from tf_recsync import callbacks
from tf_recsync.ops.events import ACTIVITIES
from tf_recsync.strategies import worker_functions
from tf_recsync.synchronization.events import Recordings

WORKERS, BATCH, WIDTH, BATCHES, SECONDS = 2, 4, 3, 24, 0.02


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, ps=2, processes=0)


def make_model(strategy, steps_per_execution=1):
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(
            recsync.optimizers.SGD(0.1),
            "binary_crossentropy",
            steps_per_execution=steps_per_execution,
        )
    return model


def dataset(batches=BATCHES):
    random = np.random.default_rng(1)
    x = random.normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def recorded(strategy, model, data=None, **options):
    """The events of a call of `fit`, by worker, thread and name, in the order of time."""
    with strategy.record_events(model) as recording:
        model.fit(dataset() if data is None else data, verbose=0, **options)
    found = collections.defaultdict(list)
    for event in sorted(recording.events(), key=lambda event: event.begin):
        found[event.worker, event.thread, event.name].append(event)
    return found, recording


def of_name(found, name):
    return [event for key, own in found.items() if key[2] == name for event in own]


def check_steps(found, first, last, count=BATCHES):
    """Each step's activities follow each other without gaps, and steps without overlaps."""
    assert len(of_name(found, "compute")) == count
    steps = collections.defaultdict(dict)
    for (worker, thread, name), own in found.items():
        for event in own:
            assert event.end >= event.begin
            if name not in ("wait for a batch", "synchronize"):
                steps[worker, thread, event.iteration][name] = event
    for own in steps.values():
        names = sorted(own, key=lambda name: own[name].begin)
        assert names[0] in first and names[-1] in last, names
        for before, after in zip(names, names[1:], strict=False):
            assert own[before].end == own[after].begin
    for worker in {worker for worker, _, _ in steps}:
        iterations = sorted(i for w, _, i in steps if w == worker)
        assert iterations == list(range(len(iterations)))
        computes = [steps[worker, 0, i]["compute"] for i in iterations]
        for before, after in zip(computes, computes[1:], strict=False):
            assert before.end <= after.begin


def test_a_step_of_a_mode_without_tokens_is_pull_compute_and_push(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, SECONDS)
    model = make_model(strategy)
    found, recording = recorded(strategy, model)
    check_steps(found, {"pull"}, {"push"})
    for event in of_name(found, "compute"):
        assert event.end - event.begin >= SECONDS * 1e6
    assert len(of_name(found, "wait for a batch")) == BATCHES and recording.lost == 0
    for worker, own in recording.totals().items():
        of_worker = [e for e in of_name(found, "compute") if e.worker == worker]
        expected = sum(event.end - event.begin for event in of_worker) * 1e-6
        assert own["compute"] == (len(of_worker), pytest.approx(expected))
    # Nobody records: steps note nothing any more.
    before = sum(map(len, found.values()))
    model.fit(dataset(), verbose=0)
    assert len(list(recording.events())) == before


def test_within_a_call_the_next_pull_says_when_a_push_is_applied(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy, steps_per_execution=4)
    found, _ = recorded(strategy, model)
    check_steps(found, {"pull", "push and pull"}, {"push", "compute"})
    # Of four steps one begins with a pull of its own, and one ends with its own push.
    assert len(of_name(found, "push and pull")) == BATCHES * 3 // 4
    assert len(of_name(found, "pull")) == len(of_name(found, "push")) == BATCHES // 4


@pytest.mark.parametrize(
    "make",
    [
        recsync.SyncStrategy,
        lambda cluster: recsync.GBAStrategy(
            cluster, global_batch_size=2 * BATCH, local_batch_size=BATCH, staleness_tolerance=4
        ),
    ],
    ids=["sync", "GBA"],
)
def test_modes_with_tokens_show_the_waits_for_them(cluster, make):
    strategy = make(cluster)
    slow = recsync.testing.SlowWorkers(5.0, [1])
    recsync.testing.set_compute_time(strategy, SECONDS, slow)
    model = make_model(strategy)

    def is_waited_for() -> bool:
        """Whether the fast one spends the slow one's time with its steps."""
        found, recording = recorded(strategy, model)
        check_steps(found, {"wait for tokens"}, {"push"})
        totals = recording.totals()
        waits = [totals[worker]["wait for tokens"].seconds for worker in range(WORKERS)]
        names = ("wait for a batch", "wait for tokens", "pull", "compute", "push")
        spent = sum(totals[0][name].seconds for name in names)
        # But for its first and its last one.
        computes = [event.end - event.begin for event in found[1, 0, "compute"][1:-1]]
        return waits[0] > waits[1] and spent > sum(computes) * 1e-6 > 0

    # On a busy machine one may begin long before the other.
    is_sync = isinstance(strategy, recsync.SyncStrategy)
    assert any(is_waited_for() or not is_sync for _ in range(20))


def test_synchronizations_of_copies_are_recorded_with_their_groups(cluster):
    algorithm = recsync.EASGD(alpha=0.5)
    strategy = recsync.ShadowSyncStrategy(cluster, algorithm, sync_ps=1)
    recsync.testing.set_compute_time(strategy, SECONDS)
    model = make_model(strategy)
    found, _ = recorded(strategy, model)
    assert len(of_name(found, "compute")) == BATCHES
    syncs = collections.Counter(event.worker for event in of_name(found, "synchronize"))
    assert [syncs[worker] for worker in range(WORKERS)] == strategy.sync_report(model).syncs


def test_under_hop_waits_for_batches_stand_beside_what_the_protocol_does(cluster):
    strategy = recsync.HopStrategy(cluster, recsync.topology.ring(WORKERS))
    model = make_model(strategy)
    recorded(strategy, model)
    found, _ = recorded(strategy, model)
    for name in ("compute", "wait for a batch", "wait for updates"):
        assert len(of_name(found, name)) == BATCHES, name
    for worker in range(WORKERS):  # Iterations go on from one pass to the next.
        numbers = [
            [event.iteration for event in found[worker, 0, name]]
            for name in ("compute", "wait for a batch")
        ]
        assert numbers[0] == numbers[1] and min(numbers[0]) > 0


def test_a_recording_that_begins_between_epochs_has_the_next_ones(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    recordings = []

    class FromTheSecondEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                recordings.append(strategy.record_events(model))

    data = dataset(BATCHES).repeat()
    callbacks = [FromTheSecondEpoch()]
    model.fit(data, steps_per_epoch=8, epochs=3, verbose=0, callbacks=callbacks)
    recordings[0].stop()
    computed = [event for event in recordings[0].events() if event.name == "compute"]
    assert len(computed) == 16


def test_nothing_is_missing_of_a_pass_that_ends_early_nor_of_a_model_that_is_compiled(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, SECONDS)
    model = make_model(strategy)
    steps = 0
    with strategy.record_events(model) as recording:
        for fit in range(3):
            if fit == 1:  # Its recording goes on.
                with strategy.scope():
                    model.compile(recsync.optimizers.SGD(0.1), "binary_crossentropy")
            stop = AtBatch(5, lambda: setattr(model, "stop_training", True))
            model.fit(dataset(200), verbose=0, callbacks=[stop] if fit else [])
            steps += sum(strategy.worker_steps(model))
    totals = recording.totals().values()
    assert sum(total["compute"].count for total in totals) == steps > 200


def test_steps_that_are_unrolled_later_note_what_those_before_did(cluster, monkeypatch):
    trace, traced = worker_functions.trace_steps, []

    def trace_steps(model, layout, method, spec, lookups, steps, *arguments):
        traced.append((steps, list(stopped)))
        return trace(model, layout, method, spec, lookups, steps, *arguments)

    monkeypatch.setattr(worker_functions, "trace_steps", trace_steps)
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    run, stopped = [], []

    class StopsInTheFirstEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            run.append(strategy.record_events(model))

        def on_train_batch_end(self, batch, logs=None):
            if len(run) == 1 and batch == 5:
                run[0].stop()
                stopped.append(batch)
                # As if it had taken no time to trace them: it need not pay in this pass.
                self.model.train_function._trace_seconds = 0.0

        def on_epoch_end(self, epoch, logs=None):
            run[-1].stop()

    data = dataset(BATCHES).repeat()
    callbacks = [StopsInTheFirstEpoch()]
    steps = 1500
    model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=callbacks)
    # When nothing was recorded any more.
    assert traced == [(1, []), (worker_functions.MOST_UNROLLED, [5])]
    totals = run[1].totals().values()
    assert sum(total["compute"].count for total in totals) == steps


def test_what_is_no_activity_counts_as_missing():
    recordings = Recordings()
    recording = recordings.record(10, lambda: None)
    told = rows([("compute", 0, 1), ("push", 1, 2), ("pull", 2, 3)])
    told[:2, 0] = -1, len(ACTIVITIES)
    recordings.add(0, told, 4)
    assert [event.name for event in recording.events()] == ["pull"] and recording.lost == 6


def test_a_timeline_is_there_when_validation_has_failed(cluster, tmp_path):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)

    def check(number, batch):
        with tf.control_dependencies([tf.debugging.assert_less(number, tf.constant(3, tf.int64))]):
            return tuple(map(tf.identity, batch))

    timeline = recsync.callbacks.Timeline(tmp_path / "timeline.json")
    report = recsync.callbacks.TrainingReport(str(tmp_path / "logs"), update_freq=6)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(
            dataset(),
            validation_data=dataset().enumerate().map(check),
            verbose=0,
            callbacks=[timeline, report],
        )
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(event["name"] == "compute" for event in trace) == BATCHES
    assert not model.train_function.recordings.are_made
    # Both serve another call of fit.
    model.fit(dataset(), verbose=0, callbacks=[timeline, report])
    model.fit(dataset(), verbose=0, callbacks=[timeline, report])
    speeds = events(tmp_path / "logs")["scalars", "recsync/batches_per_second"]
    assert len(speeds) == 2


def test_a_timeline_refuses_a_folder_that_does_not_exist(cluster, tmp_path):
    model = make_model(recsync.AsyncStrategy(cluster))
    timeline = recsync.callbacks.Timeline(tmp_path / "nowhere" / "timeline.json")
    with pytest.raises(ValueError, match="path=.*nowhere/timeline.json.*there is no folder"):
        model.fit(dataset(), verbose=0, callbacks=[timeline])


def test_a_timeline_has_a_process_for_each_worker_and_rows_for_what_overlaps(cluster, tmp_path):
    strategy = recsync.SyncStrategy(cluster)
    model = make_model(strategy)
    path = tmp_path / "timeline.json"
    model.fit(dataset(), verbose=0, callbacks=[recsync.callbacks.Timeline(path)])
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {"lost_events": 0}
    named = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    processes = [e["args"]["name"] for e in named if e["name"] == "process_name"]
    assert processes == [f"worker {worker}" for worker in range(WORKERS)]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert sorted(rows.values()) == sorted(["step", "data"] * WORKERS)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    by_row = collections.defaultdict(list)
    for event in spans:
        by_row[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert by_row.keys() == rows.keys()
    for (worker, row), times in by_row.items():
        if rows[worker, row] == "step":
            times.sort()
            # A microsecond that a span without a duration is given.
            assert all(b[0] >= a[1] - 1 for a, b in zip(times, times[1:], strict=False))


def rows(activities):
    """Events as a worker tells them: of each the name, the begin and the end in milliseconds."""
    return np.array(
        [
            [ACTIVITIES.index(name), 1000 * begin, 1000 * end, 0, -1]
            for name, begin, end in activities
        ]
    )


def test_a_picture_shows_a_stretch_of_time_with_the_rows_that_have_something_in_it(tmp_path):
    recordings = Recordings()
    recording = recordings.record(100, lambda: None)
    recordings.add(0, rows([("compute", 0, 400), ("push", 400, 500)]), 0)
    recordings.add(1, rows([("wait for tokens", 100, 1900), ("send", 1950, 2000)]), 0)
    recordings.add(1, rows([("compute", 5000, 6000)]), 0, thread=1)
    path = tmp_path / "picture.svg"

    def shown(**stretch):
        recording.plot(path, **stretch)
        # Matplotlib writes each text as a comment above its shapes.
        return set(re.findall(r"<!-- (.*?) -->", path.read_text()))

    first = shown(seconds=1.5)
    assert {"worker 0, step", "worker 1, step", "compute", "push", "wait for tokens"} <= first
    assert not {"worker 1, send", "worker 1, step 1", "send"} & first
    later = shown(begin=1.9, seconds=4.0)
    assert {"worker 1, step", "worker 1, send", "worker 1, step 1", "send", "compute"} <= later
    assert not {"worker 0, step", "push"} & later
    assert "compute" not in shown(begin=100.0)
    with pytest.raises(ValueError, match="begin must be at least 0, in seconds, not -1"):
        recording.plot(path, begin=-1)
    with pytest.raises(ValueError, match="seconds must be positive, in seconds, not 0"):
        recording.plot(path, seconds=0)
    with pytest.raises(ValueError, match="path must be the path of a file, not None"):
        recording.plot(None)
    with pytest.raises(ValueError, match="path must be the path of a file, not 3"):
        recsync.callbacks.Timeline(3)
    with pytest.raises(ValueError, match="limit must be an integer of at least 1, got 0"):
        recsync.callbacks.Timeline(path, limit=0)


def test_the_earlier_name_of_a_timeline_works_with_a_warning(tmp_path):
    with pytest.warns(FutureWarning, match="HopTimeline is called callbacks.Timeline"):
        recsync.callbacks.HopTimeline(tmp_path / "t.json")


def test_a_timeline_needs_a_strategy_of_this_package(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="Timeline can't report on a .*none of this package's"):
        recsync.callbacks.Timeline(tmp_path / "t.json").set_model(model)


# Figures of the last steps.


def test_tensorboard_gets_figures_of_the_last_steps_of_each_worker(cluster, tmp_path):
    strategy = recsync.SyncStrategy(cluster)
    slow = recsync.testing.SlowWorkers(5.0, [1])
    recsync.testing.set_compute_time(strategy, SECONDS, slow)
    model = make_model(strategy)
    report = recsync.callbacks.TrainingReport(str(tmp_path), update_freq=6)
    model.fit(dataset(), epochs=2, verbose=0, callbacks=[report])
    found = events(tmp_path)
    tags = {tag for plugin, tag in found if plugin == "scalars"}
    by_worker = {"examples_per_second", "computing", "waiting_for_data"}
    by_worker |= {"waiting_for_tokens", "waiting_for_servers"}
    expected = {f"{name}/worker_{worker}" for name in by_worker for worker in range(WORKERS)}
    expected |= {f"staleness/{name}" for name in ("mean", "p99", "max")}
    expected |= {f"server_bytes/{job}_{i}" for job in ("ps", "worker") for i in range(2)}
    assert expected <= tags and "waiting_for_neighbors/worker_0" not in tags
    assert "losses/workers" in tags and "recsync/staleness" in tags
    # 48 batches; one may end while another is written, and many at once on a busy machine.
    points = len(found["scalars", "computing/worker_0"])
    assert 2 <= points <= 2 * BATCHES // 6
    shares = ("computing", "waiting_for_data", "waiting_for_tokens", "waiting_for_servers")
    for worker in range(WORKERS):
        for point in range(points):
            own = [found["scalars", f"{name}/worker_{worker}"][point] for name in shares]
            assert sum(own) == pytest.approx(1.0, abs=1e-5) or sum(own) == 0
    mean = {
        name: [np.mean(found["scalars", f"{name}/worker_{worker}"]) for worker in range(WORKERS)]
        for name in ("computing", "waiting_for_tokens", "examples_per_second")
    }
    # The fast one waits for the slow one.
    assert mean["waiting_for_tokens"][0] > mean["waiting_for_tokens"][1]
    assert mean["computing"][1] > mean["computing"][0]
    assert 0 < mean["examples_per_second"][0] <= BATCH / SECONDS
    (layout,) = (tag for plugin, tag in found if plugin == "custom_scalars")
    charts = layout_pb2.Layout.FromString(found["custom_scalars", layout][0].item()).category
    patterns = [tag for group in charts for chart in group.chart for tag in chart.multiline.tag]
    assert all(any(re.search(pattern, tag) for pattern in patterns) for tag in expected)
    # Nobody records any more.
    assert not model.train_function.recordings.are_made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"update_freq": 5}, "update_freq=5 needs a log_dir"),
        ({"update_freq": "batch", "log_dir": "logs"}, "must be \"epoch\" or an int, not 'batch'"),
        ({"update_freq": 0, "log_dir": "logs"}, "update_freq must be an integer of at least 1"),
    ],
)
def test_a_wrong_update_freq_is_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        recsync.callbacks.TrainingReport(**arguments)


def test_a_folder_for_tensorboard_needs_its_package(tmp_path, monkeypatch):
    make = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "tensorboard":
            raise ImportError(name)
        return make(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for report in (callbacks.TrainingReport, callbacks.HopReport, callbacks.ShadowReport):
        report()
        message = rf"{report.__name__} needs .* pip install 'tf_recsync\[tensorboard\]'"
        with pytest.raises(ImportError, match=message):
            report(tmp_path)
