"""Builds the op library and the engine module with the installed TensorFlow.

Everything else is in pyproject.toml. A source is compiled again only when it,
a header that it includes, or a flag has changed; objects stay in build/.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import shlex
import subprocess
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
REQUIRED_TENSORFLOW = "2.21"


def sources(*folders: str) -> list[str]:
    """The C++ sources of some folders, without the tests."""
    found = []
    for folder in folders:
        found += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "cc" / folder).glob("*.cc"))
    return [path for path in found if not path.endswith("_test.cc")]


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
                f"building tf_recsync needs tensorflow {REQUIRED_TENSORFLOW} and pybind11: {error}"
            ) from error
        if not tf.__version__.startswith(REQUIRED_TENSORFLOW + "."):
            raise RuntimeError(
                f"tf_recsync is built against TensorFlow {REQUIRED_TENSORFLOW}, "
                f"found {tf.__version__}"
            )
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        # TensorFlow's headers count as system headers: their warnings are not ours.
        flags = [f.replace("-I", "-isystem", 1) for f in tf.sysconfig.get_compile_flags()]
        flags += ["-fPIC", "-O3", "-fno-math-errno", "-fvisibility=hidden", f"-I{ROOT}"]
        flags += ["-DEIGEN_USE_THREADS", "-Wall", "-Wno-sign-compare", "-pthread"]
        link = ["-shared", "-pthread"]
        if isinstance(ext, OpLibrary):
            link += tf.sysconfig.get_link_flags()
            if isinstance(ext, ServerLibrary):
                link.append("-l:libtensorflow_cc.so.2")
        else:
            flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
            link += ["-ldl"]
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda s: self._compile(compiler, flags, s), ext.sources))
        output = pathlib.Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        newest = max(path.stat().st_mtime for path in objects)
        if output.exists() and output.stat().st_mtime >= newest and not self.force:
            return
        # Linked beside and moved: a process may have the old library loaded.
        linked = output.with_suffix(".linking")
        subprocess.check_call([*compiler, *map(str, objects), *link, "-o", str(linked)])
        linked.replace(output)

    def _compile(self, compiler: list[str], flags: list[str], source: str) -> pathlib.Path:
        command = [*compiler, *flags]
        key = hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]
        target = ROOT / "build" / "objects" / key / (source.replace("/", "_") + ".o")
        depends = target.with_suffix(".d")
        if not self._is_current(target, depends):
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.check_call(
                [*command, "-MMD", "-MF", str(depends), "-c", str(ROOT / source), "-o", str(target)]
            )
        return target

    @staticmethod
    def _is_current(target: pathlib.Path, depends: pathlib.Path) -> bool:
        """Whether `target` is newer than all that the compiler read for it."""
        if not target.exists() or not depends.exists():
            return False
        built = target.stat().st_mtime
        names = shlex.split(depends.read_text().replace("\\\n", " ").partition(":")[2])
        return all(os.path.exists(n) and os.stat(n).st_mtime <= built for n in names)


setup(
    ext_modules=[
        OpLibrary("tf_recsync._recsync_ops", sources("engine", "ops", "kernels")),
        ServerLibrary("tf_recsync._recsync_transport", sources("engine", "transport")),
        Extension("tf_recsync._engine", sources("engine", "python")),
    ],
    cmdclass={"build_ext": BuildExt},
)
