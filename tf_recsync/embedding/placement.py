"""Which parameter server holds which embedding table, or which part of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_recsync._checks import check_at_least, list_of, plain_values

_VERSION = 1


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
        plain_values(self)
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


@keras.saving.register_keras_serializable(package="tf_recsync")
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
        plain_values(self)
        object.__setattr__(self, "shards", list_of("shards", self.shards, Shard))
        check_at_least("ps", self.ps, 1)
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
                return cls.from_config(content)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: not a placement plan: {error}") from error
        raise ValueError(
            f"{os.fspath(path)}: a placement plan of version {version}; this release reads "
            f"version {_VERSION}."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the plan as a dict that can be written as JSON."""
        return {"ps": self.ps, "shards": [dataclasses.asdict(shard) for shard in self.shards]}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlacementPlan:
        """Returns the plan that `get_config` described.

        Args:
            config: What `get_config` returned.

        Returns:
            A plan equal to the one described.

        Raises:
            ValueError: If it describes no valid plan.
        """
        return cls(ps=config["ps"], shards=tuple(Shard(**shard) for shard in config["shards"]))

    def __str__(self) -> str:
        loads, memory = self.loads, self.memory
        lines = [
            f"{len(self.tables)} tables in {len(self.shards)} shards on {self.ps} PS, "
            f"largest load {self.imbalance:.2f} times the mean",
            f"{'PS':>4} {'load':>12} {'memory':>12}  shards",
        ]
        for ps in range(self.ps):
            labels = ", ".join(shard.label for shard in self.shards if shard.ps == ps)
            row = f"{ps:>4} {loads[ps]:>12.6g} {readable(int(memory[ps])):>12}  {labels}"
            lines.append(row.rstrip())
        return "\n".join(lines)

    def _per_ps(self, values: Sequence[float], dtype: type) -> np.ndarray:
        total = np.zeros(self.ps, dtype)
        np.add.at(total, [shard.ps for shard in self.shards], np.asarray(values, dtype))
        return total


def shard_rows(rows: int, index: int, count: int) -> int:
    """How many `r` from 0 to `rows - 1` have `r % count == index`."""
    return (rows - index + count - 1) // count


def _check_complete(table: str, shards: Sequence[Shard]) -> None:
    """Raises ValueError unless the shards, by index, hold each row of the table once."""
    count = len(shards)
    if [(shard.index, shard.count) for shard in shards] != [(i, count) for i in range(count)]:
        raise ValueError(
            f"table {table!r}: its shards must be all of 0 to count - 1, once each, not "
            f"{[shard.label for shard in shards]}."
        )
    rows = sum(shard.rows for shard in shards)
    if any(shard.rows != shard_rows(rows, shard.index, count) for shard in shards):
        raise ValueError(
            f"table {table!r}: shards with {[shard.rows for shard in shards]} rows do not hold "
            f"the rows r with r % {count} == index of one table."
        )
    if len({shard.ps for shard in shards}) < count:
        raise ValueError(
            f"table {table!r}: its shards must be on different PS, not on "
            f"{[shard.ps for shard in shards]}."
        )


def readable(size: int) -> str:
    """A number of bytes with a unit."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
