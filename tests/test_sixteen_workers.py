"""Artificial compute time has sixteen workers on a few cores behave as on sixteen machines."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import compiled, mean_output, slope_model

import tf_recsync as recsync
from tf_recsync.optimizers import SGD

WORKERS = 16
SLOW = range(3, WORKERS, 4)  # One in four, by so much that a busy machine makes no difference.
SLOWER = 20.0
SECONDS = 0.2  # A real step of this model takes a few milliseconds.


@pytest.fixture(scope="module")
def cluster():
    with recsync.LocalCluster(workers=WORKERS, ps=1, processes=0) as cluster:
        yield cluster


def trained(strategy, steps: int, slower: float = SLOWER):
    """A model after so many steps of all workers together."""
    recsync.testing.set_compute_time(strategy, SECONDS, recsync.testing.SlowWorkers(slower, SLOW))
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(steps)
    model.fit(ones, verbose=0)
    return model


def test_asynchronous_gradients_are_as_stale_as_workers_are_many(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = trained(strategy, 10 * WORKERS)
    dense = strategy.staleness(model).dense
    # As many gradients are on their way as there are workers, less those between two calls; while
    # a slow worker is in a step, the others push about twenty times each.
    assert WORKERS / 2 < dense.mean <= WORKERS
    assert dense.max > 2 * WORKERS
    steps = strategy.worker_steps(model)
    assert sum(steps) == 10 * WORKERS
    slow = [steps[worker] for worker in SLOW]
    # Not than each of them: a busy machine slows some, too.
    assert max(slow) < np.mean([steps[worker] for worker in range(WORKERS) if worker not in SLOW])


def test_gba_s_gradients_are_a_few_global_batches_old_and_synchronous_ones_fresh(cluster):
    strategy = recsync.GBAStrategy(cluster, WORKERS, 1, staleness_tolerance=100)
    model = trained(strategy, 10 * WORKERS)
    dense = strategy.staleness(model).dense
    # At most one global batch is on its way, and a slow worker's lasts some.
    assert 1.3 < dense.mean <= 2.5
    assert dense.max >= 3
    report = strategy.aggregation(model)
    assert (report.included, report.excluded, report.late) == (10 * WORKERS, 0, 0)
    assert report.age_max >= 2

    strategy = recsync.SyncStrategy(cluster)
    dense = strategy.staleness(trained(strategy, 2 * WORKERS, slower=4.0)).dense
    assert (dense.mean, dense.max) == (1.0, 1)
