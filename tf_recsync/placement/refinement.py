"""Greedy refinement of a placement: units move off the device with the highest load.

Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on Large
CPU Clusters", section 3.2.1, the greedy refinement process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from tf_recsync.placement.loads import LoadModel

BALANCED = 1.1
# A step must lower the highest load by this part of it to count as progress.
PROGRESS = 1e-3
# The search starts anew from another placement until as many starts in a row were in vain.
_STARTS = 6
_CELLS = 2_000_000  # Placements times units and edges that are computed at once.

Candidates = Iterator[np.ndarray]
Moves = Callable[[np.ndarray, int], Candidates]


def refine(
    model: LoadModel,
    positions: np.ndarray,
    search_seconds: float | None,
    search_placements: int | None = None,
) -> np.ndarray:
    """Lowers the highest load of a placement that fits.

    Steps are moves of one unit off the device with the highest load, the largest improvement
    first; where none helps, moves of any unit, and then moves of two at a time. At the end the
    search starts anew from other placements. It is over when the highest load is at most 1.1
    times what it would be with all work divided evenly and no traffic, when starts were in vain
    for a while, when so many placements were tried, or when the time is up. The same arguments give
    the same placement unless the time is up.

    Returns:
        Positions that fit and whose highest load is at most that of the given ones.
    """
    search = _Search(model, search_seconds, search_placements)
    best, highest = search.descend(positions)
    enough = BALANCED * model.lower_bound()
    random = np.random.default_rng(0)
    vain = 0
    while highest > enough and vain < _STARTS and not search.over:
        start = _another_start(model, best, random)
        vain += 1
        if not model.fits(model.loads(start)):
            continue
        found, load = search.descend(start)
        if load < highest * (1 - PROGRESS):
            best, highest, vain = found, load, 0
    return best


class _Search:
    """Descents that end after some seconds or placements; None sets no limit."""

    def __init__(self, model: LoadModel, seconds: float | None, placements: int | None):
        self._model = model
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._left = placements
        self._chunk = max(_CELLS // (len(model.positions) + len(model.source)), 1)

    @property
    def over(self) -> bool:
        """Whether the time is up, or all placements were tried that may be."""
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        return is_late or (self._left is not None and self._left <= 0)

    def descend(self, positions: np.ndarray) -> tuple[np.ndarray, float]:
        """The placement that steps lead to, and its highest load, which no step raises."""
        loads = self._model.loads(positions)
        rank = float(loads.highest), float(loads.seconds.sum())
        tiers: tuple[Moves, ...] = (self._off_the_highest, self._single, self._double)
        tier = 0
        while tier < len(tiers) and not self.over:
            device = int(self._model.loads(positions).seconds.argmax())
            found = self._best(tiers[tier](positions, device), rank)
            if found is None:
                tier += 1
            else:
                positions, rank = found
                tier = 0
        return positions, rank[0]

    def _best(self, candidates: Candidates, rank: tuple[float, float]):
        """The candidate with the lowest highest load, if that is progress; then the lowest sum."""
        best, best_rank = None, (rank[0] * (1 - PROGRESS), np.inf)
        level, level_sum = None, rank[1] - PROGRESS * rank[0]
        for chunk in candidates:
            if self.over:
                break
            if self._left is not None:
                chunk = chunk[: self._left]
                self._left -= len(chunk)
            loads = self._model.loads(chunk)
            fits = self._model.fits(loads)
            highest = np.where(fits, loads.highest, np.inf)
            sums = loads.seconds.sum(-1)
            c = int(np.lexsort((sums, highest))[0])
            if (highest[c], sums[c]) < best_rank:
                best, best_rank = chunk[c], (float(highest[c]), float(sums[c]))
            # As high a load with less to do elsewhere is a way to lower ones.
            sums = np.where(highest <= rank[0], sums, np.inf)
            c = int(sums.argmin())
            if sums[c] < level_sum:
                level, level_sum = (chunk[c], (float(highest[c]), float(sums[c]))), float(sums[c])
        return level if best is None else (best, best_rank)

    def _off_the_highest(self, positions: np.ndarray, device: int) -> Candidates:
        """Moves of one unit whose operator or weights are on the device with the highest load."""
        model = self._model
        there = (model.operators(positions) == device) | (model.homes(positions) == device)
        yield from self._moved(positions, [(u, to) for u, to in self._all(positions) if there[u]])

    def _single(self, positions: np.ndarray, device: int) -> Candidates:
        """All moves of one unit."""
        del device
        yield from self._moved(positions, self._all(positions))

    def _double(self, positions: np.ndarray, device: int) -> Candidates:
        """Swaps with units on the device, and neighbors that move to one place together."""
        model = self._model
        operators = model.operators(positions)
        pairs = []
        for u in np.flatnonzero(operators == device).tolist():
            for v in np.flatnonzero(operators != device).tolist():
                to, back = int(positions[v]), int(positions[u])
                if to in model.positions[u] and back in model.positions[v]:
                    pairs.append((u, to, v, back))
        for u, v in zip(model.source.tolist(), model.target.tolist(), strict=True):
            if device in (operators[u], operators[v]):
                pairs.extend(
                    (u, a, v, b)
                    for a in model.positions[u]
                    for b in model.positions[v]
                    if min(a, model.servers) == min(b, model.servers)
                )
        yield from self._moved(positions, pairs)

    def _all(self, positions: np.ndarray) -> list[tuple[int, int]]:
        return [
            (u, to)
            for u, own in enumerate(self._model.positions)
            for to in own
            if to != positions[u]
        ]

    def _moved(self, positions: np.ndarray, moves: list[tuple[int, ...]]) -> Candidates:
        """The placements after moves, each of one unit after the other and where it goes."""
        for first in range(0, len(moves), self._chunk):
            chunk = np.array(moves[first : first + self._chunk], np.int64)
            candidates = np.repeat(positions[None], len(chunk), 0)
            rows = np.arange(len(chunk))
            for column in range(0, chunk.shape[1], 2):
                candidates[rows, chunk[:, column]] = chunk[:, column + 1]
            yield candidates


def _another_start(model: LoadModel, best: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The best placement with some units elsewhere, or regions of the graph put anywhere."""
    count = len(best)
    start = best.copy()
    if random.random() < 0.5:
        chosen = random.random(count) < random.uniform(0.1, 0.6)
        for u in np.flatnonzero(chosen):
            start[u] = random.choice(model.positions[u])
        return start
    # Edges joined at random make regions; of each, all units go where the first one may.
    region = np.arange(count)
    for e in np.flatnonzero(random.random(len(model.source)) < random.uniform(0.2, 0.9)):
        a, b = region[model.source[e]], region[model.target[e]]
        region[region == b] = a
    wanted = random.integers(0, model.servers + 1, count)
    for u in range(count):
        device = wanted[region[u]]
        own = [p for p in model.positions[u] if min(p, model.servers) == device]
        start[u] = random.choice(own or model.positions[u])
    return start
