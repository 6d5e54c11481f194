"""Calls that name the same variables in any order, or one twice, do not wait for each other."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import ops, staleness
from tf_recsync.ops import hop

INVALID = tf.errors.InvalidArgumentError
SIZE = 100_000


def vector():
    return tf.Variable(tf.zeros([SIZE]))


def beside(*shape):
    """Versions and counters of a variable."""
    return tf.Variable(tf.zeros(shape, tf.int64)), tf.Variable(
        tf.zeros([staleness.COUNTERS], tf.int64)
    )


def interpolate(hogwild):
    one, other = vector(), vector()
    target = np.ones(2 * SIZE, np.float32)

    def move(*variables):
        ops.interpolate(
            [v.handle for v in variables], target, alpha=0.5, hogwild=hogwild, answer=False
        )

    return [lambda: move(one, other), lambda: move(other, one)]


def adagrad_dense(hogwild):
    one, other = vector(), vector()

    def update(variable, accumulator, versions, counters):
        ops.adagrad_dense(
            variables=[variable.handle],
            accumulators=[accumulator.handle],
            versions=[versions.handle],
            counters=[counters.handle],
            last_periods=[],
            last_updates=[],
            gradient=np.ones(SIZE, np.float32),
            pulled_versions=np.zeros(0, np.int64),
            learning_rate=0.1,
            global_step=1,
            hogwild=hogwild,
        )

    first, second = beside(), beside()
    return [lambda: update(one, other, *first), lambda: update(other, one, *second)]


def adagrad_rows():
    one, other = (tf.Variable(tf.zeros([SIZE, 1])) for _ in range(2))

    def update(variable, accumulator, versions, counters):
        ops.adagrad_rows(
            variables=[variable.handle],
            accumulators=[accumulator.handle],
            versions=[versions.handle],
            counters=[counters.handle],
            last_periods=[],
            last_updates=[],
            gradient=np.ones(SIZE, np.float32),
            indices=np.arange(SIZE),
            counts=np.array([SIZE]),
            pulled_versions=np.zeros(0, np.int64),
            learning_rate=0.1,
            global_step=1,
        )

    first, second = beside(SIZE), beside(SIZE)
    return [lambda: update(one, other, *first), lambda: update(other, one, *second)]


def receive():
    variables = [vector() for _ in range(2)]
    update = np.ones(2 * SIZE, np.float32)

    def trainer(name, variables):
        handles = [v.handle for v in variables]
        worker = hop.worker(
            shared_name=name,
            in_neighbors=[1],
            weights=[0.5],
            out_neighbors=[],
            slots=2,
            capacity=2,
        )
        iteration = iter(range(10**6))

        def step():
            i = next(iteration)
            if i == 0:
                hop.begin(worker, 0)
            hop.next_iteration(worker, handles, tf.float32)
            hop.enter(worker, i, update, send=False)
            hop.deliver(worker, 1, i + 1, i, update)
            hop.receive(worker, i, update, handles, relative=False)

        return step

    return [trainer("in order", variables), trainer("the other way", variables[::-1])]


def pull_as_both():
    one = vector()

    def pull():
        with pytest.raises(INVALID, match="versions must be a variable of int64, not float"):
            ops.pull_dense([one.handle], [one.handle])

    return [pull, lambda: one.assign_add(np.ones(SIZE, np.float32))]


def pull_and_swapped_tables():
    table, versions = tf.Variable(tf.zeros([SIZE, 1])), tf.Variable(tf.zeros([SIZE], tf.int64))

    def wrong():
        with pytest.raises(INVALID):
            ops.pull_table(versions.handle, table.handle, shape=[SIZE])

    def write():
        table.assign_add(np.ones([SIZE, 1], np.float32))
        versions.assign_add(np.ones([SIZE], np.int64))

    return [
        lambda: ops.pull_table(table.handle, versions.handle, shape=[SIZE, 1]),
        wrong,
        write,
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: interpolate(hogwild=False),
        lambda: interpolate(hogwild=True),
        lambda: adagrad_dense(hogwild=False),
        lambda: adagrad_dense(hogwild=True),
        adagrad_rows,
        receive,
        pull_as_both,
        pull_and_swapped_tables,
    ],
    ids=[
        "interpolate",
        "interpolate, hogwild",
        "dense updates",
        "dense updates, hogwild",
        "updates of rows",
        "averages",
        "a pull of one as both",
        "pulls of tables",
    ],
)
def test_calls_in_any_order_all_end(make):
    # Twice each, as one that reads waits for itself only if another one wants to write meanwhile.
    actions = [action for action in make() for _ in range(1 if make is receive else 3)]
    failures = []

    def repeat(action):
        try:
            for _ in range(60):
                action()
        except BaseException as error:  # noqa: BLE001  (it is raised below)
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(a,), daemon=True) for a in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_a_variable_may_be_pulled_twice_but_not_moved_twice():
    one = tf.Variable(tf.range(SIZE, dtype=tf.float32))
    versions = tf.Variable(tf.constant(3, tf.int64))
    packed, pulled = ops.pull_dense([one.handle] * 2, [versions.handle] * 2)
    np.testing.assert_array_equal(packed, np.tile(np.arange(SIZE), 2))
    assert pulled.numpy().tolist() == [3, 3]
    with pytest.raises(INVALID, match="the same variable is passed twice"):
        ops.interpolate(
            [one.handle] * 2, np.ones(2 * SIZE, np.float32), alpha=0.5, hogwild=False, answer=False
        )
    np.testing.assert_array_equal(one, np.arange(SIZE))
