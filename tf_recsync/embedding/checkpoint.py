"""Tables in TensorFlow's object-based checkpoints: row by row, whatever the placement.

`tf.train.Checkpoint` would save physical tables as they are, whose shapes change with placement.
What stands here for a logical table, or for what an optimizer keeps beside its rows, puts the rows
of all its shards together when it is saved, and takes them apart when it is restored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable
from tensorflow.python.trackable.constants import VARIABLE_VALUE_KEY
from tensorflow.python.training.saving import saveable_object

from tf_recsync.embedding.physical_tables import Piece
from tf_recsync.embedding.table_rows import TableRows, narrowed_tensor
from tf_recsync.shown_variable import shown

_KEY = "values"


class SavedRows(tf.__internal__.tracking.Trackable):
    """What all shards of a table have per row, as one tensor [rows, ...] of a checkpoint.

    Each server that has a shard writes and reads as many rows that follow each other, as a slice
    of that tensor; they come from all servers that have some of them, and go there. None passes
    through this process, unless the table is in it. A checkpoint fits any number of servers, as
    TensorFlow reads other slices than were written, too.

    Args:
        label: what it is, for errors.
        shards: for each shard, the variable that holds it, and where in it.
        dtype: the type in which it is saved.
    """

    def __init__(
        self, label: str, shards: Sequence[tuple[keras.Variable, Piece]], dtype: str
    ) -> None:
        self._label = label
        self._rows = TableRows(shards, dtype)

    def _read(self, begin: int, end: int, device: str) -> tf.Tensor:
        """Rows that follow each other, on a device."""
        parts, places = [], []
        for variable, first, own in self._rows.places(begin, end):
            places.append(range(*own.indices(end - begin)))
            # Not a read of the variable, which would copy all tables that lie in it.
            with tf.device(variable._value.device):
                part = tf.raw_ops.ResourceGather(
                    resource=variable._value.handle,
                    indices=_rows(first, len(places[-1])),
                    dtype=tf.as_dtype(variable.dtype),
                )
                parts.append(tf.cast(part, self._rows.dtype))
        with tf.device(device):
            if len(parts) == 1:
                return tf.identity(parts[0])
            return tf.dynamic_stitch([tf.range(p.start, p.stop, p.step) for p in places], parts)

    def write(self, begin: int, end: int, values: tf.Tensor, device: str) -> list[tf.Operation]:
        """Sets rows that follow each other to values that are on a device."""
        shape = (end - begin, *self._rows.shape[1:])
        tf.debugging.assert_equal(
            tf.shape(values),
            tf.constant(shape),
            f"{self._label} has shape {list(shape)}, the saved one another",
        )
        with tf.init_scope():
            self._rows.settle()
        operations = []
        for variable, first, own in self._rows.places(begin, end):
            with tf.device(device):
                part = narrowed_tensor(values[own], variable.dtype)
            with tf.device(variable._value.device):
                indices = _rows(first, len(range(*own.indices(end - begin))))
                operations.append(
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=variable._value.handle, indices=indices, updates=part
                    )
                )
        return operations

    def _slices(self) -> dict[str, tuple[int, int, str]]:
        """What is written apart, by how TensorFlow calls it: first row, end, and who does it."""
        shape = self._rows.shape
        devices = list(dict.fromkeys(variable._value.device for variable, _ in self._rows.shards))
        if len(devices) == 1:
            return {"": (0, shape[0], devices[0])}
        bounds = [shape[0] * i // len(devices) for i in range(len(devices) + 1)]
        slices = {}
        for begin, end, device in zip(bounds, bounds[1:], devices, strict=False):
            ranges = ":".join([f"{begin},{end - begin}", *("-" for _ in shape[1:])])
            if begin < end:
                slices[f"{' '.join(map(str, shape))} {ranges}"] = begin, end, device
        return slices

    def _gather_saveables_for_checkpoint(self):
        # Of the newer way, `_serialize_to_tensors`, TensorFlow restores the last slice only.
        return {_KEY: self._saveable}

    def _saveable(self, name: str) -> saveable_object.SaveableObject:
        """What TensorFlow saves and restores by a name."""
        _tell(variable for variable, _ in self._rows.shards)
        slices = self._slices()
        dtype = tf.as_dtype(self._rows.dtype)
        specs = [
            saveable_object.SaveSpec(
                functools.partial(self._read, *which), part, name, dtype, device=which[-1]
            )
            for part, which in slices.items()
        ]
        return _Saveable(self, specs, name, [*slices.values()])


class _Saveable(saveable_object.SaveableObject):
    """Slices of a table's rows, for TensorFlow.

    Args:
        rows: the table's.
        specs: what TensorFlow knows of each slice.
        name: of the tensor in the checkpoint.
        slices: of each, its first row, its end, and the device that reads it.
    """

    def __init__(
        self,
        rows: SavedRows,
        specs: Sequence[saveable_object.SaveSpec],
        name: str,
        slices: Sequence[tuple[int, int, str]],
    ):
        super().__init__(rows, specs, name)
        self._slices = slices

    def restore(self, restored_tensors, restored_shapes):
        """Sets the rows to those of all slices."""
        del restored_shapes
        operations = []
        for values, (begin, end, device) in zip(restored_tensors, self._slices, strict=True):
            operations += self.op.write(begin, end, values, device)
        return tf.group(*filter(None, operations))


class SavedIntegers(tf.__internal__.tracking.Trackable):
    """An integer variable that is saved as int64, whatever its own type.

    So files that older versions wrote, where it was int64, fit. Numbers that its type lacks are
    restored as the nearest that it has.

    Args:
        variable: the variable.
    """

    def __init__(self, variable: keras.Variable):
        self._variable = variable

    def _serialize_to_tensors(self):
        value = self._variable._value
        _tell([self._variable])

        def read():
            with tf.device(value.device):
                return tf.cast(value.read_value(), tf.int64)

        saved = tensor_callable.Callable(read, dtype=tf.int64, device=value.device)
        return {VARIABLE_VALUE_KEY: saved}

    def _restore_from_tensors(self, restored_tensors):
        value = self._variable._value
        with tf.device(value.device):
            return value.assign(narrowed_tensor(restored_tensors[VARIABLE_VALUE_KEY], value.dtype))


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


def _rows(first: int, count: int) -> tf.Tensor:
    return tf.range(first, first + count, dtype=tf.int64)
