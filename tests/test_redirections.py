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


# Each import of TensorFlow takes seconds of processor time: what needs a process of its own is done
# in one, and tests read what it printed.
LOGS_OF_OTHER_THINGS = """if True:
    import tensorflow as tf
    from tf_recsync.cluster import redirections
    for _ in range(2):
        redirections.filter_logs()
    try:
        tf.io.decode_jpeg(b"no picture")
    except tf.errors.InvalidArgumentError:
        print("an error", flush=True)
    list(tf.data.Dataset.range(3))
"""
CALLS_THAT_ARE_LEFT_AND_REDIRECTED = """if True:
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
    _engine.keep_python_running(connected=True)  # Which asks no switch.
    libraries = {line.split()[-1] for line in open("/proc/self/maps")}
    found = any("lib_pywrap_tensorflow_common" in name for name in libraries)
    print("found:", found, flush=True)
    del os.environ["TF_RECSYNC_REDIRECT_CALLS"]
"""
AT_ONCE = "\nimport os; os._exit(0)"  # As there is a server.


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What a program prints whose TensorFlow is where `pip install --target` would have it, without
    a folder "site-packages" in the path, and whose calls are left as they are at first."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in PACKAGES.iterdir():
        (folder / entry.name).symlink_to(entry)
    return run(
        CALLS_THAT_ARE_LEFT_AND_REDIRECTED + LOGS_OF_OTHER_THINGS + AT_ONCE,
        PYTHONPATH=f"{folder}:{SOURCES}",
        TF_RECSYNC_REDIRECT_CALLS="0",
        TF_CPP_MIN_LOG_LEVEL="0",
    )


def test_tensorflow_is_found_wherever_it_is_installed(printed):
    assert "found: True" in printed


def test_calls_are_left_as_they_are_where_the_environment_says_so(printed):
    assert "confined to ''" in printed
    assert printed.count("TF_RECSYNC_REDIRECT_CALLS=0: TensorFlow's servers") == 1
    assert printed.count("TF_RECSYNC_REDIRECT_CALLS=0: a server that does not answer") == 1


@pytest.mark.parametrize(("level", "written"), [("0", True), ("2", False)])
def test_what_tensorflow_logs_about_other_things_is_written_as_before(request, level, written):
    if level == "0":
        printed = request.getfixturevalue("printed")
    else:
        path = f"{PACKAGES}:{SOURCES}"
        printed = run(LOGS_OF_OTHER_THINGS, PYTHONPATH=path, TF_CPP_MIN_LOG_LEVEL=level)
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
