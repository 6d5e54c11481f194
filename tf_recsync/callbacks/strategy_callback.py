"""What callbacks have in common that report on the strategy that a model trains on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync._checks import checked_path
from tf_recsync.writing_beside import recovers_from, words_of

# What strategies have on which reports can be made.
_REPORTS = {"TrainingReport": "staleness", "HopReport": "topology", "ShadowReport": "sync_report"}


@contextlib.contextmanager
def left_out(model: keras.Model, what: str) -> Iterator[None]:
    """Inside, servers are read for a report, which is left out if training recovers from a loss.

    Args:
        model: the model.
        what: the report, for the log.
    """
    try:
        yield
    except (tf.errors.OpError, RuntimeError) as error:
        if not recovers_from(model, error):
            raise
        logging.warning("%s are left out: %s", what, words_of(error))


def numbers_of(value: Any) -> np.ndarray:
    """What stands in the logs under a name, as floats; none of what is no number.

    Callbacks may put anything into the logs.
    """
    try:
        values = np.asarray(value)
        return np.reshape([float(one) for one in values.flat], values.shape)
    except (TypeError, ValueError):
        return np.zeros(0)


class StrategyCallback(keras.callbacks.Callback):
    """A callback that reports on the strategy that the model trains on."""

    _needs = ""  # What of the strategy shows that it can report from it.

    def set_model(self, model):
        super().set_model(model)
        strategy = model.distribute_strategy
        if hasattr(strategy, self._needs):
            return
        fitting = [report for report, needs in _REPORTS.items() if hasattr(strategy, needs)]
        advice = f"use {' or '.join(fitting)}" if fitting else "it is none of this package's"
        raise ValueError(
            f"{type(self).__name__} can't report on a {type(strategy).__name__}; {advice}"
        )

    @property
    def _strategy(self):
        return self.model.distribute_strategy


class EpochReport(StrategyCallback):
    """One that reports on each epoch, in TensorBoard, too.

    An epoch at the begin or the end of which a parameter server is gone, and restored later, has no
    report.

    Args:
        log_dir: a folder for TensorBoard, or None.

    Raises:
        ImportError: if there is a folder, and the package `tensorboard` is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike | None):
        super().__init__()
        self._log_dir = None if log_dir is None else checked_path(log_dir, "log_dir")
        if self._log_dir:
            _check_tensorboard(f"callbacks.{type(self).__name__}")
        self._writer: tf.summary.SummaryWriter | None = None  # While `fit` runs.
        self._started = 0.0
        self._ended: float | None = None
        self._is_known = False  # How things were when the epoch began.

    # What a subclass provides.

    def _begin(self) -> None:
        """Reads how things are when an epoch begins."""
        raise NotImplementedError

    def _report(self, epoch: int, logs: dict | None) -> None:
        """Reports what an epoch has changed."""
        raise NotImplementedError

    # Keras calls these.

    def on_train_begin(self, logs=None):
        if self._log_dir and self._writer is None:
            self._writer = tf.summary.create_file_writer(self._log_dir)

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.monotonic()
        self._ended = None
        self._is_known = False
        with left_out(self.model, f"{type(self).__name__}: figures of epoch {epoch}"):
            self._begin()
            self._is_known = True

    def on_train_batch_end(self, batch, logs=None):
        # What comes after the last batch of an epoch is no training time: not the validation, and
        # not what other callbacks do.
        self._ended = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if self._is_known:
            with left_out(self.model, f"{type(self).__name__}: figures of epoch {epoch}"):
                self._report(epoch, logs)

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _seconds(self) -> float:
        """For how long the epoch has trained."""
        return (self._ended or time.monotonic()) - self._started


def _check_tensorboard(caller: str) -> None:
    """Raises an ImportError that names the caller if there is nothing to write summaries with."""
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{caller} needs the package tensorboard for log_dir: "
            "pip install 'tf_recsync[tensorboard]'"
        ) from error


def mean_data_wait(strategy, model: keras.Model) -> float:
    """The seconds that a worker has waited for batches, on average."""
    waits = strategy.data_wait(model)
    return sum(waits) / len(waits)
