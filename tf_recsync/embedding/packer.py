"""Spreads pieces of work over parameter servers: longest processing time first, then swaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tf_recsync.embedding.placement import shard_rows

# Sums of the same costs in another order differ in their last digits.
TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the shards are, for one way of splitting the tables."""

    counts: tuple[int, ...]  # shards of each table
    places: dict[tuple[int, int], int]  # (table, index of the shard) -> parameter server
    loads: np.ndarray

    @property
    def largest(self) -> float:
        return float(self.loads.max())


@dataclasses.dataclass(frozen=True)
class Packer:
    """Distributes shards over the parameter servers; tables are known by their position."""

    rows: list[int]
    costs: list[float]
    row_bytes: list[int]
    ps: int
    memory_limit: int | None
    # The search asks for the same splits again.
    known: dict[tuple[int, ...], Packing | None] = dataclasses.field(default_factory=dict)

    def memory(self, table: int, index: int, count: int) -> int:
        """Bytes of a shard."""
        return shard_rows(self.rows[table], index, count) * self.row_bytes[table]

    def pack(self, counts: Sequence[int]) -> Packing | None:
        """The best packing found with these numbers of shards; None if none fits the memory."""
        key = tuple(counts)
        if key not in self.known:
            self.known[key] = self._pack(key)
        return self.known[key]

    def _pack(self, counts: tuple[int, ...]) -> Packing | None:
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
        return Packing(counts, dict(zip(items, place.tolist(), strict=True)), loads)

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
            allowed = result < loads[heavy] * (1 - TOLERANCE)
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
