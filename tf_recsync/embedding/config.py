"""What embedding tables and the features looked up in them look like."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from tf_recsync._checks import check_at_least

COMBINERS = ("sum", "mean", "sqrtn")
OUT_OF_RANGE = ("error", "clip", "hash")
_BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
_BYTES_PER_SLOT_ELEMENT = 4


@keras.saving.register_keras_serializable(package="tf_recsync")
@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table: its size, its first values and how its rows are combined.

    Two configurations are equal if they describe the same table; initializers are compared by
    their configuration.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1 (shards of tables on embedding PSs).

    Args:
        name: Name of the table, not empty; features refer to it.
        rows: Number of rows, at least 1.
        dimension: Elements per row, at least 1.
        initializer: First values of the rows: whatever `keras.initializers.get` takes.
            `"uniform"` by default.
        combiner: What becomes of the rows of one sample: their `"sum"` (the default), their
            `"mean"`, or their sum divided by the square root of their number (`"sqrtn"`). With
            None they are not combined: the table's features give sequences of rows.
        shards: Number of parts the table is split into, each on another parameter server, from 1
            to `rows`. None (the default) leaves it to the placement plan.
        dtype: Type of the values, `"float32"` (the default) or `"bfloat16"`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> table = TableConfig("users", rows=1000, dimension=16, combiner="mean")
        >>> table.bytes
        64000
        >>> TableConfig.from_config(table.get_config()) == table
        True
    """

    name: str
    rows: int
    dimension: int
    initializer: Any = "uniform"
    combiner: str | None = "sum"
    shards: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        _check_name("name", self.name)
        check_at_least("rows", self.rows, 1)
        check_at_least("dimension", self.dimension, 1)
        _check_choice("combiner", self.combiner, (*COMBINERS, None))
        _check_choice("dtype", self.dtype, tuple(_BYTES_PER_ELEMENT))
        if self.shards is not None:
            check_at_least("shards", self.shards, 1)
            if self.shards > self.rows:
                raise ValueError(
                    f"shards={self.shards}: must be None or at most rows={self.rows}, as a shard "
                    "needs a row."
                )

    @property
    def bytes(self) -> int:
        """Memory of the values of all rows, in bytes, without accumulators."""
        return self.rows * row_bytes(self.dimension, self.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON."""
        # Not dataclasses.asdict, which would copy an initializer object.
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        config["initializer"] = _serialized(self.initializer)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableConfig:
        """Returns the table that `get_config` described.

        Args:
            config: What `get_config` returned.

        Returns:
            A table equal to the one described.

        Raises:
            ValueError: If an argument is out of range.
        """
        config = dict(config)
        if isinstance(config.get("initializer"), dict):
            config["initializer"] = keras.saving.deserialize_keras_object(config["initializer"])
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        # Initializers of Keras are equal only to themselves, which would make a table differ
        # from its own copy after it was saved.
        if not isinstance(other, TableConfig):
            return NotImplemented
        return self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((self.name, self.rows, self.dimension, self.combiner, self.shards, self.dtype))


@keras.saving.register_keras_serializable(package="tf_recsync")
@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """One feature whose ids are looked up in an embedding table.

    Args:
        name: Name of the feature in the batches, not empty.
        table: Name of the table; several features may share one.
        out_of_range: What becomes of ids below 0 or beyond the last row. `"error"` (the default)
            rejects them; `"clip"` takes 0 for those below and the last row for those beyond;
            `"hash"` hashes all ids into the rows of the table.
        padding: A number that stands for no id, such as -1 or 0, by which lists of ids are filled
            up to one length. Where it occurs there is no id: nothing is looked up, it counts in no
            mean, and it is not out of range. With None (the default) all ids count.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> FeatureConfig("watched", table="films", padding=-1)
        FeatureConfig(name='watched', table='films', out_of_range='error', padding=-1)
    """

    name: str
    table: str
    out_of_range: str = "error"
    padding: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        _check_name("name", self.name)
        _check_name("table", self.table)
        _check_choice("out_of_range", self.out_of_range, OUT_OF_RANGE)
        is_int = isinstance(self.padding, int) and not isinstance(self.padding, bool)
        if self.padding is not None and not (is_int and -(2**63) <= self.padding < 2**63):
            raise ValueError(
                f"padding={self.padding!r}: must be None or an int from -2**63 to 2**63 - 1."
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FeatureConfig:
        """Returns the feature that `get_config` described.

        Args:
            config: What `get_config` returned.

        Returns:
            A feature equal to the one described.

        Raises:
            ValueError: If an argument is out of range.
        """
        return cls(**config)


def row_bytes(dimension: int, dtype: str, slots: int = 0, overhead: int = 0) -> int:
    """Bytes that a row takes on a parameter server.

    Args:
        dimension: Elements of the row.
        dtype: Type of the values; accumulators are float32 in any case.
        slots: Accumulators of an element.
        overhead: Bytes beside values and accumulators, such as the row's version.
    """
    return dimension * (_BYTES_PER_ELEMENT[dtype] + slots * _BYTES_PER_SLOT_ELEMENT) + overhead


def check_memory_arguments(memory_limit: int | None, slots: int, overhead: int) -> None:
    """Raises ValueError unless these arguments of planner and layer are in range."""
    for argument, value in (("bytes_per_row_overhead", overhead), ("slots", slots)):
        if value < 0:
            raise ValueError(f"{argument}={value}: must be at least 0.")
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit={memory_limit}: must be None or at least 1 byte.")


def check_configs(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> None:
    """Checks that tables and features belong together.

    Args:
        tables: At least one table, each under another name.
        features: At least one feature, each under another name; every feature needs its table
            and every table a feature.

    Raises:
        ValueError: If names occur twice, a table is missing or a table has no feature.

    Example:
        >>> check_configs([TableConfig("users", 10, 4)], [FeatureConfig("user", "users")])
        >>> check_configs([TableConfig("users", 10, 4)], [FeatureConfig("user", "items")])
        Traceback (most recent call last):
        ...
        ValueError: feature 'user': its table 'items' is not among the tables ['users'].
    """
    check_tables(tables)
    if not features:
        raise ValueError("features=[]: there must be at least one feature.")
    _check_unique("features", [feature.name for feature in features])
    names = [table.name for table in tables]
    for feature in features:
        if feature.table not in names:
            raise ValueError(
                f"feature {feature.name!r}: its table {feature.table!r} is not among the tables "
                f"{names}."
            )
    used = {feature.table for feature in features}
    for name in names:
        if name not in used:
            raise ValueError(
                f"table {name!r}: none of the features {[feature.name for feature in features]} "
                "is looked up in it; remove the table or give it a feature."
            )


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Raises ValueError unless there is at least one table and all have different names."""
    if not tables:
        raise ValueError("tables=[]: there must be at least one table.")
    _check_unique("tables", [table.name for table in tables])


def _serialized(initializer: Any) -> Any:
    """The initializer as strings, numbers and dicts; equal for equal initializers."""
    if isinstance(initializer, dict):
        # Keras takes abridged dicts too; only the object knows the full one.
        initializer = keras.initializers.deserialize(initializer)
    return keras.saving.serialize_keras_object(initializer)


def _check_name(argument: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{argument}={value!r}: must be a string that is not empty.")


def _check_choice(argument: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}={value!r}: must be one of {', '.join(map(repr, choices))}.")


def _check_unique(argument: str, names: list[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"{argument}: every name may occur once, not {twice} of {names}.")
