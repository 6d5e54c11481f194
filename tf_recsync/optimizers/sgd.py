"""Stochastic gradient descent with staleness weights."""

from __future__ import annotations

import keras

from tf_recsync import ops, staleness
from tf_recsync.optimizers import base


@keras.saving.register_keras_serializable(package="tf_recsync")
class SGD(base.Optimizer):
    """SGD whose gradients are weighted by their staleness: `w -= lr rho(tau) g`.

    A Keras optimizer: with plain local Keras staleness is 1 and it is SGD; under
    a parameter-server strategy of this package, updates run on the servers.

    Reference: Liu and Zhao 2021, Eq. 3 and 8.

    Args:
        learning_rate: a float, a schedule or a callable. Defaults to 0.01.
        staleness: a policy of `tf_recsync.staleness`, or None (the default) for
            `Constant()`.
        tables: as in `tf_recsync.optimizers.Optimizer`.
        name: as in `tf_recsync.optimizers.Optimizer`.
        **kwargs: see `tf_recsync.optimizers.Optimizer`.

    Example:

    >>> import keras
    >>> from tf_recsync import optimizers
    >>> w = keras.Variable([1.0, 2.0])
    >>> optimizers.SGD(0.5).apply([keras.ops.ones(2)], [w])
    >>> w.numpy().tolist()
    [0.5, 1.5]
    """

    def __init__(
        self,
        learning_rate=0.01,
        *,
        staleness: staleness.Policy | None = None,
        tables: str = base.DEFAULT_TABLES,
        name: str = "sgd",
        **kwargs,
    ):
        super().__init__(learning_rate, staleness=staleness, tables=tables, name=name, **kwargs)

    def dense_op(self, *, accumulators, **kwargs):
        return ops.sgd_dense(**kwargs)

    def rows_op(self, *, accumulators, **kwargs):
        return ops.sgd_rows(**kwargs)

    def plain_rule(self, accumulators, gradient, learning_rate, decay, *, value, step, last_step):
        return [], learning_rate * gradient

    def get_config(self):
        config = super().get_config()
        del config["swap"]
        return config
