"""Reader of CSV files with a schema."""

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.data import _errors, _fields, _spec, _text
from tf_recsync.data.csv_schema import NUMBER, CategoricalColumn, CsvSchema, NumericColumn

_FINGERPRINTS = 2**63 - 1


class Csv(_text.TextData):
    r"""Reader of CSV files; `CsvSchema` says what their columns are and what becomes of them.

    The lines of all files are counted once, when the object is made. Blank lines are left out.

    Args:
        path: A file, a folder of files, or a glob pattern; files may be plain or gzip. Several
            files are read in the order of their names. A folder may have folders named like
            `day=2024-01-01` in it, which can be a column (`CsvSchema.partitions`).
        schema: What the columns are.
        test_path: Files with the test rows, given like `path`. By default (None) the test part
            is made of the last rows of `path`.
        test_fraction: Which fraction of the rows that is, in file order over all files; at least 0
            (no test part) and less than 1. Default 0.1. Unused when `test_path` is given.

    Raises:
        FileNotFoundError: If no file matches a path.
        ValueError: If a header is not that of the schema, `test_fraction` is out of range or a
            file has no rows, or is truncated or corrupted (gzip).

    Iterating over a data set raises `tf.errors.InvalidArgumentError` for a malformed line; the
    message names the file, the line (from 1) and the column. So it does for a file that has fewer
    lines than were counted.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "clicks.csv"
        >>> _ = file.write_text("age, country, clicked\n30, US, yes\n50, ?, no\n")
        >>> schema = CsvSchema.fit(
        ...     file, label="clicked", positive=["yes"], numeric=["age"], categorical=["country"]
        ... )
        >>> features, label = next(iter(Csv(file, schema, test_fraction=0).train(batch_size=2)))
        >>> features["numeric"].numpy().tolist(), features["country"].numpy().tolist()
        ([[-1.0], [1.0]], [2, 0])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: CsvSchema,
        *,
        test_path: str | os.PathLike[str] | None = None,
        test_fraction: float = 0.1,
    ) -> None:
        """See the class."""
        self._schema = schema
        self._spec = schema.spec
        self._lookups = {
            column.name: _Vocabulary(column.vocabulary)
            for column in schema.categorical
            if column.vocabulary
        }
        files = [schema.scan(name) for name in _text.find_files(path)]
        test_files = None
        if test_path is not None:
            test_files = [schema.scan(name) for name in _text.find_files(test_path)]
        super().__init__(files, test_files, test_fraction, schema.comment)

    @property
    def spec(self) -> _spec.FeatureSpec:
        """The names and sizes of the features."""
        return self._spec

    @property
    def schema(self) -> CsvSchema:
        """What the columns are."""
        return self._schema

    def _parse(self, lines: tf.Tensor, where: _errors.Location) -> _text.Batch:
        schema = self._schema
        fields = _fields.split_columns(
            lines, schema.separator, schema.columns, where, schema.quotechar
        )
        if schema.partitions:
            values = [_text.folder_values(name, schema.partitions) for name in where.files]
            of_rows = tf.gather(tf.constant(values), where.file_numbers())
            fields = tf.concat([fields, of_rows], axis=1)
        position = {name: i for i, name in enumerate(schema.all_columns)}
        used = [c.name for c in schema.numeric] + [schema.label]
        checked = tf.strings.strip(tf.gather(fields, [position[name] for name in used], axis=1))
        absent = tf.logical_or(tf.equal(checked, ""), tf.equal(checked, schema.missing))
        numbers, labels = checked[:, :-1], checked[:, -1:]
        not_number = tf.logical_not(tf.strings.regex_full_match(numbers, NUMBER))
        positive = _is_any(labels, schema.positive)
        known = tf.logical_or(positive, tf.logical_not(absent[:, -1:]))
        reason = "is no label"
        if schema.negative:
            known = tf.logical_or(positive, _is_any(labels, schema.negative))
            reason = f"is none of the labels {', '.join([*schema.positive, *schema.negative])}"
        wrong = tf.concat(
            [
                tf.logical_and(not_number, tf.logical_not(absent[:, :-1])),
                tf.logical_not(known),
            ],
            axis=1,
        )
        reasons = ["is not a number"] * len(schema.numeric) + [reason]
        check = _errors.require_fields(wrong, checked, used, reasons, where)
        with tf.control_dependencies([check]):
            texts = tf.where(absent[:, :-1], "0", numbers)
        values = tf.strings.to_number(texts, tf.float32)
        too_large = tf.logical_not(tf.math.is_finite(values))
        reasons = ["is too large"] * len(schema.numeric)
        check = _errors.require_fields(too_large, texts, used[:-1], reasons, where)
        with tf.control_dependencies([check]):
            values = tf.identity(values)

        features = {_spec.NUMERIC: _standardise(values, absent[:, :-1], schema.numeric)}
        for column in schema.categorical:
            text = tf.strings.strip(fields[:, position[column.name]])
            features[column.name] = self._ids(column, text)
        for i, column in enumerate(schema.numeric):
            if column.boundaries:
                boundaries = tf.constant(column.boundaries, tf.float32)
                bucket = tf.searchsorted(boundaries, values[:, i], side="right", out_type=tf.int64)
                missing = absent[:, i]
                features[column.bucket_name] = tf.where(missing, tf.zeros_like(bucket), bucket + 1)
        for cross in schema.crosses:
            ids = tf.zeros_like(where.codes)
            for name in cross.columns:
                ids = ids * self._spec.categorical[name] + features[name]
            if cross.hash_buckets:
                ids = tf.strings.to_hash_bucket_fast(tf.strings.as_string(ids), cross.hash_buckets)
            features[cross.name] = ids
        return features, tf.cast(positive, tf.float32)

    def _ids(self, column: CategoricalColumn, text: tf.Tensor) -> tf.Tensor:
        """Returns int64 `[batch]` ids of string `[batch]` values."""
        if column.vocabulary:
            ids = self._lookups[column.name](text)
        else:
            ids = tf.strings.to_hash_bucket_fast(text, column.hash_buckets - 1) + 1
        absent = tf.logical_or(tf.equal(text, ""), tf.equal(text, self._schema.missing))
        return tf.where(absent, tf.zeros_like(ids), ids)


class _Vocabulary:
    """Numbers words by a binary search among their fingerprints.

    A lookup table would be a resource, which ties a data set to the process that made it; this
    needs constants only.
    """

    def __init__(self, words: Sequence[str]) -> None:
        with tf.init_scope():
            fingerprints = tf.strings.to_hash_bucket_fast(list(words), _FINGERPRINTS).numpy()
        self._ids = np.argsort(fingerprints)
        self._fingerprints = fingerprints[self._ids]
        self._words = [words[i] for i in self._ids]
        if len(np.unique(fingerprints)) < len(words):
            raise ValueError("vocabulary: two of its words have the same 63-bit fingerprint.")

    def __call__(self, text: tf.Tensor) -> tf.Tensor:
        """Returns 2 + the number of the word in the vocabulary, or 1 where it has no such word."""
        fingerprint = tf.strings.to_hash_bucket_fast(text, _FINGERPRINTS)
        place = tf.searchsorted(tf.constant(self._fingerprints), fingerprint)
        place = tf.minimum(place, len(self._words) - 1)
        found = tf.equal(tf.gather(tf.constant(self._words), place), text)
        ids = tf.gather(tf.constant(self._ids, tf.int64), place) + 2
        return tf.where(found, ids, tf.ones_like(ids))


def _is_any(text: tf.Tensor, values: Sequence[str]) -> tf.Tensor:
    """Returns for each element whether it is one of the values."""
    return tf.reduce_any(tf.equal(text[..., tf.newaxis], tf.constant(list(values))), axis=-1)


def _standardise(
    values: tf.Tensor, absent: tf.Tensor, columns: Sequence[NumericColumn]
) -> tf.Tensor:
    """Returns the float32 `[batch, columns]` feature; missing values become 0, the mean."""
    logarithms = tf.math.log1p(tf.maximum(values, 0.0))
    values = tf.where(tf.constant([c.log1p for c in columns], tf.bool), logarithms, values)
    mean = tf.constant([c.mean for c in columns], tf.float32)
    std = tf.constant([c.std for c in columns], tf.float32)
    return tf.where(absent, 0.0, (values - mean) / std)
