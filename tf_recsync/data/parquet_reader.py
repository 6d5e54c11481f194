"""Reader of Parquet files."""

import dataclasses
import datetime
from collections.abc import Sequence

import tensorflow as tf

from tf_recsync.data import _errors, _features, _packing, _parquet, _records, _text
from tf_recsync.data.schema import Schema, check_schema

# Row groups that are read at the same time.
_AT_ONCE = 2


class Parquet(_features.OfSchema, _records.RecordData):
    """Reader of Parquet files, by pyarrow; `Schema` says what becomes of their columns.

    Only the columns are read that the schema names. Categories and labels may have texts, numbers,
    dates or booleans (`"true"` and `"false"`), also dictionaries of them; multi-hot columns and
    those of their weights have lists.

    Files are read by row group, of which a few are in memory at the same time. Their ends are read
    when the object is made, which says how many rows they have. Processes that read, readers among
    them, need pyarrow: `pip install 'tf_recsync[parquet]'`.

    Args:
        path: A file, a folder of files, a glob pattern, or several of them. Row groups are read in
            the order of their files' names, and in a random one with `shuffle`. A folder may have
            folders named like `day=2024-01-01` in it, which can be a column (`Schema.partitions`).
        schema: What the columns are.
        test_path: Files with the test rows, given like `path`. By default (None) the test part
            is made of the last rows of `path`.
        test_fraction: Which fraction of the rows that is, in file order over all files; at least 0
            (no test part) and less than 1. Default 0.1. Unused when `test_path` is given.
        on_error: What becomes of malformed rows: `"raise"` (the default) raises an error for the
            first one, `"skip"` leaves them out, and counts them (`skipped`), and so all rows of a
            row group that is corrupted. A data set does not know its length then.
        between: Two times, as `datetime.datetime`s (without a zone: in UTC): only rows whose
            `Schema.timestamp` is from the first up to (not including) the second are taken. A data
            set does not know its length then. Default None: all rows.

    Raises:
        FileNotFoundError: If no file matches a path.
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is out of range, or a file is no Parquet file, has no rows, or
            lacks a column or has it with another type; the message names the file and the column.

    Iterating over a data set raises `tf.errors.InvalidArgumentError` for a malformed row; the
    message names the file, the row (from 1) and the column, or the row group that is corrupted.

    Example:
        >>> import pathlib, tempfile
        >>> import pyarrow, pyarrow.parquet
        >>> from tf_recsync.data import CategoricalColumn
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "clicks.parquet"
        >>> table = pyarrow.table({"country": ["US", None, "CH"], "click": [1, 0, 1]})
        >>> pyarrow.parquet.write_table(table, file)
        >>> country = CategoricalColumn("country", vocabulary=("CH", "US"))
        >>> schema = Schema(label="click", positive=("1",), categorical=(country,))
        >>> features, label = next(iter(Parquet(file, schema, test_fraction=0).train(batch_size=3)))
        >>> features["country"].numpy().tolist(), label.numpy().tolist()
        ([3, 0, 2], [[1.0], [0.0], [1.0]])
    """

    _unit = "row"

    def __init__(
        self,
        path: _text.Paths,
        schema: Schema,
        *,
        test_path: _text.Paths | None = None,
        test_fraction: float = 0.1,
        on_error: str = "raise",
        between: tuple[datetime.datetime, datetime.datetime] | None = None,
    ) -> None:
        """See the class."""
        check_schema(schema)
        options = schema.options(on_error, between)
        self._describe(schema)

        def inspect(name: str) -> _parquet.ParquetFile:
            return _parquet.inspect(name, schema)

        files, test_files = _text.scan_files(inspect, path, test_path)
        every = [*files, *(test_files or [])]
        self._timestamp_is_text = every[0].timestamp_is_text
        for file in every:
            if file.timestamp_is_text != self._timestamp_is_text:
                raise ValueError(
                    f"The column {schema.timestamp!r} has texts in one of {every[0].path!r} and "
                    f"{file.path!r} and not in the other; it must have the same type in all files."
                )
        super().__init__(files, test_files, test_fraction, options)

    def _with_folder_numbers(
        self,
        columns: _features.Columns,
        paths: Sequence[str],
        part: tf.Tensor,
        checks: _errors.Checks,
    ) -> _features.Columns:
        """Returns columns with the numbers in the names of the folders of one of the paths."""
        schema = self._schema
        names = [name for name in schema.numbers if name in schema.partitions]
        if not names:
            return columns
        texts = tf.gather(tf.constant([_text.folder_values(path, names) for path in paths]), part)
        of_rows = tf.repeat(
            tf.strings.strip(texts)[tf.newaxis], tf.size(checks.where.codes), axis=0
        )
        found, is_absent = _features.numbers_of(of_rows, names, schema, checks)
        numbers = tf.unstack(columns.numbers, len(schema.numbers), axis=1)
        absent = tf.unstack(columns.absent, len(schema.numbers), axis=1)
        for i, name in enumerate(names):
            place = schema.numbers.index(name)
            numbers[place], absent[place] = found[:, i], is_absent[:, i]
        return dataclasses.replace(
            columns, numbers=tf.stack(numbers, axis=1), absent=tf.stack(absent, axis=1)
        )

    def _batches(
        self,
        parts: Sequence[_records.Part],
        counter: str,
        batch_size: int,
        shuffle: int,
        seed: int | None,
    ) -> tf.data.Dataset:
        packing = _packing.Packing(self._spec)
        paths = [part.file.path for part in parts]

        # Nothing to convert, which takes longer than everything else that a new data set needs.
        @tf.autograph.experimental.do_not_convert
        def read(part, group, first, last, before) -> tuple[tf.Tensor | tf.RaggedTensor, ...]:
            place = (tf.gather(tf.constant(paths), part), group, first, last)
            columns = _parquet.read_columns(
                self._schema, self._timestamp_is_text, self._options.skips, counter, place
            )
            begin = tf.bitwise.left_shift(part, tf.constant(_errors.LINE_BITS, tf.int64)) + before
            codes = begin + tf.range(1, tf.shape(columns.numbers, tf.int64)[0] + 1)
            where = self._location(parts, codes)
            checks = _errors.Checks(where, is_raising=not self._options.skips)
            columns = self._with_folder_numbers(columns, paths, part, checks)
            batch, seconds = self._features.make(columns, checks)
            packed = packing.pack(batch)
            if not self._options.leaves_out:
                return packed
            kept = self._kept(checks, seconds, counter)
            dense, *ragged = packed
            return tf.boolean_mask(dense, kept), *(
                tf.ragged.boolean_mask(tensor, kept) for tensor in ragged
            )

        unpack = tf.autograph.experimental.do_not_convert(packing.unpack)
        places = tf.constant(_parquet.places_of(parts), tf.int64)
        groups = tf.data.Dataset.from_tensor_slices(tuple(tf.unstack(places, num=5, axis=1)))
        if shuffle:
            groups = groups.shuffle(len(places), seed=seed, reshuffle_each_iteration=True)
        rows = groups.map(read, num_parallel_calls=_AT_ONCE)
        if self._options.leaves_out:
            rows = self._counted(rows, parts, counter)
            rows = rows.filter(lambda packed, *ragged: tf.shape(packed)[0] > 0)
        if shuffle:
            rows = rows.unbatch().shuffle(shuffle, seed=seed, reshuffle_each_iteration=True)
            batches = rows.batch(batch_size)
        else:
            batches = rows.rebatch(batch_size)
        return batches.map(unpack, num_parallel_calls=tf.data.AUTOTUNE)
