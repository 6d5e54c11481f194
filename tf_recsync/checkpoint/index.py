"""What a checkpoint consists of: the index, which is written last."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tf_recsync.embedding.physical_tables import Piece

INDEX = "index.json"
KEYS = "keys"  # What a table's rows have beside them, by name, if its ids are keys.
WEIGHTS = "dense.weights.h5"  # All weights but the rows of tables, as Keras saves them.
WORKERS = "workers.npz"  # What `worker_states` of a strategy gives.
ROWS = "rows"  # The name of the tensor that names a block's rows.
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Field:
    """A tensor of each block of a part: what there is for each of its rows.

    Attributes:
        dtype: by its name.
        shape: of a row.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """A file of a part: a bundle of tensors, as of `tf.train.Checkpoint`, with checksums.

    Attributes:
        number: which of the part's blocks it is.
        rows: how many rows are in it.
        bytes: the size of the file.
        log_decay: that of the table when the rows were copied: they are as if all of them had
            decayed by so much; 0 for a table that is saved as it is.
    """

    number: int
    rows: int
    bytes: int
    log_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows that one server wrote of one physical table, with what lies beside each of them.

    Attributes:
        rows: how many the table has there.
        block: how many of them belong to a block, whether they are in it or not; the last block
            has fewer.
        fields: the tensors of each block, in their order.
        is_partial: whether a block has only those of its rows that had changed, which it names in
            a further tensor, int64 [rows of the block] in ascending order. One in which none had
            is not there.
        blocks: those that are there, in their order.
        log_decay: that of the table when all else was read: rows of blocks that have another one,
            here or in what this is based on, are multiplied by exp of the difference.
    """

    rows: int
    block: int
    fields: tuple[Field, ...]
    is_partial: bool
    blocks: tuple[Block, ...] = ()
    log_decay: float = 0.0

    @property
    def count(self) -> int:
        """How many blocks it would have if all were there."""
        return -(-self.rows // self.block)

    def bounds(self, block: int) -> tuple[int, int]:
        """The first of the rows that belong to a block, and the one after the last of them."""
        begin = block * self.block
        return begin, min(begin + self.block, self.rows)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Where the rows of a shard are.

    Attributes:
        part: the number of the part.
        field: the number of the field.
        piece: which rows of the part they are, and which of the table.
    """

    part: int
    field: int
    piece: Piece


@dataclasses.dataclass(frozen=True)
class Rows:
    """What there is for each row of a table: its values, or what an optimizer keeps beside them.

    Attributes:
        name: `<layer>/<table>` of values, `<layer>/<table>/<slot>` of the others.
        shape: [rows, ...].
        shards: where they are.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def table(self) -> str:
        """The table's name."""
        return self.shards[0].piece.table

    @property
    def is_values(self) -> bool:
        """Whether it is the table's values."""
        return all(shard.field == 0 for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Base:
    """The checkpoint before a delta.

    Attributes:
        folder: the name of its folder, which is beside that of the delta.
        id: its own.
    """

    folder: str
    id: str


@dataclasses.dataclass(frozen=True)
class RowsIndex:
    """What is known of rows that servers have written, all of them or those that have changed.

    Attributes:
        id: tells it from all others.
        base: what has the rows that it lacks; None if it is full, and lacks none.
        global_step: the updates of the parameters that the model had had.
        parts: the parts.
        rows: what they have, and where.
    """

    id: str
    base: Base | None
    global_step: int
    parts: tuple[Part, ...]
    rows: tuple[Rows, ...]

    @property
    def written(self) -> int:
        """How many rows of parts are in it."""
        return sum(block.rows for part in self.parts for block in part.blocks)

    def as_json(self) -> dict[str, Any]:
        """What the file has, as Python's `json` takes it."""

        def present(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            # Without one, files are what they were before tables had log-decays.
            return {key: value for key, value in pairs if key != "log_decay" or value}

        return {"format": FORMAT, **dataclasses.asdict(self, dict_factory=present)}


AnyIndex = TypeVar("AnyIndex", bound=RowsIndex)


@dataclasses.dataclass(frozen=True)
class Index(RowsIndex):
    """All that is known of a checkpoint beside its files.

    What `rows` has are numbered as in the weights' file.

    Attributes:
        weights: path, shape and dtype of each weight that belongs to no collection's table.
        optimizers: what each part of the optimizer kept; see `optimizers.saving.signature`.
        files: bytes and SHA-256 of each file that is none of a part.
        metadata: what whoever saved it wanted to be known.
    """

    weights: tuple[tuple[str, tuple[int, ...], str], ...]
    optimizers: tuple[Mapping[str, Any], ...]
    files: Mapping[str, tuple[int, str]]
    metadata: Mapping[str, Any]


def parsed(path: str) -> Index:
    """The index of a checkpoint.

    Args:
        path: the checkpoint's folder.

    Raises:
        FileNotFoundError: if there is no whole checkpoint.
        ValueError: if the index is none.
    """
    if not tf.io.gfile.exists(os.path.join(path, INDEX)):
        raise FileNotFoundError(
            f"path={path!r} is no checkpoint: it has no {INDEX}, which is written last; if it was "
            "being saved, that did not come to its end"
        )
    with reading(path, INDEX, "index of a checkpoint") as found:
        return Index(
            **rows_index(found),
            weights=tuple((path, tuple(shape), dtype) for path, shape, dtype in found["weights"]),
            optimizers=tuple(found["optimizers"]),
            files={name: tuple(about) for name, about in found["files"].items()},
            metadata=found["metadata"],
        )


@contextlib.contextmanager
def reading(path: str, name: str, noun: str) -> Iterator[dict[str, Any]]:
    """Gives what the file of an index has, to be read inside.

    Args:
        path: the folder.
        name: the file's name.
        noun: what it should be.

    Raises:
        ValueError: if it is none.
    """
    file = os.path.join(path, name)
    try:
        with tf.io.gfile.GFile(file) as opened:
            found = json.loads(opened.read())
        if found["format"] != FORMAT:
            raise ValueError(f"{file} has the format {found['format']!r}, not {FORMAT}")
        yield found
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeError) as error:
        raise ValueError(f"{file} is no {noun}: {error!r}") from error


def rows_index(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `RowsIndex`, of what a file has of them."""
    return {
        "id": found["id"],
        "base": None if found["base"] is None else Base(**found["base"]),
        "global_step": found["global_step"],
        "parts": tuple(map(_part, found["parts"])),
        "rows": tuple(map(_rows, found["rows"])),
    }


def _part(found: dict) -> Part:
    fields = tuple(Field(f["dtype"], tuple(f["shape"])) for f in found["fields"])
    blocks = tuple(Block(**block) for block in found["blocks"])
    log_decay = found.get("log_decay", 0.0)
    return Part(found["rows"], found["block"], fields, found["is_partial"], blocks, log_decay)


def _rows(found: dict) -> Rows:
    shards = tuple(Shard(s["part"], s["field"], Piece(**s["piece"])) for s in found["shards"])
    return Rows(found["name"], tuple(found["shape"]), shards)


def chain_of(
    path: str, parse: Callable[[str], AnyIndex] = parsed, name: str = INDEX
) -> list[tuple[str, AnyIndex]]:
    """A checkpoint and all that it is based on: the full one first, then deltas in their order.

    Args:
        path: the checkpoint's folder.
        parse: reads the index of one, see `parsed`; another one for what is no checkpoint.
        name: that of the index's file.

    Returns:
        The folder and the index of each; the last is the checkpoint itself.

    Raises:
        FileNotFoundError: if there is no whole checkpoint at `path`.
        ValueError: if one of them is missing, is not the one that was there, or does not fit.
    """
    found = [(path, parse(path))]
    while (base := found[0][1].base) is not None:
        folder = base_folder(found[0][0], base)
        try:
            before = parse(folder)
        except FileNotFoundError as error:
            raise ValueError(
                f"{path} is a delta whose full save is missing: {found[0][0]} is based on "
                f"{folder}, where there is no {name}"
            ) from error
        # None is its own base.
        if before.id != base.id or before.id in {index.id for _, index in found}:
            raise ValueError(
                f"{path} is a delta whose full save is missing: {found[0][0]} is based on another "
                f"checkpoint than the one that is in {folder}"
            )
        found.insert(0, (folder, before))
    shapes = [shapes_of(index.rows) for _, index in found]
    for (folder, _), own in zip(found, shapes, strict=True):
        if own != shapes[-1]:
            raise ValueError(
                f"{path} is based on {folder}, which has other tables: {own}, not {shapes[-1]}"
            )
    return found


def shapes_of(rows: Sequence[Rows]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, which are the same in a delta and in its base."""
    return [(own.name, own.shape) for own in rows]


def base_folder(path: str, base: Base) -> str:
    """Where the base of a delta is.

    Args:
        path: the delta's folder.
        base: its base.
    """
    # Beside where the folder is, whatever path leads there.
    folder = path.rstrip("/") if "://" in path else os.path.realpath(path)
    return os.path.join(os.path.dirname(folder), base.folder)


def block_prefix(path: str, part: int, block: int) -> str:
    """What the names of a block's files begin with."""
    return os.path.join(path, f"part_{part:05d}", f"block_{block:06d}")


def data_file(prefix: str) -> str:
    """The file that has a block's values."""
    return f"{prefix}.data-00000-of-00001"


def field_name(field: int) -> str:
    """The name of a field's tensor in a block."""
    return f"field_{field}"


def check_size(name: str, expected: int) -> None:
    """Raises a ValueError if a file is not there, or not so many bytes long."""
    if not tf.io.gfile.exists(name):
        raise ValueError(f"{name} is missing")
    found = tf.io.gfile.stat(name).length
    if found != expected:
        raise ValueError(f"{name} has {found} bytes, not {expected}: it is cut off or another file")


def content_of(path: str, name: str, about: tuple[int, str]) -> bytes:
    """That of a file of a checkpoint that is none of a part's.

    Args:
        path: the checkpoint's folder.
        name: the file's name.
        about: its bytes and their SHA-256.

    Raises:
        ValueError: if it is not what was written.
    """
    file = os.path.join(path, name)
    check_size(file, about[0])
    with tf.io.gfile.GFile(file, "rb") as opened:
        content = opened.read()
    if hashlib.sha256(content).hexdigest() != about[1]:
        raise ValueError(f"{file} is not what was written: its checksum is another one")
    return content
