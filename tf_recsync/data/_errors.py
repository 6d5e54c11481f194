"""Checks of parsed lines inside a `tf.data` graph, with messages that name file, line and column.

The checks are ordinary graph operations, so they also work where a data set is computed in another
process. Each returns a tensor to be used with `tf.control_dependencies`.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

# A line is identified by one int64: the number of its file in the upper bits and its 1-based line
# number in the lower ones. One number per row shuffles and batches faster than a name and a number.
LINE_BITS = 40

# Stands for a line that a file no longer has; no text has it.
MISSING = b"\x00\x02missing\x02\x00"


@dataclasses.dataclass(frozen=True)
class Location:
    """Where the rows of a batch come from.

    Args:
        files: Names of all files of the data set.
        codes: int64 `[batch]`, `(number of the file << LINE_BITS) + line number`.
    """

    files: Sequence[str]
    codes: tf.Tensor

    def file_numbers(self) -> tf.Tensor:
        """Returns which of the files each row is from: int64 `[batch]`."""
        return tf.bitwise.right_shift(self.codes, LINE_BITS)

    def place(self, row: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the name of the file and the number of the line, as strings, of a row."""
        code = self.codes[row]
        file = tf.gather(tf.constant(list(self.files)), tf.bitwise.right_shift(code, LINE_BITS))
        line = tf.bitwise.bitwise_and(code, tf.constant((1 << LINE_BITS) - 1, tf.int64))
        return file, tf.strings.as_string(line)

    def describe(self, row: tf.Tensor) -> tf.Tensor:
        """Returns the string `malformed row in FILE, line N` for a row of the batch."""
        file, line = self.place(row)
        return tf.strings.join(["malformed row in ", file, ", line ", line])


def require_columns(counts: tf.Tensor, names: Sequence[str], where: Location) -> tf.Tensor:
    """Raises InvalidArgumentError unless every row has one field per name.

    Args:
        counts: int64 `[batch]`, the number of fields of each row.
        names: Names of the columns that a row must have.
        where: Where the rows come from.

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
                where.describe(row),
                ", column ",
                column,
                ": found ",
                tf.strings.as_string(count),
                f" columns instead of {len(names)}",
            ]
        )

    return tf.cond(tf.reduce_any(wrong), fail, lambda: tf.constant(True))


def require_lines(wrong: tf.Tensor, reason: str, where: Location) -> tf.Tensor:
    """Raises InvalidArgumentError for the first line that is wrong.

    Args:
        wrong: bool `[batch]`.
        reason: What is the matter with it, like `is too long`, of one of its fields.
        where: Where the rows come from.

    Returns:
        A bool scalar to depend on.
    """

    def fail() -> tf.Tensor:
        row = tf.argmax(tf.cast(wrong, tf.int32))
        return _raise([where.describe(row), f": a field {reason}"])

    return tf.cond(tf.reduce_any(wrong), fail, lambda: tf.constant(True))


def require_whole_files(lines: tf.Tensor, where: Location) -> tf.Tensor:
    """Raises InvalidArgumentError if a file ended before all lines were read that it had.

    Args:
        lines: string `[batch]`; `MISSING` in place of a line that is not there.
        where: Where the rows come from.

    Returns:
        A bool scalar to depend on.
    """
    missing = tf.equal(lines, MISSING)

    def fail() -> tf.Tensor:
        file, line = where.place(tf.argmax(tf.cast(missing, tf.int32)))
        return _raise(
            [
                "the file ",
                file,
                " ends before line ",
                line,
                ", which it had when its lines were counted: it has changed, or this copy of it "
                "is truncated",
            ]
        )

    return tf.cond(tf.reduce_any(missing), fail, lambda: tf.constant(True))


def require_fields(
    wrong: tf.Tensor,
    fields: tf.Tensor,
    names: Sequence[str],
    reasons: Sequence[str],
    where: Location,
) -> tf.Tensor:
    """Raises InvalidArgumentError for the first field that is wrong, row by row.

    Args:
        wrong: bool `[batch, columns]`.
        fields: string `[batch, columns]`, the text of the fields.
        names: Name of each column.
        reasons: For each column what is the matter with a wrong field, like `is not a number`.
        where: Where the rows come from.

    Returns:
        A bool scalar to depend on.
    """
    if not names:
        return tf.constant(True)

    def fail() -> tf.Tensor:
        first = tf.argmax(tf.cast(tf.reshape(wrong, [-1]), tf.int32))
        row, column = first // len(names), first % len(names)
        return _raise(
            [
                where.describe(row),
                ", column ",
                tf.gather(tf.constant(list(names)), column),
                # Backquotes, because the assertion's message escapes quotation marks.
                ": `",
                # Bytes that are not UTF-8 would make the message undecodable.
                tf.strings.unicode_transcode(fields[row, column], "UTF-8", "UTF-8"),
                "` ",
                tf.gather(tf.constant(list(reasons)), column),
            ]
        )

    return tf.cond(tf.reduce_any(wrong), fail, lambda: tf.constant(True))


def _raise(parts: Sequence[str | tf.Tensor]) -> tf.Tensor:
    """Fails with the joined parts as the message."""
    # One string: an assertion prints a list of tensors as a list of arrays, which is hard to read.
    check = tf.debugging.Assert(tf.constant(False), [tf.strings.join(parts)])
    with tf.control_dependencies([check]):
        return tf.constant(False)
