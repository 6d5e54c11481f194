"""What simulations are told of a model, measured on a real cluster."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.simulation import Calibration, calibrate, run
from tf_recsync.simulation._calibrate import _compute_seconds, _Readings


def model_of(strategy):
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        vectors = keras.layers.Embedding(100, 4, name="table")(ids)
        model = keras.Model({"id": ids}, keras.layers.Dense(3, name="top")(vectors))
        model.compile(recsync.optimizers.SGD(0.01), "mse")
    return model


def dataset():
    ids = np.tile(np.arange(5), 20)  # Five rows in each batch.
    data = tf.data.Dataset.from_tensor_slices(({"id": ids}, np.zeros((100, 3), np.float32)))
    return data.batch(5)


def test_steps_are_measured_by_worker_and_rows_by_what_a_step_updates(clusters):
    strategy = recsync.AsyncStrategy(clusters.get(workers=2, ps=2))
    slow = recsync.testing.SlowWorkers(4.0, [1])
    recsync.testing.set_compute_time(strategy, 0.05, slow)
    dense, rows = 4 * (4 * 3 + 3), 5 * (4 * 4 + 8)

    def is_as_known(measured):
        fast, slow = measured.compute_seconds
        return (
            fast >= 0.045
            and slow >= max(0.18, 2 * fast)
            and measured.pull_bytes == pytest.approx(dense + rows, abs=20)
        )

    # Steps, rows and the time are read one after the other, and a busy machine may hold up this
    # process meanwhile, or one of the workers: so of some measurements, one.
    for _ in range(20):
        measured = calibrate(model_of(strategy), dataset(), steps=60)
        if is_as_known(measured):
            break
    assert is_as_known(measured), measured
    assert measured.pull_bytes == measured.push_bytes
    assert measured.ps == 2
    assert "2 workers, 2 parameter servers" in str(measured)
    result = run(
        recsync.modes.Async(),
        steps=4000,
        warmup_steps=400,
        cooldown_steps=2000,
        **measured.arguments(),
    )
    expected = sum(1 / seconds for seconds in measured.compute_seconds)
    assert result.steps_per_second == pytest.approx(expected, rel=0.02)


class Scripted:
    """A model that trains at a clock of its own, and its strategy.

    Steps of its workers take so long, of which so much are waits for data; that is known as of the
    last half second.
    """

    def __init__(self, seconds, waits):
        self.now, self.seconds, self.waits = 0.0, seconds, waits
        self.distribute_strategy = self.train_function = self
        self.stop_training, self.variables = False, {}
        self.began = [0.0 for _ in seconds]  # Since when what they tell of counts.

    def worker_steps(self, model):
        return [int(self.now / one) for one in self.seconds]

    def steps_and_waits(self):
        told = self.now - self.now % 0.5
        spans = zip(self.began, self.seconds, strict=True)
        steps = [int(max(told - began, 0.0) / one) for began, one in spans]
        return [(count, count * wait) for count, wait in zip(steps, self.waits, strict=True)]

    def staleness(self, model):
        return self


@pytest.mark.parametrize("begun", np.arange(0.0, 0.5, 0.1))
def test_waits_for_data_are_no_part_of_steps_however_short_these_are(begun):
    model = Scripted([0.001, 0.004], [0.00075, 0.001])
    model.now = begun  # As long after a report.
    readings = _Readings(steps=20, now=lambda: model.now)
    readings.set_model(model)
    while not model.stop_training:
        model.now += 0.005
        readings.on_train_batch_end(0)
    assert _compute_seconds(*readings.taken) == pytest.approx((0.00025, 0.003), rel=0.1)


def test_a_worker_that_was_lost_between_two_readings_is_measured_again():
    model = Scripted([0.001, 0.004], [0.00075, 0.001])
    readings = _Readings(steps=5000, now=lambda: model.now)
    readings.set_model(model)
    while not model.stop_training:
        model.now += 0.005
        readings.on_train_batch_end(0)
        if readings.taken and not model.began[0]:
            model.began[0] = model.now
    assert readings.taken[0].time > model.began[0] > 0.0
    assert _compute_seconds(*readings.taken) == pytest.approx((0.00025, 0.003), rel=0.1)


def test_workers_of_a_larger_cluster_are_those_that_were_measured_again_and_again():
    measured = Calibration((0.1, 0.3), 10, 20, 13.3, ps=2)
    assert measured.arguments() == {
        **{"workers": 2, "ps": 2, "compute_seconds": [0.1, 0.3]},
        **{"pull_bytes": 10, "push_bytes": 20},
    }
    larger = measured.arguments(workers=5, ps=7)
    assert larger["compute_seconds"] == [0.1, 0.3, 0.1, 0.3, 0.1] and larger["ps"] == 7
    with pytest.raises(ValueError, match="workers"):
        measured.arguments(workers=0)


def test_what_can_t_be_measured_is_refused(clusters):
    cluster = clusters.get(workers=2, ps=2)
    with pytest.raises(ValueError, match="AsyncStrategy.*not of a SyncStrategy"):
        calibrate(model_of(recsync.SyncStrategy(cluster)), dataset())
    with pytest.raises(ValueError, match="steps must be an integer of at least 20, got 19"):
        calibrate(model_of(recsync.AsyncStrategy(cluster)), dataset(), steps=19)
