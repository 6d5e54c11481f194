"""Decentralized training with a slow worker, which each mode tolerates in its way."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import topology

WORKERS, BATCH, WIDTH = 4, 4, 3
SLOW, SECONDS = 2, 0.02


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, processes=0)


def dataset(batches):
    random = np.random.default_rng(1)
    x = random.normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def entries(recording):
    """When each worker entered which iteration, in microseconds."""
    entered = collections.defaultdict(list)
    for event in recording.events():
        if event.name == "compute":
            entered[event.worker].append((event.begin, event.iteration))
    return entered


def slow_one_down(strategy, model):
    """Steps of 0.02 s, but of one worker six times that or five iterations of the others.

    On a busy machine all take long; a slow worker is one that takes longer than the others.

    Returns:
        How many times that.
    """
    recsync.testing.set_compute_time(strategy, SECONDS)
    with strategy.record_events(model) as recording:
        model.fit(dataset(5 * WORKERS), verbose=0)
    begins = [np.diff([begin for begin, _ in times]) for times in entries(recording).values()]
    iteration = np.median(np.concatenate(begins)) / 1e6
    multiple = max(6.0, 5 * iteration / SECONDS)
    slow_down(strategy, multiple)
    return multiple


def slow_down(strategy, multiple):
    """Steps of 0.02 s, but of one worker so many times that."""
    slow = recsync.testing.SlowWorkers(multiple, [SLOW])
    recsync.testing.set_compute_time(strategy, SECONDS, slow)


def largest_gaps(recording):
    """How far each worker was ahead of the slow one at most, while all were there."""
    entered = entries(recording)
    assert len(entered) == WORKERS
    # All clocks are this machine's. A worker leaves after it has entered its last iteration.
    until = min(max(begins) for begins in entered.values())[0]
    gaps = np.zeros(WORKERS)
    for worker, begins in entered.items():
        for begin, iteration in begins:
            passed = [i for at, i in entered[SLOW] if at <= begin]
            if passed and begin <= until:
                gaps[worker] = max(gaps[worker], iteration - max(passed))
    return gaps


@pytest.mark.cases("skip with staleness", "serial backup")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_iteration_gap": 4, "backup_workers": 1}, {"saved", "gap"}),
        ({"max_iteration_gap": 4, "staleness_bound": 3}, {"gap"}),
        ({"max_iteration_gap": 4, "staleness_bound": 2, "backup_workers": 1}, {"gap"}),
        (
            {"max_iteration_gap": 4, "backup_workers": 1, "skip": recsync.Skip(10)},
            {"jumps", "saved"},
        ),
        (
            {"max_iteration_gap": 5, "staleness_bound": 4, "skip": recsync.Skip(3, trigger=2)},
            {"jumps"},
        ),
        ({"max_iteration_gap": 4, "backup_workers": [1] * WORKERS, "order": "serial"}, {"gap"}),
    ],
    ids=["backup", "staleness", "hybrid", "skip", "skip with staleness", "serial backup"],
)
def test_a_slow_worker_is_tolerated_as_the_mode_says(cluster, options, expected):
    # In a ring one worker is no neighbor of the slow one: bounds along two edges count, too.
    strategy = recsync.HopStrategy(
        cluster, topology.ring(WORKERS), check_invariants=True, **options
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((WIDTH,)),
                keras.layers.Dense(4, "relu"),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "binary_crossentropy", steps_per_execution=2)
    multiple = slow_one_down(strategy, model)
    standard = topology.gap_bounds(strategy.topology, 4)[:, SLOW]
    bounds = topology.gap_bounds(
        strategy.topology,
        4,
        backup_workers=options.get("backup_workers", 0),
        staleness_bound=options.get("staleness_bound"),
    )
    seen, jumps = set(), [0] * WORKERS
    while not expected <= seen:
        # The slow one takes some ten steps, in each of which the others get as far as they may.
        with strategy.record_events(model) as recording:
            history = model.fit(dataset(12 * WORKERS), verbose=0).history
        assert np.isfinite(history["loss"][0])
        reports = strategy.hop_report(model)
        assert all(report.updates_used > 0 for report in reports)
        if "gap" in expected:
            # Further than in standard training, and not further than this mode allows.
            gaps = largest_gaps(recording)
            assert (gaps <= bounds[:, SLOW]).all()
            seen |= {"gap"} if max(gaps) > standard.max() else set()
        before, jumps = jumps, [report.jumps for report in reports]
        if "jumps" in expected:
            assert reports[SLOW].iterations_skipped >= jumps[SLOW]
            # Others may fall behind on a busy machine, but not as often.
            now = [after - then for after, then in zip(jumps, before, strict=True)]
            seen |= {"jumps"} if 0 < now[SLOW] == max(now) else set()
        else:
            assert jumps == [0] * WORKERS
        if sum(r.sends_saved + r.stale_updates_dropped for r in reports) > 0:
            seen.add("saved")
        # If something kept the others from getting that far, the slow one is slower still.
        multiple *= 2
        slow_down(strategy, multiple)
