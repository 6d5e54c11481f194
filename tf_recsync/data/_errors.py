"""Checks of parsed rows inside a `tf.data` graph, with messages that name file, line and column.

The checks are ordinary graph operations, so they also work where a data set is computed in another
process. Each returns a tensor to be used with `tf.control_dependencies`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

# A row is identified by one int64: the number of its file in the upper bits and its 1-based number
# (of its line, in a text file) in the lower ones. One number per row shuffles and batches faster
# than a name and a number.
LINE_BITS = 40

# Stands for a line or record that a file no longer has; none is like it.
MISSING = b"\x00\x02missing\x02\x00"


@dataclasses.dataclass(frozen=True)
class Location:
    """Where the rows of a batch come from.

    Args:
        files: Names of all files of the data set.
        codes: int64 `[batch]`, `(number of the file << LINE_BITS) + line number`.
        unit: What has this number: `line` (the default), `row` or `record`.
        details: Gives a string to add to a place, from the strings of file and number; None (the
            default) adds nothing.
    """

    files: Sequence[str]
    codes: tf.Tensor
    unit: str = "line"
    details: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None

    def file_numbers(self) -> tf.Tensor:
        """Returns which of the files each row is from: int64 `[batch]`."""
        return tf.bitwise.right_shift(self.codes, LINE_BITS)

    def places(self, codes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the names of the files and the numbers of the lines of codes, as strings."""
        file = tf.gather(tf.constant(list(self.files)), tf.bitwise.right_shift(codes, LINE_BITS))
        line = tf.bitwise.bitwise_and(codes, tf.constant((1 << LINE_BITS) - 1, tf.int64))
        return file, tf.strings.as_string(line)

    def place(self, row: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the name of the file and the number of the line, as strings, of a row."""
        return self.places(self.codes[row])

    def describe(self, row: tf.Tensor) -> tf.Tensor:
        """Returns the string `malformed row in FILE, line N` for a row of the batch."""
        file, line = self.place(row)
        parts = ["malformed row in ", file, f", {self.unit} ", line]
        if self.details is not None:
            parts.append(self.details(file, line))
        return tf.strings.join(parts)


class Checks:
    """Has malformed rows raise an error, or finds which ones are malformed.

    Args:
        where: Where the rows of the batch come from.
        is_raising: Whether a malformed row raises InvalidArgumentError. True by default; with False
            `malformed` is filled instead.
    """

    def __init__(self, where: Location, is_raising: bool = True) -> None:
        """See the class."""
        self.where = where
        self._malformed = None if is_raising else tf.zeros_like(where.codes, tf.bool)

    @property
    def is_raising(self) -> bool:
        """Whether a malformed row raises an error."""
        return self._malformed is None

    @property
    def malformed(self) -> tf.Tensor:
        """Which rows failed a check so far: bool `[batch]`."""
        return tf.zeros_like(self.where.codes, tf.bool) if self.is_raising else self._malformed

    def require(self, wrong: tf.Tensor, fail: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Calls `fail` in the graph if a row is wrong, or takes note of which are.

        Args:
            wrong: bool `[batch]` or `[batch, columns]`.
            fail: Makes the operations that raise the error.

        Returns:
            A bool scalar to depend on.
        """
        if self.is_raising:
            return tf.cond(tf.reduce_any(wrong), fail, lambda: tf.constant(True))
        rows = wrong if wrong.shape.rank == 1 else tf.reduce_any(wrong, axis=-1)
        self._malformed = tf.logical_or(self._malformed, rows)
        return tf.constant(True)


def require_columns(counts: tf.Tensor, names: Sequence[str], checks: Checks) -> tf.Tensor:
    """Requires that every row has one field per name.

    Args:
        counts: int64 `[batch]`, the number of fields of each row.
        names: Names of the columns that a row must have.
        checks: What becomes of rows that are wrong.

    Returns:
        A bool scalar to depend on.
    """
    wrong = tf.not_equal(counts, len(names))

    def fail() -> tf.Tensor:
        row = tf.argmax(tf.cast(wrong, tf.int32))
        count = counts[row]
        # The first column that is missing, or the first one too many.
        number = tf.minimum(count, len(names))
        column = tf.gather(tf.constant([*names, str(len(names) + 1)]), number)
        return _raise(
            [
                checks.where.describe(row),
                ", column ",
                column,
                ": found ",
                tf.strings.as_string(count),
                f" columns instead of {len(names)}",
            ]
        )

    return checks.require(wrong, fail)


def require_rows(wrong: tf.Tensor, reason: str, checks: Checks) -> tf.Tensor:
    """Requires that no row is wrong.

    Args:
        wrong: bool `[batch]`.
        reason: What is the matter with one, like `a field is too long`.
        checks: What becomes of rows that are wrong.

    Returns:
        A bool scalar to depend on.
    """

    def fail() -> tf.Tensor:
        row = tf.argmax(tf.cast(wrong, tf.int32))
        return _raise([checks.where.describe(row), f": {reason}"])

    return checks.require(wrong, fail)


def require_whole_files(rows: tf.Tensor, where: Location) -> tf.Tensor:
    """Raises InvalidArgumentError if a file ended before all rows were read that it had.

    Args:
        rows: string `[batch]`, lines or records; `MISSING` in place of one that is not there.
        where: Where the rows come from.

    Returns:
        A bool scalar to depend on.
    """
    missing = tf.equal(rows, MISSING)

    def fail() -> tf.Tensor:
        file, number = where.place(tf.argmax(tf.cast(missing, tf.int32)))
        return _raise(
            [
                "the file ",
                file,
                f" ends before {where.unit} ",
                number,
                f", which it had when its {where.unit}s were counted: it has changed, or this copy "
                "of it is truncated",
            ]
        )

    return tf.cond(tf.reduce_any(missing), fail, lambda: tf.constant(True))


def require_fields(
    wrong: tf.Tensor,
    fields: tf.Tensor | Callable[[], tf.Tensor],
    names: Sequence[str],
    reasons: Sequence[str],
    checks: Checks,
) -> tf.Tensor:
    """Requires that no field is wrong; an error names the first one, row by row.

    Args:
        wrong: bool `[batch, columns]`.
        fields: string `[batch, columns]`, the text of the fields, or what makes it if it is needed.
        names: Name of each column.
        reasons: For each column what is the matter with a wrong field, like `is not a number`.
        checks: What becomes of rows that are wrong.

    Returns:
        A bool scalar to depend on.
    """
    if not names:
        return tf.constant(True)

    def fail() -> tf.Tensor:
        first = tf.argmax(tf.cast(tf.reshape(wrong, [-1]), tf.int32))
        row, column = first // len(names), first % len(names)
        texts = fields() if callable(fields) else fields
        return _raise(
            [
                checks.where.describe(row),
                ", column ",
                tf.gather(tf.constant(list(names)), column),
                # Backquotes, because the assertion's message escapes quotation marks.
                ": `",
                # Bytes that are not UTF-8 would make the message undecodable.
                tf.strings.unicode_transcode(texts[row, column], "UTF-8", "UTF-8"),
                "` ",
                tf.gather(tf.constant(list(reasons)), column),
            ]
        )

    return checks.require(wrong, fail)


def _raise(parts: Sequence[str | tf.Tensor]) -> tf.Tensor:
    """Fails with the joined parts as the message."""
    # One string: an assertion prints a list of tensors as a list of arrays, which is hard to read.
    check = tf.debugging.Assert(tf.constant(False), [tf.strings.join(parts)])
    with tf.control_dependencies([check]):
        return tf.constant(False)
