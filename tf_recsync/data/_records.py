"""Data sets of files with rows: what is common to text, TFRecord and Parquet files."""

import abc
import dataclasses
import datetime
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from tf_recsync._checks import number
from tf_recsync.data import _errors, _skipped, _spec

# Features, labels and, where rows have weights, these: what `model.fit` takes.
Batch = tuple[Any, ...]

CHUNK = 1024
_ON_ERROR = ("raise", "skip")


class RowFile(Protocol):
    """A file, of which is known how many rows it has."""

    @property
    def path(self) -> str:
        """The file."""

    @property
    def rows(self) -> int:
        """The number of its rows."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive rows of a file, from `first` up to (not including) `last`, both from 0."""

    file: Any
    first: int
    last: int


def parts_of(files: Sequence[RowFile], first: int, last: int) -> list[Part]:
    """Returns where the rows from `first` up to (not including) `last` are.

    Rows are counted from 0 over all files.
    """
    found = []
    offset = 0
    for file in files:
        start, stop = max(first - offset, 0), min(last - offset, file.rows)
        if start < stop:
            found.append(Part(file, start, stop))
        offset += file.rows
    return found


@dataclasses.dataclass(frozen=True)
class Options:
    """Which rows are left out.

    Args:
        on_error: `"raise"` or `"skip"`: what becomes of malformed rows.
        between: Two times: rows from the first up to (not including) the second are taken; None
            for all.

    Raises:
        ValueError: If `on_error` is another word, or `between` are not two times in order.
    """

    on_error: str = "raise"
    between: tuple[datetime.datetime, datetime.datetime] | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.on_error not in _ON_ERROR:
            raise ValueError(f"on_error={self.on_error!r}: must be one of {_ON_ERROR}.")
        if self.between is not None and not (
            isinstance(self.between, Sequence)
            and len(self.between) == 2
            and all(isinstance(time, datetime.datetime) for time in self.between)
            and self.seconds[0] < self.seconds[1]
        ):
            raise ValueError(f"between={self.between}: must be two datetimes in ascending order.")

    @property
    def skips(self) -> bool:
        """Whether malformed rows are left out."""
        return self.on_error == "skip"

    @property
    def leaves_out(self) -> bool:
        """Whether rows may be left out."""
        return self.skips or self.between is not None

    @property
    def seconds(self) -> list[float]:
        """`between` in seconds since 1970; a time without a zone is in UTC."""
        times = [
            time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
            for time in self.between or ()
        ]
        return [time.timestamp() for time in times]


class RecordData(_spec.ClickData):
    """Base class of the readers of files; subclasses say how some rows become batches."""

    # What has a number in a file.
    _unit = "line"

    def __init__(
        self,
        files: Sequence[RowFile],
        test_files: Sequence[RowFile] | None,
        test_fraction: float,
        options: Options | None = None,
    ) -> None:
        """Splits the rows.

        Args:
            files: Files with the training rows.
            test_files: Files with the test rows; None takes the last rows of `files`.
            test_fraction: Which part of the rows of `files` these are; unused with `test_files`.
            options: Which rows are left out; None for none.

        Raises:
            ValueError: If `test_fraction` is not within 0 and 1 or leaves no training row.
        """
        test_fraction = number("test_fraction", test_fraction, least=0, below=1)
        rows = sum(file.rows for file in files)
        if test_files is None:
            self._test_rows = round(rows * test_fraction)
            self._train_rows = rows - self._test_rows
            self._test_parts = parts_of(files, self._train_rows, rows)
        else:
            self._test_rows = sum(file.rows for file in test_files)
            self._train_rows = rows
            self._test_parts = parts_of(test_files, 0, self._test_rows)
        if not self._train_rows:
            raise ValueError(
                f"test_fraction={test_fraction}: leaves none of the {rows} rows for training."
            )
        self._train_parts = parts_of(files, 0, self._train_rows)
        self._options = options or Options()
        # The passes over each part of the data count what they leave out under names of their own.
        self._counters = {part: f"{part} {uuid.uuid4().hex}" for part in ("train", "test")}
        logging.info(
            "%s: %d training rows, %d test rows",
            type(self).__name__,
            self._train_rows,
            self._test_rows,
        )

    @abc.abstractmethod
    def _batches(
        self,
        parts: Sequence[Part],
        counter: str,
        batch_size: int,
        shuffle: int,
        seed: int | None,
    ) -> tf.data.Dataset:
        """Returns the batches of some rows.

        Args:
            parts: Where the rows are.
            counter: The counter of those that are left out.
            batch_size: See `train`.
            shuffle: See `train`.
            seed: See `train`.
        """

    def _extra_skipped(self, parts: Sequence[Part]) -> Mapping[str, int]:
        """Returns by file what else is left out of it than rows."""
        return {}

    def _location(self, parts: Sequence[Part], codes: tf.Tensor) -> _errors.Location:
        """Says where rows come from."""
        return _errors.Location([part.file.path for part in parts], codes, self._unit)

    @property
    def train_rows(self) -> int:
        """The number of rows of the training part; those that are left out are counted, too."""
        return self._train_rows

    @property
    def test_rows(self) -> int:
        """The number of rows of the test part; 0 when there is none. See `train_rows`."""
        return self._test_rows

    @property
    def skipped(self) -> Mapping[str, int]:
        """How many malformed rows `on_error="skip"` left out of each file that had some.

        They are those of the latest pass over the training and over the test part, of which each
        is also logged at its end, where they were read. Passes that readers or workers make count
        in their processes, and are in their logs only.
        """
        return _skipped.counts(self._counters.values())

    def train(self, batch_size: int, shuffle: int = 0, seed: int | None = None) -> tf.data.Dataset:
        """See `ClickData.train`. Iterating raises InvalidArgumentError for a malformed row."""
        _spec.check_batching(batch_size, shuffle)
        dataset = self._batches(
            self._train_parts, self._counters["train"], batch_size, shuffle, seed
        )
        return self._finish(dataset, self._train_rows, batch_size)

    def test(self, batch_size: int) -> tf.data.Dataset:
        """See `ClickData.test`. Iterating raises InvalidArgumentError for a malformed row."""
        _spec.check_batching(batch_size)
        if not self._test_rows:
            raise ValueError(
                "There is no test part: give test_path, or a test_fraction greater than 0."
            )
        dataset = self._batches(self._test_parts, self._counters["test"], batch_size, 0, None)
        return self._finish(dataset, self._test_rows, batch_size)

    def _finish(self, dataset: tf.data.Dataset, rows: int, batch_size: int) -> tf.data.Dataset:
        if not self._options.leaves_out:
            # Known from the count of the rows; Keras's progress bar wants it.
            steps = -(-rows // batch_size)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _kept(self, checks: _errors.Checks, seconds: tf.Tensor | None, counter: str) -> tf.Tensor:
        """Returns which rows are not left out: bool `[batch]`.

        Args:
            checks: Knows which rows are malformed.
            seconds: The times of the rows, float64 `[batch]`, or None.
            counter: Counts those that are malformed.
        """
        kept = tf.logical_not(checks.malformed)
        if self._options.skips:
            files, _ = checks.where.places(tf.boolean_mask(checks.where.codes, checks.malformed))
            with tf.control_dependencies([_skipped.count(counter, files)]):
                kept = tf.identity(kept)
        if self._options.between is not None:
            since, until = self._options.seconds
            kept = tf.logical_and(kept, tf.logical_and(seconds >= since, seconds < until))
        return kept

    def _counted(
        self, dataset: tf.data.Dataset, parts: Sequence[Part], counter: str
    ) -> tf.data.Dataset:
        """Has counting begin and end with a pass over the data set, if rows are skipped."""
        if not self._options.skips:
            return dataset
        return _skipped.in_passes(dataset, counter, self._extra_skipped(parts))


class RowData(RecordData):
    """Base class of the readers of files that hold one row after the other, each a string."""

    @abc.abstractmethod
    def _rows(
        self, parts: Sequence[Part], shuffle: bool = False, seed: int | None = None
    ) -> tf.data.Dataset:
        """Returns the rows as pairs of a code (see `_errors.Location`) and a string.

        Args:
            parts: Where they are.
            shuffle: Whether rows are shuffled afterwards, so that files may be in any order.
            seed: See `train`.
        """

    @abc.abstractmethod
    def _parse(self, rows: tf.Tensor, checks: _errors.Checks) -> tuple[Batch, tf.Tensor | None]:
        """Turns a string `[batch]` of rows into a batch and times, float64 `[batch]` or None."""

    def _require_whole(self, rows: tf.Tensor, where: _errors.Location) -> tf.Tensor:
        """Returns the rows; raises if `_errors.MISSING` stands for one that is not there."""
        with tf.control_dependencies([_errors.require_whole_files(rows, where)]):
            return tf.identity(rows)

    def _batches(
        self,
        parts: Sequence[Part],
        counter: str,
        batch_size: int,
        shuffle: int,
        seed: int | None,
    ) -> tf.data.Dataset:
        # Nothing to convert, which takes longer than everything else that a new data set needs.
        @tf.autograph.experimental.do_not_convert
        def parse(codes: tf.Tensor, rows: tf.Tensor) -> Batch:
            where = self._location(parts, codes)
            rows = self._require_whole(rows, where)
            return self._parse(rows, _errors.Checks(where))[0]

        @tf.autograph.experimental.do_not_convert
        def keep(codes: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            where = self._location(parts, codes)
            rows = self._require_whole(rows, where)
            checks = _errors.Checks(where, is_raising=not self._options.skips)
            kept = self._kept(checks, self._parse(rows, checks)[1], counter)
            return tf.boolean_mask(codes, kept), tf.boolean_mask(rows, kept)

        rows = self._rows(parts, shuffle > 0, seed)
        if self._options.leaves_out:
            # By the thousand: calling a function for every single row takes far longer.
            chunks = rows.batch(CHUNK).map(keep, num_parallel_calls=tf.data.AUTOTUNE)
            rows = self._counted(chunks, parts, counter).unbatch()
        if shuffle:
            rows = rows.shuffle(shuffle, seed=seed, reshuffle_each_iteration=True)
        # Whole batches are parsed at once: one call per row would cost far more than the parsing.
        return rows.batch(batch_size).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
