"""Batches that are lost with a worker are trained on by others."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, compute_time, wait_until

import tf_recsync as recsync

BATCHES = 60


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=1)


def make_model(strategy):
    """Its table counts how often each batch was trained on, its metric how many were."""
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        rows = keras.layers.Embedding(BATCHES, 1, "zeros")(ids)
        model = keras.Model(ids, keras.layers.Flatten()(rows))
        model.compile(recsync.optimizers.SGD(1.0), loss=lambda _, output: -output)
    return model


def counts_of(model):
    return np.asarray(model.get_weights()[0]).ravel()


def batches():
    ids = np.arange(BATCHES)[:, np.newaxis]
    return tf.data.Dataset.from_tensor_slices((ids, np.zeros((BATCHES, 1)))).batch(1)


def test_each_batch_is_trained_on_once_where_nobody_dies(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    model.fit(batches(), epochs=2, verbose=0)
    assert counts_of(model).tolist() == [2] * BATCHES
    assert strategy.losses(model) == recsync.strategies.slots.Losses()


def test_the_batches_of_a_worker_that_stays_away_are_trained_on(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    kill = AtBatch(20, lambda: cluster.kill("worker", 1))
    with compute_time(strategy, 0.01):
        model.fit(batches(), callbacks=[kill], verbose=0)
    counts = counts_of(model)
    losses = strategy.losses(model)
    print(counts, losses)
    assert counts.min() == 1
    assert losses.workers == 1
