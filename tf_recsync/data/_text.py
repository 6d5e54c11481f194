"""Data sets of text files with one row per line: finding, counting and reading them."""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import os
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, TypeVar

import numpy as np
import tensorflow as tf

from tf_recsync._checks import checked_path
from tf_recsync.data import _errors, _records

_HIVE_MISSING = "__HIVE_DEFAULT_PARTITION__"


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
File = TypeVar("File")  # What a reader knows of a file.


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

    def lines_of(self, first: int, last: int) -> tuple[int, int]:
        """Returns the lines that hold the rows from `first` up to (not including) `last`.

        Returns:
            How many lines of the file to skip, and how many then to read.
        """
        begin, end = self.line_of_row(first), self.line_of_row(last - 1) + 1
        return self.header + begin, end - begin


def scan_files(
    scan: Callable[[str], File], path: Paths, test_path: Paths | None
) -> tuple[list[File], list[File] | None]:
    """Returns what is known of the files of a data set, and of those with its test rows.

    Args:
        scan: Finds it out of one file.
        path: As `find_files` takes it.
        test_path: Likewise; None where there are no files with test rows, which gives None.

    Raises:
        FileNotFoundError: If no file matches a path.
    """
    files = [scan(name) for name in find_files(path)]
    if test_path is None:
        return files, None
    return files, [scan(name) for name in find_files(test_path, "test_path")]


def find_files(path: Paths, argument: str = "path") -> list[str]:
    """Returns the files that a path stands for, sorted by name.

    Args:
        path: A file, a folder or a glob pattern, or several of them, in this order. A folder stands
            for its files and those of its folders with names like `day=2024-01-01`, and so on
            down, but for hidden ones: those whose names begin with a dot or, like Spark's
            `_SUCCESS`, with an underscore. A pattern stands for hidden ones only if its last part
            begins like that, too.
        argument: Its name.

    Raises:
        ValueError: If it is no path.
        FileNotFoundError: If there is no such file, or no path; the message names the path.
    """
    if isinstance(path, Iterable) and not isinstance(path, str | bytes | os.PathLike):
        files = [name for one in path for name in find_files(one, argument)]
        if not files:
            raise FileNotFoundError(f"{argument}=[]: names no file; it must name at least one.")
        return files
    path = checked_path(path, argument, "file or a folder")
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        files = list(_files_in(path))
    else:
        wants_hidden = is_hidden(os.path.basename(path))
        files = [
            name
            for name in glob.glob(path)
            if os.path.isfile(name) and (wants_hidden or not is_hidden(os.path.basename(name)))
        ]
    if not files:
        raise FileNotFoundError(
            f"No file matches {argument}={path!r} (a file, folder or glob pattern)."
        )
    return sorted(files)


def is_hidden(name: str) -> bool:
    """Returns whether a file of this name in a folder holds no rows of it."""
    return name.startswith((".", "_"))


def has_files(folder: str) -> bool:
    """Returns whether a folder stands for any file."""
    return any(_files_in(folder))


def _files_in(folder: str) -> Iterator[str]:
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if is_hidden(name):
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
        with gzip.open(path, "rb") if compression(path) else open(path, "rb") as stream:
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
    file = TextFile(path, compression(path), header, lines, gaps, begins_with_bom)
    if not file.rows:
        raise ValueError(f"The file {path!r} has no rows; every file must have at least one.")
    return file


def compression(path: str) -> str:
    """Returns the compression type of a file by its first bytes, whatever its name."""
    with open(path, "rb") as stream:
        return "GZIP" if stream.read(2) == b"\x1f\x8b" else ""


def read_lines(parts: Sequence[_records.Part], comment: str | None = None) -> tf.data.Dataset:
    """Returns the rows of the parts in order, as `(code, line)` pairs.

    Args:
        parts: Rows to read.
        comment: Lines that begin with this text are left out, like blank ones.

    Returns:
        A data set of an int64 scalar (see `_errors.LINE_BITS`) and a string scalar.
    """
    spans = [part.file.lines_of(part.first, part.last) for part in parts]
    starts = [(i << _errors.LINE_BITS) + skip + 1 for i, (skip, _) in enumerate(spans)]
    sources = tf.data.Dataset.from_tensor_slices(
        (
            tf.constant([part.file.path for part in parts]),
            tf.constant([part.file.compression for part in parts]),
            tf.constant(starts, tf.int64),
            tf.constant([skip for skip, _ in spans], tf.int64),
            tf.constant([lines for _, lines in spans], tf.int64),
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

    has_bom = any(
        part.file.has_bom and not skip for part, (skip, _) in zip(parts, spans, strict=True)
    )

    def read(path, compression, start, skip, lines):
        # TensorFlow takes a truncated gzip file for a shorter one.
        end = tf.data.Dataset.from_tensors(_errors.MISSING).repeat()
        numbered = tf.data.TextLineDataset(path, compression).skip(skip).concatenate(end)
        numbered = numbered.take(lines).enumerate(start)
        if dropping or has_bom:
            # By the thousand: calling a predicate for every single line is twenty times slower.
            numbered = numbered.batch(_records.CHUNK)
            numbered = numbered.map(without_bom) if has_bom else numbered
            numbered = numbered.map(drop) if dropping else numbered
            numbered = numbered.unbatch()
        return numbered

    return sources.flat_map(read)


class TextData(_records.RowData):
    """Base class of the readers of text files; subclasses say how a batch of lines is parsed."""

    def __init__(
        self,
        files: Sequence[TextFile],
        test_files: Sequence[TextFile] | None,
        test_fraction: float,
        comment: str | None = None,
        options: _records.Options | None = None,
    ) -> None:
        """Splits the rows.

        Args:
            files: Files with the training rows.
            test_files: See `RecordData`.
            test_fraction: See `RecordData`.
            comment: Lines that begin with this text hold no row.
            options: See `RecordData`.

        Raises:
            ValueError: See `RecordData`.
        """
        super().__init__(files, test_files, test_fraction, options)
        self._comment = comment

    def _rows(
        self, parts: Sequence[_records.Part], shuffle: bool = False, seed: int | None = None
    ) -> tf.data.Dataset:
        return read_lines(parts, self._comment)
