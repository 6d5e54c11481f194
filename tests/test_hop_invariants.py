"""The bounds of decentralized training, checked while it runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.synchronization.hop_invariants import Invariants
from tf_recsync.synchronization.hop_reports import State

WORKERS, BATCH, GAP = 4, 4, 3


def states(iterations, tokens=None):
    """Of workers in these iterations; by default with all tokens that there can be."""
    found = {}
    for worker, iteration in enumerate(iterations):
        own = None if tokens is None else tokens.get(worker)
        if own is None:
            neighbors = topology.ring(WORKERS).out_neighbors(worker)
            own = [max(iterations[n], 0) - max(iteration, 0) + GAP for n in neighbors]
        found[worker] = State(iteration, "computing", 0.0, (), tuple(own), (0, 0), (0,) * 12)
    return found


def violation(before, after, first=0, gap=GAP, **mode):
    ring = topology.ring(WORKERS)
    bounds = topology.gap_bounds(ring, gap, **mode)
    return Invariants(ring, bounds, gap).violation(before, after, first)


def test_what_the_protocol_allows_is_no_violation():
    # A ring of four: neighbors are one apart at most, the other one two.
    for iterations in ([0, 0, 0, 0], [6, 7, 8, 7], [2, 1, 0, 1], [-1, 0, -1, -1]):
        assert violation(states(iterations), states(iterations)) is None
        fewer = {worker: [0, 0] for worker in range(WORKERS)}  # The others are on their way.
        assert violation(states(iterations, fewer), states(iterations)) is None
    # Who was asked later may be as far as he likes.
    assert violation(states([6, 7, 8, 7]), states([60, 70, 80, 70])) is None


def test_workers_that_are_too_far_apart_are_named():
    found = violation(states([6, 8, 8, 7]), states([6, 8, 8, 7]))
    assert found == "worker 1 is in iteration 8 and worker 0 in 6: further apart than 1"
    assert violation(states([6, 8, 8, 7]), states([6, 8, 8, 7]), backup_workers=1) is None
    # One that has not begun with the epoch is as good as in its first iteration.
    assert violation(states([-1, 6, 5, 6], {0: [0, 0]}), states([-1, 6, 5, 6]), first=5) is None
    assert "worker 1 is in iteration 7 and worker 0 in -1" in violation(
        states([-1, 7, 6, 6]), states([-1, 7, 6, 6]), first=5
    )


def test_a_token_too_many_is_named():
    now = [6, 7, 7, 6]
    # Of worker 1's out-neighbors, 0 and 2, one is behind: 3 - 1 tokens, and 3.
    for tokens in ([2, 3], [1, 3], [2, 0]):
        assert violation(states(now, {1: tokens}), states(now)) is None
    found = violation(states(now, {1: [3, 3]}), states(now))
    assert found == ("worker 1 in iteration 7 has 3 tokens of worker 0, which is in 6: more than 2")
    assert "has 4 tokens of worker 2" in violation(states(now, {1: [2, 4]}), states(now))
    without = violation(states(now, {1: [9, 9]}), states(now), gap=None)
    assert without is None
    # One that does not answer is not compared with.
    after = states(now)
    del after[0]
    assert violation(states(now, {1: [9, 3]}), after) is None


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, processes=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bounds", np.zeros((WORKERS, WORKERS)), "further apart than 0, which is a bug"),
        ("max_iteration_gap", 0, "has . tokens of worker .*, which is a bug"),
        (None, None, None),
    ],
)
def test_training_ends_with_an_error_where_a_bound_does_not_hold(
    cluster, monkeypatch, name, value, message
):
    strategy = recsync.HopStrategy(
        cluster,
        topology.ring(WORKERS),
        max_iteration_gap=GAP,
        backup_workers=1,
        check_invariants=True,
    )
    slow = recsync.testing.SlowWorkers(4.0, [1])
    recsync.testing.set_compute_time(strategy, 0.03, slow)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    strategy.attach(model)
    if name is not None:
        (exchange,) = model.train_function.ensure_synchronizer().exchanges
        monkeypatch.setattr(exchange._invariants, name, value)
    random = np.random.default_rng(1)
    # If nobody notices, training ends.
    x = random.normal(size=(400 * BATCH, 2)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH)
    if message is None:
        model.fit(dataset.take(32), verbose=0)
        return
    with pytest.raises(RuntimeError, match=message):
        model.fit(dataset, verbose=0)
