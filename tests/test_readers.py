"""Input pipelines that run in readers, processes of their own."""

import os
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import clicks, compiled, dataset, mean_output, slope_model, state_of, steps_of

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.optimizers import SGD


@pytest.fixture(scope="module", params=[1, 2], ids=["one reader", "two readers"])
def cluster(request):
    with recsync.LocalCluster(workers=2, ps=1, readers=request.param) as cluster:
        cluster.connect()
        yield cluster


class Sum(keras.metrics.Metric):
    """The sum of the labels, and their number."""

    def __init__(self):
        super().__init__(name="sum")
        self.total = self.add_weight(shape=(2,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = keras.ops.cast(y_true, "float32")
        count = keras.ops.cast(keras.ops.size(y_true), "float32")
        self.total.assign_add(keras.ops.stack([keras.ops.sum(y_true), count]))

    def result(self):
        return self.total[0]


def numbered(count: int, batch: int, seconds: float = 0.0) -> tf.data.Dataset:
    """Inputs of 1, labelled with their numbers; a batch takes so long to make."""

    def make(numbers):
        with tf.control_dependencies([ops.delay(tf.constant(seconds, tf.float32))]):
            numbers = tf.cast(numbers[:, tf.newaxis], tf.float32)
        return tf.ones_like(numbers), numbers

    return tf.data.Dataset.range(count).batch(batch).map(make)


def counting_model(strategy, **kwargs):
    return compiled(
        strategy, slope_model, lambda: SGD(1.0), mean_output, metrics=lambda: [Sum()], **kwargs
    )


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_every_example_is_trained_on_once_in_each_epoch(cluster, steps_per_execution):
    model = counting_model(recsync.AsyncStrategy(cluster), steps_per_execution=steps_per_execution)
    # Two readers end with a batch each that is not full.
    fit = dict(epochs=3, verbose=0, validation_data=numbered(57, 4))
    history = model.fit(numbered(101, 8), **fit).history
    assert history["sum"] == [101 * 100 / 2] * 3
    assert history["val_sum"] == [57 * 56 / 2] * 3
    assert steps_of(model) in [3 * 13 + i for i in range(4)]
    assert cluster.data_service.tasks() == 0  # The coordinator ran none of it.
    # By count: steps of one pass after another.
    model.fit(numbered(101, 8).repeat(), steps_per_epoch=7, epochs=4, verbose=0)
