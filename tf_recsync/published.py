"""What a published version has whose tables are apart: its index, and what is looked up in it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync.checkpoint.index import (
    Part,
    RowsIndex,
    block_prefix,
    data_file,
    reading,
    rows_index,
)
from tf_recsync.embedding.config import FeatureConfig, TableConfig
from tf_recsync.layers.embedding_collection import EmbeddingCollection
from tf_recsync.tables_apart import GivenInput
from tf_recsync.versions import MARKER

_DTYPES = ("float32", "bfloat16")
TABLES = "tables"  # The folder of the parts, in that of a version.


@dataclasses.dataclass(frozen=True)
class Lookup:
    """An input of the model that stands for a lookup.

    Attributes:
        name: the input's.
        feature: what is looked up.
        kind: what is given of it; see `embedding.given_vectors`.
    """

    name: str
    feature: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Collection:
    """A collection of the model.

    Attributes:
        name: the layer's.
        path: what the names of its tables' rows begin with.
        tables: its tables, of which all is known but the first values.
        features: its features.
        lookups: the model's inputs that stand for lookups in it.
    """

    name: str
    path: str
    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    lookups: tuple[Lookup, ...]

    def as_json(self) -> dict[str, Any]:
        """What the index has of it."""
        kept = ("name", "rows", "dimension", "combiner", "dtype")
        tables = [{name: getattr(table, name) for name in kept} for table in self.tables]
        features = [feature.get_config() for feature in self.features]
        lookups = [dataclasses.asdict(lookup) for lookup in self.lookups]
        own = {"name": self.name, "path": self.path}
        return {**own, "tables": tables, "features": features, "lookups": lookups}


@dataclasses.dataclass(frozen=True)
class TablesIndex(RowsIndex):
    """All that is known of a version's tables; it is in the version's marker.

    Attributes:
        collections: the model's.
    """

    collections: tuple[Collection, ...]

    def as_json(self) -> dict[str, Any]:
        """What the marker says."""
        return {**super().as_json(), "collections": [own.as_json() for own in self.collections]}


def parsed_tables(path: str) -> TablesIndex:
    """The index of a published version.

    Args:
        path: the version's folder.

    Raises:
        FileNotFoundError: if there is no whole version.
        ValueError: if it has its tables inside of its model, or the index is none.
    """
    file = os.path.join(path, MARKER)
    if not tf.io.gfile.exists(file):
        raise FileNotFoundError(
            f"{path} is no published version: it has no {MARKER}, which is written last"
        )
    with reading(
        path, MARKER, 'marker of a version that was published with tables="apart"'
    ) as found:
        index = TablesIndex(
            **rows_index(found), collections=tuple(map(_collection, found["collections"]))
        )
        _check(file, index)
        return index


def collections_of(
    model: keras.Model, given: Sequence[GivenInput]
) -> list[tuple[EmbeddingCollection, Collection]]:
    """The collections of a model whose features it looks up, and what an index says of them.

    Args:
        model: the model.
        given: its inputs that stand for lookups.
    """
    names = {own.layer for own in given}
    layers = (layer for layer in model._flatten_layers() if isinstance(layer, EmbeddingCollection))
    return [
        (
            layer,
            Collection(
                layer.name,
                layer.path,
                layer.table_configs,
                layer.feature_configs,
                tuple(Lookup(o.name, o.feature, o.kind) for o in given if o.layer == layer.name),
            ),
        )
        for layer in layers
        if layer.name in names
    ]


def _collection(found: Mapping[str, Any]) -> Collection:
    return Collection(
        found["name"],
        found["path"],
        tuple(TableConfig(**table) for table in found["tables"]),
        tuple(FeatureConfig(**feature) for feature in found["features"]),
        tuple(Lookup(**lookup) for lookup in found["lookups"]),
    )


def _check(file: str, index: TablesIndex) -> None:
    """Raises a ValueError if an index says what can't be: it leads to addresses in memory."""

    def check(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{file} is no marker of a version with tables: {what}")

    for number, part in enumerate(index.parts):
        check(
            part.rows > 0
            and part.block > 0
            and [f.dtype in _DTYPES for f in part.fields] == [True],
            f"part {number} has {part.rows} rows in blocks of {part.block} with {part.fields}",
        )
        numbers = [block.number for block in part.blocks]
        for block in part.blocks:
            begin, end = part.bounds(block.number)
            check(
                0 <= begin < end and 0 < block.rows <= end - begin,
                f"part {number} has block {block.number} of {block.rows} rows",
            )
            check(
                part.is_partial or block.rows == end - begin,
                f"part {number} has {block.rows} rows in block {block.number}, not {end - begin}",
            )
        expected = sorted(set(numbers)) if part.is_partial else list(range(part.count))
        check(numbers == expected, f"part {number} has the blocks {numbers}")
    tables = {f"{own.path}/{t.name}": t for own in index.collections for t in own.tables}
    check(
        sorted(tables) == sorted(rows.name for rows in index.rows),
        f"it has the tables {sorted(tables)}, and rows of {sorted(r.name for r in index.rows)}",
    )
    for rows in index.rows:
        table = tables[rows.name]
        check(
            rows.shape == (table.rows, table.dimension),
            f"table {rows.name!r} has rows of the shape {rows.shape}",
        )
        count = len(rows.shards)
        pieces = sorted((shard.piece.index, shard.piece.count) for shard in rows.shards)
        check(
            pieces == [(i, count) for i in range(count)],
            f"table {rows.name!r} has the shards {pieces}",
        )
        for shard in rows.shards:
            piece = shard.piece
            check(0 <= shard.part < len(index.parts), f"there is no part {shard.part}")
            part = index.parts[shard.part]
            field = part.fields[0]
            own = len(range(piece.index, table.rows, piece.count))
            check(
                piece.rows == own and 0 <= piece.offset <= part.rows - piece.rows,
                f"table {rows.name!r} has {piece.rows} rows of part {shard.part} from "
                f"{piece.offset} on",
            )
            check(
                shard.field == 0 and field.shape == rows.shape[1:] and field.dtype == table.dtype,
                f"table {rows.name!r} is {table.dtype} {rows.shape[1:]}, part {shard.part} "
                f"{field.dtype} {field.shape}",
            )


def block_file(path: str, number: int, block: int) -> str:
    """The file that has the values of a block of a version's part.

    Args:
        path: the version's folder.
        number: that of the part.
        block: that of the block.
    """
    return data_file(block_prefix(os.path.join(path, TABLES), number, block))


def row_bytes_of(part: Part) -> int:
    """Bytes that a row of a part has in a file."""
    (field,) = part.fields
    return math.prod(field.shape) * tf.as_dtype(field.dtype).size
