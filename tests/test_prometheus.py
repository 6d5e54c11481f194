"""Figures of a run that Prometheus scrapes while the model trains."""

import builtins
import logging
import shutil
import socket
import urllib.error
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, compute_time
from prometheus_client.parser import text_string_to_metric_families

import tf_recsync as recsync
from tf_recsync.callbacks import Prometheus, TrainingReport
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.strategies.slots import Losses

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

BATCH, BATCHES = 8, 40


@pytest.fixture
def strategy(clusters):
    return recsync.AsyncStrategy(clusters.get(workers=2, ps=2))


def model_of(strategy):
    with strategy.scope():
        ids = keras.Input((3,), dtype="int64", name="ids")
        table = TableConfig("users", 64, 4, keys="any")
        layer = EmbeddingCollection([table], [FeatureConfig("ids", "users")], concatenate=True)
        layer.name = "keyed"
        model = keras.Model({"ids": ids}, keras.layers.Dense(1, "sigmoid")(layer({"ids": ids})))
        model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy")
    return model


def dataset():
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 40, (BATCHES * BATCH, 3))
    return tf.data.Dataset.from_tensor_slices(({"ids": ids}, ids[:, :1] % 2)).batch(BATCH)


def parsed(text) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples, by their names and the values of their labels."""
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels.values())
            samples.setdefault(sample.name.removeprefix("recsync_"), {})[labels] = sample.value
    return samples


def scraped(prometheus):
    url = f"http://127.0.0.1:{prometheus.port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as page:
        return parsed(page.read().decode())


class Scrapes(keras.callbacks.Callback):
    """Scrapes once in each epoch."""

    def __init__(self, prometheus, found):
        super().__init__()
        self._prometheus, self._found, self._epoch = prometheus, found, 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch >= 12 and len(self._found) == self._epoch:
            self._found.append(scraped(self._prometheus))


def test_what_is_scraped_is_what_the_strategy_says(strategy):
    model, prometheus, during = model_of(strategy), Prometheus(port=0, every_seconds=1e-9), []
    callbacks = [TrainingReport(), prometheus, Scrapes(prometheus, during)]
    with compute_time(strategy, 0.01):
        history = model.fit(dataset(), epochs=2, verbose=0, callbacks=callbacks).history
    try:
        found = scraped(prometheus)
    finally:
        prometheus.close()
    assert found["training"] == {(): 0} and during[0]["training"] == {(): 1}
    assert found["epoch"] == {(): 1}
    assert found["batches_total"] == {(): 2 * BATCHES}
    assert 0 < during[0]["batches_total"][()] < 2 * BATCHES
    assert {name for (name,) in found["log"]} == history.keys()
    # What the end of an epoch has logged stays, and the next one's batches log their loss.
    assert {name for (name,) in during[0]["log"]} == {"loss"}
    assert during[1]["log"].keys() == found["log"].keys()
    assert during[1]["log"]["staleness",] == pytest.approx(history["staleness"][0])
    for name in ("loss", "staleness", "keys_admitted"):
        assert found["log"][name,] == pytest.approx(history[name][-1])
    losses = strategy.losses(model)
    assert found["losses_total"]["workers",] == losses.workers == 0
    waits = found["data_wait_seconds_total"]
    assert waits == {(str(w),): pytest.approx(s) for w, s in enumerate(strategy.data_wait(model))}
    (counts,) = strategy.tables(model).values()
    assert found["table_keys"]["keyed/users", "used"] == counts.used == 40
    assert found["table_keys"]["keyed/users", "capacity"] == 63
    servers = {f"{member.job}:{member.index}" for member in strategy.members()}
    assert {server for server, _ in found["server_state"]} == servers
    assert found["server_life"].keys() == {(server,) for server in servers}
    memory = {f"{own.job}:{own.index}": own for own in strategy.memory(model)}
    of_tables = {s: size for (kind, s), size in found["server_bytes"].items() if kind == "tables"}
    assert of_tables == {server: own.tables for server, own in memory.items()}
    with pytest.raises(urllib.error.URLError):
        scraped(prometheus)


@pytest.mark.full
def test_a_worker_that_was_lost_is_counted(clusters):
    cluster = clusters.get(workers=2, ps=1)
    strategy, prometheus = recsync.AsyncStrategy(cluster), Prometheus(port=0)
    model = model_of(strategy)
    before = {(f"{m.job}:{m.index}",): m.life for m in strategy.members()}
    with compute_time(strategy, 0.02):
        model.fit(
            dataset(),
            verbose=0,
            callbacks=[prometheus, AtBatch(5, lambda *_: cluster.kill("worker", 1))],
        )
    found = scraped(prometheus)
    prometheus.close()
    cluster.restart("worker", 1)
    assert found["losses_total"]["workers",] == 1
    assert found["server_life"]["worker:1",] == before["worker:1",] + 1


def test_a_file_has_the_same_figures_and_is_never_half_written(strategy, tmp_path):
    path, seen = tmp_path / "run.prom", []
    prometheus, model = Prometheus(path=path, every_seconds=1e-9), model_of(strategy)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                seen.append(parsed(path.read_text()))

        def on_test_begin(self, logs=None):
            path.unlink()  # Its figures are written again while the model is evaluated.

        def on_test_end(self, logs=None):
            seen.append(parsed(path.read_text()))

    options = {"verbose": 0, "callbacks": [prometheus, Watch()]}
    model.fit(dataset(), validation_data=dataset().take(3), **options)
    found = parsed(path.read_text())
    assert [figures["training"] for figures in seen] == [{(): 1}, {(): 1}]
    assert seen[1]["batches_total"] == {(): BATCHES}
    assert found["training"] == {(): 0}
    assert found["batches_total"] == {(): BATCHES}
    assert found["table_keys"]["keyed/users", "used"] == 40
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    model.evaluate(dataset().take(3), verbose=0, callbacks=[prometheus])
    assert not list(tmp_path.iterdir())  # That is no training.


def test_a_counter_never_falls(strategy, tmp_path, monkeypatch):
    path = tmp_path / "run.prom"
    model, prometheus = model_of(strategy), Prometheus(path=path, every_seconds=1e-9)
    model.fit(dataset().take(1), verbose=0)
    done = retried = 0  # As a loss or a recovery changes them.
    functions = type(model.train_function)
    monkeypatch.setattr(functions, "epoch_steps", property(lambda function: done))
    monkeypatch.setattr(functions, "losses", property(lambda function: Losses(retried=retried)))
    prometheus.set_model(model)
    shown = []
    for in_epochs, is_broken in (([[10, 7, 20], [9, 5]], True), ([[3, 8]], False)):
        prometheus.on_train_begin()
        for epoch, of_epoch in enumerate(in_epochs):
            prometheus.on_epoch_begin(epoch)
            for batch, known in enumerate(of_epoch):
                done = known
                prometheus.on_train_batch_end(batch)
                shown.append(parsed(path.read_text())["batches_total"][()])
            if not is_broken or epoch == 0:
                prometheus.on_epoch_end(epoch)
    # 20 of the first epoch and 5 of the broken one, of which 9 had been done.
    assert shown == [10, 10, 20, 29, 29, 29, 33]
    shown = []
    for known in (4, 2, 5):
        retried = known
        prometheus.tell()
        shown.append(parsed(path.read_text())["losses_total"]["retried",])
    assert shown == [4, 4, 5]
    prometheus.on_train_end()
    # What is compiled again counts its losses from 0.
    model.compile(model.optimizer, "mse")
    strategy.attach(model)
    retried = 1
    prometheus.on_train_begin()
    prometheus.on_epoch_begin(0)
    assert parsed(path.read_text())["losses_total"]["retried",] == 1
    prometheus.on_train_end()


class Fails(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x / 0.0, "no number")


def failing(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), Fails()])
        model.compile(recsync.optimizers.SGD(0.1), "mse")
    return model


def test_a_fit_that_fails_does_not_run(strategy, tmp_path):
    prometheus = Prometheus(path=tmp_path / "run.prom")
    model = failing(strategy)
    x = np.ones((96, 2), np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
        model.fit(x, x[:, :1], verbose=0, callbacks=[prometheus])
    assert parsed((tmp_path / "run.prom").read_text())["training"] == {(): 0}
    assert prometheus not in model.train_function.observers


def test_a_file_that_can_t_be_written_ends_training_at_its_beginning_only(
    strategy, tmp_path, caplog
):
    folder = tmp_path / "figures"
    callbacks = [
        Prometheus(path=folder / "run.prom", every_seconds=1e-9),
        AtBatch(3, lambda *_: shutil.rmtree(folder)),
    ]
    with pytest.raises(FileNotFoundError):
        model_of(strategy).fit(dataset(), verbose=0, callbacks=callbacks)
    folder.mkdir()
    with caplog.at_level(logging.WARNING, logger="absl"):
        history = model_of(strategy).fit(dataset(), verbose=0, callbacks=callbacks)
    assert len(history.history["loss"]) == 1
    (line,) = [r.message for r in caplog.records if "figures can't be" in r.message]
    assert "No such file" in line


def test_each_value_of_a_metric_is_a_figure(strategy, tmp_path):
    path = tmp_path / "run.prom"
    more = {"phase": "warm-up", "next": None}  # What is no number is none.
    adds = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(more))
    for outputs in (1, 3):
        with strategy.scope():
            inputs = keras.Input((2,))
            model = keras.Model(inputs, keras.layers.Dense(outputs, "sigmoid")(inputs))
            metrics = [keras.metrics.F1Score(threshold=0.5)]
            model.compile(recsync.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
        data = tf.data.Dataset.from_tensors((tf.ones((BATCH, 2)), tf.ones((BATCH, outputs))))
        callbacks = [adds, Prometheus(path=path)]
        history = model.fit(data.repeat(4), verbose=0, callbacks=callbacks).history
        assert history["phase"] == ["warm-up"]
        (scores,) = history["f1_score"]
        logged = parsed(path.read_text())["log"]
        names = ["f1_score"] if outputs == 1 else [f"f1_score[{i}]" for i in range(outputs)]
        assert logged.keys() == {("loss",), *((name,) for name in names)}
        for name, score in zip(names, scores, strict=True):
            assert logged[name,] == pytest.approx(score)


def test_what_can_t_be_is_refused_by_name(strategy, monkeypatch):
    for arguments, match in (
        ({}, "port=None, path=None: one of them must be given"),
        ({"port": 1, "path": "a.prom"}, "port=1, path='a.prom': one of them"),
        ({"port": 70000}, "port must be an integer from 0 to 65535, got 70000"),
        ({"port": True}, "port must be an integer from 0 to 65535, got True"),
        ({"path": 3}, "path must be the path of a file, not 3"),
        ({"path": "figures.txt"}, r"path must end in '\.prom', not 'figures.txt'"),
        ({"port": 0, "every_seconds": 0}, "every_seconds must be positive, in seconds, not 0"),
    ):
        with pytest.raises(ValueError, match=match):
            Prometheus(**arguments)
    local = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    local.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Prometheus can't report on a .*none of this package's"):
        local.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[Prometheus(port=0)])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            model_of(strategy).fit(
                dataset(), verbose=0, callbacks=[Prometheus(port=taken.getsockname()[1])]
            )
    make = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return make(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'tf_recsync\[prometheus\]'"):
        Prometheus(port=0)
