"""What a run does at the moment, in a file that `python -m tf_recsync.status` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import Any

import keras
from absl import logging

from tf_recsync._checks import check_seconds, checked_path
from tf_recsync.callbacks.strategy_callback import numbers_of
from tf_recsync.strategies.fit_strategy import check_reported

_SUFFIX = ".status.json"
_LATE_SECONDS = 5.0  # How much older a file may be than it should become.
_numbers = itertools.count()  # Of the callbacks of this process: each has a file of its own.


def status_folder() -> pathlib.Path:
    """Where programs of this user leave what they do."""
    return pathlib.Path(tempfile.gettempdir()) / f"tf_recsync-{os.getuid()}"


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """What one server does.

    Attributes:
        name: such as "worker:1".
        state: as of `recsync.MemberState`.
        seconds: for how long it has been in it.
        life: how often it was lost.
        batches: those that it has done in the pass over the data; None of all but workers.
        data_wait: the seconds that it has waited for batches, in all epochs; None likewise.
    """

    name: str
    state: str
    seconds: float
    life: int
    batches: int | None = None
    data_wait: float | None = None


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """What a run does.

    Attributes:
        time: when it was so, in seconds since 1970.
        began: when `fit` began, likewise.
        pid: the process of the program that coordinates.
        program: its command line.
        strategy: the name of the strategy's class.
        doing: "train", "evaluate", "end" or "failed".
        epoch: its number, from 0.
        epochs: how many there will be.
        batches: those of the epoch that are done.
        expected: those that it has, or None if that is not known.
        rate: batches a second, since the status before.
        losses: what was lost with workers, and done again, by name.
        logs: what Keras shows beside the progress bar.
        waiting: who waits for whom, in words; empty if nobody ever does.
        servers: all servers of the cluster.
        every_seconds: how old the file may become, as of `Status`.
    """

    time: float
    began: float
    pid: int
    program: str
    strategy: str
    doing: str
    epoch: int
    epochs: int
    batches: int
    expected: int | None
    rate: float
    losses: dict[str, int]
    logs: dict[str, float]
    waiting: str
    servers: Sequence[ServerStatus]
    every_seconds: float = 1.0

    def write(self, path: pathlib.Path) -> None:
        """Writes it to a file, which has it or the one before, and never a part."""
        unfinished = path.with_name(f".{path.name}.{self.pid}")
        unfinished.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        os.replace(unfinished, path)

    @classmethod
    def read(cls, path: pathlib.Path) -> RunStatus:
        """Reads what `write` has written.

        Raises:
            OSError: the file can't be read.
            ValueError: it has no status.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            servers = [ServerStatus(**server) for server in values.pop("servers")]
            return cls(servers=servers, **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has no status of a run: {error}") from None

    @property
    def has_ended(self) -> bool:
        """Whether `fit` has ended, perhaps by an error."""
        return self.doing in _ENDS

    def table(self, now: float) -> str:
        """As a text.

        Args:
            now: seconds since 1970.
        """
        age = now - self.time
        of = "" if self.expected is None else f" of {self.expected:,}"
        head = [
            f"{self.strategy}, process {self.pid}: {self.program}",
            f"{_DOING[self.doing]} for {_duration(self.time - self.began)}; epoch {self.epoch + 1} "
            f"of {self.epochs}, batch {self.batches:,}{of}, {self.rate:,.1f} batches/s",
        ]
        if age > self.every_seconds + _LATE_SECONDS and not self.has_ended:
            head.append(f"as of {_duration(age)} ago: the program may stand still or be gone")
        if self.logs:
            head.append("  ".join(f"{name} {value:.4g}" for name, value in self.logs.items()))
        lost = {name: count for name, count in self.losses.items() if count}
        if lost:
            head.append("losses: " + ", ".join(f"{n} {count:,}" for n, count in lost.items()))
        if self.waiting:
            head.append(f"waiting: {self.waiting}")
        rows = [("server", "state", "for", "times lost", "batches", "waited for data")]
        for one in self.servers:
            rows.append(
                (
                    one.name,
                    one.state,
                    _duration(one.seconds),
                    str(one.life),
                    "" if one.batches is None else f"{one.batches:,}",
                    "" if one.data_wait is None else _duration(one.data_wait),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*head, "", *lines])


_DOING = {
    "train": "trains",
    "evaluate": "evaluates",
    "end": "has ended after training",
    "failed": "has ended by an error after training",
}
_ENDS = ("end", "failed")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class Status(keras.callbacks.Callback):
    """Has `python -m tf_recsync.status` show what a run does, while `fit` goes on.

    The command shows the progress, the state of each server, and who waits for whom, in a terminal
    of the same machine and user. It reads a file, which this callback writes about once a second
    and removes at the end of `fit`; nobody else can read it. In modes in which workers wait for
    each other, the parameter server that hands out tokens, or each worker of a `HopStrategy`, is
    asked for that, which costs it a message.

    Args:
        path: the file, for a program whose status is to be kept or read by others; it then stays
            after the end, and says whether `fit` has ended by an error of a step. (After one that a
            callback has raised the file only grows old, as nobody is told of that.) None (the
            default) for one that the command finds by itself.
        every_seconds: how old the file may become; 1 by default.

    Raises:
        ValueError: if `every_seconds` is not positive; by `fit`, if the model's strategy is none
            of this package's.
        OSError: by `fit`, if the file can't be written.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import tf_recsync as recsync
        >>> x = np.arange(64, dtype=np.float32)[:, None] / 64
        >>> dataset = tf.data.Dataset.from_tensor_slices((x, x > 0.5)).batch(8)
        >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
        ...     strategy = recsync.AsyncStrategy(cluster)
        ...     with strategy.scope():
        ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
        ...         model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy")
        ...     status = recsync.callbacks.Status()
        ...     history = model.fit(dataset, verbose=0, callbacks=[status])
        >>> status.last.strategy, status.last.batches, len(status.last.servers)
        ('AsyncStrategy', 8, 3)
    """

    def __init__(self, path: str | os.PathLike | None = None, every_seconds: float = 1.0):
        super().__init__()
        check_seconds("every_seconds", every_seconds)
        self.last: RunStatus | None = None  # What was written last.
        self._is_kept = path is not None
        if path is None:
            self._path = status_folder() / f"{os.getpid()}-{next(_numbers)}{_SUFFIX}"
            weakref.finalize(self, self._path.unlink, missing_ok=True)
        else:
            self._path = pathlib.Path(checked_path(path, of="file"))
        self._every_seconds = every_seconds
        self._due = self._began = 0.0
        self._epoch = 0
        self._doing = "train"
        self._past: object = None  # The pass that the train function counts steps of from before.
        self._logs: dict[str, float] = {}
        self._has_warned = False

    def set_model(self, model):
        super().set_model(model)
        check_reported("callbacks.Status", model.distribute_strategy)

    # What Keras calls.

    def on_train_begin(self, logs=None):
        self._began, self._epoch, self._logs, self.last = time.time(), 0, {}, None
        for function in (self.model.train_function, self.model.test_function):
            function.observers.add(self)
        self._has_warned, self._doing = False, "train"
        self._past = self.model.train_function.run
        self._put("train")

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._note(logs)
        self.tell()

    def on_epoch_end(self, epoch, logs=None):
        self._note(logs)
        self._write("train")

    def on_test_begin(self, logs=None):
        if self._began:  # Not where it is given to `evaluate`.
            self._doing = "evaluate"
            self._write("evaluate")

    def on_test_batch_end(self, batch, logs=None):
        if self._began:
            self.tell()

    def on_test_end(self, logs=None):
        self._doing = "train"

    def on_train_end(self, logs=None):
        self._end("end")

    def failed(self) -> None:
        """Training has ended by an error."""
        self._end("failed")

    def _end(self, doing: str) -> None:
        for function in (self.model.train_function, self.model.test_function):
            function.observers.discard(self)
        self._write(doing)
        self._began = 0.0
        if not self._is_kept:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def tell(self) -> None:
        """Writes the file, if it has become old; in the thread of `fit`."""
        if time.monotonic() >= self._due:
            self._write(self._doing)

    def _note(self, logs: Any) -> None:
        # A metric may have several values, which a line has no place for.
        found = {name: numbers_of(value) for name, value in (logs or {}).items()}
        self._logs = {name: values.item() for name, values in found.items() if values.size == 1}

    def _write(self, doing: str) -> None:
        """As `_put`, but a file that can't be written ends no training."""
        try:
            self._put(doing)
        except OSError as error:
            if not self._has_warned:
                logging.warning("The status can't be written at the moment: %s", error)
            self._has_warned = True

    def _put(self, doing: str) -> None:
        if not self._is_kept:
            folder = self._path.parent
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise PermissionError(
                    f"{folder} belongs to another user: give path, or another TMPDIR"
                )
        self._due = time.monotonic() + self._every_seconds
        strategy, function = self.model.distribute_strategy, self.model.train_function
        now, before = time.time(), self.last
        has_steps = function.run is not self._past
        batches = function.epoch_steps if has_steps else 0
        is_same = before is not None and before.epoch == self._epoch
        done = max(batches - before.batches, 0) if is_same else batches
        seconds = now - (self._began if before is None else before.time)
        waits = strategy.data_wait(self.model)
        steps = strategy.worker_steps(self.model) if has_steps else [0] * len(waits)
        expected = self.params.get("steps")
        self.last = RunStatus(
            time=now,
            began=self._began,
            pid=os.getpid(),
            program=" ".join(sys.argv),
            strategy=type(strategy).__name__,
            doing=doing,
            epoch=self._epoch,
            epochs=self.params.get("epochs", 1),
            batches=batches,
            expected=None if expected is None else int(expected),
            rate=done / seconds if seconds > 0 else 0.0,
            losses={n: int(c) for n, c in dataclasses.asdict(strategy.losses(self.model)).items()},
            logs=self._logs,
            waiting="" if doing in _ENDS else strategy.describe_waits(self.model),
            servers=[
                ServerStatus(
                    f"{member.job}:{member.index}",
                    member.state.value,
                    member.seconds,
                    member.life,
                    steps[member.index] if member.job == "worker" else None,
                    waits[member.index] if member.job == "worker" else None,
                )
                for member in strategy.members()
            ],
            every_seconds=self._every_seconds,
        )
        self.last.write(self._path)


def is_there(pid: int) -> bool:
    """Whether this machine has a process of this number."""
    return os.path.exists(f"/proc/{pid}")


def running() -> list[pathlib.Path]:
    """The files of this user's programs that run; those of programs that are gone are removed."""
    found = []
    for path in sorted(status_folder().glob(f"*{_SUFFIX}")):
        number = path.name.partition("-")[0]
        if number.isdecimal() and is_there(int(number)):
            found.append(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return found
