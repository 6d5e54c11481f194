"""Embedding collections in decentralized training, with tables on parameter servers."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, assert_close, end_of, live_operations, missing, wait_until

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.strategies import worker_functions

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

WORKERS, PS = 3, 2
BATCH, WIDTH, HISTORY, RATE = 4, 3, 64, 0.1
ROWS, IDS = {"films": 12, "users": 7}, {"films": 2, "users": 3}
SECONDS = 250.0  # That anything may take on a busy machine.


@pytest.fixture
def cluster(clusters):
    return clusters.get(WORKERS, PS)


def collection():
    return EmbeddingCollection(
        [
            TableConfig("films", ROWS["films"], 2, "normal", "sum"),
            TableConfig("users", ROWS["users"], 3, "normal", "mean"),
        ],
        [FeatureConfig(name, name) for name in IDS],
        concatenate=True,
        name="tables",
    )


class Recording(keras.Model):
    """Notes the parameters that workers exchange, and its batch, in each of its iterations."""

    def __init__(self):
        super().__init__()
        self.tables = collection()
        self.dense = keras.layers.Dense(1, use_bias=False)

        def add(shape, dtype):
            return self.add_weight(shape=shape, dtype=dtype, initializer="zeros", trainable=False)

        self.at = add((), "int64")
        self.batches = add((HISTORY,), "int64")
        self.passed = add((HISTORY, WIDTH), "float32")

    def call(self, inputs):
        vectors = self.tables({name: inputs[name] for name in IDS})
        return self.dense(inputs["x"]) + keras.ops.sum(vectors, axis=-1, keepdims=True)

    def note(self, variable, value):
        rows = tf.reshape(self.at.value, [1, 1])
        variable.assign(tf.tensor_scatter_nd_update(variable.value, rows, value))

    def train_step(self, data):
        self.note(self.batches, data[0]["number"][:1])
        self.note(self.passed, tf.reshape(self.dense.kernel.value, [1, WIDTH]))
        self.at.assign_add(tf.ones([], tf.int64))
        return super().train_step(data)


def mean_output(y_true, y_pred):
    """A loss whose gradients depend on nothing but the batch."""
    return keras.ops.mean(y_pred)


def clicks(batches):
    """The batches as arrays, [batches, BATCH, ...], with their numbers; and labels."""
    random = np.random.default_rng(4)
    inputs = {
        # Some rows are never named, and some more than once in a batch and in an example.
        "films": random.integers(0, ROWS["films"] - 3, (batches, BATCH, IDS["films"])),
        "users": random.integers(0, ROWS["users"] - 1, (batches, BATCH, IDS["users"])),
        "x": random.normal(size=(batches, BATCH, WIDTH)).astype(np.float32),
        "number": np.repeat(np.arange(batches)[:, None], BATCH, 1),
    }
    return inputs, random.integers(0, 2, (batches, BATCH, 1)).astype(np.float32)


def click_model(make=lambda: recsync.optimizers.Adagrad(RATE), **options):
    """A model of `clicks`; to be made in a strategy's scope, or in none."""
    inputs = {name: keras.Input((width,), dtype="int64", name=name) for name, width in IDS.items()}
    # A table of Keras's own is like all variables.
    films = keras.layers.Embedding(ROWS["films"], 2, name="own")(inputs["films"])
    parts = [collection()(inputs), keras.layers.Flatten()(films)]
    x = keras.layers.Dense(4, "tanh")(keras.layers.Concatenate()(parts))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))
    model.compile(make(), "binary_crossentropy", **options)
    return model


def dataset(batches=24):
    inputs, labels = clicks(batches)
    return tf.data.Dataset.from_tensor_slices(({name: inputs[name] for name in IDS}, labels))


def tables_of(model):
    layer = model.get_layer("tables")
    return {name: layer.table_values(name) for name in ROWS}


def values_of(copies, model, variables):
    """The workers' copies of some variables."""
    places = {id(variable): i for i, variable in enumerate(copies.variables)}
    values = [copies.values(worker) for worker in range(WORKERS)]
    return [[own[places[id(v._value)]] for own in values] for v in variables]


@pytest.mark.parametrize(("order", "steps"), [("parallel", 3), ("serial", 1)])
def test_tables_are_one_for_all_workers_and_dense_parameters_are_exchanged(
    cluster, tmp_path, order, steps
):
    batches = WORKERS * 6
    inputs, labels = clicks(batches)
    topo = topology.ring(WORKERS)
    strategy = recsync.HopStrategy(cluster, topo, order=order, check_invariants=True)
    with strategy.scope():
        model = Recording()
        model.compile(recsync.optimizers.SGD(RATE), mean_output, steps_per_execution=steps)
        model({name: values[0] for name, values in inputs.items()})
    devices = [variable._value.device for variable in model.tables.variables]
    assert {device.split("/")[1] for device in devices} == {"job:ps"}
    assert len(set(devices)) == PS
    start, kernel = tables_of(model), model.dense.kernel.numpy()[:, 0]
    timeline = recsync.callbacks.Timeline(tmp_path / "timeline.json")
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((inputs, labels)),
        verbose=0,
        callbacks=[recsync.callbacks.HopReport(), recsync.callbacks.TrainingReport(), timeline],
    ).history
    assert history["iterations_per_second"][0] > 0

    # Each batch has been trained on once, whoever did it: rows are what numpy says.
    for name, table in tables_of(model).items():
        counts = np.bincount(inputs[name].reshape(-1), minlength=ROWS[name])
        share = 1 if name == "films" else IDS[name]
        expected = start[name] - RATE * counts[:, None] / share / BATCH
        np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-5)
    report = strategy.staleness(model)
    # Of each batch, a row counts once.
    named = sum(len(np.unique(ids)) for name in ROWS for ids in inputs[name])
    assert (report.rows.count, report.dense.count) == (named, 0)
    assert history["staleness"] == [report.rows.mean]

    # What is copied is decentralized SGD, until the first worker ran out of data.
    copies = strategy.copies(model)
    assert [[value.shape for value in copy] for copy in copies] == [[(WIDTH, 1)]] * WORKERS
    noted = [model.at, model.batches, model.passed]
    at, numbers, passed = values_of(strategy._synchronizer(model).copies, model, noted)
    assert sum(at) == batches and min(at) >= 3
    assert [report.iteration for report in strategy.hop_report(model)] == [a - 1 for a in at]
    parameters = np.broadcast_to(kernel.astype(np.float64), (WORKERS, WIDTH))
    for k in range(min(at)):
        found = np.array([own[k] for own in passed])
        np.testing.assert_allclose(found, parameters, rtol=2e-5, atol=2e-5)
        step = RATE * np.array([inputs["x"][own[k]].mean(0) for own in numbers])
        if order == "serial":
            parameters = topo.weights.T @ (parameters - step)
        else:
            parameters = topo.weights.T @ parameters - step
    mean = np.mean([copy[0] for copy in copies], axis=0)
    np.testing.assert_allclose(model.dense.kernel.numpy(), mean, rtol=1e-6)


@pytest.mark.cases("serial-3-<lambda>")
@pytest.mark.parametrize(
    ("order", "steps", "make"),
    [
        ("parallel", 1, lambda: recsync.optimizers.Adagrad(RATE)),
        ("serial", 3, lambda: recsync.optimizers.Adam(RATE, global_clipnorm=0.1)),
    ],
)
def test_one_worker_trains_as_one_process_does(clusters, tmp_path, order, steps, make):
    cluster = clusters.get(1, PS, processes=0)
    strategy = recsync.HopStrategy(cluster, topology.complete(1), order=order)
    alone = click_model(make)
    with strategy.scope():
        model = click_model(make, steps_per_execution=steps)
    alone.save_weights(tmp_path / "start.weights.h5")
    model.load_weights(tmp_path / "start.weights.h5")
    data = dataset()
    expected = alone.fit(data, shuffle=False, verbose=0).history
    history = model.fit(data, shuffle=False, verbose=0).history
    assert_close([history["loss"]], [expected["loss"]])
    assert_close(tables_of(model).values(), tables_of(alone).values())
    copied = [v for v in model.trainable_variables if "tables" not in v.path]
    same = [v for v in alone.trainable_variables if "tables" not in v.path]
    assert_close([v.numpy() for v in copied], [v.numpy() for v in same])
    assert_close(strategy.copies(model)[0], [v.numpy() for v in same])
    assert_close([model.evaluate(data, verbose=0)], [alone.evaluate(data, verbose=0)])
    assert model.optimizer.iterations.numpy() == 24
    # Each step pulls when the one before is done, within a call too.
    assert strategy.staleness(model).rows.max == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: keras.optimizers.SGD(RATE),
            "optimizer must be one of tf_recsync.optimizers .* the tables of tables lie on "
            r"parameter servers, not keras.*SGD \(sgd\)\. On a cluster with ps=0, instead of ps=2",
        ),
        (lambda: recsync.optimizers.Ftrl(RATE), "optimizer must not be Ftrl under HopStrategy"),
        (lambda: recsync.optimizers.SGD(RATE, use_ema=True), "use_ema of the optimizer can't be"),
    ],
    ids=["a stock one", "Ftrl", "moving averages"],
)
def test_an_optimizer_that_can_not_train_tables_on_servers_is_refused(cluster, make, message):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        model = click_model(make)
    for call in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=message):
            call(dataset(), verbose=0)


def adapted(values):
    layer = keras.layers.Normalization()
    layer.adapt(np.concatenate([values, -values]))
    return layer


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "with a layer from outside"])
def test_without_collection_any_optimizer_trains_on_a_cluster_with_servers(cluster, is_plain):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    x, y = np.zeros((24, 2), np.int64), np.ones((24, 2), np.float32)
    # Made outside of the scope, it lies here, and on no server.
    last = keras.layers.Rescaling(1.0) if is_plain else adapted(y + 1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Embedding(10, 1), keras.layers.Flatten(), last])
        model.compile("sgd", "mse")
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=2, verbose=0)
    assert model.evaluate(x, y, verbose=0) < before
    assert strategy.copies(model)[0][0].shape == (10, 1)
    assert strategy.staleness(model).rows.count == 0


@pytest.mark.full
def test_what_is_saved_goes_on_with_tables_and_each_workers_copy(cluster, tmp_path):
    def made():
        strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
        with strategy.scope():
            model = click_model()
        return strategy, model, strategy.worker_states(model)

    strategy, model, workers = made()
    model.fit(dataset(), verbose=0)
    path = tf.train.Checkpoint(model=model, workers=workers).save(tmp_path / "checkpoint")
    model.save_weights(tmp_path / "clicks.weights.h5")
    expected = model.predict(dataset(), verbose=0)
    recsync.serving.export_model(model, tmp_path / "exported")
    served = tf.saved_model.load(tmp_path / "exported")
    inputs = clicks(24)[0]
    found = served.serve({name: inputs[name][0] for name in IDS})
    np.testing.assert_allclose(found, expected[:BATCH], rtol=1e-5)

    later, after, workers = made()
    tf.train.Checkpoint(model=after, workers=workers).restore(path).assert_consumed()
    assert_close(tables_of(after).values(), tables_of(model).values(), 0)
    iterations = [report.iteration for report in strategy.hop_report(model)]
    assert [report.iteration for report in later.hop_report(after)] == iterations
    copies = strategy.copies(model)
    assert not np.array_equal(copies[0][1], copies[1][1])
    for copy, saved in zip(later.copies(after), copies, strict=True):
        assert_close(copy, saved, 0)
    rows = later.staleness(after).rows
    assert rows.count == strategy.staleness(model).rows.count > 0
    after.fit(dataset(), verbose=0)
    assert later.staleness(after).rows.count == 2 * rows.count
    assert min(r.iteration for r in later.hop_report(after)) > max(iterations)

    # In one process.
    alone = click_model()
    alone.load_weights(tmp_path / "clicks.weights.h5")
    assert_close(tables_of(alone).values(), tables_of(model).values(), 0)
    np.testing.assert_allclose(alone.predict(dataset(), verbose=0), expected, rtol=1e-5)


def test_rows_are_pulled_in_their_iteration_and_the_average_waits_for_no_push(cluster, monkeypatch):
    trace_loop, traced = worker_functions.trace_loop, []

    def seen(once, *arguments):
        traced.append(once.graph)
        return trace_loop(once, *arguments)

    monkeypatch.setattr(worker_functions, "trace_loop", seen)
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        model = click_model()
    model.fit(dataset(WORKERS), verbose=0)
    found = {}
    for op in traced[0].get_operations():
        found.setdefault((op.type, end_of(op.device)), []).append(op)
    (iteration,), (average,) = (found[f"RecsyncHop{k}", "worker"] for k in ("Next", "Receive"))
    for server in "01":
        (gather,), (update,) = (found[f"Recsync{k}Rows", server] for k in ("Gather", "Adagrad"))
        assert iteration in live_operations([gather])
        assert average not in live_operations([gather])
        assert update not in live_operations([average])


@pytest.mark.full
def test_messages_pass_the_servers_links(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        ids = keras.Input((BATCH,), dtype="int64", name="id")
        tables = [TableConfig("wide", 100, 100)]
        layer = EmbeddingCollection(tables, [FeatureConfig("id", "wide")], concatenate=True)
        model = keras.Model({"id": ids}, keras.layers.Dense(1)(layer({"id": ids})))
        model.compile(recsync.optimizers.SGD(RATE), "mse")
    data = tf.data.Dataset.from_tensor_slices((np.zeros((60, BATCH), np.int64), np.zeros((60, 1))))
    data = data.map(lambda x, y: ({"id": x}, y)).batch(5)
    model.fit(data, verbose=0)
    # The pooled vectors of 60 examples and their gradients, over two links or one.
    sent = 2 * 60 * 100 * 4
    recsync.testing.set_bandwidth(strategy, sent / 2, job="ps")
    began = time.monotonic()
    model.fit(data, verbose=0)
    assert time.monotonic() - began > 1
    with pytest.raises(ValueError, match=r"one of \('worker', 'ps'\) for HopStrategy, not 'chief'"):
        recsync.testing.set_bandwidth(strategy, 1e6, job="chief")


def training(cluster, **options):
    """A strategy, and a model that takes its time."""
    strategy = recsync.HopStrategy(cluster, topology.complete(WORKERS), **options)
    recsync.testing.set_compute_time(strategy, 0.02)
    with strategy.scope():
        return strategy, click_model(steps_per_execution=2)


@pytest.mark.full
def test_tables_are_trained_on_when_a_worker_is_killed_and_when_it_is_back(cluster, caplog):
    strategy, model = training(cluster, max_iteration_gap=4, backup_workers=1)
    seen = {}

    def updated():
        return strategy.staleness(model).rows.count

    def kill():
        cluster.kill("worker", 2)

    def restart():
        cluster.restart("worker", 2)
        assert wait_until(lambda: "worker:2 is back and takes part again" in caplog.text, SECONDS)
        seen["steps"], seen["updated"] = strategy.worker_steps(model)[2], updated()
        assert wait_until(lambda: strategy.worker_steps(model)[2] > seen["steps"] + 4, SECONDS)
        assert updated() > seen["updated"]
        model.stop_training = True

    callbacks = [AtBatch(20, kill), AtBatch(80, restart)]
    model.fit(dataset(50).repeat(2000), verbose=0, callbacks=callbacks)
    assert missing(strategy.copies(model)) == []
    assert strategy.losses(model).workers == 1
    before = tables_of(model)
    model.fit(dataset(), verbose=0)
    for name, table in tables_of(model).items():
        assert not np.array_equal(table, before[name])


def test_a_killed_server_ends_training_with_an_error_that_names_it(cluster):
    # Nobody waits for it to come back.
    strategy, model = training(cluster, backup_workers=1, worker_timeout=10_000.0)
    kill = AtBatch(8, lambda: cluster.kill("ps", 1))
    with pytest.raises(RuntimeError, match="parameter server ps:1 was lost"):
        model.fit(dataset(50).repeat(2000), verbose=0, callbacks=[kill])
