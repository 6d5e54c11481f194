"""Callbacks that write what a model is, again and again, while training goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_recsync._checks import check_at_least, check_bool, check_seconds
from tf_recsync._scopes import dispatch_scope_of
from tf_recsync.versions import Versions

_LOG_SECONDS = 60.0  # Between two log entries about one who waits.

# Writes a version to a folder that is not seen yet; returns what its marker says of it.
Write = Callable[[str], Mapping[str, Any]]


class WritingBeside(keras.callbacks.Callback):
    """Writes versions of something that is made of a model, in a thread of their own.

    When one is due, it is read at one moment, in the thread of `fit`, and written while training
    goes on. A version is seen when it is whole. One that could not be written ends `fit` after the
    next step; the version before stays.

    Args:
        versions: where versions are written.
        argument: the name and the value of the argument that says where, for errors.
        every_seconds: from one version to the next; None: time does not count.
        every_steps: steps of Keras from one to the next; None: they do not count.
        keep: how many versions are kept; None for all.
        at_end: whether there is one when training ends, too, if there were steps since the last.
        timeout: seconds that writing may take at most.

    Raises:
        ValueError: if an argument is wrong.
    """

    _noun = ""  # What a version is, for errors and the log.
    # How to go on when one could not be written.
    _advice = (
        "The model has all that it was trained on; if fit is called again, it trains the model on "
        "its data from the beginning"
    )

    def __init__(
        self,
        versions: Versions,
        argument: tuple[str, str],
        every_seconds: float | None,
        every_steps: int | None,
        keep: int | None,
        at_end: bool,
        timeout: float,
    ):
        super().__init__()
        if every_seconds is not None:
            check_seconds("every_seconds", every_seconds)
        if every_steps is not None:
            check_at_least("every_steps", every_steps, 1)
        check_seconds("timeout", timeout)
        if keep is not None:
            check_at_least("keep", keep, 1)
        check_bool("at_end", at_end)
        self._versions = versions
        self._argument = argument
        self._every, self._every_steps = every_seconds, every_steps
        self._timeout, self._keep, self._at_end = float(timeout), keep, at_end
        self._due = 0.0  # When the next one is (time.monotonic).
        self._steps = 0  # Of Keras, since it was read last.
        self._last_batch = -1  # The number of the last of these in the epoch.
        self._goes_on = False  # Whether steps follow.
        self._is_put_off = False  # And that was said.
        # Of the thread that writes, which is the only one to use them as long as it runs.
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._error: Exception | None = None
        self._last: str | None = None  # The version that was written last.

    # What a subclass provides.

    def _prepare(self) -> None:
        """Makes ready for a call of `fit`; raises an error if nothing could be written."""

    def _read(self) -> tuple[int, Write]:
        """Reads what is written next: the global step, and what writes it."""
        raise NotImplementedError

    def _written(self, version: int, step: int, pause: float, seconds: float) -> None:
        """A version is whole; in the thread.

        Args:
            version: its number.
            step: its global step.
            pause: for how many seconds it was read, in which training stood still.
            seconds: for how many it was written then.
        """

    def _is_excused(self, error: Exception) -> bool:
        """Whether training goes on though something could not be read or written.

        If a parameter server was lost, the next step finds out, and recovers where it can.
        """
        return self._goes_on and recovers_from(self.model, error)

    def _about(self) -> str:
        """What else the log says of the version that was written last; in the thread."""
        return ""

    def _unneeded(self, versions: list[int], keep: int) -> list[int]:
        """Which versions are removed; in the thread.

        Args:
            versions: all that are whole, in their order.
            keep: how many are to be kept.
        """
        return versions[:-keep]

    # Keras calls these.

    def on_train_begin(self, logs=None):
        self._goes_on = False
        self._wait()  # For that of a call of `fit` that ended with an error.
        try:
            self._versions.prepare()
        except (OSError, tf.errors.OpError) as error:
            name, value = self._argument
            raise OSError(
                f"{name}={value!r} can't be written: {words_of(error)}; it must be a folder that "
                "this process may make and write"
            ) from error
        self._steps, self._last_batch = 0, -1
        self._prepare()
        self._goes_on = True
        self._set_due(time.monotonic())

    def on_epoch_begin(self, epoch, logs=None):
        self._last_batch = -1

    def on_train_batch_end(self, batch, logs=None):
        # The last of those of an execution, which may be beyond the epoch's end.
        batch = min(batch, (self.params.get("steps") or sys.maxsize) - 1)
        # What an earlier process has done, Keras counts again.
        skipped = getattr(self.model.train_function, "skipped_batches", 0)
        self._last_batch = max(self._last_batch, skipped - 1)
        self._steps += max(batch - self._last_batch, 0)
        self._last_batch = max(self._last_batch, batch)
        self._write_if_due()

    def on_epoch_end(self, epoch, logs=None):
        self._write_if_due()

    def on_train_end(self, logs=None):
        self._wait()
        self._goes_on = False
        if self._at_end and self._steps:
            self._write_last()

    def _write_last(self) -> None:
        """Writes what there is after the last step; nobody else finds out that a server is lost."""
        try:
            self._begin()
            self._wait()
        except (tf.errors.OpError, RuntimeError) as error:
            function = self.model.train_function
            if getattr(function, "recovery", None) is None or not function.recovered_between(error):
                raise
            self._write_recovered()

    def _write_recovered(self) -> None:
        """Writes the model that was restored after the last step."""
        self._begin()
        self._wait()

    # Inside.

    def _set_due(self, now: float) -> None:
        self._due = float("inf") if self._every is None else now + self._every

    def _is_due(self) -> bool:
        is_counted = self._every_steps is not None and self._steps >= self._every_steps
        return self._steps > 0 and (is_counted or time.monotonic() >= self._due)

    def _write_if_due(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self._wait()
        if self._thread is not None:
            self._check_time()
        elif self._is_due():
            self._begin()

    def _begin(self) -> None:
        began = time.monotonic()
        try:
            step, write = self._read()
        except (tf.errors.OpError, RuntimeError) as error:
            if not self._is_excused(error):
                raise
            self._put_off(error)
            return
        self._is_put_off = False
        self._began = time.monotonic()
        self._steps = 0
        self._set_due(began)
        self._thread = threading.Thread(
            target=self._run,
            args=(write, step, self._began - began),
            name="recsync_writing",
            daemon=True,
        )
        self._thread.start()

    def _put_off(self, error: Exception) -> None:
        if not self._is_put_off:  # It is tried again after each batch.
            logging.warning("A %s is put off: %s", self._noun, words_of(error))
        self._is_put_off = True
        self._steps = max(self._steps, 1)  # There is something that is not written.
        self._set_due(time.monotonic())

    def _run(self, write: Write, step: int, pause: float) -> None:
        """Writes what was read; in the thread."""
        try:
            # What an interrupted call of `fit` has left writing there comes to its end first.
            with self._versions.writing, dispatch_scope_of(self.model):
                self._write(write, step, pause)
        except Exception as error:  # Handed to the thread of `fit`.
            self._error = error

    def _write(self, write: Write, step: int, pause: float) -> None:
        number, folder = self._versions.begin()
        try:
            self._versions.finish(number, write(folder))
        except Exception:
            self._make_room(number, self._versions.give_up)
            raise
        seconds, self._last = time.monotonic() - self._began, self._versions.path(number)
        self._written(number, step, pause, seconds)
        logging.info(
            "%s %d of global step %d is whole in %s%s: training paused for %.3f s, writing took "
            "%.3f s.",
            *(self._noun.capitalize(), number, step, self._last, self._about()),
            *(pause, seconds),
        )
        if self._keep is not None:
            # The newest first: it may need older ones.
            for old in reversed(self._unneeded(self._versions.published(), self._keep)):
                self._make_room(old, self._versions.remove)

    def _make_room(self, number: int, remove: Callable[[int], None]) -> None:
        """Removes a version, if that is possible: it can't be used, or is not needed any more."""
        try:
            remove(number)
        except (OSError, tf.errors.OpError) as error:
            logging.warning("%s could not be removed: %s", self._versions.path(number), error)

    def _wait(self) -> None:
        """Waits for the thread that writes, if there is one; raises what it has failed of."""
        if self._thread is None:
            return
        while self._thread.is_alive():
            self._thread.join(timeout=min(_LOG_SECONDS, self._timeout))
            self._check_time()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if not self._is_excused(error):
                raise self._failed(words_of(error)) from error
            self._put_off(error)

    def _check_time(self) -> None:
        seconds = time.monotonic() - self._began
        if not self._thread.is_alive():
            return
        if seconds >= _LOG_SECONDS:
            logging.log_every_n_seconds(
                logging.INFO,
                "Writing to %s takes %.0f s so far.",
                _LOG_SECONDS,
                *(self._argument[1], seconds),
            )
        if seconds > self._timeout:
            raise self._failed(f"writing has taken {seconds:.0f} s, timeout={self._timeout:g}")

    def _failed(self, reason: str) -> RuntimeError:
        name, value = self._argument
        kept = "nothing was written before" if self._last is None else f"{self._last} is whole"
        return RuntimeError(
            f"a {self._noun} could not be written to {name}={value!r}: {reason}; {kept}. The "
            f"folder must be one that can be written and has room. {self._advice}"
        )


def recovers_from(model: keras.Model, error: Exception) -> bool:
    """Whether an error of a call comes from a parameter server's loss, after which `fit` goes on.

    The next step finds out, and recovers.
    """
    function = getattr(model, "train_function", None)
    return getattr(function, "recovery", None) is not None and function.has_lost_servers(error)


def words_of(error: Exception) -> str:
    """What an error says."""
    return getattr(error, "message", None) or str(error)
