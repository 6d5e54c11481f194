"""Which batches of a pass are done, by their numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

Ranges = tuple[tuple[int, int], ...]  # Each the first number, and the one after the last.


class DoneBatches:
    """A set of numbers, kept as ranges: workers take batches in turn, so there are few of them.

    Several threads may use it.

    Args:
        prefix: so many, from 0 on, are in it from the beginning.
        beyond: ranges of more, which lie behind these.
    """

    def __init__(self, prefix: int = 0, beyond: Ranges = ()):
        self._lock = threading.Lock()
        self._ranges = np.zeros([0, 2], np.int64)  # In order; others lie between any two of them.
        self._count = 0
        self._merge(np.array([(0, prefix), *beyond], np.int64))

    def add(self, numbers: Sequence[int] | np.ndarray) -> int:
        """Adds numbers, of at least 0; returns how many of them were not in it before."""
        if not len(numbers):
            return 0
        found = np.asarray(numbers, np.int64)
        with self._lock:
            return self._merge(np.stack([found, found + 1], 1))

    def _merge(self, ranges: np.ndarray) -> int:
        every = np.concatenate([self._ranges, ranges])
        every = every[every[:, 1] > every[:, 0]]
        every = every[np.argsort(every[:, 0], kind="stable")]
        # How far those before each one reach.
        ends = np.maximum.accumulate(every[:, 1])
        begins_anew = np.ones(len(every), bool)
        begins_anew[1:] = every[1:, 0] > ends[:-1]
        firsts = np.flatnonzero(begins_anew)
        lasts = np.append(firsts[1:], len(every))[: len(firsts)] - 1
        self._ranges = np.stack([every[firsts, 0], ends[lasts]], 1).reshape(-1, 2)
        before, self._count = self._count, int((self._ranges[:, 1] - self._ranges[:, 0]).sum())
        return self._count - before

    @property
    def count(self) -> int:
        """How many are in it."""
        with self._lock:
            return self._count

    @property
    def counted(self) -> tuple[int, Ranges]:
        """How many are in it, and the ranges of those that lie behind a gap."""
        prefix, beyond = self.ranges
        return prefix + sum(end - first for first, end in beyond), beyond

    @property
    def ranges(self) -> tuple[int, Ranges]:
        """How many are in it from 0 on without a gap, and the ranges of the others."""
        with self._lock:
            found = [(int(first), int(end)) for first, end in self._ranges]
        if found and found[0][0] == 0:
            return found[0][1], tuple(found[1:])
        return 0, tuple(found)


def rest_of(
    dataset: tf.data.Dataset,
    prefix: int | tf.Tensor,
    beyond: Iterable,
    begin: int | tf.Tensor = 0,
) -> tf.data.Dataset:
    """A dataset's batches that are not done, each as a pair of its number and the batch.

    Args:
        dataset: batches, in the order in which they have numbers.
        prefix: so many of the first are done.
        beyond: ranges of the numbers of others that are, in order, see `DoneBatches.ranges`.
        begin: the number of the first one of all.
    """
    dataset = dataset.skip(prefix).enumerate(begin + prefix)
    ranges = np.array(list(beyond), np.int64).reshape(-1, 2)
    if not len(ranges):
        return dataset
    firsts, ends = ranges.T

    def is_left(number, _):
        # The range that begins last of those that begin no later.
        place = tf.searchsorted(firsts, [number], side="right")[0] - 1
        return (place < 0) | (number >= tf.gather(ends, tf.maximum(place, 0)))

    return dataset.filter(is_left)
