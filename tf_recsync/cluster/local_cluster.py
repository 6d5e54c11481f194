"""A cluster of real server processes on this machine."""

import atexit
import json
import os
import pathlib
import shutil
import site
import socket
import sys
import tempfile
import threading

from absl import logging

from tf_recsync.cluster import connection, server_process

_HOST = "127.0.0.1"
_JOBS = ("worker", "ps")
_MAX_STARTS = 3  # Attempts, if ports are taken.
_EXIT_PORT_TAKEN = 98  # See server.py.

_chief_port_lock = threading.Lock()
_chief_port: socket.socket | None = None  # Guarded by _chief_port_lock.


class LocalCluster(connection.Cluster):
    """Starts the servers of a cluster as processes on this machine.

    For a laptop, for tests and for examples. The servers listen on 127.0.0.1 only. They end
    with `close`, at the end of the `with` block, and when this process ends, be it by an
    error, a signal, SIGKILL or `os._exit`. Ctrl-C reaches this process only. A script needs
    no `if __name__ == "__main__"` guard.

    Ports of 127.0.0.1 are reachable for all users of the machine, and the servers run what
    they are sent: use it on machines whose users you trust.

    Thread-safe.

    Attributes:
      cluster_spec, resolver, workers, ps: See `Cluster`.

    Example:
      ```python
      with recsync.LocalCluster(workers=4, ps=2) as cluster:
          cluster.connect()
          with tf.device("/job:ps/task:0"):
              table = tf.Variable(tf.zeros([1000, 16]))
      ```
    """

    def __init__(
        self,
        workers: int,
        ps: int = 0,
        *,
        inter_op_threads: int | None = None,
        intra_op_threads: int | None = None,
        start_timeout: float = 60.0,
        log_dir: str | os.PathLike | None = None,
    ):
        """Starts the servers and waits until they are ready.

        Args:
          workers: Number of workers, at least 1.
          ps: Number of parameter servers; default 0.
          inter_op_threads: Threads of each server that run ops; a remote call that waits in
            an op holds one. Default None: twice the number of cores, at least 16.
          intra_op_threads: Threads of each server that one op may use. Default None: the
            number of cores.
          start_timeout: Seconds to wait for the servers to be ready; default 60.
          log_dir: Folder for the servers' output, a file `job-index.log` each; made if
            missing, and kept. Default None: a temporary folder, removed by `close`.

        Raises:
          ValueError: An argument is wrong.
          RuntimeError: A server could not start; the message holds its last lines.
        """
        _check_integer("workers", workers, 1)
        _check_integer("ps", ps, 0)
        for name, value in (
            ("inter_op_threads", inter_op_threads),
            ("intra_op_threads", intra_op_threads),
        ):
            if value is not None:
                _check_integer(name, value, 1)
        is_number = isinstance(start_timeout, (int, float)) and not isinstance(start_timeout, bool)
        if not is_number or not start_timeout > 0:
            raise ValueError(
                f"start_timeout must be a positive number of seconds, got {start_timeout!r}"
            )
        if not sys.executable:
            raise RuntimeError("sys.executable is empty: no Python to start servers with")

        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._start_timeout = float(start_timeout)
        self._flags = [f"--bind_address={_HOST}"]
        if inter_op_threads is not None:
            self._flags.append(f"--inter_op_threads={inter_op_threads}")
        if intra_op_threads is not None:
            self._flags.append(f"--intra_op_threads={intra_op_threads}")
        self._ports: list[socket.socket] = []
        self._servers: dict[tuple[str, int], server_process.ServerProcess] = {}
        self._temporary = log_dir is None
        if log_dir is None:
            self.log_dir = pathlib.Path(tempfile.mkdtemp(prefix="tf_recsync_"))
        else:
            self.log_dir = pathlib.Path(log_dir)
            self.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            addresses = self._start_servers({"worker": workers, "ps": ps})
            super().__init__(addresses, chief_address=_reserve_chief_address(), bind_address=_HOST)
        except BaseException:
            self._stop_servers()
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """Disconnects and ends the servers; does nothing the second time."""
        if os.getpid() != self._owner:  # A forked child runs the same exit functions.
            return
        super().close()
        atexit.unregister(self.close)

    def kill(self, job: str, index: int) -> None:
        """Kills a server with SIGKILL, for tests and experiments.

        Args:
          job: "worker" or "ps".
          index: Which one.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed.
        """
        with self._mutex:
            self._server(job, index).kill()

    def restart(self, job: str, index: int) -> None:
        """Starts a server again on its port, and waits until it is ready.

        Kills it first if it runs. Call `readmit` then to use it again.

        Args:
          job: "worker" or "ps".
          index: Which one.

        Raises:
          ValueError: There is no such server.
          RuntimeError: It could not start, or the cluster is closed.
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
        """The process id of a server, the last one if it has ended.

        Args:
          job: "worker" or "ps".
          index: Which one.

        Returns:
          The process id.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed.
        """
        with self._mutex:
            return self._server(job, index).pid

    def is_alive(self, job: str, index: int) -> bool:
        """Whether the process of a server runs.

        Args:
          job: "worker" or "ps".
          index: Which one.

        Returns:
          True if it runs.

        Raises:
          ValueError: There is no such server.
          RuntimeError: The cluster is closed.
        """
        with self._mutex:
            return self._server(job, index).exit_code is None

    def _server(self, job: str, index: int) -> server_process.ServerProcess:
        if not self._servers:
            raise RuntimeError("the cluster is closed")
        if job not in _JOBS:
            raise ValueError(f"job must be one of {_JOBS}, got {job!r}")
        if (job, index) not in self._servers:
            size = sum(key[0] == job for key in self._servers)
            raise ValueError(
                f"index must be an integer from 0 to {size - 1}, got {index!r}"
                if size
                else f"the cluster has no server of job {job!r}"
            )
        return self._servers[job, index]

    def _start_servers(self, sizes: dict[str, int]) -> dict[str, list[str]]:
        """Starts all servers, on other ports if one is taken; returns their addresses."""
        for attempt in range(1, _MAX_STARTS + 1):
            addresses = {
                job: [self._reserve_address() for _ in range(size)]
                for job, size in sizes.items()
                if size
            }
            for job, job_addresses in addresses.items():
                for index in range(len(job_addresses)):
                    server = self._make_server(addresses, job, index)
                    server.start()
                    self._servers[job, index] = server
            failed = server_process.wait_until_ready(
                list(self._servers.values()), self._start_timeout
            )
            if failed is None:
                return addresses
            message = self._describe_failure(failed)
            if failed.exit_code != _EXIT_PORT_TAKEN or attempt == _MAX_STARTS:
                raise RuntimeError(message)
            logging.warning("Starting the servers again on other ports: %s", message)
            self._end_processes()
        raise AssertionError("not reached")

    def _make_server(
        self, addresses: dict[str, list[str]], job: str, index: int
    ) -> server_process.ServerProcess:
        environ = dict(os.environ)
        environ["TF_CONFIG"] = json.dumps(
            {"cluster": addresses, "task": {"type": job, "index": index}}
        )
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        # The servers run this package wherever this process has found it.
        root = str(pathlib.Path(__file__).resolve().parents[2])
        if root not in (*site.getsitepackages(), site.getusersitepackages()):
            paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
            environ["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "tf_recsync.server", *self._flags]
        log_path = self.log_dir / f"{job}-{index}.log"
        return server_process.ServerProcess(f"{job}:{index}", command, environ, log_path)

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
        for server in self._servers.values():
            server.send_kill()
        for server in self._servers.values():
            server.kill()
        self._servers.clear()
        for port in self._ports:
            port.close()
        self._ports.clear()

    def _stop_servers(self) -> None:
        with self._mutex:
            self._end_processes()
            if self._temporary:
                shutil.rmtree(self.log_dir, ignore_errors=True)


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


def _check_integer(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
