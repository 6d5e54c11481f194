"""Compiles the plain C++ loops that benchmarks compare with (plain_loop.cc)."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import tempfile


def load() -> ctypes.CDLL:
    """The loops, compiled for this machine's processor."""
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "plain_loop.so"
        source = pathlib.Path(__file__).with_name("plain_loop.cc")
        options = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread"]
        subprocess.check_call(["g++", "-std=c++17", *options, str(source), "-o", str(library)])
        return ctypes.CDLL(str(library))
