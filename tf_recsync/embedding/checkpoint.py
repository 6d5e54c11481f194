"""Tables in TensorFlow's object-based checkpoints: row by row, whatever the placement.

`tf.train.Checkpoint` would save physical tables as they are, whose shapes change with placement.
What stands here for a logical table, or for what an optimizer keeps beside its rows, puts the rows
of all its shards together when it is saved, and takes them apart when it is restored.

TensorFlow has each server write all that it saves by one op, and read it by another one, so that
all of it is in memory at once. So what is larger than a block has a saver of its own, registered
with TensorFlow, by which servers write and read block after block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable
from tensorflow.python.saved_model import registration
from tensorflow.python.trackable import trackable_utils
from tensorflow.python.trackable.constants import VARIABLE_VALUE_KEY
from tensorflow.python.training.saving import saveable_object

from tf_recsync.embedding.physical_tables import Piece
from tf_recsync.embedding.table_rows import TableRows, narrowed_tensor, rows_of_block
from tf_recsync.shown_variable import shown

_Number = int | np.int64 | tf.Tensor
_KEY = "values"
# Each block is a file, and a server has a few of them in memory: one that it writes, and its own
# rows of those that others write. A block has so many bytes, or more if there were too many blocks.
BLOCK_BYTES, MOST_BLOCKS = 32 << 20, 4096


class SavedRows(tf.__internal__.tracking.Trackable):
    """What all shards of a table have per row, as one tensor [rows, ...] of a checkpoint.

    Each server that has a shard writes and reads as many rows that follow each other, as slices
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

    def __repr__(self) -> str:
        # TensorFlow's errors name an object by it.
        return f"{self._label} of shape {list(self.shape)}"

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, ...]."""
        return self._rows.shape

    @property
    def dtype(self) -> tf.DType:
        """The type in which it is saved."""
        return tf.as_dtype(self._rows.dtype)

    @property
    def block(self) -> int:
        """How many rows a block has; the same on any number of servers, for TensorFlow reads slices
        as large as they were written."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.size
        at_least = row_bytes * -(-self.shape[0] // MOST_BLOCKS)
        return rows_of_block(row_bytes, max(BLOCK_BYTES, at_least))

    def divided(self, unit: int = 1) -> Iterator[tuple[int, int, str]]:
        """What each server writes and reads: its first row, its end, and the server's device.

        Args:
            unit: of how many rows a part is a multiple.
        """
        devices = list(dict.fromkeys(variable._value.device for variable, _ in self._rows.shards))
        units = -(-self.shape[0] // unit)
        bounds = [units * i // len(devices) * unit for i in range(len(devices) + 1)]
        for begin, end, device in zip(bounds, bounds[1:], devices, strict=False):
            if begin < end:
                yield begin, min(end, self.shape[0]), device

    def tell(self) -> None:
        """Tells those who train the rows that these are about to be read."""
        _tell(variable for variable, _ in self._rows.shards)

    def settle(self) -> None:
        """Brings the rows up to date, before they are set."""
        with tf.init_scope():
            self._rows.settle()

    def tell_of_change(self) -> None:
        """To be called when rows were set."""
        with tf.init_scope():
            self._rows.tell_of_change()

    def read(self, begin: _Number, end: _Number, device: str) -> tf.Tensor:
        """Rows that follow each other, on a device."""
        parts = []
        for variable, piece in self._rows.shards:
            # Not a read of the variable, which would copy all tables that lie in it.
            with tf.device(variable._value.device):
                part = tf.raw_ops.ResourceGather(
                    resource=variable._value.handle,
                    indices=_rows(piece, begin, end),
                    dtype=tf.as_dtype(variable.dtype),
                )
                parts.append(tf.cast(part, self.dtype))
        with tf.device(device):
            if len(parts) == 1:
                return tf.identity(parts[0])
            places = [_places(piece, begin, end) for _, piece in self._rows.shards]
            return tf.dynamic_stitch([tf.cast(p, tf.int32) for p in places], parts)

    def write(
        self, begin: _Number, end: _Number, values: tf.Tensor, device: str
    ) -> list[tf.Operation]:
        """Sets rows that follow each other to values that are on a device."""
        operations = []
        for variable, piece in self._rows.shards:
            with tf.device(device):
                part = values
                if len(self._rows.shards) > 1:
                    part = tf.gather(values, _places(piece, begin, end))
                part = narrowed_tensor(part, variable.dtype)
            with tf.device(variable._value.device):
                operations.append(
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=variable._value.handle,
                        indices=_rows(piece, begin, end),
                        updates=part,
                    )
                )
        return operations

    def check(self, values: tf.Tensor, begin: int, end: int) -> None:
        """Has an error name what was saved in another shape."""
        shape = (end - begin, *self.shape[1:])
        tf.debugging.assert_equal(
            tf.shape(values),
            tf.constant(shape),
            f"{self._label} has shape {list(shape)}, the saved one another",
        )

    @property
    def around_ranges(self) -> tuple[str, str]:
        """What TensorFlow's name of a slice has before "first row,number of rows", and after."""
        return f"{' '.join(map(str, self.shape))} ", ":-" * (len(self.shape) - 1)

    def _gather_saveables_for_checkpoint(self):
        # Of the newer way, `_serialize_to_tensors`, TensorFlow restores the last slice only.
        return {_KEY: self._saveable}

    def _saveable(self, name: str) -> saveable_object.SaveableObject:
        """What TensorFlow saves and restores by a name, if it is no more than a block."""
        self.tell()
        parts = [*self.divided()]
        before, after = self.around_ranges
        specs = []
        for begin, end, device in parts:
            spec = f"{before}{begin},{end - begin}{after}" if len(parts) > 1 else ""
            read = functools.partial(self.read, begin, end, device)
            specs.append(saveable_object.SaveSpec(read, spec, name, self.dtype, device=device))
        return _Saveable(self, specs, name, parts)


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
        self.op.settle()
        operations = []
        for values, (begin, end, device) in zip(restored_tensors, self._slices, strict=True):
            self.op.check(values, begin, end)
            operations += self.op.write(begin, end, values, device)
        self.op.tell_of_change()
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
            narrowed = narrowed_tensor(restored_tensors[VARIABLE_VALUE_KEY], value.dtype)
        return _restore(value, narrowed)


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
        zeros = [_restore(other, tf.zeros(other.shape, other.dtype)) for other in others]
        return [_restore(first, values), *zeros]


def _restore(variable: tf.Variable, value: tf.Tensor):
    """Sets a variable as restoring it does, which is no assignment of a user's."""
    return variable._restore_from_tensors({VARIABLE_VALUE_KEY: value})


def _is_in_blocks(trackable: object) -> bool:
    """Whether what is saved are rows of more than a block."""
    return isinstance(trackable, SavedRows) and trackable.shape[0] > trackable.block


def _save_blocks(trackables: Mapping[str, SavedRows], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    """Has servers write rows, each block to files of its own.

    Args:
        trackables: the rows, by their names in the checkpoint.
        file_prefix: where the checkpoint is to be.

    Returns:
        The prefixes of all blocks' files, which TensorFlow makes one checkpoint of.
    """
    folder = tf.strings.join([file_prefix, "_temp/"])
    prefixes: list[tf.Tensor] = []
    done: dict[str, tf.Tensor] = {}
    for number, (name, rows) in enumerate(trackables.items()):
        rows.tell()
        key = trackable_utils.checkpoint_key(name, _KEY)
        prefix = tf.strings.join([folder, f"{number:05d}-"])
        prefixes += [
            tf.strings.join([prefix, str(begin)]) for begin in range(0, rows.shape[0], rows.block)
        ]

        def save(begin, end, device, rows=rows, key=key, prefix=prefix):
            values = rows.read(begin, end, device)
            with tf.device(device):
                own = tf.strings.join([prefix, tf.strings.as_string(begin)])
                return tf.raw_ops.SaveV2(
                    prefix=own,
                    tensor_names=[key],
                    shape_and_slices=[_slice(rows, begin, end)],
                    tensors=[values],
                )

        _each_block(rows, save, done)
    with tf.control_dependencies([*done.values()]):
        return [tf.identity(prefix) for prefix in prefixes]


def _restore_blocks(trackables: Mapping[str, SavedRows], merged_prefix: tf.Tensor) -> None:
    """Has servers read rows, block by block.

    Args:
        trackables: the rows, by their names in the checkpoint; or, if TensorFlow's own saver wrote
            them, as it did before there were blocks, by those of their tensors.
        merged_prefix: where the checkpoint is.
    """
    done: dict[str, tf.Tensor] = {}
    for name, rows in trackables.items():
        rows.settle()
        is_whole = f"/{trackable_utils.OBJECT_ATTRIBUTES_NAME}/" in name
        key = name if is_whole else trackable_utils.checkpoint_key(name, _KEY)

        def restore(begin, end, device, rows=rows, key=key):
            with tf.device(device):
                (values,) = tf.raw_ops.RestoreV2(
                    prefix=merged_prefix,
                    tensor_names=[key],
                    shape_and_slices=[_slice(rows, begin, end)],
                    dtypes=[rows.dtype],
                )
            return tf.group(*filter(None, rows.write(begin, end, values, device)))

        # TensorFlow reads slices as they were written, and cuts out what is asked for.
        _each_block(rows, restore, done, is_whole)
        rows.tell_of_change()


def _each_block(
    rows: SavedRows,
    call: Callable[[tf.Tensor, tf.Tensor, str], tf.Operation | None],
    done: dict[str, tf.Tensor],
    is_whole: bool = False,
) -> None:
    """Has each server do something with its blocks, one after the other.

    Args:
        rows: which have blocks.
        call: does it, while it is traced; of a block's first row, its end and the server's device.
        done: by device, a tensor that is there when the server has done what it does before; from
            now on, also this.
        is_whole: whether all that a server has to do is one block.
    """
    block = rows.shape[0] if is_whole else rows.block
    for first, last, device in rows.divided(1 if is_whole else block):

        def turn(begin, device=device, last=last):
            with tf.device(device):
                end = tf.minimum(begin + block, last)
            operation = call(begin, end, device)
            # The next one begins when this has been done.
            with tf.device(device), tf.control_dependencies([operation]):
                return [begin + block]

        with tf.device(device):
            with tf.control_dependencies([done[device]] if device in done else []):
                begin = tf.identity(np.array(first))
            (done[device],) = tf.while_loop(
                lambda begin, last=last: begin < last, turn, [begin], parallel_iterations=1
            )


def _slice(rows: SavedRows, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    """How TensorFlow calls a slice of rows."""
    before, after = rows.around_ranges
    numbers = tf.strings.as_string(begin), ",", tf.strings.as_string(end - begin)
    return tf.strings.join([before, *numbers, after])


registration.register_checkpoint_saver(
    package="tf_recsync",
    name="SavedRows",
    predicate=_is_in_blocks,
    save_fn=_save_blocks,
    restore_fn=_restore_blocks,
)


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


def _places(piece: Piece, begin: _Number, end: _Number) -> tf.Tensor:
    """Which of rows that follow each other are in a shard: numbers from 0."""
    size = end - begin
    return tf.range(tf.minimum((piece.index - begin) % piece.count, size), size, piece.count)


def _rows(piece: Piece, begin: _Number, end: _Number) -> tf.Tensor:
    """The same as rows of the shard's variable."""
    return piece.offset + (begin + _places(piece, begin, end)) // piece.count
