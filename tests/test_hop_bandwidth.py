"""Artificial bandwidth on the edges of decentralized training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import topology

WORKERS, UNITS = 4, 5000
BYTES = 4 * UNITS  # Of an update.


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, processes=0)


def recorded(strategy, batches):
    """What workers do in an epoch: (worker, span, begin, end, iteration, neighbor), in seconds."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(UNITS, use_bias=False)])
        model.compile("sgd", "mse")
    x, y = np.ones((batches, 1), np.float32), np.ones((batches, UNITS), np.float32)
    with strategy.record_events(model) as recording:
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(1), verbose=0)
    return [
        (e.worker, e.name, e.begin * 1e-6, e.end * 1e-6, e.iteration, e.neighbor)
        for e in recording.events()
    ]


def sends(events):
    """The seconds that each update took from a worker to a neighbor."""
    return [
        (worker, neighbor, end - begin)
        for worker, span, begin, end, _, neighbor in events
        if span == "send"
    ]


def test_an_update_takes_its_bytes_over_the_bandwidth_of_both_ends(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    recsync.testing.set_bandwidth(strategy, 500e3)
    events = recorded(strategy, 8 * WORKERS)
    found = sends(events)
    # Two neighbors of each, in some iterations.
    assert {(i, j) for i, j, _ in found} == set(topology.ring(WORKERS).edges)
    assert min(seconds for _, _, seconds in found) >= 2 * BYTES / 500e3
    # A link carries one message after the other: two in and two out in each iteration.
    for worker in range(WORKERS):
        spans = [
            (begin, end)
            for sender, span, begin, end, _, neighbor in events
            if span == "send" and worker in (sender, neighbor)
        ]
        first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
        assert last - first >= len(spans) * BYTES / 500e3


def test_only_the_links_named_are_limited(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    recsync.testing.set_bandwidth(strategy, 500e3, servers=[1])
    # Enough batches that none is without: workers that begin early take some ahead.
    found = sends(recorded(strategy, 16 * WORKERS))
    limited = [seconds for i, j, seconds in found if 1 in (i, j)]
    others = [seconds for i, j, seconds in found if 1 not in (i, j)]
    assert min(limited) >= BYTES / 500e3
    # Of an unlimited update some took less, on however busy a machine.
    assert min(others) < BYTES / 500e3


@pytest.mark.full
def test_a_slow_link_of_a_receiver_does_not_slow_the_sender_with_backup_workers(cluster):
    edges = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (2, 0)]
    # Worker 1 wants all updates, and gets them from worker 0 alone. The others wait for each
    # other, and not for worker 1.
    strategy = recsync.HopStrategy(
        cluster,
        topology.from_edges(WORKERS, edges),
        max_iteration_gap=60,
        backup_workers=[1, 0, 1, 0],
    )
    recsync.testing.set_bandwidth(strategy, BYTES / 3.0, servers=[1])  # 3 s for an update.
    recsync.testing.set_compute_time(strategy, 0.02)
    events = recorded(strategy, 8 * WORKERS)
    entered = [begin for worker, span, begin, *_ in events if (worker, span) == (0, "compute")]
    sending = [
        (begin, end)
        for worker, span, begin, end, _, neighbor in events
        if (worker, span, neighbor) == (0, "send", 1)
    ]
    assert min(end - begin for begin, end in sending) >= 3.0
    # A sender that waited for its update to arrive would enter no other iteration meanwhile.
    assert max(sum(begin < at < end for at in entered) for begin, end in sending) >= 2
