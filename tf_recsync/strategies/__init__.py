"""tf.distribute strategies: presets over groups, aggregators and synchronizers."""

from tf_recsync.strategies.async_strategy import AsyncStrategy

__all__ = ["AsyncStrategy"]
