"""Reads row groups of Parquet files into arrays, in whatever process a pipeline runs."""

from __future__ import annotations

import dataclasses
import decimal
import json
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.data import _features, _python_ops, _skipped, _text
from tf_recsync.data.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class ParquetFile:
    """A Parquet file.

    Args:
        path: The file.
        groups: The number of rows of each row group.
        timestamp_is_text: Whether the column with the times has texts.
    """

    path: str
    groups: tuple[int, ...]
    timestamp_is_text: bool = False

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(self.groups)


def import_pyarrow() -> ModuleType:
    """Returns `pyarrow`, with its parts for Parquet.

    Raises:
        ImportError: If it is not installed; the message says how to install it.
    """
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "Parquet files are read by pyarrow, which is not installed here: "
            "pip install 'tf_recsync[parquet]', where readers run, too."
        ) from error
    return pyarrow


def inspect(path: str, schema: Schema) -> ParquetFile:
    """Reads what a file says of itself at its end.

    Args:
        path: The file.
        schema: The columns that it must have.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If it is no Parquet file, has no rows, or lacks a column or has it with another
            type; the message names the file and the column.
    """
    pa = import_pyarrow()
    _text.folder_values(path, schema.partitions)
    try:
        with pa.parquet.ParquetFile(path) as file:
            metadata, columns = file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        _require_content(error, path)
        raise ValueError(f"The file {path!r} is no Parquet file, or truncated: {error}") from error
    groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if not sum(groups):
        raise ValueError(f"The file {path!r} has no rows; every file must have at least one.")
    for names, fits, what in (
        (schema.numbers, _is_number, "numbers"),
        (schema.texts, _is_text_like, "texts, numbers, dates or booleans"),
        ([c.name for c in schema.multi_hot], _is_list(_is_text_like), "lists of texts or numbers"),
        ([str(c.weights) for c in schema.weighted], _is_list(_is_number), "lists of numbers"),
        ([] if schema.timestamp is None else [schema.timestamp], _is_time, "times or numbers"),
    ):
        for name in names:
            if name in schema.partitions:
                continue
            places = columns.get_all_field_indices(name)
            if len(places) != 1:
                raise ValueError(
                    f"The file {path!r} has {len(places)} columns {name!r}; it must have one, and "
                    f"has {columns.names}."
                )
            found = columns.field(places[0]).type
            is_needed = name in (*schema.labels, schema.weight, schema.timestamp)
            if (is_needed and pa.types.is_null(found)) or not fits(pa.types, found):
                raise ValueError(
                    f"The column {name!r} of the file {path!r} has the type {found}; it must have "
                    f"{what}."
                )
    is_text = schema.timestamp in schema.partitions
    if schema.timestamp is not None and not is_text:
        is_text = _is_text(pa.types, columns.field(schema.timestamp).type)
    return ParquetFile(path, groups, is_text)


def _is_number(types: Any, found: pa.DataType) -> bool:
    return (
        types.is_null(found)  # All values are missing, and what wrote the file knew no other type.
        or types.is_integer(found)
        or types.is_floating(found)
        or types.is_decimal(found)
        or types.is_boolean(found)
    )


def _is_text(types: Any, found: pa.DataType) -> bool:
    return any(
        is_kind(found)
        for is_kind in (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
            types.is_fixed_size_binary,
        )
    )


def _is_text_like(types: Any, found: pa.DataType) -> bool:
    if types.is_dictionary(found):
        found = found.value_type
    return _is_text(types, found) or _is_number(types, found) or types.is_date(found)


def _is_time(types: Any, found: pa.DataType) -> bool:
    is_time = types.is_timestamp(found) or types.is_date(found)
    return is_time or _is_text(types, found) or _is_number(types, found)


def _is_list(fits: Any) -> Any:
    def fits_list(types: Any, found: pa.DataType) -> bool:
        is_list = any(
            is_kind(found)
            for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)
        )
        return types.is_null(found) or (is_list and fits(types, found.value_type))

    return fits_list


def read_columns(
    schema: Schema,
    timestamp_is_text: bool,
    skips: bool,
    counter: str,
    place: tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor],
) -> _features.Columns:
    """Reads the rows of a row group, in a graph.

    Args:
        schema: The columns to read.
        timestamp_is_text: See `ParquetFile`.
        skips: Whether a row group that can't be read is left out, and raises no error.
        counter: Counts its rows.
        place: The path of a file, the number of a row group, and its first row and the one behind
            its last row that are wanted: a string and int64 scalars.

    Returns:
        The columns; numbers in names of folders are absent.
    """
    request = {
        "numbers": schema.numbers,
        "texts": schema.texts,
        "lists": [column.name for column in schema.multi_hot],
        "weights": [str(column.weights) for column in schema.weighted],
        "timestamp": schema.timestamp,
        "timestamp_is_text": timestamp_is_text,
        "partitions": schema.partitions,
        "counter": counter if skips else "",
    }
    text = [(tf.string, [None]), (tf.int32, [None])]
    splits = [(tf.int64, [None])]
    kinds = [(tf.float32, [None, len(schema.numbers)])]
    kinds += text * len(schema.texts) + (text + splits) * len(schema.multi_hot)
    kinds += [(tf.float32, [None]), *splits] * len(schema.weighted)
    if schema.timestamp is not None:
        kinds += text if timestamp_is_text else [(tf.float64, [None])]
    types = [dtype for dtype, _ in kinds]
    arrays = iter(_python_ops.call("read_parquet", [json.dumps(request), *place], types))

    def following() -> tf.Tensor:
        tensor = next(arrays)
        tensor.set_shape(next(shapes))
        return tensor

    shapes = iter([shape for _, shape in kinds])
    numbers = following()
    texts = {name: _features.Texts(following(), following()) for name in schema.texts}
    lists = {
        column.name: (_features.Texts(following(), following()), following())
        for column in schema.multi_hot
    }
    weights = {str(column.weights): (following(), following()) for column in schema.weighted}
    seconds: tf.Tensor | _features.Texts | None = None
    if schema.timestamp is not None:
        seconds = following()
        seconds = _features.Texts(seconds, following()) if timestamp_is_text else seconds
    absent = tf.math.is_nan(numbers)
    numbers = tf.where(absent, 0.0, numbers)
    return _features.Columns(numbers, absent, texts, lists, weights, seconds)


@_python_ops.register("read_parquet")
def _read_parquet(
    request: bytes, path: bytes, group: np.ndarray, first: np.ndarray, last: np.ndarray
) -> list[np.ndarray]:
    """Returns the arrays that `read_columns` wants; a number that is not there is NaN."""
    pa = import_pyarrow()
    wanted = json.loads(request)
    name, first, last = path.decode(), int(first), int(last)
    partitions = dict(
        zip(wanted["partitions"], _text.folder_values(name, wanted["partitions"]), strict=True)
    )
    try:
        table = _read_group(pa, wanted, name, int(group), partitions).slice(first, last - first)
        columns = {column: table[column] for column in table.column_names}
        arrays = _arrays(pa, wanted, columns, partitions, len(table))
    except (pa.ArrowException, OSError) as error:
        _require_content(error, name)
        problem = f"malformed row group {int(group) + 1} in {name}: {error}"
        if not wanted["counter"]:
            raise ValueError(problem) from error
        logging.warning("%s", problem)
        _skipped.add(wanted["counter"], [name] * (last - first))
        return _arrays(pa, wanted, {}, {}, 0)
    if len(table) < last - first:
        raise _changed(name, f"row group {int(group) + 1} has fewer rows")
    return arrays


def _require_content(error: Exception, path: str) -> None:
    """Raises an error anew that says nothing of what is in a file, like that it is not there."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, OSError) and error.errno is not None:
        raise OSError(error.errno, f"{error.strerror} (reading {path!r})") from error


def _changed(path: str, what: str) -> ValueError:
    return ValueError(
        f"The file {path!r} has changed since its rows were counted, or this copy of it is "
        f"another: {what}."
    )


def _read_group(
    pa: ModuleType, wanted: dict, path: str, group: int, partitions: dict[str, str]
) -> pa.Table:
    """Returns the wanted columns of a row group.

    Raises:
        ValueError: If the file no longer has the row group or a column; the message names it.
    """
    names = [*wanted["numbers"], *wanted["texts"], *wanted["lists"], *wanted["weights"]]
    names += [wanted["timestamp"]] if wanted["timestamp"] is not None else []
    names = [name for name in dict.fromkeys(names) if name not in partitions]
    # Texts come as they are in the file: each different one once, and for each row its number.
    texts = [name for name in wanted["texts"] if name not in partitions]
    try:
        file = pa.parquet.ParquetFile(path, read_dictionary=texts)
    except (pa.ArrowException, OSError) as error:
        _require_content(error, path)
        raise _changed(path, f"it is no Parquet file ({error})") from error
    with file:
        if group >= file.num_row_groups:
            raise _changed(path, f"it has only {file.num_row_groups} row groups")
        table = file.read_row_group(group, columns=names, use_threads=False)
    for name in names:
        if name not in table.column_names:
            raise _changed(path, f"it has no column {name!r}")
    return table


def _arrays(
    pa: ModuleType, wanted: dict, columns: dict, partitions: dict[str, str], rows: int
) -> list[np.ndarray]:
    """Returns the arrays of columns; empty ones of those that are not there."""

    def column(name: str) -> pa.Array:
        if name in partitions:
            texts = pa.array([partitions[name]])
            return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), texts)
        return _whole(columns[name]) if name in columns else pa.nulls(0)

    numbers = np.full([rows, len(wanted["numbers"])], np.nan, np.float32)
    for place, name in enumerate(wanted["numbers"]):
        if name not in partitions:
            numbers[:, place] = _floats(pa, column(name))
    arrays = [numbers]
    for name in wanted["texts"]:
        arrays += _texts(pa, column(name))
    for name in wanted["lists"]:
        values, splits = _flat(pa, column(name))
        arrays += [*_texts(pa, values), splits]
    for name in wanted["weights"]:
        values, splits = _flat(pa, column(name))
        arrays += [_floats(pa, values), splits]
    if wanted["timestamp"] is not None:
        times = column(wanted["timestamp"])
        arrays += _texts(pa, times) if wanted["timestamp_is_text"] else [_seconds(pa, times)]
    return arrays


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Returns the pieces of a column as one array."""
    return column.unify_dictionaries().combine_chunks()


def _floats(pa: ModuleType, values: pa.Array) -> np.ndarray:
    """Returns float32 `[n]`, NaN where there is none."""
    return values.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)


def _texts(pa: ModuleType, values: pa.Array) -> list[np.ndarray]:
    """Returns the different texts, bytes `[m]`, and for each value which it is, int32 `[n]`."""
    if not isinstance(values, pa.DictionaryArray):
        values = values.dictionary_encode()
    texts = values.dictionary
    if pa.types.is_floating(texts.type):
        different = [_text_of_float(value) for value in texts.to_numpy(zero_copy_only=False)]
    elif pa.types.is_decimal(texts.type):
        different = [_text_of_decimal(value) for value in texts.to_pylist()]
    else:
        if not _is_text(pa.types, texts.type):
            texts = texts.cast(pa.string())
        different = [text or b"" for text in texts.cast(pa.binary()).to_numpy(zero_copy_only=False)]
    numbers = values.indices.fill_null(len(different)).to_numpy(zero_copy_only=False)
    # What is not there has a text, too.
    return [np.array([*different, b""], object), numbers.astype(np.int32, copy=False)]


def _text_of_float(value: np.floating) -> bytes:
    """Returns the shortest text that stands for a number and no other; an empty one for NaN.

    It is that which `TfRecord` makes in a graph: whole numbers have no decimals.
    """
    if np.isnan(value):
        return b""
    if abs(float(value)) < _features.LARGEST_WHOLE and float(value).is_integer():
        return b"%d" % int(value)
    kind = type(value)
    digits = np.finfo(kind).precision
    while kind(text := f"{value:.{digits}g}") != value:
        digits += 1
    return text.encode()


def _text_of_decimal(value: decimal.Decimal | None) -> bytes:
    """Returns a number's text without zeros at its end, as if it were a float; empty for None."""
    if value is None:
        return b""
    whole, _, decimals = f"{value:f}".partition(".")
    decimals = decimals.rstrip("0")
    return f"{whole}.{decimals}".encode() if decimals else whole.encode()


def _flat(pa: ModuleType, lists: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns the values of all lists, and int64 row splits."""
    if pa.types.is_null(lists.type):
        return pa.nulls(0), np.zeros(len(lists) + 1, np.int64)
    lengths = pa.compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    return lists.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _seconds(pa: ModuleType, times: pa.Array) -> np.ndarray:
    """Returns seconds since 1970, float64 `[n]`, NaN where there is none."""
    units = 1.0
    if pa.types.is_date(times.type):
        times = times.cast(pa.timestamp("ms"))
    if pa.types.is_timestamp(times.type):
        if times.type.unit == "ns":  # More than a float64 holds: it could be the next day.
            times = times.cast(pa.timestamp("us", times.type.tz), safe=False)
        units = {"s": 1.0, "ms": 1e3, "us": 1e6}[times.type.unit]
        times = times.cast(pa.int64())
    return times.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / units


def places_of(parts: Iterable) -> Sequence[tuple[int, int, int, int, int]]:
    """Returns where the rows of parts are: in which row groups.

    Returns:
        For each row group the number of the part, the number of the group, the first row in the
        group and the one behind the last, and how many rows of the file are before the first.
    """
    places = []
    for number, part in enumerate(parts):
        offset = 0
        for group, rows in enumerate(part.file.groups):
            first, last = max(part.first - offset, 0), min(part.last - offset, rows)
            if first < last:
                places.append((number, group, first, last, offset + first))
            offset += rows
    return places
