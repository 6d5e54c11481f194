"""Workers stand still while this process reads what they train, and go on."""

import threading

import keras
from helpers import BATCH, AtBatch, compiled, compute_time, dataset

import tf_recsync as recsync
from tf_recsync.strategies.worker_run import WorkerRun


def test_another_thread_that_reads_while_they_go_on_does_not_hold_them(clusters, monkeypatch):
    strategy = recsync.AsyncStrategy(clusters.get(2, 1))
    recsync.testing.set_compute_time(strategy, 0.01)
    model = compiled(strategy)
    go_on, threads = WorkerRun.go_on, []

    def go_on_and_be_read(run):
        threads.append(threading.Thread(target=model.train_function._hold))
        threads[-1].start()
        threads[-1].join(0.5)  # It may wait until they have gone on.
        go_on(run)

    monkeypatch.setattr(WorkerRun, "go_on", go_on_and_be_read)
    read = AtBatch(3, lambda: model.trainable_variables[0].numpy())
    # It ends, though nobody lets them go on but who waits for their steps.
    model.fit(dataset(40 * BATCH), verbose=0, callbacks=[read])
    for thread in threads:
        thread.join()
    assert threads
    assert sum(strategy.worker_steps(model)) == 40


class TrainsAnother(keras.callbacks.Callback):
    """Between two epochs trains a model that has a layer, too, which it reads within the second."""

    def __init__(self, other, layer, data):
        super().__init__()
        self._other, self._layer, self._data = other, layer, data
        self.held = []

    def on_epoch_end(self, epoch, logs=None):
        self._other.fit(self._data, verbose=0)

    def on_train_batch_end(self, batch, logs=None):
        self._layer.get_weights()
        self.held.append(self.model.train_function.is_held)


def test_reading_a_layer_holds_workers_though_another_model_that_has_it_was_trained(clusters):
    strategy = recsync.AsyncStrategy(clusters.get(2, 1))
    model = compiled(strategy)
    other = compiled(strategy, lambda: keras.Model(model.inputs, model.outputs))
    data = dataset(4 * BATCH)
    callback = TrainsAnother(other, model.get_layer("table"), data)
    model.fit(data.repeat(), steps_per_epoch=4, epochs=2, verbose=0, callbacks=[callback])
    assert callback.held == [True] * 8


def test_fit_waits_for_the_steps_in_flight_of_an_epoch_that_was_stopped(clusters):
    """Though it validates after it has been stopped."""
    strategy = recsync.AsyncStrategy(clusters.get(2, 1))
    model = compiled(strategy)
    data = dataset(2 * BATCH)
    model.evaluate(data, verbose=0)

    def stop():
        model.stop_training = True

    with compute_time(strategy, 3.0):
        train = dataset(20 * BATCH)
        model.fit(train, validation_data=data, verbose=0, callbacks=[AtBatch(0, stop)])
        assert not model.train_function.run.is_open
