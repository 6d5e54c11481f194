"""Which rows checkpoints between two full ones have: those that changed since the one before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_recsync.checkpoint.blocks import Source
from tf_recsync.checkpoint.index import Base, Rows, shapes_of


class SavedVersions:
    """The version of each row of tables when it was saved last, on the server that has the row.

    It takes 8 bytes for each row there.
    """

    def __init__(self) -> None:
        # By the ids of the tables' own versions, which are kept, so that no other has the id.
        self._variables: dict[int, tuple[keras.Variable, tf.Variable]] = {}

    def beside(self, source: Source, is_partial: bool) -> Source:
        """The same source, whose rows leave their versions here when they are written.

        Args:
            source: of any table; one whose versions don't tell what changes comes back as it is.
            is_partial: whether only rows are written that have changed, if those that have not
                were ever written.
        """
        if source.versions is None:
            return source
        versions = source.versions
        is_new = id(versions) not in self._variables
        if is_new:
            with tf.device(source.device):
                zeros = tf.fill(np.array(versions.shape, np.int64), np.asarray(0, np.int64))
                self._variables[id(versions)] = versions, tf.Variable(zeros, trainable=False)
        _, saved = self._variables[id(versions)]
        return dataclasses.replace(source, saved=saved, is_partial=is_partial and not is_new)


class Chain:
    """Checkpoints one after the other, of which every n-th is full.

    After one that could not be saved the next is full: what servers have noted is of no use then.

    Args:
        full_every: how many there are from one full one to the next.

    Attributes:
        versions: what servers note for the next delta; None if there are no deltas.
    """

    def __init__(self, full_every: int):
        self._full_every = full_every
        self.versions = SavedVersions() if full_every > 1 else None
        self._last: Base | None = None  # The last one, if it was saved.
        self._rows: list[tuple[str, tuple[int, ...]]] = []  # What there was of which shape.
        self._count = 0  # Those from the last full one on.

    def begin(
        self, rows: Sequence[Rows], is_there: Callable[[Base], bool] = lambda base: True
    ) -> Base | None:
        """Begins a checkpoint; returns what it is based on, None if it is to be full.

        Args:
            rows: what is to be saved; when the optimizer has been built, there is more of it.
            is_there: whether one that was saved is there still.
        """
        is_alike = shapes_of(rows) == self._rows
        base = self._last if is_alike and self._count < self._full_every else None
        if base is not None and not is_there(base):
            base = None
        if base is None:
            self._count = 0
        self._last = None
        return base

    def end(self, saved: Base, rows: Sequence[Rows]) -> None:
        """The one that was begun last is saved.

        Args:
            saved: it itself.
            rows: as above.
        """
        self._last, self._rows = saved, shapes_of(rows)
        self._count += 1
