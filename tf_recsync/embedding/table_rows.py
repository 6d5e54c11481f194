"""What all shards of a table have per row, read and written a block of rows at a time.

So that the process that saves or loads a table needs memory for a block of it only.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.saving_lib import H5IOStore, safe_get_h5_dataset

from tf_recsync.shown_variable import (
    ShownVariable,
    assign_rows,
    read_rows,
    shown,
    tell_of_assignment,
)

if TYPE_CHECKING:
    from tf_recsync.embedding.physical_tables import Piece

BLOCK_BYTES = 16 << 20  # Of values that pass through this process.
_MARK = b"rows apart "  # What a store has in place of rows begins with it.


class RowsApart:
    """The rows of a model's tables, which are kept apart from its other weights.

    While weights are saved inside of `apart`, this notes in place of each table's rows which they
    are. While they are loaded again it learns where these belong now.

    Args:
        shapes: those of the saved rows, by their numbers; empty when they are saved.

    Attributes:
        saved: the rows that were saved; their places are their numbers.
        loaded: the rows that saved ones belong to, by the numbers of these.
    """

    def __init__(self, shapes: Mapping[int, tuple[int, ...]] | None = None):
        self._shapes = dict(shapes or {})
        self.saved: list[TableRows] = []
        self.loaded: dict[int, TableRows] = {}

    def note(self, rows: TableRows) -> np.ndarray:
        """What stands in a store in place of rows."""
        self.saved.append(rows)
        return np.frombuffer(_MARK + str(len(self.saved) - 1).encode(), np.uint8)

    def found(self, saved: Any) -> Any:
        """The rows that what a store has stands for; or what it has, if that is none of them."""
        if getattr(saved, "dtype", None) != np.uint8 or len(getattr(saved, "shape", ())) != 1:
            return saved
        content = np.asarray(saved).tobytes()
        if not content.startswith(_MARK):
            return saved
        number = int(content[len(_MARK) :])
        return _SavedApart(number, self._shapes[number], self.loaded)


@dataclasses.dataclass(frozen=True)
class _SavedApart:
    """Stands for saved rows where they are loaded; see `RowsApart`."""

    number: int
    shape: tuple[int, ...]
    loaded: dict[int, TableRows]

    def __array__(self, dtype=None, copy=None):
        raise ValueError(f"the rows number {self.number} of the checkpoint are no single array")


_apart: contextvars.ContextVar[RowsApart | None] = contextvars.ContextVar("apart", default=None)


@contextlib.contextmanager
def apart(rows: RowsApart) -> Iterator[None]:
    """Inside, this thread saves or loads weights without the rows of tables, which go to `rows`."""
    token = _apart.set(rows)
    try:
        yield
    finally:
        _apart.reset(token)


@dataclasses.dataclass(frozen=True)
class PartOfStore:
    """A Keras store in which what is saved gets names that begin alike.

    Attributes:
        store: what `save_own_variables` gets.
        prefix: what names begin with.
    """

    store: Any
    prefix: str

    def __setitem__(self, name: str, value: Any) -> None:
        self.store[self.prefix + name] = value


class TableRows:
    """The rows of a table, or what an optimizer keeps beside each of them.

    Args:
        shards: for each shard, the variable that holds it, and where in it (`shards_of`).
        dtype: in which rows are read; None for that of the variables.

    Attributes:
        shards: as above.
        shape: [rows, ...].
        dtype: as above.
    """

    def __init__(self, shards: Sequence[tuple[keras.Variable, Piece]], dtype: str | None = None):
        self.shards = tuple(shards)
        first = self.shards[0][0]
        rows = sum(piece.rows for _, piece in self.shards)
        self.shape = (rows, *first.shape[1:])
        self.dtype = tf.as_dtype(dtype or first.dtype).as_numpy_dtype

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The first row of each block, and the one after its last."""
        rows = rows_of_block(math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize)
        for begin in range(0, self.shape[0], rows):
            yield begin, min(begin + rows, self.shape[0])

    def read(self) -> np.ndarray:
        """All rows."""
        values = np.empty(self.shape, self.dtype)
        with self.told():
            for begin, end in self.blocks():
                values[begin:end] = self._read(begin, end)
        return values

    def write(self, begin: int, values: np.ndarray) -> None:
        """Sets rows from one on, in place."""
        for variable, first, own in self.places(begin, begin + len(values)):
            assign_rows(
                variable._value, first, np.ascontiguousarray(narrowed(values[own], variable.dtype))
            )

    def save(self, store: Any, name: str) -> None:
        """Writes all rows into a Keras store: block by block, if it is a file.

        The weights in a `.keras` archive Keras has in memory, and so are those of other stores.
        """
        if isinstance(store, PartOfStore):
            self.save(store.store, store.prefix + name)
            return
        rows_apart = _apart.get()
        if rows_apart is not None:
            store[name] = rows_apart.note(self)
            return
        group = _group_of(store, name)
        if group is None:
            store[name] = self.read()
            return
        dataset = group.create_dataset(name, self.shape, self.dtype)
        with self.told():
            for begin, end in self.blocks():
                dataset[begin:end] = self._read(begin, end)

    @contextlib.contextmanager
    def told(self, settled: bool = True) -> Iterator[None]:
        """Inside, those who train the rows know that they are read.

        Args:
            settled: whether they are brought up to date for that.
        """
        # It ends what had begun, too, if one of them raises an error.
        with contextlib.ExitStack() as told:
            for found in self._shown():
                told.enter_context(found.told(settled))
            yield

    def settle(self, are_noted: bool = False) -> None:
        """Brings the rows up to date, before they are set; those who train them know of it.

        Args:
            are_noted: whether those that are set get new versions, by which deltas find them.
        """
        for variable in {id(v): v._value for v, _ in self.shards}.values():
            tell_of_assignment(variable, are_noted)

    def _shown(self) -> list[ShownVariable]:
        values = {id(v): shown(v._value) for v, _ in self.shards}.values()
        return [value for value in values if value is not None]

    def _read(self, begin: int, end: int) -> np.ndarray:
        values = np.empty((end - begin, *self.shape[1:]), self.dtype)
        for variable, first, own in self.places(begin, end):
            count = len(range(*own.indices(end - begin)))
            values[own] = read_rows(variable._value, first, count)
        return values

    def load(self, saved: Any) -> None:
        """Sets all rows to those of an array, or of a data set in a file, of the same shape."""
        if isinstance(saved, _SavedApart):
            saved.loaded[saved.number] = self
            return
        self.settle()
        for begin, end in self.blocks():
            self.write(begin, np.asarray(saved[begin:end]))
        self.tell_of_change()

    def tell_of_change(self) -> None:
        """To be called when rows were set: what depends on them is made anew."""
        for variable, _ in self.shards:
            rows_changed = getattr(variable, "rows_changed", None)
            if rows_changed is not None:
                rows_changed()

    def places(self, begin: int, end: int) -> Iterator[tuple[keras.Variable, int, slice]]:
        """Where rows are: a variable, the first of its rows, and which ones of these they are."""
        for variable, piece in self.shards:
            skipped = (piece.index - begin) % piece.count
            if begin + skipped < end:
                first = piece.offset + (begin + skipped) // piece.count
                yield variable, first, slice(skipped, None, piece.count)


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values in another type; integers that it lacks become the nearest that it has.

    Args:
        values: an array.
        dtype: the other type's name.
    """
    to = tf.as_dtype(dtype)
    if to.is_integer and np.issubdtype(values.dtype, np.integer):
        values = np.clip(values, to.min, to.max)
    return np.asarray(values, to.as_numpy_dtype)


def narrowed_tensor(values: tf.Tensor, dtype: str | tf.DType) -> tf.Tensor:
    """The same of a tensor, where it is."""
    to = tf.as_dtype(dtype)
    if values.dtype.is_integer and to.is_integer and to.size < values.dtype.size:
        # Arrays: tensors of Python's numbers are shared among threads, on servers as well.
        least, most = (np.asarray(n, values.dtype.as_numpy_dtype) for n in (to.min, to.max))
        values = tf.raw_ops.Minimum(x=tf.raw_ops.Maximum(x=values, y=least), y=most)
    return tf.cast(values, to)


def rows_of_block(row_bytes: int, block_bytes: int | None = None) -> int:
    """How many rows of so many bytes are a block; without another size, one for this process."""
    return max(1, (block_bytes or BLOCK_BYTES) // max(1, row_bytes))


def saved_array(store: Any, name: str) -> Any:
    """What a Keras store has by a name; of a file a data set, which is read where it is sliced.

    That can be read as long as the store is open.
    """
    rows_apart = _apart.get()
    if rows_apart is not None:
        return rows_apart.found(store[name])
    if type(store) is not H5IOStore:
        return store[name]
    saved = safe_get_h5_dataset(store._h5_entry_group, name)
    # Types that HDF5 does not know the store converts.
    return store[name] if "dtype" in getattr(saved, "attrs", ()) else saved


def _group_of(store: Any, name: str) -> Any:
    """The group of a file that a store writes to next; None if it is another one, or in memory."""
    if type(store) is not H5IOStore or store.archive is not None:
        return None
    # The store makes it when something is written.
    store[name] = np.zeros(0)
    del store[name]
    return store._h5_entry_group
