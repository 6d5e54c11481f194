"""How many elements datasets have."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.data.ops import concatenate_op, take_op, take_while_op

_COUNTED = 2**62  # More elements than that have counters alone, as `enumerate` has one.


def cardinality_of(dataset: tf.data.Dataset) -> int:
    """What tf.data says of a dataset; and `INFINITE_CARDINALITY` where something before its end
    repeats without an end, so that tf.data knows nothing of what functions make of that."""
    known = int(dataset.cardinality())
    is_open = known == tf.data.UNKNOWN_CARDINALITY and _is_endless(dataset)
    return int(tf.data.INFINITE_CARDINALITY) if is_open else known


def _is_endless(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has no end, as far as that shows in what it is made of."""
    known = int(dataset.cardinality())
    if known != tf.data.UNKNOWN_CARDINALITY:
        return known == tf.data.INFINITE_CARDINALITY or known > _COUNTED
    if isinstance(dataset, take_while_op._TakeWhileDataset):
        return False
    if isinstance(dataset, take_op._TakeDataset) and int(dataset._count) >= 0:
        return False
    inputs = map(_is_endless, dataset._inputs())
    if isinstance(dataset, concatenate_op._ConcatenateDataset):
        return any(inputs)
    return bool(dataset._inputs()) and all(inputs)
