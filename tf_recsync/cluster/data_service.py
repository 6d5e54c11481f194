"""TensorFlow's data service of a cluster, in the coordinator's process."""

from __future__ import annotations

import threading
import time
import weakref

import tensorflow as tf

_HEARTBEAT_MILLISECONDS = 1000
# A pass that its workers have left is ended so soon, and its pipeline with it. TensorFlow's
# default is minutes, which pipelines of passes that were stopped would go on for.
_ABANDONED_CHECK_MILLISECONDS = 500
_ABANDONED_MILLISECONDS = 1000
_END_SECONDS = 0.5  # How often it is looked whether the last pipeline has ended.


class DataService:
    """A dispatcher and a worker of tf.data's service, in this process.

    It ends with `close`, or when nobody refers to it any more, as soon as the last pipeline
    has ended: TensorFlow stops the servers with Python's lock held and waits for the threads
    of their pipelines, which may need that lock.

    Thread-safe.

    Args:
        host: the name or address by which the cluster's workers reach this
            process.
    """

    def __init__(self, host: str):
        self._host = host
        self._lock = threading.Lock()
        self._servers: _Servers | None = None  # Guarded by _lock.
        self._is_closed = False  # Guarded by _lock.
        self._end: weakref.finalize | None = None  # Of the servers. Guarded by _lock.

    def start(self) -> str:
        """Starts the servers, the first time; returns their address, "grpc://host:port".

        Raises:
            RuntimeError: if it is closed.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the data service of this cluster is closed")
            if self._servers is None:
                self._servers = _Servers(self._host)
                self._end = weakref.finalize(self, _end, self._servers)
                self._end.atexit = False  # They end with the process.
            return self._servers.address

    def tasks(self) -> int:
        """How many pipelines are open."""
        with self._lock:
            return 0 if self._servers is None else self._servers.tasks()

    def close(self) -> None:
        """Ends the servers, when their last pipeline has ended; does not wait for it."""
        with self._lock:
            self._is_closed = True
            self._servers = None
            if self._end is not None:
                self._end()


class _Servers:
    """The two servers; starts them."""

    def __init__(self, host: str):
        service = tf.data.experimental.service
        self._dispatcher = service.DispatchServer(
            service.DispatcherConfig(
                port=0,
                job_gc_check_interval_ms=_ABANDONED_CHECK_MILLISECONDS,
                job_gc_timeout_ms=_ABANDONED_MILLISECONDS,
            )
        )
        port = self._dispatcher.target.rpartition(":")[2]
        self._worker = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=f"{host}:{port}",
                worker_address=f"{host}:%port%",
                port=0,
                heartbeat_interval_ms=_HEARTBEAT_MILLISECONDS,
            )
        )
        self.address = f"grpc://{host}:{port}"

    def tasks(self) -> int:
        """How many pipelines are open."""
        return self._worker._num_tasks()

    def end(self) -> None:
        """Stops the servers once no pipeline is open."""
        while self.tasks() > 0:
            time.sleep(_END_SECONDS)
        self._worker._stop()
        self._dispatcher._stop()


def _end(servers: _Servers) -> None:
    threading.Thread(target=servers.end, name="recsync_data_service", daemon=True).start()
