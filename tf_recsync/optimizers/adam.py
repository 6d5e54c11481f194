"""Adam with staleness weights and SWAP, lazy or not in rows that a batch does not name."""

from __future__ import annotations

import keras
import tensorflow as tf

from tf_recsync import ops, staleness
from tf_recsync._checks import check_bool, number
from tf_recsync.optimizers import base
from tf_recsync.swap import Swap


@keras.saving.register_keras_serializable(package="tf_recsync")
class Adam(base.Optimizer):
    """Adam whose gradients are weighted by staleness, for dense variables and rows of tables.

    With `g_hat = rho(tau) g`, at global step t, for a variable or row that was last updated at
    global step s:

        m = beta_1^(t-s) m + (1 - beta_1) g_hat
        v = lambda beta_2^(t-s) v + (1 - beta_2) g_hat^2
        w -= lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)

    Where every step updates every variable this is `keras.optimizers.Adam`. A row that a batch does
    not name is left alone: its moments are decayed at its next update for all the steps between, as
    if its gradients had been 0, while the row itself did not move at them. With `lazy=False` it
    moves on by its moments at each step: in one process, with one worker, and with synchronous
    workers, that is Adam of the whole table. (Keras's own is, too, if no batch names a row twice:
    else it squares the row's gradients one by one, and here they are summed first.)

    The bias is corrected by the global step. A push that arrives after a younger one enters the
    moments with the weight that it would have had by now. Where several trainers or groups share
    tables and count their own steps (ShadowSync, Hierarchical Training, Hop), s is the step of the
    one that is ahead, and each update of a row decays its moments by one step at least, so that
    the gradients of slow trainers weigh as much as those of fast ones. lambda is the factor of
    SWAP, which decays second moments further; 1 without.

    What staleness does to Adam: see "Adam under asynchronous training"
    in docs/optimizers.md.

    Reference: Kingma and Ba 2015; Liu and Zhao 2021 for rho and lambda.

    Args:
        learning_rate: a float, a schedule or a callable. Defaults to 0.001.
        beta_1: a float in [0, 1), the decay of the first moment in a global step. Defaults to 0.9.
        beta_2: a float in [0, 1), that of the second moment. Defaults to 0.999.
        epsilon: a positive float, added to the root. Defaults to 1e-7.
        lazy: a bool, whether rows of tables that a step does not name stay where they are. With
            False all rows move at each step, which takes time in proportion to the table, not to
            the batch: with 16 floats a row about 4 ms for 100,000 rows on two cores, 30 ms for a
            million. A row's version and staleness count the pushes that named it, in either case.
            Defaults to True.
        swap: a `tf_recsync.Swap` of the second moment, or None (the default).
        staleness: a policy of `tf_recsync.staleness`, or None (the default) for `Constant()`.
        tables: as in `tf_recsync.optimizers.Optimizer`.
        name: as in `tf_recsync.optimizers.Optimizer`.
        **kwargs: see `tf_recsync.optimizers.Optimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:

    >>> import keras
    >>> from tf_recsync import optimizers
    >>> w = keras.Variable([1.0])
    >>> optimizer = optimizers.Adam(0.1)
    >>> optimizer.apply([keras.ops.ones(1)], [w])
    >>> round(float(w.numpy()[0]), 4)
    0.9
    """

    accumulator_names = ("momentum", "velocity")
    keeps_steps = True

    def __init__(
        self,
        learning_rate=0.001,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        lazy: bool = True,
        swap: Swap | None = None,
        staleness: staleness.Policy | None = None,
        tables: str = base.DEFAULT_TABLES,
        name: str = "adam",
        **kwargs,
    ):
        super().__init__(
            learning_rate, staleness=staleness, swap=swap, tables=tables, name=name, **kwargs
        )
        self.beta_1 = number("beta_1", beta_1, least=0, below=1)
        self.beta_2 = number("beta_2", beta_2, least=0, below=1)
        self.epsilon = number("epsilon", epsilon, above=0)
        check_bool("lazy", lazy)
        self.lazy = lazy

    def accumulator_initializer(self, name):
        return keras.initializers.Zeros()

    def _op_arguments(self, accumulators) -> dict:
        return {
            "momentums": accumulators[0],
            "velocities": accumulators[1],
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }

    def dense_op(self, *, accumulators, **kwargs):
        return ops.adam_dense(**self._op_arguments(accumulators), **kwargs)

    def rows_op(self, *, accumulators, **kwargs):
        return ops.adam_rows(
            lazy=self.lazy,
            # Each group has its own optimizer, while all of them share the tables.
            several_counters=self._shares_variables,
            **self._op_arguments(accumulators),
            **kwargs,
        )

    def plain_rule(self, accumulators, gradient, learning_rate, decay, *, value, step, last_step):
        dtype = gradient.dtype
        # Powers of numbers close to 1, in a precision that holds them.
        # A row that was trained by another counter may be ahead of this one; none comes late here.
        missed = tf.cast(tf.maximum(step - last_step, 1), tf.float64)
        t = tf.cast(step, tf.float64)
        beta_1, beta_2 = tf.constant(self.beta_1, tf.float64), tf.constant(self.beta_2, tf.float64)
        m = tf.cast(beta_1**missed, dtype) * accumulators[0] + (1 - self.beta_1) * gradient
        v = decay * tf.cast(beta_2**missed, dtype) * accumulators[1]
        v += (1 - self.beta_2) * tf.square(gradient)
        correction = tf.cast(tf.sqrt(1 - beta_2**t) / (1 - beta_1**t), dtype)
        return [m, v], learning_rate * correction * m / (tf.sqrt(v) + self.epsilon)

    def get_config(self):
        config = super().get_config()
        config.update(beta_1=self.beta_1, beta_2=self.beta_2, epsilon=self.epsilon, lazy=self.lazy)
        return config
