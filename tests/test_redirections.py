"""TensorFlow's calls that this package redirects, and the switch that turns that off."""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_recsync
from tf_recsync.cluster import redirections


def run(code: str, **environment: str) -> str:
    """What a Python program prints that has this environment and no packages but those it names."""
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
        capture_output=True,
        text=True,
        timeout=280,  # A busy machine may take minutes to import TensorFlow.
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


PACKAGES = pathlib.Path(tf.__file__).parent.parent
SOURCES = pathlib.Path(tf_recsync.__file__).parent.parent


def test_tensorflow_is_found_wherever_it_is_installed(tmp_path):
    # As `pip install --target` would have it, without a folder "site-packages" in the path.
    for entry in PACKAGES.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    code = """if True:
        import tensorflow
        from tf_recsync import _engine
        _engine.keep_python_running(connected=True)
        libraries = {line.split()[-1] for line in open("/proc/self/maps")}
        print(any("lib_pywrap_tensorflow_common" in name for name in libraries))
    """
    assert "True" in run(code, PYTHONPATH=f"{tmp_path}:{SOURCES}")


def test_calls_are_left_as_they_are_where_the_environment_says_so():
    code = """if True:
        import os, socket
        import tensorflow as tf
        from tf_recsync import _engine
        from tf_recsync.cluster import redirections
        for _ in range(2):
            redirections.confine_listeners("127.0.0.2")
            redirections.keep_python_running(connected=True)
        server = tf.distribute.Server({"worker": ["127.0.0.1:0"]}, job_name="worker", task_index=0)
        port = int(server.target.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        print("confined to", repr(_engine.confined_address()), flush=True)
        os._exit(0)
    """
    printed = run(
        code,
        PYTHONPATH=f"{PACKAGES}:{SOURCES}",
        TF_RECSYNC_REDIRECT_CALLS="0",
    )
    assert "confined to ''" in printed
    assert printed.count("TF_RECSYNC_REDIRECT_CALLS=0: TensorFlow's servers") == 1
    assert printed.count("TF_RECSYNC_REDIRECT_CALLS=0: a server that does not answer") == 1


@pytest.mark.parametrize(("level", "written"), [("0", True), ("2", False)])
def test_what_tensorflow_logs_about_other_things_is_written_as_before(level, written):
    code = """if True:
        import tensorflow as tf
        from tf_recsync.cluster import redirections
        for _ in range(2):
            redirections.filter_logs()
        try:
            tf.io.decode_jpeg(b"no picture")
        except tf.errors.InvalidArgumentError:
            print("an error")
        list(tf.data.Dataset.range(3))
    """
    printed = run(code, PYTHONPATH=f"{PACKAGES}:{SOURCES}", TF_CPP_MIN_LOG_LEVEL=level)
    assert "an error" in printed
    assert printed.count("INVALID_ARGUMENT: Unknown image file format") == written
    assert "OUT_OF_RANGE" not in printed


@pytest.mark.parametrize("value", ["no", "2", " "])
def test_other_values_of_the_switch_are_errors(monkeypatch, value):
    monkeypatch.setenv("TF_RECSYNC_REDIRECT_CALLS", value)
    with pytest.raises(ValueError, match=r"TF_RECSYNC_REDIRECT_CALLS must be 0 or 1, got"):
        redirections.confine_listeners("127.0.0.1")


@pytest.mark.parametrize(("value", "on"), [("", True), ("1", True), ("0", False)])
def test_the_switch_is_on_unless_it_is_turned_off(monkeypatch, value, on):
    monkeypatch.setenv("TF_RECSYNC_REDIRECT_CALLS", value)
    assert redirections.are_on() == on
