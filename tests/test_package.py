"""What users get: the wheel, the README's example, and versions that agree everywhere."""

import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import zipfile

import pytest

import tf_recsync
from tf_recsync import _compatibility

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()


def run(command: list, cwd: pathlib.Path, **environ: str) -> str:
    """Runs a command without the variables that point at this checkout; gives its output."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TF_CONFIG")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "TF_CPP_MIN_LOG_LEVEL": "2", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The wheel, built from this checkout as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    # Not into the checkout's build/, where modules of earlier versions may lie.
    # Compiled objects are shared with it: they are those of the same sources.
    extra = folder / "build.cfg"
    extra.write_text(f"[build]\nbuild_base = {folder}/build\n[egg_info]\negg_base = {folder}\n")
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        + ["--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", ROOT],
        folder,
        DIST_EXTRA_CONFIG=str(extra),
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory) -> pathlib.Path:
    """The Python of an environment that has the wheel, and TensorFlow from this one."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    python = folder / "venv/bin/python"
    run(
        [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet"]
        + ["--disable-pip-version-check", "--no-deps", "--no-index", wheel],
        folder,
    )
    tensorflow = importlib.util.find_spec("tensorflow").submodule_search_locations[0]
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths.append(str(pathlib.Path(tensorflow).parent))
    # Folders named in a .pth file come last on the path, and .pth files in them,
    # such as that of an editable install, are not read.
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    pathlib.Path(site.strip(), "dependencies.pth").write_text("\n".join(dict.fromkeys(paths)))
    return python


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        requirements = [
            line.removeprefix("Requires-Dist: ")
            for name in names
            if name.endswith(".dist-info/METADATA")
            for line in archive.read(name).decode().splitlines()
            if line.startswith("Requires-Dist: ")
        ]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert re.fullmatch(rf"tf_recsync-[0-9.]+-{tag}-{tag}-linux_\w+\.whl", wheel.name)
    engine = "tf_recsync/_engine" + sysconfig.get_config_var("EXT_SUFFIX")
    in_tree = {str(p.relative_to(ROOT)) for p in (ROOT / "tf_recsync").rglob("*.py")}
    packaged = {name for name in names if not re.match(r"tf_recsync-[0-9.]+\.dist-info/", name)}
    libraries = {"tf_recsync/_recsync_ops.so", "tf_recsync/_recsync_transport.so"}
    assert packaged == in_tree | libraries | {engine}
    assert any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in names)
    # A plain install brings no TensorFlow, so that CPU machines need not get the GPU build.
    plain = [requirement for requirement in requirements if "extra ==" not in requirement]
    assert not any(requirement.startswith("tensorflow") for requirement in plain)


@pytest.fixture(scope="module")
def installed(clean_python, tmp_path_factory) -> str:
    """What a program prints that uses the installed wheel outside of the source tree."""
    program = """
        import pathlib, sys
        import numpy as np
        import keras
        import tensorflow as tf
        import tf_recsync as recsync
        from tf_recsync import ops

        assert pathlib.Path(recsync.__file__).is_relative_to(sys.prefix), recsync.__file__
        w = keras.Variable([1.0, 2.0])
        optimizer = recsync.optimizers.SwapAdagrad(
            0.5, initial_accumulator_value=0.0, swap=recsync.Swap(period=2, decay=0.25)
        )
        optimizer.apply([np.float32([3.0, -4.0])], [w])  # v = g^2
        np.testing.assert_allclose(w.numpy(), [0.5, 2.5], rtol=1e-6)
        optimizer.apply([np.float32([1.5, -2.0])], [w])  # v = g^2 / 4 + g^2 / 4
        np.testing.assert_allclose(w.numpy(), [0.5 - 0.125**0.5, 2.5 + 0.125**0.5], rtol=1e-6)
        print("stepped")

        with recsync.LocalCluster(workers=1, ps=1) as cluster:
            cluster.connect()
            with tf.device("/job:ps/task:0"):
                step = tf.Variable(41, dtype=tf.int64)
            with tf.device("/job:worker/task:0"):
                print("the step is", int(ops.next_global_step(step.handle)))
    """
    folder = tmp_path_factory.mktemp("outside")
    return run([clean_python, "-c", textwrap.dedent(program)], folder)


def test_the_installed_wheel_takes_a_step_outside_of_the_source_tree(installed):
    assert "stepped" in installed


def test_a_cluster_runs_from_the_installed_wheel(installed):
    assert "the step is 42" in installed


def test_the_readme_example_runs_as_it_stands(tmp_path):
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(example.splitlines()) <= 30
    script = tmp_path / "example.py"
    script.write_text(example)
    output = run([sys.executable, script], tmp_path, PYTHONPATH=str(ROOT))
    measured = re.search(r"^mean staleness: ([0-9.]+)", output, re.MULTILINE)
    # Two workers, so between alone (1) and well beyond the two of theory.
    assert measured and 1.0 <= float(measured[1]) < 4.0, output
    assert "Traceback" not in output


def versions_table() -> dict[str, str]:
    """The rows of the documentation's table of versions: what is needed, by name."""
    page = (ROOT / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) +\| ([^|]+?) +\|", page, re.MULTILINE)
    return dict(rows)


def test_the_versions_agree_everywhere():
    minimum = ".".join(map(str, _compatibility.TENSORFLOW_MINIMUM))
    below = ".".join(map(str, _compatibility.TENSORFLOW_BELOW))
    extras = PROJECT["project"]["optional-dependencies"]
    for name in ("tensorflow", "tensorflow-cpu"):
        assert extras[name] == [f"{name}>={minimum},<{below}"]
    assert f"tensorflow-cpu>={minimum},<{below}" in PROJECT["build-system"]["requires"]
    assert versions_table()["TensorFlow"] == f"{minimum}.x"


def test_python_and_keras_are_those_of_the_documentation():
    project = PROJECT["project"]
    assert versions_table()["Python"] == project["requires-python"].removeprefix(">=") + " or newer"
    (keras,) = (d for d in project["dependencies"] if d.startswith("keras"))
    assert versions_table()["Keras"] == keras.removeprefix("keras>=") + " or newer"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + project[
        "requires-python"
    ].removeprefix(">=").replace(".", "")


def test_the_package_says_its_version():
    assert PROJECT["project"]["dynamic"] == ["version"]
    found = importlib.metadata.version("tf_recsync")
    assert tf_recsync.__version__ == found


def test_a_source_distribution_has_all_files_of_the_repository(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no clone")
    copy = tmp_path / "copy"
    for name in listed.stdout.splitlines():
        # As of a commit: what was removed since is not there.
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    run([sys.executable, "setup.py", "--quiet", "sdist", f"--dist-dir={tmp_path}"], copy)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert expected <= names


def test_the_package_has_no_names_but_those_that_it_tells_of():
    names = [name for name, value in vars(tf_recsync).items() if not inspect.ismodule(value)]
    assert {name for name in names if not name.startswith("_")} <= set(tf_recsync.__all__)


def test_another_tensorflow_is_taken_if_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(_compatibility, "installed_tensorflow", lambda: ("tf-nightly", "9.1"))
    with pytest.raises(ImportError, match="tf-nightly 9.1 is installed"):
        _compatibility.check_tensorflow()
    monkeypatch.setenv(_compatibility.ANY_TENSORFLOW, "1")
    _compatibility.check_tensorflow()
