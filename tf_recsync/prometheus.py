"""What a run does, for Prometheus: figures that are scraped while the model trains."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np
from absl import logging

from tf_recsync._checks import check_seconds, checked_path, integer
from tf_recsync.callbacks.strategy_callback import left_out, numbers_of
from tf_recsync.strategies.fit_strategy import FitStrategy, check_reported

_MOST_PORTS = 65535


def _import_client() -> ModuleType:
    """Returns `prometheus_client`.

    Raises:
        ImportError: If it is not installed; the error says how to install it.
    """
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "callbacks.Prometheus needs the package prometheus-client: "
            "pip install 'tf_recsync[prometheus]'"
        ) from error
    return prometheus_client


@dataclasses.dataclass(frozen=True)
class _Figure:
    """A metric: its name after "recsync_", what it says, its labels, and its values by these."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: dict[tuple[str, ...], float]
    is_counter: bool = False


class Prometheus(keras.callbacks.Callback):
    """Gives the figures of a run to Prometheus, at a port or in a file, while `fit` goes on.

    What servers know, the counts of tables with keys and the memory, is asked for at the end of
    each epoch. The other figures are those that this process has, as of some seconds ago, and the
    states of servers are those of the moment. The page on observability lists the metrics, whose
    names begin with `recsync_`.

    It needs the package `prometheus-client` (the extra `prometheus`). The port is open from the
    first call of `fit` until `close`, or until the process ends, and has no authentication.

    Args:
        port: At which `http://<address>:<port>/metrics` answers; 0 for one that is free, which
            the attribute `port` then has. None (the default) if there is a file.
        path: A file that is written anew each time in place of that, for the textfile collector of
            Prometheus's node exporter; its name ends in ".prom".
        address: To listen on; 127.0.0.1 by default, which this machine alone reaches.
        every_seconds: How old figures may become within an epoch, 5 by default.

    Raises:
        ValueError: If there is neither a port nor a file, or both, or another argument is wrong;
            by `fit`, if the model's strategy is none of this package's.
        ImportError: If `prometheus-client` is not installed.
        OSError: By `fit`, if the port is taken or the file can't be written as it begins. Later, a
            file that can't be written is a line in the log, and training goes on.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import tf_recsync as recsync
        >>> x = np.arange(64, dtype=np.float32)[:, None] / 64
        >>> dataset = tf.data.Dataset.from_tensor_slices((x, x > 0.5)).batch(8)
        >>> prometheus = recsync.callbacks.Prometheus(port=0)
        >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
        ...     strategy = recsync.AsyncStrategy(cluster)
        ...     with strategy.scope():
        ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
        ...         model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy")
        ...     history = model.fit(dataset, verbose=0, callbacks=[prometheus])
        ...     from urllib.request import urlopen
        ...     page = urlopen(f"http://127.0.0.1:{prometheus.port}/metrics").read().decode()
        ...     prometheus.close()
        >>> "recsync_batches_total 8.0" in page.splitlines()
        True
    """

    def __init__(
        self,
        port: int | None = None,
        path: str | os.PathLike | None = None,
        *,
        address: str = "127.0.0.1",
        every_seconds: float = 5.0,
    ):
        super().__init__()
        if (port is None) == (path is None):
            raise ValueError(f"port={port!r}, path={path!r}: one of them must be given, not both")
        if port is not None:
            port = integer("port", port, 0, _MOST_PORTS)
        if path is not None:
            path = checked_path(path, of="file")
            if not path.endswith(".prom"):
                raise ValueError(f"path must end in '.prom', not {path!r}")
        check_seconds("every_seconds", every_seconds)
        self.port = port
        self._path = path
        self._address, self._every_seconds = address, every_seconds
        self._client = _import_client()
        self._registry = self._client.CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self))
        self._server: Any = None
        self._lock = threading.Lock()
        self._figures: dict[str, _Figure] = {}  # By name; guarded by the lock.
        self._logged: dict[str, float] = {}  # By name, since fit began.
        self._batches = 0  # Of epochs that are over.
        self._of_epoch = 0  # Of the epoch in progress, as of the last batch.
        self._counting: Any = None  # The train function that counts losses and waits.
        self._updated = float("-inf")
        self._has_warned = False

    def close(self) -> None:
        """Closes the port; does nothing if it is not open."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yields the metrics as of now, for a registry of `prometheus_client`."""
        core = self._client.core
        with self._lock:
            figures = list(self._figures.values())
        strategy = getattr(self.model, "distribute_strategy", None)
        if isinstance(strategy, FitStrategy):
            figures += _of_members(strategy)
        for figure in figures:
            make = core.CounterMetricFamily if figure.is_counter else core.GaugeMetricFamily
            family = make(f"recsync_{figure.name}", figure.help, labels=figure.labels)
            for labels, value in figure.values.items():
                family.add_metric(labels, value)
            yield family

    # What Keras calls.

    def set_model(self, model):
        super().set_model(model)
        check_reported("callbacks.Prometheus", model.distribute_strategy)

    def on_train_begin(self, logs=None):
        if self.port is not None and self._server is None:
            self._server, _ = self._client.start_http_server(
                self.port, self._address, self._registry
            )
            self.port = self._server.server_port
        # An epoch that the fit before has not ended.
        self._batches, self._of_epoch = self._batches + self._of_epoch, 0
        self._logged.clear()
        if self._counting is not self.model.train_function:  # A new one begins at 0.
            self._counting = self.model.train_function
            with self._lock:
                for name in ("losses", "data_wait_seconds"):
                    self._figures.pop(name, None)
        for function in (self.model.train_function, self.model.test_function):
            function.observers.add(self)
        self._has_warned = False
        self._set_training(1.0)
        self._write_file()

    def on_epoch_begin(self, epoch, logs=None):
        self._set(_Figure("epoch", "The number of the epoch, from 0.", (), {(): float(epoch)}))
        self._of_epoch = 0
        self._update(logs)
        self._write()

    def on_train_batch_end(self, batch, logs=None):
        self._of_epoch = self.model.train_function.epoch_steps
        self._update_if_old(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._batches += self.model.train_function.epoch_steps
        self._of_epoch = 0
        with left_out(self.model, f"Prometheus: figures of epoch {epoch}"):
            self._read_servers()
        self._update(logs)
        self._write()

    def on_test_batch_end(self, batch, logs=None):
        if self in self.model.test_function.observers:  # Not where it is given to `evaluate`.
            self.tell()

    def on_train_end(self, logs=None):
        self.failed()

    # What the functions of the model call, as observers are called.

    def tell(self) -> None:
        """Brings the figures up to date that change while no batch ends."""
        self._update_if_old(None)

    def failed(self) -> None:
        """Training has ended, perhaps by an error."""
        for function in (self.model.train_function, self.model.test_function):
            function.observers.discard(self)
        self._set_training(0.0)
        self._write()

    def _read_servers(self) -> None:
        """Takes over what servers count."""
        strategy = self.model.distribute_strategy
        tables = strategy.tables(self.model)
        self._set(
            _Figure(
                "table_keys",
                "What became of the keys of a table.",
                ("table", "what"),
                {
                    (table, what): float(value)
                    for table, counts in tables.items()
                    for what, value in dataclasses.asdict(counts).items()
                },
            )
        )
        values = {}
        for server in strategy.memory(self.model):
            for kind, size in dataclasses.asdict(server).items():
                if kind not in ("job", "index") and size is not None:
                    values[f"{server.job}:{server.index}", kind] = float(size)
        labels = ("server", "kind")
        self._set(_Figure("server_bytes", "The memory of a model on a server.", labels, values))

    def _set(self, figure: _Figure) -> None:
        with self._lock:
            if figure.is_counter and figure.name in self._figures:
                # A counter can't fall: steps that are lost with a worker no longer count.
                for labels, value in self._figures[figure.name].values.items():
                    figure.values[labels] = max(value, figure.values.get(labels, value))
            self._figures[figure.name] = figure

    def _set_training(self, value: float) -> None:
        self._set(_Figure("training", "Whether fit runs.", (), {(): value}))

    def _update_if_old(self, logs: Any) -> None:
        if time.monotonic() >= self._updated + self._every_seconds:
            self._update(logs)
            self._write()

    def _update(self, logs: Any) -> None:
        """Takes over what this process knows by now.

        Args:
            logs: Keras's. What they do not have, as those of a batch have no metrics of the
                validation, stays as it was.
        """
        strategy = self.model.distribute_strategy
        losses = dataclasses.asdict(strategy.losses(self.model))
        batches = {(): float(self._batches + self._of_epoch)}
        waits = enumerate(strategy.data_wait(self.model))
        for name, value in (logs or {}).items():
            self._logged.update(_numbers(name, value))
        logged = {(name,): value for name, value in self._logged.items()}
        for figure in (
            _Figure("batches", "Local batches that were trained on.", (), batches, True),
            _Figure(
                "losses",
                "What was lost with workers, and done again.",
                ("what",),
                {(name,): float(count) for name, count in losses.items()},
                True,
            ),
            _Figure(
                "data_wait_seconds",
                "How long a worker has waited for batches.",
                ("worker",),
                {(str(worker),): seconds for worker, seconds in waits},
                True,
            ),
            _Figure("log", "What Keras logs.", ("name",), logged),
        ):
            self._set(figure)
        self._updated = time.monotonic()

    def _write(self) -> None:
        """As `_write_file`, but a file that can't be written ends no training."""
        try:
            self._write_file()
        except OSError as error:
            if not self._has_warned:
                logging.warning("The figures can't be written at the moment: %s", error)
            self._has_warned = True

    def _write_file(self) -> None:
        if self._path is not None:
            self._client.write_to_textfile(self._path, self._registry)


class _Collector:
    """What a registry asks; a callback of Keras has other methods of the registry's names."""

    def __init__(self, callback: Prometheus):
        self._callback = callback

    def collect(self) -> Iterator[Any]:
        """See `Prometheus.collect`."""
        return self._callback.collect()


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """What a metric has, by its name; several values by that and their places in it."""
    values = numbers_of(value)
    for place in np.ndindex(values.shape):
        suffix = "" if values.size == 1 else str(list(place))
        yield name + suffix, float(values[place])


def _of_members(strategy: FitStrategy) -> list[_Figure]:
    """What the servers of a strategy's cluster do; nobody is asked for it."""
    members = [(f"{member.job}:{member.index}", member) for member in strategy.members()]
    states = {(name, member.state.value): 1.0 for name, member in members}
    lives = {(name,): float(member.life) for name, member in members}
    return [
        _Figure("server_state", "The state that a server is in.", ("server", "state"), states),
        _Figure("server_life", "How often a server was lost.", ("server",), lives),
    ]
