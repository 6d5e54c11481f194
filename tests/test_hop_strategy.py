"""Decentralized training with `model.fit`."""

import collections
import gc
import io
import logging
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from decentralized_sgd import BATCH, RATE, WIDTH, Recording, recorded, regression, simulate
from helpers import check_group_auc, wait_until

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.ops import hop
from tf_recsync.synchronization.hop_edges import Edges
from tf_recsync.synchronization.remote_values import at

WORKERS = 4
# A directed graph whose weights differ from edge to edge.
UNEVEN = topology.from_edges(WORKERS, [(0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)])


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, processes=0)


@pytest.mark.cases("serial with momentum", "directed", "notify_ack", "parallel")
@pytest.mark.parametrize(
    ("topo", "options", "momentum"),
    [
        (topology.ring_based(WORKERS), {}, 0.0),
        (UNEVEN, {"order": "serial"}, 0.0),
        (UNEVEN, {}, 0.9),
        (topology.ring(WORKERS), {"order": "serial"}, 0.9),
        (topology.exponential(WORKERS), {"max_iteration_gap": 2}, 0.0),
        (topology.star(WORKERS), {"max_iteration_gap": None}, 0.0),
        (topology.ring(WORKERS), {"protocol": "notify_ack"}, 0.0),
    ],
    ids=[
        *("parallel", "serial", "parallel with momentum", "serial with momentum", "directed"),
        *("without tokens", "notify_ack"),
    ],
)
def test_standard_training_is_decentralized_sgd_step_by_step(cluster, topo, options, momentum):
    batches = WORKERS * 7
    x, y, dataset = regression(batches)
    strategy = recsync.HopStrategy(cluster, topo, check_invariants=True, **options)
    with strategy.scope():
        model = Recording()
        optimizer = keras.optimizers.SGD(RATE, momentum=momentum)
        model.compile(optimizer, "mse", steps_per_execution=3)
        model((np.zeros(1, np.int64), np.zeros((1, WIDTH), np.float32)))
    start = model.dense.kernel.numpy()[:, 0]
    model.fit(dataset, verbose=0)
    copies = strategy.copies(model)
    at, numbers, histories = recorded(strategy, model)
    assert sum(at) == batches
    used = np.concatenate([n[:a] for n, a in zip(numbers, at, strict=True)])
    assert collections.Counter(used.tolist()) == collections.Counter(range(batches))
    # Until the first one ran out of data, all were there.
    steps = min(at)
    assert steps >= 3
    serial = options.get("order") == "serial"
    expected = simulate(topo, x, y, numbers, start, steps, serial, momentum)
    for worker in range(WORKERS):
        np.testing.assert_allclose(
            histories[worker][:steps], expected[:, worker], rtol=2e-5, atol=2e-5
        )
    reports = strategy.hop_report(model)
    assert [report.iteration for report in reports] == [a - 1 for a in at]
    mean = np.mean([copy[0] for copy in copies], axis=0)
    np.testing.assert_allclose(model.dense.kernel.numpy(), mean, rtol=1e-6)


def recording(cluster, topo, optimizer, check_invariants=True, **options):
    """A strategy, a model that records, and what a checkpoint keeps of its workers."""
    strategy = recsync.HopStrategy(cluster, topo, check_invariants=check_invariants, **options)
    with strategy.scope():
        model = Recording()
        model.compile(optimizer(), "mse")
        model((np.zeros(1, np.int64), np.zeros((1, WIDTH), np.float32)))
    return strategy, model, strategy.worker_states(model)


def test_a_checkpoint_has_all_workers_go_on_as_they_were(cluster, tmp_path):
    topo = UNEVEN
    x, y, dataset = regression(WORKERS * 7)

    def sgd():
        return keras.optimizers.SGD(RATE)

    strategy, model, workers = recording(cluster, topo, sgd)
    model.fit(dataset, verbose=0)
    path = tf.train.Checkpoint(model=model, workers=workers).save(tmp_path / "c")
    copies = strategy.copies(model)
    iterations = [report.iteration for report in strategy.hop_report(model)]
    at, _, _ = recorded(strategy, model)

    strategy, after, workers = recording(cluster, topo, sgd)
    tf.train.Checkpoint(model=after, workers=workers).restore(path).assert_consumed()
    np.testing.assert_array_equal(after.dense.kernel.numpy(), model.dense.kernel.numpy())
    assert [report.iteration for report in strategy.hop_report(after)] == iterations
    after.fit(dataset, verbose=0)
    now, numbers, histories = recorded(strategy, after)
    steps = min(b - a for a, b in zip(at, now, strict=True))
    assert steps >= 2
    numbers = [numbers[worker][a:] for worker, a in enumerate(at)]
    start = np.array([copy[0][:, 0] for copy in copies])
    assert len(np.unique(start, axis=0)) == WORKERS
    expected = simulate(topo, x, y, numbers, start, steps)
    for worker, a in enumerate(at):
        found = histories[worker][a : a + steps]
        np.testing.assert_allclose(found, expected[:, worker], rtol=2e-5, atol=2e-5)
    begun = [report.iteration for report in strategy.hop_report(after)]
    assert min(begun) >= max(iterations) + steps

    # Restored into what has trained already, optimizer and all.
    tf.train.Checkpoint(model=after, workers=workers).restore(path).assert_consumed()
    for copy, saved in zip(strategy.copies(after), copies, strict=True):
        np.testing.assert_array_equal(copy[0], saved[0])
    assert recorded(strategy, after)[0] == at
    # And though they are asked in which iterations they are.
    assert [report.iteration for report in strategy.hop_report(after)] == iterations
    saved = tf.train.Checkpoint(workers=workers).save(tmp_path / "again")
    # What is assigned after that holds.
    after.dense.kernel.assign(np.ones((WIDTH, 1)))
    after.optimizer.learning_rate.assign(0.0)
    after.fit(dataset.take(WORKERS), verbose=0)
    np.testing.assert_allclose(strategy.copies(after)[3][0], 1.0, rtol=1e-6)
    now = [report.iteration for report in strategy.hop_report(after)]
    assert max(iterations) < max(now) < min(begun)
    tf.train.Checkpoint(workers=workers).restore(saved).assert_consumed()
    assert [report.iteration for report in strategy.hop_report(after)] == iterations


def without_workers(serialized: bytes, count: int) -> bytes:
    """What a checkpoint of the first `count` workers held before it said how many there were."""
    with np.load(io.BytesIO(serialized)) as arrays:
        kept = {
            name: arrays[name]
            for name in arrays.files
            if name != "groups" and ("/" not in name or int(name.split("/")[0]) < count)
        }
    kept["workers"], kept["iterations"] = kept["workers"][:count], kept["iterations"][:count]
    out = io.BytesIO()
    np.savez(out, **kept)
    return out.getvalue()


def test_workers_of_another_number_begin_with_the_mean(cluster, caplog):
    def momentum():
        return keras.optimizers.SGD(RATE, momentum=0.9)

    topo = topology.ring(WORKERS)
    _, _, dataset = regression(WORKERS * 4)
    strategy, model, workers = recording(cluster, topo, momentum)
    with pytest.raises(ValueError, match="must be built and compiled"):
        strategy.worker_states(Recording())
    model.fit(dataset, verbose=0)
    saved = workers.serialize()
    copies = strategy.copies(model)[:3]
    velocities = strategy._synchronizer(model).copies.all_values()

    strategy, model, workers = recording(cluster, topo, momentum)
    workers.deserialize(without_workers(saved, 3))
    assert f"parameters of 3 workers, and there are {WORKERS}" in caplog.text
    mean = np.mean([copy[0] for copy in copies], axis=0)
    np.testing.assert_allclose(model.dense.kernel.numpy(), mean, rtol=1e-6)
    found = strategy._synchronizer(model).copies.all_values()
    assert sorted(found) == list(range(WORKERS))
    for values in found.values():
        for i, value in enumerate(values):
            if value.dtype == np.float32:
                expected = np.mean([velocities[worker][i] for worker in range(3)], axis=0)
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)

    # Of an optimizer that keeps less.
    _, _, workers = recording(cluster, topo, lambda: keras.optimizers.SGD(RATE))
    with pytest.raises(ValueError, match=f"holds .* copies of {WORKERS} workers, each"):
        workers.deserialize(saved)


def classifier(optimizer, **compile_options):
    model = keras.Sequential(
        [
            keras.layers.Input((WIDTH,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Activation("relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], **compile_options)
    return model


def labelled(examples, seed=1):
    random = np.random.default_rng(seed)
    x = random.normal(size=(examples, WIDTH)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


def test_fit_evaluate_predict_and_callbacks_work_as_users_know_them(cluster, tmp_path):
    batches = 8 * WORKERS
    x, y = labelled(batches * BATCH)
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS), check_invariants=True)
    with strategy.scope():
        model = classifier(keras.optimizers.SGD(0.1, momentum=0.9), steps_per_execution=2)
    seen = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch < 2 or batch > batches - 3:
                seen.append(float(np.abs(model.trainable_variables[0].numpy()).sum()))

    history = model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
        epochs=3,
        validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(64),
        callbacks=[
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, now: now / 2 if epoch else now),
            keras.callbacks.TensorBoard(tmp_path / "logs"),
            Reads(),
        ],
        verbose=0,
    ).history
    assert history["loss"][-1] < history["loss"][0]
    assert history["val_accuracy"][-1] > 0.6  # Far from converged; chance is 0.5.
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1 / 4)
    assert len(set(seen)) > 2  # Reading while workers train shows what is learned.
    loss, accuracy = model.evaluate(x, y, batch_size=64, verbose=0)
    assert (loss, accuracy) == pytest.approx(
        (history["val_loss"][-1], history["val_accuracy"][-1]), abs=1e-4
    )
    predicted = model.predict(x, batch_size=100, verbose=0)
    # Outside, the model is an ordinary one with the mean of the copies.
    local = keras.Sequential.from_config(model.get_config())
    local.build(model.input_shape)
    local.set_weights(model.get_weights())
    np.testing.assert_allclose(predicted, local(x), rtol=1e-5, atol=1e-6)
    copies = strategy.copies(model)
    for i, variable in enumerate(model.trainable_variables):
        mean = np.mean([copy[i] for copy in copies], axis=0)
        np.testing.assert_allclose(variable.numpy(), mean, rtol=1e-5, atol=1e-7)
    assert len({copy[0].tobytes() for copy in copies}) > 1
    loaded = keras.models.load_model(tmp_path / "best.keras")
    loaded.run_eagerly = True  # Sooner done than traced.
    assert loaded.evaluate(x, y, batch_size=len(x), verbose=0)[0] == pytest.approx(
        min(history["val_loss"]), abs=1e-3
    )


@pytest.mark.full
def test_the_group_auc_of_each_epoch_is_that_of_its_predictions(cluster):
    check_group_auc(recsync.HopStrategy(cluster, topology.ring(WORKERS)), keras.optimizers.SGD)


def test_what_is_assigned_all_workers_take_over(cluster):
    x, y = labelled(4 * WORKERS * BATCH)
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS), output=3)
    with strategy.scope():
        model = classifier(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    model.fit(dataset, verbose=0)
    copies = strategy.copies(model)
    np.testing.assert_array_equal(model.trainable_variables[0].numpy(), copies[3][0])
    model.optimizer.learning_rate.assign(0.0)
    model.trainable_variables[0].assign(np.ones_like(copies[0][0]))
    model.fit(dataset, verbose=0)
    after = strategy.copies(model)
    # What was assigned is everybody's; the rest stayed each worker's own, but for averages.
    for copy in after:
        np.testing.assert_allclose(copy[0], 1.0, atol=1e-6)
    assert not np.allclose(after[0][-1], 1.0)
    total = sum(copy[-1].astype(np.float64) for copy in copies)
    assert np.shape(total) == np.shape(after[0][-1])


def two_layers(cluster, frozen=()):
    """A strategy, and a model of two layers of the same shapes, with some of them frozen."""
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH) for _ in range(2)]
        model = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
        for number in frozen:
            layers[number].trainable = False
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return strategy, model


def test_a_layer_that_is_frozen_between_two_fits_stays_as_it_is(cluster):
    strategy, model = two_layers(cluster)
    x = np.random.default_rng(0).normal(size=(2 * WORKERS * BATCH, WIDTH)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x))
    model.fit(data.batch(BATCH, drop_remainder=True), verbose=0)
    before = strategy.copies(model)
    model.layers[0].trainable = False
    # Batches of another shape: the step is traced again.
    model.fit(data.batch(BATCH // 2, drop_remainder=True), verbose=0)
    trained = strategy.copies(model)
    model.layers[0].trainable = True
    after = strategy.copies(model)
    for worker in range(WORKERS):
        for was, now in zip(before[worker][:2], after[worker][:2], strict=True):
            np.testing.assert_array_equal(now, was)
        assert not np.array_equal(after[worker][2], before[worker][2])
        for now, told in zip(after[worker][2:], trained[worker], strict=True):
            np.testing.assert_array_equal(told, now)


def test_copies_of_a_model_of_which_other_layers_are_trained_are_refused(cluster):
    """They are in another order, though they are as many, of the same shapes."""
    strategy, model = two_layers(cluster)
    x = np.ones((WORKERS * BATCH, WIDTH), np.float32)
    model.fit(x, 2 * x, BATCH, verbose=0)
    saved = strategy.worker_states(model).serialize()
    after, other = two_layers(cluster, frozen=[0])
    with pytest.raises(ValueError, match="other layers are trained"):
        after.worker_states(other).deserialize(saved)
    # The last layer's come last in both.
    after, other = two_layers(cluster, frozen=[1])
    after.worker_states(other).deserialize(saved)
    for now, was in zip(after.copies(other), strategy.copies(model), strict=True):
        for value, saved_value in zip(now, was[:2], strict=True):
            np.testing.assert_array_equal(value, saved_value)


def test_steps_per_epoch_splits_a_run_and_iterations_go_on(cluster):
    steps = 6 * WORKERS
    x, y = labelled(4 * steps * BATCH)
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS), check_invariants=True)
    with strategy.scope():
        model = classifier(keras.optimizers.Adam(0.03))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    history = model.fit(dataset, epochs=3, steps_per_epoch=steps, verbose=0).history
    assert len(history["loss"]) == 3
    assert history["loss"][-1] < history["loss"][0]
    reports = strategy.hop_report(model)
    entered = sum(report.iteration + 1 for report in reports)
    # Epochs begin with everybody on the same iteration: some left out, none done twice.
    assert 3 * steps <= entered <= 3 * steps + 3 * WORKERS * 5


def test_an_error_of_a_worker_ends_training_with_it(cluster):
    x, y = labelled(8 * WORKERS * BATCH)
    y[4 * WORKERS * BATCH] = np.nan

    class Checked(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            checked = tf.debugging.check_numerics(data[1], "labels")
            return super().train_step((data[0], checked))

    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        model = Checked()
        model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="labels"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    # The cluster is as good as new.
    few = 2 * WORKERS * BATCH
    model.fit(x[:few], y[:few], batch_size=BATCH, verbose=0)


@pytest.mark.full
def test_two_strategies_on_a_cluster_do_not_collide(cluster):
    x, y, dataset = regression(WORKERS * 6)
    runs = []
    for topo in (topology.ring(WORKERS), topology.ring_based(WORKERS)):
        strategy, model, _ = recording(cluster, topo, lambda: keras.optimizers.SGD(RATE))
        # All begin alike: a value of the other strategy would go unnoticed but for its amount.
        model.dense.kernel.assign(np.ones((WIDTH, 1)))
        runs.append((topo, strategy, model, np.ones((WORKERS, WIDTH)), [0] * WORKERS))
    for _ in range(2):
        for i, (topo, strategy, model, start, begun) in enumerate(runs):
            model.fit(dataset, verbose=0)
            now, numbers, histories = recorded(strategy, model)
            steps = min(b - a for a, b in zip(begun, now, strict=True))
            assert steps >= 2
            numbers = [own[a:] for own, a in zip(numbers, begun, strict=True)]
            expected = simulate(topo, x, y, numbers, start, steps)
            for worker, a in enumerate(begun):
                found = histories[worker][a : a + steps]
                np.testing.assert_allclose(found, expected[:, worker], rtol=2e-5, atol=2e-5)
            copies = np.array([copy[0][:, 0] for copy in strategy.copies(model)])
            runs[i] = topo, strategy, model, copies, now


def test_loops_that_start_while_an_epoch_ends_end_with_it(cluster, monkeypatch):
    strategy, model, _ = recording(
        cluster, topology.ring(WORKERS), lambda: keras.optimizers.SGD(RATE)
    )
    model.fit(regression(WORKERS)[2], verbose=0)
    exchange = strategy._synchronizer(model).exchanges[0]
    exchange.begin(None)
    starts, goes_on = threading.Event(), threading.Event()
    start = Edges.start

    def start_late(edges, sender, receiver):
        starts.set()
        assert goes_on.wait(60)
        start(edges, sender, receiver)

    monkeypatch.setattr(Edges, "start", start_late)
    threads = [threading.Thread(target=exchange.carry_on), threading.Thread(target=exchange.end)]
    threads[0].start()
    assert starts.wait(60)
    threads[1].start()
    threads[1].join(0.5)  # It would be past all loops by then.
    goes_on.set()
    for thread in threads:
        thread.join()
    assert "recsync_hop_monitor" not in [thread.name for thread in threading.enumerate()]


def test_a_queue_dies_with_its_strategy(cluster):
    strategy, model, states = recording(
        cluster, topology.ring(WORKERS), lambda: keras.optimizers.SGD(RATE)
    )
    model.fit(regression(WORKERS * 2)[2], verbose=0)
    handles = [strategy._synchronizer(model).handle(worker) for worker in range(WORKERS)]

    def iteration(worker):
        with at(cluster, worker):
            return int(hop.state(handles[worker]).iteration)

    assert [iteration(worker) for worker in range(WORKERS)] == [
        report.iteration for report in strategy.hop_report(model)
    ]
    del strategy, model, states
    keras.utils.clear_session()

    def is_gone(worker):
        gc.collect()  # A worker's thread may be about to end still.
        try:
            iteration(worker)
        except tf.errors.NotFoundError:
            return True
        return False

    for worker in range(WORKERS):
        assert wait_until(lambda worker=worker: is_gone(worker), 30.0)


def test_nobody_waits_for_those_who_get_no_step_of_an_epoch(cluster):
    strategy = recsync.HopStrategy(cluster, topology.complete(WORKERS), max_iteration_gap=4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    x, y = np.ones((BATCH, WIDTH), np.float32), np.ones((BATCH, 1), np.float32)
    batches = tf.data.Dataset.from_tensors((x, y)).repeat()
    for steps in (1, 2, WORKERS + 1):
        model.fit(batches, steps_per_epoch=steps, epochs=3, verbose=0)
        assert sum(strategy.worker_steps(model)) == 3 * steps


@pytest.mark.parametrize(
    ("options", "tells_all"),
    [
        ({"check_invariants": False}, False),
        ({"check_invariants": True}, True),
        ({"check_invariants": False, "max_iteration_gap": None}, True),
    ],
    ids=["tokens", "checks", "paths"],
)
def test_only_neighbors_hear_of_one_that_leaves_unless_others_have_bounds_by_it(
    cluster, monkeypatch, options, tells_all
):
    set_neighbor, told_of_itself = hop.set_neighbor, []

    def counted(handle, neighbor, since, until):
        own = tf.DeviceSpec.from_string(handle.device).task
        told_of_itself.append(own == neighbor)
        return set_neighbor(handle, neighbor, since, until)

    monkeypatch.setattr(hop, "set_neighbor", counted)
    _, _, dataset = regression(WORKERS)
    topo = topology.ring(WORKERS)
    _, model, _ = recording(cluster, topo, lambda: keras.optimizers.SGD(RATE), **options)
    model.fit(dataset, verbose=0)
    model.fit(dataset, verbose=0)  # By now all have been told.
    # Each worker leaves, which its two neighbors hear.
    assert told_of_itself.count(False) >= 2 * WORKERS
    assert any(told_of_itself) == tells_all


def test_a_worker_that_had_left_does_the_steps_that_others_found_no_batches_for(cluster, caplog):
    caplog.set_level(logging.INFO, "absl")  # Whatever examples have set.
    strategy = recsync.HopStrategy(cluster, topology.ring_based(WORKERS))
    batch = np.ones((64, WIDTH), np.float32), np.ones((64, 1), np.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", steps_per_execution=8)
    # Each worker has 18 batches of its own, for two calls of 8 steps and two more. When all have
    # made two calls, one takes the last 8 steps, and cannot be far ahead of the others before they
    # have left: it gives back 6 steps when they are gone.
    own = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensors(batch).repeat(18)
    )
    model.fit(own, steps_per_epoch=18 * WORKERS, verbose=0)
    assert strategy.worker_steps(model) == [18] * WORKERS
    assert "goes on from iteration" in caplog.text


def test_nobody_waits_in_a_later_epoch_for_one_whose_data_have_ended(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring_based(WORKERS), max_iteration_gap=2)
    batch = np.ones((BATCH, WIDTH), np.float32), np.ones((BATCH, 1), np.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    few = [1] + [12] * (WORKERS - 1)
    own = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensors(batch).repeat(few[context.input_pipeline_id])
    )
    model.fit(own, steps_per_epoch=sum(few) // 2, epochs=2, verbose=0)
    assert sum(strategy.worker_steps(model)) == sum(few) // 2 * 2
