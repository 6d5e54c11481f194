"""The MeanNormalization layer, against Eq. 9 and 10 in numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_recsync.layers import MeanNormalization

RNG = np.random.default_rng(7)


def normalized(x, mean, alpha, beta, epsilon=1e-3):
    divisor = np.where(np.abs(mean) >= epsilon, mean, np.where(mean < 0, -epsilon, epsilon))
    return alpha * x / divisor - beta


def test_it_starts_as_the_relative_distance_from_the_mean_of_the_batch():
    x = RNG.normal(3.0, 1.0, (16, 5)).astype(np.float32)
    y = MeanNormalization()(x, training=True)
    np.testing.assert_allclose(y, (x - x.mean(0)) / x.mean(0), rtol=1e-4, atol=1e-5)


def test_the_mean_is_taken_over_all_axes_but_the_last():
    x = RNG.normal(2.0, 1.0, (4, 6, 3)).astype(np.float32)
    y = MeanNormalization()(x, training=True)
    expected = normalized(x, x.mean((0, 1)), 1.0, 1.0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_inference_uses_the_moving_average_of_the_batches_means():
    layer = MeanNormalization(momentum=0.9)
    moving = np.ones(2)
    for _ in range(20):
        x = RNG.normal([2.0, -4.0], 0.5, (32, 2)).astype(np.float32)
        layer(x, training=True)
        moving = 0.9 * moving + 0.1 * x.mean(0)
    np.testing.assert_allclose(layer.moving_mean, moving, rtol=1e-4)
    x = RNG.normal(size=(3, 2)).astype(np.float32)
    np.testing.assert_allclose(layer(x), normalized(x, moving, 1.0, 1.0), rtol=1e-4, atol=1e-5)


def test_alpha_and_beta_scale_and_shift():
    layer = MeanNormalization()
    x = RNG.normal(3.0, 1.0, (8, 2)).astype(np.float32)
    layer(x)
    layer.alpha.assign([2.0, 0.5])
    layer.beta.assign([-1.0, 3.0])
    expected = normalized(x, x.mean(0), np.array([2.0, 0.5]), np.array([-1.0, 3.0]))
    np.testing.assert_allclose(layer(x, training=True), expected, rtol=1e-4, atol=1e-5)


def test_the_divisor_is_kept_away_from_zero_with_its_sign():
    x = np.array([[1e-5, -1e-5, 0.0], [1e-5, -1e-5, 0.0]], np.float32)
    y = MeanNormalization(epsilon=0.01)(x, training=True)
    np.testing.assert_allclose(y[0], [1e-5 / 0.01 - 1, 1e-5 / 0.01 - 1, -1.0], rtol=1e-5)


def test_an_empty_batch_leaves_the_moving_average_alone():
    layer = MeanNormalization()
    layer(np.ones((4, 3), np.float32), training=True)
    before = layer.moving_mean.numpy()
    assert layer(np.zeros((0, 3), np.float32), training=True).shape == (0, 3)
    np.testing.assert_array_equal(layer.moving_mean, before)


def test_a_frozen_layer_uses_its_moving_average_and_leaves_it_alone():
    """As Keras's BatchNormalization, of which only the formula differs."""
    layer, stock = MeanNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5)
    x = RNG.normal(3.0, 1.0, (8, 2)).astype(np.float32)
    for one in (layer, stock):
        one(x, training=True)
        one.trainable = False
        moving, y = one.moving_mean.numpy(), one(2 * x, training=True)
        np.testing.assert_array_equal(one.moving_mean, moving)
        np.testing.assert_array_equal(y, one(2 * x))
    layer.trainable = True
    layer(2 * x, training=True)
    assert np.all(layer.moving_mean.numpy() > 3.0)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_a_mean_that_is_not_finite_spoils_its_batch_alone(spoiled, jit):
    layer = MeanNormalization(momentum=0.5)
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    step = tf.function(lambda x: layer(x, training=True), jit_compile=jit)
    step(x)
    before = layer.moving_mean.numpy()
    y = step(np.array([[spoiled, 2.0], [3.0, 6.0]], np.float32)).numpy()
    np.testing.assert_array_equal(np.isnan(y), [[True, False], [np.isnan(spoiled), False]])
    # The other feature's mean is one like any other.
    np.testing.assert_allclose(layer.moving_mean, [before[0], (before[1] + 4.0) / 2])
    assert np.isfinite(layer(x)).all()
    # Of a moving average that something else has spoiled nothing is made up.
    layer.moving_mean.assign([np.nan, 1.0])
    np.testing.assert_array_equal(np.isnan(layer(x)), [[True, False]] * 2)


def small_model(seed=3):
    keras.utils.set_random_seed(seed)
    # With inputs around 1, the means that it divides by stay away from zero.
    positive = keras.initializers.RandomUniform(0.1, 1.0)
    return keras.Sequential(
        [
            keras.layers.Dense(8, kernel_initializer=positive),
            MeanNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dense(1),
        ]
    )


@pytest.mark.cases("mixed_bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "float64"])
def test_a_step_compiled_by_xla_trains_alike(dtype):
    x = np.random.default_rng(7).normal(1.0, 1.0, (64, 4)).astype(np.float32)
    target = x.sum(1, keepdims=True)
    weights = []
    for how in ({"run_eagerly": True}, {"jit_compile": True}):
        keras.config.set_dtype_policy(dtype)
        try:
            model = small_model()
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile(keras.optimizers.SGD(0.01), "mse", **how)
        model.fit(x, target, batch_size=16, epochs=2, verbose=0, shuffle=False)
        weights.append([np.asarray(w, np.float64) for w in model.get_weights()])
    tolerance = 0.1 if dtype == "mixed_bfloat16" else 1e-4
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_the_gradient_agrees_with_automatic_differentiation_of_the_formula():
    x = tf.constant(RNG.normal(1.5, 1.0, (6, 3)), tf.float32)
    layer = MeanNormalization()
    layer(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.sin(layer(x, training=True)))
    ours = tape.gradient(loss, [x, layer.alpha, layer.beta])
    alpha, beta = tf.ones([3]), tf.ones([3])
    with tf.GradientTape() as tape:
        tape.watch([x, alpha, beta])
        loss = tf.reduce_sum(tf.sin(alpha * x / tf.reduce_mean(x, 0) - beta))
    for one, other in zip(ours, tape.gradient(loss, [x, alpha, beta]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_its_configuration_survives_a_round_trip():
    layer = MeanNormalization(momentum=0.5, epsilon=0.1, name="norm")
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert (again.momentum, again.epsilon, again.name) == (0.5, 0.1, "norm")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MeanNormalization(momentum=1.0), "momentum must be .* below 1, not 1.0"),
        (
            lambda: MeanNormalization(epsilon=0.0),
            "epsilon must be .* above 0, not 0.0",
        ),
        (lambda: MeanNormalization()(np.ones(3, np.float32)), r"\[batch, ..., features\]"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
