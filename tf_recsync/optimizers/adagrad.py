"""Adagrad with staleness weights and SWAP."""

from __future__ import annotations

import keras
import tensorflow as tf

from tf_recsync import ops, staleness
from tf_recsync._checks import check_bool, number
from tf_recsync.optimizers import base
from tf_recsync.swap import Swap


@keras.saving.register_keras_serializable(package="tf_recsync")
class Adagrad(base.Optimizer):
    """Adagrad whose gradients are weighted by staleness and, with SWAP, by period.

    `g_hat = rho(tau) g`; `v = lambda_t v + g_hat^2`; `w -= lr g_hat / sqrt(v + epsilon)`.

    A Keras optimizer: with plain local Keras staleness is 1; under a
    parameter-server strategy of this package, updates run on the servers, on
    the rows that a batch touched. Versions, accumulators and staleness counters
    are optimizer variables beside their variable, so checkpoints carry them.

    With `rowwise=True` a row of an embedding table has one accumulator, to which
    the mean of the squares of its gradient is added: `v = lambda_t v + mean(g_hat^2)`.
    That is the "rowwise Adagrad" of FBGEMM and TorchRec (which add epsilon to the
    root, not under it). An accumulator then takes 4 bytes of a row, not as much as
    the row itself in float32; all elements of a row have the same learning rate.
    Dense variables keep an accumulator for each element.

    Reference: Liu and Zhao 2021, Eq. 8 and Algorithm 2; Duchi, Hazan and Singer
    2011. For `rowwise`: Mudigere et al. 2022, "Software-Hardware Co-design for Fast
    and Scalable Training of Deep Learning Recommendation Models"; FBGEMM's
    `EXACT_ROWWISE_ADAGRAD`.

    Args:
        learning_rate: a float, a schedule or a callable. Defaults to 0.001.
        initial_accumulator_value: a float of at least 0. Defaults to 0.1, as in Keras, which is
            much where gradients are small: a row with few clicks then hardly moves. Try 1e-5.
        epsilon: a positive float, added under the root. Defaults to 1e-7.
        rowwise: a bool, whether a row of a table has one accumulator instead of one
            for each of its elements. Weights that were saved with the other choice can't
            be loaded. Defaults to False.
        swap: a `tf_recsync.Swap`, or None (the default) for plain Adagrad.
        staleness: a policy of `tf_recsync.staleness`, or None (the default) for
            `Constant()`.
        tables: as in `tf_recsync.optimizers.Optimizer`.
        name: as in `tf_recsync.optimizers.Optimizer`.
        **kwargs: see `tf_recsync.optimizers.Optimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:

    >>> import keras
    >>> import tensorflow as tf
    >>> from tf_recsync import Swap, optimizers
    >>> optimizer = optimizers.Adagrad(0.1, swap=Swap(period=100, decay=0.8))
    >>> w = keras.Variable([1.0])
    >>> optimizer.apply([keras.ops.ones(1)], [w])
    >>> round(float(w.numpy()[0]), 4)
    0.9047

    A row's accumulator begins at 0.1, and gets the mean of 0 and 1:

    >>> table = keras.layers.Embedding(1000, 2)
    >>> table.build()
    >>> optimizer = optimizers.Adagrad(0.1, rowwise=True)
    >>> optimizer.apply([tf.IndexedSlices([[0.0, 1.0]], [3], [1000, 2])], [table.embeddings])
    >>> state = optimizer.state_of(table.embeddings)
    >>> accumulators = state.accumulators[0].numpy()
    >>> accumulators.shape, round(float(accumulators[3]), 4)
    ((1000,), 0.6)
    """

    accumulator_names = ("accumulator",)

    def __init__(
        self,
        learning_rate=0.001,
        *,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        rowwise: bool = False,
        swap: Swap | None = None,
        staleness: staleness.Policy | None = None,
        tables: str = base.DEFAULT_TABLES,
        name: str = "adagrad",
        **kwargs,
    ):
        super().__init__(
            learning_rate, staleness=staleness, swap=swap, tables=tables, name=name, **kwargs
        )
        self.initial_accumulator_value = number(
            "initial_accumulator_value", initial_accumulator_value, least=0
        )
        self.epsilon = number("epsilon", epsilon, above=0)
        check_bool("rowwise", rowwise)
        self.rowwise = rowwise

    def accumulator_initializer(self, name):
        return base.Filled(self.initial_accumulator_value)

    def dense_op(self, *, accumulators, **kwargs):
        return ops.adagrad_dense(accumulators=accumulators[0], epsilon=self.epsilon, **kwargs)

    def rows_op(self, *, accumulators, **kwargs):
        op = ops.rowwise_adagrad_rows if self.rowwise else ops.adagrad_rows
        return op(accumulators=accumulators[0], epsilon=self.epsilon, **kwargs)

    def plain_rule(self, accumulators, gradient, learning_rate, decay, *, value, step, last_step):
        squares = tf.square(gradient)
        if self.rowwise:
            # Over all that the accumulator has one number for: nothing, if the variable is dense.
            sizes = zip(accumulators[0].shape, value.shape, strict=True)
            axes = [axis for axis, (one, size) in enumerate(sizes) if one != size]
            squares = tf.reduce_mean(squares, axes, keepdims=True)
        accumulator = decay * accumulators[0] + squares
        return [accumulator], learning_rate * gradient * tf.math.rsqrt(accumulator + self.epsilon)

    def get_config(self):
        config = super().get_config()
        config.update(
            initial_accumulator_value=self.initial_accumulator_value,
            epsilon=self.epsilon,
            rowwise=self.rowwise,
        )
        return config


@keras.saving.register_keras_serializable(package="tf_recsync")
class SwapAdagrad(Adagrad):
    """`Adagrad` for rows with few clicks, with SWAP: a period of 10,000 steps, a decay of 0.8.

    Args:
        learning_rate: a float, a schedule or a callable. Defaults to 0.001.
        swap: a `tf_recsync.Swap`. Defaults to `Swap(10_000, 0.8)`; choose the
            period from the data, e.g. a fifth of a day's steps.
        initial_accumulator_value: a float of at least 0. Defaults to 1e-5, not to Keras's 0.1: the
            first gradients of a row, which are small, then move it by about the learning rate.
        name: as in `Adagrad`.
        **kwargs: as in `Adagrad`.

    Example:

    >>> import tf_recsync as recsync
    >>> optimizer = recsync.optimizers.SwapAdagrad(0.05, swap=recsync.Swap(period=2000, decay=0.8))
    >>> optimizer.swap.period
    2000
    """

    def __init__(
        self,
        learning_rate=0.001,
        *,
        swap: Swap | None = None,
        initial_accumulator_value: float = 1e-5,
        name="swap_adagrad",
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            swap=swap or Swap(period=10_000, decay=0.8),
            initial_accumulator_value=initial_accumulator_value,
            name=name,
            **kwargs,
        )
