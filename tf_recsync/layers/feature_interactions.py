"""Layers of models of clicks in which features meet: they compute with looked-up vectors."""

from __future__ import annotations

import keras

from tf_recsync._checks import check_at_least


@keras.saving.register_keras_serializable(package="tf_recsync")
class FactorizationMachine(keras.layers.Layer):
    """The sum of the products of all pairs of vectors, in time that grows with their number.

    `sum of v_i . v_j over i < j`, as the difference of the square of a sum and the sum of squares.

    Reference: Rendle 2010, "Factorization Machines", equation 1 and lemma 3.1; Guo et al. 2017,
    "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", section 2.1.

    Input shape: [batch, features, dimension], the vector of each feature.

    Output shape: [batch, 1].

    Raises:
        ValueError: If the input has another rank.

    Example:
        >>> import numpy as np
        >>> vectors = np.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
        >>> print(FactorizationMachine()(vectors).numpy())  # 11 + 17 + 39
        [[67.]]
    """

    def build(self, input_shape):
        if len(input_shape) != 3:
            raise ValueError(f"input must be [batch, features, dimension], not {input_shape}")

    def call(self, vectors):
        ops = keras.ops
        of_sum = ops.sum(ops.square(ops.sum(vectors, axis=1)), axis=1, keepdims=True)
        of_each = ops.sum(ops.square(vectors), axis=(1, 2))[:, None]
        return 0.5 * (of_sum - of_each)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], 1)


@keras.saving.register_keras_serializable(package="tf_recsync")
class Cross(keras.layers.Layer):
    """A layer of a cross network: `x_0 * (W x + b) + x`, with x_0 the network's input.

    Each layer raises by one the degree of the products of features that the network computes.
    With a rank, W is the product of two matrices, which takes less memory and time.

    Reference: Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons for
    Web-scale Learning to Rank Systems", equations 1 and 2.

    Args:
        rank: Columns of the first of the two matrices, at least 1. None (the default): W is one
            matrix.
        **kwargs: As in `keras.layers.Layer`.

    Call arguments:
        first: x_0, [batch, features].

        x: What the layer before returned, [batch, features]. None (the default) for the network's
            first layer, where it is `first`.

    Output shape: [batch, features].

    Raises:
        ValueError: If `rank` is out of range, or the inputs have other shapes.

    Example:
        >>> import numpy as np
        >>> cross = Cross(rank=2)
        >>> first = np.ones((4, 8), np.float32)
        >>> tuple(cross(first, cross(first)).shape)
        (4, 8)
    """

    def __init__(self, rank: int | None = None, **kwargs):
        super().__init__(**kwargs)
        if rank is not None:
            check_at_least("rank", rank, 1)
        self.rank = None if rank is None else int(rank)

    def build(self, first_shape, x_shape=None):
        features = first_shape[-1]
        if len(first_shape) != 2 or (x_shape is not None and x_shape[-1] != features):
            raise ValueError(
                f"first and x must be [batch, features] alike, not {first_shape} and {x_shape}"
            )
        shapes = [(features, features)]
        if self.rank is not None:
            shapes = [(features, self.rank), (self.rank, features)]
        self._kernels = [
            self.add_weight(shape=shape, initializer="glorot_uniform", name=f"kernel_{i}")
            for i, shape in enumerate(shapes)
        ]
        self._bias = self.add_weight(shape=(features,), initializer="zeros", name="bias")

    def call(self, first, x=None):
        x = first if x is None else x
        crossed = x
        for kernel in self._kernels:
            crossed = keras.ops.matmul(crossed, kernel)
        return first * (crossed + self._bias) + x

    def compute_output_shape(self, first_shape, x_shape=None):
        del x_shape
        return first_shape

    def get_config(self):
        return {**super().get_config(), "rank": self.rank}
