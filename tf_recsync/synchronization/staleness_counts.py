"""What groups of trainers have counted of the staleness of updates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.synchronization.copies import Copies


class StalenessCounts:
    """The counters of all groups, which outlast the groups. Thread-safe.

    Args:
        copies: the groups' copies.
        counters: which of the copied variables count the staleness of updates.
    """

    def __init__(self, copies: Copies, counters: Sequence[int]):
        self._copies = copies
        self._counters = list(counters)
        self._lock = threading.Lock()
        # What each group had counted when it was last asked, and those that were lost.
        self._counted: dict[int, list[np.ndarray]] = {}
        self._counted_before: list[list[np.ndarray]] = []

    def lost(self, group: int) -> None:
        """The copy of a group is gone, and dropped.

        If its values are kept here, it goes on with them, and with what they have counted.
        """
        is_kept = self._copies.is_loaded(group)
        with self._lock:
            if group in self._counted and not is_kept:
                self._counted_before.append(self._counted.pop(group))

    def begin(self, values: list[np.ndarray]) -> None:
        """Has a group that gets these values as its copy count from 0."""
        for i in self._counters:
            values[i] = np.zeros_like(values[i])

    def all(self) -> list[list[np.ndarray]]:
        """What each group has counted, those that were lost included.

        Returns:
            For each of them, an array for each of the counters; of a group that does not
            answer, and of one that was lost, what is known. Empty if there are no counters.
        """
        for group in self._copies.there if self._counters else ():
            copy = self._copies.of(group)
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError, KeyError):
                values = self._copies.values(group, self._counters)
                with self._lock:
                    if copy is self._copies.of(group):
                        self._counted[group] = values
        with self._lock:
            return [*self._counted_before, *self._counted.values()]
