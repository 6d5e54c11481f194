"""A cluster of real servers on this machine."""

import atexit
import contextlib
import glob
import json
import os
import pathlib
import shutil
import signal
import site
import socket
import sys
import tempfile
import threading
import time

import tensorflow as tf
from absl import logging

from tf_recsync._checks import check_at_least, check_seconds, integer
from tf_recsync.cluster import connection, hosted_servers, server_process, transports

_HOST = "127.0.0.1"
_JOBS = ("worker", "ps", "reader")
_MAX_STARTS = 3  # Attempts, if ports are taken.
_EXIT_PORT_TAKEN = 98  # See server.py.
_STOP_SECONDS = 10.0  # For a process to stand still.

_chief_port_lock = threading.Lock()
_chief_port: socket.socket | None = None  # Guarded by _chief_port_lock.


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it has ended."""
    states = []
    for path in glob.glob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(OSError), open(path) as stat:
            # The name of a thread, in parentheses, may have anything in it.
            states.append(stat.read().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


class LocalCluster(connection.Cluster):
    """Starts the servers of a cluster on this machine, by default a process for each.

    For a laptop, for tests and for examples. The servers listen on 127.0.0.1 only. They end
    with `close`, at the end of the `with` block, and when this process ends, be it by an
    error, a signal, SIGKILL or `os._exit`. Ctrl-C reaches this process only. A script needs
    no `if __name__ == "__main__"` guard.

    Many servers start sooner and need less memory in few processes, or in this one
    (`processes`). Servers of one process are killed together; those of this process can't
    be killed, and TensorFlow can't end them either: after `close` they idle, for the next
    cluster of this process to use.

    Ports of 127.0.0.1 are reachable for all users of the machine, and the servers run what
    they are sent: use it on machines whose users you trust.

    Thread-safe.

    Attributes:
      cluster_spec, resolver, workers, ps, readers: See `Cluster`.
      log_dir: The folder with the servers' output; None if they are in this process.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=4, ps=2, processes=0) as cluster:
    ...     print(cluster.workers, "workers,", cluster.ps, "parameter servers")
    4 workers, 2 parameter servers
    """

    def __init__(
        self,
        workers: int,
        ps: int = 0,
        *,
        readers: int = 0,
        processes: int | None = None,
        inter_op_threads: int | None = None,
        intra_op_threads: int | None = None,
        transport: str = transports.DEFAULT,
        start_timeout: float = 180.0,
        log_dir: str | os.PathLike | None = None,
    ):
        """Starts the servers and waits until they are ready.

        Args:
          workers: Number of workers, at least 1.
          ps: Number of parameter servers; default 0.
          readers: Number of readers, processes that run input pipelines. Default 0: this
            process runs them.
          processes: In how many processes workers and parameter servers run. Default None: one
            for each. 0: in this process, 32 servers at most. Of two and more, parameter
            servers and workers have their own.
          inter_op_threads: Threads of each server that run ops; a remote call that waits in
            an op holds one. Servers of a process share theirs. Default None: twice the
            number of cores, at least 16, and enough for up to 30 workers that all wait for
            each other, twice their number and 4. Not for servers in this process.
          intra_op_threads: Threads of each server's process that one op may use. Default None:
            the number of cores divided by that of the processes with workers, which compute
            at the same time, and at least 1. Not for servers in this process.
          transport: How servers fetch tensors from each other: "recsync", over connections
            of this package, which cost less processor time, or "grpc", by TensorFlow's
            calls; see docs/cluster.md. Default "recsync".
          start_timeout: Seconds to wait for the servers to be ready, which takes long on a machine
            that is busy; a process that ends is told at once. Default 180.
          log_dir: Folder for the output of the servers' processes, a file `job-index.log`
            each, named after a process's first server; made if missing, and kept. Default
            None: a temporary folder, removed by `close`, or when this process has ended.

        Raises:
          ValueError: An argument is wrong.
          RuntimeError: A server could not start; the message holds its last lines.
        """
        check_at_least("workers", workers, 1)
        check_at_least("ps", ps, 0)
        check_at_least("readers", readers, 0)
        if processes == 0 and readers:
            raise ValueError(
                f"readers must be 0 with processes=0, as they are processes, got {readers!r}"
            )
        if processes is not None:
            check_at_least("processes", processes, 0)
            if processes > workers + ps:
                raise ValueError(
                    f"processes must be at most one for each of the {workers + ps} servers, "
                    f"got {processes}"
                )
            for name, value in (
                ("inter_op_threads", inter_op_threads),
                ("intra_op_threads", intra_op_threads),
                ("log_dir", log_dir),
            ):
                if processes == 0 and value is not None:
                    raise ValueError(
                        f"{name} must be None with processes=0, whose servers use this process's "
                        f"threads and output, got {value!r}"
                    )
        for name, value in (
            ("inter_op_threads", inter_op_threads),
            ("intra_op_threads", intra_op_threads),
        ):
            if value is not None:
                check_at_least(name, value, 1)
        self._start_timeout = check_seconds("start_timeout", start_timeout)
        if not sys.executable:
            raise RuntimeError("sys.executable is empty: no Python to start servers with")

        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._transport = transports.check(transport)
        self._flags = [f"--bind_address={_HOST}", f"--transport={transport}"]
        if inter_op_threads is not None:
            self._flags.append(f"--inter_op_threads={inter_op_threads}")
        self._ports: list[socket.socket] = []
        self._servers: dict[hosted_servers.Task, server_process.ServerProcess] = {}
        self._hosted: hosted_servers.HostedServers | None = None
        sizes = zip(_JOBS, (workers, ps, readers), strict=True)
        self._sizes = {job: size for job, size in sizes if size}
        self.log_dir: pathlib.Path | None = None
        self._temporary = log_dir is None
        if processes == 0:
            self._hosted = self._host_servers()
            addresses = self._hosted.addresses
            super().__init__(addresses, chief_address=_reserve_chief_address(), bind_address=_HOST)
            atexit.register(self.close)
            return
        if log_dir is None:
            self.log_dir = pathlib.Path(tempfile.mkdtemp(prefix="tf_recsync_"))
        else:
            self.log_dir = pathlib.Path(log_dir)
            self.log_dir.mkdir(parents=True, exist_ok=True)
        shares = _share_out(self._sizes, processes)
        if intra_op_threads is None:
            intra_op_threads = default_intra_op_threads(shares, len(os.sched_getaffinity(0)))
        self._flags.append(f"--intra_op_threads={intra_op_threads}")
        try:
            addresses = self._start_servers(shares)
            super().__init__(addresses, chief_address=_reserve_chief_address(), bind_address=_HOST)
        except BaseException:
            self._stop_servers()
            raise
        atexit.register(self.close)

    def connect(self, timeout: float = 60.0, *, min_workers: int | None = None) -> None:
        """See `Cluster.connect`."""
        hosted_servers.reserve_threads()  # For a later cluster with processes=0.
        super().connect(timeout, min_workers=min_workers)

    def close(self) -> None:
        """Disconnects and ends the servers; does nothing the second time.

        Servers of this process can't be ended; they idle until the next cluster uses them, and
        keep the memory of variables that have not been deleted.
        """
        if os.getpid() != self._owner:  # A forked child runs the same exit functions.
            return
        super().close()
        atexit.unregister(self.close)

    def kill(self, job: str, index: int) -> None:
        """Kills a server with SIGKILL, and with it all others of its process.

        For tests and experiments.

        Args:
          job: "worker", "ps" or "reader".
          index: Which one.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed, or the server is in this process.
        """
        with self._mutex:
            self._server(job, index).kill()

    def pause(self, job: str, index: int) -> None:
        """Stops a server's process with SIGSTOP: it stays, and does not answer.

        Who calls it waits until `resume`; `close` ends it all the same. If this process is
        killed meanwhile, the stopped one stays behind.

        Args:
          job: "worker", "ps" or "reader".
          index: Which one.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed, or the server is in this process.
        """
        with self._mutex:
            server = self._server(job, index)
            server.send_signal(signal.SIGSTOP)
            # On a busy machine, some of its threads answer for a while.
            deadline = time.monotonic() + _STOP_SECONDS
            while not stands_still(server.pid) and time.monotonic() < deadline:
                time.sleep(0.01)

    def resume(self, job: str, index: int) -> None:
        """Lets a server go on that `pause` has stopped.

        Args:
          job: "worker", "ps" or "reader".
          index: Which one.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed, or the server is in this process.
        """
        with self._mutex:
            self._server(job, index).send_signal(signal.SIGCONT)

    def restart(self, job: str, index: int) -> None:
        """Starts a server's process again, on the same ports, and waits until it is ready.

        Kills it first if it runs. Call `readmit` then to use it again, unless it is a reader.

        Args:
          job: "worker", "ps" or "reader".
          index: Which one.

        Raises:
          ValueError: There is no such server.
          RuntimeError: It could not start, the cluster is closed, or the server is in this
            process.
        """
        with self._mutex:
            server = self._server(job, index)
            server.kill()
            server.start()
            failed = server_process.wait_until_ready([server], self._start_timeout)
            if failed is not None:
                message = self._describe_failure(failed)
                failed.kill()
                raise RuntimeError(message)

    def pid(self, job: str, index: int) -> int:
        """The id of a server's process, the last one if it has ended.

        Args:
          job: "worker", "ps" or "reader".
          index: Which one.

        Returns:
          The process id.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed.
        """
        with self._mutex:
            self._check_server(job, index)
            return os.getpid() if self._hosted else self._servers[job, index].pid

    def is_alive(self, job: str, index: int) -> bool:
        """Whether the process of a server runs.

        Args:
          job: "worker", "ps" or "reader".
          index: Which one.

        Returns:
          True if it runs.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed.
        """
        with self._mutex:
            self._check_server(job, index)
            return self._hosted is not None or self._servers[job, index].exit_code is None

    def _server(self, job: str, index: int) -> server_process.ServerProcess:
        self._check_server(job, index)
        if self._hosted is not None:
            raise RuntimeError(
                f"{job}:{index} runs in this process, where TensorFlow can't end it; make the "
                f"LocalCluster with processes=None, or 1 and more, to kill, restart and pause "
                f"servers"
            )
        return self._servers[job, index]

    def _check_server(self, job: str, index: int) -> None:
        if not self._servers and self._hosted is None:
            raise RuntimeError("the cluster is closed")
        if job not in _JOBS:
            raise ValueError(f"job must be one of {_JOBS}, got {job!r}")
        size = self._sizes.get(job, 0)
        if not size:
            raise ValueError(f"the cluster has no server of job {job!r}")
        integer("index", index, 0, size - 1)

    def _host_servers(self) -> hosted_servers.HostedServers:
        """Starts all servers in this process, on other ports if one is taken."""
        for attempt in range(1, _MAX_STARTS + 1):
            try:
                return hosted_servers.HostedServers(
                    self._sizes, _HOST, _reserve_port, self._transport
                )
            except tf.errors.OpError as error:
                if attempt == _MAX_STARTS:
                    raise RuntimeError(
                        f"a server could not start in this process: {error.message}"
                    ) from error
                logging.warning("Starting servers again on other ports: %s", error.message)
        raise AssertionError("not reached")

    def _start_servers(self, processes: list[list[hosted_servers.Task]]) -> dict[str, list[str]]:
        """Starts all servers, on other ports if one is taken; returns their addresses.

        Args:
          processes: The servers of each process.
        """
        for attempt in range(1, _MAX_STARTS + 1):
            addresses = {
                job: [self._reserve_address() for _ in range(size)]
                for job, size in self._sizes.items()
            }
            for tasks in processes:
                server = self._make_server(addresses, tasks)
                server.start()
                self._servers.update((task, server) for task in tasks)
            failed = server_process.wait_until_ready(self._processes(), self._start_timeout)
            if failed is None:
                return addresses
            message = self._describe_failure(failed)
            if failed.exit_code != _EXIT_PORT_TAKEN or attempt == _MAX_STARTS:
                raise RuntimeError(message)
            logging.warning("Starting the servers again on other ports: %s", message)
            self._end_processes()
        raise AssertionError("not reached")

    def _processes(self) -> list[server_process.ServerProcess]:
        return list({id(server): server for server in self._servers.values()}.values())

    def _make_server(
        self, addresses: dict[str, list[str]], tasks: list[hosted_servers.Task]
    ) -> server_process.ServerProcess:
        environ = dict(os.environ)
        environ["TF_CONFIG"] = json.dumps({"cluster": addresses})
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        # The servers run this package wherever this process has found it.
        root = str(pathlib.Path(__file__).resolve().parents[2])
        if root not in (*site.getsitepackages(), site.getusersitepackages()):
            paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
            environ["PYTHONPATH"] = os.pathsep.join(paths)
        names = [f"{job}:{index}" for job, index in tasks]
        flags = [*self._flags, f"--tasks={','.join(names)}"]
        log_path = self.log_dir / f"{names[0].replace(':', '-')}.log"
        return server_process.ServerProcess(
            ", ".join(names),
            flags,
            environ,
            log_path,
            self._start_timeout,
            self.log_dir if self._temporary else None,
        )

    def _describe_failure(self, server: server_process.ServerProcess) -> str:
        reason = (
            f"was not ready within start_timeout={self._start_timeout:g} s"
            if server.exit_code is None
            else f"ended with exit code {server.exit_code} before it was ready"
        )
        return f"server {server.name} {reason}; the end of its log:\n{server.log_tail()}"

    def _reserve_address(self) -> str:
        self._ports.append(_reserve_port())
        return f"{_HOST}:{self._ports[-1].getsockname()[1]}"

    def _end_processes(self) -> None:
        for server in self._processes():
            server.send_signal(signal.SIGKILL)
        for server in self._processes():
            server.kill()
        self._servers.clear()
        for port in self._ports:
            port.close()
        self._ports.clear()

    def _stop_servers(self) -> None:
        with self._mutex:
            if self._hosted is not None:
                if self._scopes:  # Their calls would wait on: the servers don't end.
                    sizes = self._sizes.items()
                    self.cut_off_all((job, i) for job, size in sizes for i in range(size))
                self._hosted.release()
                self._hosted = None
            self._end_processes()
            if self.log_dir is not None and self._temporary:
                shutil.rmtree(self.log_dir, ignore_errors=True)


def default_intra_op_threads(shares: list[list[hosted_servers.Task]], cores: int) -> int:
    """Threads that an op of a server may use where all servers are on one machine.

    Workers compute at the same time, and parameter servers between their computations: more
    threads than that take the cores from each other, and waking them costs more than they do.

    Args:
      shares: The servers of each process.
      cores: Of the machine, those that this process may use.
    """
    return max(1, cores // sum(any(job == "worker" for job, _ in share) for share in shares))


def _share_out(sizes: dict[str, int], processes: int | None) -> list[list[hosted_servers.Task]]:
    """Which servers run together, in the order of their numbers, in how many processes.

    A worker that is killed takes no parameter server with it, if there are two processes.
    Readers have their own.
    """
    workers, ps, readers = ([(job, i) for i in range(sizes.get(job, 0))] for job in _JOBS)
    own = [[reader] for reader in readers]
    if processes is None:
        processes = len(workers) + len(ps)
    if processes == 1 or not ps:
        return _split([*workers, *ps], processes) + own
    share = round(processes * len(ps) / (len(workers) + len(ps)))
    for_ps = min(max(1, share, processes - len(workers)), len(ps), processes - 1)
    return _split(workers, processes - for_ps) + _split(ps, for_ps) + own


def _split(tasks: list[hosted_servers.Task], parts: int) -> list[list[hosted_servers.Task]]:
    """Cuts a list into `parts` lists of sizes that differ by one at most."""
    ends = [len(tasks) * i // parts for i in range(parts + 1)]
    return [tasks[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]


def _reserve_port() -> socket.socket:
    """Binds a socket to a free port, and with it keeps the port for one of our servers.

    On Linux, sockets with SO_REUSEADDR share a port as long as one of them listens at most:
    a gRPC server sets the option too, so it can listen on a port that we still hold, while
    the kernel gives the port to nobody who asks for a free one. So a server finds its port
    free seconds later, and once more after a restart.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((_HOST, 0))
    except BaseException:
        reservation.close()
        raise
    return reservation


def _reserve_chief_address() -> str:
    """This process's own address, the same in every local cluster.

    TensorFlow cannot end its server in this process, so later clusters go on with it.
    """
    global _chief_port
    with _chief_port_lock:
        if _chief_port is None:
            _chief_port = _reserve_port()
        return f"{_HOST}:{_chief_port.getsockname()[1]}"


def alone() -> connection.Cluster:
    """This process as the coordinator of local clusters, without one."""
    return connection.Cluster({}, chief_address=_reserve_chief_address(), bind_address=_HOST)
