"""Tables in TensorFlow's object-based checkpoints: row by row, whatever the placement.

`tf.train.Checkpoint` would save physical tables as they are, whose shapes change with placement.
What stands here for a logical table, or for what an optimizer keeps beside its rows, puts the rows
of all its shards together when it is saved, and takes them apart when it is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable

from tf_recsync.embedding.physical_tables import Piece
from tf_recsync.embedding.table_rows import TableRows
from tf_recsync.shown_variable import shown

_KEY = "values"


class SavedRows(tf.__internal__.tracking.Trackable):
    """What all shards of a table have per row, as one tensor [rows, ...] of a checkpoint.

    Args:
        label: what it is, for errors.
        shards: for each shard, the variable that holds it, and where in it.
        dtype: the type in which it is saved.
    """

    def __init__(
        self, label: str, shards: Sequence[tuple[keras.Variable, Piece]], dtype: str
    ) -> None:
        self._label = label
        self._shards = tuple(shards)
        self._dtype = tf.as_dtype(dtype)
        rows = sum(piece.rows for _, piece in self._shards)
        self._shape = (rows, *self._shards[0][0].shape[1:])

    def read(self) -> tf.Tensor:
        """The rows of the whole table."""
        parts, places = [], []
        for variable, piece in self._shards:
            # Not a read of the variable, which would copy all tables that lie in it.
            with tf.device(variable._value.device):
                part = tf.raw_ops.ResourceGather(
                    resource=variable._value.handle,
                    indices=_rows(piece),
                    dtype=tf.as_dtype(variable.dtype),
                )
            parts.append(tf.cast(part, self._dtype))
            places.append(tf.range(piece.index, self._shape[0], piece.count))
        return tf.dynamic_stitch(places, parts)

    def write(self, values: tf.Tensor) -> list[tf.Operation]:
        """Sets the rows of the whole table."""
        tf.debugging.assert_equal(
            tf.shape(values),
            tf.constant(self._shape),
            f"{self._label} has shape {list(self._shape)}, the saved one another",
        )
        with tf.init_scope():
            TableRows(self._shards).settle()
        operations = []
        for variable, piece in self._shards:
            part = tf.cast(piece.take(values), variable.dtype)
            with tf.device(variable._value.device):
                operations.append(
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=variable._value.handle, indices=_rows(piece), updates=part
                    )
                )
        return operations

    def _serialize_to_tensors(self):
        _tell(variable for variable, _ in self._shards)
        return _saved(self.read, self._dtype)

    def _restore_from_tensors(self, restored_tensors):
        return self.write(restored_tensors[_KEY])


class SavedCounters(tf.__internal__.tracking.Trackable):
    """Staleness counters of several variables, saved as their sum.

    Args:
        variables: the counters.
        maximum: the index of the element of which the maximum counts, not the sum.
    """

    def __init__(self, variables: Sequence[keras.Variable], maximum: int):
        self._variables = tuple(variables)
        self._maximum = maximum

    def _read(self) -> tf.Tensor:
        values = tf.stack([tf.identity(v._value.read_value()) for v in self._variables])
        is_maximum = tf.range(values.shape[1]) == self._maximum
        return tf.where(is_maximum, tf.reduce_max(values, 0), tf.reduce_sum(values, 0))

    def _serialize_to_tensors(self):
        _tell(self._variables)
        return _saved(self._read, tf.int64)

    def _restore_from_tensors(self, restored_tensors):
        # The sum is what counts; the first variable keeps it.
        first, *others = (v._value for v in self._variables)
        values = restored_tensors[_KEY]
        return [first.assign(values), *(v.assign(tf.zeros(v.shape, v.dtype)) for v in others)]


def _tell(variables: Iterable[keras.Variable]) -> None:
    """Tells those who train variables that they are about to be read."""
    with tf.init_scope():
        for variable in variables:
            found = shown(variable._value)
            if found is not None:
                found.tell()


def _saved(read, dtype: tf.DType) -> dict:
    """What a checkpoint asks of an object: its tensors, computed in this process when written."""

    def read_here():
        with tf.device("/CPU:0"):
            return tf.identity(read())

    with tf.init_scope(), tf.device("/CPU:0"):
        here = tf.zeros([]).device
    return {_KEY: tensor_callable.Callable(read_here, dtype=dtype, device=here)}


def _rows(piece: Piece) -> tf.Tensor:
    return tf.range(piece.offset, piece.offset + piece.rows, dtype=tf.int64)
