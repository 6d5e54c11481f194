"""Reader of CSV files with a schema."""

import datetime

import tensorflow as tf

from tf_recsync.data import _errors, _features, _fields, _fitting, _records, _text
from tf_recsync.data.columns import CategoricalColumn
from tf_recsync.data.schema import Schema, check_schema


class Csv(_features.OfSchema, _text.TextData):
    r"""Reader of CSV files; `Schema` says what their columns are and what becomes of them.

    The lines of all files are counted once, when the object is made. Blank lines are left out.

    Args:
        path: A file, a folder of files, a glob pattern, or several of them; files may be plain or
            gzip. Files are read in the order of their names. A folder may have folders named like
            `day=2024-01-01` in it, which can be a column (`Schema.partitions`).
        schema: What the columns are.
        test_path: Files with the test rows, given like `path`. By default (None) the test part
            is made of the last rows of `path`.
        test_fraction: Which fraction of the rows that is, in file order over all files; at least 0
            (no test part) and less than 1. Default 0.1. Unused when `test_path` is given.
        on_error: What becomes of malformed rows: `"raise"` (the default) raises an error for the
            first one, `"skip"` leaves them out, and counts them (`skipped`). A data set does not
            know its length then.
        between: Two times, as `datetime.datetime`s (without a zone: in UTC): only rows whose
            `Schema.timestamp` is from the first up to (not including) the second are taken. A data
            set does not know its length then. Default None: all rows.

    Raises:
        FileNotFoundError: If no file matches a path.
        ValueError: If a header is not that of the schema, an argument is out of range or a file
            has no rows, or is truncated or corrupted (gzip).

    Iterating over a data set raises `tf.errors.InvalidArgumentError` for a malformed line; the
    message names the file, the line (from 1) and the column. So it does for a file that has fewer
    lines than were counted.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "clicks.csv"
        >>> _ = file.write_text("age, country, clicked\n30, US, yes\n50, ?, no\n")
        >>> schema = Schema.fit(
        ...     file, label="clicked", positive=["yes"], numeric=["age"], categorical=["country"]
        ... )
        >>> features, label = next(iter(Csv(file, schema, test_fraction=0).train(batch_size=2)))
        >>> features["numeric"].numpy().tolist(), features["country"].numpy().tolist()
        ([[-1.0], [1.0]], [2, 0])
    """

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
        files = _text.find_files(path)
        if not schema.columns:
            schema = schema.with_columns_of(files[0])
        options = schema.options(on_error, between)
        self._describe(schema)
        scanned, test_files = _text.scan_files(schema.scan, files, test_path)
        super().__init__(scanned, test_files, test_fraction, schema.comment, options)

    def _parse(
        self, rows: tf.Tensor, checks: _errors.Checks
    ) -> tuple[_records.Batch, tf.Tensor | None]:
        schema, where = self._schema, checks.where
        fields = _fields.split_columns(
            rows, schema.separator, schema.columns, checks, schema.quotechar
        )
        if schema.partitions:
            values = [_text.folder_values(name, schema.partitions) for name in where.files]
            of_rows = tf.gather(tf.constant(values), where.file_numbers())
            fields = tf.concat([fields, of_rows], axis=1)
        position = {name: i for i, name in enumerate(schema.all_columns)}
        places = tf.constant([position[name] for name in schema.numbers], tf.int32)
        numerals = tf.strings.strip(tf.gather(fields, places, axis=1))
        numbers, absent = _features.numbers_of(numerals, schema.numbers, schema, checks)
        lists, weights = {}, {}
        for column in schema.multi_hot:
            pieces = self._pieces(fields[:, position[column.name]], column)
            lists[column.name] = _features.Texts(pieces.flat_values), pieces.row_splits
        for column in schema.weighted:
            name = str(column.weights)
            pieces = self._pieces(fields[:, position[name]], column)
            weights[name] = self._weights(name, pieces, checks)
        seconds = None
        if schema.timestamp is not None:
            seconds = _features.Texts(fields[:, position[schema.timestamp]])
        columns = _features.Columns(
            numbers=numbers,
            absent=absent,
            texts={name: _features.Texts(fields[:, position[name]]) for name in schema.texts},
            lists=lists,
            weights=weights,
            seconds=seconds,
        )
        return self._features.make(columns, checks)

    def _pieces(self, fields: tf.Tensor, column: CategoricalColumn) -> tf.RaggedTensor:
        """Returns the values of a multi-hot column, string `[batch, None]`; none where missing."""
        fields = tf.strings.strip(fields)
        absent = _features.is_missing(fields, self._schema)
        separator = column.separator
        if not separator.strip(" "):
            fields, separator = tf.strings.regex_replace(fields, " +", " "), " "
        pieces = tf.strings.split(fields, separator)
        # An empty text has one piece, which is empty.
        lengths = tf.where(absent, tf.zeros_like(pieces.row_lengths()), pieces.row_lengths())
        values = tf.boolean_mask(
            pieces.flat_values, tf.logical_not(tf.gather(absent, pieces.value_rowids()))
        )
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)

    def _weights(
        self, name: str, pieces: tf.RaggedTensor, checks: _errors.Checks
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the numbers in texts of weights, flat, and row splits."""
        texts = tf.strings.strip(pieces.flat_values)
        wrong = tf.logical_not(tf.strings.regex_full_match(texts, _fitting.NUMBER))
        of_rows = tf.reduce_any(pieces.with_flat_values(wrong), axis=-1)
        reason = f"column {name}: has a weight that is not a number"
        with tf.control_dependencies([_errors.require_rows(of_rows, reason, checks)]):
            numerals = tf.where(wrong, "0", texts)
        return tf.strings.to_number(numerals, tf.float32), pieces.row_splits
