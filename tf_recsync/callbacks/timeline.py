"""What workers did when, in a file for viewers of traces."""

from __future__ import annotations

import os

from absl import logging

from tf_recsync._checks import checked_path, integer
from tf_recsync._deprecation import warn, without_strategy
from tf_recsync.callbacks.strategy_callback import StrategyCallback
from tf_recsync.synchronization.events import Recording, write_trace


class Timeline(StrategyCallback):
    """Writes what workers did when, under any strategy, at the end of training.

    The file opens in https://ui.perfetto.dev and chrome://tracing. Each worker is a process in it.
    Its row "step" has what its steps do one after the other: "wait for tokens", where the mode has
    tokens; "pull", until it has the servers' parameters; "compute"; and "push", until servers have
    applied its gradients. Within a call of several steps, servers answer the next step's pull when
    they have applied the push before, so that both are one span, "push and pull". The row "data"
    has waits for batches, and the row "synchronization" those of the group's copies, beneath the
    group's first worker. A worker of several threads has rows for each. Under a `HopStrategy`, a
    step is "compute", "wait for updates" and "wait for tokens", and the rows "send" and "receive"
    have the updates that travel meanwhile.

    While a timeline is recorded, steps are traced with the operations that note all this, from the
    next epoch on; without one, they cost nothing.

    The file is also written if training or validation fails, before `fit` raises the error; but
    not if another callback raises one, as Keras tells callbacks nothing of it.

    Args:
        path: of the file, a `.json`. Its folder must exist.
        limit: how many events are kept, the latest ones, an int of at least 1; default 1,000,000.
            If there were more, a log entry says how many are missing, and so does `lost_events` in
            the file. See `record_events` of strategies.

    Raises:
        ValueError: if `path` is no path or `limit` is wrong; when training begins, if the strategy
            is none of this package's or the folder of `path` does not exist.

    Example:

    >>> import json
    >>> import os
    >>> import tempfile
    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_recsync as recsync
    >>> x = np.arange(64, dtype=np.float32)[:, None] / 64
    >>> dataset = tf.data.Dataset.from_tensor_slices((x, x > 0.5)).batch(8)
    >>> path = os.path.join(tempfile.mkdtemp(), "timeline.json")
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.SyncStrategy(cluster)
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
    ...         model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy")
    ...     timeline = recsync.callbacks.Timeline(path)
    ...     history = model.fit(dataset, verbose=0, callbacks=[timeline])
    >>> with open(path) as file:
    ...     names = [event["name"] for event in json.load(file)["traceEvents"]]
    >>> names.count("compute") == 8 and "wait for tokens" in names
    True
    """

    _needs = "record_events"

    def __init__(self, path: str | os.PathLike[str], limit: int = 1_000_000):
        super().__init__()
        self._path = checked_path(path, of="file")
        self._limit = integer("limit", limit, 1)
        self._recording: Recording | None = None

    def on_train_begin(self, logs=None):
        folder = os.path.dirname(os.path.abspath(self._path))
        if not os.path.isdir(folder):
            raise ValueError(f"path={self._path!r}: there is no folder {folder!r}")
        if self._recording is not None:
            self._recording.stop()  # Of a call of `fit` that another callback ended.
        self._recording = self._strategy.record_events(self.model, self._limit, self._write_failed)

    def on_train_end(self, logs=None):
        self._write()

    def _write_failed(self) -> None:
        try:
            self._write()
        except Exception as error:
            # What training failed of is more important.
            logging.error("The timeline %s could not be written: %s", self._path, error)

    def _write(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return  # Written, when training failed.
        recording.stop()
        if recording.lost > 0:
            logging.warning(
                "The timeline %s is not complete: %d events were lost, as more than limit=%d "
                "came, or too many at once.",
                self._path,
                recording.lost,
                recording.limit,
            )
        workers = self._strategy.cluster.workers
        write_trace(self._path, workers, recording.events, recording.lost)


class HopTimeline(Timeline):
    """The earlier name of `Timeline`, when it was for a `HopStrategy` alone.

    Args:
        path: as there.
        limit: as there.

    Raises:
        ValueError: as there.

    Example:

    >>> import warnings
    >>> import tf_recsync as recsync
    >>> with warnings.catch_warnings(record=True):
    ...     callbacks = [recsync.callbacks.HopTimeline("hop.json", limit=100_000)]
    """

    @without_strategy
    def __init__(self, path: str | os.PathLike[str], limit: int = 1_000_000):
        warn("callbacks.HopTimeline is called callbacks.Timeline")
        super().__init__(path, limit)
