"""Builds the op library and the engine module with the installed TensorFlow.

Everything else is in pyproject.toml. A source is compiled again only when it,
a header that it includes, or a flag has changed; objects stay in build/, where all
libraries share those of the engine. TensorFlow's headers are compiled once.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import runpy
import shlex
import subprocess
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
TENSORFLOW_HEADERS = "cc/tensorflow_headers.h"


def sources(*folders: str) -> list[str]:
    """The C++ sources of some folders, without the tests."""
    found = []
    for folder in folders:
        found += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "cc" / folder).glob("*.cc"))
    return [path for path in found if not path.endswith("_test.cc")]


def uses_tensorflow(source: str) -> bool:
    """Whether a source includes TensorFlow's headers."""
    return source.startswith(("cc/kernels/", "cc/ops/", "cc/transport/"))


def objects_of(command: list[str]) -> pathlib.Path:
    """The folder for what is compiled by a command."""
    key = hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]
    return ROOT / "build" / "objects" / key


class OpLibrary(Extension):
    """A shared library that TensorFlow loads; no Python module."""


class ServerLibrary(OpLibrary):
    """One that needs TensorFlow's servers, too."""


class BuildExt(build_ext):
    """Compiles with TensorFlow's own flags, incrementally and in parallel."""

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] in ("_recsync_ops", "_recsync_transport"):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        try:
            import pybind11
            import tensorflow as tf
        except ImportError as error:
            raise RuntimeError(
                f"building tf_recsync needs tensorflow and pybind11: {error}"
            ) from error
        # The check that the package does when it is imported.
        runpy.run_path(str(ROOT / "tf_recsync" / "_compatibility.py"))["check_tensorflow"]()
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        # TensorFlow's headers count as system headers: their warnings are not ours.
        flags = [f.replace("-I", "-isystem", 1) for f in tf.sysconfig.get_compile_flags()]
        flags += ["-fPIC", "-O3", "-fno-math-errno", "-fvisibility=hidden", f"-I{ROOT}"]
        # Products are rounded before they are added, on all processors as on x86-64.
        flags += ["-ffp-contract=off"]
        flags += ["-DEIGEN_USE_THREADS", "-Wall", "-Wno-sign-compare", "-pthread"]
        link = ["-shared", "-pthread"]
        if isinstance(ext, OpLibrary):
            link += tf.sysconfig.get_link_flags()
            if isinstance(ext, ServerLibrary):
                link.append("-l:libtensorflow_cc.so.2")
        else:
            link += ["-ldl"]
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))
        command = [*compiler, *flags]
        # What TensorFlow's servers include beside its own headers.
        external = pathlib.Path(tf.sysconfig.get_include(), "external")
        servers = [
            f"-isystem{external / folder}"
            for folder in ("com_github_grpc_grpc/include", "farmhash_archive/src")
        ]
        python = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            # The headers come first, and what needs none of them beside.
            headers = None
            if isinstance(ext, OpLibrary):
                headers = pool.submit(self._compile_headers, command)
            compiled = {}
            for source in sorted(ext.sources, key=uses_tensorflow):
                own = command
                if source.startswith("cc/python/"):
                    own = [*command, *python]
                elif uses_tensorflow(source):
                    if source.startswith("cc/transport/"):
                        own = [*command, *servers]
                    own = [*own, "-include", str(headers.result())]
                compiled[source] = pool.submit(self._compile, own, source)
            objects = [compiled[source].result() for source in ext.sources]
        output = pathlib.Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        newest = max(path.stat().st_mtime for path in objects)
        if output.exists() and output.stat().st_mtime >= newest and not self.force:
            return
        # Linked beside and moved: a process may have the old library loaded.
        linked = output.with_suffix(".linking")
        subprocess.check_call([*compiler, *map(str, objects), *link, "-o", str(linked)])
        linked.replace(output)

    def _compile(self, command: list[str], source: str) -> pathlib.Path:
        target = objects_of(command) / (source.replace("/", "_") + ".o")
        headers = command[command.index("-include") + 1] if "-include" in command else None
        # The compiler does not name what it read from a compiled header.
        read = [f"{headers}.gch"] if headers else []
        self._run(command, ROOT / source, target, ["-MMD", "-c"], read)
        return target

    def _compile_headers(self, command: list[str]) -> pathlib.Path:
        """Compiles TensorFlow's headers; gives the header to include, beside which that lies."""
        include = objects_of(command) / pathlib.Path(TENSORFLOW_HEADERS).name
        include.parent.mkdir(parents=True, exist_ok=True)
        if not include.exists():  # For compilers that don't find, or don't take, the compiled one.
            include.write_text(f'#include "{TENSORFLOW_HEADERS}"\n')
        target = include.with_name(f"{include.name}.gch")
        self._run(command, ROOT / TENSORFLOW_HEADERS, target, ["-MD", "-x", "c++-header"], [])
        return include

    @staticmethod
    def _run(
        command: list[str],
        source: pathlib.Path,
        target: pathlib.Path,
        flags: list[str],
        read: list[str],
    ) -> None:
        """Runs the compiler, unless `target` is newer than all that it read, and than `read`."""
        depends = target.with_suffix(".d")
        if target.exists() and depends.exists():
            names = shlex.split(depends.read_text().replace("\\\n", " ").partition(":")[2])
            built = target.stat().st_mtime
            if all(os.path.exists(n) and os.stat(n).st_mtime <= built for n in [*names, *read]):
                return
        target.parent.mkdir(parents=True, exist_ok=True)
        output = ["-MF", str(depends), str(source), "-o", str(target)]
        subprocess.check_call([*command, *flags, *output])


setup(
    ext_modules=[
        OpLibrary("tf_recsync._recsync_ops", sources("engine", "ops", "kernels")),
        ServerLibrary("tf_recsync._recsync_transport", sources("engine", "transport")),
        Extension("tf_recsync._engine", sources("engine", "simulation", "python")),
    ],
    cmdclass={"build_ext": BuildExt},
)
