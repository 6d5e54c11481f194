"""Notes which lines of a tree this process runs, for scripts/record_coverage.py.

A .pth file of the recording's own environment imports this module when Python starts, in
every process: pytest, servers, examples. It does nothing without the variable RECORDING_TREE.

Lines are collected by coverage.py's tracer, for the threads that Python starts, into a set
for each file. A pytest process takes them after every test (recording_plugin.py). Another
process writes them into a file of its own ten times a second, if there are new ones, with
the tests that ran since it did so last: who is killed loses a tenth of a second at most.
"""

from __future__ import annotations

import atexit
import json
import os
import threading

import coverage

TREE = "RECORDING_TREE"  # Variable: the tree whose package is recorded.
FOLDER = "RECORDING_FOLDER"  # Variable: where a pytest process and its children write.
TESTS = "tests.log"  # In that folder, a test's id a line, the present one last.
_SECONDS = 0.1


class Recorder:
    """The lines that this process has run and nobody has taken."""

    def __init__(self, tree: str):
        """Starts to collect, in this thread and those that start later."""
        self._tree = os.path.join(tree, "")
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[os.path.join(tree, "tf_recsync", "*")]
        )
        self._coverage.start()

    def take(self) -> dict[str, list[int]]:
        """The lines since the last call, by the file's path in the tree."""
        # Tracers keep a file's set while they are in it, so the set has to stay. Copying and
        # subtracting are one step each for other threads: none of their lines gets lost.
        found = {}
        for path, lines in self._coverage._collector.data.copy().items():
            if lines:
                taken = lines.copy()
                lines.difference_update(taken)
                found[path.removeprefix(self._tree)] = sorted(taken)
        return found


class Writer:
    """Writes a process's lines into its file, with the tests that ran meanwhile."""

    def __init__(self, recorder: Recorder, folder: str):
        self._recorder = recorder
        self._folder = folder
        self._mutex = threading.Lock()
        os.register_at_fork(after_in_child=self._start_in_child)
        atexit.register(self.write)
        self._start()

    def write(self) -> None:
        """Writes what is new."""
        with self._mutex:
            # The test that ran last time counts, too: the lines may be from before its end.
            started = os.pread(self._tests, 1 << 20, self._position).decode().split("\n")[:-1]
            self._position += sum(len(test.encode()) + 1 for test in started)
            tests = [*self._current, *started]
            self._current = tests[-1:]
            lines = self._recorder.take()
            if lines:
                record = json.dumps({"tests": tests, "lines": lines}) + "\n"
                os.write(self._output, record.encode())

    def _start(self) -> None:
        path = os.path.join(self._folder, f"{os.getpid()}-{os.urandom(4).hex()}.lines")
        self._output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._tests = os.open(os.path.join(self._folder, TESTS), os.O_RDONLY | os.O_CLOEXEC)
        started = os.pread(self._tests, 1 << 22, 0)
        self._position = started.rfind(b"\n") + 1
        self._current = started.decode().split("\n")[-2:-1]
        threading.Thread(target=self._write_always, name="recording", daemon=True).start()

    def _start_in_child(self) -> None:
        self._recorder.take()  # The parent's.
        self._mutex = threading.Lock()
        os.close(self._output)
        os.close(self._tests)
        self._start()

    def _write_always(self) -> None:
        wait = threading.Event()
        while True:
            wait.wait(_SECONDS)
            self.write()


def _start() -> Recorder | None:
    if TREE not in os.environ:
        return None
    recorder = Recorder(os.environ[TREE])
    if FOLDER in os.environ:
        writer = Writer(recorder, os.environ[FOLDER])
        # Servers that are forked end so.
        exit_now = os._exit

        def write_and_exit(code: int) -> None:
            writer.write()
            exit_now(code)

        os._exit = write_and_exit
    return recorder


RECORDER = _start()
