"""Versions of something that has rows of tables, which servers write in full or as deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import logging

from tf_recsync._checks import check_at_least
from tf_recsync.checkpoint.deltas import Chain
from tf_recsync.checkpoint.index import Base, RowsIndex
from tf_recsync.shown_variable import assignments_of
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.versions import Versions
from tf_recsync.writing_beside import WritingBeside


class _RowsChanged(RuntimeError):
    """What was written is of no use, as rows were changed meanwhile by something else than updates,
    and is written anew."""


class WritingRows(WritingBeside):
    """Writes versions of which every n-th is full; those between are deltas of the one before.

    A call of `fit` begins with a full one. One that was not written is followed by a full one, and
    so is the loss of a parameter server, or that this process has set rows of tables, as one that
    restores a checkpoint does: then rows get other versions than servers have noted, or older ones
    that updates may raise to these again. What is being written meanwhile is discarded, and written
    anew; but if rows are set again while that is written, it is kept, with a warning.

    Args:
        versions: see `WritingBeside`, like the others.
        argument: as above.
        every_seconds: as above.
        every_steps: as above.
        keep: as above; those that a kept one is based on are kept, too.
        at_end: as above.
        timeout: as above.
        full_every: how many there are from one full one to the next.

    Raises:
        ValueError: if an argument is wrong.
    """

    def __init__(
        self,
        versions: Versions,
        argument: tuple[str, str],
        every_seconds: float | None,
        every_steps: int | None,
        keep: int | None,
        at_end: bool,
        timeout: float,
        full_every: int,
    ):
        check_at_least("full_every", full_every, 1)
        super().__init__(versions, argument, every_seconds, every_steps, keep, at_end, timeout)
        self._full_every = full_every
        self._chain = Chain(full_every)
        # What `_changes` had counted when what is written was read.
        self._changes_at_read = (0, 0)
        self._last_index: RowsIndex | None = None
        self._was_discarded = False  # Whether rows of tables were set while the last was written.

    # What a subclass provides, and uses.

    def _parse(self, path: str) -> RowsIndex:
        """The index of a version; raises FileNotFoundError or ValueError if there is none."""
        raise NotImplementedError

    def _begin_chain(self) -> Chain:
        """To be called when something is read: the chain that it will be a part of."""
        self._note_changes()
        return self._chain

    def _note_changes(self) -> None:
        """Begins a new chain if rows were changed by something else than updates."""
        changes = self._changes()
        if changes != self._changes_at_read:
            self._chain = Chain(self._full_every)
        self._changes_at_read = changes

    def _is_there(self, base: Base) -> bool:
        """Whether a version that was written is there still: somebody may have removed it."""
        try:
            return self._parse(self._versions.path(int(base.folder))).id == base.id
        except (FileNotFoundError, ValueError):
            return False

    def _end_rows(self, index: RowsIndex) -> Mapping[str, Any]:
        """To be called when all is written but the marker; returns what the marker says.

        Args:
            index: what was written.

        Raises:
            RuntimeError: if what was written is of no use.
        """
        (renewals, sets), before = self._changes(), self._changes_at_read
        if renewals != before[0]:
            self._was_discarded = False
            raise _RowsChanged("a parameter server was lost while it was written")
        is_mixed = sets != before[1]
        # Not again and again, of a program that sets rows all the time. A delta would lack some.
        if is_mixed and not (self._was_discarded and index.base is None):
            self._was_discarded = True
            raise _RowsChanged("rows of tables were set while it was written")
        if is_mixed:
            logging.warning(
                "The %s of global step %d has rows from before and after rows of tables were set, "
                "which happened again while it was written",
                *(self._noun, index.global_step),
            )
        self._was_discarded = is_mixed
        self._last_index = index
        return index.as_json()

    def _changes(self) -> tuple[int, int]:
        """How often rows were changed by something else than updates.

        Returns:
            How often variables were made anew, after the loss of a parameter server; and how often
            this process has set tables, or rows of them.
        """
        strategy = self.model.distribute_strategy
        renewals = strategy.renewals if isinstance(strategy, FitStrategy) else 0
        tables = [v for v in self.model.variables if hasattr(v, "physical_table")]
        return renewals, sum(assignments_of(table._value) for table in tables)

    # What `WritingBeside` asks for.

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self._chain = Chain(self._full_every)  # Servers need not keep what the other one has.

    def _prepare(self) -> None:
        self._was_discarded = False
        self._chain = Chain(self._full_every)
        self._changes_at_read = self._changes()

    def _is_excused(self, error: Exception) -> bool:
        is_lost = self._changes()[0] != self._changes_at_read[0]  # What it was read from.
        self._note_changes()
        return is_lost or isinstance(error, _RowsChanged) or super()._is_excused(error)

    def _written(self, version: int, step: int, pause: float, seconds: float) -> None:
        index = self._last_index
        self._chain.end(Base(str(version), index.id), index.rows)

    def _about(self) -> str:
        index = self._last_index
        kind = "" if index.base is None else f", a delta of {index.base.folder}"
        return f"{kind}, with {index.written} rows of tables"

    def _unneeded(self, versions: list[int], keep: int) -> list[int]:
        needed: set[int] = set()
        for kept in versions[-keep:]:
            version: int | None = kept
            while version is not None and version not in needed:
                needed.add(version)
                version = self._base_of(version)
        return [version for version in versions if version not in needed]

    def _base_of(self, version: int) -> int | None:
        """What a version is based on; None if that is nothing, or is not to be known."""
        try:
            base = self._parse(self._versions.path(version)).base
            return None if base is None else int(base.folder)
        except (FileNotFoundError, ValueError):
            return None  # It can't be used, whatever is kept.
