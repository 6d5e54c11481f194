"""Makes features and labels of the columns that a schema names, whatever file they are from."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.data import _errors, _fitting, _records, _spec
from tf_recsync.data.columns import CategoricalColumn, NumericColumn
from tf_recsync.data.schema import Schema

_FINGERPRINTS = 2**63 - 1
_TIME = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]*)?)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
)
# In seconds; a larger number is no time.
_LARGEST_TIME = 1e12
# Floats from this number on have an exponent in their texts, also whole ones.
LARGEST_WHOLE = 2.0**63


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts, each of which may stand for those of many rows.

    Args:
        values: string `[m]`.
        rows: int `[n]`, for each row which of the values it has; None if row i has value i.
    """

    values: tf.Tensor
    rows: tf.Tensor | None = None

    def of_rows(self, results: tf.Tensor) -> tf.Tensor:
        """Returns for each row what was calculated for its value."""
        return results if self.rows is None else tf.gather(results, self.rows)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a batch of rows.

    Args:
        numbers: float32 `[batch, len(schema.numbers)]`; whatever where there is no number.
        absent: bool of the same shape, whether there is none.
        texts: Those of each column in `schema.texts`.
        lists: For each column in `schema.multi_hot` its texts, and int64 `[batch + 1]` row splits.
        weights: For each column of weights their flat values, float32, and row splits.
        seconds: Times of rows, as texts or in seconds since 1970, float64 `[batch]`, NaN where
            there is none; None if the schema has no timestamp.
    """

    numbers: tf.Tensor
    absent: tf.Tensor
    texts: Mapping[str, Texts]
    lists: Mapping[str, tuple[Texts, tf.Tensor]]
    weights: Mapping[str, tuple[tf.Tensor, tf.Tensor]]
    seconds: Texts | tf.Tensor | None


class OfSchema(_spec.ClickData):
    """What data sets have in common whose columns a schema describes."""

    def _describe(self, schema: Schema) -> None:
        self._schema = schema
        self._spec = schema.spec
        self._features = Features(schema)

    @property
    def spec(self) -> _spec.FeatureSpec:
        """The names and sizes of the features."""
        return self._spec

    @property
    def schema(self) -> Schema:
        """What the columns are."""
        return self._schema


class Features:
    """Makes the features and labels of a schema.

    Args:
        schema: What the columns are.
    """

    def __init__(self, schema: Schema) -> None:
        """See the class."""
        self._schema = schema
        self._sizes = schema.spec.categorical
        self._lookups = {
            column.name: _Vocabulary(column.vocabulary)
            for column in schema.categorical
            if column.vocabulary
        }

    def make(
        self, columns: Columns, checks: _errors.Checks
    ) -> tuple[_records.Batch, tf.Tensor | None]:
        """Returns a batch, and the times of its rows, if the schema has them."""
        schema = self._schema
        if isinstance(columns.seconds, Texts):
            seconds = _seconds_of(columns.seconds, str(schema.timestamp), checks)
            columns = dataclasses.replace(columns, seconds=seconds)
        label_checks, labels = self._labels(columns, checks)
        dependencies = [
            *label_checks,
            *self._check_numbers(columns, checks),
            *self._check_weights(columns, checks),
        ]
        with tf.control_dependencies(dependencies):
            numbers = tf.identity(columns.numbers)
        count = len(schema.numeric)
        values, absent = numbers[:, :count], columns.absent[:, :count]
        features = {_spec.NUMERIC: _standardise(values, absent, schema.numeric)}
        for column in schema.categorical:
            if column.multi_hot:
                texts, splits = columns.lists[column.name]
                features[column.name] = _ragged(self._ids(column, texts), splits)
            else:
                features[column.name] = self._ids(column, columns.texts[column.name])
        for i, column in enumerate(schema.numeric):
            if column.boundaries:
                boundaries = tf.constant(column.boundaries, tf.float32)
                bucket = tf.searchsorted(boundaries, values[:, i], side="right", out_type=tf.int64)
                bucket = tf.where(absent[:, i], tf.zeros_like(bucket), bucket + 1)
                features[column.bucket_name] = bucket
        for cross in schema.crosses:
            parts = [features[name] for name in cross.columns]
            if schema.has_numbers(cross):
                ids = tf.zeros_like(checks.where.codes)
                for name, part in zip(cross.columns, parts, strict=True):
                    ids = ids * self._sizes[name] + part
                parts = [ids]
            if cross.hash_buckets:
                text = tf.strings.join([tf.strings.as_string(part) for part in parts], ",")
                ids = tf.strings.to_hash_bucket_fast(text, cross.hash_buckets)
            features[cross.name] = ids
        for column in schema.weighted:
            features[column.weights_name] = _ragged(*columns.weights[str(column.weights)])
        if isinstance(schema.label, str):
            batch = (features, labels)
        else:
            by_label = zip(schema.labels, tf.unstack(labels, len(schema.labels), 1), strict=True)
            batch = (features, {name: label[:, tf.newaxis] for name, label in by_label})
        if schema.weight is not None:
            batch = (*batch, numbers[:, -1])
        return batch, columns.seconds

    def _labels(
        self, columns: Columns, checks: _errors.Checks
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns checks of the labels, and the labels, float32 `[batch, labels]`."""
        schema = self._schema
        found, unknown, texts = [], [], []
        for name in schema.labels:
            column = columns.texts[name]
            values = tf.strings.strip(column.values)
            positive = _is_any(values, schema.positive)
            if schema.negative:
                known = tf.logical_or(positive, _is_any(values, schema.negative))
            else:
                known = tf.logical_or(positive, tf.logical_not(is_missing(values, schema)))
            found.append(column.of_rows(tf.cast(positive, tf.float32)))
            unknown.append(column.of_rows(tf.logical_not(known)))
            texts.append((column, values))
        reason = "is no label"
        if schema.negative:
            reason = f"is none of the labels {', '.join([*schema.positive, *schema.negative])}"
        check = _errors.require_fields(
            tf.stack(unknown, 1),
            lambda: tf.stack([column.of_rows(values) for column, values in texts], 1),
            schema.labels,
            [reason] * len(schema.labels),
            checks,
        )
        return [check], tf.stack(found, 1)

    def _check_numbers(self, columns: Columns, checks: _errors.Checks) -> list[tf.Tensor]:
        """Checks that numbers are finite, and that rows have weights and times."""
        schema = self._schema
        there = tf.logical_not(columns.absent)
        infinite = tf.logical_and(there, tf.logical_not(tf.math.is_finite(columns.numbers)))
        found = [
            _errors.require_fields(
                infinite,
                lambda: tf.strings.as_string(columns.numbers, shortest=True),
                schema.numbers,
                ["is too large"] * len(schema.numbers),
                checks,
            )
        ]
        if schema.weight is not None:
            weight = columns.numbers[:, -1:]
            wrong = tf.logical_or(columns.absent[:, -1:], weight < 0)

            def texts() -> tf.Tensor:
                text = tf.strings.as_string(weight, shortest=True)
                return tf.where(columns.absent[:, -1:], "", text)

            reason = ["is no weight of at least 0"]
            found.append(_errors.require_fields(wrong, texts, [schema.weight], reason, checks))
        if columns.seconds is not None:
            wrong = tf.logical_not(tf.math.is_finite(columns.seconds))
            reason = f"column {schema.timestamp}: has no time"
            found.append(_errors.require_rows(wrong, reason, checks))
            too_large = tf.logical_and(
                tf.math.is_finite(columns.seconds), tf.abs(columns.seconds) >= _LARGEST_TIME
            )
            check = _errors.require_fields(
                too_large[:, tf.newaxis],
                lambda: tf.strings.as_string(columns.seconds, precision=0)[:, tf.newaxis],
                [str(schema.timestamp)],
                ["is no time in seconds since 1970"],
                checks,
            )
            found.append(check)
        return found

    def _check_weights(self, columns: Columns, checks: _errors.Checks) -> list[tf.Tensor]:
        """Checks that each id has a weight that is a finite number."""
        found = []
        for column in self._schema.weighted:
            weights, splits = columns.weights[str(column.weights)]
            counts = splits[1:] - splits[:-1]
            _, id_splits = columns.lists[column.name]
            wrong = tf.not_equal(counts, id_splits[1:] - id_splits[:-1])
            reason = f"column {column.weights}: has not as many weights as {column.name} values"
            found.append(_errors.require_rows(wrong, reason, checks))
            infinite = _ragged(tf.logical_not(tf.math.is_finite(weights)), splits)
            reason = f"column {column.weights}: has a weight that is no finite number"
            wrong = tf.reduce_any(infinite, axis=-1)
            found.append(_errors.require_rows(wrong, reason, checks))
        return found

    def _ids(self, column: CategoricalColumn, texts: Texts) -> tf.Tensor:
        """Returns int64 `[n]` ids."""
        values = tf.strings.strip(texts.values)
        if column.vocabulary:
            ids = self._lookups[column.name](values)
        else:
            ids = tf.strings.to_hash_bucket_fast(values, column.hash_buckets - 1) + 1
        ids = tf.where(is_missing(values, self._schema), tf.zeros_like(ids), ids)
        return texts.of_rows(ids)


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


def numbers_of(
    texts: tf.Tensor, names: Sequence[str], schema: Schema, checks: _errors.Checks
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads the numbers in texts.

    Args:
        texts: string `[batch, columns]`, without spaces around them.
        names: Name of each column.
        schema: Says what means a missing value.
        checks: What becomes of rows with other texts.

    Returns:
        float32 `[batch, columns]`, 0 where there is none, and bool, whether there is none.
    """
    absent = is_missing(texts, schema)
    wrong = tf.logical_not(tf.strings.regex_full_match(texts, _fitting.NUMBER))
    wrong = tf.logical_and(wrong, tf.logical_not(absent))
    reasons = ["is not a number"] * len(names)
    check = _errors.require_fields(wrong, texts, names, reasons, checks)
    with tf.control_dependencies([check]):
        numerals = tf.where(tf.logical_or(absent, wrong), "0", texts)
    values = tf.strings.to_number(numerals, tf.float32)
    too_large = tf.logical_not(tf.math.is_finite(values))
    reasons = ["is too large"] * len(names)
    check = _errors.require_fields(too_large, texts, names, reasons, checks)
    with tf.control_dependencies([check]):
        return tf.identity(values), absent


def _seconds_of(column: Texts, name: str, checks: _errors.Checks) -> tf.Tensor:
    """Reads times, see `Schema.timestamp`.

    Args:
        column: The texts.
        name: Name of the column.
        checks: What becomes of rows with other texts.

    Returns:
        float64 `[batch]`, seconds since 1970.
    """
    texts = tf.strings.strip(column.values)
    is_number = tf.strings.regex_full_match(texts, _fitting.NUMBER)
    is_time = tf.strings.regex_full_match(texts, _TIME)
    numbers = tf.strings.to_number(tf.where(is_number, texts, "0"), tf.float64)
    times = tf.where(is_time, texts, "1970-01-01")
    # Hours and minutes that its clock is ahead of UTC; no date ends like one.
    has_offset = tf.strings.regex_full_match(times, ".*[+-][0-9]{2}:?[0-9]{2}")
    offset = tf.strings.regex_replace(times, "^.*[+-]([0-9]{2}):?([0-9]{2})$", r"\1\2")
    offset = tf.strings.to_number(tf.where(has_offset, offset, "0"), tf.int64)
    is_behind = tf.strings.regex_full_match(times, ".*-[0-9]{2}:?[0-9]{2}")
    ahead = (offset // 100 * 60 + offset % 100) * tf.where(
        is_behind, tf.constant(-60, tf.int64), tf.constant(60, tf.int64)
    )
    times = tf.strings.regex_replace(times, "(?:Z|[+-][0-9]{2}:?[0-9]{2})$", "")
    # Each text has a date; what it does not have of the time is zero.
    pieces = tf.strings.regex_replace(times, "[-T:]", " ") + " 0 0 0"
    pieces = tf.strings.split(pieces, " ").to_tensor("0", shape=[None, 9])
    pieces = tf.strings.regex_replace(pieces, r"\..*", "")
    year, month, day, hour, minute, second = tf.unstack(
        tf.strings.to_number(pieces[:, :6], tf.int64), num=6, axis=1
    )
    # As far as possible: that a month has no 31st is not seen.
    possible = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    possible &= (hour <= 23) & (minute <= 59) & (second <= 60)
    possible &= (offset // 100 <= 23) & (offset % 100 <= 59)
    possible = tf.where(is_time, possible, is_number & (tf.abs(numbers) < _LARGEST_TIME))
    check = _errors.require_fields(
        column.of_rows(tf.logical_not(possible))[:, tf.newaxis],
        lambda: column.of_rows(texts)[:, tf.newaxis],
        [name],
        ["is no time"],
        checks,
    )
    with tf.control_dependencies([check]):
        seconds = ((_days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second - ahead
    return column.of_rows(tf.where(is_time, tf.cast(seconds, tf.float64), numbers))


def _days(year: tf.Tensor, month: tf.Tensor, day: tf.Tensor) -> tf.Tensor:
    """Returns the days since 1970-01-01 of dates in the Gregorian calendar, int64."""
    # Years that begin with March end with the leap day.
    year = tf.where(month <= 2, year - 1, year)
    month = tf.where(month <= 2, month + 9, month - 3)
    of_years = 365 * year + year // 4 - year // 100 + year // 400
    return of_years + (153 * month + 2) // 5 + day - 1 - 719_468


def _ragged(values: tf.Tensor, splits: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(values, splits, validate=False)


def is_missing(texts: tf.Tensor, schema: Schema) -> tf.Tensor:
    """Returns for each text whether it means a missing value."""
    return _is_any(texts, schema.missing_texts)


def _is_any(text: tf.Tensor, values: Sequence[str]) -> tf.Tensor:
    """Returns for each element whether it is one of the values."""
    return tf.reduce_any(tf.equal(text[..., tf.newaxis], tf.constant(list(values))), axis=-1)


def _standardise(
    values: tf.Tensor, absent: tf.Tensor, columns: Sequence[NumericColumn]
) -> tf.Tensor:
    """Returns the float32 `[batch, columns]` feature; missing values become 0, the mean."""
    if any(column.log1p for column in columns):
        # The last bit of a float32 logarithm depends on the place in the batch.
        logarithms = tf.math.log1p(tf.cast(tf.maximum(values, 0.0), tf.float64))
        is_log1p = tf.constant([column.log1p for column in columns], tf.bool)
        values = tf.where(is_log1p, tf.cast(logarithms, tf.float32), values)
    mean = tf.constant([c.mean for c in columns], tf.float32)
    std = tf.constant([c.std for c in columns], tf.float32)
    return tf.where(absent, 0.0, (values - mean) / std)
