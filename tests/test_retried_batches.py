"""Batches that are lost with a worker are trained on by others."""

import contextlib
import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compute_time

import tf_recsync as recsync
from tf_recsync.strategies.model_functions import TestFunction
from tf_recsync.strategies.slots import Losses

BATCHES = 60


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=2)


STRATEGIES = {
    "async": recsync.AsyncStrategy,
    "sync": lambda cluster: recsync.SyncStrategy(cluster),
    "GBA": lambda cluster: recsync.GBAStrategy(cluster, 2, 1, staleness_tolerance=1000),
    "Hop": lambda cluster: recsync.HopStrategy(
        cluster, recsync.topology.ring(2), backup_workers=1, max_iteration_gap=20
    ),
    "ShadowSync": lambda cluster: recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.3), threads_per_trainer=2, local_batch_size=1
    ),
}


class Sum(keras.metrics.Metric):
    """Of labels 4^0, 4^1 and so on, whose digits say how often there was each batch."""

    def __init__(self):
        super().__init__(dtype="float64", name="sum")
        self.total = self.add_variable((), "zeros", dtype="float64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float64")))

    def result(self):
        return self.total.value


def make_model(strategy, metrics=()):
    """Its table counts how often each batch was trained on."""
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        with strategy.placed_on(0) if strategy.embedding_ps else contextlib.nullcontext():
            rows = keras.layers.Embedding(BATCHES, 1, "zeros")(ids)
        counts = keras.layers.Flatten()(rows)
        ones = keras.ops.ones_like(ids, dtype="float32")  # What is dense has nothing to do with it.
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(ones)
        model = keras.Model(ids, counts + dense)
        model.compile(
            recsync.optimizers.SGD(1.0), loss=lambda _, output: -output, metrics=list(metrics)
        )
    return model


def counts_of(model):
    return np.asarray(model.get_weights()[0]).ravel()


def batches(count=BATCHES, parts=1, part=0):
    data = tf.data.Dataset.range(part, count, parts)
    return data.map(lambda i: (i[tf.newaxis], 4.0 ** tf.cast(i % 24, tf.float64)[None])).batch(1)


def check_all_are_done(model, count=BATCHES):
    """Each batch of the last pass counts once, and none is left out."""
    function = model.train_function
    assert function._batches.done.counted == (count, ())
    assert function._run.completed == count


class Killing:
    """Kills a worker when a batch in mid-pass is made, once; starts it again if it shall.

    Args:
        cluster: whose worker it is.
        restart: whether it shall.
    """

    def __init__(self, cluster, restart=False):
        self._cluster, self._restart = cluster, restart
        self._lock = threading.Lock()
        self._has_killed = False

    def see(self, number) -> None:
        with self._lock:
            if number < 20 or self._has_killed:
                return
            self._has_killed = True
        self._cluster.kill("worker", 1)
        if self._restart:
            threading.Thread(target=self._cluster.restart, args=("worker", 1)).start()

    def seen(self, data):
        """The dataset, of whose batches it is told."""

        def passed(number, batch):
            with tf.control_dependencies([tf.py_function(self.see, [number], [])]):
                return tf.nest.map_structure(tf.identity, batch)

        return data.enumerate().map(passed)


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
def test_each_batch_is_trained_on_once_where_nobody_dies(cluster, shuffled):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    data = batches().shuffle(BATCHES, seed=3) if shuffled else batches()
    model.fit(data, epochs=2, verbose=0)
    assert counts_of(model).tolist() == [2] * BATCHES
    assert strategy.losses(model) == Losses()


KINDS = ["stays away", "comes back", "of unknown length", "shuffled", "by steps"]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_lost_are_trained_on_at_the_end(clusters, kind):
    # On a busy machine it may die before it has got a batch.
    assert any(retried_at_the_end(clusters.get(workers=2, ps=2), kind) for _ in range(10))


def retried_at_the_end(cluster, kind) -> bool:
    """Whether batches of a worker that dies are trained on once more, unless none must be."""
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    data = batches()
    if kind == "of unknown length":
        data = data.filter(lambda ids, _: tf.reduce_all(ids >= 0))
    elif kind == "shuffled":
        data = data.shuffle(BATCHES, seed=3)
    kill, slow = Killing(cluster, restart=kind == "comes back"), None
    if kind != "comes back":
        slow = recsync.testing.SlowWorkers(1000.0, [1])  # It is in a step when it dies.
    recsync.testing.set_compute_time(strategy, 0.01, slow)
    passes = 1 if kind == "by steps" else 2
    history = model.fit(
        kill.seen(data),
        steps_per_epoch=BATCHES // 2 if kind == "by steps" else None,
        epochs=2,
        verbose=0,
    )
    assert history.epoch == [0, 1]
    counts, losses = counts_of(model), strategy.losses(model)
    assert losses.workers >= 1 and losses.batches == 0
    assert counts.min() == passes
    check_all_are_done(model)
    # The step in flight may have been applied, and counts as lost all the same.
    assert losses.repeated <= counts.sum() - passes * BATCHES <= losses.repeated + losses.steps
    assert losses.repeated <= losses.retried < BATCHES
    return losses.retried > 0 or slow is None


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind != "async"])
def test_batches_are_retried_in_all_modes(cluster, kind):
    strategy = STRATEGIES[kind](cluster)
    model = make_model(strategy)
    kill = Killing(cluster)
    with compute_time(strategy, 0.01):
        model.fit(kill.seen(batches()), verbose=0)
    losses = strategy.losses(model)
    assert losses.workers == 1 and losses.batches == 0
    check_all_are_done(model)
    # Where servers collect pushes, each counts in one global batch of two.
    least = {"sync": 0.5, "GBA": 0.5}.get(kind, 1e-9)
    assert counts_of(model).min() >= least
    assert strategy.worker_steps(model)[0] >= BATCHES / 2


def test_batches_that_can_not_be_found_again_are_dropped_with_one_warning(cluster, caplog):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    kill, options = Killing(cluster), tf.data.Options()
    options.deterministic = False
    with compute_time(strategy, 0.01):
        model.fit(kill.seen(batches().with_options(options)), epochs=2, verbose=0)
    assert caplog.text.count("Batches that are lost with a worker will not be trained on") == 1
    assert "give shuffle a seed, or call keras.utils.set_random_seed" in caplog.text
    losses = strategy.losses(model)
    assert losses.retried == 0
    assert counts_of(model).sum() >= 2 * BATCHES - losses.batches


class Numbers(keras.utils.PyDataset):
    """The batches, of which a function is told how many were made."""

    def __init__(self, see, **options):
        super().__init__(**options)
        self._see = see
        self._made = itertools.count()

    def __len__(self):
        return BATCHES

    def __getitem__(self, number):
        self._see(next(self._made))
        return np.array([[number]]), np.full((1, 1), 4.0 ** (number % 24))


def test_what_keras_reads_in_order_is_found_again(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    kill = Killing(cluster)
    with compute_time(strategy, 0.01):
        model.fit(Numbers(kill.see), shuffle=False, verbose=0)
    assert strategy.losses(model).workers == 1
    assert counts_of(model).min() == 1
    check_all_are_done(model)


def test_what_several_threads_of_keras_would_read_is_read_in_order(cluster, caplog):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy, [Sum()])
    data = Numbers(lambda number: None, workers=4, max_queue_size=3)
    # Each begins with a batch by which Keras sees what batches look like.
    total = model.evaluate(data, return_dict=True, verbose=0)["sum"]
    assert total == sum(4.0 ** (number % 24) for number in range(BATCHES))
    model.fit(data, epochs=3, steps_per_epoch=BATCHES // 3, shuffle=False, verbose=0)
    assert counts_of(model).tolist() == [1] * BATCHES
    assert "One thread of this process makes the batches of the PyDataset" in caplog.text


@pytest.mark.parametrize("kind", ["PyDataset", "generator"])
def test_what_keras_shuffles_or_can_not_begin_again_is_not_found_again(cluster, kind, caplog):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    data, why = Numbers(Killing(cluster).see), "Keras shuffles a PyDataset anew each time"
    if kind == "generator":
        numbers, why = data, "a Python generator can't begin again"
        data = (numbers[number] for number in range(BATCHES))
    with compute_time(strategy, 0.01):
        model.fit(data, verbose=0)
    assert f"Batches that are lost with a worker will not be trained on: {why}" in caplog.text
    losses = strategy.losses(model)
    assert losses.workers == 1 and losses.retried == 0
    assert counts_of(model).max() == 1


def test_an_evaluation_counts_each_batch_once_though_a_worker_dies(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy, [Sum()])
    killed = []

    class Kill(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if batch == 8 and not killed:
                killed.append(cluster.kill("worker", 1))

    slow = batches(24).map(lambda ids, label: (after(0.05, ids), label))
    total = model.evaluate(slow, callbacks=[Kill()], return_dict=True, verbose=0)["sum"]
    assert killed
    assert total == (4**24 - 1) / 3  # Each digit is a 1.


def after(seconds, value):
    """The same, later."""
    return recsync.ops.transfer(value, 8 / seconds)


def test_predictions_are_complete_though_a_worker_dies(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    table = np.arange(BATCHES)[:, np.newaxis]
    model.set_weights([table, np.zeros([1, 1])])
    killed = []

    class Kill(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            if batch == 10 and not killed:
                killed.append(cluster.kill("worker", 1))

    slow = batches().map(lambda ids, _: after(0.02, ids))
    predicted = model.predict(slow, callbacks=[Kill()], verbose=0)
    assert killed
    np.testing.assert_array_equal(predicted, table)


@pytest.mark.parametrize("restart", [False, True], ids=["stays away", "comes back"])
def test_what_a_lost_worker_would_have_made_itself_is_trained_on(cluster, restart):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    kill = Killing(cluster, restart)
    data = strategy.distribute_datasets_from_function(
        lambda context: kill.seen(batches(BATCHES, 2, context.input_pipeline_id))
    )
    with compute_time(strategy, 0.02):
        model.fit(data, epochs=2, verbose=0)
    counts, losses = counts_of(model), strategy.losses(model)
    assert losses.workers >= 1 and losses.batches == 0
    assert counts.min() == 2
    # Where it was is known by the server that counts steps.
    assert counts.sum() - 2 * BATCHES <= losses.steps


class Examples(keras.metrics.Metric):
    """How many there were."""

    def __init__(self):
        super().__init__(dtype="float64", name="examples")
        self.total = self.add_variable((), "zeros", dtype="float64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.size(y_true), "float64"))

    def result(self):
        return self.total.value


@pytest.mark.parametrize("kind", ["one dataset", "workers' own", "workers' own, endless"])
def test_an_evaluation_of_so_many_steps_has_the_metrics_of_all(cluster, monkeypatch, kind):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy, [Examples()])
    killed = []

    def kill(self, run):
        """As all steps are done, and before it is known of which batches."""
        if not killed:
            killed.append(cluster.kill("worker", 1))
        end_pass(self, run)

    end_pass = TestFunction._end_pass
    monkeypatch.setattr(TestFunction, "_end_pass", kill)

    def make(context):
        data = batches(BATCHES, 2, context.input_pipeline_id)
        return data.repeat() if "endless" in kind else data

    data = batches()
    if kind != "one dataset":
        data = strategy.distribute_datasets_from_function(make)
    logs = model.evaluate(data, steps=20, return_dict=True, verbose=0)
    assert killed
    assert logs["examples"] == 20
