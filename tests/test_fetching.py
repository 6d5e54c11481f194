"""What the coordinator reads from servers, and what that leaves there."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tf_recsync.cluster import fetch, processor_of

READS = 3000  # TensorFlow's copies of as many tensors leave more than 3 MB on a server.


@pytest.fixture
def cluster(clusters):
    cluster = clusters.get(workers=1, ps=1)
    cluster.connect()
    return cluster


def kilobytes(process: int) -> int:
    """The memory that a process has for itself."""
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def check_keeps_nothing(cluster, read) -> None:
    """Checks that a worker does not grow while something is read from it.

    It may once, when threads take part that did not before; with what each read leaves, always.
    """
    for _ in range(READS // 6):
        read()
    for _ in range(20):
        before = kilobytes(cluster.pid("worker", 0))
        for _ in range(READS):
            read()
        grown = kilobytes(cluster.pid("worker", 0)) - before
        if grown < 1500:
            break
    assert grown < 1500


def test_a_structure_of_tensors_of_several_servers_becomes_arrays(cluster):
    with tf.device(processor_of("worker", 0)):
        there = {"a": tf.range(3), "b": (tf.constant([[1.5]]), tf.constant("text"))}
    with tf.device(processor_of("ps", 0)):
        there["c"] = [tf.constant(7, tf.int64)]
    there["d"] = tf.constant([True])  # Here.
    there["e"] = 5
    found = fetch(there)
    np.testing.assert_array_equal(found["a"], [0, 1, 2])
    assert found["a"].dtype == np.int32
    np.testing.assert_array_equal(found["b"][0], np.array([[1.5]], np.float32))
    assert found["b"][1] == b"text"
    assert found["c"][0] == 7 and found["c"][0].dtype == np.int64
    assert found["d"].tolist() == [True]
    assert found["e"] == 5


def test_a_server_keeps_nothing_of_what_was_read(cluster):
    with tf.device(processor_of("worker", 0)):
        value = tf.range(10)
    check_keeps_nothing(cluster, lambda: fetch(value))


@pytest.mark.full
def test_a_worker_that_is_back_keeps_nothing_either(cluster):
    def read():
        with tf.device(processor_of("worker", 0)):
            return fetch(tf.range(10))

    read()
    with tf.device(processor_of("worker", 0)):
        lost = [tf.constant(5), tf.range(10)]
    cluster.kill("worker", 0)
    for call in (read, lambda: fetch(lost[0]), lambda: fetch(lost)):
        with pytest.raises(tf.errors.OpError):
            call()
    cluster.restart("worker", 0)
    cluster.readmit(timeout=100.0)
    check_keeps_nothing(cluster, read)


@pytest.mark.full
def test_users_read_variables_without_a_trace_too(cluster):
    from tf_recsync.shown_variable import ShownVariable

    with tf.device(processor_of("worker", 0)):
        variable = ShownVariable(41, dtype=tf.int64)
    assert int(variable) == 41 and float(variable) == 41.0
    check_keeps_nothing(cluster, variable.numpy)


def test_what_users_read_is_theirs_to_change(clusters):
    import keras

    import tf_recsync as recsync

    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=1))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
    weights = model.get_weights()
    weights[0] *= 2
    model.set_weights(weights)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])
    assert {model.optimizer.iterations.value.numpy(): "found"}[0] == "found"
