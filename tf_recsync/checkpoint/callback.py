"""Checkpoints that are saved again and again while training goes on."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_recsync._checks import check_bool, check_seconds, checked_path
from tf_recsync.checkpoint.index import INDEX, Index, parsed
from tf_recsync.checkpoint.parts import DONE, PART, Part, Progress, progress_of, words
from tf_recsync.checkpoint.restoring import restore, restore_lost
from tf_recsync.checkpoint.saving import Writer, check_folder, check_metadata
from tf_recsync.checkpoint.writing_rows import WritingRows
from tf_recsync.optimizers.base import parts_of
from tf_recsync.strategies.copied_strategy import CopiedStrategy
from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.strategies.recovery import Recovery
from tf_recsync.strategies.train_function import TrainFunction
from tf_recsync.versions import Versions
from tf_recsync.writing_beside import Write

_EPOCH, _DATA = "epoch", "data"
_HINT = "If it is to train on other data, give its Checkpoint a `part` that names them."


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was saved.

    Attributes:
        path: its folder.
        global_step: the updates of the parameters that are in it.
        pause_seconds: for how long training stood still while what is of one moment was read.
        write_seconds: how long it took to write it then, while training went on.
        rows: how many rows of tables were written.
        is_delta: whether these are only those that had changed since the checkpoint before.
    """

    path: str
    global_step: int
    pause_seconds: float
    write_seconds: float
    rows: int
    is_delta: bool


class Checkpoint(WritingRows):
    """Saves the model, its optimizer and what the strategy needs while it is trained, and goes on.

    Every so many seconds or steps, steps in flight end, and none begins until this process has
    read what is of one moment: dense parameters with all that belongs to them, the copies of
    workers or groups, the global step. Training goes on then, and servers write the rows of
    embedding tables that they hold: each row together with what the optimizer keeps beside it, as
    they are at some moment after that. So a file may have updates of rows that came after the
    global step, and no row by halves.

    Checkpoints are the folders `<folder>/<number>`, whose numbers rise, in the form of
    `tf_recsync.checkpoint.save`. One that could not be saved as a whole is removed, and `fit`
    raises an error after the next step; the one before stays. `fit` ends when the last one is
    written.

    With `full_every`, most checkpoints are deltas: of embedding tables they have only the rows that
    were updated since the checkpoint before, full or delta, with all that lies beside these, while
    all that is dense is whole. Each is restored as any other, together with those that it is based
    on, whose folders must stay beside its own. For that, servers note the version of each row that
    they write, in 8 bytes for each row of the tables, which they keep as long as `fit` runs.
    Updates take no longer. The first checkpoint of each call of `fit` is full, and so is the one
    after one that could not be saved, after the loss of a parameter server, and after a callback
    has restored a checkpoint, loaded weights or, under a strategy of this package, assigned a
    table. What is being written meanwhile is written anew; if rows are set again meanwhile, it is
    kept, with a warning. (Without a strategy, what is assigned to a table is in the next full one.)
    Tables whose rows change in other ways than by updates that name them are whole in each
    checkpoint: with `use_ema`, a constraint, or `lazy=False`, with Keras's optimizers, with
    `weight_decay` where they lie on no parameter server, and where each worker has a copy of them.

    If this process dies, the same program goes on: at its first `fit` the latest checkpoint is
    restored, whatever the strategy and the number of servers then, and the epoch in which it was
    saved goes on. A program that calls `fit` again and again, as for each day of its data, goes
    through the same calls: those that were done end at once, and the one in which the checkpoint
    was saved goes on. Calls are told from each other by `part`. As many batches of the dataset are
    skipped as were trained on in it; its order must be the same in both programs, as with a seed of
    `shuffle`. With another batch size, without a strategy of this package, or where several
    readers divide the data as they go (those without an end, for example), the epoch begins anew.

    If a parameter server is lost, training pauses until it is up again, at the same address: its
    variables are made anew and read from the latest checkpoint, and the workers go on with the
    batches that they have. A server of a group of several, whose copy others have, is no such case.

    Args:
        folder: where checkpoints are saved, made if it is missing; a path that `tf.io.gfile`
            knows, and that all parameter servers see. One program at a time may save there.
        every_seconds: seconds from one checkpoint to the next; None (the default, if `every_steps`
            is given) for no such limit. Without either of them 600.
        every_steps: steps that Keras counts from one to the next; None (the default) for none.
        keep: how many checkpoints are kept, at least 1; older ones are removed. Default 2; None
            keeps all. Those that a kept one is based on are kept as well.
        full_every: how many checkpoints there are from one full one to the next, at least 1; those
            between are deltas. Default 1: all are full.
        at_end: whether one is saved when training ends, too. Default True.
        resume: whether the first `fit` of a model restores the latest checkpoint, if there is one;
            later calls go on with what the model has. Default True. What was saved at the end of
            `fit` has no epoch left, so that the same `fit` ends at once, with a warning. If a
            callback had stopped it, as `EarlyStopping` does, the epochs that were left follow.
        part: a name of what a call of `fit` trains on, such as the day of its data. A part that is
            done is not trained on again: once `fit` was called for another part, or no epoch is
            left. None (the default): parts are numbered by the calls of `fit` of this model in
            this process. Give names where a program may begin with another part than before, as
            one that is started anew each day.
        metadata: what is to be known of each checkpoint later, of types that JSON has, beside what
            the callback sets itself: "epoch", "data", "part" and "done_parts".
        timeout: seconds that writing may take at most; default 3600. Then `fit` fails.
        on_ps_lost: "recover" (the default), as above, or "raise": `fit` ends with an error. If it
            shall recover, one is saved when training begins, unless the latest was restored. If a
            server is lost while `fit` evaluates on `validation_data`, that begins anew, so that
            metrics are of each batch once. Other calls of `evaluate` and `predict` end with an
            error.
        recovery: what goes back to the latest checkpoint: "partial", only what was lost, so that
            updates since then are missing there; or "all", so that everything is of the same
            moment again. None (the default): "partial" where each push is applied at once, "all"
            in the other modes, and where workers or groups have copies, which can't be "partial".
            With "all", the data go back, too, to what had been trained on then in the same pass
            over them; with "partial", what was trained on since is not trained on again.
        ps_timeout: seconds that a lost server is waited for; default 600. Then `fit` fails.

    Attributes:
        saved: a `SavedCheckpoint` for each one that was saved, in their order.
        restored: the path of the one that was restored; None if none was.
        recoveries: how often training went on after the loss of a parameter server.

    Raises:
        ValueError: if an argument is wrong; by `fit`, if the latest checkpoint is of another model
            or damaged, or the model is not built.
        OSError: by `fit`, before training begins, if the folder can't be written, by this process
            or by a server.
        RuntimeError: by `fit`, if a checkpoint could not be saved.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import numpy as np
    >>> import tf_recsync as recsync
    >>> def train(folder, epochs):
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ...     model.compile(recsync.optimizers.Adagrad(0.1), "mse")
    ...     checkpoint = recsync.callbacks.Checkpoint(folder, every_seconds=600)
    ...     x = y = np.ones([4, 1])
    ...     history = model.fit(x, y, epochs=epochs, callbacks=[checkpoint], verbose=0)
    ...     return history.epoch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(train(folder, epochs=2), train(folder, epochs=3))
    [0, 1] [2]
    """

    _noun = "checkpoint"
    _advice = (
        "Then start the program again, to go on from the last whole one: if fit is called again in "
        "this one, it trains the model on its data from the beginning, also on those that it has "
        "been trained on"
    )

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        every_seconds: float | None = None,
        every_steps: int | None = None,
        keep: int | None = 2,
        full_every: int = 1,
        at_end: bool = True,
        resume: bool = True,
        part: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float = 3600.0,
        on_ps_lost: str = "recover",
        recovery: str | None = None,
        ps_timeout: float = 600.0,
    ):
        folder = checked_path(folder, "folder")
        check_metadata(metadata)
        for name in {_EPOCH, _DATA, PART, DONE}.intersection(metadata or ()):
            raise ValueError(f"metadata can't have {name!r}, which the callback sets itself")
        check_bool("resume", resume)
        if part is not None and (not isinstance(part, str) or not part):
            raise ValueError(f"part must be a name or None, not {part!r}")
        if on_ps_lost not in ("recover", "raise"):
            raise ValueError(f'on_ps_lost must be "recover" or "raise", not {on_ps_lost!r}')
        if recovery not in (None, "all", "partial"):
            raise ValueError(f'recovery must be "all", "partial" or None, not {recovery!r}')
        check_seconds("ps_timeout", ps_timeout)
        if every_seconds is None and every_steps is None:
            every_seconds = 600.0
        versions = Versions(folder, INDEX)
        super().__init__(
            versions,
            ("folder", folder),
            every_seconds,
            every_steps,
            keep,
            at_end,
            timeout,
            full_every,
        )
        self.saved: list[SavedCheckpoint] = []
        self.restored: str | None = None
        self.recoveries = 0
        self._recovers, self._recovery = on_ps_lost == "recover", recovery
        self._ps_timeout = float(ps_timeout)
        self._resume = resume
        self._part = part
        self._progress = Progress()
        self._metadata = dict(metadata or {})
        self._running = 0  # The epoch that runs, or ran last.
        self._epoch = 0  # The one to begin with after this moment.
        self._has_begun = False  # Whether the first epoch of `fit` has.
        self._own: set[str] = set()  # The checkpoints that this call of `fit` has saved.
        self._resumed: str | None = None  # The one that it was restored from.

    def on_train_end(self, logs=None):
        try:
            super().on_train_end(logs)
        finally:
            function = self.model.train_function
            if isinstance(function, TrainFunction):
                function.end_recovery()
            self._progress.average_again()
        self.model._initial_epoch = None
        self._progress.calls += 1

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._has_begun = True
        self._progress.at = None
        self.model._initial_epoch = None  # A further call of `fit` begins with its own.
        self._epoch = self._running = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= (self.params.get("steps") or sys.maxsize):
            self._epoch = self._running + 1  # All of it is in what is saved now.
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._epoch = epoch + 1
        super().on_epoch_end(epoch, logs)

    def _prepare(self) -> None:
        self._has_begun = False
        self._epoch, self._resumed = 0, None
        self._own.clear()
        super()._prepare()
        if not self.model.built:
            raise ValueError(
                f"the model {self.model.name!r} must be built before it is trained with a "
                "Checkpoint, as by keras.Input: else nothing could be restored"
            )
        folder = self._argument[1]
        self._progress = progress = progress_of(self.model, folder)
        progress.average_again()  # If the last call had an error.
        if self._resume and progress.is_new:
            latest = latest_checkpoint(folder)
            if latest is not None:
                progress.restored(latest, restore(latest, self.model))
                self.restored = latest
        part = self._part or progress.calls + 1
        if progress.is_done(part):
            self.model._initial_epoch = sys.maxsize
            parts = parts_of(self.model.optimizer)
            progress.leave_unaveraged(getattr(own, "inner_optimizer", own) for own in parts)
            logging.warning(
                "This call of fit trains on nothing: %s was done before %s, in which %s was "
                "saved. %s",
                words(part),
                words(progress.last),
                progress.at or f"the last checkpoint in {folder}",
                "" if self._part else _HINT,
            )
            return
        if progress.is_under_way(part):
            self._go_on(part)
        progress.begin(part)
        check_folder(folder, self.model)
        function = self.model.train_function
        if self._recovers and isinstance(function, TrainFunction):
            strategy = self.model.distribute_strategy
            is_partial = self._is_partial(strategy)
            function.recovery = Recovery(
                functools.partial(self._recover, is_partial=is_partial),
                self._ps_timeout,
                self._describe_last,
            )
            # One of before may have other values than the model has by now. What was lost, and a
            # call of before could not restore, the first step restores.
            if self._resumed is None and not function.unrestored:
                self._begin()
                self._wait()

    def _go_on(self, part: Part) -> None:
        """Has `fit` begin where it was when the checkpoint was saved that the model is at."""
        path, metadata = self._progress.at, self._progress.metadata
        self._resumed = path
        self._epoch = int(metadata.get(_EPOCH, 0))
        # As Keras's BackupAndRestore does.
        self.model._initial_epoch = self._epoch
        if self._epoch >= self.params.get("epochs", sys.maxsize):
            logging.warning(
                "This call of fit trains on nothing: %s was saved at its end (%s). %s",
                path,
                words(part),
                "" if self._part else _HINT,
            )
            return
        logging.warning("Training goes on from %s, with epoch %d.", path, self._epoch + 1)
        if _DATA in metadata and isinstance(self.model.train_function, TrainFunction):
            self.model.train_function.go_on_at(DataPosition.parsed(metadata[_DATA]))

    def _is_partial(self, strategy: FitStrategy) -> bool:
        """Whether only what was lost goes back to a checkpoint.

        Raises:
            ValueError: if that can't be.
        """
        is_copied = isinstance(strategy, CopiedStrategy)
        if is_copied and self._recovery == "partial":
            raise ValueError(
                f'recovery="partial" can\'t be under a {type(strategy).__name__}, whose workers or '
                'groups have copies: use "all" or None'
            )
        is_at_once = not is_copied and not strategy.mode_of(self.model).uses_buffers
        return self._recovery == "partial" or (self._recovery is None and is_at_once)

    def _recover(self, lost: Sequence[tf.Variable], *, is_partial: bool) -> DataPosition | None:
        """Restores what a model has lost; see `Recovery`."""
        position = None
        path = latest_checkpoint(self._argument[1])
        if path is None:
            raise ValueError(f"folder={self._argument[1]!r} has no checkpoint any more")
        if is_partial:
            restore_lost(path, self.model, lost)
        else:
            metadata = restore(path, self.model)
            # The one that it was restored from is of its beginning.
            position = self.model.train_function.beginning
            if _DATA in metadata and path in self._own:
                position = DataPosition.parsed(metadata[_DATA])
        self.recoveries += 1
        return position

    def _describe_last(self) -> str:
        path = latest_checkpoint(self._argument[1])
        return "there is no checkpoint" if path is None else f"the last checkpoint is {path}"

    def _write_recovered(self) -> None:
        if self._is_partial(self.model.distribute_strategy):
            super()._write_recovered()
            return
        logging.warning(
            "The model is what it was in %s, as a server was lost after the last step: start the "
            "program again to train on what came after that.",
            latest_checkpoint(self._argument[1]),
        )

    def _read(self) -> tuple[int, Write]:
        read = Writer(self.model).read()
        epoch, function = self._epoch, self.model.train_function
        metadata = dict(self._metadata)
        if self._has_begun and isinstance(function, TrainFunction):
            # Read now, when workers stand still; they may be ahead of Keras.
            if function.is_epoch_done:
                epoch = self._running + 1
            metadata[_DATA] = function.position(epoch > self._running).as_json()
        metadata.update(self._progress.as_metadata())
        metadata[_EPOCH] = epoch
        writer = Writer(self.model, metadata)
        chain = self._begin_chain()

        def write(path: str) -> Mapping[str, Any]:
            index = writer.write(path, read, chain.versions, chain.begin(read.rows, self._is_there))
            return self._end_rows(index)

        return read.global_step, write

    def _parse(self, path: str) -> Index:
        return parsed(path)

    def _written(self, version: int, step: int, pause: float, seconds: float) -> None:
        super()._written(version, step, pause, seconds)
        path, index = self._versions.path(version), self._last_index
        self._own.add(path)
        is_delta = index.base is not None
        self.saved.append(SavedCheckpoint(path, step, pause, seconds, index.written, is_delta))


def latest_checkpoint(folder: str | os.PathLike) -> str | None:
    """The checkpoint in a folder that has the highest number, as `callbacks.Checkpoint` gives them.

    Args:
        folder: where `callbacks.Checkpoint` saves them, or `checkpoint.save` in folders whose
            names are numbers without leading zeros. Of others it warns.

    Returns:
        The path of the checkpoint; None if there is none.

    Raises:
        ValueError: if `folder` is no path.

    Example:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(latest_checkpoint(folder))
    None
    """
    folder = checked_path(folder, "folder")
    versions = Versions(folder, INDEX)
    published = versions.published()
    if published:
        return versions.path(published[-1])
    others = [os.path.basename(os.path.dirname(path)) for path in _indices_below(folder)]
    if others:
        logging.warning(
            "%s has checkpoints in %s, but only folders whose names are numbers without leading "
            "zeros are looked at",
            *(folder, ", ".join(sorted(others))),
        )
    return None


def _indices_below(folder: str) -> list[str]:
    try:
        return tf.io.gfile.glob(os.path.join(folder, "*", INDEX))
    except tf.errors.OpError:
        return []  # As where there is no folder.
