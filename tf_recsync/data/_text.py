"""Data sets of text files with one row per line: finding, counting and reading them."""

import abc
import codecs
import contextlib
import dataclasses
import glob
import gzip
import os
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.data import _errors, _spec

Batch = tuple[dict[str, tf.Tensor], tf.Tensor]

_CHUNK = 1024
_HIVE_MISSING = "__HIVE_DEFAULT_PARTITION__"


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A text file and where its rows are.

    Args:
        path: The file.
        compression: `"GZIP"` or `""`.
        header: Number of lines before the first row.
        lines: Number of lines after the header.
        ignored: int64 `[n]`, ascending: which of these lines hold no row (blank or a comment).
        has_bom: Whether it begins with the byte order mark of UTF-8, which is no part of its text.
    """

    path: str
    compression: str
    header: int
    lines: int
    ignored: np.ndarray
    has_bom: bool = False

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.lines - len(self.ignored)

    def line_of_row(self, row: int) -> int:
        """Returns which line after the header holds the given row, both from 0."""
        rows_before_ignored = self.ignored - np.arange(len(self.ignored))
        return row + int(np.searchsorted(rows_before_ignored, row, side="right"))


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive lines of a file: `lines` of them after skipping the first `skip`."""

    file: TextFile
    skip: int
    lines: int


def find_files(path: str | os.PathLike[str]) -> list[str]:
    """Returns the files that a path stands for, sorted by name.

    Args:
        path: A file, a folder or a glob pattern. A folder stands for its files and those of its
            folders with names like `day=2024-01-01`, and so on down, but for hidden ones.

    Raises:
        FileNotFoundError: If there is no such file; the message names the path.
    """
    path = os.fspath(path)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        files = list(_files_in(path))
    else:
        # glob leaves hidden files out unless the pattern asks for them.
        files = [name for name in glob.glob(path) if os.path.isfile(name)]
    if not files:
        raise FileNotFoundError(f"No file matches path={path!r} (a file, folder or glob pattern).")
    return sorted(files)


def _files_in(folder: str) -> Iterator[str]:
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if os.path.isfile(path):
            yield path
        elif "=" in name and os.path.isdir(path):
            yield from _files_in(path)


def folder_values(path: str, names: Sequence[str]) -> list[str]:
    """Returns the values that the names of a file's folders give to columns.

    Args:
        path: The file, like `clicks/day=2024-01-01/part.csv`. Values may be percent-encoded, and
            Hive's name for a missing value is one.
        names: The columns, like `["day"]`.

    Raises:
        ValueError: If none of the folders gives a value to a column; the message names the file.
    """
    folders = os.path.dirname(path).split(os.sep)
    found = dict(folder.split("=", 1) for folder in folders if "=" in folder)
    for name in names:
        if name not in found:
            raise ValueError(
                f"The file {path!r} is in no folder {name + '=...'!r}; every file must be, with "
                f"partitions={tuple(names)}."
            )
    values = [found[name] for name in names]
    return ["" if value == _HIVE_MISSING else urllib.parse.unquote(value) for value in values]


@contextlib.contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """Opens a plain or gzip file for reading bytes, after its byte order mark if it has one.

    Raises:
        ValueError: Where it is read inside, if it is truncated or corrupted; the message names it.
    """
    try:
        with gzip.open(path, "rb") if _compression(path) else open(path, "rb") as stream:
            if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                stream.seek(0)
            yield stream
    except EOFError as error:
        raise ValueError(f"The file {path!r} is truncated: {error}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"The file {path!r} is corrupted: {error}") from error


def is_ignored(line: bytes, comment: str | None) -> bool:
    """Returns whether a line is blank or a comment (tabs count as text: they separate columns)."""
    if comment and line.startswith(comment.encode()):
        return True
    return not line.strip(b" \r\n")


def scan(path: str, header: int = 0, comment: str | None = None) -> TextFile:
    """Counts the lines of a file.

    Args:
        path: The file, plain or gzip.
        header: Number of lines before the first row.
        comment: Lines that begin with this text hold no row; None for no such lines.

    Raises:
        ValueError: If the file has no rows, is truncated or corrupted; the message names it.
    """
    lines = 0
    ignored = []
    with open_text(path) as stream:
        begins_with_bom = stream.tell() > 0
        for line in stream:
            if is_ignored(line, comment):
                ignored.append(lines - header)
            lines += 1
    lines = max(lines - header, 0)
    gaps = np.array([line for line in ignored if line >= 0], dtype=np.int64)
    file = TextFile(path, _compression(path), header, lines, gaps, begins_with_bom)
    if not file.rows:
        raise ValueError(f"The file {path!r} has no rows; every file must have at least one.")
    return file


def _compression(path: str) -> str:
    """Returns the compression type of a file by its first bytes, whatever its name."""
    with open(path, "rb") as stream:
        return "GZIP" if stream.read(2) == b"\x1f\x8b" else ""


def segments(files: Sequence[TextFile], first: int, last: int) -> list[Segment]:
    """Returns the lines that hold the rows from `first` up to (not including) `last`.

    Rows are counted from 0 over all files.
    """
    found = []
    offset = 0
    for file in files:
        start, stop = max(first - offset, 0), min(last - offset, file.rows)
        if start < stop:
            begin, end = file.line_of_row(start), file.line_of_row(stop - 1) + 1
            found.append(Segment(file, file.header + begin, end - begin))
        offset += file.rows
    return found


def read_lines(parts: Sequence[Segment], comment: str | None = None) -> tf.data.Dataset:
    """Returns the rows of the segments in order, as `(code, line)` pairs.

    Args:
        parts: Lines to read.
        comment: Lines that begin with this text are left out, like blank ones.

    Returns:
        A data set of an int64 scalar (see `_errors.LINE_BITS`) and a string scalar.
    """
    starts = [(i << _errors.LINE_BITS) + part.skip + 1 for i, part in enumerate(parts)]
    sources = tf.data.Dataset.from_tensor_slices(
        (
            tf.constant([part.file.path for part in parts]),
            tf.constant([part.file.compression for part in parts]),
            tf.constant(starts, tf.int64),
            tf.constant([part.skip for part in parts], tf.int64),
            tf.constant([part.lines for part in parts], tf.int64),
        )
    )
    # Dropping lines costs time, so it is left out where no file needs it.
    dropping = any(len(part.file.ignored) for part in parts)

    def drop(codes: tf.Tensor, lines: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        keep = tf.logical_not(tf.strings.regex_full_match(lines, " *"))
        if comment:
            begins = tf.strings.substr(lines, 0, len(comment.encode()))
            keep = tf.logical_and(keep, tf.not_equal(begins, comment))
        return tf.boolean_mask(codes, keep), tf.boolean_mask(lines, keep)

    def without_bom(codes: tf.Tensor, lines: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        in_file = tf.bitwise.bitwise_and(codes, tf.constant((1 << _errors.LINE_BITS) - 1, tf.int64))
        texts = tf.strings.regex_replace(lines, r"^\x{FEFF}", "")
        return codes, tf.where(tf.equal(in_file, 1), texts, lines)

    has_bom = any(part.file.has_bom and not part.skip for part in parts)

    def read(path, compression, start, skip, lines):
        # TensorFlow takes a truncated gzip file for a shorter one.
        end = tf.data.Dataset.from_tensors(_errors.MISSING).repeat()
        numbered = tf.data.TextLineDataset(path, compression).skip(skip).concatenate(end)
        numbered = numbered.take(lines).enumerate(start)
        if dropping or has_bom:
            # By the thousand: calling a predicate for every single line is twenty times slower.
            numbered = numbered.batch(_CHUNK)
            numbered = numbered.map(without_bom) if has_bom else numbered
            numbered = numbered.map(drop) if dropping else numbered
            numbered = numbered.unbatch()
        return numbered

    return sources.flat_map(read)


class TextData(_spec.ClickData):
    """Base class of the readers of text files; subclasses say how a batch of lines is parsed."""

    def __init__(
        self,
        files: Sequence[TextFile],
        test_files: Sequence[TextFile] | None,
        test_fraction: float,
        comment: str | None = None,
    ) -> None:
        """Splits the rows.

        Args:
            files: Files with the training rows.
            test_files: Files with the test rows; None takes the last rows of `files`.
            test_fraction: Which part of the rows of `files` these are; unused with `test_files`.
            comment: Lines that begin with this text hold no row.

        Raises:
            ValueError: If `test_fraction` is not within 0 and 1 or leaves no training row.
        """
        if not 0 <= test_fraction < 1:
            raise ValueError(f"test_fraction={test_fraction}: must be at least 0 and less than 1.")
        self._comment = comment
        rows = sum(file.rows for file in files)
        if test_files is None:
            self._test_rows = round(rows * test_fraction)
            self._train_rows = rows - self._test_rows
            self._test_segments = segments(files, self._train_rows, rows)
        else:
            self._test_rows = sum(file.rows for file in test_files)
            self._train_rows = rows
            self._test_segments = segments(test_files, 0, self._test_rows)
        if not self._train_rows:
            raise ValueError(
                f"test_fraction={test_fraction}: leaves none of the {rows} rows for training."
            )
        self._train_segments = segments(files, 0, self._train_rows)
        logging.info(
            "%s: %d training rows, %d test rows",
            type(self).__name__,
            self._train_rows,
            self._test_rows,
        )

    @abc.abstractmethod
    def _parse(self, lines: tf.Tensor, where: _errors.Location) -> Batch:
        """Turns a string `[batch]` of lines into features and labels."""

    @property
    def train_rows(self) -> int:
        """The number of rows of the training part."""
        return self._train_rows

    @property
    def test_rows(self) -> int:
        """The number of rows of the test part; 0 when there is none."""
        return self._test_rows

    def train(self, batch_size: int, shuffle: int = 0, seed: int | None = None) -> tf.data.Dataset:
        """See `ClickData.train`. Iterating raises InvalidArgumentError for a malformed line."""
        return self._dataset(self._train_segments, self._train_rows, batch_size, shuffle, seed)

    def test(self, batch_size: int) -> tf.data.Dataset:
        """See `ClickData.test`. Iterating raises InvalidArgumentError for a malformed line."""
        if not self._test_rows:
            raise ValueError(
                "There is no test part: give test_path, or a test_fraction greater than 0."
            )
        return self._dataset(self._test_segments, self._test_rows, batch_size, 0, None)

    def _dataset(
        self,
        parts: Sequence[Segment],
        count: int,
        batch_size: int,
        shuffle: int,
        seed: int | None,
    ) -> tf.data.Dataset:
        _spec.check_batching(batch_size, shuffle)
        names = [part.file.path for part in parts]

        def parse(codes: tf.Tensor, lines: tf.Tensor) -> Batch:
            where = _errors.Location(names, codes)
            with tf.control_dependencies([_errors.require_whole_files(lines, where)]):
                lines = tf.identity(lines)
            return self._parse(lines, where)

        rows = read_lines(parts, self._comment)
        if shuffle:
            rows = rows.shuffle(shuffle, seed=seed, reshuffle_each_iteration=True)
        # Whole batches are parsed at once: one call per row would cost far more than the parsing.
        batches = rows.batch(batch_size).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        # Known from the count of the lines; Keras's progress bar wants it.
        steps = -(-count // batch_size)
        batches = batches.apply(tf.data.experimental.assert_cardinality(steps))
        return batches.prefetch(tf.data.AUTOTUNE)
