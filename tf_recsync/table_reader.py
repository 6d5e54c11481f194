"""Reads published versions whose tables are apart, and serves them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_recsync._checks import check_bool, checked_path
from tf_recsync.checkpoint.blocks import HERE, BlockReader
from tf_recsync.checkpoint.index import Part, Rows, chain_of
from tf_recsync.embedding import feature_inputs, sequences
from tf_recsync.embedding.given_vectors import VECTORS, vectors_of
from tf_recsync.mapped_files import mapped
from tf_recsync.published import (
    TABLES,
    Collection,
    TablesIndex,
    block_file,
    parsed_tables,
    row_bytes_of,
)
from tf_recsync.versions import MARKER, Versions


class TableVersion:
    """One version of a model and its tables; it never changes. `TableReader` opens it.

    Attributes:
        version: its number.
        path: its folder.
        global_step: the updates of the parameters that are in its model; rows may have had more.
        model: the SavedModel, as `tf.saved_model.load` gives it; `model.serve` takes looked-up
            vectors in place of ids.
    """

    def __init__(
        self,
        version: int,
        path: str,
        ids: Sequence[str],
        index: TablesIndex,
        tables: Mapping[str, _Table],
        model: Any,
    ):
        self.version, self.path, self.global_step = version, path, index.global_step
        self.model = model
        self._ids, self._tables, self._collections = tuple(ids), dict(tables), index.collections
        own = [
            (table.name, f"{c.path}/{table.name}") for c in index.collections for table in c.tables
        ]
        count = Counter(name for name, _ in own)
        self._long = {name: path for name, path in own if count[name] == 1}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and dimension of each table, by its name `<layer>/<table>`."""
        return {name: table.shape for name, table in self._tables.items()}

    def lookup(self, table: str, ids: Any) -> np.ndarray:
        """Looks up rows of a table.

        Args:
            table: the table's name; where several collections have one of this name,
                `<layer>/<table>`.
            ids: numbers of rows, integers [n].

        Returns:
            float32 [n, dimension].

        Raises:
            ValueError: if there is no such table, or an id is out of range.
        """
        found = self._tables.get(self._long.get(table, table))
        if found is None:
            raise ValueError(f"table must be one of {sorted(self._tables)}, not {table!r}")
        ids = np.asarray(ids)
        if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or not ids.size):
            raise ValueError(
                f"ids must be a vector of integers, not {ids.dtype} of the shape {ids.shape}"
            )
        wrong = (ids < 0) | (ids >= found.shape[0])
        if wrong.any():
            raise ValueError(
                f"ids must be from 0 to {found.shape[0] - 1}, the rows of table {table!r}, not "
                f"{ids[wrong][0]}"
            )
        return found.lookup(ids.astype(np.int64))

    def vectors(
        self, features: Mapping[str, Any], weights: Mapping[str, Any] | None = None
    ) -> dict[str, tf.Tensor | tf.RaggedTensor]:
        """Looks up features as the model's collections do: ids are checked, hashed and pooled.

        Args:
            features: the ids of all features by name, in any form that `EmbeddingCollection`
                takes; the same batch size for all.
            weights: those of some features' ids; None (the default) for none.

        Returns:
            Inputs of `model.serve` by name, float32. A feature's vectors are `<feature>_vectors`:
            [batch, dimension]; of a table with `combiner=None` [batch, length, dimension], or
            [batch, dimension] of ids [batch]. What an interaction takes that does not pool is
            `<feature>_rows`, ragged [batch, ids, dimension], and with weights
            `<feature>_row_weights`, ragged [batch, ids]. Where several collections look up a
            feature of this name, `<layer>_` comes before it.

        Raises:
            ValueError: if a feature is missing, unknown, or of a wrong type or shape.
            tf.errors.InvalidArgumentError: if ids are out of range that the feature does not
                accept.
        """
        known = {feature.name for own in self._collections for feature in own.features}
        for argument, given in (("features", features), ("weights", weights or {})):
            if unknown := sorted(set(given) - known):
                raise ValueError(f"{argument} has {unknown}; the features are {sorted(known)}")
        found: dict[str, Any] = {}
        with tf.device("/CPU:0"):
            for collection in self._collections:
                found.update(self._vectors(collection, features, weights or {}))
        return found

    def _vectors(
        self, collection: Collection, features: Mapping[str, Any], weights: Mapping[str, Any]
    ) -> dict[str, Any]:
        tables = {table.name: table for table in collection.tables}
        configs = {feature.name: feature for feature in collection.features}
        given, own_weights = (
            {name: own for name, own in values.items() if name in configs}
            for values in (features, weights)
        )
        read = feature_inputs.read(collection.features, tables, given, own_weights)
        inputs = dict(zip(configs, read, strict=True))

        @functools.cache
        def rows_of(name: str) -> tf.Tensor:
            feature = configs[name]
            table = tables[feature.table]
            ids = feature_inputs.in_range(tf.cast(inputs[name].ids, tf.int64), feature, table)
            return tf.constant(self._tables[f"{collection.path}/{table.name}"].lookup(ids.numpy()))

        def vectors(name: str, kind: str) -> Any:
            own, rows, table = inputs[name], rows_of(name), tables[configs[name].table]
            if kind != VECTORS:
                return vectors_of(own, kind, rows)
            if table.combiner is None:
                return sequences.arrange(rows, own)
            return feature_inputs.pool(own, table, rows)

        return {own.name: vectors(own.feature, own.kind) for own in collection.lookups}

    def __repr__(self) -> str:
        return f"TableVersion(path={self.path!r}, global_step={self.global_step})"


class TableReader:
    """Serves what `callbacks.Publish(..., tables="apart")` publishes, and takes over new versions.

    Rows of full versions are mapped into memory: files are read where rows are looked up, so that
    tables may be larger than the memory of this process. Rows that deltas have changed are kept in
    memory until the next full version. Everything is done by numpy and TensorFlow's own operations.

    `refresh` opens what was published meanwhile, in the thread that calls it, while other threads
    look up: they have the version before until the new one is complete, and each call one of the
    two. Who needs several calls to be of the same version, such as lookups and the model that
    computes with them, makes them on what `current` gives.

    The files of versions must stay as they were published; versions that are removed, as by `keep`
    of `Publish`, may be served on.

    Args:
        target: the folder that is published to, on a file system of this machine.
        verify: whether all files are read, a block at a time, and their checksums compared before
            a version is served. Default True; False opens large tables at once, and checks
            the sizes of files only. Rows of deltas are compared in any case.

    Raises:
        ValueError: if `target` is no path of this machine, or a file is missing, cut off or another
            one, or one that a delta is based on; the error names it.
        FileNotFoundError: if nothing was published there.
        OSError: if a file can't be read.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import tf_recsync as recsync
    >>> from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
    >>> film = keras.Input((), dtype="int64", name="film")
    >>> layer = EmbeddingCollection(
    ...     [TableConfig("films", rows=100, dimension=4)], [FeatureConfig("film", "films")]
    ... )
    >>> clicks = keras.layers.Dense(1)(layer({"film": film})["film"])
    >>> model = keras.Model({"film": film}, clicks)
    >>> model.compile(recsync.optimizers.Adagrad(0.1), "mse")
    >>> with tempfile.TemporaryDirectory() as target:
    ...     publish = recsync.callbacks.Publish(target, tables="apart")
    ...     history = model.fit(
    ...         {"film": np.arange(8)}, np.ones([8, 1]), callbacks=[publish], verbose=0
    ...     )
    ...     reader = TableReader(target)
    ...     now = reader.current
    ...     predicted = now.model.serve(now.vectors({"film": np.array([3, 5])}))
    >>> np.allclose(predicted, model.predict({"film": np.array([3, 5])}, verbose=0))
    True
    >>> reader.version, reader.lookup("films", [1, 2, 3]).shape
    (1, (3, 4))
    """

    def __init__(self, target: str | os.PathLike, *, verify: bool = True):
        self._target = checked_path(target, "target")
        if "://" in self._target:
            raise ValueError(
                f"target={self._target!r} must be a folder of this machine, whose files can be "
                "mapped into memory: copy the versions to one, each one's published.json last"
            )
        check_bool("verify", verify)
        self._verify = verify
        self._refreshing = threading.Lock()
        with _reading(self._target):
            latest = self._latest()
            if latest is None:
                raise FileNotFoundError(f"target={self._target!r} has no published version")
            self._current = self._opened(latest, None)

    @property
    def current(self) -> TableVersion:
        """The version that is served now."""
        return self._current

    @property
    def version(self) -> int:
        """The number of `current`."""
        return self._current.version

    @property
    def global_step(self) -> int:
        """The updates of the parameters that are in the model of `current`."""
        return self._current.global_step

    @property
    def model(self) -> Any:
        """The SavedModel of `current`, which takes looked-up vectors in place of ids."""
        return self._current.model

    def lookup(self, table: str, ids: Any) -> np.ndarray:
        """Looks up rows of one version, see `TableVersion.lookup`."""
        return self._current.lookup(table, ids)

    def vectors(
        self, features: Mapping[str, Any], weights: Mapping[str, Any] | None = None
    ) -> dict[str, tf.Tensor | tf.RaggedTensor]:
        """Looks up features in one version, see `TableVersion.vectors`."""
        return self._current.vectors(features, weights)

    def refresh(self) -> bool:
        """Takes over the latest version; after an error the one before is served on.

        If the one that is served was removed, and was the latest, that is the one before it.

        Returns:
            Whether it was another one.

        Raises:
            ValueError: see `TableReader`.
            OSError: as above.
        """
        with self._refreshing, _reading(self._target):
            latest = self._latest()
            if latest is None or (latest == self._current.version and self._is_current(latest)):
                return False
            self._current = self._opened(latest, self._current)
            return True

    def _is_current(self, version: int) -> bool:
        """Whether a version is the one that is served, and no other one of the same number."""
        return parsed_tables(Versions(self._target).path(version)).id == self._current._ids[-1]

    def _latest(self) -> int | None:
        published = Versions(self._target).published()
        return published[-1] if published else None

    def _opened(self, version: int, before: TableVersion | None) -> TableVersion:
        """Opens a version; what is in the one before is not opened again."""
        path = Versions(self._target).path(version)
        chain = chain_of(path, parsed_tables, MARKER)
        ids, tables, (_, index) = [own.id for _, own in chain], {}, chain[-1]
        if before is not None and before._ids == tuple(ids[: len(before._ids)]):
            tables, chain = before._tables, chain[len(before._ids) :]
        for folder, own in chain:
            tables = _changed_tables(folder, own, tables, self._verify)
        return TableVersion(version, path, ids, index, tables, tf.saved_model.load(path))

    def __repr__(self) -> str:
        return f"TableReader(target={self._target!r}, version={self.version})"


@contextlib.contextmanager
def _reading(target: str) -> Iterator[None]:
    """Inside, versions are read, which somebody may remove: raises an OSError."""
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"target={target!r} can't be read: {error.message}") from error


@dataclasses.dataclass(frozen=True)
class _Shard:
    """The rows of a table that one server has written in full.

    Attributes:
        offset: where in the part they begin.
        block: how many rows of the part are in a block.
        blocks: the values of all blocks.
    """

    offset: int
    block: int
    blocks: Sequence[np.ndarray]

    def gather(self, rows: np.ndarray, values: np.ndarray, places: np.ndarray) -> None:
        """Puts rows of the shard to places in `values`."""
        blocks, within = np.divmod(rows + self.offset, self.block)
        order = np.argsort(blocks, kind="stable")
        starts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
        for own in np.split(order, starts[1:]):
            values[places[own]] = self.blocks[blocks[own[0]]][within[own]]


@dataclasses.dataclass(frozen=True)
class _Table:
    """The rows of a table; it never changes.

    Attributes:
        shape: [rows, dimension].
        shards: the rows that were written in full; row r is row r // n of number r % n.
        rows: int64, those that deltas have changed, in ascending order.
        values: what these have.
    """

    shape: tuple[int, int]
    shards: Sequence[_Shard]
    rows: np.ndarray
    values: np.ndarray

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """float32 [n, dimension] of int64 [n], which are in range."""
        values = np.empty((len(ids), self.shape[1]), np.float32)
        is_left = np.ones(len(ids), bool)
        if len(self.rows):
            places = np.minimum(np.searchsorted(self.rows, ids), len(self.rows) - 1)
            is_changed = self.rows[places] == ids
            values[is_changed] = self.values[places[is_changed]]
            is_left = ~is_changed
        of_shard = ids % len(self.shards)
        for number, shard in enumerate(self.shards):
            own = np.flatnonzero(is_left & (of_shard == number))
            if len(own):
                shard.gather(ids[own] // len(self.shards), values, own)
        return values


def _changed_tables(
    path: str, index: TablesIndex, tables: Mapping[str, _Table], verify: bool
) -> dict[str, _Table]:
    """The tables of a version.

    Args:
        path: the version's folder.
        index: its own.
        tables: those of the version before, if it is a delta.
        verify: see `TableReader`.
    """
    parts: dict[int, Any] = {}
    for number, part in enumerate(index.parts):
        reader = BlockReader(os.path.join(path, TABLES), number, part, HERE)
        for block in part.blocks:
            if verify and not part.is_partial:
                reader.check(block)
            else:
                reader.check_size(block)
        parts[number] = (
            _changed_rows(reader, part) if part.is_partial else _mapped(path, number, part)
        )
    return {
        rows.name: _changed_table(path, index, rows, parts, tables.get(rows.name))
        for rows in index.rows
    }


def _mapped(path: str, number: int, part: Part) -> list[np.ndarray]:
    """The blocks of a part that was written in full."""
    (field,) = part.fields
    dtype = tf.as_dtype(field.dtype).as_numpy_dtype
    found = []
    for block in part.blocks:
        file = block_file(path, number, block.number)
        # With one tensor in it, a file has its values from the beginning to the end.
        if block.bytes != block.rows * row_bytes_of(part):
            raise ValueError(
                f"{file} has {block.bytes} bytes, not {block.rows * row_bytes_of(part)}, those of "
                f"{block.rows} rows"
            )
        found.append(mapped(file, dtype, (block.rows, *field.shape)))
    return found


def _changed_rows(reader: BlockReader, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and the values of those rows of a part that were written."""
    (field,) = part.fields
    rows = [np.zeros(0, np.int64)]
    values = [np.zeros((0, *field.shape), tf.as_dtype(field.dtype).as_numpy_dtype)]
    for block in part.blocks:
        own, (own_values,) = reader.read(block, [0])
        rows.append(own.numpy())
        values.append(own_values.numpy())
    return np.concatenate(rows), np.concatenate(values)


def _changed_table(
    path: str, index: TablesIndex, rows: Rows, parts: Mapping[int, Any], before: _Table | None
) -> _Table:
    """A table of a version."""
    shards: list[_Shard | None] = [None] * len(rows.shards)
    new = []
    for own in rows.shards:
        piece, part = own.piece, index.parts[own.part]
        if not part.is_partial:
            shards[piece.index] = _Shard(piece.offset, part.block, parts[own.part])
            continue
        if before is None or len(before.shards) != piece.count:
            raise ValueError(
                f"{path} has some rows of shard {piece.index} of table {rows.name!r}, whose base "
                "has no such shard: it belongs to another version"
            )
        shards[piece.index] = before.shards[piece.index]
        of_part, values = parts[own.part]
        is_own = (of_part >= piece.offset) & (of_part < piece.offset + piece.rows)
        new.append((piece.index + piece.count * (of_part[is_own] - piece.offset), values[is_own]))
    kept = [] if before is None else [_kept(before, rows, index)]
    # The first of those that are the same row is the newest.
    dtype = tf.as_dtype(index.parts[rows.shards[0].part].fields[0].dtype).as_numpy_dtype
    none = np.zeros(0, np.int64), np.zeros((0, *rows.shape[1:]), dtype)
    numbers, values = (np.concatenate(own) for own in zip(*new, *kept, none, strict=True))
    numbers, first = np.unique(numbers, return_index=True)
    return _Table(rows.shape, shards, numbers, values[first])


def _kept(before: _Table, rows: Rows, index: TablesIndex) -> tuple[np.ndarray, np.ndarray]:
    """What deltas had changed before, in shards that are not written in full again."""
    partial = [s.piece.index for s in rows.shards if index.parts[s.part].is_partial]
    is_kept = np.isin(before.rows % len(rows.shards), partial)
    return before.rows[is_kept], before.values[is_kept]
