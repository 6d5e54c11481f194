"""What is shown by a process of its own: the first connection, and what could keep it forever."""

import os
import subprocess
import sys

import pytest

_SECONDS = 500  # On a busy machine, importing TensorFlow twice takes minutes.

# In a process that was not connected before: TensorFlow's first connection is another matter.
# The second part would stand still with Python's lock held.
PROGRAM = """
import gc
import traceback

import keras
import numpy as np
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.cluster import signs_of_life


def error_of(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)


made_before = tf.Variable(1.0, name="made_before")
dropout_before = keras.layers.Dropout(0.1)
iterator_before = iter(tf.data.Dataset.range(3))
rated_before = tf.data.Dataset.from_tensors(({"user": [1, 1]}, [0.0, 1.0]))
print("names:", error_of(recsync.use_final_device_names), flush=True)


def connecting():
    with recsync.LocalCluster(workers=1, ps=1) as cluster:
        cluster.pause("worker", 0)
        message = error_of(cluster.connect, 1.0)
        address = cluster.cluster_spec.task_address("worker", 0)
        # A busy machine may be late to answer for others, too.
        assert message.startswith("servers not up within timeout=1 s: worker:0 ("), message
        assert address in message, message
        # As if it began to stand still between our greeting and the connection.
        greets, signs_of_life.greets = signs_of_life.greets, signs_of_life.accepts_connections
        assert "TensorFlow did not finish in time" in error_of(cluster.connect, 2.0)
        message = error_of(cluster.connect, 0.5)
        assert "an earlier change of the connection has not ended yet" in message, message
        signs_of_life.greets = greets
        cluster.resume("worker", 0)
        cluster.connect()
        with tf.device("/job:worker/task:0"):
            assert tf.add(1, 2) == 3
        recsync.callbacks.GroupAUC(rated_before, "user").on_train_begin()  # Reads it.


def endless():
    while True:
        yield np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)


def train():
    cluster = recsync.LocalCluster(workers=2, ps=1)
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.1), "mse")
        older = keras.Sequential([keras.Input((1,)), dropout_before, keras.layers.Dense(1)])
        older.compile(recsync.optimizers.SGD(0.1), "mse")
    print("older:", error_of(older.fit, np.ones((4, 1)), np.ones((4, 1))), flush=True)
    spec = tf.TensorSpec((4, 1))
    ones = tf.data.Dataset.from_generator(endless, output_signature=(spec, spec))
    model.fit(ones.prefetch(4), steps_per_epoch=20, verbose=0)
    gc.disable()
    assert cluster.data_services.tasks() == 1
    cluster.close()
    closed = "LocalCluster(workers=2, ps=1) is closed, and what lay on its servers is gone"
    for call in (model.get_weights, lambda: model.evaluate(ones), strategy.scope):
        assert closed in error_of(call)


def leaving():
    train()
    gc.collect()


for part in (connecting, leaving):
    try:
        part()
        print(part.__name__, "succeeded", flush=True)
    except Exception:
        traceback.print_exc()
"""


# Made before the cluster, used beside it, after it, and beside the next one.
NAMES = """
import keras
import numpy as np
import tensorflow as tf

import tf_recsync as recsync

recsync.use_final_device_names()
recsync.use_final_device_names()
variable = tf.Variable([1.0, 2.0])
ones = np.ones((64, 1), np.float32)
dataset = tf.data.Dataset.from_tensor_slices((ones, ones)).batch(4)
iterator = iter(dataset)
local = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
local.compile("sgd", "mse")


def use():
    next(iterator)
    variable.assign_add([1.0, 1.0])
    local.fit(dataset, verbose=0)
    assert len(list(dataset)) == 16


use()
for processes in (2, 0):
    with recsync.LocalCluster(workers=2, ps=1, processes=processes) as cluster:
        strategy = recsync.AsyncStrategy(cluster)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(recsync.optimizers.SGD(0.1), "mse")
        model.fit(dataset, epochs=2, verbose=0)
        assert model.evaluate(dataset, verbose=0) < 1e-3
        use()
    use()
print(variable.numpy(), variable.device)
"""


def output_of(program):
    """What a program has written, of which there is less if it stands still."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        return subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            env=environ,
        ).stdout.decode()
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode() + f"\n(ended after {_SECONDS} s)"


@pytest.fixture(scope="module")
def done():
    return output_of(PROGRAM)


@pytest.mark.full
def test_with_final_device_names_what_was_made_before_the_cluster_lives_on_after_it():
    said = output_of(NAMES)
    assert "[6. 7.] /job:chief/replica:0/task:0/device:CPU:0" in said, said[-2000:]
    assert "can't be used" not in said


def test_final_device_names_come_before_the_first_op(done):
    assert "names: use_final_device_names must be called before TensorFlow runs its first" in done


def test_connecting_ends_in_time_when_a_server_stands_still_and_can_be_done_again(done):
    assert "connecting succeeded" in done, done[-2000:]


def test_variables_and_iterators_from_before_the_first_connection_are_named(done):
    (line,) = [line for line in done.splitlines() if "can't be used from now on" in line]
    names = "made_before, seed_generator/seed_generator_state and an iterator of a dataset"
    assert f"names: {names}. Make the strategy first" in line
    (line,) = [line for line in done.splitlines() if line.startswith("older:")]
    assert "seed_generator_state can't be used, because it was made before this process" in line


def test_a_closed_cluster_says_so_and_can_go_while_a_generator_still_makes_data(done):
    assert "leaving succeeded" in done, done[-2000:]
    assert "(ended after" not in done, done[-2000:]
