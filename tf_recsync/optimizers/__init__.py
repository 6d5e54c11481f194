"""Keras optimizers that know the staleness of what they apply."""

from tf_recsync.optimizers.adagrad import Adagrad, SwapAdagrad
from tf_recsync.optimizers.adam import Adam
from tf_recsync.optimizers.base import Optimizer
from tf_recsync.optimizers.ftrl import Ftrl
from tf_recsync.optimizers.per_table import MultiOptimizer, per_table
from tf_recsync.optimizers.sgd import SGD

__all__ = [
    "Adagrad",
    "Adam",
    "Ftrl",
    "MultiOptimizer",
    "Optimizer",
    "SGD",
    "SwapAdagrad",
    "per_table",
]
