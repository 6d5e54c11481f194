"""Counts of the rows that passes left out, in the process that reads."""

import collections
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.data import _python_ops

_lock = threading.Lock()
# Rows by file, under the names of counters; guarded by _lock.
_counts: dict[str, collections.Counter[str]] = {}  # Of passes that go on.
_ended: dict[str, collections.Counter[str]] = {}  # Of the latest passes that have ended.
# So many readers may divide a data set and have each a beginning and an end.
_MOST_READERS = 1 << 16


def counts(names: Iterable[str]) -> dict[str, int]:
    """Returns what counters have counted in the latest pass that has ended: rows by file."""
    total: collections.Counter[str] = collections.Counter()
    with _lock:
        for name in names:
            total.update(_ended.get(name, {}))
    return dict(sorted(total.items()))


def add(name: str, files: Iterable[str]) -> None:
    """Counts rows that are left out, by the name of the counter and the file of each row."""
    with _lock:
        _counts.setdefault(name, collections.Counter()).update(files)


def count(name: str, files: tf.Tensor) -> tf.Tensor:
    """Counts rows that are left out.

    Args:
        name: Name of the counter.
        files: string `[n]`, the file of each of these rows.

    Returns:
        A scalar to depend on.
    """

    def some() -> tf.Tensor:
        return _call(name, "count", files, tf.size(files, tf.int64))

    return tf.cond(tf.size(files) > 0, some, lambda: tf.constant(0, tf.int64))


def in_passes(dataset: tf.data.Dataset, name: str, more: Mapping[str, int]) -> tf.data.Dataset:
    """Returns the same data set, whose passes begin with no counts and log those that they have.

    Args:
        dataset: Rows that have been counted.
        name: Name of the counter.
        more: What each pass leaves out besides, by file.
    """
    zeros = tf.nest.map_structure(_zeros, dataset.element_spec)

    def nothing(what: str, files: Sequence[str], most: int) -> tf.data.Dataset:
        def call(number: tf.Tensor) -> tf.data.Dataset:
            # What depends on no element, TensorFlow would calculate once, when it likes.
            done = _call(name, what, tf.constant(list(files), tf.string), number)
            return tf.data.Dataset.from_tensors(zeros).take(done)

        return tf.data.Dataset.range(most).take(1).flat_map(call)

    passes = nothing("begin", (), _MOST_READERS)
    if more:
        # Of several readers one counts these.
        files = [file for file, rows in more.items() for _ in range(rows)]
        passes = passes.concatenate(nothing("count", files, 1))
    return passes.concatenate(dataset).concatenate(nothing("end", (), _MOST_READERS))


def _zeros(spec: tf.TypeSpec) -> tf.Tensor | tf.RaggedTensor:
    """A value of a type that has no rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0], spec.dtype)
        return tf.RaggedTensor.from_row_splits(values, tf.zeros([1], spec.row_splits_dtype))
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)


def _call(name: str, what: str, files: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    (done,) = _python_ops.call("count_skipped", [name, what, files, number], [tf.int64])
    done.set_shape([])
    return done


@_python_ops.register("count_skipped")
def _count_skipped(
    name: bytes, what: bytes, files: np.ndarray, unused_number: np.ndarray
) -> np.ndarray:
    """Does what `count` and the beginning and end of a pass want."""
    if what == b"begin":
        with _lock:
            _counts[name.decode()] = collections.Counter()
    add(name.decode(), [file.decode(errors="replace") for file in files])
    if what == b"end":
        with _lock:
            _ended[name.decode()] = _counts.pop(name.decode(), collections.Counter())
        found = counts([name.decode()])
        if found:
            by_file = ", ".join(f"{rows} of {file}" for file, rows in found.items())
            logging.warning("Left out %d malformed rows: %s", sum(found.values()), by_file)
    return np.int64(0)
