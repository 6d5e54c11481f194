"""Which keys of a table get rows, and which lose them."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tf_recsync._checks import check_at_least

POLICIES = ("least_recent", "least_frequent")
_ROWS_OF_PARTITION, _MOST_PARTITIONS = 4096, 256
_LEAST_ROWS = 2  # One for a key, and one that stands for keys without a row.
_MOST_COUNT = 255
_MOST_CALLS = 2**40 - 1


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

    Raises:
        ValueError: If it is out of range.

    Example:
        >>> Admission(min_count=3)
        Admission(min_count=3)
    """

    min_count: int = 1

    def __post_init__(self) -> None:
        """Checks the argument."""
        check_at_least("min_count", self.min_count, 1)
        if self.min_count > _MOST_COUNT:
            raise ValueError(f"min_count must be at most {_MOST_COUNT}, got {self.min_count}")

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
    step looks up. Time is counted in batches that have keys of the table's shard, of all workers
    together.

    Args:
        policy: `"least_recent"` (the default): the one that was not looked up for the longest
            time. `"least_frequent"`: the one that was looked up least often.
        half_life: With `"least_frequent"`, after how many batches without a lookup what was
            counted of a key counts half. None (the default): it always counts.
        max_idle: After how many batches without a lookup a key is as if it had never been there:
            inference does not know it, and training gives it a row anew. None (the default): a
            key stays as long as nobody needs its row.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> Eviction("least_frequent", half_life=100_000)
        Eviction(policy='least_frequent', half_life=100000, max_idle=None)
    """

    policy: str = "least_recent"
    half_life: int | None = None
    max_idle: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, not {self.policy!r}")
        for name in ("half_life", "max_idle"):
            value = getattr(self, name)
            if value is None:
                continue
            check_at_least(name, value, 1)
            if value > _MOST_CALLS:
                raise ValueError(f"{name} must be at most {_MOST_CALLS}, got {value}")
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
