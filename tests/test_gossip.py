"""A synchronizer that is not the package's, against the interface of all synchronizers: gossip.

Random pairs of workers take the mean of their copies, beside training. A pair has the same sum
before and after, so that the mean of all copies is that of training without gossip.
"""

import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, slope_model

import tf_recsync as recsync
from tf_recsync.modes import Hogwild
from tf_recsync.strategies.between_groups import Between
from tf_recsync.strategies.synchronized_strategy import SynchronizedStrategy
from tf_recsync.synchronization.arrangement import each_worker
from tf_recsync.synchronization.loops import JOIN_SECONDS, Loops
from tf_recsync.synchronization.remote_values import at
from tf_recsync.synchronization.synchronizer import Synchronizer

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

WORKERS = 3
RATE = 0.5


class Gossip(Synchronizer):
    """Random pairs of workers take the mean of their copies, one pair after the other."""

    def __init__(self, cluster, arrangement, copies):
        super().__init__(arrangement, copies)
        self.pairs: set[tuple[int, int]] = set()
        self._cluster = cluster
        self._random = random.Random(5)
        self._loops = Loops("gossip", cluster, lambda error: self.fail(error))

    def begin(self):
        super().begin()
        self._loops.begin()

    def carry_on(self):
        self._loops.start((0,), self._gossip)

    def end(self):
        self.release()
        self._loops.join(time.monotonic() + JOIN_SECONDS)

    def release(self):
        self._loops.end()

    def pause(self):
        return self._loops.pause()

    def waits_for(self, seconds):
        return self._loops.waits_for(seconds)

    def _gossip(self):
        while not self._loops.wait(lambda: not self._loops.goes_on((0,)), 0.01):
            there = self.there
            if len(there) < 2:
                continue
            one, other = self._random.sample(there, 2)
            try:
                with self._loops.call([("worker", one), ("worker", other)], (0,)):
                    self._average(one, other)
                self._counts.count_sync((one, other), 0.0)
                self.pairs.add((one, other))
            except tf.errors.OpError:
                self._loops.rest()  # Its own thread finds out who is gone.

    def _average(self, one, other):
        """Moves both to the middle; what they learn meanwhile stays."""
        mine, others = self.copies.of(one) or [], self.copies.of(other) or []
        with at(self._cluster, one):
            for a, b in zip(mine, others, strict=False):
                if a.dtype.is_floating:
                    half = (b.read_value() - a.read_value()) / 2
                    a.assign_add(half, read_value=False)
                    b.assign_sub(half, read_value=False)


class ByGossip(Between):
    algorithm = None

    def synchronizer(self, model, copies, settings, threads):
        return Gossip(settings.cluster, settings.arrangement, copies)


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=WORKERS, ps=0)


def make_model(cluster):
    """(strategy, model) of a model whose gradient is 1 for each batch of ones."""
    strategy = SynchronizedStrategy(
        cluster,
        each_worker(WORKERS),
        Hogwild().on(1),
        ByGossip(),
        1,
        "mean",
        1,
        600.0,
        None,
        "drop",
    )
    recsync.testing.set_compute_time(strategy, 0.02, recsync.testing.SlowWorkers(8.0, [2]))
    with strategy.scope():
        model = slope_model()
        model.compile(recsync.optimizers.SGD(RATE), lambda y, p: keras.ops.mean(p))
    return strategy, model


def ones(batches):
    return tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(batches)


def slopes(strategy, model):
    return [None if copy is None else float(copy[0][0, 0]) for copy in strategy.copies(model)]


def test_pairs_of_workers_average_and_lose_nothing_of_what_all_have_learned(cluster):
    strategy, model = make_model(cluster)
    # On a busy machine workers may be as fast as each other, or pairs few, for a while.
    times, is_seen = 0, False
    while not is_seen:
        assert times < 20
        times += 1
        before = np.array(slopes(strategy, model))
        model.fit(ones(90), verbose=0)
        found = np.array(slopes(strategy, model))
        # Each step of a worker takes so much off its copy, and pairs take nothing.
        np.testing.assert_allclose(found.mean(), before.mean() - RATE * 90 / WORKERS, rtol=1e-4)
        np.testing.assert_allclose(model.get_weights()[0], [[found.mean()]], rtol=1e-5)
        # Without gossip the slow worker's copy would be where its own steps have brought it.
        steps = np.array(strategy.worker_steps(model))
        alone = before - RATE * steps
        is_seen = np.ptp(steps) > 20 and np.ptp(found) < np.ptp(alone) / 2
        report = strategy.sync_report(model)
        have_met = len(model.train_function.synchronizer.pairs) > 1 and min(report.syncs) > 0
        is_seen = is_seen and have_met
    assert sum(report.syncs) % 2 == 0
    assert (report.steps, report.elements) == (90 * times, 0)


def test_a_killed_worker_is_done_without_and_comes_back_with_the_last_reading(cluster):
    strategy, model = make_model(cluster)
    seen = []

    class UntilBack(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pairs = self.model.train_function.synchronizer.pairs
            if not seen and strategy.losses(model).workers:
                seen.append(slopes(strategy, model))
                pairs.clear()
                cluster.restart("worker", 1)
            elif seen and any(1 in pair for pair in pairs):
                self.model.stop_training = True

    kill = AtBatch(12, lambda: cluster.kill("worker", 1))
    model.fit(ones(20_000), verbose=0, callbacks=[kill, UntilBack()])
    assert model.stop_training
    assert seen[0][1] is None and None not in (seen[0][0], seen[0][2])
    assert None not in slopes(strategy, model)
    assert strategy.losses(model).workers == 1


def test_copies_go_on_from_a_checkpoint_and_others_with_the_mean(cluster, tmp_path):
    strategy, model = make_model(cluster)
    model.fit(ones(30), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, workers=strategy.worker_states(model))
    path = checkpoint.write(str(tmp_path / "gossip"))
    saved = slopes(strategy, model)
    model.fit(ones(30), verbose=0)
    assert slopes(strategy, model) != saved
    checkpoint.read(path).assert_consumed()
    assert slopes(strategy, model) == saved


@pytest.mark.parametrize("lacking", [1, 2], ids=["one between", "the last"])
def test_a_group_whose_copy_a_checkpoint_lacks_begins_with_the_mean_of_the_others(
    cluster, monkeypatch, lacking
):
    strategy, model = make_model(cluster)
    model.fit(ones(30), verbose=0)
    copies, states = model.train_function.synchronizer.copies, strategy.worker_states(model)
    values = copies.all_values()
    del values[lacking]  # Its worker does not answer.
    values[0] = [value + 1 for value in values[0]]  # The two may have met last.
    with monkeypatch.context() as patch:
        patch.setattr(copies, "all_values", lambda: values)
        saved = states.serialize()
    states.deserialize(saved)
    found = slopes(strategy, model)
    of_lacking = found.pop(lacking)
    assert found[0] != found[1]
    assert of_lacking == pytest.approx(sum(found) / 2)


def test_a_checkpoint_of_more_groups_that_lacks_the_last_is_none_of_as_many(cluster, caplog):
    strategy, model = make_model(cluster)
    model.fit(ones(30), verbose=0)
    synchronizer = model.train_function.synchronizer
    values = synchronizer.copies.all_values()
    values[0] = [value + 1 for value in values[0]]
    synchronizer.restore(values, {"groups": np.int64(4)})
    found = slopes(strategy, model)
    assert found[0] == found[1] == found[2]
    assert "holds the parameters of 4 workers, and there are 3: all of them begin" in caplog.text
