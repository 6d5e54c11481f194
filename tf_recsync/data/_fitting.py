"""Vocabularies and statistics of the columns of CSV files, from the files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from tf_recsync.data import _fields, _text
from tf_recsync.data.columns import NumericColumn

if TYPE_CHECKING:
    from tf_recsync.data.schema import Schema

# What counts as a number, in the syntax that Python and TensorFlow have in common.
NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?"

_NAMED = 5  # Values of labels in a warning, at most.


def first_line(path: str, separator: str, comment: str | None, quotechar: str | None) -> list[str]:
    """Returns the fields of the first line of a file, as the names of columns.

    Raises:
        ValueError: If it is blank or a comment, or malformed; the message names the file.
    """
    with _text.open_text(path) as stream:
        line = stream.readline()
    if _text.is_ignored(line, comment):
        raise ValueError(
            f"The first line of {path} is blank or a comment; it must have the columns' names."
        )
    fields = _split(line, f"{path}, line 1", separator, quotechar)
    # Readers only count it, so that names may have no white space of any kind around them.
    return [field.strip() for field in fields]


def _split(line: bytes, where: str, separator: str, quotechar: str | None) -> list[str]:
    """Returns the fields of a line; a ValueError says where it is malformed."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"malformed row in {where}: is not UTF-8 ({error}); convert the file, for example with "
            "iconv"
        ) from error
    fields = _fields.split_line(text, separator, quotechar)
    if fields is None:
        raise ValueError(f"malformed row in {where}: {_fields.UNCLOSED}")
    return fields


def read_values(
    files: Sequence[str],
    layout: Schema,
    numeric: Sequence[str],
    categorical: Sequence[str],
    separators: Mapping[str, str],
) -> tuple[dict[str, list[float]], dict[str, set[str]]]:
    """Returns the values that are present: of each numeric column all, of the others each once.

    `separators` says what stands between the values of a categorical column that has several. A
    warning is logged if no row has a positive label.
    """
    for name in (*numeric, *categorical):
        layout.check_column(name)
    position = {name: i for i, name in enumerate(layout.all_columns)}
    numbers: dict[str, list[float]] = {name: [] for name in numeric}
    words: dict[str, set[str]] = {name: set() for name in categorical}
    labels: set[str] = set()
    for where, fields in _rows(files, layout):
        labels.update(fields[position[name]] for name in layout.labels)
        for name in numeric:
            text = fields[position[name]]
            if text in layout.missing_texts:
                continue
            number = float(text) if re.fullmatch(NUMBER, text) else None
            if number is None or abs(number) > float(np.finfo(np.float32).max):
                why = "is not a number" if number is None else "is too large"
                raise ValueError(f"malformed row in {where}, column {name}: `{text}` {why}")
            numbers[name].append(number)
        for name in categorical:
            text = fields[position[name]]
            several = text.split(separators[name]) if name in separators else [text]
            words[name].update(word.strip(_fields.BLANKS) for word in several)
    for name, values in (*numbers.items(), *words.items()):
        if isinstance(values, set):
            values.difference_update(layout.missing_texts)
        if not values:
            raise ValueError(f"column {name!r}: has no value in {list(files)}.")
    if labels.isdisjoint(layout.positive):
        # Of a rare event, a small file may have none. More often the value is written otherwise.
        found = sorted(labels)[:_NAMED]
        logging.warning(
            "No row of %s has a positive label: label=%r has the values %s%s, and positive=%r. "
            "All labels of these rows will be 0.",
            list(files),
            layout.label,
            found,
            " and others" if len(labels) > _NAMED else "",
            layout.positive,
        )
    return numbers, words


def _rows(files: Sequence[str], layout: Schema) -> Iterator[tuple[str, list[str]]]:
    """Yields for each row where it is, in words, and its fields."""
    for path in files:
        header = layout.header_lines(path)
        values = _text.folder_values(path, layout.partitions)
        with _text.open_text(path) as stream:
            for number, line in enumerate(stream, start=1):
                if number <= header or _text.is_ignored(line, layout.comment):
                    continue
                where = f"{path}, line {number}"
                fields = _split(line, where, layout.separator, layout.quotechar)
                count, expected = len(fields), len(layout.columns)
                if count != expected:
                    column = [*layout.columns, expected + 1][min(count, expected)]
                    raise ValueError(
                        f"malformed row in {where}, column {column}: found {count} columns "
                        f"instead of {expected}"
                    )
                yield where, fields + values


def fit_numeric(name: str, values: np.ndarray, log1p: bool, buckets: int) -> NumericColumn:
    """Computes the statistics of a column from its float64 `[n]` values."""
    boundaries: np.ndarray = np.array([])
    if buckets:
        distinct, counts = np.unique(values, return_counts=True)
        spread, first = values, 1
        if counts.max() > len(values) / 2 and len(distinct) > 1:
            # Most quantiles would be that one value. Its border is the least of the others.
            spread, first = values[values != distinct[counts.argmax()]], 0
        steps = np.arange(first, buckets) / buckets
        boundaries = np.unique(np.quantile(spread, steps, method="lower").astype(np.float32))
    if log1p:
        values = np.log1p(np.maximum(values, 0))
    # A constant column has nothing to scale by; of rounding, its deviation may be above 0.
    std = 1.0 if values.min() == values.max() else float(values.std())
    return NumericColumn(name, float(values.mean()), std, log1p, tuple(boundaries.tolist()))
