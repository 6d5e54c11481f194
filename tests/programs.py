"""Programs of `examples` and `benchmarks`: in this process, or each in one of its own."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from unittest import mock

import keras
from absl import app, logging
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"


@contextlib.contextmanager
def modules_of(folder: pathlib.Path) -> Iterator[None]:
    """Inside, the modules of a folder can be imported; then they and their flags are forgotten.

    So several programs that define the same flags can run in one process.
    """
    verbosity = logging.get_verbosity()
    app.define_help_flags()  # It does so once, and they would be forgotten, too.
    with (
        flagsaver.flagsaver(),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        mock.patch.dict(os.environ),
    ):
        try:
            yield
        finally:
            for name, module in list(sys.modules.items()):
                path = pathlib.Path(getattr(module, "__file__", None) or "/")
                if path.parent in (EXAMPLES, BENCHMARKS):
                    del sys.modules[name]
    logging.set_verbosity(verbosity)


@contextlib.contextmanager
def imported(path: pathlib.Path) -> Iterator[types.ModuleType]:
    """A program as a module, inside."""
    with modules_of(path.parent):
        yield importlib.import_module(path.stem)


def run_here(path: pathlib.Path, *arguments: object) -> subprocess.CompletedProcess:
    """Runs a program to its end as `run` does, but in this process, which has TensorFlow.

    An error that the program does not catch is raised.
    """
    command = [str(path), *map(str, arguments)]
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    with (
        modules_of(path.parent),
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        finally:
            # Which absl's `app.run` has added.
            logging.get_absl_logger().root.removeHandler(logging.get_absl_handler())
            # The next cluster of this process would be told of all its functions.
            keras.utils.clear_session()
            gc.collect()
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())


def run(
    path: pathlib.Path, *arguments: object, timeout: float = 500
) -> subprocess.CompletedProcess:
    """Runs a program to its end, as users start it, for so many seconds at most."""
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def strict_json(path: pathlib.Path):
    """What every parser of JSON reads: without NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)
