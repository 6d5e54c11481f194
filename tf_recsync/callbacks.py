"""Keras callbacks that report on distributed training."""

from __future__ import annotations

import time

import keras
import tensorflow as tf

from tf_recsync.staleness import Statistics


class TrainingReport(keras.callbacks.Callback):
    """Adds speed and staleness to each epoch's logs, and to TensorBoard.

    To the progress bar and `History` it adds `steps_per_second`, `staleness`
    (the mean over dense variables in this epoch), `staleness_p99` and
    `staleness_max`; with a `log_dir`, TensorBoard gets the same scalars and a
    histogram of the epoch's staleness. Put it before callbacks that read those
    logs.

    Args:
        strategy: the strategy that the model trains on.
        log_dir: a folder for TensorBoard, or None (the default).

    Example:

    ```python
    model.fit(dataset, callbacks=[recsync.callbacks.TrainingReport(strategy, "logs")])
    ```
    """

    def __init__(self, strategy, log_dir: str | None = None):
        super().__init__()
        self._strategy = strategy
        self._writer = tf.summary.create_file_writer(log_dir) if log_dir else None
        self._started = 0.0
        self._ended: float | None = None
        self._before: Statistics | None = None
        self._steps = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.monotonic()
        self._before = self._strategy.staleness(self.model).dense
        self._steps = self._step_count()
        self._ended = None

    def on_test_begin(self, logs=None):
        # Validation after the epoch is no training time.
        if self._ended is None:
            self._ended = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        seconds = (self._ended or time.monotonic()) - self._started
        measured = self._strategy.staleness(self.model).dense.since(self._before)
        report = {
            "steps_per_second": (self._step_count() - self._steps) / seconds,
            "staleness": measured.mean,
            "staleness_p99": measured.quantile(0.99),
            "staleness_max": measured.max,
        }
        if logs is not None:
            logs.update(report)
        if self._writer is None:
            return
        taus = [tau for tau, count in measured.histogram for _ in range(min(count, 10_000))]
        with self._writer.as_default(step=epoch):
            for name, value in report.items():
                tf.summary.scalar(f"recsync/{name}", value)
            tf.summary.histogram("recsync/staleness_histogram", taus)
        self._writer.flush()

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()

    def _step_count(self) -> int:
        # A MultiOptimizer counts in its parts only.
        optimizer = self.model.optimizer
        parts = getattr(optimizer, "optimizers", [optimizer])
        return max(int(part.iterations.numpy()) for part in parts)
