"""Descriptions of the rows of a data set: which columns they have and what these become."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_recsync._checks import (
    check_at_least,
    check_bool,
    check_text,
    checked_path,
    list_of,
    plain_values,
)
from tf_recsync.data import _fields, _fitting, _records, _spec, _text
from tf_recsync.data.columns import CategoricalColumn, CrossedColumn, NumericColumn

_COLUMN_KINDS = {
    "numeric": NumericColumn,
    "categorical": CategoricalColumn,
    "crosses": CrossedColumn,
}


@dataclasses.dataclass(frozen=True)
class Schema:
    """What the columns of CSV, Parquet and TFRecord files are.

    Spaces around a text do not count, in files and in what is given here. An empty text and one
    equal to `missing` are missing, and in Parquet and TFRecord what has no value, and a number that
    is NaN. Labels and categories are compared and hashed as texts, also where a file has numbers: 7
    is the same category as `"7"`.

    A field of a CSV file that begins with a quotation mark ends with the next one and may have
    separators in it, and quotation marks if they are doubled, as in Python's `csv`; it cannot hold
    a line break.

    Args:
        columns: Names of all columns of a CSV file in order. Empty (the default) takes them from
            the first line of the first file. Parquet and TFRecord have names for their columns, of
            which a schema need not name all.
        label: The column with the label, or several of them: the labels are then a dict.
        positive: Which values of it mean 1, as texts: `("1",)`.
        negative: Which values of it mean 0; any other value is an error. Empty (the default)
            accepts all values that are not positive.
        numeric: Columns of numbers. Default none.
        categorical: Columns of categories. Default none.
        crosses: Combinations of categorical features. Default none.
        header: Whether files begin with a line of column names; None (the default) looks whether
            the first line has the names in `columns`.
        separator: What separates fields. Default a comma.
        missing: A text that means a missing value, or several, as `("NA", "\\N")`; an empty field
            means it always. Default `"?"`.
        comment: Lines that begin with this text are left out; None (the default) for no such lines.
        quotechar: The quotation mark. Default `'"'`; None reads quotation marks as text.
        partitions: Names of further columns, whose values are in the names of the folders that a
            file is in, as Hive, Spark and pandas write them: `("day",)` for
            `clicks/day=2024-01-01/part.csv`. Default none.
        weight: A column with the weight of each row, a number of at least 0: elements are then
            `(features, label, weight)`, as `model.fit` takes them. Default None: no weights.
        timestamp: A column that says when a row is from, which is no feature: in seconds since
            1970, or as a text like `2024-01-31 23:59:59` or `2024-01-31T23:59:59Z` (UTC, what is
            less than a second is left out), or of Parquet's types of dates and times. Readers take
            rows of a period by it (`between`). Default None.

    Raises:
        ValueError: If a column is neither in `columns` nor in `partitions` or is in both,
            there is no label, `positive` is empty, values of the label or names are no texts, or
            one text in place of several, a column is described by another kind of object, a
            feature name is used twice, a cross or `partitions` have a multi-hot column, a cross
            without `hash_buckets` has more than 2**63 combinations, the separator is blank or
            `quotechar` is not one character.

    Example:
        >>> schema = Schema(
        ...     columns=("age", "country", "clicked"),
        ...     label="clicked",
        ...     positive=("yes",),
        ...     numeric=(NumericColumn("age", mean=40.0, std=10.0, boundaries=(18.0, 65.0)),),
        ...     categorical=(CategoricalColumn("country", vocabulary=("CH", "US")),),
        ... )
        >>> schema.spec.categorical
        {'country': 4, 'age_bucket': 4}
    """

    columns: tuple[str, ...] = ()
    label: str | tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    numeric: tuple[NumericColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    crosses: tuple[CrossedColumn, ...] = ()
    header: bool | None = None
    separator: str = ","
    missing: str | tuple[str, ...] = "?"
    comment: str | None = None
    quotechar: str | None = '"'
    partitions: tuple[str, ...] = ()
    weight: str | None = None
    timestamp: str | None = None

    def __post_init__(self) -> None:
        """Checks that the parts fit together."""
        plain_values(self)
        kinds: dict[str, type] = dict.fromkeys(
            ("columns", "positive", "negative", "partitions"), str
        )
        kinds |= _COLUMN_KINDS
        for argument in ("label", "missing"):
            if not isinstance(getattr(self, argument), str):
                kinds[argument] = str
        for argument, kind in kinds.items():
            # Lists would make a schema differ from its copy that was saved, and can't be hashed.
            object.__setattr__(self, argument, list_of(argument, getattr(self, argument), kind))
        for argument in ("positive", "negative", "missing"):
            texts = getattr(self, argument)
            is_one = isinstance(texts, str)
            found = _fields.stripped([texts] if is_one else texts)
            object.__setattr__(self, argument, found[0] if is_one else found)
        check_text("separator", self.separator)
        for argument in ("comment", "weight", "timestamp"):
            if getattr(self, argument) is not None:
                check_text(argument, getattr(self, argument))
        if self.header is not None:
            check_bool("header", self.header)
        for name in self.partitions:
            if name in self.columns:
                raise ValueError(
                    f"partitions={self.partitions}: {name!r} must not be one of "
                    f"columns={self.columns}."
                )
        if not self.labels or not all(self.labels) or len(set(self.labels)) < len(self.labels):
            raise ValueError(f"label={self.label!r}: must be a column, or several different ones.")
        for name in self.used_columns:
            self.check_column(name)
        for column in self.multi_hot:
            for name in (column.name, str(column.weights)):
                if name in self.partitions:
                    raise ValueError(
                        f"partitions={self.partitions}: {name!r} must not be a multi-hot column or "
                        "that of its weights: the name of a folder has one value."
                    )
        if self.quotechar is not None and (
            len(self.quotechar) != 1
            or self.quotechar in " \r\n"
            or self.quotechar in self.separator
        ):
            raise ValueError(
                f"quotechar={self.quotechar!r}: must be None or one character, no space or "
                f"backslash and not in separator={self.separator!r}."
            )
        if not self.positive:
            raise ValueError("positive=(): must have at least one value of the label.")
        # A tab is a fine separator though it is white space; spaces around fields are dropped.
        if not self.separator.strip(" "):
            raise ValueError(f"separator={self.separator!r}: must have more than spaces.")
        names = [c.name for c in self.categorical if not c.multi_hot]
        names += [c.bucket_name for c in self.numeric if c.boundaries]
        for cross in self.crosses:
            for name in cross.columns:
                if name not in names:
                    raise ValueError(f"crosses: {name!r} must be one of the features {names}.")
            if not cross.hash_buckets and not self.has_numbers(cross):
                raise ValueError(
                    f"hash_buckets=0 of cross {cross.name!r}: must be above 0, as there are "
                    f"{self._combinations(cross)} combinations, more than 2**63."
                )
        names += [c.name for c in (*self.crosses, *self.multi_hot)]
        names += [c.weights_name for c in self.weighted]
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"feature {name!r}: is defined {count} times.")

    def check_column(self, name: str) -> None:
        """Raises ValueError if there is no such column, as far as is known."""
        if self.columns and name not in self.all_columns:
            allowed = f"columns={self.columns}"
            allowed += f" or partitions={self.partitions}" if self.partitions else ""
            raise ValueError(f"column {name!r}: must be one of {allowed}.")

    @property
    def all_columns(self) -> tuple[str, ...]:
        """The names of the columns of the file and, after them, of those in names of folders."""
        return (*self.columns, *self.partitions)

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns with labels."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def missing_texts(self) -> tuple[str, ...]:
        """The texts that mean a missing value, the empty one among them."""
        return ("", *((self.missing,) if isinstance(self.missing, str) else self.missing))

    @property
    def multi_hot(self) -> tuple[CategoricalColumn, ...]:
        """The categorical columns of which a row has any number of values."""
        return tuple(column for column in self.categorical if column.multi_hot)

    @property
    def weighted(self) -> tuple[CategoricalColumn, ...]:
        """The categorical columns whose values have weights."""
        return tuple(column for column in self.categorical if column.weights is not None)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns of which a row has a number: numeric ones, and then that of the weight."""
        names = tuple(column.name for column in self.numeric)
        return names if self.weight is None else (*names, self.weight)

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of which a row has a text: categorical ones, and then those of labels."""
        names = [column.name for column in self.categorical if not column.multi_hot]
        return (*names, *(name for name in self.labels if name not in names))

    @property
    def used_columns(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        names = [*self.numbers, *self.texts, *(column.name for column in self.multi_hot)]
        names += [str(column.weights) for column in self.weighted]
        names += [] if self.timestamp is None else [self.timestamp]
        return tuple(dict.fromkeys(names))

    @property
    def spec(self) -> _spec.FeatureSpec:
        """The names and sizes of the features."""
        sizes = self._sizes
        for cross in self.crosses:
            sizes[cross.name] = cross.hash_buckets or self._combinations(cross)
        return _spec.FeatureSpec(
            tuple(column.name for column in self.numeric),
            sizes,
            multi_hot=tuple(column.name for column in self.multi_hot),
            weighted=tuple(column.name for column in self.weighted),
            labels=() if isinstance(self.label, str) else self.labels,
            has_weight=self.weight is not None,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        """The numbers of ids of the categorical features that are no crosses."""
        sizes = {column.name: column.size for column in self.categorical}
        for column in self.numeric:
            if column.boundaries:
                sizes[column.bucket_name] = len(column.boundaries) + 2
        return sizes

    def _combinations(self, cross: CrossedColumn) -> int:
        sizes = self._sizes
        return math.prod(sizes[name] for name in cross.columns)

    def has_numbers(self, cross: CrossedColumn) -> bool:
        """Returns whether each combination of ids has a number, which an int64 holds."""
        return self._combinations(cross) <= 2**63

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the schema to a file, for programs that read rows of the same columns later.

        A program that computed another one from other rows would give other ids to words.

        Args:
            path: The file, as `tf.io.gfile` takes it; JSON.

        Raises:
            tf.errors.OpError: If it can't be written.

        Example:
            >>> import tempfile
            >>> import tf_recsync as recsync
            >>> schema = recsync.data.Schema(label="click", positive=("1",))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     schema.save(f"{folder}/schema.json")
            ...     recsync.data.Schema.load(f"{folder}/schema.json") == schema
            True
        """
        with tf.io.gfile.GFile(checked_path(path, of="file"), "w") as file:
            file.write(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Reads a schema that `save` wrote.

        Args:
            path: The file.

        Returns:
            A schema that is equal to the one that was written.

        Raises:
            tf.errors.OpError: If the file can't be read.
            ValueError: If it has no schema; the message names it.

        Example: See `save`.
        """
        path = checked_path(path, of="file")
        with tf.io.gfile.GFile(path) as file:
            text = file.read()
        try:
            found = json.loads(text)
            for name, kind in _COLUMN_KINDS.items():
                found[name] = tuple(kind(**_as_tuples(column)) for column in found[name])
            return cls(**_as_tuples(found))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"path={path!r} has no schema: {error}") from error

    @classmethod
    def fit(
        cls,
        path: str | os.PathLike[str],
        *,
        label: str | Sequence[str],
        positive: Sequence[str],
        negative: Sequence[str] = (),
        numeric: Sequence[str] = (),
        categorical: Sequence[str] = (),
        columns: Sequence[str] | None = None,
        log1p: Sequence[str] = (),
        buckets: Mapping[str, int] | None = None,
        hashed: Mapping[str, int] | None = None,
        crosses: Sequence[CrossedColumn] = (),
        header: bool | None = None,
        separator: str = ",",
        missing: str | Sequence[str] = "?",
        comment: str | None = None,
        quotechar: str | None = '"',
        partitions: Sequence[str] = (),
        multi_hot: Mapping[str, str] | None = None,
        weights: Mapping[str, str] | None = None,
        weight: str | None = None,
        timestamp: str | None = None,
    ) -> Schema:
        """Computes vocabularies, means, deviations and bucket boundaries from CSV files.

        The schema goes for Parquet and TFRecord files with the same columns, too. The values of the
        named columns are held in memory. If no row has a positive label, the log says so, and
        which values the label has.

        Args:
            path: A file, a folder or a glob pattern; plain or gzip.
            label: See `Schema`.
            positive: See `Schema`.
            negative: See `Schema`.
            numeric: Names of the columns of numbers.
            categorical: Names of the columns of categories.
            columns: Names of all columns; None (the default) takes them from the first line of
                the first file.
            log1p: Which numeric columns are replaced by their logarithm. Default none.
            buckets: For each numeric column that becomes a categorical feature as well, how many
                buckets of about equally many rows there should be (at least 2). Where one value
                makes up more than half of the rows, the quantiles are those of the other values.
                Default none.
            hashed: Number of hash buckets for those categorical columns that should be hashed;
                the others get a vocabulary. Default none.
            crosses: See `Schema`.
            header: See `Schema`.
            separator: See `Schema`.
            missing: See `Schema`.
            comment: See `Schema`.
            quotechar: See `Schema`.
            partitions: See `Schema`.
            multi_hot: For those categorical columns of which a row has several values, what stands
                between them. Default none.
            weights: For multi-hot columns the column with their weights. Default none.
            weight: See `Schema`.
            timestamp: See `Schema`.

        Returns:
            The schema; vocabularies are in alphabetical order.

        Raises:
            FileNotFoundError: If no file matches `path`.
            ValueError: If a line is malformed (the message names file, line and column), a column
                has no value at all, or an argument is out of range.
        """
        files = _text.find_files(path)
        numeric, categorical, log1p = (
            list_of(argument, value, str)
            for argument, value in (
                ("numeric", numeric),
                ("categorical", categorical),
                ("log1p", log1p),
            )
        )
        for argument, value in (
            ("buckets", buckets),
            ("hashed", hashed),
            ("multi_hot", multi_hot),
            ("weights", weights),
        ):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"{argument}={value!r}: must be None or a dict, by columns.")
        buckets, hashed = dict(buckets or {}), dict(hashed or {})
        multi_hot, weights = dict(multi_hot or {}), dict(weights or {})
        for argument, names, allowed in (
            ("log1p", log1p, numeric),
            ("buckets", buckets, numeric),
            ("hashed", hashed, categorical),
            ("multi_hot", multi_hot, categorical),
            ("weights", weights, multi_hot),
        ):
            if not set(names) <= set(allowed):
                raise ValueError(f"{argument}={names}: must be among the columns {list(allowed)}.")
        for name, count in buckets.items():
            check_at_least(f"buckets[{name!r}]", count, 2)
        if columns is None:
            columns = _fitting.first_line(files[0], separator, comment, quotechar)
            header = True
        # The layout is enough to read the files; the columns follow from what is read.
        layout = cls(
            columns=columns,
            label=label,
            positive=positive,
            negative=negative,
            header=header,
            separator=separator,
            missing=missing,
            comment=comment,
            quotechar=quotechar,
            partitions=partitions,
            weight=weight,
            timestamp=timestamp,
        )
        numbers, words = _fitting.read_values(files, layout, numeric, categorical, multi_hot)
        return dataclasses.replace(
            layout,
            numeric=tuple(
                _fitting.fit_numeric(
                    name, np.array(numbers[name]), name in log1p, buckets.get(name, 0)
                )
                for name in numeric
            ),
            categorical=tuple(
                CategoricalColumn(
                    name,
                    vocabulary=() if name in hashed else tuple(sorted(words[name])),
                    hash_buckets=hashed.get(name, 0),
                    multi_hot=name in multi_hot,
                    separator=multi_hot.get(name, "|"),
                    weights=weights.get(name),
                )
                for name in categorical
            ),
            crosses=tuple(crosses),
        )

    def header_lines(self, path: str) -> int:
        """Returns how many header lines a file has, 0 or 1.

        Args:
            path: The file, plain or gzip.

        Raises:
            ValueError: If `header` is True and the first line is not that of `columns`; the message
                names the file.
        """
        if self.header is False:
            return 0
        try:
            found = tuple(_fitting.first_line(path, self.separator, self.comment, self.quotechar))
        except ValueError:
            if self.header:
                raise
            return 0  # Who reads it as a row says what is wrong with it.
        if self.header and found != self.columns:
            raise ValueError(
                f"The file {path!r} begins with {found}; the header must be {self.columns}."
            )
        return int(found == self.columns)

    def with_columns_of(self, path: str) -> Schema:
        """Returns the same schema with the columns that the first line of a CSV file names.

        Raises:
            ValueError: If columns that the schema names are not among them, or the line is blank, a
                comment or malformed.
        """
        names = _fitting.first_line(path, self.separator, self.comment, self.quotechar)
        return dataclasses.replace(self, columns=tuple(names), header=True)

    def options(
        self, on_error: str, between: tuple[datetime.datetime, datetime.datetime] | None
    ) -> _records.Options:
        """Returns which rows a reader leaves out.

        Raises:
            ValueError: If an argument is out of range, or `between` is given without `timestamp`.
        """
        if between is not None and self.timestamp is None:
            raise ValueError(f"between={between}: needs Schema(timestamp=...).")
        return _records.Options(on_error, between)

    def scan(self, path: str) -> _text.TextFile:
        """Counts the lines of a file.

        Raises:
            ValueError: If it has no rows, is truncated or corrupted, has another header than the
                schema, or lacks a folder of `partitions`; the message names it.
        """
        _text.folder_values(path, self.partitions)
        return _text.scan(path, self.header_lines(path), self.comment)


def check_schema(schema: Schema) -> None:
    """Raises a ValueError if a reader's argument is no schema."""
    if not isinstance(schema, Schema):
        raise ValueError(f"schema must be a Schema, not {schema!r}")


def _as_tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that JSON has as lists."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
