"""TensorFlow's data service of a cluster, in the coordinator's process."""

from __future__ import annotations

import threading

import tensorflow as tf

_HEARTBEAT_MILLISECONDS = 1000
# A pass that its workers have left is ended so soon, and its pipeline with it. TensorFlow's
# default is minutes, which pipelines of passes that were stopped would go on for.
_ABANDONED_CHECK_MILLISECONDS = 500
_ABANDONED_MILLISECONDS = 1000


class DataService:
    """A dispatcher and a worker of tf.data's service, in this process.

    They belong to the cluster rather than to a strategy, since they end slowly: TensorFlow
    stops them with Python's lock held, and waits for the threads of pipelines meanwhile.

    Thread-safe.

    Args:
        host: the name or address by which the cluster's workers reach this
            process.
    """

    def __init__(self, host: str):
        self._host = host
        self._lock = threading.Lock()
        # Guarded by _lock; the worker is ended first.
        self._worker: tf.data.experimental.service.WorkerServer | None = None
        self._dispatcher: tf.data.experimental.service.DispatchServer | None = None
        self._address = ""

    def start(self) -> str:
        """Starts the servers, the first time; returns their address, "grpc://host:port"."""
        with self._lock:
            if self._dispatcher is None:
                service = tf.data.experimental.service
                dispatcher = service.DispatchServer(
                    service.DispatcherConfig(
                        port=0,
                        job_gc_check_interval_ms=_ABANDONED_CHECK_MILLISECONDS,
                        job_gc_timeout_ms=_ABANDONED_MILLISECONDS,
                    )
                )
                port = dispatcher.target.rpartition(":")[2]
                self._worker = service.WorkerServer(
                    service.WorkerConfig(
                        dispatcher_address=f"{self._host}:{port}",
                        worker_address=f"{self._host}:%port%",
                        port=0,
                        heartbeat_interval_ms=_HEARTBEAT_MILLISECONDS,
                    )
                )
                self._address = f"grpc://{self._host}:{port}"
                self._dispatcher = dispatcher
            return self._address

    def tasks(self) -> int:
        """How many pipelines are open."""
        with self._lock:
            return 0 if self._worker is None else self._worker._num_tasks()
