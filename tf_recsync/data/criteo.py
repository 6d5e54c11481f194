"""The Criteo display advertising data set (click logs)."""

import numbers
import os
from collections.abc import Sequence

import tensorflow as tf

from tf_recsync._checks import integer, list_of
from tf_recsync.data import _errors, _fields, _records, _spec, _text

_INTEGERS = tuple(f"I{i}" for i in range(1, 14))
_CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
_COLUMNS = ("label", *_INTEGERS, *_CATEGORIES)
# 18 digits at most, so that every number accepted here is one that can be converted.
_INTEGER = "(?:-?[0-9]{1,18})?"
_GOOD_LINE = rf"[01](?:\t{_INTEGER}){{13}}\t.*"


class Criteo(_text.TextData):
    r"""Reader of files in the format of the Criteo data sets.

    A line holds 40 columns separated by tabs: the label (0 or 1), 13 integers and 26 categories
    (hexadecimal numbers, read as text). Any field but the label may be blank, which means missing.

    * Numeric features `I1` to `I13`: `log(1 + max(x, 0))`, and 0 for a missing value.
    * Categorical features `C1` to `C26`: 0 for a missing category, and otherwise
      `1 + fingerprint(text) mod (buckets - 1)`.

    The lines of all files are counted once, when the object is made. Blank lines are left out.

    Args:
        path: A file, a folder of files, or a glob pattern; files may be plain or gzip. Several
            files are read in the order of their names.
        hash_buckets: Number of ids of a categorical feature including the one for missing values,
            at least 2: one number for all features or a list of 26. Default 100,000.
        test_path: Files with the test rows, given like `path`. By default (None) the test part
            is made of the last rows of `path`.
        test_fraction: Which fraction of the rows that is, in file order over all files; at least 0
            (no test part) and less than 1. Default 0.1. Unused when `test_path` is given.

    Raises:
        FileNotFoundError: If no file matches a path.
        ValueError: If `hash_buckets` or `test_fraction` is out of range or a file has no rows.

    Iterating over a data set raises `tf.errors.InvalidArgumentError` for a malformed line; the
    message names the file, the line (from 1) and the column.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "day_0.tsv"
        >>> row = ["1", "7", *[""] * 12, "68fd1e64", *[""] * 25]
        >>> _ = file.write_text(("\t".join(row) + "\n") * 10)
        >>> data = Criteo(file, hash_buckets=1000)
        >>> data.train_rows, data.test_rows
        (9, 1)
        >>> features, label = next(iter(data.train(batch_size=4)))
        >>> features["numeric"].shape.as_list(), features["C2"].numpy().tolist()
        ([4, 13], [0, 0, 0, 0])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        hash_buckets: int | Sequence[int] = 100_000,
        test_path: str | os.PathLike[str] | None = None,
        test_fraction: float = 0.1,
    ) -> None:
        """See the class."""
        buckets = (
            [hash_buckets] * 26
            if isinstance(hash_buckets, numbers.Integral)
            else list_of("hash_buckets", hash_buckets, numbers.Integral)
        )
        if len(buckets) != len(_CATEGORIES):
            raise ValueError(
                f"hash_buckets={hash_buckets}: must be a number or a list of 26 numbers."
            )
        # One id is for missing values.
        buckets = [integer("hash_buckets", count, 2) for count in buckets]
        self._spec = _spec.FeatureSpec(_INTEGERS, dict(zip(_CATEGORIES, buckets, strict=True)))
        files, test_files = _text.scan_files(_text.scan, path, test_path)
        super().__init__(files, test_files, test_fraction)

    @property
    def spec(self) -> _spec.FeatureSpec:
        """The names and sizes of the features."""
        return self._spec

    def _parse(
        self, rows: tf.Tensor, checks: _errors.Checks
    ) -> tuple[_records.Batch, tf.Tensor | None]:
        fields = _fields.split_columns(rows, "\t", _COLUMNS, checks)
        # One match for the whole line is several times faster than one for each field, so the
        # fields are looked at only where a line is not as it should be.
        good = tf.reduce_all(tf.strings.regex_full_match(rows, _GOOD_LINE))
        check = tf.cond(good, lambda: tf.constant(True), lambda: _check(fields[:, :14], checks))
        with tf.control_dependencies([check]):
            fields = tf.identity(fields)
        integers = fields[:, 1:14]
        integers = tf.where(tf.equal(integers, ""), "0", integers)
        numeric = tf.math.log1p(tf.maximum(tf.strings.to_number(integers, tf.float32), 0.0))
        features = {_spec.NUMERIC: numeric}
        columns = tf.unstack(fields[:, 14:], num=26, axis=1)
        for (name, buckets), column in zip(self._spec.categorical.items(), columns, strict=True):
            ids = tf.strings.to_hash_bucket_fast(column, buckets - 1) + 1
            features[name] = tf.where(tf.equal(column, ""), tf.zeros([], tf.int64), ids)
        return (features, tf.strings.to_number(fields[:, :1], tf.float32)), None


def _check(fields: tf.Tensor, checks: _errors.Checks) -> tf.Tensor:
    """Fails if one of the labels and integers, string `[batch, 14]`, is malformed."""
    labels = tf.strings.regex_full_match(fields[:, :1], "[01]")
    integers = tf.strings.regex_full_match(fields[:, 1:], _INTEGER)
    wrong = tf.logical_not(tf.concat([labels, integers], axis=1))
    reasons = ["is neither 0 nor 1"] + ["is not an integer"] * 13
    return _errors.require_fields(wrong, fields, _COLUMNS[:14], reasons, checks)
