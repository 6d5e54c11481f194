"""What a strategy says of how long its workers have waited for data."""

import time

import keras
import pytest
import tensorflow as tf
from helpers import mean_output, slope_model, slow_batches

import tf_recsync as recsync

WORKERS = 2
BATCHES = 8
SECONDS = 0.3  # That making a batch takes, far more than computing on it does.
COMPUTING = 0.1

STRATEGIES = {
    "async": lambda cluster: recsync.AsyncStrategy(cluster),
    "GBA": lambda cluster: recsync.GBAStrategy(
        cluster, global_batch_size=2, local_batch_size=1, staleness_tolerance=4
    ),
    "Hop": lambda cluster: recsync.HopStrategy(
        cluster,
        recsync.topology.complete(WORKERS),
        max_iteration_gap=BATCHES,
        staleness_bound=BATCHES,
    ),
    "ShadowSync": lambda cluster: recsync.ShadowSyncStrategy(
        cluster,
        recsync.EASGD(0.5),
        mode=recsync.Foreground(gap=4),
        threads_per_trainer=2,
        sync_ps=[1],
    ),
}


@pytest.fixture(scope="module")
def cluster():
    with recsync.LocalCluster(workers=WORKERS, ps=2, processes=0) as cluster:
        cluster.connect()
        yield cluster


def compiled(strategy, steps_per_execution):
    with strategy.scope():
        model = slope_model()
        optimizers = keras.optimizers if is_hop(strategy) else recsync.optimizers
        model.compile(optimizers.SGD(0.1), mean_output, steps_per_execution=steps_per_execution)
    return model


def is_hop(strategy):
    return isinstance(strategy, recsync.HopStrategy)


def report_of(strategy):
    callbacks = recsync.callbacks
    return (callbacks.HopReport if is_hop(strategy) else callbacks.TrainingReport)(strategy)


@pytest.mark.cases("GBA-2", "Hop-1")
@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_workers_wait_as_long_as_their_data_take(cluster, name, steps_per_execution):
    strategy = STRATEGIES[name](cluster)
    recsync.testing.set_compute_time(strategy, COMPUTING)
    model = compiled(strategy, steps_per_execution)
    assert strategy.data_wait(model) == [0.0] * WORKERS
    fit = dict(verbose=0, callbacks=[report_of(strategy)])
    # Each worker does half of the steps, while all batches are made: it waits nearly all the time.
    began = time.monotonic()
    history = model.fit(slow_batches(BATCHES, SECONDS), epochs=2, **fit).history
    seconds = time.monotonic() - began
    waits = strategy.data_wait(model)
    assert all(0.4 * 2 * BATCHES * SECONDS < wait < seconds for wait in waits), (waits, seconds)
    # In the first epoch, steps are traced, too.
    assert all(0 < share <= 1 for share in history["data_wait"]), history
    assert history["data_wait"][1] > 0.3, history
    # Those that take no time are there long before a step is done, but the first ones, and those
    # that a busy machine makes late: so of some fits, one.
    for _ in range(20):
        began, before = time.monotonic(), strategy.data_wait(model)
        history = model.fit(slow_batches(8 * BATCHES, 0.0), **fit).history
        seconds = time.monotonic() - began
        # It is kept from one call of fit to the next.
        more = [a - b for a, b in zip(strategy.data_wait(model), before, strict=True)]
        assert min(more) >= 0
        if history["data_wait"][0] < 0.3 and max(more) < 0.3 * seconds:
            break
    assert history["data_wait"][0] < 0.3, history
    assert max(more) < 0.3 * seconds, (more, seconds)


def test_what_servers_take_is_no_wait_for_data(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope():
        dense = keras.layers.Dense(1000, use_bias=False)
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(recsync.optimizers.SGD(0.1), mean_output, steps_per_execution=4)
    # A push or a pull takes a tenth of a second.
    recsync.testing.set_bandwidth(strategy, 40_000)
    data = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1000]))).repeat(2 * BATCHES)
    try:
        for _ in range(20):  # A busy machine may make batches late.
            history = model.fit(data, verbose=0, callbacks=[report_of(strategy)]).history
            assert history["batches_per_second"][0] < 20
            if history["data_wait"][0] < 0.3:
                break
    finally:
        recsync.testing.set_bandwidth(strategy, None)
    assert history["data_wait"][0] < 0.3, history
