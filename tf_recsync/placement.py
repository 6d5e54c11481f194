"""Which parameter server holds which embedding table, or which part of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tf_recsync.layers.embedding_config import (
    FeatureConfig,
    TableConfig,
    check_configs,
    check_tables,
)

_VERSION = 1
# The largest load may exceed the mean by a tenth.
_BOUND = 1.1
# Sums of the same costs in another order differ in their last digits.
_TOLERANCE = 1e-9
# A split must lower the largest load by this part of it to count as progress.
_PROGRESS = 1e-3
# How far the search for the fewest shards goes: the tables considered for the next split, the
# ways of splitting that are carried on, the steps without progress, and up to how many shards all
# tables are split completely if all else fails. More costs time and seldom saves a shard.
_CANDIDATES = 8
_BEAM = 4
_PATIENCE = 3
_MOST_SHARDS = 2000
_BYTES_PER_SLOT_ELEMENT = 4


@dataclasses.dataclass(frozen=True)
class Shard:
    """A table, or the part of it that one parameter server holds.

    Shard `index` of `count` holds the rows `r` with `r % count == index`, each as its local row
    `r // count`.

    Args:
        table: Name of the table.
        index: Which of the shards of the table this is, from 0.
        count: Number of shards of the table, at least 1.
        rows: Number of rows of this shard.
        ps: Index of the parameter server that holds it, from 0.
        cost: Its part of the cost of the table, in the unit of the costs given to
            `plan_placement`.
        memory: Bytes that it takes on the parameter server: values, accumulators and overhead.
            0 (the default) if not known.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> Shard("users", index=1, count=2, rows=5, ps=0, cost=0.5).label
        'users[1/2]'
    """

    table: str
    index: int
    count: int
    rows: int
    ps: int
    cost: float
    memory: int = 0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.count < 1:
            raise ValueError(f"shard of {self.table!r}: count={self.count} must be at least 1.")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"shard of {self.table!r}: index={self.index} must be from 0 to {self.count - 1}."
            )
        for argument in ("rows", "ps", "cost", "memory"):
            value = getattr(self, argument)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"shard {self.label}: {argument}={value} must be finite and at least 0."
                )

    @property
    def label(self) -> str:
        """The name of the table, and which of how many shards where there are several."""
        return self.table if self.count == 1 else f"{self.table}[{self.index}/{self.count}]"


@dataclasses.dataclass(frozen=True)
class PlacementPlan:
    """The parameter server of every shard of every table.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1.

    Args:
        ps: Number of parameter servers, at least 1. Some may hold nothing.
        shards: All shards of all tables, in any order. Shards of one table are on different
            parameter servers.

    Raises:
        ValueError: If `ps` or the parameter server of a shard is out of range, or if the shards
            of a table do not hold each of its rows exactly once.

    Example:
        >>> whole = Shard("users", index=0, count=1, rows=9, ps=1, cost=3.0)
        >>> plan = PlacementPlan(ps=2, shards=(whole,))
        >>> plan.loads
        array([0., 3.])
        >>> plan.imbalance
        2.0
    """

    ps: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        """Checks that every table is complete, and copies the shards so that they stay so."""
        object.__setattr__(self, "shards", tuple(self.shards))
        _check_ps(self.ps)
        for shard in self.shards:
            if shard.ps >= self.ps:
                raise ValueError(
                    f"shard {shard.label}: ps={shard.ps} must be from 0 to {self.ps - 1}."
                )
        for table in self.tables:
            _check_complete(table, self.shards_of(table))

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, in the order in which their shards appear."""
        return tuple(dict.fromkeys(shard.table for shard in self.shards))

    @property
    def loads(self) -> np.ndarray:
        """float64 `[ps]`: the cost of the shards of each parameter server, in the costs' unit."""
        return self._per_ps([shard.cost for shard in self.shards], np.float64)

    @property
    def memory(self) -> np.ndarray:
        """int64 `[ps]`: the bytes that the shards of each parameter server take."""
        return self._per_ps([shard.memory for shard in self.shards], np.int64)

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load: 1 for an even plan, at most `ps`."""
        loads = self.loads
        mean = float(loads.mean())
        # Tables that cost nothing cannot be uneven.
        return float(loads.max()) / mean if mean > 0 else 1.0

    def shards_of(self, table: str) -> tuple[Shard, ...]:
        """Returns the shards of a table, by index.

        Args:
            table: Name of the table.

        Returns:
            Its shards, at least one.

        Raises:
            ValueError: If the plan has no such table.
        """
        shards = [shard for shard in self.shards if shard.table == table]
        if not shards:
            raise ValueError(f"table={table!r}: must be one of {list(self.tables)}.")
        return tuple(sorted(shards, key=lambda shard: shard.index))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, one line for each shard.

        Args:
            path: The file; it is overwritten.
        """
        shards = ",\n".join(f"    {json.dumps(dataclasses.asdict(s))}" for s in self.shards)
        header = f'"version": {_VERSION},\n  "ps": {self.ps},\n'
        text = f'{{\n  {header}  "shards": [\n{shards}\n  ]\n}}\n'
        pathlib.Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlacementPlan:
        """Reads a plan that `save` wrote.

        Args:
            path: The file.

        Returns:
            A plan equal to the one saved.

        Raises:
            ValueError: If the file is not a plan, is of another version, or was changed to
                something that is no valid plan.
        """
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            version = content["version"]
            if version == _VERSION:
                shards = tuple(Shard(**shard) for shard in content["shards"])
                return cls(ps=content["ps"], shards=shards)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: not a placement plan: {error}") from error
        raise ValueError(
            f"{os.fspath(path)}: a placement plan of version {version}; this release reads "
            f"version {_VERSION}."
        )

    def __str__(self) -> str:
        loads, memory = self.loads, self.memory
        lines = [
            f"{len(self.tables)} tables in {len(self.shards)} shards on {self.ps} PS, "
            f"largest load {self.imbalance:.2f} times the mean",
            f"{'PS':>4} {'load':>12} {'memory':>12}  shards",
        ]
        for ps in range(self.ps):
            labels = ", ".join(shard.label for shard in self.shards if shard.ps == ps)
            row = f"{ps:>4} {loads[ps]:>12.6g} {_readable(int(memory[ps])):>12}  {labels}"
            lines.append(row.rstrip())
        return "\n".join(lines)

    def _per_ps(self, values: Sequence[float], dtype: type) -> np.ndarray:
        total = np.zeros(self.ps, dtype)
        np.add.at(total, [shard.ps for shard in self.shards], np.asarray(values, dtype))
        return total


def plan_placement(
    tables: Sequence[TableConfig],
    ps: int,
    costs: Mapping[str, float] | None = None,
    memory_limit: int | None = None,
    *,
    bytes_per_row_overhead: int = 0,
    slots: int = 1,
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
            instance for its step. 0 by default.
        slots: float32 accumulators that the optimizer keeps for each element, 1 by default.

    Returns:
        The plan, with the shards in the order of the tables.

    Raises:
        ValueError: If an argument is out of range, a table asks for more shards than there are
            parameter servers, or the tables do not fit into the memory.

    Example:
        >>> tables = [TableConfig("users", 3000, 8), TableConfig("items", 600, 8)]
        >>> tables.append(TableConfig("shops", 400, 8))
        >>> print(plan_placement(tables, ps=2))
        3 tables in 4 shards on 2 PS, largest load 1.05 times the mean
          PS         load       memory  shards
           0        67200    131.2 KiB  users[0/2], items
           1        60800    118.8 KiB  users[1/2], shops
    """
    check_tables(tables)
    _check_ps(ps)
    for argument, value in (("bytes_per_row_overhead", bytes_per_row_overhead), ("slots", slots)):
        if value < 0:
            raise ValueError(f"{argument}={value}: must be at least 0.")
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit={memory_limit}: must be None or at least 1 byte.")
    for table in tables:
        if table.shards is not None and table.shards > ps:
            raise ValueError(
                f"table {table.name!r}: shards={table.shards} must be at most ps={ps}, as every "
                "shard is on another parameter server."
            )
    row_bytes = [
        table.bytes // table.rows
        + slots * table.dimension * _BYTES_PER_SLOT_ELEMENT
        + bytes_per_row_overhead
        for table in tables
    ]
    table_costs = _costs(tables, costs)
    # In the unit of the largest cost, so that the smallest of numbers can be divided too.
    unit = max(table_costs) or 1.0
    packer = _Packer(
        rows=[table.rows for table in tables],
        costs=[cost / unit for cost in table_costs],
        row_bytes=row_bytes,
        ps=ps,
        memory_limit=memory_limit,
    )
    most = [table.shards or min(ps, table.rows) for table in tables]
    # No plan is better than the mean, nor than the smallest piece of a table that cannot be split
    # further; where such a piece is the largest load, other splits would be in vain.
    enough = max(
        _BOUND * sum(packer.costs) / ps,
        *(cost / count for cost, count in zip(packer.costs, most, strict=True)),
    ) * (1 + _TOLERANCE)
    fewest = [
        table.shards or max(math.ceil(cost / enough) if cost else 1, 1)
        for table, cost in zip(tables, packer.costs, strict=True)
    ]
    if memory_limit is not None:
        fewest = [
            max(count, _shards_that_fit(table, packer.row_bytes[t], most[t], memory_limit))
            for t, (table, count) in enumerate(zip(tables, fewest, strict=True))
        ]
    packing = _search(packer, fewest, most, enough)
    if packing is None:
        raise _does_not_fit(tables, packer)
    return _plan(tables, table_costs, packer, packing)


def profile_costs(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    batches: Iterable[Mapping[str, np.ndarray]],
    lookup: Callable[[str, np.ndarray], object],
) -> dict[str, float]:
    """Measures what the lookups in each table cost, for `plan_placement`.

    Each table is looked up once per batch, with the ids of all its features. The median ignores
    the first, slower lookups if there are several batches; ten are usually enough.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1: profiling with a small subset of the data.

    Args:
        tables: The tables, under different names.
        features: The features looked up in them; every table has at least one.
        batches: At least one batch: the integer ids, of any shape, under the name of each
            feature. Other entries are ignored.
        lookup: Called with the name of a table and the ids, an integer array of one dimension.
            It must return only when the lookup is done; what it returns is ignored.

    Returns:
        The median seconds per batch, under the name of each table.

    Raises:
        ValueError: If tables and features do not belong together, there is no batch, or a batch
            lacks a feature or has ids that are no integers.

    Example:
        >>> tables, features = [TableConfig("users", 9, 4)], [FeatureConfig("user", "users")]
        >>> values = np.zeros((9, 4), np.float32)
        >>> batches = [{"user": np.array([1, 8, 8])}] * 10
        >>> costs = profile_costs(tables, features, batches, lambda table, ids: values[ids])
        >>> costs["users"] > 0
        True
    """
    check_configs(tables, features)
    seconds: dict[str, list[float]] = {table.name: [] for table in tables}
    for number, batch in enumerate(batches):
        for table in seconds:
            ids = np.concatenate(
                [
                    _ids(batch, feature.name, number)
                    for feature in features
                    if feature.table == table
                ]
            )
            start = time.perf_counter()
            lookup(table, ids)
            seconds[table].append(time.perf_counter() - start)
    if not seconds[tables[0].name]:
        raise ValueError("batches: there must be at least one batch.")
    return {table: statistics.median(times) for table, times in seconds.items()}


@dataclasses.dataclass(frozen=True)
class _Packing:
    """Where the shards are, for one way of splitting the tables."""

    counts: tuple[int, ...]  # shards of each table
    places: dict[tuple[int, int], int]  # (table, index of the shard) -> parameter server
    loads: np.ndarray

    @property
    def largest(self) -> float:
        return float(self.loads.max())


@dataclasses.dataclass(frozen=True)
class _Packer:
    """Distributes shards over the parameter servers; tables are known by their position."""

    rows: list[int]
    costs: list[float]
    row_bytes: list[int]
    ps: int
    memory_limit: int | None
    # The search asks for the same splits again.
    known: dict[tuple[int, ...], _Packing | None] = dataclasses.field(default_factory=dict)

    def memory(self, table: int, index: int, count: int) -> int:
        """Bytes of a shard."""
        return _shard_rows(self.rows[table], index, count) * self.row_bytes[table]

    def pack(self, counts: Sequence[int]) -> _Packing | None:
        """The best packing found with these numbers of shards; None if none fits the memory."""
        key = tuple(counts)
        if key not in self.known:
            self.known[key] = self._pack(key)
        return self.known[key]

    def _pack(self, counts: tuple[int, ...]) -> _Packing | None:
        items = [(table, index) for table, count in enumerate(counts) for index in range(count)]
        table = np.array([table for table, _ in items])
        cost = np.array([self.costs[t] / counts[t] for t, _ in items])
        memory = np.array([self.memory(t, index, counts[t]) for t, index in items], np.int64)
        # Longest processing time first. Ties are broken by memory, then by position.
        place = self._place(np.lexsort((-memory, -cost)), table, cost, memory, by_memory=False)
        if place is None:
            # Filling up by load can leave no room for a large table that costs little.
            place = self._place(np.lexsort((-cost, -memory)), table, cost, memory, by_memory=True)
        if place is None:
            return None
        self._improve(place, table, cost, memory)
        loads = np.bincount(place, cost, self.ps)
        return _Packing(counts, dict(zip(items, place.tolist(), strict=True)), loads)

    def _place(
        self,
        order: np.ndarray,
        table: np.ndarray,
        cost: np.ndarray,
        memory: np.ndarray,
        by_memory: bool,
    ) -> np.ndarray | None:
        """The parameter server of each item, placed in `order` where there is least of all."""
        loads, used = np.zeros(self.ps), np.zeros(self.ps, np.int64)
        holds = np.zeros((self.ps, len(self.rows)), bool)
        place = np.zeros(len(order), np.int64)
        for item in order:
            free = ~holds[:, table[item]]
            if self.memory_limit is not None:
                free &= used + memory[item] <= self.memory_limit
            if not free.any():
                return None
            # Tables without any cost would all go to the server with the least load.
            first, second = (used, loads) if by_memory or cost[item] == 0 else (loads, used)
            choices = np.flatnonzero(free)
            ps = choices[np.lexsort((second[choices], first[choices]))[0]]
            place[item] = ps
            loads[ps] += cost[item]
            used[ps] += memory[item]
            holds[ps, table[item]] = True
        return place

    def _improve(
        self, place: np.ndarray, table: np.ndarray, cost: np.ndarray, memory: np.ndarray
    ) -> None:
        """Moves and swaps items off the server with the largest load while that lowers it.

        A move is a swap with nothing: each server has one more item without cost and memory.
        The sum of the squared loads falls with every swap, so that this ends.
        """
        nothing = len(self.rows)
        place_of = np.concatenate([place, np.arange(self.ps)])
        table_of = np.concatenate([table, np.full(self.ps, nothing)])
        cost_of = np.concatenate([cost, np.zeros(self.ps)])
        memory_of = np.concatenate([memory, np.zeros(self.ps, np.int64)])
        holds = np.zeros((self.ps, nothing + 1), bool)
        holds[place, table] = True
        while True:
            loads = np.bincount(place, cost, self.ps)
            heavy = int(loads.argmax())
            ours = np.flatnonzero(place == heavy)
            theirs = np.flatnonzero(place_of != heavy)
            if not len(theirs):
                return
            other = place_of[theirs]
            moved = cost[ours][:, None] - cost_of[theirs][None, :]
            result = np.maximum(loads[heavy] - moved, loads[other][None, :] + moved)
            allowed = result < loads[heavy] * (1 - _TOLERANCE)
            # No server may hold two shards of one table.
            allowed &= ~holds[other][:, table[ours]].T
            allowed &= ~holds[heavy, table_of[theirs]][None, :]
            if self.memory_limit is not None:
                used = np.zeros(self.ps, np.int64)
                np.add.at(used, place, memory)
                bytes_moved = memory[ours][:, None] - memory_of[theirs][None, :]
                allowed &= used[heavy] - bytes_moved <= self.memory_limit
                allowed &= used[other][None, :] + bytes_moved <= self.memory_limit
            if not allowed.any():
                return
            best = int(np.where(allowed, result, np.inf).argmin())
            our, their = ours[best // len(theirs)], theirs[best % len(theirs)]
            light = int(place_of[their])
            holds[heavy, table_of[our]] = holds[light, table_of[their]] = False
            holds[light, table_of[our]] = holds[heavy, table_of[their]] = True
            holds[:, nothing] = False
            place_of[our] = light
            if their < len(place):
                place_of[their] = heavy
            place[:] = place_of[: len(place)]


def _search(
    packer: _Packer, fewest: Sequence[int], most: Sequence[int], enough: float
) -> _Packing | None:
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
            if rank(fewer)[0] <= rank(best)[0] * (1 + _TOLERANCE):
                best, many = fewer, count
            else:
                few = count
    return packer.pack(best)


def _candidates(packer: _Packer, counts: tuple[int, ...], most: Sequence[int]) -> list[int]:
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
    packer: _Packer, fewest: Sequence[int], most: Sequence[int], enough: float
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
    tables: Sequence[TableConfig], costs: Sequence[float], packer: _Packer, packing: _Packing
) -> PlacementPlan:
    shards = []
    for (t, index), ps in sorted(packing.places.items()):
        count = packing.counts[t]
        shards.append(
            Shard(
                table=tables[t].name,
                index=index,
                count=count,
                rows=_shard_rows(tables[t].rows, index, count),
                ps=ps,
                cost=costs[t] / count,
                memory=packer.memory(t, index, count),
            )
        )
    return PlacementPlan(packer.ps, tuple(shards))


def _shard_rows(rows: int, index: int, count: int) -> int:
    """How many `r` from 0 to `rows - 1` have `r % count == index`."""
    return (rows - index + count - 1) // count


def _shards_that_fit(table: TableConfig, row_bytes: int, most: int, memory_limit: int) -> int:
    """The fewest shards of a table of which each fits on a server without other tables."""
    count = table.shards or 1
    rows = memory_limit // row_bytes
    if rows:
        count = max(count, -(-table.rows // rows))
    if not rows or count > most:
        raise ValueError(
            f"table {table.name!r}: its {table.rows * row_bytes} bytes do not fit into "
            f"memory_limit={memory_limit} bytes per PS, even in {most} shards."
        )
    return count


def _does_not_fit(tables: Sequence[TableConfig], packer: _Packer) -> ValueError:
    sizes = {
        table.name: table.rows * row_bytes
        for table, row_bytes in zip(tables, packer.row_bytes, strict=True)
    }
    largest = max(sizes, key=lambda name: sizes[name])
    return ValueError(
        f"the {len(tables)} tables take {sum(sizes.values())} bytes, the largest, {largest!r}, "
        f"{sizes[largest]}: no placement on ps={packer.ps} within "
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


def _ids(batch: Mapping[str, np.ndarray], feature: str, number: int) -> np.ndarray:
    """The ids of a feature in a batch, as one dimension."""
    if feature not in batch:
        raise ValueError(f"batch {number}: the feature {feature!r} is not among {list(batch)}.")
    ids = np.asarray(batch[feature])
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"batch {number}: the ids of the feature {feature!r} must be integers, not {ids.dtype}."
        )
    return ids.ravel()


def _check_ps(ps: object) -> None:
    if not isinstance(ps, int) or isinstance(ps, bool) or ps < 1:
        raise ValueError(f"ps={ps!r}: must be an int of at least 1.")


def _check_complete(table: str, shards: Sequence[Shard]) -> None:
    """Raises ValueError unless the shards, by index, hold each row of the table once."""
    count = len(shards)
    if [(shard.index, shard.count) for shard in shards] != [(i, count) for i in range(count)]:
        raise ValueError(
            f"table {table!r}: its shards must be all of 0 to count - 1, once each, not "
            f"{[shard.label for shard in shards]}."
        )
    rows = sum(shard.rows for shard in shards)
    if any(shard.rows != _shard_rows(rows, shard.index, count) for shard in shards):
        raise ValueError(
            f"table {table!r}: shards with {[shard.rows for shard in shards]} rows do not hold "
            f"the rows r with r % {count} == index of one table."
        )
    if len({shard.ps for shard in shards}) < count:
        raise ValueError(
            f"table {table!r}: its shards must be on different PS, not on "
            f"{[shard.ps for shard in shards]}."
        )


def _readable(size: int) -> str:
    """A number of bytes with a unit."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
