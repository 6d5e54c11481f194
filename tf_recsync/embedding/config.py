"""What embedding tables and the features looked up in them look like."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_recsync._checks import (
    check_at_least,
    check_text,
    number,
    plain_values,
)
from tf_recsync.embedding.key_rules import (
    Admission,
    Eviction,
    check_keyed,
    key_bytes,
    shards_for,
)

COMBINERS = ("sum", "mean", "sqrtn")
OUT_OF_RANGE = ("error", "clip", "hash")
UNKNOWN = ("zeros", "trained", "mean")
_PARTS = {
    "admission": Admission,
    "eviction": Eviction,
    "optimizer": keras.optimizers.Optimizer,
}
_BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
_BYTES_PER_SLOT_ELEMENT = 4
_MOST_BYTES = 2**63 - 1  # Of a table: what its plan counts in.
_MOST_DESCRIBED = 1 << 20  # Bytes of an array that is written into a configuration, in digits.


@keras.saving.register_keras_serializable(package="tf_recsync")
@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table: its size, its first values and how its rows are combined.

    Two configurations are equal if they describe the same table; initializers are compared by
    their configuration, arrays and callables without one, such as `functools.partial`, by identity.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1 (shards of tables on embedding PSs).

    Args:
        name: Name of the table, not empty; features refer to it.
        rows: Number of rows, at least 1.
        dimension: Elements per row, at least 1.
        initializer: First values of the rows, in one of three forms; see below. `"uniform"` by
            default.
        combiner: What becomes of the rows of one sample: their `"sum"` (the default), their
            `"mean"`, or their sum divided by the square root of their number (`"sqrtn"`). With
            None they are not combined: the table's features give sequences of rows.
        shards: Number of parts the table is split into, each on another parameter server, from 1
            to `rows`. None (the default) leaves it to the placement plan.
        dtype: Type of the values, `"float32"` (the default) or `"bfloat16"`, half of the memory.
            Updates compute in float32, with float32 accumulators, and are rounded up or down at
            random, so that on average nothing is lost; the optimizer's `seed` decides how.
        keys: `"any"` for a table whose ids are keys: any int64, or strings, that nobody has
            numbered. None (the default): ids are the numbers of rows. See below.
        admission: An `Admission`, which keys get rows. None (the default): all.
        eviction: An `Eviction`, which key loses its row when the table is full. None (the
            default): the one that was not looked up for the longest time.
        unknown: What keys without a row are looked up as: `"zeros"` (the default);
            `"trained"`, a row of the table that all of them train together, and that begins as
            zeros; or `"mean"`, the mean of the rows that have keys, see below. With `"zeros"` and
            `"mean"`, the gradients of such keys are left out.
        optimizer: The optimizer that trains this table, with its own learning rate, staleness
            policy and SWAP. None (the default): that of the model. The tables of a layer that have
            equal ones are trained by the first of them. The model must be compiled with
            `recsync.optimizers.per_table`.

    The rows get their first values where they lie, a block of rows at a time, so that nobody needs
    memory for the whole table. Values are the same however the table is divided, and in one
    process. `initializer` is

    - one of Keras's Zeros, Ones, Constant, RandomUniform, RandomNormal, TruncatedNormal and
      VarianceScaling with its family (GlorotUniform, HeNormal and others), as an object, a name or
      a configuration. Servers draw the values, which depend on the initializer's seed, the table's
      name, row and column: other numbers than Keras would draw, of the same distribution. Tables
      of other names differ under the same seed, and `keras.utils.set_random_seed` decides where
      none is given. Fans are those of the whole table, `rows` and `dimension`.
    - a callable `f(rows, dtype)` that gives the values of some rows: `rows` is an int64 array of
      their numbers, `dtype` the table's, and the result an array or a tensor of floats `[len(rows),
      dimension]`. It is called in this process, for blocks of 16 MB in the table's order, each
      row once.
    - an array of floats `[rows, dimension]`, such as pretrained vectors: whatever has `shape` and
      `dtype` and gives rows for a slice, as arrays and memory maps of NumPy and data sets of h5py
      do. It is read in such blocks, too, which travel to the servers one by one.

    Whatever else needs the whole table at once, or may, is refused by name when a layer is made of
    the table: Orthogonal, Identity, an `Initializer` with a `__call__` of its own, and Keras's
    functions `f(shape, dtype)`. Write such a one as `f(rows, dtype)`.

    With keys, `rows` is how many keys the table has room for, but for a few that stand for keys
    without a row: one below 8,192 rows, and from there on a power of two, at most one in 4,096 and
    at most 256 in all. Training gives each new key that is admitted a
    row, with first values that depend on the initializer's seed and the key alone. When a table is
    full, as a whole or, from 8,192 rows on, in one of its partitions (which happens at 95 to 100 %
    of all rows), another key loses its row for that: its vector and all that the optimizer keeps
    beside it are gone, and gradients that are still on their way to it are left out. Evaluation
    and prediction change nothing. Strings are keys by their 64-bit hash (farmhash64, as
    `tf.fingerprint` has it): of n different strings, two have the same key with a probability of
    n * n / 3.7e19, 0.002 % for 30 million. `initializer` must be one that draws values. The number
    of shards is a power of two: by default the largest up to the number of servers. SWAP and weight
    decay begin with a key's row. An optimizer of Keras itself, in one process, does not know that a
    row was given to another key, and goes on with what it keeps beside it.

    With `unknown="mean"`, each shard has a mean of its own rows, of those whose keys have not
    expired. The mean is zeros at first. Each lookup in training goes on with a pass over the rows,
    by as many rows as the lookup has keys, and at least 16; eight rows without a key count as one.
    When the pass has come to the end, keys without a row are looked up as the mean of what the pass
    has met, and the next lookup begins a pass anew. So no part of a mean is older than two passes,
    and where a batch has more keys than the table has rows, each batch makes the mean anew.
    `write_keys` does so, too.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> table = TableConfig("users", rows=1000, dimension=16, combiner="mean")
        >>> table.bytes
        64000
        >>> TableConfig.from_config(table.get_config()) == table
        True

        Each row begins with its number:

        >>> import numpy as np
        >>> from tf_recsync.layers import EmbeddingCollection
        >>> numbered = TableConfig(
        ...     "numbered", rows=4, dimension=2,
        ...     initializer=lambda rows, dtype: np.repeat(rows[:, None], 2, axis=1).astype(dtype),
        ... )
        >>> layer = EmbeddingCollection([numbered], [FeatureConfig("number", "numbered")])
        >>> layer.build()
        >>> layer.table_values("numbered")[:, 0]
        array([0., 1., 2., 3.], dtype=float32)
    """

    name: str
    rows: int
    dimension: int
    initializer: Any = "uniform"
    combiner: str | None = "sum"
    shards: int | None = None
    dtype: str = "float32"
    keys: str | None = None
    admission: Admission | None = None
    eviction: Eviction | None = None
    unknown: str = "zeros"
    optimizer: keras.optimizers.Optimizer | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        plain_values(self)
        check_text("name", self.name)
        check_at_least("rows", self.rows, 1)
        check_at_least("dimension", self.dimension, 1)
        _check_choice("combiner", self.combiner, (*COMBINERS, None))
        object.__setattr__(self, "dtype", _name_of(self.dtype))
        _check_choice("dtype", self.dtype, tuple(_BYTES_PER_ELEMENT))
        if self.bytes > _MOST_BYTES:
            raise ValueError(
                f"rows={self.rows} of dimension={self.dimension} in table {self.name!r}: must be "
                f"less than 2**63 bytes, not {self.bytes:.1e}. For raw or hashed ids, give the "
                "table keys='any', and as many rows as there is memory for."
            )
        if self.shards is not None:
            check_at_least("shards", self.shards, 1)
            if self.shards > self.rows:
                raise ValueError(
                    f"shards={self.shards}: must be None or at most rows={self.rows}, as a shard "
                    "needs a row."
                )
        _check_choice("keys", self.keys, ("any", None))
        _check_choice("unknown", self.unknown, UNKNOWN)
        for name, kind in _PARTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name}={value!r}: must be None or an {kind.__name__}.")
        if self.keys is not None:
            check_keyed(self)
            return
        for name, default in (("admission", None), ("eviction", None), ("unknown", "zeros")):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be {default!r} without keys='any'."
                )

    def on_servers(self, ps: int) -> TableConfig:
        """The same table with the number of shards that it has on so many parameter servers.

        Where there is a choice, a plan makes it: for tables without keys.
        """
        if self.keys is None or self.shards is not None:
            return self
        return dataclasses.replace(self, shards=shards_for(self.rows, ps))

    @property
    def key_bytes(self) -> int:
        """Bytes of a row at most for its key and what finds it; 0 without keys."""
        return key_bytes(self.admission) if self.keys else 0

    @property
    def bytes(self) -> int:
        """Memory of the values of all rows, in bytes, without accumulators and keys."""
        return self.rows * row_bytes(self.dimension, self.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON.

        A callable is described as Keras describes functions: to read the description, it has to be
        registered by `keras.saving.register_keras_serializable`.

        Raises:
            ValueError: If the initializer is an array of more than 1 MiB, which has no place
                there, or a callable that Keras cannot describe, such as a functools.partial.
        """
        if is_array(self.initializer) and _size(self.initializer) > _MOST_DESCRIBED:
            raise ValueError(
                f"table {self.name!r}: initializer is an array of {_size(self.initializer)} bytes, "
                f"too large for a configuration, which may have {_MOST_DESCRIBED}. Give the table "
                "a callable f(rows, dtype) registered by "
                "keras.saving.register_keras_serializable that reads the array, or save the "
                "weights alone."
            )
        try:
            initializer = _serialized(self.initializer)
        except TypeError as error:
            raise ValueError(
                f"table {self.name!r}: initializer {self.initializer!r} has no configuration. Give "
                "the table a function f(rows, dtype) registered by "
                "keras.saving.register_keras_serializable, or save the weights alone."
            ) from error
        return self._described(initializer)

    def _described(self, initializer: Any) -> dict[str, Any]:
        """The arguments, with something in the initializer's place."""
        # Not dataclasses.asdict, which would copy an initializer object.
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {name: config[name] for name in _PARTS if config[name] is not None}
        parts = {n: keras.saving.serialize_keras_object(part) for n, part in given.items()}
        return {**config, **parts, "initializer": initializer}

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
        for name in ("initializer", *_PARTS):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        # Objects of Keras are equal only to themselves, which would make a table differ from its
        # own copy after it was saved.
        if not isinstance(other, TableConfig):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return all(_are_equal(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        own = (self.name, self.rows, self.dimension, self.combiner, self.shards, self.dtype)
        return hash((*own, self.keys, self.admission, self.eviction, self.unknown))


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
            up to one length; of strings, such as "", a string. Where it occurs there is no id:
            nothing is looked up, it counts in no mean, and it is not out of range. With None (the
            default) all ids count.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> FeatureConfig("watched", table="films", padding=-1)
        FeatureConfig(name='watched', table='films', out_of_range='error', padding=-1)
    """

    name: str
    table: str
    out_of_range: str = "error"
    padding: int | str | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        plain_values(self)
        check_text("name", self.name)
        check_text("table", self.table)
        _check_choice("out_of_range", self.out_of_range, OUT_OF_RANGE)
        if isinstance(self.padding, str):
            return
        is_int = isinstance(self.padding, int) and not isinstance(self.padding, bool)
        if self.padding is not None and not (is_int and -(2**63) <= self.padding < 2**63):
            raise ValueError(
                f"padding={self.padding!r}: must be None, a str, or an int from -2**63 to 2**63 - "
                "1."
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


def checked_memory_limit(memory_limit: float | None, slots: int, overhead: int) -> int | None:
    """The bytes of a server, of these arguments of planner and layer; None if they are no limit.

    Raises:
        ValueError: If one of them is out of range.
    """
    check_at_least("bytes_per_row_overhead", overhead, 0)
    check_at_least("slots", slots, 0)
    if memory_limit is None:
        return None
    allowed = "None or a number of bytes, at least 1"
    limit = number("memory_limit", memory_limit, least=1, infinite=True, allowed=allowed)
    return None if limit == math.inf else math.floor(limit)


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
    in_files: dict[str, str] = {}
    for name in names:
        for own in (name_in_files(name), name_in_files(keys_of(name))):
            other = in_files.setdefault(own, name)
            if other != name:
                raise ValueError(
                    f"tables {other!r} and {name!r}: in files {own!r} stands for one of them, or "
                    "for its keys; give one of them another name."
                )
    for feature in features:
        if feature.table not in names:
            raise ValueError(
                f"feature {feature.name!r}: its table {feature.table!r} is not among the tables "
                f"{names}."
            )
        table = next(table for table in tables if table.name == feature.table)
        if table.keys is not None and feature.out_of_range != "error":
            raise ValueError(
                f"feature {feature.name!r}: out_of_range={feature.out_of_range!r} must be 'error', "
                f"as no key is out of range in table {table.name!r}, which has keys='any'."
            )
        if table.keys is None and isinstance(feature.padding, str):
            raise ValueError(
                f"feature {feature.name!r}: padding={feature.padding!r} must be None or an int, as "
                f"the ids of table {table.name!r} are no strings."
            )
    used = {feature.table for feature in features}
    for name in names:
        if name not in used:
            raise ValueError(
                f"table {name!r}: none of the features {[feature.name for feature in features]} "
                "is looked up in it; remove the table or give it a feature."
            )


def keys_of(table: str) -> str:
    """By which name a layer saves the keys of a table."""
    return f"{table}:keys"


def name_in_files(name: str) -> str:
    """By which name a file of weights has something; a slash would begin a group there."""
    return name.replace("/", "|")


def sharing_optimizers(tables: Sequence[TableConfig]) -> list[TableConfig]:
    """The same tables; those whose optimizers are equal have the first of these."""
    known: list[tuple[Any, keras.optimizers.Optimizer]] = []
    shared = []
    for table in tables:
        if table.optimizer is not None:
            own, config = table.optimizer, _config_of(table.optimizer)
            found = next(
                (one for other, one in known if one is own or (config and other == config)), None
            )
            if found is None:
                known.append((config, own))
            elif found is not own:
                table = dataclasses.replace(table, optimizer=found)
        shared.append(table)
    return shared


def trained_together(tables: Sequence[TableConfig]) -> list[list[str]]:
    """The names of the tables of each optimizer of their own."""
    groups: dict[int, list[str]] = {}
    for table in tables:
        if table.optimizer is not None:
            groups.setdefault(id(table.optimizer), []).append(table.name)
    return list(groups.values())


def with_optimizers_of(
    tables: Sequence[TableConfig], together: Sequence[Sequence[str]]
) -> list[TableConfig]:
    """The same tables; those that are trained together have the optimizer of their first one.

    Args:
        tables: the tables.
        together: what `trained_together` gave: what is equal later need not have been at first.
    """
    by_name = {table.name: table for table in tables}
    first = {name: by_name[names[0]].optimizer for names in together for name in names}
    return [dataclasses.replace(t, optimizer=first.get(t.name, t.optimizer)) for t in tables]


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Raises ValueError unless there is at least one table and all have different names."""
    if not tables:
        raise ValueError("tables=[]: there must be at least one table.")
    _check_unique("tables", [table.name for table in tables])


def is_array(initializer: Any) -> bool:
    """Whether a table's initializer has its rows, and does not make them."""
    has = all(hasattr(initializer, name) for name in ("shape", "dtype", "__getitem__"))
    return has and not callable(initializer)


def _size(array: Any) -> int:
    return math.prod(array.shape) * tf.as_dtype(array.dtype).size


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two arguments of tables are the same, or have the same configuration."""
    if one is other:
        return True
    if is_array(one) or is_array(other):
        return False  # What is in them is not compared, which may be as large as a table.
    config = _config_of(one)
    return config is not None and config == _config_of(other)


def _config_of(argument: Any) -> Any:
    """What Keras writes of an initializer or an optimizer; None if it has no configuration."""
    try:
        return _serialized(argument)
    except (NotImplementedError, TypeError, ValueError):
        return None  # As of a function that isn't registered, or a schedule without `get_config`.


def _name_of(dtype: Any) -> Any:
    """The name of a type of NumPy, TensorFlow or Keras; whatever else is given, as it is."""
    try:
        return dtype if dtype is None else keras.backend.standardize_dtype(dtype)
    except ValueError:
        return dtype


def _serialized(initializer: Any) -> Any:
    """The initializer as strings, numbers and dicts; equal for equal initializers."""
    if is_array(initializer):
        initializer = np.array(initializer[:])
    if isinstance(initializer, dict):
        # Keras takes abridged dicts too; only the object knows the full one.
        initializer = keras.initializers.deserialize(initializer)
    return keras.saving.serialize_keras_object(initializer)


def _check_choice(argument: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}={value!r}: must be one of {', '.join(map(repr, choices))}.")


def _check_unique(argument: str, names: list[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"{argument}: every name may occur once, not {twice} of {names}.")
