"""FTRL-Proximal with staleness weights and SWAP."""

from __future__ import annotations

import keras
import tensorflow as tf

from tf_recsync import ops, staleness
from tf_recsync._checks import number
from tf_recsync.optimizers import base
from tf_recsync.swap import Swap


@keras.saving.register_keras_serializable(package="tf_recsync")
class Ftrl(base.Optimizer):
    """FTRL-Proximal whose gradients are weighted by staleness: sparse weights of wide models.

    With `g_hat = rho(tau) g` and `p = -learning_rate_power`:

        n' = lambda n + g_hat^2
        z += g_hat - (n'^p - n^p) / lr w
        w = (clip(z, -l1, l1) - z) / (n'^p / lr + 2 l2 + beta / lr)
        n = n'

    Without SWAP (lambda is 1) and staleness it is `keras.optimizers.Ftrl`. SWAP's decay of n is
    part of the difference in z, so that by itself it moves no weight. As in Keras, z starts at 0:
    the first update takes a weight from where it was initialized to near 0.

    Reference: McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches"; Liu and Zhao
    2021 for rho and lambda.

    Args:
        learning_rate: a float, a schedule or a callable; never 0. Defaults to 0.001.
        learning_rate_power: a float of at most 0; 0 is a constant learning rate. Defaults to -0.5.
        initial_accumulator_value: a float of at least 0, the start of n. Defaults to 0.1.
        l1: a float of at least 0, the strength of the l1 regularization. Defaults to 0.
        l2: a float of at least 0, that of the l2 regularization. Defaults to 0.
        beta: a float of at least 0, the paper's beta. Defaults to 0.
        swap: a `tf_recsync.Swap` of n, or None (the default).
        staleness: a policy of `tf_recsync.staleness`, or None (the default) for `Constant()`.
        tables: as in `tf_recsync.optimizers.Optimizer`.
        name: as in `tf_recsync.optimizers.Optimizer`.
        **kwargs: see `tf_recsync.optimizers.Optimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:

    >>> import keras
    >>> from tf_recsync import optimizers
    >>> w = keras.Variable([0.0, 0.0])
    >>> optimizer = optimizers.Ftrl(0.1, l1=0.5)
    >>> optimizer.apply([keras.ops.array([1.0, 0.1])], [w])
    >>> [round(float(x), 4) for x in w.numpy()]
    [-0.0477, 0.0]
    """

    accumulator_names = ("accumulator", "linear")

    def __init__(
        self,
        learning_rate=0.001,
        *,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        beta: float = 0.0,
        swap: Swap | None = None,
        staleness: staleness.Policy | None = None,
        tables: str = base.DEFAULT_TABLES,
        name: str = "ftrl",
        **kwargs,
    ):
        super().__init__(
            learning_rate, staleness=staleness, swap=swap, tables=tables, name=name, **kwargs
        )
        self.learning_rate_power = number("learning_rate_power", learning_rate_power, most=0)
        self.initial_accumulator_value = number(
            "initial_accumulator_value", initial_accumulator_value, least=0
        )
        self.l1 = number("l1", l1, least=0)
        self.l2 = number("l2", l2, least=0)
        self.beta = number("beta", beta, least=0)

    def accumulator_initializer(self, name):
        start = self.initial_accumulator_value if name == "accumulator" else 0.0
        return base.Filled(start)

    def _op_arguments(self, accumulators) -> dict:
        return {
            "accumulators": accumulators[0],
            "linears": accumulators[1],
            "learning_rate_power": self.learning_rate_power,
            "l1": self.l1,
            "l2": self.l2,
            "beta": self.beta,
        }

    def dense_op(self, *, accumulators, **kwargs):
        return ops.ftrl_dense(**self._op_arguments(accumulators), **kwargs)

    def rows_op(self, *, accumulators, **kwargs):
        return ops.ftrl_rows(**self._op_arguments(accumulators), **kwargs)

    def plain_rule(self, accumulators, gradient, learning_rate, decay, *, value, step, last_step):
        n, z = accumulators
        power = -self.learning_rate_power
        new_n = decay * n + tf.square(gradient)
        root = new_n**power
        z = z + gradient - (root - n**power) / learning_rate * value
        quadratic = (root + self.beta) / learning_rate + 2 * self.l2
        # Without a square or a regularization there is nothing that a gradient has said.
        new_value = tf.math.divide_no_nan(tf.clip_by_value(z, -self.l1, self.l1) - z, quadratic)
        return [new_n, z], value - new_value

    def get_config(self):
        config = super().get_config()
        config.update(
            learning_rate_power=self.learning_rate_power,
            initial_accumulator_value=self.initial_accumulator_value,
            l1=self.l1,
            l2=self.l2,
            beta=self.beta,
        )
        return config
