"""Keras callbacks that report on distributed training."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync._deprecation import without_strategy
from tf_recsync.checkpoint.callback import Checkpoint, SavedCheckpoint
from tf_recsync.cluster import Server
from tf_recsync.cluster.membership import Order
from tf_recsync.embedding.keys import KeyCounts
from tf_recsync.metrics.exact import group_auc
from tf_recsync.optimizers.base import global_step_of
from tf_recsync.prometheus import Prometheus
from tf_recsync.publishing import Publication, Publish
from tf_recsync.run_status import Status
from tf_recsync.staleness import Report, Statistics
from tf_recsync.strategies.slots import Losses
from tf_recsync.synchronization.hop_events import Recording, write_trace
from tf_recsync.synchronization.hop_reports import WorkerReport

__all__ = [
    "Checkpoint",
    "GroupAUC",
    "HopReport",
    "HopTimeline",
    "Prometheus",
    "Publication",
    "Publish",
    "SavedCheckpoint",
    "ShadowReport",
    "Status",
    "TrainingReport",
    "WorkerEvents",
]


class _Report(keras.callbacks.Callback):
    """A callback that reports on the strategy that the model trains on."""

    _needs = ""  # What of the strategy shows that it can report from it.

    def set_model(self, model):
        super().set_model(model)
        strategy = model.distribute_strategy
        if self._fits(strategy):
            return
        own = (TrainingReport, HopReport, ShadowReport)
        fitting = [report.__name__ for report in own if report._fits(strategy)]
        advice = f"use {' or '.join(fitting)}" if fitting else "it is none of this package's"
        raise ValueError(
            f"{type(self).__name__} can't report on a {type(strategy).__name__}; {advice}"
        )

    @classmethod
    def _fits(cls, strategy: tf.distribute.Strategy) -> bool:
        """Whether it can report on a strategy."""
        return hasattr(strategy, cls._needs)

    @property
    def _strategy(self):
        return self.model.distribute_strategy


class TrainingReport(_Report):
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

    Args:
        log_dir: a folder for TensorBoard, or None (the default).

    Raises:
        ValueError: when training begins, if the strategy is of another kind. What the workers of
            a `HopStrategy` wait for `HopReport` tells.

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
    def __init__(self, log_dir: str | None = None):
        super().__init__()
        self._writer = tf.summary.create_file_writer(log_dir) if log_dir else None
        self._started = 0.0
        self._ended: float | None = None
        self._before: Report | None = None
        self._global_step = 0
        self._losses = Losses()
        self._data_wait = 0.0
        self._tables: dict[str, KeyCounts] = {}

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.monotonic()
        self._losses = self._strategy.losses(self.model)
        self._before = self._strategy.staleness(self.model)
        self._tables = self._strategy.tables(self.model)
        self._data_wait = _data_wait(self._strategy, self.model)
        self._global_step = global_step_of(self.model.optimizer)
        self._ended = None

    def on_test_begin(self, logs=None):
        # Validation after the epoch is no training time.
        if self._ended is None:
            self._ended = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        seconds = (self._ended or time.monotonic()) - self._started
        measured = self._staleness()
        before, losses = self._losses, self._strategy.losses(self.model)
        report = {
            "batches_per_second": self.model.train_function.epoch_steps / seconds,
            "staleness": measured.mean,
            "staleness_p99": measured.quantile(0.99),
            "staleness_max": measured.max,
            "data_wait": (_data_wait(self._strategy, self.model) - self._data_wait) / seconds,
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
        taus = [tau for tau, count in measured.histogram for _ in range(min(count, 10_000))]
        with self._writer.as_default(step=epoch):
            for name, value in report.items():
                tf.summary.scalar(f"recsync/{name}", value)
            tf.summary.histogram("recsync/staleness_histogram", taus)
            for table, counts in tables.items():
                for name, value in dataclasses.asdict(counts).items():
                    tf.summary.scalar(f"recsync/{table}/{name}", value)
        self._writer.flush()

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()

    def _staleness(self) -> Statistics:
        """What was measured in the epoch."""
        measured = self._strategy.staleness(self.model)
        if measured.dense.count:
            return measured.dense.since(self._before.dense)
        return measured.rows.since(self._before.rows)

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

    Example:

    >>> import tf_recsync as recsync
    >>> callbacks = [recsync.callbacks.ShadowReport()]

    Then `model.fit(dataset, callbacks=callbacks).history["average_sync_gap"]` has a value for each
    epoch.
    """

    _needs = "sync_report"

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
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


class WorkerEvents(_Report):
    """Is called when a worker is lost while `fit` runs, and when it takes part again.

    Give functions, or override `on_worker_lost` and `on_worker_back` in a class of your own. They
    are called in the thread of `fit`, about a second after it was noticed at most, one at a time.
    They may set `model.stop_training`, and what they raise ends `fit`.

    Args:
        on_worker_lost: `on_worker_lost(worker)`, of the worker's task index; None (the default)
            does nothing.
        on_worker_back: `on_worker_back(worker)`, likewise.

    Raises:
        ValueError: by `fit`, if the model's strategy is none of this package's.

    Example:

    >>> import tf_recsync as recsync
    >>> lost = []
    >>> events = recsync.callbacks.WorkerEvents(on_worker_lost=lost.append)
    >>> events.on_worker_lost(3)  # `fit` calls it, with `callbacks=[events]`.
    >>> lost
    [3]
    """

    _needs = "members"

    def __init__(
        self,
        on_worker_lost: Callable[[int], None] | None = None,
        on_worker_back: Callable[[int], None] | None = None,
    ):
        super().__init__()
        self._functions = {"on_worker_lost": on_worker_lost, "on_worker_back": on_worker_back}
        for name, function in self._functions.items():
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function of a worker's index, not {function!r}")
        self._told: _Told | None = None

    def on_worker_lost(self, worker: int) -> None:
        """A worker is gone, killed or silent, and the others go on without it.

        Args:
            worker: its task index.
        """
        if self._functions["on_worker_lost"] is not None:
            self._functions["on_worker_lost"](worker)

    def on_worker_back(self, worker: int) -> None:
        """A worker that was lost, or was not there at first, takes part.

        Args:
            worker: its task index.
        """
        if self._functions["on_worker_back"] is not None:
            self._functions["on_worker_back"](worker)

    def on_train_begin(self, logs=None):
        self._told = _Told()
        self._strategy.cluster.membership.listen(self._told, Order.REPORTS)
        for function in (self.model.train_function, self.model.test_function):
            function.observers.add(self)

    def on_train_batch_end(self, batch, logs=None):
        self.tell()

    def on_train_end(self, logs=None):
        self.tell()
        self.failed()

    def failed(self) -> None:
        """Is told no more: training has ended."""
        for function in (self.model.train_function, self.model.test_function):
            function.observers.discard(self)
        self._told = None

    def tell(self) -> None:
        """Calls the functions of what has happened; in the thread of `fit`."""
        while self._told is not None and self._told.events:
            event, worker = self._told.events.popleft()
            getattr(self, event)(worker)


class _Told:
    """Keeps what happens to workers until the thread of `fit` gets to it."""

    def __init__(self):
        self.events: collections.deque[tuple[str, int]] = collections.deque()

    def lost(self, server: Server, is_news: bool) -> None:
        """A server is gone."""
        if server[0] == "worker" and is_news:
            self.events.append(("on_worker_lost", server[1]))

    def back(self, server: Server) -> None:
        """A server takes part again."""
        if server[0] == "worker":
            self.events.append(("on_worker_back", server[1]))


class GroupAUC(keras.callbacks.Callback):
    """Adds the group AUC (GAUC) of a dataset to each epoch's logs.

    The group AUC is the mean of the areas under the ROC curves of groups, such as users, see
    `recsync.metrics.group_auc`. A Keras metric can't compute it, as it learns nothing of groups.
    After each epoch the model predicts the dataset, under any strategy or none, and the value goes
    to the progress bar and `History`. Put the callback before those that read it.

    Args:
        dataset: a `tf.data.Dataset` of batches `(inputs, labels)` or `(inputs, labels,
            sample_weight)`, of which inputs are a dict, with an end. It gives its examples in the
            same order each time: it is not shuffled. Their labels, groups and weights are read
            when training begins, and kept in memory. Labels are 0 or 1, [batch] or [batch, 1].
        group: the name of the input that says to which group an example belongs; integers or
            strings, [batch] or [batch, 1].
        name: the name in the logs, "val_gauc" by default.

    Raises:
        ValueError: if an argument is none of these; when training begins, if the dataset is not
            as above; after an epoch, if the model does not predict one number for each example.

    Example:

    >>> import numpy as np
    >>> user = keras.Input((1,), name="user")
    >>> model = keras.Model({"user": user}, keras.layers.Dense(1, "sigmoid")(user))
    >>> model.compile("sgd", "binary_crossentropy")
    >>> inputs, labels = {"user": np.array([[1.0], [1.0], [2.0]])}, np.array([1.0, 0.0, 1.0])
    >>> data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(2)
    >>> history = model.fit(data, verbose=0, callbacks=[GroupAUC(data, group="user")])
    >>> history.history["val_gauc"]
    [0.5]
    """

    def __init__(self, dataset: tf.data.Dataset, group: str, name: str = "val_gauc"):
        super().__init__()
        if not isinstance(dataset, tf.data.Dataset):
            kind = type(dataset).__name__
            raise ValueError(f"dataset: is a {kind}, must be a tf.data.Dataset.")
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("dataset: repeats without an end; it must have one, as by take(steps)")
        inputs, *labels = _parts(dataset.element_spec)
        if not labels:
            raise ValueError(
                f"dataset: gives {dataset.element_spec}, must give (inputs, labels) or "
                "(inputs, labels, sample_weight)."
            )
        names = sorted(inputs) if isinstance(inputs, dict) else inputs
        if not isinstance(inputs, dict) or group not in inputs:
            raise ValueError(f"group={group!r}: must be a key of the dataset's inputs, {names}.")
        self._dataset, self._group, self._name = dataset, group, name
        self._examples: list[np.ndarray] = []

    def on_train_begin(self, logs=None):
        # The same examples for all epochs, in the order in which they are predicted.
        batches = [self._read(batch) for batch in self._dataset]
        if not batches:
            raise ValueError("dataset: has no batches, must have one at least.")
        for batch in self._dataset.take(1):
            if not all(map(np.array_equal, self._read(batch), batches[0])):
                raise ValueError(
                    "dataset: gives its examples in another order each time, must give them in the "
                    "same; don't shuffle it, or with reshuffle_each_iteration=False."
                )
        self._examples = [np.concatenate(parts) for parts in zip(*batches, strict=True)]

    def _read(self, batch) -> tuple[np.ndarray, ...]:
        """Labels, groups and, if there are any, weights of a batch."""
        inputs, labels, *weights = _parts(batch)
        return tuple(
            np.reshape(part, [len(part), -1]) for part in (labels, inputs[self._group], *weights)
        )

    def on_epoch_end(self, epoch, logs=None):
        labels, groups, *weights = self._examples
        predictions = self.model.predict(self._dataset, verbose=0)
        if not isinstance(predictions, np.ndarray):
            raise ValueError(
                f"GroupAUC: the model predicts {type(predictions).__name__}, must predict one "
                "number for each example."
            )
        value = group_auc(labels, predictions, groups, *weights)
        if logs is not None:
            logs[self._name] = value


def _parts(element) -> tuple:
    """Inputs, labels and weights of a dataset's element, those that there are."""
    parts = element if isinstance(element, tuple) else (element,)
    return parts if len(parts) < 3 or parts[2] is not None else parts[:2]


class HopReport(_Report):
    """Adds what workers of a `HopStrategy` did in each epoch to its logs, and to TensorBoard.

    To the progress bar and `History` it adds, over all workers: `iterations_per_second` (the
    mean of a worker's), `waiting` (the share of their time that they waited for neighbors),
    `data_wait` (the same for batches), `updates_used`, `sends_saved`, `stale_updates` (that
    came too late), and `jumps`. Put it before callbacks that read those logs.

    With a `log_dir`, TensorBoard gets the same as `recsync/...`, and every field of each
    worker's `WorkerReport` as `worker_0/updates_used` and so on: what it did in the epoch, but
    for `iteration`, where it stands. `worker_0/waiting_seconds` is the sum of both waits.

    Args:
        log_dir: a folder for TensorBoard, or None (the default).
        per_worker: whether the progress bar and `History` get each worker's values, too,
            under the same names as in TensorBoard. Default False.

    Raises:
        ValueError: if `per_worker` is no bool; when training begins, if the strategy is no
            `HopStrategy`.

    Example:

    >>> import tf_recsync as recsync
    >>> callbacks = [recsync.callbacks.HopReport(per_worker=True)]

    Then `model.fit(dataset, callbacks=callbacks).history["worker_3/waiting_seconds"]` has a value
    for each epoch.
    """

    _needs = "topology"

    @without_strategy
    def __init__(self, log_dir: str | None = None, per_worker: bool = False):
        super().__init__()
        if not isinstance(per_worker, bool):
            raise ValueError(f"per_worker must be a bool, not {per_worker!r}")
        self._writer = tf.summary.create_file_writer(log_dir) if log_dir else None
        self._per_worker = per_worker
        self._started = 0.0
        self._ended: float | None = None
        self._before: list[WorkerReport] = []
        self._data_wait = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.monotonic()
        self._data_wait = _data_wait(self._strategy, self.model)
        self._before = self._strategy.hop_report(self.model)
        self._ended = None

    def on_test_begin(self, logs=None):
        # Validation after the epoch is no training time.
        if self._ended is None:
            self._ended = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        seconds = (self._ended or time.monotonic()) - self._started
        now = self._strategy.hop_report(self.model)
        done = [_gained(then, report) for then, report in zip(self._before, now, strict=True)]

        def total(name: str) -> float:
            return sum(worker[name] for worker in done)

        report = {
            "iterations_per_second": total("iteration") / len(done) / seconds,
            "waiting": total("waiting_seconds") / len(done) / seconds,
            "data_wait": (_data_wait(self._strategy, self.model) - self._data_wait) / seconds,
            "updates_used": total("updates_used"),
            "sends_saved": total("sends_saved"),
            "stale_updates": total("stale_updates_dropped"),
            "jumps": total("jumps"),
        }
        workers = {
            f"worker_{worker}/{name}": now[worker].iteration if name == "iteration" else value
            for worker, values in enumerate(done)
            for name, value in values.items()
        }
        if logs is not None:
            logs.update(report, **(workers if self._per_worker else {}))
        if self._writer is None:
            return
        with self._writer.as_default(step=epoch):
            for name, value in report.items():
                tf.summary.scalar(f"recsync/{name}", value)
            for name, value in workers.items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()


def _data_wait(strategy, model: keras.Model) -> float:
    """The seconds that a worker has waited for batches, on average."""
    waits = strategy.data_wait(model)
    return sum(waits) / len(waits)


def _gained(then: WorkerReport, now: WorkerReport) -> dict[str, float]:
    """What a worker has done between two reports, by the names of the fields."""
    fields = [field.name for field in dataclasses.fields(WorkerReport)]
    gained = {name: getattr(now, name) - getattr(then, name) for name in fields}
    waited = gained["waited_for_updates"] + gained["waited_for_tokens"]
    return {**gained, "waiting_seconds": waited}


class HopTimeline(_Report):
    """Writes what the workers of a `HopStrategy` did when, at the end of training.

    The file opens in https://ui.perfetto.dev and chrome://tracing: a process for each worker,
    with rows for what it computes and waits for, for what it sends, and for what it receives.
    They are three, as a worker computes, sends and receives at the same time, and the
    viewers can't show spans in a row that overlap without containing each other.

    It is also written if training fails, before `fit` raises the error; but not if another
    callback raises one, as Keras tells callbacks nothing of it.

    Args:
        path: of the file, a `.json`. Its folder must exist.
        limit: how many events are kept, the latest ones; default 1,000,000. If there were
            more, a log entry says how many are missing, and so does `lost_events` in the
            file. See `HopStrategy.record_events`.

    Example:

    >>> import tf_recsync as recsync
    >>> callbacks = [recsync.callbacks.HopTimeline("hop.json", limit=100_000)]

    Then `model.fit(dataset, callbacks=callbacks)` writes the file.
    """

    _needs = "record_events"

    @without_strategy
    def __init__(self, path: str | os.PathLike[str], limit: int = 1_000_000):
        super().__init__()
        self._path = path
        self._limit = limit
        self._recording: Recording | None = None

    def on_train_begin(self, logs=None):
        if self._recording is not None:
            self._recording.stop()  # Of a call of `fit` that another callback ended.
        self._recording = self._strategy.record_events(self.model, self._limit, self._write_failed)

    def on_train_end(self, logs=None):
        self._write()

    def _write_failed(self) -> None:
        try:
            self._write()
        except OSError as error:
            # What training failed of is more important.
            logging.error("The timeline %s could not be written: %s", self._path, error)

    def _write(self) -> None:
        recording, self._recording = self._recording, None
        recording.stop()
        if recording.lost > 0:
            logging.warning(
                "The timeline %s is not complete: %d events were lost, as more than limit=%d "
                "came, or too many at once.",
                self._path,
                recording.lost,
                recording.limit,
            )
        workers = self._strategy.topology.size
        write_trace(self._path, workers, recording.events, recording.lost)
