"""A child process with one server or several of a local cluster."""

import os
import pathlib
import selectors
import time
from collections.abc import Mapping, Sequence

from tf_recsync.cluster import server_template

_LONGEST_WAIT_SECONDS = 3600.0  # At a time: epoll takes no more than some weeks.
_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 16384


class ServerProcess:
    """A child process that lives no longer than this one.

    The child gets a pipe as its standard input whose other end this process holds and never
    writes to: it reaches its end when this process has ended, in whatever way. The child
    reports on a second pipe, `--ready_fd`, that it is ready.

    Not thread-safe.

    Attributes:
      name: "job:index" of its servers.
      log_path: The file with its output.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log_path: pathlib.Path,
        start_timeout: float,
        temporary: pathlib.Path | None = None,
    ):
        """Describes a server; `start` starts it.

        Args:
          name: "job:index" of its servers.
          arguments: Those of `python -m tf_recsync.server`, flags of the pipes excepted.
          environ: Its environment.
          log_path: File to which its output goes; replaced by the first start, appended to
            by later ones.
          start_timeout: Seconds to wait at most for the process that servers are forked from.
          temporary: A folder that goes when this process has ended.
        """
        self.name = name
        self.log_path = log_path
        self._arguments = [*arguments, "--exit_with_parent"]
        self._environ = dict(environ)
        self._start_timeout = start_timeout
        self._temporary = temporary
        self._process: server_template.ForkedProcess | None = None
        self._ready_fd: int | None = None  # Read end, while not known to be ready.

    def start(self) -> None:
        """Starts the process and does not wait until it is ready.

        Raises:
          RuntimeError: The process that servers are forked from does not work.
        """
        ready_fd, child_fd = os.pipe()
        try:
            with open(self.log_path, "wb" if self._process is None else "ab") as log:
                template = server_template.template(self._environ)
                process = template.fork(
                    self._arguments,
                    self._environ,
                    log,
                    child_fd,
                    self._start_timeout,
                    self._temporary,
                )
        except BaseException:
            os.close(ready_fd)
            raise
        finally:
            os.close(child_fd)
        self._close_pipes()
        self._process, self._ready_fd = process, ready_fd

    @property
    def pid(self) -> int:
        """The process id of the latest start, or since a reader has begun anew."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, minus the number of the signal that killed it, None if it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Sends a signal and does not wait; does nothing if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the process with SIGKILL and waits until it is gone."""
        self._process.kill(10.0)
        self._close_pipes()

    def log_tail(self) -> str:
        """The last lines of its output."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(0, os.path.getsize(self.log_path) - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _close_pipes(self) -> None:
        if self._process is not None:
            self._process.close_stdin()
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None


def wait_until_ready(servers: Sequence[ServerProcess], timeout: float) -> ServerProcess | None:
    """Waits for started servers until all are ready or one has failed.

    Args:
      servers: The servers.
      timeout: Seconds to wait at most.

    Returns:
      None if all are ready, else the first one that ended or was not ready in time; the
      latter has no exit code.
    """
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for server in servers:
            selector.register(server._ready_fd, selectors.EVENT_READ, server)
        while selector.get_map():
            remaining = deadline - time.monotonic()
            events = selector.select(min(max(0.0, remaining), _LONGEST_WAIT_SECONDS))
            for key, _ in events:
                server = key.data
                if not os.read(key.fd, 64):  # Closed without a word: it has ended.
                    server._process.wait(5.0)
                    return server
                selector.unregister(key.fd)
                os.close(key.fd)
                server._ready_fd = None
            if not events and remaining <= 0:
                return next(iter(selector.get_map().values())).data
    return None
