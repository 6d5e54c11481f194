"""Decentralized SGD in numpy, and a model whose workers note what to compare with it."""

import keras
import numpy as np
import tensorflow as tf

BATCH, WIDTH, HISTORY = 4, 3, 64
RATE = 0.1


class Recording(keras.Model):
    """A linear model that notes, for each of its iterations, its parameters and its batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False)
        self.at = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.batches = self.add_weight(
            shape=(HISTORY,), dtype="int64", initializer="zeros", trainable=False
        )
        self.passed = self.add_weight(shape=(HISTORY, WIDTH), initializer="zeros", trainable=False)

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


def simulate(topo, x, y, batches, start, steps, serial=False, momentum=0.0):
    """Decentralized SGD as figures 1 and 2 of the paper have it; `start` of each or of all.

    Everybody has a momentum of its own, which is not averaged.
    """
    parameters = np.broadcast_to(start.astype(np.float64), (topo.size, WIDTH))
    step = np.zeros_like(parameters)
    histories = []
    for k in range(steps):
        histories.append(parameters)
        gradients = []
        for worker in range(topo.size):
            data, target = x[batches[worker][k]], y[batches[worker][k]][:, 0]
            error = data @ parameters[worker] - target
            gradients.append(2 * data.T @ error / len(target))
        step = momentum * step + RATE * np.array(gradients)
        if serial:
            parameters = topo.weights.T @ (parameters - step)
        else:
            parameters = topo.weights.T @ parameters - step
    return np.array(histories)


def recorded(strategy, model):
    """By worker: its iterations, and the numbers of its batches and its parameters in each."""
    group = strategy._synchronizer(model)
    index = {id(v): i for i, v in enumerate(group.copies.variables)}
    places = [index[id(v._value)] for v in (model.at, model.batches, model.passed)]
    values = [group.copies.values(worker) for worker in group.there]
    at, numbers, histories = ([own[place] for own in values] for place in places)
    return [int(a) for a in at], numbers, histories
