"""Keras layers for asynchronous training."""

from tf_recsync.layers.mean_normalization import MeanNormalization

__all__ = ["MeanNormalization"]
