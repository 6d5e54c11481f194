"""ShadowSync's servers that are killed, and a whole run that is replayed in numpy."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, only_stopped_ones_are_silent

import tf_recsync as recsync
from tf_recsync.strategies.model_functions import Steps

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

WIDTH = 4


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=3, ps=2)


def make_model(strategy, seconds=0.1, steps_per_execution=1):
    """A model whose steps take so long: those that go on for a while use little processor time."""
    recsync.testing.set_compute_time(strategy, seconds)
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        vector = recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig("table", 40, 8)],
            [recsync.layers.FeatureConfig("id", table="table")],
            concatenate=True,
        )({"id": ids})
        model = keras.Model({"id": ids}, keras.layers.Dense(1, "sigmoid")(vector))
        model.compile(
            recsync.optimizers.Adagrad(0.1),
            "binary_crossentropy",
            steps_per_execution=steps_per_execution,
        )
    return model


def dataset(batches):
    ids = np.random.default_rng(1).integers(0, 40, batches * 8)
    y = (ids % 2).astype(np.float32)[:, np.newaxis]
    return tf.data.Dataset.from_tensor_slices(({"id": ids}, y)).batch(8)


def long_dataset():
    """More than a test trains on before it ends training."""
    return dataset(50).repeat(2000)


@pytest.mark.cases("FR-EASGD")
@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        (recsync.EASGD(0.3), "shadow"),
        (recsync.EASGD(0.3), recsync.Foreground(gap=3)),
        (recsync.ModelAveraging(0.3), "shadow"),
        (recsync.ModelAveraging(0.3), recsync.Foreground(gap=3)),
        (recsync.BMUF(0.3, 1.0), recsync.Foreground(per_minute=300)),
    ],
    ids=["S-EASGD", "FR-EASGD", "S-MA", "FR-MA", "FR-BMUF"],
)
def test_a_killed_trainer_is_done_without_and_comes_back(cluster, algorithm, mode):
    strategy = recsync.ShadowSyncStrategy(cluster, algorithm, mode=mode, threads_per_trainer=2)
    model = make_model(strategy, steps_per_execution=2)
    syncs = []

    def note():
        syncs.append(strategy.sync_report(model).syncs)

    class LosesAndGoesOn(keras.callbacks.Callback):
        """Ends training when the trainer that was lost has synchronized again."""

        without = 0  # Batches since the loss was known.

        def on_train_batch_end(self, batch, logs=None):
            now = strategy.sync_report(model).syncs
            if not syncs:
                self.without += strategy.losses(model).workers
                if self.without > 10:  # What was under way has ended.
                    note()
            elif len(syncs) == 1 and now[0] > syncs[0][0]:  # The others have gone on.
                note()
                cluster.restart("worker", 1)
            elif len(syncs) == 2 and now[1] > syncs[1][1]:
                self.model.stop_training = strategy.worker_steps(model)[1] > 0

    kill = AtBatch(12, lambda: cluster.kill("worker", 1))
    model.fit(long_dataset(), verbose=0, callbacks=[kill, LosesAndGoesOn()])
    note()
    # Both threads were lost with their trainer, and it counts once.
    losses = strategy.losses(model)
    assert losses.workers == 1
    assert losses.steps <= 4
    # The others went on to synchronize; so did all of them at the end.
    before, later, end = syncs
    assert later[0] > before[0]
    assert later[1] == before[1]
    assert end[1] > later[1]
    assert strategy.worker_steps(model)[1] > 0
    assert len(strategy.copies(model)) == 3
    model.fit(dataset(12), verbose=0)
    assert strategy.losses(model).workers == 1


@pytest.mark.cases("shadow, sync", "gap, embedding")
@pytest.mark.parametrize(
    ("algorithm", "mode", "ps", "what"),
    [
        (recsync.EASGD(0.3), "shadow", 1, "sync PS|parameter server"),
        (recsync.EASGD(0.3), "shadow", 0, "parameter server"),
        (recsync.EASGD(0.3), recsync.Foreground(gap=3), 1, "sync PS|parameter server"),
        (recsync.EASGD(0.3), recsync.Foreground(gap=3), 0, "parameter server"),
        (recsync.ModelAveraging(0.3), recsync.Foreground(gap=3), 0, "parameter server"),
    ],
    ids=["shadow, sync", "shadow, embedding", "gap, sync", "gap, embedding", "MA, embedding"],
)
def test_a_killed_server_ends_training_with_an_error_that_names_it(
    cluster, algorithm, mode, ps, what
):
    # Nobody waits for it to come back.
    strategy = recsync.ShadowSyncStrategy(cluster, algorithm, mode=mode, worker_timeout=10_000.0)
    model = make_model(strategy)
    kill = AtBatch(8, lambda: cluster.kill("ps", ps))
    with pytest.raises(RuntimeError, match=f"({what}) ps:{ps} was lost"):
        model.fit(long_dataset(), verbose=0, callbacks=[kill])


def test_others_meet_on_when_a_trainer_dies_of_whose_threads_one_waits(cluster, monkeypatch):
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.ModelAveraging(0.3), mode=recsync.Foreground(gap=2), threads_per_trainer=2
    )
    model = make_model(strategy, 0.05)
    run_steps = Steps._run_steps
    at = []  # The synchronizations when it died.

    def slowly(function, slot, n):
        if slot.number == 3:  # The second thread of worker 1.
            time.sleep(0.2)
            waiting = function.synchronizer._gate._waiting
            if not at and 2 in waiting and 3 not in waiting and slot.state.steps >= 8:
                at.append(strategy.sync_report(model).syncs[0])
                cluster.kill("worker", 1)  # The first one waits for this one, and calls nothing.
        return run_steps(function, slot, n)

    monkeypatch.setattr(Steps, "_run_steps", slowly)

    class UntilOthersMeet(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if at and strategy.sync_report(model).syncs[0] > at[0] + 3:
                self.model.stop_training = True

    model.fit(long_dataset(), verbose=0, callbacks=[UntilOthersMeet()])
    assert strategy.losses(model).workers == 1


@pytest.mark.full
def test_what_a_lost_trainer_has_counted_stays_in_the_reports(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    model = make_model(strategy, 0.05, steps_per_execution=2)
    length = 12  # Of an epoch.
    report = recsync.callbacks.ShadowReport()

    class Lose(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 4 and batch == 5:  # They are counted by twos.
                cluster.kill("worker", 1)

    history = model.fit(dataset(length), epochs=6, verbose=0, callbacks=[report, Lose()]).history
    assert len(history["staleness"]) == 6
    assert strategy.losses(model).workers >= 1
    cluster.restart("worker", 1)
    model.fit(dataset(length), epochs=2, verbose=0, callbacks=[report])
    # Two dense variables; the counts of steps of one epoch were lost with the trainer, which in
    # the epochs before has done more.
    count, steps = strategy.staleness(model).dense.count, strategy.sync_report(model).steps
    assert 2 * (steps - length) <= count <= 2 * (steps + 4)


def test_without_the_first_trainer_the_others_are_shown_and_saved(cluster):
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.ModelAveraging(0.1), mode=recsync.Foreground(gap=1000)
    )
    model = make_model(strategy, 0.02)
    parts = strategy.distribute_datasets_from_function(
        lambda context: dataset(24).shard(3, context.input_pipeline_id)
    )
    model.fit(parts, verbose=0)
    first, *others = strategy.copies(model)
    assert not np.array_equal(first[0], others[0][0])
    group = model.train_function.synchronizer
    # As in mid-training: what users see has to be read.
    group.copies.touched()
    cluster.kill("worker", 0)
    kernel = model.layers[-1].kernel
    np.testing.assert_allclose(kernel.numpy(), np.mean([o[0] for o in others], 0), rtol=1e-5)
    assert sorted(group.copies.all_values()) == [1, 2]
    for worker in (1, 2):
        cluster.kill("worker", worker)
    with pytest.raises(tf.errors.UnavailableError):
        group.copies.all_values()


def test_a_strategy_can_be_made_while_a_worker_is_away(cluster, caplog):
    cluster.kill("worker", 1)
    recsync.ShadowSyncStrategy(cluster, recsync.ModelAveraging(0.3))
    assert "worker:1 does not answer, and whether it has threads enough is not known" in caplog.text


@pytest.mark.cases("shadow")
@pytest.mark.parametrize(
    "mode", ["shadow", recsync.Foreground(gap=3)], ids=["shadow", "foreground"]
)
def test_the_others_average_on_when_a_trainer_stands_still(cluster, monkeypatch, mode):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.ModelAveraging(0.3), mode=mode, silence_timeout=2.0
    )
    model = make_model(strategy)

    class Watch(keras.callbacks.Callback):
        """Ends training some time after the others have synchronized without it."""

        before = after = None

        def on_train_batch_end(self, batch, logs=None):
            syncs = strategy.sync_report(model).syncs
            if batch >= 12 and self.before is None:
                cluster.pause("worker", 1)
                self.before = syncs
            if strategy.losses(model).workers and self.after is None:
                self.after = syncs
            if self.after is not None and syncs[0] > self.after[0] + 5:
                self.model.stop_training = syncs[2] > self.after[2]

    watch = Watch()
    try:
        model.fit(long_dataset(), verbose=0, callbacks=[watch])
    finally:
        cluster.resume("worker", 1)
    syncs = strategy.sync_report(model).syncs
    assert syncs[0] > watch.after[0]
    assert syncs[2] > watch.after[2]
    assert syncs[1] <= watch.after[1] + 1


def test_a_sync_server_that_stands_still_ends_training_though_no_step_waits_for_it(
    cluster, monkeypatch
):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), silence_timeout=2.0)
    model = make_model(strategy)
    try:
        with pytest.raises(RuntimeError, match="parameter server ps:1 has not answered for"):
            model.fit(
                long_dataset(), verbose=0, callbacks=[AtBatch(8, lambda: cluster.pause("ps", 1))]
            )
    finally:
        cluster.resume("ps", 1)


# Last: these have clusters of their own.


def test_on_another_number_of_trainers_all_begin_with_the_mean(clusters, tmp_path):
    clusters.close()
    for workers in (2, 3):
        with recsync.LocalCluster(workers=workers, ps=2, processes=0) as cluster:
            cluster.connect()
            strategy = recsync.ShadowSyncStrategy(
                cluster, recsync.EASGD(0.3), mode=recsync.Foreground(gap=100_000)
            )
            model = make_model(strategy, 0.02)
            checkpoint = tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model))
            if workers == 2:
                model.fit(dataset(24), verbose=0)
                path = checkpoint.save(str(tmp_path / "clicks"))
                one, other = (copy[0] for copy in strategy.copies(model))
                continue
            checkpoint.restore(path)
            model.optimizer.learning_rate = 0.0
            model.fit(dataset(24), verbose=0)
            assert not np.array_equal(one, other)
            for copy in strategy.copies(model):
                np.testing.assert_allclose(copy[0], (one + other) / 2, rtol=1e-5)


def test_a_table_on_a_closed_cluster_says_so(clusters):
    clusters.close()
    with recsync.LocalCluster(workers=1, ps=2, processes=0) as cluster:
        strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=[1])
        with strategy.scope():
            table = keras.layers.Embedding(4, 2)
            table.build((None, 1))
            dense = keras.layers.Dense(1)
            dense.build((None, 2))
        assert "/job:ps/replica:0/task:0" in table.embeddings.value.device
    message = r"LocalCluster\(workers=1, ps=2\) is closed, and what lay on its servers is gone"
    with pytest.raises(RuntimeError, match=message):
        table.get_weights()
    # What is copied lies here.
    assert [weights.shape for weights in dense.get_weights()] == [(2, 1), (1,)]


def test_one_thread_with_synchronization_in_the_foreground_is_numpys_sequence(clusters):
    """Of logistic regression, gradient steps with an exchange after every third one."""
    clusters.close()
    alpha, rate, batches, gap = 0.4, 0.5, 20, 3
    random = np.random.default_rng(1)
    x = random.normal(size=(batches, 8, WIDTH)).astype(np.float32)
    y = (random.random(size=(batches, 8, 1)) < 0.3).astype(np.float32)
    results, train_ne = [], []
    with recsync.LocalCluster(workers=1, ps=1, processes=0) as cluster:
        for _ in range(2):
            strategy = recsync.ShadowSyncStrategy(
                cluster, recsync.EASGD(alpha), mode=recsync.Foreground(gap=gap)
            )
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid", use_bias=False)]
                )
                model.compile(
                    recsync.optimizers.SGD(rate),
                    "binary_crossentropy",
                    metrics=[recsync.metrics.NormalizedEntropy()],
                    steps_per_execution=2,
                )
            model.layers[0].kernel.assign(np.ones((WIDTH, 1)))
            data = tf.data.Dataset.from_tensor_slices((x, y))
            train_ne += model.fit(data, verbose=0).history["normalized_entropy"]
            results.append(model.layers[0].kernel.numpy())
    w, center = np.ones((WIDTH, 1)), np.ones((WIDTH, 1))
    entropies = []
    for i in range(batches):
        p = 1 / (1 + np.exp(-x[i] @ w))
        entropies.append(
            -np.mean(y[i] * np.log(p) + (1 - y[i]) * np.log(1 - p))
        )  # Before the step.
        w -= rate * x[i].T @ (p - y[i]) / 8
        if (i + 1) % gap == 0:
            center = (1 - alpha) * center + alpha * w
            w = (1 - alpha) * w + alpha * center
    np.testing.assert_allclose(results[0], w, atol=1e-5)
    np.testing.assert_array_equal(results[0], results[1])
    rate_of_clicks = np.mean(y)
    expected = np.mean(entropies) / -(
        rate_of_clicks * np.log(rate_of_clicks) + (1 - rate_of_clicks) * np.log(1 - rate_of_clicks)
    )
    np.testing.assert_allclose(train_ne, expected, rtol=1e-5)
