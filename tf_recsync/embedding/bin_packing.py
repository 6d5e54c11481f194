"""Plans which parameter server holds which table: bin packing of lookup costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tf_recsync._checks import integer, list_of
from tf_recsync.embedding.config import (
    TableConfig,
    check_tables,
    checked_memory_limit,
    row_bytes,
)
from tf_recsync.embedding.packer import TOLERANCE, Packer, Packing
from tf_recsync.embedding.placement import PlacementPlan, Shard, shard_rows

_BOUND = 1.1
# A split must lower the largest load by this part of it to count as progress.
_PROGRESS = 1e-3
# How far the search for the fewest shards goes: the tables considered for the next split, the
# ways of splitting that are carried on, the steps without progress, and up to how many shards all
# tables are split completely if all else fails. More costs time and seldom saves a shard.
_CANDIDATES = 8
_BEAM = 4
_PATIENCE = 3
_MOST_SHARDS = 2000


def plan_placement(
    tables: Sequence[TableConfig],
    ps: int,
    costs: Mapping[str, float] | None = None,
    memory_limit: int | None = None,
    *,
    bytes_per_row_overhead: int = 0,
    slots: int = 1,
    together: Sequence[Sequence[str]] = (),
) -> PlacementPlan:
    """Distributes tables so that every parameter server has about the same load.

    The largest load is brought within 10 % of the mean where the tables allow it: tables are
    placed by decreasing cost, each on the parameter server with the least load; then tables are
    moved and swapped, and tables are split into shards only where that is not enough. A shard
    costs the cost of its table divided by the number of shards. The same arguments always give
    the same plan.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1: bin packing of the profiled lookup costs.

    Args:
        tables: The tables, under different names. Those with `shards=None` may be split, into at
            most one shard for each parameter server; the others have the shards they ask for.
        ps: Number of parameter servers, at least 1.
        costs: Load that each table causes, under its name, in any unit, such as the seconds that
            `profile_costs` measures; finite and at least 0. None (the default) takes the bytes of
            the values.
        memory_limit: Bytes that each parameter server has for its tables. None (the default)
            sets no limit.
        bytes_per_row_overhead: Bytes that a row takes beside values and accumulators, for
            instance for its version. 0 by default; an optimizer of this package knows its own
            (`optimizer.bytes_per_row_overhead`).
        slots: float32 accumulators that the optimizer keeps for each element, 1 by default; an
            optimizer of this package knows its own (`optimizer.slots`).
        together: Groups of names of tables that must be whole and on one parameter server, as
            those of an interaction; groups that share a table are one. None by default. A group
            is placed like a table with the sum of the costs.

    Returns:
        The plan, with the shards in the order of the tables.

    Raises:
        ValueError: If an argument is out of range, a table asks for more shards than there are
            parameter servers, or for several though it must be whole, or the tables do not fit
            into the memory.

    Example:
        >>> tables = [TableConfig("users", 3000, 8), TableConfig("items", 600, 8)]
        >>> tables.append(TableConfig("shops", 400, 8))
        >>> print(plan_placement(tables, ps=2))
        3 tables in 4 shards on 2 PS, largest load 1.05 times the mean
          PS         load       memory  shards
           0        67200    131.2 KiB  users[0/2], items
           1        60800    118.8 KiB  users[1/2], shops
    """
    tables = list_of("tables", tables, TableConfig)
    check_tables(tables)
    ps = integer("ps", ps, 1)
    together = [list_of("together", names, str) for names in together]
    memory_limit = checked_memory_limit(memory_limit, slots, bytes_per_row_overhead)
    whole = {name for names in together for name in names}
    tables = [table if table.name in whole else table.on_servers(ps) for table in tables]
    for table in tables:
        if table.shards is not None and table.shards > ps:
            raise ValueError(
                f"table {table.name!r}: shards={table.shards} must be at most ps={ps}, as every "
                "shard is on another parameter server."
            )
    table_costs = _costs(tables, costs)
    sizes = [
        row_bytes(table.dimension, table.dtype, slots, bytes_per_row_overhead + table.key_bytes)
        for table in tables
    ]
    units = _units(tables, sizes, table_costs, together)
    # In the unit of the largest cost, so that the smallest of numbers can be divided too.
    largest = max(unit.cost for unit in units) or 1.0
    packer = Packer(
        rows=[unit.rows for unit in units],
        costs=[unit.cost / largest for unit in units],
        row_bytes=[unit.row_bytes for unit in units],
        ps=ps,
        memory_limit=memory_limit,
    )
    most = [unit.shards or min(ps, unit.rows) for unit in units]
    # No plan is better than the mean, nor than the smallest piece of a table that cannot be split
    # further; where such a piece is the largest load, other splits would be in vain.
    enough = max(
        _BOUND * sum(packer.costs) / ps,
        *(cost / count for cost, count in zip(packer.costs, most, strict=True)),
    ) * (1 + TOLERANCE)
    fewest = [
        unit.shards or max(math.ceil(cost / enough) if cost else 1, 1)
        for unit, cost in zip(units, packer.costs, strict=True)
    ]
    if memory_limit is not None:
        fewest = [
            max(count, _shards_that_fit(unit, most[u], memory_limit))
            for u, (unit, count) in enumerate(zip(units, fewest, strict=True))
        ]
    packing = _search(packer, fewest, most, enough)
    if packing is None:
        raise _does_not_fit(units, packer)
    return _plan(tables, sizes, table_costs, units, packing, ps)


@dataclasses.dataclass(frozen=True)
class _Unit:
    """What is placed as one: a table that may be split, or tables that stay together."""

    label: str  # for messages
    tables: tuple[int, ...]
    rows: int  # 1 of several tables
    row_bytes: int
    cost: float
    shards: int | None


def _units(
    tables: Sequence[TableConfig],
    sizes: Sequence[int],
    costs: Sequence[float],
    together: Sequence[Sequence[str]],
) -> list[_Unit]:
    """The tables as units, in the order of their first tables."""
    positions = {table.name: t for t, table in enumerate(tables)}
    groups = [{t} for t in range(len(tables))]  # of each table
    whole: set[int] = set()
    for names in together:
        unknown = [name for name in names if name not in positions]
        if unknown:
            raise ValueError(f"together: {unknown} are not among the tables {list(positions)}.")
        joined = set().union(*(groups[positions[name]] for name in names))
        whole |= joined
        for t in joined:
            groups[t] = joined
    units = []
    for t, group in enumerate(groups):
        if min(group) < t:
            continue
        members = tuple(sorted(group))
        if t not in whole:
            table = tables[t]
            units.append(
                _Unit(repr(table.name), members, table.rows, sizes[t], costs[t], table.shards)
            )
            continue
        names = [tables[m].name for m in members]
        for table in (tables[m] for m in members):
            if (table.shards or 1) > 1:
                raise ValueError(
                    f"table {table.name!r}: shards={table.shards} must be None or 1, as the tables "
                    f"{names} must be together and whole on one parameter server."
                )
        label = " together with ".join(map(repr, names))
        size = sum(tables[m].rows * sizes[m] for m in members)
        units.append(_Unit(label, members, 1, size, sum(costs[m] for m in members), 1))
    return units


def _search(
    packer: Packer, fewest: Sequence[int], most: Sequence[int], enough: float
) -> Packing | None:
    """The packing with the fewest shards found whose largest load is at most `enough`.

    Where there is none, the one with the lowest largest load; None if the memory is too small.

    The splits with one more shard are tried before those with two more, and so on, but from each
    number of shards only the most even ones are carried on. If that leads nowhere, all tables
    are split into small pieces, and splits that turn out needless are undone.
    """

    def rank(counts: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        packing = packer.pack(counts)
        load = math.inf if packing is None else max(packing.largest, enough)
        return load, sum(counts), counts

    best = tuple(fewest)
    beam = [best]
    patience = _PATIENCE
    while rank(best)[0] > enough and patience and beam:
        steps = {
            _with(counts, table, counts[table] + 1)
            for counts in beam
            for table in _candidates(packer, counts, most)
        }
        beam = sorted(steps, key=rank)[:_BEAM]
        if not beam or not rank(beam[0])[0] < rank(best)[0] * (1 - _PROGRESS):
            patience -= 1
        best = min([best, *beam], key=rank)
    if rank(best)[0] > enough:
        splits = [best, _small_pieces(packer, fewest, most, enough)]
        if sum(most) <= _MOST_SHARDS:
            splits.append(tuple(most))
        best = min(splits, key=rank)
    if packer.pack(best) is None:
        return None
    for table in sorted(range(len(best)), key=lambda table: -best[table]):
        # `many` shards of this table are as good as what there is, `few` may not be.
        few, many = fewest[table] - 1, best[table]
        while many - few > 1:
            # First the fewest: most of the needless splits are undone completely.
            count = fewest[table] if few < fewest[table] else (few + many) // 2
            fewer = _with(best, table, count)
            if rank(fewer)[0] <= rank(best)[0] * (1 + TOLERANCE):
                best, many = fewer, count
            else:
                few = count
    return packer.pack(best)


def _candidates(packer: Packer, counts: tuple[int, ...], most: Sequence[int]) -> list[int]:
    """The tables whose split may help, the most promising ones first."""
    packing = packer.pack(counts)
    splittable = [table for table, count in enumerate(counts) if count < most[table]]
    if packing is None:
        # The memory is too small: the largest pieces are hardest to place.
        splittable.sort(key=lambda table: -packer.memory(table, 0, counts[table]))
        return splittable[:_CANDIDATES]
    splittable = [table for table in splittable if packer.costs[table] > 0]
    splittable.sort(key=lambda table: -packer.costs[table] / counts[table])
    heavy = int(packing.loads.argmax())
    there = {table for (table, _), ps in packing.places.items() if ps == heavy}
    # Where that server's tables cannot be split, others can still make room for one of them.
    return sorted(splittable, key=lambda table: table not in there)[:_CANDIDATES]


def _small_pieces(
    packer: Packer, fewest: Sequence[int], most: Sequence[int], enough: float
) -> tuple[int, ...]:
    """Numbers of shards with which placing by cost, or by memory, goes well.

    The server with the least of all has at most the mean, so that a piece as large as the
    difference between the mean and what is allowed always finds a place.
    """
    spare_load = enough - sum(packer.costs) / packer.ps
    spare_memory = math.inf
    if packer.memory_limit is not None:
        used = sum(packer.memory(table, 0, 1) for table in range(len(fewest)))
        spare_memory = packer.memory_limit - used / packer.ps

    def pieces(size: float, spare: float, largest: int) -> int:
        return min(math.ceil(size / spare), largest) if spare > size / largest else largest

    return tuple(
        max(
            fewest[table],
            pieces(packer.costs[table], spare_load, most[table]) if packer.costs[table] else 1,
            pieces(packer.memory(table, 0, 1), spare_memory, most[table]),
        )
        for table in range(len(fewest))
    )


def _with(counts: tuple[int, ...], table: int, count: int) -> tuple[int, ...]:
    """The numbers of shards with that of one table replaced."""
    return (*counts[:table], count, *counts[table + 1 :])


def _plan(
    tables: Sequence[TableConfig],
    sizes: Sequence[int],
    costs: Sequence[float],
    units: Sequence[_Unit],
    packing: Packing,
    ps: int,
) -> PlacementPlan:
    shards = {}
    for (u, index), place in packing.places.items():
        count = packing.counts[u]
        for t in units[u].tables:
            rows = shard_rows(tables[t].rows, index, count)
            shards[t, index] = Shard(
                table=tables[t].name,
                index=index,
                count=count,
                rows=rows,
                ps=place,
                cost=costs[t] / count,
                memory=rows * sizes[t],
            )
    return PlacementPlan(ps, tuple(shards[key] for key in sorted(shards)))


def _shards_that_fit(unit: _Unit, most: int, memory_limit: int) -> int:
    """The fewest shards of a unit of which each fits on a server without others."""
    count = unit.shards or 1
    rows = memory_limit // unit.row_bytes
    if rows:
        count = max(count, -(-unit.rows // rows))
    if not rows or count > most:
        raise ValueError(
            f"table {unit.label}: its {unit.rows * unit.row_bytes} bytes do not fit into "
            f"memory_limit={memory_limit} bytes per PS, even in {most} shards."
        )
    return count


def _does_not_fit(units: Sequence[_Unit], packer: Packer) -> ValueError:
    sizes = {unit.label: unit.rows * unit.row_bytes for unit in units}
    largest = max(sizes, key=lambda label: sizes[label])
    return ValueError(
        f"the {sum(len(unit.tables) for unit in units)} tables take {sum(sizes.values())} bytes, "
        f"the largest, {largest}, {sizes[largest]}: no placement on ps={packer.ps} within "
        f"memory_limit={packer.memory_limit} bytes per PS was found."
    )


def _costs(tables: Sequence[TableConfig], costs: Mapping[str, float] | None) -> list[float]:
    """The cost of each table, checked."""
    if costs is None:
        return [float(table.bytes) for table in tables]
    names = [table.name for table in tables]
    for name in costs:
        if name not in names:
            raise ValueError(f"costs[{name!r}]: there is no such table among {names}.")
    for name in names:
        if name not in costs:
            raise ValueError(f"costs: the table {name!r} is missing.")
        if not 0 <= costs[name] < math.inf:
            raise ValueError(f"costs[{name!r}]={costs[name]}: must be finite and at least 0.")
    return [float(costs[name]) for name in names]
