"""TensorFlow's servers of tasks that this process hosts."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tf_recsync import _engine
from tf_recsync import ops as _  # noqa: F401  Makes the custom ops exist here.

Task = tuple[str, int]  # Job and index.


def start_server(
    cluster: Mapping[str, Sequence[str]],
    task: Task,
    *,
    inter_op_threads: int | None = None,
    intra_op_threads: int | None = None,
) -> tf.distribute.Server:
    """Starts the server of a task in this process; TensorFlow can't end it before the process.

    Confine the process's listeners first (`_engine.confine_listeners`).

    Args:
      cluster: Addresses "host:port" of the tasks of each job.
      task: Which one.
      inter_op_threads: Threads that run ops. Default None: twice the cores, at least 16.
      intra_op_threads: Threads that one op may use. Default None: the number of cores.

    Returns:
      The server; it listens.

    Raises:
      tf.errors.OpError: It can't listen.
    """
    # A call between servers fails at once when the other one is gone.
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    job, index = task
    return tf.distribute.Server(
        dict(cluster),
        job_name=job,
        task_index=index,
        config=tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=inter_op_threads or max(16, 2 * (os.cpu_count() or 1)),
            intra_op_parallelism_threads=intra_op_threads or 0,
            # A server waits often and shortly, and threads that spin
            # meanwhile take the cores from its neighbours.
            experimental=tf.compat.v1.ConfigProto.Experimental(disable_thread_spinning=True),
        ),
    )


# Servers of this process that no cluster uses at the moment, by their task and
# threads: (address, server, the socket that keeps the port).
_Idle = tuple[str, tf.distribute.Server, socket.socket]
_idle: dict[tuple, list[_Idle]] = {}  # Guarded by _idle_lock.
_idle_lock = threading.Lock()


class HostedServers:
    """The servers of a local cluster in its coordinator's own process.

    They can't be ended; `release` keeps them for the next cluster.

    Attributes:
      addresses: "host:port" of the tasks of each job.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        host: str,
        reserve_port: Callable[[], socket.socket],
        inter_op_threads: int | None,
        intra_op_threads: int | None,
    ):
        """Starts the servers that are missing; they listen on return.

        Args:
          sizes: How many tasks of each job.
          host: Numeric address to listen on.
          reserve_port: Reserves a port of that address.
          inter_op_threads, intra_op_threads: See `start_server`.

        Raises:
          tf.errors.OpError: One can't listen.
        """
        _engine.confine_listeners(host)
        self._threads = (inter_op_threads, intra_op_threads)
        self._servers: dict[Task, _Idle] = {}
        tasks = [(job, index) for job, size in sizes.items() for index in range(size)]
        with _idle_lock:
            for task in tasks:
                if _idle.get((host, *task, *self._threads)):
                    self._servers[task] = _idle[(host, *task, *self._threads)].pop()
        self._host = host
        try:
            ports = {task: reserve_port() for task in tasks if task not in self._servers}
            address_of = {task: server[0] for task, server in self._servers.items()}
            for task, port in ports.items():
                address_of[task] = f"{host}:{port.getsockname()[1]}"
            self.addresses: dict[str, list[str]] = {}
            for job, index in tasks:
                self.addresses.setdefault(job, []).append(address_of[job, index])
            for task, port in ports.items():
                server = start_server(
                    self.addresses,
                    task,
                    inter_op_threads=inter_op_threads,
                    intra_op_threads=intra_op_threads,
                )
                self._servers[task] = (address_of[task], server, port)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Leaves the servers to the next cluster of this process."""
        with _idle_lock:
            for task, server in self._servers.items():
                _idle.setdefault((self._host, *task, *self._threads), []).append(server)
        self._servers.clear()
