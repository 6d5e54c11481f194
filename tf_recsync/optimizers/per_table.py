"""Optimizers of single tables."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="tf_recsync")
class TableOptimizers:
    """Says which optimizer trains a variable: that of its table, else the default one.

    Args:
        default_optimizer: the default one.
    """

    def __init__(self, default_optimizer: keras.optimizers.Optimizer):
        self.default_optimizer = default_optimizer

    def __call__(self, variable: keras.Variable) -> keras.optimizers.Optimizer:
        """The optimizer of a variable."""
        own = getattr(variable, "table_optimizer", None)
        return self.default_optimizer if own is None else own

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON."""
        optimizer = keras.saving.serialize_keras_object(self.default_optimizer)
        return {"default_optimizer": optimizer}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableOptimizers:
        """Returns what `get_config` described."""
        return cls(keras.saving.deserialize_keras_object(config["default_optimizer"]))


def per_table(default: keras.optimizers.Optimizer) -> keras.optimizers.MultiOptimizer:
    """An optimizer that trains each table by the optimizer of its `TableConfig`.

    Args:
        default: The optimizer of all tables that have none of their own, and of all other
            parameters. Under a strategy, it and the others must be of this package.

    Returns:
        A `keras.optimizers.MultiOptimizer`, to compile a model with. Each of its parts counts its
        own steps, so that a learning-rate schedule is its optimizer's own.

    Raises:
        TypeError: If `default` is no optimizer of Keras.

    Example:
        >>> import keras
        >>> import tf_recsync as recsync
        >>> from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
        >>> users = TableConfig("users", 100, 4, optimizer=recsync.optimizers.Ftrl(0.1))
        >>> films = TableConfig("films", 100, 4)
        >>> layer = EmbeddingCollection(
        ...     [users, films], [FeatureConfig("user", "users"), FeatureConfig("film", "films")],
        ...     concatenate=True,
        ... )
        >>> inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "film")}
        >>> model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        >>> optimizer = recsync.optimizers.per_table(recsync.optimizers.Adagrad(0.01))
        >>> model.compile(optimizer, "mse")
        >>> optimizer.build(model.trainable_variables)
        >>> [type(part).__name__ for part in optimizer.optimizers]
        ['Adagrad', 'Ftrl']
    """
    if not isinstance(default, keras.optimizers.Optimizer):
        raise TypeError(f"default must be an optimizer of Keras, not {default!r}")
    return keras.optimizers.MultiOptimizer(TableOptimizers(default))
