"""What batches consist of."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def tensors_of(batch: Any) -> list[tf.Tensor]:
    """The tensors of a batch, parts of which may be None."""
    parts = tf.nest.flatten(batch, expand_composites=True)
    return [tensor for tensor in parts if tensor is not None]
