"""Descriptions of CSV files: which columns they have and what features these become."""

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tf_recsync.data import _fields, _spec, _text

# What counts as a number, in the syntax that Python and TensorFlow have in common.
NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?"


@dataclasses.dataclass(frozen=True)
class NumericColumn:
    """A column of numbers.

    It becomes a numeric feature, `(x - mean) / std` with `log(1 + max(x, 0))` in place of x if
    `log1p`, and 0 (the mean) where the value is missing. With `boundaries` it becomes a categorical
    feature `<name>_bucket` as well: 0 for a missing value, and otherwise 1 plus the number of
    boundaries that are less than or equal to x.

    Args:
        name: The column.
        mean: Mean for the standardisation. Default 0.
        std: Standard deviation for the standardisation, greater than 0. Default 1.
        log1p: Whether the logarithm is taken first. Default False.
        boundaries: Ascending boundaries between the buckets, in units of the column itself.
            Empty (the default) for no buckets.

    Raises:
        ValueError: If `std` is not positive or `boundaries` do not ascend.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.data.NumericColumn("age", mean=40, std=12, boundaries=(18, 65)).bucket_name
    'age_bucket'
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    log1p: bool = False
    boundaries: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not self.std > 0:
            raise ValueError(f"std={self.std} of column {self.name!r}: must be greater than 0.")
        if any(a >= b for a, b in itertools.pairwise(self.boundaries)):
            raise ValueError(
                f"boundaries={self.boundaries} of column {self.name!r}: must be ascending."
            )

    @property
    def bucket_name(self) -> str:
        """Name of the categorical feature that the buckets make."""
        return f"{self.name}_bucket"


@dataclasses.dataclass(frozen=True)
class CategoricalColumn:
    """A column of categories, numbered by a vocabulary or by hashing.

    With a vocabulary: 0 for a missing value, 1 for a value outside the vocabulary, 2 for its first
    word and so on. With hashing: 0 for a missing value, `1 + fingerprint mod (hash_buckets - 1)`
    for all others.

    Args:
        name: The column.
        vocabulary: The known values, without duplicates. Default empty.
        hash_buckets: Number of ids, at least 2; 0 (the default) with a vocabulary.

    Raises:
        ValueError: Unless there is either a vocabulary or a number of buckets.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.data.CategoricalColumn("color", vocabulary=("red", "blue")).size
    4
    """

    name: str
    vocabulary: tuple[str, ...] = ()
    hash_buckets: int = 0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if bool(self.vocabulary) == bool(self.hash_buckets) or self.hash_buckets in (1, -1):
            raise ValueError(
                f"column {self.name!r} with hash_buckets={self.hash_buckets} and "
                f"{len(self.vocabulary)} words: give either a vocabulary or hash_buckets of at "
                "least 2."
            )
        if len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError(f"vocabulary of column {self.name!r}: has duplicates.")

    @property
    def size(self) -> int:
        """The number of ids."""
        return self.hash_buckets or len(self.vocabulary) + 2


@dataclasses.dataclass(frozen=True)
class CrossedColumn:
    """The combination of categorical features as a feature of its own, named `a_x_b`.

    Args:
        columns: Names of at least two categorical features, `<name>_bucket` included.
        hash_buckets: Number of ids that the combinations are hashed to; 0 (the default) numbers
            all of them without collisions.

    Raises:
        ValueError: If there are fewer than two columns or `hash_buckets` is negative.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.data.CrossedColumn(("color", "age_bucket"), hash_buckets=100).name
    'color_x_age_bucket'
    """

    columns: tuple[str, ...]
    hash_buckets: int = 0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if len(self.columns) < 2:
            raise ValueError(f"columns={self.columns}: a cross needs at least two columns.")
        if self.hash_buckets < 0:
            raise ValueError(f"hash_buckets={self.hash_buckets}: must be at least 0.")

    @property
    def name(self) -> str:
        """Name of the feature."""
        return "_x_".join(self.columns)


@dataclasses.dataclass(frozen=True)
class CsvSchema:
    """What the columns of a CSV file are.

    Spaces around a field do not count. An empty field and one equal to `missing` are missing. A
    field that begins with a quotation mark ends with the next one and may have separators in it,
    and quotation marks if they are doubled, as in Python's `csv`; it cannot hold a line break.

    Args:
        columns: Names of all columns of the file in order.
        label: The column with the label.
        positive: Which values of it mean 1.
        negative: Which values of it mean 0; any other value is an error. Empty (the default)
            accepts all values that are not positive.
        numeric: Columns of numbers. Default none.
        categorical: Columns of categories. Default none.
        crosses: Combinations of categorical features. Default none.
        header: Whether files begin with a line of column names; None (the default) looks whether
            the first line has the names in `columns`.
        separator: What separates fields. Default a comma.
        missing: A text that means a missing value. Default `"?"`.
        comment: Lines that begin with this text are left out; None (the default) for no such lines.
        quotechar: The quotation mark. Default `'"'`; None reads quotation marks as text.
        partitions: Names of further columns, whose values are in the names of the folders that a
            file is in, as Hive, Spark and pandas write them: `("day",)` for
            `clicks/day=2024-01-01/part.csv`. Default none.

    Raises:
        ValueError: If a column is neither in `columns` nor in `partitions` or is in both,
            `positive` is empty, a feature name is used twice, the separator is blank or
            `quotechar` is not one character.

    Example:
        >>> schema = CsvSchema(
        ...     columns=("age", "country", "clicked"),
        ...     label="clicked",
        ...     positive=("yes",),
        ...     numeric=(NumericColumn("age", mean=40.0, std=10.0, boundaries=(18.0, 65.0)),),
        ...     categorical=(CategoricalColumn("country", vocabulary=("CH", "US")),),
        ... )
        >>> schema.spec.categorical
        {'country': 4, 'age_bucket': 4}
    """

    columns: tuple[str, ...]
    label: str
    positive: tuple[str, ...]
    negative: tuple[str, ...] = ()
    numeric: tuple[NumericColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    crosses: tuple[CrossedColumn, ...] = ()
    header: bool | None = None
    separator: str = ","
    missing: str = "?"
    comment: str | None = None
    quotechar: str | None = '"'
    partitions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks that the parts fit together."""
        for name in self.partitions:
            if name in self.columns:
                raise ValueError(
                    f"partitions={self.partitions}: {name!r} must not be one of "
                    f"columns={self.columns}."
                )
        for name in (self.label, *(c.name for c in (*self.numeric, *self.categorical))):
            self._check_column(name)
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
        names = [c.name for c in self.categorical]
        names += [c.bucket_name for c in self.numeric if c.boundaries]
        for cross in self.crosses:
            for name in cross.columns:
                if name not in names:
                    raise ValueError(f"crosses: {name!r} must be one of the features {names}.")
        for name, count in Counter(names + [c.name for c in self.crosses]).items():
            if count > 1:
                raise ValueError(f"feature {name!r}: is defined {count} times.")

    def _check_column(self, name: str) -> None:
        if name not in self.all_columns:
            allowed = f"columns={self.columns}"
            allowed += f" or partitions={self.partitions}" if self.partitions else ""
            raise ValueError(f"column {name!r}: must be one of {allowed}.")

    @property
    def all_columns(self) -> tuple[str, ...]:
        """The names of the columns of the file and, after them, of those in names of folders."""
        return (*self.columns, *self.partitions)

    @property
    def spec(self) -> _spec.FeatureSpec:
        """The names and sizes of the features."""
        sizes = {column.name: column.size for column in self.categorical}
        for column in self.numeric:
            if column.boundaries:
                sizes[column.bucket_name] = len(column.boundaries) + 2
        for cross in self.crosses:
            combinations = int(np.prod([sizes[name] for name in cross.columns], dtype=object))
            sizes[cross.name] = cross.hash_buckets or combinations
        return _spec.FeatureSpec(tuple(column.name for column in self.numeric), sizes)

    @classmethod
    def fit(
        cls,
        path: str | os.PathLike[str],
        *,
        label: str,
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
        missing: str = "?",
        comment: str | None = None,
        quotechar: str | None = '"',
        partitions: Sequence[str] = (),
    ) -> "CsvSchema":
        """Computes vocabularies, means, deviations and bucket boundaries from training files.

        The values of the named columns are held in memory.

        Args:
            path: A file, a folder or a glob pattern; plain or gzip.
            label: See `CsvSchema`.
            positive: See `CsvSchema`.
            negative: See `CsvSchema`.
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
            crosses: See `CsvSchema`.
            header: See `CsvSchema`.
            separator: See `CsvSchema`.
            missing: See `CsvSchema`.
            comment: See `CsvSchema`.
            quotechar: See `CsvSchema`.
            partitions: See `CsvSchema`.

        Returns:
            The schema; vocabularies are in alphabetical order.

        Raises:
            FileNotFoundError: If no file matches `path`.
            ValueError: If a line is malformed (the message names file, line and column), a column
                has no value at all, or an argument is out of range.
        """
        files = _text.find_files(path)
        buckets, hashed = dict(buckets or {}), dict(hashed or {})
        for argument, names in (("log1p", log1p), ("buckets", buckets), ("hashed", hashed)):
            allowed = categorical if argument == "hashed" else numeric
            if not set(names) <= set(allowed):
                raise ValueError(f"{argument}={names}: must be among the columns {allowed}.")
        for name, count in buckets.items():
            if count < 2:
                raise ValueError(f"buckets[{name!r}]={count}: must be at least 2.")
        if columns is None:
            columns = _first_line(files[0], separator, comment, quotechar)
            header = True
        # The layout is enough to read the files; the columns follow from what is read.
        layout = cls(
            columns=tuple(columns),
            label=label,
            positive=tuple(positive),
            negative=tuple(negative),
            header=header,
            separator=separator,
            missing=missing,
            comment=comment,
            quotechar=quotechar,
            partitions=tuple(partitions),
        )
        numbers, words = _read_values(files, layout, numeric, categorical)
        return dataclasses.replace(
            layout,
            numeric=tuple(
                _fit_numeric(name, np.array(numbers[name]), name in log1p, buckets.get(name, 0))
                for name in numeric
            ),
            categorical=tuple(
                CategoricalColumn(name, hash_buckets=hashed[name])
                if name in hashed
                else CategoricalColumn(name, vocabulary=tuple(sorted(words[name])))
                for name in categorical
            ),
            crosses=tuple(crosses),
        )

    def header_lines(self, path: str) -> int:
        """Returns how many header lines a file has, 0 or 1.

        Args:
            path: The file, plain or gzip.

        Raises:
            ValueError: If `header` is True and the first line is not that of `columns`.
        """
        if self.header is False:
            return 0
        found = tuple(_first_line(path, self.separator, self.comment, self.quotechar))
        if self.header and found != self.columns:
            raise ValueError(
                f"The file {path!r} begins with {found}; the header must be {self.columns}."
            )
        return int(found == self.columns)

    def scan(self, path: str) -> _text.TextFile:
        """Counts the lines of a file.

        Raises:
            ValueError: If it has no rows, is truncated or corrupted, has another header than the
                schema, or lacks a folder of `partitions`; the message names it.
        """
        _text.folder_values(path, self.partitions)
        return _text.scan(path, self.header_lines(path), self.comment)


def _first_line(path: str, separator: str, comment: str | None, quotechar: str | None) -> list[str]:
    """Returns the fields of the first line of a file; none if that is not a row."""
    with _text.open_text(path) as stream:
        line = stream.readline()
    if _text.is_ignored(line, comment):
        return []
    fields = _fields.split_line(line.decode(), separator, quotechar)
    if fields is None:
        raise ValueError(f"malformed row in {path}, line 1: a field {_fields.UNCLOSED}")
    return fields


def _read_values(
    files: Sequence[str], layout: CsvSchema, numeric: Sequence[str], categorical: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, set[str]]]:
    """Returns the values that are present: of each numeric column all, of the others each once."""
    for name in (*numeric, *categorical):
        layout._check_column(name)
    position = {name: i for i, name in enumerate(layout.all_columns)}
    numbers: dict[str, list[float]] = {name: [] for name in numeric}
    words: dict[str, set[str]] = {name: set() for name in categorical}
    for where, fields in _rows(files, layout):
        for name in numeric:
            text = fields[position[name]]
            if text in ("", layout.missing):
                continue
            number = float(text) if re.fullmatch(NUMBER, text) else None
            if number is None or abs(number) > float(np.finfo(np.float32).max):
                why = "is not a number" if number is None else "is too large"
                raise ValueError(f"malformed row in {where}, column {name}: `{text}` {why}")
            numbers[name].append(number)
        for name in categorical:
            words[name].add(fields[position[name]])
    for name, values in (*numbers.items(), *words.items()):
        if isinstance(values, set):
            values -= {"", layout.missing}
        if not values:
            raise ValueError(f"column {name!r}: has no value in {list(files)}.")
    return numbers, words


def _rows(files: Sequence[str], layout: CsvSchema) -> Iterator[tuple[str, list[str]]]:
    """Yields for each row where it is, in words, and its fields."""
    for path in files:
        header = layout.header_lines(path)
        values = _text.folder_values(path, layout.partitions)
        with _text.open_text(path) as stream:
            for number, line in enumerate(stream, start=1):
                if number <= header or _text.is_ignored(line, layout.comment):
                    continue
                where = f"{path}, line {number}"
                fields = _fields.split_line(line.decode(), layout.separator, layout.quotechar)
                if fields is None:
                    raise ValueError(f"malformed row in {where}: a field {_fields.UNCLOSED}")
                count, expected = len(fields), len(layout.columns)
                if count != expected:
                    column = [*layout.columns, expected + 1][min(count, expected)]
                    raise ValueError(
                        f"malformed row in {where}, column {column}: found {count} columns "
                        f"instead of {expected}"
                    )
                yield where, fields + values


def _fit_numeric(name: str, values: np.ndarray, log1p: bool, buckets: int) -> NumericColumn:
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
    # A constant column has nothing to scale by.
    std = float(values.std()) or 1.0
    return NumericColumn(name, float(values.mean()), std, log1p, tuple(boundaries.tolist()))
