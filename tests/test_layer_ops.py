"""Mean-normalization agrees with numpy and finite differences; a delay waits idly."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import ops

INVALID = tf.errors.InvalidArgumentError


def normalize(x, alpha, beta, epsilon):
    """alpha x / E(x) - beta in float64, the divisor kept away from 0 with its sign."""
    mean = x.mean(0)
    divisor = np.where(mean < 0, -1.0, 1.0) * np.maximum(np.abs(mean), epsilon)
    return alpha * x / divisor - beta


def example(rows=7):
    """Features of a positive, a negative and two almost vanishing means."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 4))
    x += np.array([2.0, -1.5, 0.02, -0.02]) - x.mean(0)
    return x, rng.normal(size=4), rng.normal(size=4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(tf.float32, 1e-5), (tf.float16, 2e-3), (tf.bfloat16, 2e-2)]
)
def test_features_are_divided_by_their_mean_over_the_batch(dtype, tolerance):
    x, alpha, beta = example()
    rounded = tf.cast(x, dtype)
    y, mean = ops.mean_normalize(rounded, alpha, beta, epsilon=0.05)
    x = tf.cast(rounded, tf.float64).numpy()
    assert y.dtype == dtype
    np.testing.assert_allclose(
        tf.cast(y, tf.float64), normalize(x, alpha, beta, 0.05), tolerance, tolerance * 10
    )
    np.testing.assert_allclose(mean, x.mean(0), 1e-5, 1e-7)


def test_the_divisor_keeps_its_sign_and_stays_away_from_zero():
    # Means of +0.001, -0.001, 0, and one of -4 that needs no help.
    x = tf.constant([[1.0, -1.0, 1.0, -3.0], [-0.998, 0.998, -1.0, -5.0]])
    y, mean = ops.mean_normalize(x, tf.ones(4), tf.zeros(4), epsilon=0.5)
    np.testing.assert_allclose(mean, [0.001, -0.001, 0.0, -4.0], atol=1e-6)
    np.testing.assert_allclose(y[0], [2.0, 2.0, 2.0, 0.75], rtol=1e-6)


def test_unit_coefficients_give_the_relative_distance_from_the_mean():
    x = tf.constant([[1.0], [2.0], [6.0]])
    y, _ = ops.mean_normalize(x, [1.0], [1.0])
    np.testing.assert_allclose(y, [[-2 / 3], [-1 / 3], [1.0]], rtol=1e-6)  # (x - E) / E


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(tf.float32, 2e-4), (tf.float16, 5e-3), (tf.bfloat16, 4e-2)]
)
def test_gradients_are_those_of_finite_differences(dtype, tolerance):
    x, alpha, beta = example()
    x = tf.cast(tf.cast(x, dtype), tf.float64).numpy()
    dy = np.random.default_rng(4).normal(size=x.shape)
    dy = tf.cast(tf.cast(dy, dtype), tf.float64).numpy()
    parts = [tf.cast(x, dtype), tf.cast(alpha, tf.float32), tf.cast(beta, tf.float32)]
    with tf.GradientTape() as tape:
        tape.watch(parts)
        y, _ = ops.mean_normalize(*parts, epsilon=0.05)
    found = tape.gradient(y, parts, output_gradients=tf.cast(dy, dtype))

    arguments, step = [x, alpha, beta], 1e-6
    for i, one in enumerate(arguments):
        expected = np.zeros_like(one)
        for position in np.ndindex(one.shape):
            sides = []
            for sign in (1, -1):
                moved = one.copy()
                moved[position] += sign * step
                sides.append(
                    np.sum(dy * normalize(*arguments[:i], moved, *arguments[i + 1 :], 0.05))
                )
            expected[position] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(
            tf.cast(found[i], tf.float64), expected, tolerance, tolerance * np.abs(expected).max()
        )


def test_an_empty_batch_has_mean_and_gradients_of_zero():
    parts = [tf.zeros([0, 3]), tf.ones(3), tf.ones(3)]
    with tf.GradientTape() as tape:
        tape.watch(parts)
        y, mean = ops.mean_normalize(*parts)
    dx, dalpha, dbeta = tape.gradient(y, parts)
    assert y.shape == dx.shape == (0, 3)
    for zero in (mean, dalpha, dbeta):
        np.testing.assert_array_equal(zero, np.zeros(3))


def test_the_mean_of_a_large_batch_keeps_its_digits():
    # A running sum in float32 would stall at 2^24.
    x = np.full((2**17, 1), 1000.1, np.float32)
    mean = ops.mean_normalize(x, [1.0], [0.0])[1]
    np.testing.assert_allclose(mean, [np.float32(1000.1)], rtol=1e-7)


@pytest.mark.parametrize(
    ("x", "alpha", "beta", "epsilon", "message"),
    [
        ([1.0], [1.0], [1.0], 0.1, "x must be"),
        ([[[1.0]]], [1.0], [1.0], 0.1, "x must be"),
        ([[1.0, 2.0]], [1.0], [1.0, 1.0], 0.1, r"alpha and beta must have shape \[2\], not \[1\]"),
        ([[1.0]], [1.0], [[1.0]], 0.1, r"alpha and beta .* and \[1,1\]"),
        ([[1.0]], [1.0], [1.0], 0.0, "epsilon must be positive, not 0"),
        ([[1.0]], [1.0], [1.0], float("nan"), "epsilon must be positive, not nan"),
    ],
)
def test_bad_inputs_are_refused_by_name(x, alpha, beta, epsilon, message):
    with pytest.raises(INVALID, match=message):
        ops.mean_normalize(x, alpha, beta, epsilon=epsilon)


def test_shapes_are_inferred_and_checked_while_tracing():
    @tf.function(
        input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec([None]), tf.TensorSpec([None])]
    )
    def step(x, alpha, beta):
        return ops.mean_normalize(x, alpha, beta)

    shapes = [s.as_list() for s in step.get_concrete_function().output_shapes]
    assert shapes == [[None, 5], [5]]
    for bad in ([[[1.0]]], [1.0], [1.0]), ([[1.0]], [1.0, 2.0], [1.0]), ([[1.0]], [1.0], [[1.0]]):
        with pytest.raises(ValueError, match="(?i)rank|dimensions must be equal"):
            tf.function(lambda bad=bad: ops.mean_normalize(*bad))()


def least(tries, within):
    """The first (seconds, processor seconds) of some tries that `within` is true of, or the last.

    A machine that does much else makes some of them slow, and a wrong delay all of them.
    """
    for seconds, used in tries:
        if within(seconds, used):
            break
    return seconds, used


def timed(call, times=20):
    """Seconds, and seconds of processor time, that a call takes each time."""
    for _ in range(times):
        started, used = time.monotonic(), time.process_time()
        call()
        yield time.monotonic() - started, time.process_time() - used


def test_a_delay_takes_its_time_and_no_processor():
    ops.delay(0.0)
    waited, used = least(
        timed(lambda: ops.delay(0.4)), lambda waited, used: waited < 1.0 and used < 0.2
    )
    assert 0.4 <= waited < 1.0
    assert used < 0.2


def test_delays_of_several_threads_pass_at_the_same_time():
    @tf.function
    def step():
        ops.delay(0.3)
        return tf.constant(1)

    def steps():
        threads = [threading.Thread(target=step) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    step()
    waited, _ = least(timed(steps), lambda waited, used: waited < 1.5)
    assert 0.3 <= waited < 1.5  # one after the other: 3.6 s


def test_a_delay_ends_when_its_step_is_cancelled():
    from tensorflow.python.eager import cancellation

    manager = cancellation.CancellationManager()

    @tf.function
    def step():
        ops.delay(60.0)
        return tf.constant(1)

    step = step.get_concrete_function()
    cancelled = threading.Timer(0.2, manager.start_cancel)
    started = time.monotonic()
    cancelled.start()
    with pytest.raises(tf.errors.CancelledError):
        manager.get_cancelable_function(step)()
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_a_delay_of_no_sensible_length_is_refused(seconds):
    with pytest.raises(INVALID, match="seconds must be"):
        ops.delay(seconds)


def test_a_vector_of_delays_fails_while_it_is_traced():
    with pytest.raises(ValueError, match="rank"):
        tf.function(lambda: ops.delay([1.0, 2.0]))()
