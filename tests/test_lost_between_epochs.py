"""Workers with copies of their own that die while nobody trains."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import missing, only_stopped_ones_are_silent, told_losses

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.ops import hop
from tf_recsync.strategies.train_function import TrainFunction
from tf_recsync.synchronization.hop import HopSynchronizer
from tf_recsync.synchronization.hop_exchange import Exchange

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

WORKERS, BATCH, WIDTH = 3, 8, 4
STEPS = 24  # Of an epoch.
NEVER = recsync.Foreground(gap=1_000_000)


@pytest.fixture
def cluster(clusters):
    return clusters.get(WORKERS, 1)


def make_strategy(kind, cluster):
    if kind in ("Async", "Sync"):
        return getattr(recsync, f"{kind}Strategy")(cluster)
    if kind == "Hop":
        return recsync.HopStrategy(
            cluster, topology.complete(WORKERS), max_iteration_gap=4, backup_workers=1
        )
    return recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))


def make_model(strategy, steps_per_execution=1):
    """With several steps in a call, an epoch of another number of them is traced anew."""
    recsync.testing.set_compute_time(strategy, 0.02)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(
            recsync.optimizers.SGD(0.1),
            "binary_crossentropy",
            steps_per_execution=steps_per_execution,
        )
    return model


def dataset(batches=STEPS):
    random = np.random.default_rng(1)
    x = random.normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


class AfterFirstEpoch(keras.callbacks.Callback):
    """Does something to a worker, and assigns a variable that all of them have copies of."""

    def __init__(self, action):
        super().__init__()
        self._action = action

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self._action()
            self.model.optimizer.learning_rate = 0.05


class UntilBack(keras.callbacks.Callback):
    """Ends training when worker 1 takes part, and all others: on a busy machine another one may
    have been given up meanwhile.

    Attributes:
        before: how many steps it had done in the pass before it was lost.
    """

    before = 0

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy

    def on_train_batch_end(self, batch, logs=None):
        if self.before is not None:
            steps = self._strategy.worker_steps(self.model)
            groups = self._strategy._arrangement.groups
            there = self.model.train_function.synchronizer.there
            self.model.stop_training = steps[1] > self.before and len(there) == len(groups)


@pytest.mark.cases("ShadowSync-by steps", "Hop-by passes")
@pytest.mark.parametrize("steps", [None, STEPS], ids=["by passes", "by steps"])
@pytest.mark.parametrize("kind", ["ShadowSync", "Hop"])
def test_the_others_go_on_and_it_comes_back(cluster, kind, steps, caplog, capfd):
    strategy = make_strategy(kind, cluster)
    model = make_model(strategy, steps_per_execution=2)
    model.fit(
        dataset() if steps is None else dataset().repeat(),
        steps_per_epoch=steps,
        epochs=3,
        verbose=0,
        callbacks=[AfterFirstEpoch(lambda: cluster.kill("worker", 1))],
    )
    # It is missing in two passes, and may die at the very end of the first one; or in one pass.
    assert strategy.losses(model).workers in ([2, 3] if steps is None else [1])
    copies = strategy.copies(model)
    assert missing(copies) == [1]
    assert np.isfinite(copies[0][0]).all()
    cluster.restart("worker", 1)
    model.optimizer.learning_rate = 0.02
    model.fit(
        dataset().repeat(), steps_per_epoch=100_000, verbose=0, callbacks=[UntilBack(strategy)]
    )
    assert missing(strategy.copies(model)) == []
    told = [record.getMessage() for record in caplog.records]
    of_worker = [text.split("(")[0] for text in told if text.startswith("worker:1 ")]
    lost, away, back = (
        sum(words in text for text in of_worker)
        for words in ("was lost", "is still away; the others", "is back")
    )
    assert (lost, back) == (1, 1)
    assert away <= (2 if steps is None else 1)
    assert "context" not in capfd.readouterr().err  # What TensorFlow says of each function.


@pytest.mark.cases("ShadowSync-by passes-readmitted", "Hop-by steps-")
@pytest.mark.parametrize("is_readmitted", [False, True], ids=["", "readmitted"])
@pytest.mark.parametrize("steps", [None, STEPS], ids=["by passes", "by steps"])
@pytest.mark.parametrize("kind", ["ShadowSync", "Hop"])
def test_one_that_is_back_before_the_next_epoch_takes_part_in_it(
    cluster, kind, steps, is_readmitted
):
    strategy = make_strategy(kind, cluster)
    model = make_model(strategy)
    train_until_back_with_a_renewed_worker(cluster, strategy, model, steps, is_readmitted)
    assert missing(strategy.copies(model)) == []


def test_one_that_comes_back_while_the_next_epoch_begins_holds_nobody(cluster, monkeypatch):
    tell, begin = Exchange._tell_neighbors, HopSynchronizer.begin
    comes_back, begins, has_told, has_begun = (threading.Event() for _ in range(4))

    def tell_between(group, worker, since, until):
        if until != hop.FOREVER or has_told.is_set():
            return tell(group, worker, since, until)
        comes_back.set()
        assert begins.wait(60)
        told = tell(group, worker, since, until)
        if max(told.values()) < since:  # All count on it from there.
            has_told.set()
            has_begun.wait(1.0)  # It may wait for this worker.
        return told

    def begin_between(group):
        if comes_back.is_set():
            begins.set()
            assert has_told.wait(60)
        begin(group)
        if begins.is_set():
            has_begun.set()

    monkeypatch.setattr(Exchange, "_tell_neighbors", tell_between)
    monkeypatch.setattr(HopSynchronizer, "begin", begin_between)
    strategy = make_strategy("Hop", cluster)
    model = make_model(strategy)
    train_until_back_with_a_renewed_worker(cluster, strategy, model, STEPS, False)
    model.fit(dataset(), verbose=0)
    assert sum(strategy.worker_steps(model)) == STEPS


def test_one_that_still_tells_that_it_has_left_when_the_next_epoch_begins_takes_part(
    cluster, monkeypatch
):
    tell, begin = Exchange._tell_neighbors, HopSynchronizer.begin
    leaves, has_begun = threading.Event(), threading.Event()

    def tell_late(group, worker, since, until):
        if 0 <= until < hop.FOREVER and not leaves.is_set():
            leaves.set()
            has_begun.wait(1.0)  # The next epoch may wait for this.
        return tell(group, worker, since, until)

    def begin_then_tell(group):
        begin(group)
        if leaves.is_set():
            has_begun.set()

    monkeypatch.setattr(Exchange, "_tell_neighbors", tell_late)
    monkeypatch.setattr(HopSynchronizer, "begin", begin_then_tell)
    strategy = recsync.HopStrategy(cluster, topology.complete(WORKERS), max_iteration_gap=4)
    model = make_model(strategy)

    def begins_meanwhile() -> bool:
        leaves.clear()
        model.fit(dataset().repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0)
        assert sum(strategy.worker_steps(model)) == 2 * STEPS
        return has_begun.is_set()

    # On a busy machine the first one may leave after that.
    assert any(begins_meanwhile() for _ in range(20))


@pytest.mark.cases("readmitted")
@pytest.mark.parametrize("is_readmitted", [False, True], ids=["", "readmitted"])
def test_one_that_comes_back_while_others_are_told_of_its_loss_holds_nobody(
    cluster, monkeypatch, is_readmitted
):
    lose, come_back = HopSynchronizer.lose_group, HopSynchronizer._come_back
    is_back = threading.Event()

    def lose_slowly(group, number):
        lose(group, number)
        is_back.wait(2.0)  # It comes back now, if it may.

    def come_back_then_tell(group, number):
        come_back(group, number)
        is_back.set()

    monkeypatch.setattr(HopSynchronizer, "lose_group", lose_slowly)
    monkeypatch.setattr(HopSynchronizer, "_come_back", come_back_then_tell)
    strategy = make_strategy("Hop", cluster)
    model = make_model(strategy)
    train_until_back_with_a_renewed_worker(cluster, strategy, model, STEPS, is_readmitted)
    assert is_back.is_set()


@pytest.mark.cases("Async-by passes", "Sync-by steps")
@pytest.mark.parametrize("steps", [None, STEPS], ids=["by passes", "by steps"])
@pytest.mark.parametrize("kind", ["Async", "Sync"])
def test_one_that_was_readmitted_before_its_threads_noticed_takes_part_again(cluster, kind, steps):
    strategy = make_strategy(kind, cluster)
    train_until_back_with_a_renewed_worker(cluster, strategy, make_model(strategy), steps, True)


def train_until_back_with_a_renewed_worker(cluster, strategy, model, steps, is_readmitted):
    """Worker 1 is started again after an epoch, and takes part in the next one."""

    until_back = UntilBack(strategy)

    def renew():
        cluster.kill("worker", 1)
        until_back.before = strategy.worker_steps(model)[1]
        cluster.restart("worker", 1)
        if is_readmitted:
            cluster.readmit()

    if steps is None:
        model.fit(dataset(), verbose=0, callbacks=[AfterFirstEpoch(renew)])
        model.fit(
            dataset().repeat(), steps_per_epoch=100_000, verbose=0, callbacks=[UntilBack(strategy)]
        )
    else:
        # The pass that it had begun with goes on until it is back.
        until_back.before = None
        model.fit(
            dataset().repeat(),
            steps_per_epoch=steps,
            epochs=1000,
            verbose=0,
            callbacks=[AfterFirstEpoch(renew), until_back],
        )
        assert strategy.worker_steps(model)[1] > until_back.before


@pytest.mark.cases("by steps")
@pytest.mark.parametrize("steps", [None, STEPS], ids=["by passes", "by steps"])
def test_one_that_stands_still_keeps_nobody_waiting_and_begins_anew(
    cluster, monkeypatch, steps, caplog
):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), silence_timeout=3.0)
    model = make_model(strategy)
    begin = TrainFunction._begin_without_the_gone

    def then_resume(*args):
        begin(*args)
        cluster.resume("worker", 1)  # It answers again, and has been given up.

    monkeypatch.setattr(TrainFunction, "_begin_without_the_gone", then_resume)
    model.fit(
        dataset() if steps is None else dataset().repeat(),
        steps_per_epoch=steps,
        epochs=2,
        verbose=0,
        callbacks=[AfterFirstEpoch(lambda: cluster.pause("worker", 1))],
    )
    group = model.train_function.synchronizer
    # It has copies that are synchronized, or will be from its first call on, or none as yet.
    assert set(group.there) <= set(group.copies.there)
    model.fit(
        dataset().repeat(), steps_per_epoch=100_000, verbose=0, callbacks=[UntilBack(strategy)]
    )
    group = model.train_function.synchronizer
    assert set(group.there) == set(group.copies.there) == set(range(WORKERS))
    assert missing(strategy.copies(model)) == []
    if steps is not None:
        assert 1 <= strategy.losses(model).workers <= told_losses(caplog.text)


@pytest.mark.cases("BMUF-all")
@pytest.mark.parametrize("lost", [[1], range(WORKERS)], ids=["one", "all"])
@pytest.mark.parametrize(
    "algorithm", [recsync.EASGD(0.3), recsync.BMUF(0.3, 0.5, momentum=0.5)], ids=["EASGD", "BMUF"]
)
def test_a_checkpoint_is_restored_for_trainers_that_are_not_there(
    cluster, tmp_path, algorithm, lost
):
    strategy = recsync.ShadowSyncStrategy(cluster, algorithm, mode=NEVER)
    model = make_model(strategy)
    checkpoint = tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model))
    model.fit(dataset(), verbose=0)
    path = checkpoint.save(str(tmp_path / "clicks"))
    group = model.train_function.synchronizer
    saved, extras = strategy.copies(model), group.extras()
    model.fit(dataset(), verbose=0)
    for worker in lost:
        cluster.kill("worker", worker)
    checkpoint.restore(path)
    for worker in lost:
        cluster.restart("worker", worker)
    model.optimizer.learning_rate = 0.0

    class UntilAllAreThere(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = len(group.there) == WORKERS

    model.fit(
        dataset().repeat(), steps_per_epoch=100_000, verbose=0, callbacks=[UntilAllAreThere()]
    )
    for copy, before in zip(strategy.copies(model), saved, strict=True):
        np.testing.assert_array_equal(copy[0], before[0])
    for name, value in group.extras().items():
        np.testing.assert_array_equal(value, extras[name], name)


@pytest.mark.full
def test_bmuf_begins_anew_from_what_users_see_when_all_trainers_were_lost(cluster):
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.BMUF(1.0, 0.5), mode=recsync.Foreground(gap=10)
    )
    model = make_model(strategy)
    start = model.layers[0].kernel.numpy()
    model.fit(dataset(), verbose=0)
    seen = model.layers[0].kernel.numpy()
    for worker in range(WORKERS):
        cluster.kill("worker", worker)
    for worker in range(WORKERS):
        cluster.restart("worker", worker)
    model.optimizer.learning_rate = 0.0
    model.fit(dataset(), verbose=0)
    # With the global parameters of the start, each synchronization would go half the way back.
    assert np.abs(seen - start).max() > 0.01
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), seen, rtol=1e-5)
