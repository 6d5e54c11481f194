"""TensorFlow's servers of tasks that this process hosts."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import grpc_settings, proxies, redirections, transports

Task = tuple[str, int]  # Job and index.

# All servers of a process run what they are sent in one pool of threads, whose size
# the first of them decides. A call to a worker holds a thread until it has ended, and
# needs others, of the servers that it calls: too few, and nobody goes on.
_POOL_THREADS = 256
_THREADS_PER_TASK = 8
# A thousand workers' servers would have two thousand threads each, for calls that only wait
# where each of them is a neighbor of all others.
_MOST_DEFAULT_THREADS = 64
_lock = threading.RLock()  # Held by `HostedServers` when a failed start releases.


def default_threads(workers: int) -> int:
    """Threads that run ops, for each server of a cluster that is told no other number.

    Args:
      workers: Of the cluster. In decentralized training of up to 30, each may wait for all
        others, and they for it: a call that carries what it has to tell, one that carries
        what it is told, and a few that do not wait.
    """
    all_wait = min(2 * workers + 4, _MOST_DEFAULT_THREADS)
    return max(16, 2 * (os.cpu_count() or 1), all_wait)


def start_server(
    cluster: Mapping[str, Sequence[str]],
    task: Task,
    pool_threads: int,
    transport: str,
    intra_op_threads: int | None = None,
) -> tf.distribute.Server:
    """Starts the server of a task in this process; TensorFlow can't end it before the process.

    Load the transport (`transports.load`) and then confine the process's listeners first
    (`redirections.confine_listeners`).

    Args:
      cluster: Addresses "host:port" of the tasks of each job.
      task: Which one.
      pool_threads: Threads that run ops, of all servers of the process; that of the first
        one counts.
      transport: One of `transports.TRANSPORTS`.
      intra_op_threads: Threads that one op may use. Default None: the number of cores.

    Returns:
      The server; it listens.

    Raises:
      tf.errors.OpError: It can't listen.
    """
    grpc_settings.apply()
    job, index = task
    return tf.distribute.Server(
        dict(cluster),
        job_name=job,
        task_index=index,
        protocol=transports.protocol(transport),
        config=tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=pool_threads,
            intra_op_parallelism_threads=intra_op_threads or 0,
            # A server waits often and shortly, and threads that spin
            # meanwhile take the cores from its neighbours.
            experimental=tf.compat.v1.ConfigProto.Experimental(disable_thread_spinning=True),
        ),
    )


def reserve_threads() -> int:
    """Makes the pool large enough for `HostedServers`, if no server of this process exists yet.

    To be called before TensorFlow starts one to connect the coordinator to a cluster: its
    configuration would go to all servers.

    Returns:
      The pool's size.
    """
    with tf.init_scope(), tf.device("/CPU:0"):
        return int(ops.server_threads(_POOL_THREADS))


# (address, server, the socket that keeps the port)
_Server = tuple[str, tf.distribute.Server, socket.socket]

# Servers of this process that no cluster uses at the moment, by their transport, host and tasks.
# Those of one cluster stay together: a call of it that has not ended keeps a server's knowledge of
# the others alive, and TensorFlow gives that to the next cluster. Guarded by _lock.
_idle: dict[tuple[str, str, tuple[Task, ...]], list[dict[Task, _Server]]] = {}


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
        transport: str,
    ):
        """Starts the servers that are missing; they listen on return.

        Args:
          sizes: How many tasks of each job.
          host: Numeric address to listen on.
          reserve_port: Reserves a port of that address.
          transport: One of `transports.TRANSPORTS`.

        Raises:
          RuntimeError: This process has too few threads for so many servers.
          tf.errors.OpError: One can't listen.
        """
        tasks = [(job, index) for job, size in sizes.items() for index in range(size)]
        self._host = host
        self._transport = transport
        self._servers: dict[Task, _Server] = {}
        with _lock:
            self._start(tasks, reserve_port)

    def _start(self, tasks: list[Task], reserve_port: Callable[[], socket.socket]) -> None:
        host = self._host
        threads = reserve_threads()
        if len(tasks) * _THREADS_PER_TASK > threads:
            raise RuntimeError(
                f"{len(tasks)} servers in this process (processes=0) need {_THREADS_PER_TASK} "
                f"threads each, and its pool has {threads}; its size was decided with the first "
                f"server or connection: use processes=1 or more"
            )
        transports.load(self._transport)
        proxies.go_around([], host)
        redirections.confine_listeners(host)
        idle = _idle.get((self._transport, host, tuple(tasks)))
        if idle:
            self._servers = idle.pop()
            self.addresses = _by_job({task: server[0] for task, server in self._servers.items()})
            return
        ports = {task: reserve_port() for task in tasks}
        self.addresses = _by_job({t: f"{host}:{p.getsockname()[1]}" for t, p in ports.items()})
        try:
            for (job, index), port in ports.items():
                server = start_server(self.addresses, (job, index), threads, self._transport)
                self._servers[job, index] = (self.addresses[job][index], server, port)
        except BaseException:
            self.release()  # For a cluster of those that have started.
            raise

    def release(self) -> None:
        """Leaves the servers to the next cluster of this process."""
        with _lock:
            _idle.setdefault((self._transport, self._host, tuple(self._servers)), []).append(
                self._servers
            )


def _by_job(addresses: Mapping[Task, str]) -> dict[str, list[str]]:
    """Addresses of the tasks of each job, of tasks in the order of their numbers."""
    of_job: dict[str, list[str]] = {}
    for (job, _), address in addresses.items():
        of_job.setdefault(job, []).append(address)
    return of_job
