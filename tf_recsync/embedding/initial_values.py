"""The first values of a table's rows: how they are drawn, or who gives them, block by block.

Nothing here makes a whole table. Drawn values depend on a seed, the table's name, the row and the
column alone, and so are made by each server for the rows that it has (`ops.initial_rows`). Given
values are read in the order of the table's rows, a block at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.initializers.random_initializers import compute_fans

from tf_recsync.embedding.config import TableConfig, is_array
from tf_recsync.embedding.table_rows import TableRows

_KNOWN = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
    keras.initializers.RandomUniform,
    keras.initializers.RandomNormal,
    keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling,
)
_ALLOWED = (
    f"{', '.join(known.__name__ for known in _KNOWN)} and those of its family, a callable "
    "f(rows, dtype) that gives the values of some rows, or an array [rows, dimension]"
)
# The standard deviation of a standard normal distribution within two of them; Keras divides by it.
_DEVIATION_WITHIN_TWO = 0.87962566103423978


@dataclasses.dataclass(frozen=True)
class DrawnRows:
    """Values of a distribution.

    Attributes:
        distribution: its name, as `ops.initial_rows` takes it.
        parameters: its two parameters.
        seed: the initializer's, a number or a `keras.random.SeedGenerator`; None if nothing is
            random.
    """

    distribution: str
    parameters: tuple[float, float]
    seed: Any = None

    def draw_seed(self, table: str) -> int:
        """An int64 that depends on the seed and the table; a generator gives another each time."""
        seed = self.seed
        if isinstance(seed, keras.random.SeedGenerator):
            seed = [int(number) for number in np.asarray(seed.next())]
        return seed_of_table(seed, table)


def seed_of_table(seed: Any, table: str) -> int:
    """An int64 that depends on a seed and a table's name.

    Args:
        seed: whatever is written as the same text again.
        table: the name.
    """
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclasses.dataclass(frozen=True)
class GivenRows:
    """Values that an array has, or a callable gives.

    Attributes:
        table: the table.
        source: the array or the callable.
    """

    table: TableConfig
    source: Any

    def write(self, rows: TableRows) -> None:
        """Writes them into the table, in place and a block at a time.

        Raises:
            ValueError: if a callable gives something else.
        """
        for begin, end in rows.blocks():
            rows.write(begin, self._read(begin, end))

    def _read(self, begin: int, end: int) -> np.ndarray:
        table = self.table
        if is_array(self.source):
            found = self.source[begin:end]
        else:
            found = self.source(np.arange(begin, end, dtype=np.int64), table.dtype)
        values = np.asarray(found)
        expected = (end - begin, table.dimension)
        if values.shape != expected or not _is_floating(values):
            raise ValueError(
                f"table {table.name!r}: the initializer gave {values.dtype} {values.shape} for "
                f"rows {begin} to {end - 1}: must be floats {expected}, a row for each"
            )
        return np.ascontiguousarray(values, tf.as_dtype(table.dtype).as_numpy_dtype)


def first_values(table: TableConfig) -> DrawnRows | GivenRows:
    """What a table's initializer stands for.

    Args:
        table: the table.

    Raises:
        ValueError: naming the table, if its initializer is none, has arguments that make no
            sense, needs the whole table at once, or is an array of another shape or type.
    """
    initializer = table.initializer
    if is_array(initializer):
        return _given_by_array(table)
    try:
        initializer = keras.initializers.get(initializer)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"table {table.name!r}: initializer={initializer!r}: must be one of {_ALLOWED}"
        ) from error
    if isinstance(initializer, keras.initializers.Initializer):
        return _drawn(table, initializer)
    if initializer is None or _takes_shape(initializer):
        raise ValueError(
            f"table {table.name!r}: initializer={initializer!r} is made for a whole table: must be "
            f"one of {_ALLOWED}"
        )
    return GivenRows(table, initializer)


def _given_by_array(table: TableConfig) -> GivenRows:
    array = table.initializer
    shape, expected = tuple(array.shape), (table.rows, table.dimension)
    if shape != expected or not _is_floating(array):
        raise ValueError(
            f"table {table.name!r}: the initializer is an array of {array.dtype} {shape}: must be "
            f"floats {expected}, the table's rows and dimension"
        )
    return GivenRows(table, array)


def _drawn(table: TableConfig, initializer: keras.initializers.Initializer) -> DrawnRows:
    kind = next((k for k in _KNOWN if isinstance(initializer, k)), None)
    # One that computes values of its own may need the whole table for them.
    if kind is None or type(initializer).__call__ is not kind.__call__:
        raise ValueError(
            f"table {table.name!r}: initializer {type(initializer).__name__} may need the whole "
            f"table at once, which no server has: must be one of {_ALLOWED}"
        )

    def number(argument: str) -> float:
        value = getattr(initializer, argument)
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        # As the servers compute with it.
        if not np.isfinite(np.float32(found)):
            raise _wrong(table, initializer, argument, value, "must be a finite number")
        return found

    if kind is keras.initializers.Zeros:
        return DrawnRows("constant", (0.0, 0.0))
    if kind is keras.initializers.Ones:
        return DrawnRows("constant", (1.0, 0.0))
    if kind is keras.initializers.Constant:
        return DrawnRows("constant", (number("value"), 0.0))
    seed = initializer.seed
    if kind is keras.initializers.RandomUniform:
        low, high = number("minval"), number("maxval")
        if low > high:
            raise _wrong(table, initializer, "minval", low, f"must be at most maxval={high}")
        if not np.isfinite(np.float32(high) - np.float32(low)):
            allowed = f"the range to maxval={high} must be finite in float32"
            raise _wrong(table, initializer, "minval", low, allowed)
        return DrawnRows("uniform", (low, high), seed)
    if kind is keras.initializers.VarianceScaling:
        return _scaled(table, initializer, number("scale"))
    stddev = number("stddev")
    if stddev < 0:
        raise _wrong(table, initializer, "stddev", stddev, "must be at least 0")
    name = "normal" if kind is keras.initializers.RandomNormal else "truncated_normal"
    return DrawnRows(name, (number("mean"), stddev), seed)


def _scaled(table: TableConfig, initializer: Any, scale: float) -> DrawnRows:
    """Keras's VarianceScaling, by the fans of the whole table."""
    fan_in, fan_out = compute_fans(
        (table.rows, table.dimension), initializer.input_axes, initializer.output_axes
    )
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    variance = scale / max(1.0, fans[initializer.mode])
    seed = initializer.seed
    if initializer.distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return DrawnRows("uniform", (-limit, limit), seed)
    if initializer.distribution == "untruncated_normal":
        return DrawnRows("normal", (0.0, math.sqrt(variance)), seed)
    return DrawnRows("truncated_normal", (0.0, math.sqrt(variance) / _DEVIATION_WITHIN_TWO), seed)


def _wrong(table: TableConfig, initializer: Any, argument: str, value: Any, allowed: str):
    return ValueError(
        f"table {table.name!r}: {type(initializer).__name__} has {argument}={value!r}: {allowed}"
    )


def _is_floating(array: Any) -> bool:
    try:
        return tf.as_dtype(array.dtype).is_floating
    except TypeError:
        return False


def _takes_shape(function: Any) -> bool:
    """Whether it is what Keras calls an initializer function, f(shape, dtype)."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["shape"]
