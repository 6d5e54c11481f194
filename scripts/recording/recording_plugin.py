"""A pytest plugin that writes which lines and blocks each test reaches.

`scripts/record_coverage.py` loads it into pytest with pytest-xdist. Each of its processes
writes into a folder of its own below RECORDING_ROOT:

- `records.jsonl`: for each test its id, seconds, whether it passed, the lines of the package
  that this process ran (recording_start.py) and the blocks of the instrumented libraries that
  it and its children ran (record_blocks.cc).
- `<process>.lines`: what its children write themselves.

What runs between tests, such as imports, counts for a test called "".
"""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import time

import numpy as np
import pytest
import recording_start

ROOT = "RECORDING_ROOT"


class Blocks:
    """The maps of a folder, in which libraries note which of their blocks run."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._maps: dict[str, np.ndarray] = {}

    def take(self) -> dict[str, list[int]]:
        """The blocks since the last call, by the library's name."""
        for path in self._folder.glob("*.blocks"):
            if path.stem not in self._maps and path.stat().st_size:
                with open(path, "r+b") as file:
                    self._maps[path.stem] = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        found = {}
        for name, blocks in self._maps.items():
            (ran,) = np.nonzero(blocks)
            blocks[ran] = 0
            if len(ran):
                found[name] = ran.tolist()
        return found


class Plugin:
    """The hooks, in a process of pytest-xdist."""

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._blocks = Blocks(folder)
        self._records = open(folder / "records.jsonl", "a")  # noqa: SIM115
        self._tests = open(folder / recording_start.TESTS, "a")  # noqa: SIM115
        self._passed = True
        self._start("")
        os.environ[recording_start.FOLDER] = str(folder)  # For children and the libraries.

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self._write("", 0.0)
        self._passed = True
        self._start(item.nodeid)
        began = time.monotonic()
        yield
        self._write(item.nodeid, time.monotonic() - began)
        self._start("")

    def pytest_runtest_logreport(self, report):
        self._passed = self._passed and not report.failed

    def pytest_sessionfinish(self):
        self._write("", 0.0)

    def _start(self, test: str) -> None:
        self._tests.write(test + "\n")
        self._tests.flush()

    def _write(self, test: str, seconds: float) -> None:
        record = {
            "test": test,
            "seconds": round(seconds, 3),
            "passed": self._passed,
            "lines": recording_start.RECORDER.take(),
            "blocks": self._blocks.take(),
        }
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()


def pytest_configure(config):
    """Starts in the processes that run tests, not in the one that hands them out."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and not config.pluginmanager.has_plugin("recording"):
        config.pluginmanager.register(PLUGIN, "recording")


def _make() -> Plugin | None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return Plugin(pathlib.Path(os.environ[ROOT]) / worker) if worker else None


PLUGIN = _make()
