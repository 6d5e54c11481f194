"""Embedding collections in decentralized training without parameter servers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

WORKERS, BATCH, HISTORY, RATE = 4, 5, 64, 0.2
ROWS, DIMENSIONS = {"films": 12, "users": 7}, {"films": 2, "users": 3}
IDS = {"film": 2, "user": 3}  # Of an example.
SIZES = [ROWS[table] * DIMENSIONS[table] for table in ROWS]


class Recording(keras.Model):
    """Adds up pooled vectors; notes, for each of its iterations, its tables and its batch."""

    def __init__(self):
        super().__init__()
        self.tables = EmbeddingCollection(
            [
                TableConfig("films", ROWS["films"], DIMENSIONS["films"], "normal", "sum"),
                TableConfig("users", ROWS["users"], DIMENSIONS["users"], "normal", "mean"),
            ],
            [FeatureConfig("film", "films"), FeatureConfig("user", "users")],
            concatenate=True,
        )

        def add(shape, dtype):
            return self.add_weight(shape=shape, dtype=dtype, initializer="zeros", trainable=False)

        self.at = add((), "int64")
        self.batches = add((HISTORY,), "int64")
        self.passed = add((HISTORY, sum(SIZES)), "float32")

    def call(self, inputs):
        vectors = self.tables({name: inputs[name] for name in IDS})
        return keras.ops.sum(vectors, axis=-1, keepdims=True)

    def note(self, variable, value):
        row = tf.reshape(self.at._value.read_value(), [1, 1])
        history = variable._value.read_value()
        variable._value.assign(tf.tensor_scatter_nd_update(history, row, value))

    def train_step(self, data):
        self.note(self.batches, data[0]["number"][:1])
        parts = [tf.reshape(v._value.read_value(), [-1]) for v in self.tables.variables]
        self.note(self.passed, tf.concat(parts, 0)[None])
        self.at._value.assign_add(tf.ones([], tf.int64))
        return super().train_step(data)


def clicks(batches):
    random = np.random.default_rng(4)
    ids = {
        # Some rows are never named, and some more than once in a batch and in an example.
        "film": random.integers(0, ROWS["films"] - 3, (batches, BATCH, IDS["film"])),
        "user": random.integers(0, ROWS["users"] - 1, (batches, BATCH, IDS["user"])),
    }
    labels = random.normal(size=(batches, BATCH, 1)).astype(np.float32)
    return ids, labels


def gradients(tables, ids, labels):
    """Of the mean squared error of a batch, row by row."""
    films, users = tables
    predicted = films[ids["film"]].sum((1, 2)) + users[ids["user"]].sum((1, 2)) / IDS["user"]
    error = 2 * (predicted - labels[:, 0]) / BATCH
    found = np.zeros_like(films), np.zeros_like(users)
    for example in range(BATCH):
        for row in ids["film"][example]:
            found[0][row] += error[example]
        for row in ids["user"][example]:
            found[1][row] += error[example] / IDS["user"]
    return found


def split(flat):
    """The two tables of what was noted."""
    films, users = np.split(flat, [SIZES[0]])
    return films.reshape(-1, DIMENSIONS["films"]), users.reshape(-1, DIMENSIONS["users"])


@pytest.mark.cases("SGD1")
@pytest.mark.parametrize("make", [keras.optimizers.SGD, recsync.optimizers.SGD])
def test_without_servers_tables_are_a_part_of_each_workers_copy(clusters, make):
    batches = WORKERS * 6
    ids, labels = clicks(batches)
    numbers = np.repeat(np.arange(batches)[:, None], BATCH, 1)
    cluster = clusters.get(WORKERS, processes=0)
    topo = topology.ring(WORKERS)
    strategy = recsync.HopStrategy(cluster, topo, check_invariants=True)
    with strategy.scope():
        model = Recording()
        model.compile(make(RATE), "mse")
        model({name: np.zeros((1, width), np.int64) for name, width in IDS.items()})
    names = [variable.physical_table.pieces[0].table for variable in model.tables.variables]
    assert names == list(ROWS)
    start = np.concatenate([model.tables.table_values(name).reshape(-1) for name in names])
    dataset = tf.data.Dataset.from_tensor_slices(({**ids, "number": numbers}, labels))
    model.fit(dataset, verbose=0)

    # Row by row as in numpy, until the first worker ran out of data.
    group = strategy._synchronizer(model)
    places = {id(variable): i for i, variable in enumerate(group.copies.variables)}
    values = [group.copies.values(worker) for worker in range(WORKERS)]
    at, noted, passed = (
        [own[places[id(v._value)]] for own in values]
        for v in (model.at, model.batches, model.passed)
    )
    assert sum(at) == batches and min(at) >= 3
    parameters = np.broadcast_to(start.astype(np.float64), (WORKERS, len(start)))
    for k in range(min(at)):
        steps = []
        for worker in range(WORKERS):
            found = passed[worker][k]
            np.testing.assert_allclose(found, parameters[worker], rtol=1e-5, atol=2e-6)
            batch = noted[worker][k]
            own = {name: ids[name][batch] for name in IDS}
            grads = gradients(split(parameters[worker]), own, labels[batch])
            steps.append(RATE * np.concatenate([grad.reshape(-1) for grad in grads]))
        parameters = topo.weights.T @ parameters - np.array(steps)

    # Rows that nobody named are as they were; the others are each worker's own.
    copies = [dict(zip(names, copy, strict=True)) for copy in strategy.copies(model)]
    np.testing.assert_allclose(copies[1]["films"][-3:], split(start)[0][-3:], rtol=1e-6)
    assert not np.allclose(copies[0]["films"], copies[1]["films"])
    for name in names:
        mean = np.mean([copy[name] for copy in copies], axis=0)
        np.testing.assert_allclose(model.tables.table_values(name), mean, rtol=1e-5, atol=1e-7)
