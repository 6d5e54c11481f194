"""Artificial bandwidth: the op that makes messages take their time, and limited servers."""

import functools
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compiled, mean_output, quickest, slope_model, steps_of, taken

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.optimizers import SGD

INVALID = tf.errors.InvalidArgumentError


# The op.


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int64, tf.bool, tf.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_message_arrives_as_it_was(dtype, shape):
    message = tf.cast(tf.reshape(tf.range(np.prod(shape, dtype=int)), shape), dtype)
    passed = ops.transfer(message, 1e9)
    assert passed.dtype == dtype and passed.shape == shape
    assert np.array_equal(passed.numpy(), message.numpy())


def test_a_message_takes_its_bytes_over_the_bandwidth_and_no_processor():
    message = tf.zeros([1000, 10])

    def used():
        before = time.process_time()
        assert taken(lambda: ops.transfer(message, 1e5)) >= 0.4
        return time.process_time() - before

    assert quickest(used, 0.2) < 0.2
    assert quickest(lambda: taken(lambda: ops.transfer(message, 1e5)), 0.6) < 0.6


def test_a_message_that_is_a_constant_takes_its_time_in_each_call_too():
    @tf.function
    def step():
        return ops.transfer(tf.zeros([10_000], tf.uint8), 1e5)

    step()
    for _ in range(3):
        assert taken(step) >= 0.1


def test_a_message_that_goes_to_two_passes_twice():
    @tf.function
    def step(message):
        return ops.transfer(message, 1e9) + 1, ops.transfer(message, 1e9) + 2

    message = tf.zeros([1000], tf.uint8)
    step(message)
    before = ops.reserved().amounts[1].numpy()
    step(message)
    assert ops.reserved().amounts[1].numpy() - before == 2000


def test_messages_of_several_threads_pass_one_after_the_other():
    message = tf.zeros([10_000], tf.uint8)

    @tf.function
    def step(message):
        return ops.transfer(message, 1e5)

    step(message)

    def run():
        threads = [threading.Thread(target=step, args=(message,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert 0.6 <= quickest(lambda: taken(run), 0.9) < 0.9


def test_a_transfer_ends_when_its_step_is_cancelled():
    from tensorflow.python.eager import cancellation

    has_begun = threading.Event()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)], autograph=False)
    def step(message):
        with tf.control_dependencies([tf.py_function(has_begun.set, [], [])]):
            return ops.transfer(message, 1000.0)

    def cancel(manager):
        has_begun.wait(60)
        time.sleep(0.2)
        manager.start_cancel()

    def error_of_cancelled():
        """What a step raises; or None, on a busy machine that cancels it when it has ended."""
        has_begun.clear()
        manager = cancellation.CancellationManager()
        thread = threading.Thread(target=cancel, args=(manager,))
        thread.start()
        try:
            manager.get_cancelable_function(whole)(tf.zeros([1500], tf.uint8))
        except tf.errors.CancelledError as error:
            return error
        finally:
            thread.join()
        return None

    whole = step.get_concrete_function()
    for _ in range(20):
        started = time.monotonic()
        error = error_of_cancelled()
        if "the transfer was cancelled" in str(error):
            break
    assert "the transfer was cancelled" in str(error)
    # What was cancelled has taken up the link all the same: 1.5 s since it came.
    ops.transfer(tf.zeros([1], tf.uint8), 1e9)
    assert time.monotonic() - started > 1.4


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), [1.0, 2.0]])
def test_a_bandwidth_of_no_sense_is_refused(rate):
    with pytest.raises(INVALID, match="bytes_per_second must be"):
        ops.transfer([1.0], rate)


def test_shapes_are_known_and_checked_while_tracing():
    step = tf.function(lambda m: ops.transfer(m, 1.0))
    spec = tf.TensorSpec([None, 3], tf.int64)
    assert step.get_concrete_function(spec).output_shapes.as_list() == [None, 3]
    with pytest.raises(ValueError, match="rank"):
        tf.function(lambda: ops.transfer([1.0], [1.0, 2.0]))()


# Servers.


@pytest.fixture
def four(clusters):
    strategy = clusters.strategy(workers=4, ps=2)
    yield strategy
    recsync.testing.set_bandwidth(strategy, None)


UNITS = 5000  # Of the dense models: a pull and a push of 20 kB each.


def dense_model(strategy, ps=0):
    def build():
        with strategy.placed_on(ps):
            return slope_model(UNITS)

    return compiled(strategy, build, lambda: SGD(1.0), mean_output)


def fit(model, steps):
    """Trains so many steps; returns the seconds, without those of tracing and connecting."""
    ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(steps)
    clock = _FirstAndLast()
    model.fit(ones, verbose=0, callbacks=[clock])
    return clock.seconds


def passed(strategy, action) -> tuple[list[int], float]:
    """The bytes that pass each server's limited link while something is done, and its seconds."""
    before = recsync.testing.device_use(strategy, "ps")
    seconds = taken(action)
    after = recsync.testing.device_use(strategy, "ps")
    return [now.bytes - old.bytes for now, old in zip(after, before, strict=True)], seconds


class _FirstAndLast(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self._first = time.monotonic()
        self.seconds = time.monotonic() - self._first


@pytest.mark.full
def test_the_workers_of_a_limited_server_share_its_link(four):
    recsync.testing.set_bandwidth(four, 400e3)
    model = dense_model(four)
    fit(model, 1)  # So that no tracing is part of what follows.
    seconds, whole = [], []
    # 40 kB of each step in 0.1 s, of whichever worker: 21 steps take 2.1 s. Less than twice as
    # long on a machine that is not busy, from when the first is seen to be done.
    for number in range(1, 20):
        whole.append(taken(lambda: seconds.append(fit(model, 21))))
        weight = -(1 + 21 * number) / UNITS
        assert model.get_weights()[0][0, 0] == pytest.approx(weight, rel=1e-4)
        if seconds[-1] < 4.0:
            break
    assert min(whole) > 2.1
    assert seconds[-1] < 4.0


def test_only_the_servers_named_are_limited_and_none_any_more(four):
    recsync.testing.set_bandwidth(four, 400e3, servers=[1])
    model = dense_model(four, ps=0)
    limited = dense_model(four, ps=1)
    fit(limited, 1)  # So that no tracing is part of what follows.
    steps = 21
    # Workers that found no batch any more may have pulled the other model's 20 kB, each once.
    late = 4 * 20e3 + 1000
    (first, second), _ = passed(four, lambda: fit(model, steps))
    assert first == 0 and second < late  # The optimizer's own numbers pass, too.
    for _ in range(2):
        # 40 kB of each step in 0.1 s, 2.1 s in all.
        (first, second), seconds = passed(four, lambda: fit(limited, steps))
        assert first == 0 and second >= steps * 40e3 and seconds > 2.0
        recsync.testing.set_bandwidth(four, None, servers=[0])
    recsync.testing.set_bandwidth(four, None)
    (first, second), _ = passed(four, lambda: fit(limited, steps))
    assert first == 0 and second < late
    assert steps_of(limited) == 1 + 3 * steps


def test_lookups_and_gradients_of_rows_pass_the_link(four):
    batch, width = 16, 64

    def build():
        inputs = keras.Input((1,), dtype="int64")
        with four.placed_on(0):
            rows = keras.layers.Embedding(100, width)(inputs)
        return keras.Model(inputs, keras.layers.Flatten()(rows))

    model = compiled(four, build, lambda: SGD(1.0), mean_output)
    steps = 21
    ids = np.arange(steps * batch).reshape(-1, 1) % 100
    data = tf.data.Dataset.from_tensor_slices((ids, ids * 0)).batch(batch)
    recsync.testing.set_bandwidth(four, 100e3, servers=[0])
    # An id of 8 bytes for each of 16 rows, and 64 floats there and back: 8.3 kB a step.
    # Evaluation has no gradients to push; prediction neither.
    whole, half = (steps * batch * (8 + times * 4 * width) for times in (2, 1))
    for act, size in ((model.fit, whole), (model.evaluate, half), (model.predict, half)):
        sent, seconds = passed(four, functools.partial(act, data, verbose=0))
        assert sent == [pytest.approx(size, rel=0.02), 0] and seconds > size / 100e3


def test_wrong_bandwidths_are_refused(four):
    for wrong in (0, -1.0, float("inf"), float("nan"), "fast", True):
        with pytest.raises(ValueError, match="must be (finite, and )?positive or None, not"):
            recsync.testing.set_bandwidth(four, wrong)
    for wrong in ([2], [-1], [0.5], [0, True]):
        with pytest.raises(ValueError, match="each of servers must be .* from 0 to 1, got"):
            recsync.testing.set_bandwidth(four, 1e6, wrong)
    assert four._settings.bandwidths == {}  # Nothing of it was set.
