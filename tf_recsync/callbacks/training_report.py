"""Speed and staleness of each epoch."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import tensorflow as tf

from tf_recsync._checks import check_at_least
from tf_recsync._deprecation import without_strategy
from tf_recsync.callbacks.step_figures import StepFigures, staleness_since
from tf_recsync.callbacks.strategy_callback import EpochReport, mean_data_wait
from tf_recsync.embedding.keys import KeyCounts
from tf_recsync.optimizers.base import global_step_of
from tf_recsync.staleness import Report, Statistics
from tf_recsync.strategies.slots import Losses

_SAMPLE = 100_000  # Values of which TensorBoard makes a histogram, about.


def sample_of(measured: Statistics) -> np.ndarray:
    """Values of the staleness whose shares are those of all; of what is rare, one at least."""
    taus, counts = np.reshape(np.array(measured.histogram, np.int64), (-1, 2)).T
    share = min(1.0, _SAMPLE / max(measured.count, 1))
    return np.repeat(taus, np.maximum(np.rint(counts * share).astype(np.int64), 1))


class TrainingReport(EpochReport):
    """Adds speed and staleness to each epoch's logs, and to TensorBoard.

    To the progress bar and `History` it adds `batches_per_second` (local batches that all
    workers together have trained on), `global_steps_per_second` (of updates of the
    parameters, each of as many batches as the mode applies together; under a `HopStrategy`
    those of one worker), `staleness` (the
    mean over dense variables in this epoch; where none is pushed, as under a
    `HopStrategy`, over rows of tables on servers), `staleness_p99`, `staleness_max`,
    `data_wait` (the share of the epoch that workers waited for batches, 0 to 1) and, as ints,
    `lost_steps` (the batches in flight when a worker was lost), `retried_batches` (those that
    others have trained on in place of lost workers) and `repeated_batches` (those that were
    trained on twice for that). If the model has tables with `keys="any"`, there are also the ints
    `keys_admitted`, `keys_refused` and `keys_evicted`, of all tables in this epoch. With a
    `log_dir`, TensorBoard gets the same scalars, a histogram of the epoch's staleness, and what
    `strategy.tables` says of each table. Put it before callbacks that read those logs.

    With a number as `update_freq`, TensorBoard also gets figures of the last steps, again and
    again within an epoch: of each worker, its speed and the shares of its time that it computes,
    and waits for data, for tokens, for servers or for neighbors; the staleness; the memory of each
    server; what was lost; and the counts of tables. The tab "Custom scalars" has a chart for each
    figure, with all workers in it. Workers note for it what their steps do when, as for a
    `Timeline`, and each time some calls to each server are made.

    Args:
        log_dir: a folder for TensorBoard, or None (the default).
        update_freq: "epoch" (the default); or an int of at least 1: after how many batches, as
            Keras counts them, TensorBoard gets the figures of the last steps. It needs a `log_dir`.

    Raises:
        ValueError: if `update_freq` is none of these, or there is no `log_dir` for it; when
            training begins, if the strategy is of another kind. What the workers of
            a `HopStrategy` wait for `HopReport` tells.
        ImportError: if there is a `log_dir`, and the package `tensorboard` is not installed.

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
    ...     history = model.fit(dataset, verbose=0, callbacks=[recsync.callbacks.TrainingReport()])
    >>> history.history["staleness"][0] >= 1
    True
    """

    _needs = "staleness"

    @without_strategy
    def __init__(self, log_dir: str | os.PathLike | None = None, update_freq: str | int = "epoch"):
        super().__init__(log_dir)
        if update_freq != "epoch":
            if isinstance(update_freq, str):
                raise ValueError(f'update_freq must be "epoch" or an int, not {update_freq!r}')
            check_at_least("update_freq", update_freq, 1)
            if not log_dir:
                raise ValueError(f"update_freq={update_freq} needs a log_dir to write to")
        self._update_freq = update_freq
        self._batches = 0  # Of the epochs before.
        self._written = 0  # Of which there were figures last.
        self._figures: StepFigures | None = None
        self._before: Report | None = None
        self._global_step = 0
        self._losses = Losses()
        self._data_wait = 0.0
        self._tables: dict[str, KeyCounts] = {}

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._written = self._batches  # What a callback may have ended is left out.
        if self._update_freq != "epoch":
            self._end_figures()  # Of a call of `fit` that another callback ended.
            self._figures = StepFigures(self.model, self._writer)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        done = self._batches + self.model.train_function.epoch_steps
        if self._figures is not None and done - self._written >= self._update_freq:
            self._written = done
            self._figures.write(done)

    def _begin(self):
        self._losses = self._strategy.losses(self.model)
        self._before = self._strategy.staleness(self.model)
        self._tables = self._strategy.tables(self.model)
        self._data_wait = mean_data_wait(self._strategy, self.model)
        self._global_step = global_step_of(self.model.optimizer)
        if self._figures is not None:
            self._figures.skip()  # What was between two epochs is no training.

    def on_epoch_end(self, epoch, logs=None):
        self._batches += self.model.train_function.epoch_steps
        super().on_epoch_end(epoch, logs)

    def _report(self, epoch, logs):
        seconds = self._seconds
        measured = self._staleness()
        before, losses = self._losses, self._strategy.losses(self.model)
        report = {
            "batches_per_second": self.model.train_function.epoch_steps / seconds,
            "staleness": measured.mean,
            "staleness_p99": measured.quantile(0.99),
            "staleness_max": measured.max,
            "data_wait": (mean_data_wait(self._strategy, self.model) - self._data_wait) / seconds,
            "lost_steps": losses.steps - before.steps,
            "retried_batches": losses.retried - before.retried,
            "repeated_batches": losses.repeated - before.repeated,
            **self._more(seconds),
        }
        tables = self._strategy.tables(self.model)
        for name in ("admitted", "refused", "evicted") if tables else ():
            counts = (getattr(own, name) for own in tables.values())
            earlier = (getattr(own, name) for own in self._tables.values())
            # What a lost server had counted is gone.
            report[f"keys_{name}"] = max(sum(counts) - sum(earlier), 0)
        if logs is not None:
            logs.update(report)
        if self._writer is None:
            return
        with self._writer.as_default(step=epoch):
            for name, value in report.items():
                tf.summary.scalar(f"recsync/{name}", value)
            tf.summary.histogram("recsync/staleness_histogram", sample_of(measured))
            for table, counts in tables.items():
                for name, value in dataclasses.asdict(counts).items():
                    tf.summary.scalar(f"recsync/{table}/{name}", value)
        self._writer.flush()

    def on_train_end(self, logs=None):
        self._end_figures()
        super().on_train_end(logs)

    def _end_figures(self) -> None:
        figures, self._figures = self._figures, None
        if figures is not None:
            figures.close()

    def _staleness(self) -> Statistics:
        """What was measured in the epoch."""
        return staleness_since(self._strategy.staleness(self.model), self._before)

    def _more(self, seconds: float) -> dict[str, float]:
        """What else there is to report of an epoch of so many seconds."""
        # After a recovery the step may be that of a checkpoint.
        steps = max(global_step_of(self.model.optimizer) - self._global_step, 0)
        return {"global_steps_per_second": steps / seconds}


class ShadowReport(TrainingReport):
    """Adds what groups whose copies are synchronized did in each epoch to its logs.

    To the progress bar and `History`, and with a `log_dir` to TensorBoard, it adds what
    `TrainingReport` does, of all threads of all trainers, without the global steps, which each
    group of trainers has of its own; `staleness` is that inside a group. Under a
    `ShadowSyncStrategy` or a `HopStrategy` each worker is a group. It also adds
    `examples_per_second` (EPS; of batches whose size is known),
    `syncs_per_second` (of all groups), `average_sync_gap` (the steps of a group from one
    synchronization to the next; infinite if there was none), `sync_seconds` (the mean duration
    of one) and `sync_ps_bytes` (received and sent by the sync PSs).

    Args:
        log_dir: a folder for TensorBoard, or None (the default).
        update_freq: as that of `TrainingReport`; "epoch" is the default.

    Raises:
        ValueError: as there.
        ImportError: as there.

    Example:

    >>> import tf_recsync as recsync
    >>> callbacks = [recsync.callbacks.ShadowReport()]

    Then `model.fit(dataset, callbacks=callbacks).history["average_sync_gap"]` has a value for each
    epoch.
    """

    _needs = "sync_report"

    def _begin(self):
        super()._begin()
        self._synced = self._strategy.sync_report(self.model)

    def _more(self, seconds: float) -> dict[str, float]:
        now, then = self._strategy.sync_report(self.model), self._synced
        syncs = sum(now.syncs) - sum(then.syncs)
        steps, batch = now.steps - then.steps, now.local_batch_size
        eps = {} if batch is None else {"examples_per_second": steps * batch / seconds}
        return {
            **eps,
            "syncs_per_second": syncs / seconds,
            "average_sync_gap": steps / syncs if syncs else float("inf"),
            "sync_seconds": (sum(now.seconds) - sum(then.seconds)) / syncs if syncs else 0.0,
            "sync_ps_bytes": now.sync_ps_bytes - then.sync_ps_bytes,
        }
