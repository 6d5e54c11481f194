"""Rows of many tensors as rows of few, which data sets shuffle and batch in less time."""

import math
from typing import Any

import tensorflow as tf


class Packing:
    """Puts all dense tensors of a batch side by side into one; ragged ones stay as they are.

    Args:
        spec: Types of the tensors: of float32 or int64, with a first dimension for the rows.
    """

    def __init__(self, spec: Any) -> None:
        """See the class."""
        self._spec = spec
        self._flat = tf.nest.flatten(spec)

    def pack(self, batch: Any) -> tuple[tf.Tensor | tf.RaggedTensor, ...]:
        """Returns an int32 `[batch, n]` with all dense tensors, and the ragged ones."""
        dense, ragged = [], []
        for spec, tensor in zip(self._flat, tf.nest.flatten(batch), strict=True):
            if isinstance(spec, tf.RaggedTensorSpec):
                ragged.append(tensor)
            else:
                bits = tf.bitcast(tensor, tf.int32)
                dense.append(tf.reshape(bits, [tf.shape(tensor)[0], _width(spec)]))
        return tf.concat(dense, 1), *ragged

    def unpack(self, packed: tf.Tensor, *ragged: tf.RaggedTensor) -> Any:
        """Returns the batch that was packed, or another one of the same rows."""
        dense = iter(tf.split(packed, [_width(spec) for spec in self._flat if _is_dense(spec)], 1))
        others = iter(ragged)
        return tf.nest.pack_sequence_as(
            self._spec,
            [
                _restored(next(dense), spec) if _is_dense(spec) else next(others)
                for spec in self._flat
            ],
        )


def _is_dense(spec: tf.TypeSpec) -> bool:
    return not isinstance(spec, tf.RaggedTensorSpec)


def _width(spec: tf.TensorSpec) -> int:
    """How many int32s a row has."""
    return math.prod(spec.shape[1:]) * spec.dtype.size // tf.int32.size


def _restored(bits: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    shape = [-1, *spec.shape[1:]]
    if spec.dtype.size > tf.int32.size:
        return tf.bitcast(tf.reshape(bits, [*shape, 2]), spec.dtype)
    return tf.reshape(tf.bitcast(bits, spec.dtype), shape)
