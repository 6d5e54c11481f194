"""Decentralized training with `model.fit`, on eight workers."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import topology

WORKERS, BATCH, WIDTH, HISTORY = 8, 4, 3, 64
RATE = 0.1


@pytest.fixture(scope="module")
def cluster():
    with recsync.LocalCluster(workers=WORKERS, processes=4, inter_op_threads=24) as cluster:
        cluster.connect()  # Before datasets are made.
        yield cluster


class Recording(keras.Model):
    """A linear model that notes, for each of its iterations, its parameters and its batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False)
        self.at = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.batches = self.add_weight(
            shape=(HISTORY,), dtype="int64", initializer="zeros", trainable=False
        )
        self.passed = self.add_weight(
            shape=(HISTORY, WIDTH), initializer="zeros", trainable=False
        )

    def call(self, inputs):
        return self.dense(inputs[1])

    def train_step(self, data):
        number = data[0][0]
        at = self.at._value
        rows = tf.reshape(at.read_value(), [1, 1])
        before = tf.reshape(self.dense.kernel._value.read_value(), [1, WIDTH])
        history = self.passed._value.read_value()
        self.passed._value.assign(tf.tensor_scatter_nd_update(history, rows, before))
        batches = self.batches._value.read_value()
        noted = tf.tensor_scatter_nd_update(batches, rows, number[:1])
        self.batches._value.assign(noted)
        at.assign_add(tf.ones([], tf.int64))
        return super().train_step(data)


def regression(batches, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(batches, BATCH, WIDTH)).astype(np.float32)
    y = (x @ np.arange(1.0, WIDTH + 1) + random.normal(size=(batches, BATCH)))[..., None]
    y = y.astype(np.float32)
    numbers = np.repeat(np.arange(batches)[:, None], BATCH, 1)
    dataset = tf.data.Dataset.from_tensor_slices(((numbers, x), y))
    return x, y, dataset


def simulate(topo, x, y, batches, start, steps, serial=False):
    """Decentralized SGD as figures 1 and 2 of the paper have it."""
    parameters = np.tile(start.astype(np.float64), (topo.size, 1))
    histories = []
    for k in range(steps):
        histories.append(parameters)
        gradients = []
        for worker in range(topo.size):
            data, target = x[batches[worker][k]], y[batches[worker][k]][:, 0]
            error = data @ parameters[worker] - target
            gradients.append(2 * data.T @ error / len(target))
        step = RATE * np.array(gradients)
        if serial:
            parameters = topo.weights.T @ (parameters - step)
        else:
            parameters = topo.weights.T @ parameters - step
    return np.array(histories)


@pytest.mark.parametrize(
    ("topo", "options"),
    [
        (topology.ring_based(8), {}),
        (topology.ring_based(8), {"order": "serial"}),
        (topology.exponential(8), {"max_iteration_gap": 2}),
        (topology.star(8), {"max_iteration_gap": None}),
        (topology.ring(8), {"protocol": "notify_ack"}),
    ],
    ids=["parallel", "serial", "directed", "without tokens", "notify_ack"],
)
def test_standard_training_is_decentralized_sgd_step_by_step(cluster, topo, options):
    batches = WORKERS * 10
    x, y, dataset = regression(batches)
    strategy = recsync.HopStrategy(cluster, topo, check_invariants=True, **options)
    with strategy.scope():
        model = Recording()
        model.compile(keras.optimizers.SGD(RATE), "mse", steps_per_execution=3)
        model((np.zeros(1, np.int64), np.zeros((1, WIDTH), np.float32)))
    start = model.dense.kernel.numpy()[:, 0]
    model.fit(dataset, verbose=0)
    copies = strategy.copies(model)
    group = strategy._group(model)
    index = {id(v): i for i, v in enumerate(group.copies.variables)}
    at, numbers, histories = [], [], []
    for worker in range(WORKERS):
        values = group.copies.values(worker)
        at.append(int(values[index[id(model.at._value)]]))
        numbers.append(values[index[id(model.batches._value)]])
        histories.append(values[index[id(model.passed._value)]])
    assert sum(at) == batches
    used = np.concatenate([n[:a] for n, a in zip(numbers, at, strict=True)])
    assert collections.Counter(used.tolist()) == collections.Counter(range(batches))
    # Until the first one ran out of data, all were there.
    steps = min(at)
    assert steps >= 2
    expected = simulate(topo, x, y, numbers, start, steps, options.get("order") == "serial")
    for worker in range(WORKERS):
        np.testing.assert_allclose(
            histories[worker][:steps], expected[:, worker], rtol=2e-5, atol=2e-5
        )
    reports = strategy.workers(model)
    assert [report.iteration for report in reports] == [a - 1 for a in at]
    mean = np.mean([copy[0] for copy in copies], axis=0)
    np.testing.assert_allclose(model.dense.kernel.numpy(), mean, rtol=1e-6)
