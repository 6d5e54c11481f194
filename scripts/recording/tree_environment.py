"""A private copy of a checkout, with a Python that runs it whatever is installed."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence


class TreeEnvironment:
    """A folder with a copy of a checkout and a virtual environment whose path begins there.

    Programs that tests start get the copy's package too, even those that set PYTHONPATH.

    Attributes:
      tree: The copy.
      python: The environment's Python.
    """

    def __init__(
        self, folder: pathlib.Path, paths: Sequence[pathlib.Path] = (), imported: str | None = None
    ):
        """Makes the environment if there is none.

        Args:
          folder: Where the copy and the environment lie.
          paths: Further folders on the environment's path.
          imported: A module there that every process imports when it starts.
        """
        self.tree = folder / "tree"
        self.python = folder / "venv" / "bin" / "python"
        if not self.python.exists():
            command = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
            subprocess.run(command, check=True)
        libraries = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        # Folders in a .pth file are searched in order; .pth files in them, such as that of an
        # editable install, are not read.
        lines = [self.tree, *paths, *libraries, *([f"import {imported}"] if imported else [])]
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (site / "tree.pth").write_text("\n".join(map(str, lines)) + "\n")

    def update(self, source: pathlib.Path) -> None:
        """Copies what git knows or does not ignore in a checkout, and removes the rest.

        Files that are alike keep their time, so that only what differs is compiled.
        """
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
        names = {name for name in listed.stdout.split("\0") if name and (source / name).is_file()}
        for name in names:
            target = self.tree / name
            content = (source / name).read_bytes()
            if not target.exists() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                shutil.copymode(source / name, target)
        for folder in ("cc", "tf_recsync", "tests", "examples", "benchmarks"):
            for path in (self.tree / folder).rglob("*"):
                known = str(path.relative_to(self.tree)) in names
                if path.suffix in (".py", ".cc", ".h") and not known:
                    path.unlink()

    def build(self, environ: Mapping[str, str]) -> None:
        """Compiles what has changed in the copy.

        Raises:
          subprocess.CalledProcessError: It does not compile; `output` says why.
        """
        command = [self.python, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(
            command,
            cwd=self.tree,
            env={**os.environ, **environ},
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def tensorflow_headers() -> str:
    """The folder of TensorFlow's headers, without importing it."""
    import importlib.util

    spec = importlib.util.find_spec("tensorflow")
    if spec is None:
        raise RuntimeError(
            f"{sys.executable} has no TensorFlow; run the script with .venv/bin/python"
        )
    return spec.submodule_search_locations[0] + "/include"


def compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The C++ compiler."""
    return shlex.split(environ.get("CXX", "g++"))
