"""Reader of TFRecord files of `tf.train.Example`s."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.data import _errors, _features, _python_ops, _records, _text
from tf_recsync.data.schema import Schema, check_schema

# How many of the first records are looked at for the type of a column.
_LOOKED_AT = 1000
# What a record has around its data: its length and two checksums.
_FRAME_BYTES = 16
_NO_INTEGER = -(1 << 63)
# For each type of values the first byte of a feature with a list of them, in a regular expression.
_TAGS = {tf.string: r"\x0a", tf.float32: r"\x12", tf.int64: r"\x1a"}
_TYPES = {"bytes_list": tf.string, "float_list": tf.float32, "int64_list": tf.int64}
_DEFAULTS = {tf.string: "", tf.float32: float("nan"), tf.int64: _NO_INTEGER}


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A TFRecord file.

    Args:
        path: The file.
        compression: `"GZIP"` or `""`.
        rows: The number of its records that can be read.
        damage: What is the matter with the rest of it; empty if all can be read.
    """

    path: str
    compression: str
    rows: int
    damage: str = ""


class TfRecord(_features.OfSchema, _records.RowData):
    """Reader of TFRecord files of `tf.train.Example`s; `Schema` says what becomes of their columns.

    The features of an `Example` are the columns, under their names: a list of one value, or of any
    number in a multi-hot column and in that of its weights. One that is not there, or empty, is
    missing. Categories and labels may be bytes, integers or floats, and numbers integers or floats;
    the first records say which.

    The records of all files are counted once, when the object is made, which also verifies their
    checksums.

    Args:
        path: A file, a folder of files, a glob pattern, or several of them; files may be plain or
            gzip. Files are read in the order of their names, and in a random one with `shuffle`. A
            folder may have folders named like `day=2024-01-01` in it, which can be a column
            (`Schema.partitions`).
        schema: What the columns are.
        test_path: Files with the test rows, given like `path`. By default (None) the test part
            is made of the last rows of `path`.
        test_fraction: Which fraction of the rows that is, in file order over all files; at least 0
            (no test part) and less than 1. Default 0.1. Unused when `test_path` is given.
        on_error: What becomes of malformed records: `"raise"` (the default) raises an error for the
            first one, `"skip"` leaves them out, and counts them (`skipped`); of a file that is
            damaged, those before the damage are read, and the damage counts as one. A data set does
            not know its length then, and each record is parsed twice, once by Python.
        between: Two times, as `datetime.datetime`s (without a zone: in UTC): only rows whose
            `Schema.timestamp` is from the first up to (not including) the second are taken. A data
            set does not know its length then. Default None: all rows.

    Raises:
        FileNotFoundError: If no file matches a path.
        ValueError: If an argument is out of range, no record has a label, or a file has no records,
            or is truncated or corrupted; the message names the file, the record and its offset.

    Iterating over a data set raises `tf.errors.InvalidArgumentError` for a malformed record; the
    message names the file, the record (from 1), its offset in bytes and the column. If the column
    has another type than in the first records, or several values, TensorFlow's own message
    names file, record and column.

    Example:
        >>> import pathlib, tempfile
        >>> from tf_recsync.data import CategoricalColumn
        >>> file = str(pathlib.Path(tempfile.mkdtemp()) / "clicks.tfrecord")
        >>> example = tf.train.Example()
        >>> example.features.feature["country"].bytes_list.value.append(b"US")
        >>> example.features.feature["click"].int64_list.value.append(1)
        >>> with tf.io.TFRecordWriter(file) as writer:
        ...     writer.write(example.SerializeToString())
        >>> country = CategoricalColumn("country", vocabulary=("CH", "US"))
        >>> schema = Schema(label="click", positive=("1",), categorical=(country,))
        >>> data = TfRecord(file, schema, test_fraction=0)
        >>> features, label = next(iter(data.train(batch_size=2)))
        >>> features["country"].numpy().tolist(), label.numpy().tolist()
        ([3], [[1.0]])
    """

    _unit = "record"

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

        def scan(name: str) -> RecordFile:
            return _scan(name, options.skips)

        files, test_files = _text.scan_files(scan, path, test_path)
        for file in (*files, *(test_files or ())):
            _text.folder_values(file.path, schema.partitions)
        self._types = _types(files, schema)
        super().__init__(files, test_files, test_fraction, options)

    def _rows(
        self, parts: Sequence[_records.Part], shuffle: bool = False, seed: int | None = None
    ) -> tf.data.Dataset:
        numbers = range(len(parts))
        sources = tf.data.Dataset.from_tensor_slices(
            (
                tf.constant([part.file.path for part in parts]),
                tf.constant([part.file.compression for part in parts]),
                tf.constant([i << _errors.LINE_BITS for i in numbers], tf.int64),
                tf.constant([part.first for part in parts], tf.int64),
                tf.constant([part.last for part in parts], tf.int64),
            )
        )
        if shuffle:
            sources = sources.shuffle(len(parts), seed=seed, reshuffle_each_iteration=True)

        def read(path, compression, code, first, last) -> tf.data.Dataset:
            records = tf.data.TFRecordDataset(path, compression).skip(first)
            end = tf.data.Dataset.from_tensors(_errors.MISSING).repeat()
            # What is behind the last record may be damaged.
            return records.concatenate(end).take(last - first).enumerate(code + first + 1)

        return sources.flat_map(read)

    def _extra_skipped(self, parts: Sequence[_records.Part]) -> Mapping[str, int]:
        """Files of which a part of the rest is damaged."""
        ends = [part for part in parts if part.file.damage and part.last == part.file.rows]
        return {part.file.path: 1 for part in ends}

    def _location(self, parts: Sequence[_records.Part], codes: tf.Tensor) -> _errors.Location:
        paths = [part.file.path for part in parts]
        compressions = [part.file.compression for part in parts]

        def offset(file: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
            place = tf.argmax(tf.equal(tf.constant(paths), file))
            records = tf.data.TFRecordDataset(file, tf.gather(tf.constant(compressions), place))
            before = records.take(tf.strings.to_number(record, tf.int64) - 1)
            bytes_before = before.reduce(
                tf.constant(0, tf.int64),
                lambda total, data: (
                    total + tf.cast(tf.strings.length(data), tf.int64) + _FRAME_BYTES
                ),
            )
            return tf.strings.join([" (byte offset ", tf.strings.as_string(bytes_before), ")"])

        return _errors.Location(paths, codes, self._unit, offset)

    def _parse(
        self, rows: tf.Tensor, checks: _errors.Checks
    ) -> tuple[_records.Batch, tf.Tensor | None]:
        schema = self._schema
        rows = self._without_empty_lists(self._require_examples(rows, checks))
        names = None
        if checks.is_raising:
            files, numbers = checks.where.places(checks.where.codes)
            names = tf.strings.join(["malformed row in ", files, ", record ", numbers])
        found = tf.io.parse_example(rows, self._specs(), example_names=names)
        by_name = {name: found[name] for name in found}
        for place, name in enumerate(schema.partitions):
            values = [_text.folder_values(file, schema.partitions) for file in checks.where.files]
            of_files = tf.constant([value[place] for value in values])
            by_name[name] = tf.gather(of_files, checks.where.file_numbers())
        numbers, absent = [], []
        for name in schema.numbers:
            column = by_name[name]
            if column.dtype == tf.string:  # Of the name of a folder.
                texts = tf.strings.strip(column)[:, tf.newaxis]
                column, is_absent = _features.numbers_of(texts, [name], schema, checks)
                column, is_absent = column[:, 0], is_absent[:, 0]
            else:
                is_absent = _is_absent(column)
            absent.append(is_absent)
            numbers.append(tf.where(is_absent, 0.0, tf.cast(column, tf.float32)))
        empty = tf.zeros([tf.size(rows), 0])
        seconds = None
        if schema.timestamp is not None:
            seconds = _seconds(by_name[schema.timestamp])
        lists, weights = {}, {}
        for column in schema.multi_hot:
            ragged = by_name[column.name]
            lists[column.name] = _features.Texts(_text_of(ragged.values)), ragged.row_splits
        for column in schema.weighted:
            ragged = by_name[str(column.weights)]
            values = tf.cast(ragged.values, tf.float32)
            weights[str(column.weights)] = values, ragged.row_splits
        columns = _features.Columns(
            numbers=tf.stack(numbers, 1) if numbers else empty,
            absent=tf.stack(absent, 1) if absent else tf.cast(empty, tf.bool),
            texts={name: _features.Texts(_text_of(by_name[name])) for name in schema.texts},
            lists=lists,
            weights=weights,
            seconds=seconds,
        )
        return self._features.make(columns, checks)

    def _specs(self) -> dict[str, tf.io.FixedLenFeature | tf.io.RaggedFeature]:
        """How TensorFlow shall parse the columns."""
        ragged = _ragged_columns(self._schema)
        return {
            name: tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
            if name in ragged
            else tf.io.FixedLenFeature([], dtype, _DEFAULTS[dtype])
            for name, dtype in self._types.items()
        }

    def _without_empty_lists(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows with other names for columns with an empty list where TensorFlow raises.

        Those are lists of which one value is wanted, and, if any number is, lists of another kind.
        """
        ragged = _ragged_columns(self._schema)
        patterns = {}
        for name, dtype in self._types.items():
            tags = [tag for kind, tag in _TAGS.items() if name not in ragged or kind != dtype]
            # A feature of two bytes in an entry of the map: the list's tag, and a length of 0.
            patterns[name] = rf"{re.escape(name)}(\x12\x02[{''.join(tags)}]\x00)"
        some = rf"\C*(?:{'|'.join(patterns.values())})\C*"

        def rename() -> tf.Tensor:
            renamed = rows
            for name, pattern in patterns.items():
                # Of the same length, for the messages around it say theirs.
                other = "\0" * len(name.encode())
                renamed = tf.strings.regex_replace(renamed, pattern, other + r"\1")
            return renamed

        return tf.cond(tf.reduce_any(tf.strings.regex_full_match(rows, some)), rename, lambda: rows)

    def _require_examples(self, rows: tf.Tensor, checks: _errors.Checks) -> tf.Tensor:
        """Returns the rows; in place of those that are malformed an empty one, if none raises.

        TensorFlow says of an error in a record that is no `Example` neither file nor number.
        """

        def find(types: Mapping[str, str]) -> tf.Tensor:
            request = json.dumps({"types": types, "lists": sorted(_ragged_columns(self._schema))})
            (wrong,) = _python_ops.call("wrong_examples", [request, rows], [tf.bool])
            wrong.set_shape([None])
            return wrong

        if checks.is_raising:
            wrong = tf.cond(
                tf.reduce_all(_is_framed(rows)),
                lambda: tf.zeros_like(rows, tf.bool),
                lambda: find({}),
            )
        else:
            wrong = find({name: dtype.name for name, dtype in self._types.items()})
        check = _errors.require_rows(wrong, "is no tf.train.Example", checks)
        with tf.control_dependencies([check]):
            return tf.where(wrong, "", rows)


def _ragged_columns(schema: Schema) -> set[str]:
    """The columns of which a record may have several values."""
    names = {column.name for column in schema.multi_hot}
    return names | {str(column.weights) for column in schema.weighted}


def _is_absent(column: tf.Tensor) -> tf.Tensor:
    """Returns whether there is no value."""
    if column.dtype == tf.string:
        return tf.equal(column, "")
    return tf.equal(column, _NO_INTEGER) if column.dtype == tf.int64 else tf.math.is_nan(column)


def _seconds(column: tf.Tensor) -> _features.Texts | tf.Tensor:
    """Returns the times of rows, see `_features.Columns`."""
    if column.dtype == tf.string:
        return _features.Texts(column)
    absent = tf.constant(float("nan"), tf.float64)
    return tf.where(_is_absent(column), absent, tf.cast(column, tf.float64))


def _text_of(column: tf.Tensor) -> tf.Tensor:
    """Returns values as texts; one that is missing is empty."""
    if column.dtype == tf.string:
        return column
    if column.dtype == tf.float32:
        # The shortest text that stands for no other number; whole ones have no decimals.
        text = tf.strings.as_string(column, precision=9, shortest=True)
        for digits in (8, 7, 6):
            shorter = tf.strings.as_string(column, precision=digits, shortest=True)
            is_exact = tf.equal(tf.strings.to_number(shorter, tf.float32), column)
            text = tf.where(is_exact, shorter, text)
        is_whole = tf.equal(column, tf.round(column))
        is_whole = tf.logical_and(is_whole, tf.abs(column) < _features.LARGEST_WHOLE)
        whole = tf.cast(tf.where(is_whole, column, 0.0), tf.int64)
        text = tf.where(is_whole, tf.strings.as_string(whole), text)
    else:
        text = tf.strings.as_string(column)
    return tf.where(_is_absent(column), "", text)


def _is_framed(records: tf.Tensor) -> tf.Tensor:
    """Returns whether records look like an `Example` from outside: empty, or one field to the end.

    Args:
        records: string `[batch]`.

    Returns:
        bool `[batch]`; True for all that are an `Example`, if no field of it is unknown, and for
        hardly anything else.
    """
    # The tag, and the length in groups of seven bits, of which all but the last have the eighth.
    head = tf.io.decode_raw(tf.strings.substr(records + "\0" * 8, 0, 6), tf.uint8)
    head = tf.reshape(tf.cast(head, tf.int64), [-1, 6])
    groups = head[:, 1:]
    goes_on = tf.math.cumprod(tf.cast(groups >= 128, tf.int64), axis=1)
    before = tf.concat([tf.ones_like(goes_on[:, :1]), goes_on[:, :-1]], axis=1)
    shifts = tf.constant([1 << (7 * i) for i in range(5)], tf.int64)
    size = tf.reduce_sum((groups % 128) * shifts * before, axis=1)
    length = tf.cast(tf.strings.length(records), tf.int64)
    whole = tf.equal(length, 1 + tf.reduce_sum(before, axis=1) + size)
    return tf.logical_or(tf.equal(length, 0), tf.logical_and(tf.equal(head[:, 0], 10), whole))


@_python_ops.register("wrong_examples")
def _wrong_examples(request: bytes, records: np.ndarray) -> np.ndarray:
    """Returns which records are no `Example`, or have values of other types or too many of them."""
    wanted = json.loads(request)
    lists = set(wanted["lists"])
    kinds = {dtype.name: kind for kind, dtype in _TYPES.items()}
    expected = {name: kinds[dtype] for name, dtype in wanted["types"].items()}
    wrong = np.zeros(len(records), bool)
    for place, record in enumerate(records):
        features = _features_of(record)
        if features is None:
            wrong[place] = True
            continue
        for name, kind in expected.items():
            if name not in features:
                continue
            feature = features[name]
            found = feature.WhichOneof("kind")
            count = len(getattr(feature, found).value) if found else 0
            if count and (found != kind or (count > 1 and name not in lists)):
                wrong[place] = True
                break
    return wrong


def _features_of(record: bytes) -> Mapping[str, tf.train.Feature] | None:
    """Returns the features of an `Example`; None if it is none."""
    try:
        return tf.train.Example.FromString(record).features.feature
    except Exception as error:  # Its type is that of one of protobuf's implementations.
        if type(error).__name__ != "DecodeError":
            raise
        return None


def _scan(path: str, keeps_damaged: bool) -> RecordFile:
    """Counts the records of a file.

    Args:
        path: The file, plain or gzip.
        keeps_damaged: Whether a file is taken that is damaged behind some records.

    Raises:
        ValueError: If it has no records, or is truncated or corrupted; the message names it.
    """
    compression = _text.compression(path)
    rows, offset, damage = 0, 0, ""
    lengths = tf.data.TFRecordDataset(path, compression, buffer_size=1 << 20)
    # In one call for many records, but one by one up to an error.
    lengths = lengths.batch(_records.CHUNK).map(
        lambda records: (tf.size(records), tf.reduce_sum(tf.strings.length(records)))
    )
    try:
        for count, total in lengths.as_numpy_iterator():
            rows, offset = rows + int(count), offset + int(total) + _FRAME_BYTES * int(count)
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError) as error:
        damage = error.message
        for record in _rest(path, compression, rows):
            rows, offset = rows + 1, offset + len(record) + _FRAME_BYTES
    left = 0 if compression else tf.io.gfile.stat(path).length - offset
    if not damage and left:
        # TensorFlow takes less than the head of a record for the end of the file.
        damage = f"{left} bytes are no record"
    if damage and not keeps_damaged:
        raise ValueError(
            f"The file {path!r} is truncated or corrupted in record {rows + 1} (byte offset "
            f"{offset}): {damage}"
        )
    if not rows:
        raise ValueError(f"The file {path!r} has no rows; every file must have at least one.")
    return RecordFile(path, compression, rows, damage)


def _rest(path: str, compression: str, skipped: int) -> Iterator[bytes]:
    """Yields the records of a damaged file up to the damage, but for the first ones."""
    records = iter(tf.data.TFRecordDataset(path, compression).skip(skipped).as_numpy_iterator())
    while True:
        try:
            yield next(records)
        except (tf.errors.DataLossError, StopIteration):
            return


def _types(files: Sequence[RecordFile], schema: Schema) -> dict[str, tf.DType]:
    """Returns the types of the columns, by the first records.

    Raises:
        ValueError: If no record has a label, numbers are texts, or times are floats.
    """
    wanted = [name for name in schema.used_columns if name not in schema.partitions]
    found: dict[str, tf.DType] = {}
    names = [file.path for file in files]
    for file in files:
        records = tf.data.TFRecordDataset(file.path, file.compression)
        for record in records.take(min(_LOOKED_AT, file.rows)).as_numpy_iterator():
            features = _features_of(record) or {}
            for name in wanted:
                kind = features[name].WhichOneof("kind") if name in features else None
                if name not in found and kind and getattr(features[name], kind).value:
                    found[name] = _TYPES[kind]
            if len(found) == len(wanted):
                break
        if len(found) == len(wanted):
            break
    for name in schema.labels:
        if name in wanted and name not in found:
            raise ValueError(f"column {name!r}: must be a feature of the records of {names}.")
    numbers = {*schema.numbers, *(str(column.weights) for column in schema.weighted)}
    for name in wanted:
        dtype = found.setdefault(name, tf.float32 if name in numbers else tf.string)
        if name in numbers and dtype == tf.string:
            raise ValueError(f"column {name!r}: must have numbers, and has bytes in {names}.")
        if name == schema.timestamp and dtype == tf.float32:
            raise ValueError(
                f"column {name!r}: must have integers or bytes, and has floats in {names}; a float "
                "of 32 bits may be off by a minute."
            )
    return found
