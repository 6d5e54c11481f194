"""TensorFlow's data service of a cluster, in the coordinator's process or in readers."""

from __future__ import annotations

import enum
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf
from absl import logging
from tensorflow.core.protobuf import service_config_pb2
from tensorflow.python.ops import script_ops

from tf_recsync import _engine
from tf_recsync.cluster import signs_of_life, tf_config

_HEARTBEAT_MILLISECONDS = 1000
# A pass that its workers have left is ended so soon, and its pipeline with it. TensorFlow's
# default is minutes, which pipelines of passes that were stopped would go on for.
_ABANDONED_CHECK_MILLISECONDS = 500
_ABANDONED_MILLISECONDS = 1000
# How long a pass waits for a worker that died in it, with its place in the data: longer than
# strategies wait for workers (`worker_timeout`). A pass that was ended before would begin anew,
# without a word, with the first worker that is back.
_CLIENT_MILLISECONDS = 60 * 60 * 1000
_CONNECT_SECONDS = 3.0  # To a reader that is there.
_RECONNECT_MILLISECONDS = 250  # How often it is looked whether a reader is back.
_CLOSE_SECONDS = 1.0  # After these a connection that nobody needs is closed.
_END_SECONDS = 0.25  # How often it is looked whether the last pipeline has ended,
_QUIET_LOOKS = 4  # and so many times in a row it has to have.
_CALL = script_ops.FuncRegistry.__call__.__code__  # By which pipelines call functions in Python.
_LOOPBACK = "127.0.0.1"


class DataServices:
    """Those of a cluster in this process: one for each dataset, as a service keeps what it has.

    Thread-safe.

    Args:
        host: the name or address by which the cluster's workers reach this
            process.
    """

    def __init__(self, host: str):
        self._host = host
        self._lock = threading.Lock()
        self._services: weakref.WeakSet[DataService] = weakref.WeakSet()  # Guarded by _lock.
        self._is_closed = False  # Guarded by _lock.

    def new(self) -> DataService:
        """Starts another one, which ends when nobody refers to it any more, or with the cluster.

        Raises:
            RuntimeError: if they are closed.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the data services of this cluster are closed")
            service = DataService(self._host)
            self._services.add(service)
            return service

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all())

    def tasks(self) -> int:
        """How many pipelines are open."""
        return sum(service.tasks() for service in self._all())

    def close(self) -> None:
        """Ends all of them, each when its last pipeline has ended; does not wait for it."""
        with self._lock:
            self._is_closed = True
        for service in self._all():
            service.close()

    def _all(self) -> list[DataService]:
        with self._lock:
            return list(self._services)


class DataService:
    """A dispatcher and a worker of tf.data's service, in this process.

    It ends with `close`, or when nobody refers to it any more, as soon as the last pipeline
    has ended, and no pipeline of this process has been in Python for a moment: TensorFlow
    stops the servers with Python's lock held and waits for the threads of their pipelines,
    which may need that lock. A pipeline that has ended may still be in a generator.

    Args:
        host: see `DataServices`.

    Attributes:
        address: "grpc://host:port", for workers.
        own_address: the same, for this process.
    """

    def __init__(self, host: str):
        self._servers = _Servers(host)
        self.address = f"grpc://{_in_address(host)}:{self._servers.port}"
        self.own_address = f"grpc://{_own_address(self._servers.port)}"
        self._end = weakref.finalize(self, _end, self._servers)
        self._end.atexit = False  # They end with the process.

    def tasks(self) -> int:
        """How many pipelines are open; 0 when it is closed."""
        return self._servers.tasks() if self._end.alive else 0

    def close(self) -> None:
        """Ends the servers, when their last pipeline has ended; does not wait for it."""
        self._end()


class _Servers:
    """The two servers; starts them."""

    def __init__(self, host: str):
        self._dispatcher = _start_dispatcher(0)
        self.port = int(self._dispatcher.target.rpartition(":")[2])
        self._worker = _start_worker(_own_address(self.port), host, 0)

    def tasks(self) -> int:
        """How many pipelines are open."""
        return self._worker._num_tasks()

    def end(self) -> None:
        """Stops the servers once no pipeline is open, or in Python."""
        quiet = 0  # How often none was, in a row.
        while quiet < _QUIET_LOOKS:
            time.sleep(_END_SECONDS)
            quiet = 0 if self.tasks() > 0 or _is_python_at_work() else quiet + 1
        self._worker._stop()
        self._dispatcher._stop()


def _is_python_at_work() -> bool:
    """Whether a pipeline runs a function in Python, or waits for its end."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is _CALL:
                return True
            frame = frame.f_back
    return False


def _end(servers: _Servers) -> None:
    threading.Thread(target=servers.end, name="recsync_data_service", daemon=True).start()


class Reader:
    """What a task of the job "reader" runs; it starts it.

    That is a worker of tf.data's service and, in the first task, the dispatcher, to which all
    others listen: it has the address in `addresses`, and its worker a port that is free. The
    others wait for it. None of them end before the process.

    Args:
        addresses: "host:port" of all readers.
        index: which one this is.
        begin_anew: replaces this process by a new one; None in the first reader's process.
            Called when the first reader has ended: a dispatcher that is started again gives its
            numbers anew, and pipelines that are left from before would take the elements of
            others by them.

    Raises:
        tf.errors.OpError: it can't listen.
    """

    def __init__(self, addresses: Sequence[str], index: int, begin_anew: Callable[[], None] | None):
        host, port = tf_config.split_address(addresses[index])
        self._dispatcher = self._connection = None
        dispatcher = addresses[0]
        if index == 0:
            self._dispatcher = _start_dispatcher(port)
            dispatcher, port = _own_address(port), 0
        else:
            # TensorFlow would wait, too, but deaf to signals.
            _wait_for_dispatcher(addresses[0])
            if begin_anew is not None:

                def lost() -> None:
                    logging.warning("reader:0 has ended, or the connection to it; beginning anew.")
                    begin_anew()

                self._connection = _Connection(addresses[0], lost)
        self._worker = _start_worker(dispatcher, host, port)


class ReaderLosses:
    """Connections to readers, which end with them, and how many have.

    What a reader had in its hands is gone with it, whether or not it is there again when somebody
    asks.

    Thread-safe.

    Args:
        addresses: "host:port" of the readers.
    """

    def __init__(self, addresses: Sequence[str]):
        self._lock = threading.Lock()
        self._count = 0  # Guarded by _lock.
        self._connections = [_Connection(address, self._add) for address in addresses]

    def begin(self) -> int:
        """The number of connections that have ended before what is to be watched begins.

        It waits a moment for those that are not there.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS
        for connection in self._connections:
            connection.wait(deadline)
        return self.count

    @property
    def count(self) -> int:
        """How many connections have ended so far."""
        with self._lock:
            return self._count

    def close(self) -> None:
        """Ends the connections."""
        for connection in self._connections:
            connection.close()

    def _add(self) -> None:
        with self._lock:
            self._count += 1


class _Connection:
    """A connection to a reader, which ends with it or its machine, and is made again when it is
    back.

    Args:
        address: "host:port" of the reader.
        lost: called in another thread when it has ended.
    """

    def __init__(self, address: str, lost: Callable[[], None]):
        import grpc  # Servers are forked from a process that has not.

        self._address = address
        self._lost = lost
        self._is_there = threading.Event()
        self._was_ready = False
        self._last: enum.Enum | None = None  # Its state.
        self._ready = grpc.ChannelConnectivity.READY
        self._idle = grpc.ChannelConnectivity.IDLE
        options = {
            "grpc.enable_http_proxy": 0,
            "grpc.client_idle_timeout_ms": 2**31 - 1,  # Never.
            "grpc.initial_reconnect_backoff_ms": _RECONNECT_MILLISECONDS,
            "grpc.min_reconnect_backoff_ms": _RECONNECT_MILLISECONDS,
            "grpc.max_reconnect_backoff_ms": _RECONNECT_MILLISECONDS,
        }
        channel = grpc.insecure_channel(address, tuple(options.items()))
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = channel  # None: it is closed. Guarded by _lock.
        channel.subscribe(self._on_change, try_to_connect=True)

    def _on_change(self, state: enum.Enum) -> None:
        if state is self._ready:
            # Not gRPC's own, which servers refuse from a connection that carries nothing.
            signs_of_life.keep_alive(self._address)
            self._was_ready = True
            self._is_there.set()
        elif self._was_ready:
            self._was_ready = False
            self._is_there.clear()
            self._lost()
        last, self._last = self._last, state
        if state is self._idle and last is not state:
            # A channel whose connection has ended makes no other one until it is told to. It says
            # once more that it is idle then.
            with self._lock:
                if self._channel is not None:
                    self._channel.unsubscribe(self._on_change)
                    self._channel.subscribe(self._on_change, try_to_connect=True)

    def wait(self, deadline: float) -> None:
        """Waits until it is there, or until then."""
        self._is_there.wait(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Ends it."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            # gRPC's thread, which ends a fifth of a second after nobody listens any more, could not
            # ask a closed channel for its state.
            channel.unsubscribe(self._on_change)
            closing = threading.Timer(_CLOSE_SECONDS, channel.close)
            closing.daemon = True
            closing.start()


def _wait_for_dispatcher(address: str) -> None:
    while not signs_of_life.accepts_connections(address):
        logging.log_every_n_seconds(logging.WARNING, "Waiting for reader:0 (%s).", 30, address)
        time.sleep(0.1)


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_address(port: int) -> str:
    """Where this process reaches its own port.

    Not by the name that others know: from here it may mean another interface, or nothing, and
    TensorFlow would try for ever, deaf to signals.
    """
    return f"{_in_address(_engine.confined_address() or _LOOPBACK)}:{port}"


def _start_dispatcher(port: int) -> tf.data.experimental.service.DispatchServer:
    # Not tf.data's own class, which lacks the last two.
    return tf.data.experimental.service.DispatchServer(
        service_config_pb2.DispatcherConfig(
            port=port,
            protocol="grpc",
            job_gc_check_interval_ms=_ABANDONED_CHECK_MILLISECONDS,
            job_gc_timeout_ms=_ABANDONED_MILLISECONDS,
            # Those of several readers, too.
            gc_dynamic_sharding_jobs=True,
            client_timeout_ms=_CLIENT_MILLISECONDS,
        )
    )


def _start_worker(
    dispatcher: str, host: str, port: int
) -> tf.data.experimental.service.WorkerServer:
    service = tf.data.experimental.service
    return service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=dispatcher,
            worker_address=f"{_in_address(host)}:%port%",
            port=port,
            heartbeat_interval_ms=_HEARTBEAT_MILLISECONDS,
        )
    )
