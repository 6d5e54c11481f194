"""Which keys of a table get rows, and which lose them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import keras
import numpy as np

from tf_recsync._checks import check_at_least, check_seconds, integer, number, plain_values

POLICIES = ("least_recent", "least_frequent")
UNITS = ("steps", "seconds")
_ROWS_OF_PARTITION, _MOST_PARTITIONS = 4096, 256
_LEAST_ROWS = 2  # One for a key, and one that stands for keys without a row.
_MOST_COUNT = 255
# Of cc/engine/key_table.h and cc/kernels/key_kernels.cc.
_MOST_TICKS = 2**40 - 1
_TICKS_OF_SECOND, _FIRST_SECOND = 1024, 1577836800


@keras.saving.register_keras_serializable(package="tf_recsync")
@dataclasses.dataclass(frozen=True)
class Admission:
    """When a key gets a row of its table: when training has looked it up often enough.

    How often is counted in a sketch beside the table, of 16 to 32 bytes for each row, in which
    keys share counters. After as many lookups of keys without a row as it has counters in one of
    its four arrays, at least four times the rows of the table, all counts are halved. Between two
    halvings no key is admitted late; and even if no key comes twice, fewer than one in five is
    counted once too often, and two in ten thousand more than that. Counts are not saved.

    Args:
        min_count: How often the key must have been looked up, this time included, from 1 to 255.
            1 (the default) admits every key at once.
        probability: With which a key is admitted then, at each lookup, above 0. 1 (the default)
            admits all. It needs no sketch: with `Admission(probability=0.1)`, keys are admitted at
            their tenth lookup on average.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> Admission(min_count=3)
        Admission(min_count=3, probability=1.0)
    """

    min_count: int = 1
    probability: float = 1.0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        plain_values(self)
        integer("min_count", self.min_count, 1, _MOST_COUNT)
        # Servers compute with float32, in which less would be 0.
        least = float(np.finfo(np.float32).smallest_subnormal)
        allowed = "a number above 0 and at most 1"
        number("probability", self.probability, least=least, most=1, allowed=allowed)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Admission:
        """Returns what `get_config` described."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tf_recsync")
@dataclasses.dataclass(frozen=True)
class Eviction:
    """Which key loses its row when another one needs it, and which are forgotten.

    The key that leaves is the worst of 32 rows that are drawn at random, never one that the same
    step looks up.

    Args:
        policy: `"least_recent"` (the default): the one that was not looked up for the longest
            time. `"least_frequent"`: the one that was looked up least often.
        half_life: With `"least_frequent"`, after how long without a lookup what was counted of a
            key counts half. None (the default): it always counts.
        max_idle: After how long without a lookup a key is as if it had never been there: inference
            does not know it, and training gives it a row anew. None (the default): a key stays as
            long as nobody needs its row.
        unit: What these count: `"steps"` (the default), the batches that have keys of the table's
            shard, of all workers together, or `"seconds"` by the servers' clocks, which go on
            while nobody trains. A file of a table belongs into tables of the same unit.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> Eviction(max_idle=30 * 24 * 3600, unit="seconds").max_idle
        2592000
    """

    policy: str = "least_recent"
    half_life: float | None = None
    max_idle: float | None = None
    unit: str = "steps"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        plain_values(self)
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, not {self.policy!r}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, not {self.unit!r}")
        for name in ("half_life", "max_idle"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.unit == "steps":
                check_at_least(name, value, 1)
            else:
                check_seconds(name, value)
            if value > _MOST_TICKS // _TICKS_OF_SECOND:
                raise ValueError(
                    f"{name} must be at most {_MOST_TICKS // _TICKS_OF_SECOND}, got {value}"
                )
        if self.half_life is not None and self.policy != "least_frequent":
            raise ValueError(
                f"half_life must be None with policy={self.policy!r}, not {self.half_life}: only "
                "'least_frequent' counts lookups"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Eviction:
        """Returns what `get_config` described."""
        return cls(**config)

    @property
    def keeps_time(self) -> bool:
        """Whether it counts seconds."""
        return self.unit == "seconds"

    def ticks(self, name: str) -> int:
        """One of the arguments as servers count it; 0 for None."""
        value = getattr(self, name) or 0
        return max(int(value * _TICKS_OF_SECOND), 1) if value and self.keeps_time else int(value)

    def now(self) -> int:
        """The least that the tick of a call would be now."""
        return int((time.time() - _FIRST_SECOND) * _TICKS_OF_SECOND) if self.keeps_time else 0


def partitions_of(rows: int) -> int:
    """Into how many partitions the keys of a table with so many rows fall, a power of two.

    It depends on the rows alone, so that keys keep their rows however the table is divided.
    """
    return min(_power_of_two(max(rows // _ROWS_OF_PARTITION, 1)), _MOST_PARTITIONS)


def shards_for(rows: int, servers: int) -> int:
    """How many shards a table with keys has on so many servers: a power of two."""
    return min(_power_of_two(servers), partitions_of(rows))


def key_bytes(admission: Admission | None) -> int:
    """Bytes of a row at most for its key and its usage, what finds it, and counts of others."""
    return 16 + 16 + (32 if admission is not None and admission.min_count > 1 else 0)


def check_keyed(table: Any) -> None:
    """Raises a ValueError if a table with keys can't be as a `TableConfig` says."""
    if table.rows < _LEAST_ROWS:
        raise ValueError(f"rows={table.rows}: a table with keys needs at least {_LEAST_ROWS}.")
    most = partitions_of(table.rows)
    if table.shards is not None and (table.shards & (table.shards - 1) or table.shards > most):
        raise ValueError(
            f"shards={table.shards}: must be None or a power of two up to {most} for a table with "
            f"keys and rows={table.rows}."
        )


def _power_of_two(most: int) -> int:
    """The largest one up to a number."""
    return 1 << (most.bit_length() - 1)
