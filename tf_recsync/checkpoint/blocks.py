"""Rows of tables that servers write to files, and read from them, block by block.

A block is a bundle of tensors, one for each field. Each server writes the rows that it holds, all
of them or those that have changed, and reads blocks that others may have written; what belongs to
another server it sends there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures

import keras
import numpy as np
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.checkpoint.index import (
    ROWS,
    Block,
    Field,
    Part,
    Rows,
    Shard,
    block_prefix,
    check_size,
    data_file,
    field_name,
)
from tf_recsync.cluster import fetch
from tf_recsync.embedding.physical_tables import Piece
from tf_recsync.embedding.table_rows import TableRows, narrowed_tensor, rows_of_block
from tf_recsync.shown_variable import read_rows

HERE = "/CPU:0"  # The device of this process.
# Bytes of a block, of a part that is as large as 64 of them: a server needs memory for a few blocks
# beside its tables, and each is a call of this process, which are too many if blocks are small.
LEAST_BYTES, MOST_BYTES, BLOCKS = 8 << 20, 1 << 30, 64


@dataclasses.dataclass(frozen=True)
class Source:
    """Variables of one server that have something for each row of the same physical table.

    Attributes:
        variables: those that are written, the table first.
        versions: one of them, or another one beside them, that has another value after each change
            of a row; None if none has.
        saved: int64 [rows], beside them, what that one had in each row when it was written last;
            None if nobody needs it.
        is_partial: whether only rows are written in which these two differ.
        log_decays: up to what the table's rows are decayed (cc/engine/row_decay.h), which is not
            written: rows are copied as if they were decayed; None if they don't decay so.
        log_decay: the table's by then, in `noted`.
    """

    variables: tuple[keras.Variable, ...]
    versions: keras.Variable | None = None
    saved: tf.Variable | None = None
    is_partial: bool = False
    log_decays: keras.Variable | None = None
    log_decay: float = 0.0

    @property
    def device(self) -> str:
        """Where they are."""
        return self.variables[0]._value.device

    def part(self) -> Part:
        """What is to be written, as yet without a file."""
        fields = tuple(Field(v.dtype, tuple(v.shape[1:])) for v in self.variables)
        row_bytes = sum(math.prod(f.shape) * tf.as_dtype(f.dtype).size for f in fields)
        rows = self.variables[0].shape[0]
        block_bytes = min(max(rows * row_bytes // BLOCKS, LEAST_BYTES), MOST_BYTES)
        block = rows_of_block(row_bytes, block_bytes)
        return Part(rows, block, fields, self.is_partial, log_decay=self.log_decay)

    def noted(self) -> Source:
        """The same, with what its table has decayed by now: all rows are saved as of this."""
        if self.log_decays is None:
            return self
        total = read_rows(self.log_decays._value, self.variables[0].shape[0], 1)
        return dataclasses.replace(self, log_decay=float(total[0]))

    def write(self, path: str, number: int, block: int) -> Block | None:
        """Writes a block while the rows are trained; None if none of its rows is to be written.

        Args:
            path: the checkpoint's folder.
            number: that of the part.
            block: that of the block.
        """
        prefix = block_prefix(path, number, block)
        begin, end = self.part().bounds(block)
        with tf.device(self.device):
            rows = self._changed(begin, end) if self.is_partial else _range(begin, end)
            count = rows.shape[0]
            if not count:
                return None
            values, versions, log_decay = self._copied(rows)
            tensors = {field_name(i): value for i, value in enumerate(values)}
            if self.is_partial:
                tensors[ROWS] = rows
            tf.raw_ops.SaveV2(
                prefix=np.asarray(prefix.encode()),
                tensor_names=np.array(list(tensors)),
                shape_and_slices=np.array([""] * len(tensors)),
                tensors=list(tensors.values()),
            )
            if self.saved is not None:
                # Not as they are by now: what has changed since is written the next time.
                tf.raw_ops.ResourceScatterUpdate(
                    resource=self.saved.handle, indices=rows, updates=versions
                )
        # By this process, which shows whether it sees the same files.
        return Block(block, count, tf.io.gfile.stat(data_file(prefix)).length, log_decay)

    def _changed(self, begin: int, end: int) -> tf.Tensor:
        """The rows from one to another that have changed since they were written."""
        versions = self.versions._value.handle
        if _is_trained_alone(self.device):
            rows = _range(begin, end)
            now, saved = (
                tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=tf.int64)
                for handle in (versions, self.saved.handle)
            )
            return _gathered(rows, _places_of(now != saved))
        return ops.changed_rows(versions, self.saved.handle, _number(begin), _number(end))

    def _copied(self, rows: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor | None, float]:
        """What there is of rows, their versions of the same moment if these are noted, and the
        log-decay that the table's have."""
        variables = list(self.variables)
        noted = 0
        if self.saved is not None:
            own = (i for i, variable in enumerate(variables) if variable is self.versions)
            noted = next(own, len(variables))
            if noted == len(variables):
                variables.append(self.versions)
        values, log_decay = self._copied_at_once(variables, rows)
        versions = None if self.saved is None else values[noted]
        return values[: len(self.variables)], versions, log_decay

    def _copied_at_once(
        self, variables: Sequence[keras.Variable], rows: tf.Tensor
    ) -> tuple[list[tf.Tensor], float]:
        handles = [v._value.handle for v in variables]
        dtypes = [tf.as_dtype(v.dtype) for v in variables]
        if _is_trained_alone(self.device):
            gather = tf.raw_ops.ResourceGather
            pairs = zip(handles, dtypes, strict=True)
            return [gather(resource=h, indices=rows, dtype=dtype) for h, dtype in pairs], 0.0
        if self.log_decays is None:
            return list(ops.copy_rows(handles, rows, dtypes=dtypes).values), 0.0
        logs = [self.log_decays._value.handle]
        copied = ops.copy_rows(handles, rows, dtypes=dtypes, log_decays=logs, decayed=[0])
        return list(copied.values), float(fetch(copied.log_decay))


def _is_trained_alone(device: str) -> bool:
    """Whether nobody trains beside, as in one process; there are none of this package's ops."""
    return "GPU" in device


def _number(number: int) -> np.ndarray:
    """An array: tensors of Python's numbers are shared among threads, on servers as well."""
    return np.asarray(number, np.int64)


def _range(begin: int, end: int) -> tf.Tensor:
    return tf.range(_number(begin), _number(end), _number(1))


def _places_of(condition: tf.Tensor) -> tf.Tensor:
    """Where a vector is true."""
    return tf.raw_ops.Squeeze(input=tf.raw_ops.Where(condition=condition), axis=[1])


def _gathered(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    # The one without an axis, which would be sent to the server each time.
    return tf.raw_ops.Gather(params=values, indices=places)


def sources_of(
    saved: Iterable[TableRows],
    owners: Mapping[int, keras.Variable],
    versions: Mapping[int, keras.Variable],
    log_decays: Mapping[int, keras.Variable],
) -> tuple[list[Source], list[tuple[Shard, ...]]]:
    """Sorts what is to be saved by the physical table that it belongs to.

    Args:
        saved: rows of tables, and what lies beside them.
        owners: the tables' variables by the ids of those that lie beside them.
        versions: those that change with each change of a row, by the ids of the tables' variables.
        log_decays: what is pending of the decay of rows, by the same ids.

    Returns:
        The sources, whose places are their parts' numbers, and where the shards of each of `saved`
        are among them.
    """
    fields: dict[int, list[keras.Variable]] = {}  # By the table's id, which keep their order.
    places: dict[int, tuple[int, int]] = {}  # Of a variable by its id: part and field.

    def place(variable: keras.Variable) -> tuple[int, int]:
        table = owners.get(id(variable), variable)
        own = fields.setdefault(id(table), [table])
        if all(variable is not v for v in own):
            own.append(variable)
        part = list(fields).index(id(table))
        field = next(i for i, v in enumerate(own) if v is variable)
        return places.setdefault(id(variable), (part, field))

    shards = [tuple(Shard(*place(v), piece) for v, piece in rows.shards) for rows in saved]
    sources = [
        Source(tuple(own), versions.get(table), log_decays=log_decays.get(table))
        for table, own in fields.items()
    ]
    return sources, shards


@dataclasses.dataclass(frozen=True)
class Move:
    """Saved rows of a shard, and where they belong now.

    Attributes:
        field: the number of the part's field that has them.
        source: which rows of the part they are, and which of the table.
        variable: where they belong.
        target: which rows of that they are, and which of the table.
    """

    field: int
    source: Piece
    variable: keras.Variable
    target: Piece

    def slices(self, begin: int, end: int) -> tuple[slice, slice] | None:
        """Which rows of a block go to which of the variable; None if none of them does.

        Args:
            begin: the part's row that is the first of the block.
            end: the one after its last.
        """
        source, target = self.source, self.target
        # The shard's rows in the block, of which every `step`-th belongs to the target.
        first = max(begin, source.offset) - source.offset
        last = min(end, source.offset + source.rows) - source.offset
        common = math.gcd(source.count, target.count)
        step = target.count // common
        for row in range(first, min(first + step, last)):
            beyond = source.index + source.count * row - target.index
            if beyond % target.count == 0:
                count = len(range(row, last, step))
                stride = source.count // common
                to = target.offset + beyond // target.count
                own = source.offset - begin
                return (
                    slice(own + row, own + last, step),
                    slice(to, to + (count - 1) * stride + 1, stride),
                )
        return None

    def places(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Which of any rows of the part go to which of the variable.

        Args:
            rows: int64 [n]; they need not follow one another.

        Returns:
            Where in `rows` those are that belong to the variable, and to which of its rows.
        """
        source, target = self.source, self.target
        # In one tensor, as each one is sent to the server.
        numbers = (
            *(source.index, source.index + source.count * source.rows),
            *(source.count, source.index - source.count * source.offset),
            *(target.count, target.index, target.offset),
        )
        first, last, count, shift, divisor, index, offset = tf.raw_ops.Unpack(
            value=np.array(numbers, np.int64), num=len(numbers)
        )
        of_table = rows * count + shift
        is_of_shard = (of_table >= first) & (of_table < last)
        own = _places_of(is_of_shard & (of_table % divisor == index))
        return own, _gathered(of_table // divisor + offset, own)


def moves_of(
    rows: Sequence[Rows], targets: Mapping[int, TableRows], parts: int
) -> list[list[Move]]:
    """Where the rows of each part belong now.

    Args:
        rows: what was saved, by its number.
        targets: what of it is wanted, and where, by the same numbers.
        parts: how many parts there are.
    """
    moves: list[list[Move]] = [[] for _ in range(parts)]
    for number, wanted in targets.items():
        for shard in rows[number].shards:
            for variable, piece in wanted.shards:
                apart = piece.index - shard.piece.index
                if apart % math.gcd(piece.count, shard.piece.count) == 0:
                    moves[shard.part].append(Move(shard.field, shard.piece, variable, piece))
    return moves


class BlockReader:
    """Has a server read the blocks of a part.

    Args:
        path: the checkpoint's folder.
        number: that of the part.
        part: what was written.
        device: the server's.
        log_decay: with which a table's rows are read; by default that of the part itself. Of
            what a delta is based on, it is that of the delta.
    """

    def __init__(
        self, path: str, number: int, part: Part, device: str, log_decay: float | None = None
    ):
        self._path, self._number, self._part, self._device = path, number, part, device
        self._log_decay = part.log_decay if log_decay is None else log_decay

    def check_size(self, block: Block) -> None:
        """Raises a ValueError if a block's file is missing or cut off."""
        check_size(data_file(self._prefix(block)), block.bytes)

    def check(self, block: Block) -> None:
        """Raises a ValueError if a block is not what was written."""
        self.check_size(block)
        self.read(block, range(len(self._part.fields)))

    def restore(self, block: Block, moves: Sequence[Move]) -> None:
        """Puts rows of a block where they belong, which may be on other servers."""
        fields = sorted({move.field for move in moves})
        rows, found = self.read(block, fields)
        values = dict(zip(fields, found, strict=True))
        if rows is None:
            self._restore_all(block, values, moves)
        else:
            self._restore_some(rows, values, moves)

    def _restore_all(
        self, block: Block, values: Mapping[int, tf.Tensor], moves: Sequence[Move]
    ) -> None:
        for move in moves:
            found = move.slices(*self._part.bounds(block.number))
            if found is None:
                continue
            own, to = found
            variable = move.variable._value
            with tf.device(self._device):
                rows = narrowed_tensor(_taken(values[move.field], own), variable.dtype)
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=variable.handle,
                begin=np.array([to.start], np.int64),
                end=np.array([to.stop], np.int64),
                strides=np.array([to.step], np.int64),
                value=rows,
            )

    def _restore_some(
        self, rows: tf.Tensor, values: Mapping[int, tf.Tensor], moves: Sequence[Move]
    ) -> None:
        # What lies beside a table's rows goes where these go.
        places: dict[tuple[Piece, Piece], tuple[tf.Tensor, tf.Tensor]] = {}
        for move in moves:
            variable, pieces = move.variable._value, (move.source, move.target)
            with tf.device(self._device):
                if pieces not in places:
                    places[pieces] = move.places(rows)
                own, to = places[pieces]
                if not own.shape[0]:
                    continue
                taken = narrowed_tensor(_gathered(values[move.field], own), variable.dtype)
            tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=to, updates=taken)
            # Else each step that reads the variable as a whole would copy it from now on.
            tf.raw_ops.DisableCopyOnRead(resource=variable.handle)

    def read(self, block: Block, fields: Sequence[int]) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        """Reads fields of a block.

        Returns:
            Which rows of the part are in it, int64 in ascending order, or None if all are that
            belong to it; and what it has of them, field by field.

        Raises:
            ValueError: if it is not what was written.
        """
        kinds = [self._part.fields[i] for i in fields]
        names = [field_name(i) for i in fields]
        if self._part.is_partial:
            kinds.append(Field("int64", ()))
            names.append(ROWS)
        prefix = self._prefix(block)
        with tf.device(self._device):
            values = _read_tensors(prefix, names, [tf.as_dtype(kind.dtype) for kind in kinds])
        for name, kind, value in zip(names, kinds, values, strict=True):
            if tuple(value.shape) != (block.rows, *kind.shape):
                raise ValueError(
                    f"{data_file(prefix)} has {name} of the shape {tuple(value.shape)}, not "
                    f"{(block.rows, *kind.shape)}: it belongs to another checkpoint"
                )
        factor = math.exp(self._log_decay - block.log_decay)
        if factor != 1.0:
            with tf.device(self._device):
                # The table's own rows are the first field.
                values = [
                    _scaled(value, factor) if name == field_name(0) else value
                    for name, value in zip(names, values, strict=True)
                ]
        if not self._part.is_partial:
            return None, values
        rows = values.pop()
        begin, end = self._part.bounds(block.number)
        if not self._rise(rows, begin, end):
            raise ValueError(
                f"{data_file(prefix)} has other rows than some from {begin} to {end - 1}, in "
                "their order: it belongs to another checkpoint"
            )
        return rows, values

    def _rise(self, rows: tf.Tensor, begin: int, end: int) -> bool:
        """Whether rows rise, from `begin` on and not up to `end`."""
        with tf.device(self._device):
            ends = (np.array([row], np.int64) for row in (begin - 1, end))
            around = tf.raw_ops.ConcatV2(values=[next(ends), rows, next(ends)], axis=_number(0))
            count = around.shape[0]
            after, before = (_taken(around, slice(i, count - 1 + i, 1)) for i in (1, 0))
            return bool(fetch(tf.raw_ops.All(input=after > before, axis=np.array([0]))))

    def _prefix(self, block: Block) -> str:
        return block_prefix(self._path, self._number, block.number)


def _read_tensors(prefix: str, names: Sequence[str], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Reads tensors of a block; the files' checksums are compared.

    Raises:
        ValueError: if the files are not whole.
    """
    try:
        return tf.raw_ops.RestoreV2(
            prefix=np.asarray(prefix.encode()),
            tensor_names=np.array(names),
            shape_and_slices=np.array([""] * len(names)),
            dtypes=list(dtypes),
        )
    except (
        tf.errors.DataLossError,
        tf.errors.NotFoundError,
        tf.errors.OutOfRangeError,
        tf.errors.InvalidArgumentError,
    ) as error:
        raise ValueError(f"{data_file(prefix)} is not whole: {error.message}") from error


def _scaled(values: tf.Tensor, factor: float) -> tf.Tensor:
    wide = tf.cast(values, tf.float32)
    return tf.cast(tf.raw_ops.Mul(x=wide, y=np.asarray(factor, np.float32)), values.dtype)


def _taken(values: tf.Tensor, own: slice) -> tf.Tensor:
    if (own.start, own.stop, own.step) == (0, values.shape[0], 1):
        return values
    bounds = (np.array([b], np.int64) for b in (own.start, own.stop, own.step))
    return tf.strided_slice(values, *bounds)


def side_by_side(
    work: Mapping[str, Sequence[Callable[[], None]]],
    scope: Callable[[], contextlib.AbstractContextManager],
) -> None:
    """Has servers do their work side by side, each one thing after the other.

    Args:
        work: by the server's device.
        scope: makes a context for each thread.

    Raises:
        Exception: the first that one of them has raised; the others end at their next thing.
    """
    stopped = threading.Event()

    def run(own: Sequence[Callable[[], None]]) -> None:
        try:
            with scope():
                for one in own:
                    if stopped.is_set():
                        return
                    one()
        except BaseException:
            stopped.set()
            raise

    if not work:
        return
    with futures.ThreadPoolExecutor(len(work), "recsync_checkpoint") as threads:
        running = [threads.submit(run, own) for own in work.values()]
        try:
            futures.wait(running, return_when=futures.FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C.
            stopped.set()
            raise
    for one in running:
        one.result()
