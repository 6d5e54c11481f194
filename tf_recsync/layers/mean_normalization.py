"""Local mean-normalization."""

from __future__ import annotations

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync._checks import number
from tf_recsync.optimizers.plain_update import in_xla_context


@keras.saving.register_keras_serializable(package="tf_recsync")
class MeanNormalization(keras.layers.Layer):
    """Local mean-normalization: `y = alpha * x / E(x) - beta`, for each feature.

    Makes asynchronous training steadier, as batch normalization does for
    synchronous training, from the mean alone. In training, E is the mean over
    the worker's own mini-batch; in inference, its moving average, the one copy
    of which all workers share. alpha and beta are trainable and start at 1, so
    that y starts as `(x - E) / E`. The divisor is kept away from 0 with its
    sign: `sign(E) * max(|E|, epsilon)`. A mean that is not finite does not enter
    the moving average. A layer with `trainable=False` uses its moving average
    in training, too, and leaves it as it is, like Keras's `BatchNormalization`.

    Place it between a dense layer and its activation:

    >>> import keras
    >>> from tf_recsync import layers
    >>> model = keras.Sequential(
    ...     [keras.layers.Dense(8), layers.MeanNormalization(), keras.layers.ReLU()]
    ... )
    >>> model(keras.ops.ones((4, 3))).shape
    TensorShape([4, 8])

    Reference: Liu and Zhao 2021, "Asynchronous Stochastic Gradient Descent for
    Extreme-Scale Recommender Systems", Eq. 9 and 10, Algorithm 1.

    Args:
        momentum: of the moving average: `m = momentum * m + (1 - momentum) * E`.
            A float in [0, 1), 0.99 by default.
        epsilon: the smallest divisor, a positive float, 1e-3 by default.
        **kwargs: as in `keras.layers.Layer`.

    Input shape: [batch, ..., features], of rank 2 or more; E is taken over all
    axes but the last.

    Output shape: as the input.

    Raises:
        ValueError: for a value out of range or an input of rank below 2.
    """

    def __init__(self, momentum: float = 0.99, epsilon: float = 1e-3, **kwargs):
        super().__init__(**kwargs)
        self.momentum = number("momentum", momentum, least=0, below=1)
        self.epsilon = number("epsilon", epsilon, above=0)

    def build(self, input_shape):
        if len(input_shape) < 2 or input_shape[-1] is None:
            raise ValueError(
                "MeanNormalization needs an input [batch, ..., features] with a known number of "
                f"features, not one of shape {input_shape}"
            )
        shape = (input_shape[-1],)
        self.alpha = self.add_weight(shape=shape, initializer="ones", name="alpha")
        self.beta = self.add_weight(shape=shape, initializer="ones", name="beta")
        self.moving_mean = self.add_weight(
            shape=shape, initializer="ones", trainable=False, name="moving_mean", autocast=False
        )

    def call(self, inputs, training=False):
        if not training or not self.trainable:
            # Stock ops alone: an exported model serves without this package.
            y = inputs * tf.cast(self._scale(self.moving_mean, inputs.dtype), inputs.dtype)
            return y - tf.cast(self.beta, inputs.dtype)
        features = inputs.shape[-1]
        flat = tf.reshape(inputs, [-1, features])
        if in_xla_context() or inputs.dtype == tf.float64:
            normalized, mean = self._plain(flat)
        else:
            normalized, mean = ops.mean_normalize(
                flat,
                tf.cast(self.alpha, tf.float32),
                tf.cast(self.beta, tf.float32),
                epsilon=self.epsilon,
            )
        mean = tf.stop_gradient(tf.cast(mean, self.moving_mean.dtype))
        # An empty batch has no mean to learn from, and one that is not finite would stay for good.
        learns = (tf.shape(flat)[0] > 0) & tf.math.is_finite(mean)
        mean = tf.where(learns, mean, tf.convert_to_tensor(self.moving_mean))
        self.moving_mean.assign(self.moving_mean * self.momentum + mean * (1.0 - self.momentum))
        return tf.reshape(normalized, tf.shape(inputs))

    def _scale(self, mean, dtype):
        mean = tf.cast(mean, tf.float64 if dtype == tf.float64 else tf.float32)
        epsilon = tf.cast(self.epsilon, mean.dtype)
        held = tf.where(mean < 0, -epsilon, epsilon)
        # What is no number stays so, rather than to become a divisor like any other.
        divisor = tf.where(tf.abs(mean) < epsilon, held, mean)
        return tf.cast(self.alpha, mean.dtype) / divisor

    def _plain(self, flat):
        """What the op computes, in stock ops, for XLA and float64."""
        wide = flat if flat.dtype == tf.float64 else tf.cast(flat, tf.float32)
        rows = tf.maximum(tf.cast(tf.shape(flat)[0], wide.dtype), 1)
        mean = tf.reduce_sum(wide, 0) / rows
        y = wide * self._scale(mean, flat.dtype) - tf.cast(self.beta, wide.dtype)
        return tf.cast(y, flat.dtype), mean

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        config = super().get_config()
        config.update(momentum=self.momentum, epsilon=self.epsilon)
        return config
