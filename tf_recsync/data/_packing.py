"""Rows of many tensors as rows of few, which data sets shuffle and batch in less time."""

import math
from typing import Any

import tensorflow as tf

from tf_recsync.data import _spec


class Packing:
    """Puts all dense tensors of a batch side by side into one; ragged ones stay as they are.

    Args:
        features: What the batches have.
    """

    def __init__(self, features: _spec.FeatureSpec) -> None:
        """See the class."""
        self._spec = spec = features.input_signature()
        self._is_narrow = max(features.categorical.values(), default=0) <= 1 << 31
        flat = tf.nest.flatten(spec)
        self._flat = flat
        self._ragged = [i for i, one in enumerate(flat) if isinstance(one, tf.RaggedTensorSpec)]
        dense = [i for i in range(len(flat)) if i not in self._ragged]
        # All ids are moved at once: for each of them alone, it would take as long.
        self._ids = [i for i in dense if flat[i].dtype == tf.int64 and flat[i].shape.rank == 1]
        self._others = [i for i in dense if i not in self._ids]

    def pack(self, batch: Any) -> tuple[tf.Tensor | tf.RaggedTensor, ...]:
        """Returns an int32 `[batch, n]` with all dense tensors, and the ragged ones."""
        tensors = tf.nest.flatten(batch)
        bits = [_bits(tensors[i], _width(self._flat[i])) for i in self._others]
        if self._ids:
            ids = tf.stack([tensors[i] for i in self._ids], 1)
            if self._is_narrow:
                bits.append(tf.cast(ids, tf.int32))
            else:
                bits.append(_bits(ids, 2 * len(self._ids)))
        return tf.concat(bits, 1), *(tensors[i] for i in self._ragged)

    def unpack(self, packed: tf.Tensor, *ragged: tf.RaggedTensor) -> Any:
        """Returns the batch that was packed, or another one of the same rows."""
        tensors = dict(zip(self._ragged, ragged, strict=True))
        place = 0
        for i in self._others:
            spec = self._flat[i]
            tensors[i] = _tensor(packed[:, place : place + _width(spec)], spec)
            place += _width(spec)
        if self._ids:
            ids = packed[:, place:]
            if self._is_narrow:
                ids = tf.cast(ids, tf.int64)
            else:
                ids = _tensor(ids, tf.TensorSpec([None, len(self._ids)], tf.int64))
            columns = tf.unstack(tf.transpose(ids), num=len(self._ids), axis=0)
            tensors.update(zip(self._ids, columns, strict=True))
        in_order = [tensors[i] for i in range(len(self._flat))]
        return tf.nest.pack_sequence_as(self._spec, in_order)


def _width(spec: tf.TensorSpec) -> int:
    """How many int32s a row has."""
    return math.prod(spec.shape[1:]) * spec.dtype.size // tf.int32.size


def _bits(tensor: tf.Tensor, width: int) -> tf.Tensor:
    return tf.reshape(tf.bitcast(tensor, tf.int32), [tf.shape(tensor)[0], width])


def _tensor(bits: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    shape = [-1, *spec.shape[1:]]
    if spec.dtype.size > tf.int32.size:
        return tf.bitcast(tf.reshape(bits, [*shape, 2]), spec.dtype)
    return tf.reshape(tf.bitcast(bits, spec.dtype), shape)
