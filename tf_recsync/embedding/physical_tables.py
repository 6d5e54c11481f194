"""How the tables of a collection lie in the variables that servers hold.

All shards of one dimension and type on one parameter server are rows of a
single variable, a physical table, so that one lookup reads them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import keras

from tf_recsync import ops
from tf_recsync.embedding.config import TableConfig, row_bytes
from tf_recsync.embedding.initial_values import DrawnRows, GivenRows
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
    """The shards of one dimension and type on one parameter server, one after the other.

    The shard of a table with keys is alone, and so are those of tables that have an optimizer of
    their own: `group` is the name of the first such table, and `key_bytes` what keys take for each
    row.
    """

    ps: int
    dimension: int
    dtype: str
    group: str
    key_bytes: int
    pieces: tuple[Piece, ...]

    @property
    def keyed(self) -> str:
        """The name of the table, if its ids are keys; else empty."""
        return self.group if self.key_bytes else ""

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def name(self) -> str:
        suffix = "" if self.dtype == "float32" else f"_{self.dtype}"
        # Keras allows no slash.
        suffix += self.group and f"_{self.group.replace('/', '|')}"
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
    with_optimizer: dict[int, str] = {}
    for table in tables:
        if table.optimizer is not None:
            with_optimizer.setdefault(id(table.optimizer), table.name)
    groups: dict[tuple[int, int, str, str, int], list[Piece]] = {}
    covered: dict[str, int] = dict.fromkeys(configs, 0)
    for shard in plan.shards:
        config = configs.get(shard.table)
        if config is None:
            raise ValueError(
                f"placement has table {shard.table!r}, which is not among the tables "
                f"{list(configs)}"
            )
        if config.keys and shard.count & (shard.count - 1):
            raise ValueError(
                f"placement has {shard.count} shards of table {shard.table!r}, whose ids are keys: "
                "their number must be a power of two"
            )
        own = shard.table if config.keys else with_optimizer.get(id(config.optimizer), "")
        key = (shard.ps, config.dimension, config.dtype, own, config.key_bytes)
        group = groups.setdefault(key, [])
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
            piece.table: piece.rows
            * row_bytes(table.dimension, table.dtype, slots, overhead + table.key_bytes)
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
    """The first values of a physical table, made in place where it lies.

    Rows that are given, not drawn, are 0 until they are written, as rows are that have no key.

    Args:
        physical: the physical table.
        values: the first values of each table, by its name.
        seeds: the seed of each table whose values are drawn, by its name.
    """

    def __init__(
        self,
        physical: PhysicalTable,
        values: Mapping[str, DrawnRows | GivenRows],
        seeds: Mapping[str, int],
    ):
        self._physical = physical
        self._values = values
        self._seeds = seeds

    def __call__(self, shape, dtype=None, **kwargs):
        del shape, kwargs
        pieces = self._physical.pieces
        drawn = [
            # Rows of keys get their values with their keys.
            _ZEROS if isinstance(values, GivenRows) or self._physical.keyed else values
            for values in (self._values[piece.table] for piece in pieces)
        ]
        return ops.initial_rows(
            dtype=dtype,
            dimension=self._physical.dimension,
            rows=[piece.rows for piece in pieces],
            indices=[piece.index for piece in pieces],
            counts=[piece.count for piece in pieces],
            distributions=[values.distribution for values in drawn],
            parameters=[number for values in drawn for number in values.parameters],
            seeds=[self._seeds.get(piece.table, 0) for piece in pieces],
        )


_ZEROS = DrawnRows("constant", (0.0, 0.0))


def shards_of(tables: Sequence[PhysicalTable], variables: Sequence) -> dict[str, list]:
    """Where the shards of each table are: (variable, piece) pairs, by the table's name."""
    shards: dict[str, list] = {}
    for table, variable in zip(tables, variables, strict=True):
        for piece in table.pieces:
            shards.setdefault(piece.table, []).append((variable, piece))
    return shards
