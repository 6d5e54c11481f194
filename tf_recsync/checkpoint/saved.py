"""What a checkpoint has, without a model or a cluster."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from tf_recsync._checks import checked_path
from tf_recsync.checkpoint.blocks import HERE, BlockReader
from tf_recsync.checkpoint.index import Shard, chain_of, content_of


class Saved:
    """A checkpoint that `save` or `callbacks.Checkpoint` wrote; see `open`.

    Attributes:
        path: its folder.
        global_step: the updates of the parameters that the model had had.
        metadata: what it was saved with.
        base: the folder of the checkpoint before, if it has only rows that have changed since
            then; None if it has all rows.
    """

    def __init__(self, path: str):
        self.path = path
        self._chain = chain_of(path)
        _, self._index = self._chain[-1]
        self.base: str | None = None if len(self._chain) == 1 else self._chain[-2][0]
        self.global_step = self._index.global_step
        self.metadata: dict[str, Any] = dict(self._index.metadata)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all that there is for each row of a table, by name.

        The values of a table are `<layer>/<table>`; what the optimizer keeps beside each of its
        rows has names that begin so, such as `<layer>/<table>/version`.
        """
        return {rows.name: rows.shape for rows in self._index.rows}

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Reads rows of a table, or of what the optimizer keeps beside them.

        Args:
            name: one of `shapes`.
            begin: the first row, from 0; default 0.
            end: the row after the last; default None, for all that there are.

        Returns:
            [end - begin, ...], of the type that they have in training.

        Raises:
            ValueError: if an argument is wrong, or a file is not whole.
        """
        numbers = {rows.name: number for number, rows in enumerate(self._index.rows)}
        if name not in numbers:
            raise ValueError(f"name must be one of {sorted(self.shapes)}, not {name!r}")
        found = self._index.rows[numbers[name]]
        count = found.shape[0]
        end = count if end is None else end
        if not 0 <= begin <= end <= count:
            raise ValueError(
                f"begin and end must be from 0 to {count}, in this order, not {begin} and {end}"
            )
        field = self._index.parts[found.shards[0].part].fields[found.shards[0].field]
        values = np.empty((end - begin, *found.shape[1:]), tf.as_dtype(field.dtype).as_numpy_dtype)
        for number in range(len(self._chain)):
            for shard in self._chain[number][1].rows[numbers[name]].shards:
                self._read(number, shard, begin, values)
        return values

    def _read(self, number: int, shard: Shard, begin: int, values: np.ndarray) -> None:
        """Reads what one of the chain has of a shard's rows into those from `begin` on."""
        path, index = self._chain[number]
        part, piece = index.parts[shard.part], shard.piece
        log_decay = self._index.parts[shard.part].log_decay
        reader = BlockReader(path, shard.part, part, HERE, log_decay)
        # The shard's rows that are wanted.
        first = -(-(begin - piece.index) // piece.count)
        last = -(-(begin + len(values) - piece.index) // piece.count)
        first, last = piece.offset + max(first, 0), piece.offset + max(last, 0)
        for block in part.blocks:
            start, stop = part.bounds(block.number)
            if max(first, start) >= min(last, stop):
                continue
            rows, (read,) = reader.read(block, [shard.field])
            rows = np.arange(start, stop) if rows is None else rows.numpy()
            own = (rows >= first) & (rows < last)
            places = piece.index + piece.count * (rows[own] - piece.offset) - begin
            values[places] = read.numpy()[own]

    def verify(self) -> None:
        """Reads all files, those of what it is based on as well, and compares their checksums.

        Raises:
            ValueError: if one is missing or not what was written; the error names it.
        """
        for path, index in self._chain:
            for name, about in index.files.items():
                content_of(path, name, about)
            for number, part in enumerate(index.parts):
                reader = BlockReader(path, number, part, HERE)
                for block in part.blocks:
                    reader.check(block)

    def __repr__(self) -> str:
        return f"Saved(path={self.path!r}, global_step={self.global_step})"


def open(path: str | os.PathLike) -> Saved:
    """Opens a checkpoint to look at it; needs neither the model nor a cluster.

    Args:
        path: the folder of a checkpoint, which `save` or `callbacks.Checkpoint` wrote.

    Returns:
        What it has; files are read as they are asked for.

    Raises:
        FileNotFoundError: if there is no whole checkpoint at `path`.
        ValueError: if it is damaged, or one that it is based on is missing.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import tf_recsync as recsync
    >>> from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
    >>> films = keras.Input((2,), dtype="int64", name="films")
    >>> layer = EmbeddingCollection(
    ...     [TableConfig("films", rows=100, dimension=4)], [FeatureConfig("films", "films")],
    ...     name="embeddings",
    ... )
    >>> model = keras.Model({"films": films}, layer({"films": films})["films"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recsync.checkpoint.save(f"{folder}/first", model)
    ...     saved = recsync.checkpoint.open(f"{folder}/first")
    ...     vectors = saved.rows("embeddings/films", 10, 12)
    >>> saved.shapes, vectors.shape
    ({'embeddings/films': (100, 4)}, (2, 4))
    """
    return Saved(checked_path(path))
