"""A process that has imported TensorFlow and forks the servers of local clusters.

Importing takes seconds of a core for each process; a fork takes milliseconds, and the
servers share the memory of what was imported. Forking is safe as long as TensorFlow has not
started its threads: the template only imports.

`Template` is the side of the program with the cluster; the process itself runs this module.
They talk over a Unix socket: a request is a line of JSON that comes with four file
descriptors, the answer a line with the server's process id.

A reader that must begin anew ends with a code that says so, and is forked once more.

The process outlives the program for a moment, in which it removes its clusters' temporary folders.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NoReturn

_MODULE = "tf_recsync.cluster.server_template"
_MAX_REQUEST = 1 << 20
_OUTPUT_LINES = 20
_PARENT_POLL_MILLISECONDS = 1000
_POLL_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 86400.0  # For an answer: sockets take no more than some weeks.
_EXIT_TO_BEGIN_ANEW = 99  # None of the server's own exit codes, see server.py.

# What environment variables are called that a library reads while it is imported: servers
# for which they differ need another template. The rest a server finds in its own environment.
_READ_AT_IMPORT = (
    *("ABSL_", "CUDA_", "DNNL_", "GRPC_", "KERAS_", "KMP_", "LD_", "MALLOC_", "MKL_", "NPY_"),
    *("OMP_", "ONEDNN_", "OPENBLAS_", "PATH", "PYTHON", "TF_", "XLA_"),
)
# Of these, what this package sets itself, for calls and not for imports.
_READ_LATER = (
    "TF_CONFIG",
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE",
    "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY",
    "GRPC_FAIL_FAST",
)

_lock = threading.Lock()
_templates: list[Template] = []  # Those that live; guarded by _lock.


class ForkedProcess:
    """A server that the template has forked; as much of subprocess.Popen as is needed."""

    def __init__(self, pid: int, stdin_fd: int, exit_fd: int):
        """Takes over the file descriptors.

        Args:
          pid: The process id.
          stdin_fd: The write end of its standard input.
          exit_fd: The read end of the pipe on which the template tells what becomes of it.
        """
        # Whoever asks for signs of life polls it: a descriptor that one of them has closed may be
        # that of another file already.
        self._mutex = threading.Lock()
        self._pid = pid
        self._stdin_fd: int | None = stdin_fd
        self._exit_fd: int | None = exit_fd
        self._told = b""  # The beginning of a line.
        self._exit_code: int | None = None

    def __del__(self):
        self.close_stdin()
        if self._exit_fd is not None:
            os.close(self._exit_fd)

    @property
    def pid(self) -> int:
        """Its process id; another one after it has begun anew."""
        self.poll()
        return self._pid

    def close_stdin(self) -> None:
        """Lets the server's standard input end, if it has not."""
        if self._stdin_fd is not None:
            os.close(self._stdin_fd)
            self._stdin_fd = None

    def poll(self) -> int | None:
        """The exit code, minus the number of the signal that killed it, None if it runs."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> int | None:
        """Waits until it has ended, or for `timeout` seconds; returns as `poll`."""
        deadline = time.monotonic() + timeout
        while True:
            with self._mutex:
                while self._exit_fd is not None and _is_readable(self._exit_fd):
                    self._hear(os.read(self._exit_fd, 64))
                if self._exit_fd is None:
                    return self._exit_code
            remaining = deadline - time.monotonic()
            if remaining <= 0.0:
                return self._exit_code
            time.sleep(min(_POLL_SECONDS, remaining))

    def _hear(self, told: bytes) -> None:
        """Takes in what the template tells: lines "pid NUMBER", and "exit CODE" at the end.

        Under the mutex.
        """
        *lines, self._told = (self._told + told).split(b"\n")
        for line in lines:
            word, number = line.split()
            if word == b"pid":
                self._pid = int(number)
            else:
                self._exit_code = int(number)
        if not told:
            # The template was killed, and with it its servers.
            self._exit_code = -signal.SIGKILL
        if self._exit_code is not None:
            os.close(self._exit_fd)
            self._exit_fd = None

    def send_signal(self, number: int) -> None:
        """Sends a signal and does not wait; does nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # It has ended just now.
                os.kill(self._pid, number)

    def kill(self, timeout: float) -> None:
        """Ends it with SIGKILL and waits until it is gone, for `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            self.send_signal(signal.SIGKILL)
            # It may just have begun anew, with another process id.
            self.wait(min(1.0, timeout))


class Template:
    """The template of this process, for servers with a certain environment."""

    def __init__(self, environ: Mapping[str, str]):
        """Starts the process and does not wait until it is ready.

        Args:
          environ: The environment in which it imports TensorFlow.
        """
        self.import_settings = _import_settings(environ)
        self.owner = os.getpid()
        self._mutex = threading.Lock()
        self._output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (see close)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=theirs,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C is for this process.
            )

    def is_alive(self) -> bool:
        """Whether it can fork servers for this process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log: BinaryIO,
        ready_fd: int,
        timeout: float,
        temporary: pathlib.Path | None = None,
    ) -> ForkedProcess:
        """Starts a server, `python -m tf_recsync.server` with arguments.

        Args:
          arguments: The arguments, `--ready_fd` excepted, which is added.
          environ: Its environment; what libraries read at import is the template's.
          log: Where its output goes.
          ready_fd: What it writes to when it is ready.
          timeout: Seconds to wait at most for the template, which imports TensorFlow first.
          temporary: A folder that the template removes if this process ends and has not.

        Raises:
          RuntimeError: The template has ended, or was not ready in time.
        """
        stdin_read, stdin_write = os.pipe()
        exit_read, exit_write = os.pipe()
        content = {"arguments": list(arguments), "environ": dict(environ)}
        content["temporary"] = None if temporary is None else str(temporary.absolute())
        request = json.dumps(content).encode()
        try:
            try:
                with self._mutex:
                    self._socket.settimeout(min(timeout, _LONGEST_WAIT_SECONDS))
                    fds = [stdin_read, log.fileno(), ready_fd, exit_write]
                    # The descriptors go with the first byte.
                    socket.send_fds(self._socket, [len(request).to_bytes(8, "big")], fds)
                    self._socket.sendall(request)
                    answer = self._socket.recv(64)
            except OSError:
                answer = b""
            if not answer:
                reason = self._why_no_answer(timeout)
                raise RuntimeError(f"the process that servers are forked from {reason}")
            return ForkedProcess(int(answer), stdin_write, exit_read)
        except BaseException:  # Ctrl-C, too.
            os.close(stdin_write)
            os.close(exit_read)
            # It may answer this request yet, and nobody shall take that for another's.
            self.close()
            raise
        finally:
            os.close(stdin_read)
            os.close(exit_write)

    def close(self) -> None:
        """Ends the process, and with it servers that still run; does nothing the second time."""
        if self.owner == os.getpid():
            # Before its socket ends: it would take this process for ended.
            self._process.kill()
            self._process.wait(10.0)
            atexit.unregister(self.close)
        self._socket.close()
        self._output.close()

    def _why_no_answer(self, timeout: float) -> str:
        try:
            code = self._process.wait(1.0)
            reason = f"ended with exit code {code} before it was ready"
        except subprocess.TimeoutExpired:
            reason = f"was not ready within start_timeout={timeout:g} s"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()[-_OUTPUT_LINES:]
        return "\n".join([f"{reason}; the end of its output:", *lines])


def template(environ: Mapping[str, str]) -> Template:
    """This process's template for an environment; started if there is none yet.

    Each stays until this process ends, for the servers that it has forked and will fork.

    Args:
      environ: The environment of the servers.
    """
    wanted = _import_settings(environ)
    with _lock:
        _templates[:] = [known for known in _templates if known.is_alive()]
        for known in _templates:
            if known.import_settings == wanted:
                return known
        new = Template(environ)
        atexit.register(new.close)
        _templates.append(new)
        return new


def _is_readable(fd: int) -> bool:
    """Whether there is something to read, or its end."""
    poll = select.poll()  # Not select.select, which knows the first 1024 files only.
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _import_settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def _serve() -> None:
    """Runs the template: forks a server for each request, as long as its parent lives."""
    temporary: set[str] = set()
    with contextlib.suppress(ConnectionError):  # It has ended in the middle of a request.
        _serve_requests(temporary)
    for folder in temporary:
        shutil.rmtree(folder, ignore_errors=True)


def _serve_requests(temporary: set[str]) -> None:
    """The same; adds the temporary folders of the requests."""
    parent = os.getppid()
    import tensorflow  # noqa: F401

    from tf_recsync import server
    from tf_recsync.cluster import hosted_servers  # noqa: F401

    control = socket.socket(fileno=os.dup(0))
    children: dict[int, _Child] = {}  # By pidfd.
    poll = select.poll()
    poll.register(control, select.POLLIN)

    def start(child: _Child) -> None:
        child.pid = os.fork()
        if child.pid == 0:
            for pidfd, other in children.items():
                os.close(pidfd)
                other.close()
            os.close(child.exit_fd)
            control.close()
            _become_server(server, child.request, child.stdin_fd, child.log_fd, child.ready_fd)
        pidfd = os.pidfd_open(child.pid)
        children[pidfd] = child
        poll.register(pidfd, select.POLLIN)

    # A child of the parent's may have inherited the other end of the socket.
    while os.getppid() == parent:
        for fd, _ in poll.poll(_PARENT_POLL_MILLISECONDS):
            if fd in children:
                child = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                _, status = os.waitpid(child.pid, 0)
                code = os.waitstatus_to_exitcode(status)
                if code == _EXIT_TO_BEGIN_ANEW:
                    start(child)
                    child.tell(b"pid %d\n" % child.pid)
                else:
                    child.tell(b"exit %d\n" % code)
                    child.close()
                continue
            request, fds = _receive(control)
            if request is None:
                return  # The program with the cluster has ended.
            if request["temporary"] is not None:
                temporary.add(request["temporary"])
            child = _Child(request, *fds)
            start(child)
            control.sendall(b"%d\n" % child.pid)


class _Child:
    """A server that runs, and what it takes to start it once more."""

    def __init__(self, request: dict, stdin_fd: int, log_fd: int, ready_fd: int, exit_fd: int):
        self.pid = 0
        self.request = request
        self.stdin_fd, self.log_fd, self.ready_fd = stdin_fd, log_fd, ready_fd
        self.exit_fd = exit_fd

    def tell(self, news: bytes) -> None:
        """Tells what has become of it."""
        with contextlib.suppress(BrokenPipeError):  # Nobody wants to know.
            os.write(self.exit_fd, news)

    def close(self) -> None:
        for fd in (self.stdin_fd, self.log_fd, self.ready_fd, self.exit_fd):
            os.close(fd)


def _receive(control: socket.socket) -> tuple[dict | None, list[int]]:
    header, fds, _, _ = socket.recv_fds(control, 8, 4)
    if not header:
        return None, []
    size = int.from_bytes(header, "big")
    if size > _MAX_REQUEST:
        raise RuntimeError(f"a request of {size} bytes")
    request = b""
    while len(request) < size:
        part = control.recv(size - len(request))
        if not part:
            return None, []
        request += part
    return json.loads(request), fds


def _become_server(server, request: dict, stdin_fd: int, log_fd: int, ready_fd: int) -> None:
    """Runs the server in a fresh child; does not return."""
    code = 1
    try:
        os.setsid()
        os.dup2(stdin_fd, 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        for fd in (stdin_fd, log_fd):
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environ"])
        program = str(pathlib.Path(server.__file__))
        server.run([program, *request["arguments"], f"--ready_fd={ready_fd}"], _begin_anew)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _begin_anew() -> NoReturn:
    """Ends this server, which the template then starts once more; in whatever thread."""
    with contextlib.suppress(OSError, ValueError):  # Nobody may be reading.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_EXIT_TO_BEGIN_ANEW)


if __name__ == "__main__":
    _serve()
    # Its servers end when it has ended, which takes seconds on a busy machine if Python and
    # TensorFlow are taken down in order.
    os._exit(0)
