"""Keras optimizers that know the staleness of what they apply."""

from tf_recsync.optimizers.adagrad import Adagrad, SwapAdagrad
from tf_recsync.optimizers.base import Optimizer
from tf_recsync.optimizers.sgd import SGD

__all__ = ["Adagrad", "SGD", "SwapAdagrad", "Optimizer"]
