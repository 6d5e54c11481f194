"""How the tables of a collection lie in the variables that servers hold.

All shards of one dimension and type on one parameter server are rows of a
single variable, a physical table, so that one lookup reads them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_recsync.embedding.config import TableConfig, row_bytes
from tf_recsync.embedding.placement import PlacementPlan


@dataclasses.dataclass(frozen=True)
class Piece:
    """A shard's rows in a physical table: rows `offset` to `offset + rows`.

    Row r of the table is row `offset + r // count` where r % count == index.
    """

    table: str
    index: int
    count: int
    rows: int
    offset: int

    def take(self, whole):
        """The piece's rows of the values of all rows of its table (numpy or TensorFlow)."""
        return whole[self.index :: self.count]


@dataclasses.dataclass(frozen=True)
class PhysicalTable:
    """The shards of one dimension and type on one parameter server, one after the other."""

    ps: int
    dimension: int
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def name(self) -> str:
        suffix = "" if self.dtype == "float32" else f"_{self.dtype}"
        return f"ps_{self.ps}_dimension_{self.dimension}{suffix}_embeddings"


def physical_tables(
    tables: Sequence[TableConfig], plan: PlacementPlan
) -> tuple[PhysicalTable, ...]:
    """Lays the shards of a plan out in physical tables.

    Args:
        tables: the collection's tables.
        plan: where their shards go.

    Raises:
        ValueError: if the plan is for other tables.
    """
    configs = {table.name: table for table in tables}
    groups: dict[tuple[int, int, str], list[Piece]] = {}
    covered: dict[str, int] = dict.fromkeys(configs, 0)
    for shard in plan.shards:
        config = configs.get(shard.table)
        if config is None:
            raise ValueError(
                f"placement has table {shard.table!r}, which is not among the tables "
                f"{list(configs)}"
            )
        group = groups.setdefault((shard.ps, config.dimension, config.dtype), [])
        offset = sum(piece.rows for piece in group)
        group.append(Piece(shard.table, shard.index, shard.count, shard.rows, offset))
        covered[shard.table] += shard.rows
    for table in tables:
        if covered[table.name] != table.rows:
            raise ValueError(
                f"placement has {covered[table.name]} rows of table {table.name!r}, which has "
                f"{table.rows}"
            )
    return tuple(PhysicalTable(*key, tuple(groups[key])) for key in sorted(groups))


def check_memory(
    layer: str, tables: Sequence[PhysicalTable], memory_limit: int, slots: int, overhead: int
) -> None:
    """Checks that no parameter server holds more of a collection than it may.

    Args:
        layer: the collection's name.
        tables: its physical tables.
        memory_limit: bytes that a server has for them.
        slots: float32 accumulators of an element.
        overhead: bytes of a row beside values and accumulators.

    Raises:
        ValueError: naming the server that lacks the memory, and its largest table.
    """
    for ps in sorted({table.ps for table in tables}):
        held = {
            piece.table: piece.rows * row_bytes(table.dimension, table.dtype, slots, overhead)
            for table in tables
            if table.ps == ps
            for piece in table.pieces
        }
        total = sum(held.values())
        if total > memory_limit:
            largest = max(held, key=held.get)
            raise ValueError(
                f"parameter server {ps} would hold {total} bytes of the tables of layer {layer!r}, "
                f"more than memory_limit={memory_limit}; the largest is table {largest!r} with "
                f"{held[largest]} bytes there (with slots={slots}, "
                f"bytes_per_row_overhead={overhead}: give the layer these two to have it planned)"
            )


class PhysicalInitializer(keras.initializers.Initializer):
    """The first values of a physical table, the same wherever its shards lie.

    Args:
        physical: the physical table.
        initializers: the initializer of each table, by its name.
        tables: the tables, by name.
    """

    def __init__(self, physical: PhysicalTable, initializers: dict, tables: dict):
        self._physical = physical
        self._initializers = initializers
        self._tables = tables

    def __call__(self, shape, dtype=None, **kwargs):
        del shape, kwargs
        parts = []
        for piece in self._physical.pieces:
            config = self._tables[piece.table]
            whole = self._initializers[piece.table](
                (config.rows, config.dimension), dtype="float32"
            )
            parts.append(tf.cast(piece.take(tf.convert_to_tensor(whole)), dtype))
        return tf.concat(parts, 0)


def shards_of(tables: Sequence[PhysicalTable], variables: Sequence) -> dict[str, list]:
    """Where the shards of each table are: (variable, piece) pairs, by the table's name."""
    shards: dict[str, list] = {}
    for table, variable in zip(tables, variables, strict=True):
        for piece in table.pieces:
            shards.setdefault(piece.table, []).append((variable, piece))
    return shards


def gather_logical(tables: Sequence[PhysicalTable], values: Sequence[np.ndarray]) -> dict:
    """Puts what physical tables have per row together by table.

    Args:
        tables: physical tables.
        values: for each of them an array [rows, ...].

    Returns:
        For each table, by name, an array with all its rows.
    """
    logical: dict[str, np.ndarray] = {}
    for physical, value in zip(tables, values, strict=True):
        for piece in physical.pieces:
            if piece.table not in logical:
                rows = sum(p.rows for t in tables for p in t.pieces if p.table == piece.table)
                logical[piece.table] = np.zeros((rows, *value.shape[1:]), value.dtype)
            own = value[piece.offset : piece.offset + piece.rows]
            logical[piece.table][piece.index :: piece.count] = own
    return logical


def scatter_logical(table: PhysicalTable, logical) -> np.ndarray:
    """The rows of one physical table, taken from the tables' own (see `gather_logical`)."""
    return np.concatenate([piece.take(np.asarray(logical[piece.table])) for piece in table.pieces])
