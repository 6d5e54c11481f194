"""When ShadowSync synchronizes, and what that costs: intervals, rates, slow sync PSs, threads."""

import contextlib
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import wait_until

import tf_recsync as recsync
from tf_recsync.synchronization import shadow
from tf_recsync.synchronization.arrangement import hierarchical
from tf_recsync.synchronization.loops import RETRY_SECONDS
from tf_recsync.synchronization.shadow_trainers import Trainers

TRAINERS, BATCH, WIDTH = 2, 4, 3
NEVER = recsync.Foreground(gap=1_000_000)


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=TRAINERS, ps=1)


def train(strategy, steps=40, seconds=0.1, optimizer=recsync.optimizers.SGD, callbacks=()):
    """Trains the weights of a sum: each of their gradients is exactly 1 in every step."""
    recsync.testing.set_compute_time(strategy, seconds)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer(0.01), lambda y, p: p)
    ones = tf.data.Dataset.from_tensors((tf.ones([BATCH, WIDTH]), tf.ones([BATCH, 1])))
    model.fit(ones.repeat(steps), verbose=0, callbacks=list(callbacks))
    return model, strategy.sync_report(model)


class StopWhen(keras.callbacks.Callback):
    """Ends training when `condition(report)` holds."""

    def __init__(self, strategy, condition):
        super().__init__()
        self._strategy = strategy
        self._condition = condition
        self.has_held = False

    def on_train_batch_end(self, batch, logs=None):
        if self._condition(self._strategy.sync_report(self.model)):
            self.has_held = self.model.stop_training = True


@pytest.mark.cases("0.5")
@pytest.mark.parametrize("interval", [0.5, 0.03])
def test_a_smallest_interval_is_kept_between_synchronizations(cluster, interval):
    def at_most(report):
        return report.trained_seconds / interval + 1

    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.3), mode=recsync.Shadow(interval)
    )
    # Until each trainer has waited for an interval, and so for two seconds at least.
    stop = StopWhen(strategy, lambda r: min(r.syncs) >= 2 and r.trained_seconds > 2.0)
    _, report = train(strategy, steps=2000, callbacks=[stop])
    assert min(report.syncs) >= 2
    assert max(report.syncs) <= at_most(report)
    if interval < 0.1:
        return  # On a busy machine there may be fewer without one, too.
    # Without one there are more: each takes a few milliseconds.
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    stop = StopWhen(strategy, lambda report: min(report.syncs) > at_most(report))
    train(strategy, steps=2000, callbacks=[stop])
    assert stop.has_held


def test_a_call_synchronizes_again_and_again_and_each_time_counts(cluster, monkeypatch):
    sync, done = Trainers.sync, []

    def counted(trainers, members, shard, turns=None):
        done.append(sync(trainers, members, shard, turns))
        return done[-1]

    monkeypatch.setattr(Trainers, "sync", counted)
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    stop = StopWhen(strategy, lambda r: min(r.syncs) > 20 and max(t for t, _ in done) > 2)
    _, report = train(strategy, steps=4000, seconds=0.02, callbacks=[stop])
    assert stop.has_held
    assert sum(report.syncs) == sum(times for times, _ in done)
    assert sum(report.seconds) == pytest.approx(sum(seconds for _, seconds in done))
    # There and back, as the sync PS has counted.
    assert report.sync_ps_bytes == sum(report.syncs) * 2 * 4 * WIDTH


@pytest.mark.parametrize(
    "algorithm", [recsync.EASGD(0.3), recsync.ModelAveraging(0.3)], ids=["EASGD", "MA"]
)
def test_a_rate_is_that_of_each_trainer(cluster, algorithm):
    strategy = recsync.ShadowSyncStrategy(
        cluster, algorithm, mode=recsync.Foreground(per_minute=120)
    )

    def due(report):
        return report.trained_seconds / 0.5

    # A machine that stands still for a while has them come later, and none are made up for.
    stop = StopWhen(strategy, lambda r: due(r) >= 5 and min(r.syncs) >= due(r) / 2 - 1)
    _, report = train(strategy, steps=2000, callbacks=[stop])
    assert stop.has_held
    assert max(report.syncs) <= due(report) + 1


@pytest.mark.full
def test_slow_sync_servers_hold_up_training_in_the_foreground_only(cluster):
    seconds = 0.4  # Of an exchange, on the one link that all of them pass.
    steps, computing = 60, 0.04
    ones = tf.data.Dataset.from_tensors((tf.ones([BATCH, WIDTH]), tf.ones([BATCH, 1])))
    least = {}  # Seconds of a step, in the fit that was the quickest.
    for name, mode in (("foreground", recsync.Foreground(gap=5)), ("shadow", "shadow")):
        strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), mode=mode)
        recsync.testing.set_bandwidth(strategy, 8 * WIDTH / seconds, strategy.sync_ps)
        model, report = train(strategy, steps, computing)
        least[name] = report.trained_seconds / steps
        if name == "foreground":
            # Every five of the steps of each trainer; four of each may be left.
            assert (steps - 2 * 4) / 5 <= sum(report.syncs) <= steps / 5
        else:  # On a busy machine the first ones may be late, and slow.
            while sum(report.syncs) < 2 or least[name] >= 0.75 * least["foreground"]:
                before = report.trained_seconds
                model.fit(ones.repeat(steps), verbose=0)
                report = strategy.sync_report(model)
                least[name] = min(least[name], (report.trained_seconds - before) / steps)
        assert sum(report.syncs) <= report.trained_seconds / seconds + 1


def test_trainers_that_average_pass_their_links_twice(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.ModelAveraging(0.3))
    with pytest.raises(ValueError, match=r"job must be one of \('ps', 'worker'\) for ShadowSync"):
        recsync.testing.set_bandwidth(strategy, 1e6, job="chief")
    # Each of two sends half the parameters, and then the other's mean of them, and gets as much.
    seconds = 0.4
    bytes_ = 2 * 4 * WIDTH
    recsync.testing.set_bandwidth(strategy, bytes_ / seconds, job="worker")
    stop = StopWhen(strategy, lambda report: min(report.syncs) >= 1)
    _, report = train(strategy, steps=2000, callbacks=[stop])
    assert min(report.syncs) == max(report.syncs) >= 1
    assert max(report.syncs) <= report.trained_seconds / seconds + 1


@pytest.mark.full
def test_examples_per_second_are_those_of_all_trainers(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    model, report = train(strategy, 40, 0.02)
    assert report.examples_per_second == pytest.approx(40 * BATCH / report.trained_seconds)
    # A step takes 0.02 s and more.
    assert report.examples_per_second < TRAINERS * BATCH / 0.02
    history = model.fit(
        tf.ones([80, WIDTH]),
        tf.ones([80, 1]),
        batch_size=8,
        verbose=0,
        callbacks=[recsync.callbacks.ShadowReport()],
    ).history
    (eps,), (steps,) = history["examples_per_second"], history["batches_per_second"]
    assert eps == pytest.approx(8 * steps, rel=0.01)


def test_threads_share_the_optimizers_state(cluster):
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.3), mode=NEVER, threads_per_trainer=4
    )
    model, report = train(strategy, 200, 0.005, recsync.optimizers.Adagrad)
    (state,) = model.optimizer.states
    group = model.train_function.synchronizer
    copies = {worker: group.copies.values(worker) for worker in range(TRAINERS)}
    place = {id(variable): i for i, variable in enumerate(group.copies.variables)}
    sums, versions = (
        [copies[worker][place[id(variable._value)]] for worker in range(TRAINERS)]
        for variable in (state.accumulators[0], state.versions)
    )
    assert np.sum(versions) == report.steps == 200
    start = model.optimizer.initial_accumulator_value
    for accumulated, version in zip(sums, versions, strict=True):
        # A squared gradient of 1 for each update; one in a while may be lost in a race.
        assert accumulated.max() <= start + version + 1e-3
        assert accumulated.min() >= start + 0.9 * version


class PlayedTrainers:
    """Two groups on no servers: their synchronizations are noted, and take a moment."""

    shards, elements = [0], WIDTH

    def __init__(self, *arguments):
        self.there, self.synced = [0, 1], []

    def begin(self):
        pass

    def open(self, group):
        return True

    def sync(self, members, shard, turns):
        self.synced += members
        time.sleep(0.01)
        return 1, 0.01

    def sync_ps_bytes(self):
        return 0


@pytest.fixture
def loops(monkeypatch):
    """What synchronizes two groups of a trainer and a server each, and has begun to."""
    monkeypatch.setattr(shadow, "Trainers", PlayedTrainers)
    synchronizer = shadow.ShadowSynchronizer(
        recsync.EASGD(0.3),
        recsync.Shadow(),
        types.SimpleNamespace(dispatch_scope=contextlib.nullcontext),
        hierarchical(2, 1, 1, workers=2, ps=3, sync_ps=1),
        types.SimpleNamespace(there=[0, 1], is_of_earlier_life=lambda group: False),
        1,
        [],
        1,
        dict,
    )
    synchronizer.begin()
    synchronizer.carry_on()
    synced = synchronizer._trainers.synced
    assert wait_until(lambda: {*synced} == {0, 1}, 60)
    yield synchronizer
    synchronizer.end()


def test_the_loop_of_a_group_without_trainers_rests_until_one_is_back(loops, monkeypatch):
    trains, turns = shadow.ShadowSynchronizer._trains, []

    def counted(synchronizer, group):
        turns.append(group)
        return trains(synchronizer, group)

    monkeypatch.setattr(shadow.ShadowSynchronizer, "_trains", counted)
    loops.lose(1)
    began, first = time.monotonic(), turns.count(1)
    time.sleep(1.0)
    # It looks again after each rest; one turn may have begun before.
    most = (time.monotonic() - began) / RETRY_SECONDS + 2
    assert turns.count(1) - first <= most
    synced = loops._trainers.synced
    before = synced.count(1)
    loops.open(1)
    assert wait_until(lambda: synced.count(1) > before, 60)


def test_synchronization_goes_on_when_threads_that_all_had_nothing_to_do_train_again(loops):
    synced = loops._trainers.synced
    for thread in range(2):
        loops.leave(thread)
    before = len(synced)
    loops.carry_on()  # As when one of them begins a call,
    time.sleep(0.5)
    assert len(synced) <= before + 2  # Those that were about to begin when the last one left.
    before = len(synced)
    with loops.training(0):  # and before its first step.
        assert wait_until(lambda: len(synced) > before + 2, 60)
