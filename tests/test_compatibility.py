"""The package refuses to load beside a TensorFlow that it was not built for."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tf_recsync import _compatibility

ROOT = pathlib.Path(__file__).resolve().parent.parent


def metadata(folder: pathlib.Path, name: str, version: str) -> None:
    """A distribution as pip leaves it, as far as importlib.metadata looks."""
    path = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    path.mkdir(parents=True)
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def import_beside(folder: pathlib.Path, statement: str) -> subprocess.CompletedProcess:
    """Runs a statement where `folder` and this checkout are all that is installed.

    Isolated (-I -S), so that the environment's own packages are not on the path:
    nothing has to be uninstalled, and an import of TensorFlow would fail at once.
    """
    program = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]; {statement}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=200
    )


def last_line(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


def test_importing_without_tensorflow_says_what_to_install(tmp_path):
    message = last_line(import_beside(tmp_path, "import tf_recsync"))
    assert message.startswith("ImportError: ")
    assert "no TensorFlow is installed" in message
    assert ">=2.21,<2.22" in message
    assert "pip install 'tf_recsync[tensorflow-cpu]'" in message


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("tensorflow-cpu", "2.20.0"),
        ("tensorflow-cpu", "2.22.0"),
        ("tensorflow", "2.9.1"),
        ("tensorflow", "3.0.0"),
        ("tensorflow", "1.21.0"),
        ("tensorflow", "2.22.0rc1"),
        ("tf-nightly", "2.22.0.dev20260301"),
        ("tensorflow-cpu", "unknown"),
    ],
)
def test_importing_beside_another_version_names_it_and_the_one_needed(tmp_path, name, version):
    metadata(tmp_path, name, version)
    message = last_line(import_beside(tmp_path, "import tf_recsync"))
    assert message.startswith("ImportError: ")
    assert f"{name} {version} is installed" in message
    assert ">=2.21,<2.22" in message


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("tensorflow-cpu", "2.21.0"),
        ("tensorflow", "2.21.3"),
        ("tensorflow", "2.21.0rc1"),
        ("tensorflow_cpu", "2.21.0+local.build"),
    ],
)
def test_the_versions_that_the_library_was_built_for_pass(tmp_path, name, version):
    metadata(tmp_path, name, version)
    # Only the check: there is no TensorFlow here to go on with.
    program = (
        "import importlib.util as u; "
        f"s = u.spec_from_file_location('c', {str(ROOT / 'tf_recsync/_compatibility.py')!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.check_tensorflow()"
    )
    result = import_beside(tmp_path, program)
    assert result.returncode == 0, result.stderr


def test_the_check_comes_before_tensorflow_is_imported(tmp_path):
    metadata(tmp_path, "tensorflow", "2.20.0")
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    (tmp_path / "keras.py").write_text("raise SystemExit('keras was imported')")
    assert "tensorflow 2.20.0 is installed" in last_line(
        import_beside(tmp_path, "import tf_recsync")
    )


def test_the_versions_checked_are_those_of_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = project["project"]["optional-dependencies"]
    build = next(r for r in project["build-system"]["requires"] if r.startswith("tensorflow"))
    for requirement in (*requirements["tensorflow"], *requirements["tensorflow-cpu"], build):
        bounds = re.fullmatch(r"[a-z-]+>=(\d+)\.(\d+),<(\d+)\.(\d+)", requirement).groups()
        numbers = tuple(int(b) for b in bounds)
        assert numbers[:2] == _compatibility.TENSORFLOW_MINIMUM
        assert numbers[2:] == _compatibility.TENSORFLOW_BELOW


def test_the_installed_tensorflow_is_found_by_its_distribution():
    name, version = _compatibility.installed_tensorflow()
    assert name in ("tensorflow", "tensorflow-cpu")
    import tensorflow as tf

    assert version == tf.__version__
