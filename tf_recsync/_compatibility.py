"""Refuses to load beside a TensorFlow that the op library was not built for."""

from __future__ import annotations

import importlib.metadata
import os

# What setup.py checks, too. The requirements in pyproject.toml say the same; a test compares them.
TENSORFLOW_MINIMUM = (2, 21)
TENSORFLOW_BELOW = (2, 22)
# Of scripts/other_tensorflow.sh: "1" builds with, and loads beside, any version.
ANY_TENSORFLOW = "TF_RECSYNC_ANY_TENSORFLOW"
_DISTRIBUTIONS = (
    *("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
    *("tf-nightly", "tf-nightly-cpu"),
)


def installed_tensorflow() -> tuple[str, str] | None:
    """The name and version of the installed TensorFlow distribution, or None."""
    for name in _DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_tensorflow() -> None:
    """Raises ImportError, naming what is installed and what is needed.

    Reads the installed distribution's metadata, before TensorFlow is imported:
    an op library of another version would fail with `undefined symbol`.
    """
    least, below = (".".join(map(str, v)) for v in (TENSORFLOW_MINIMUM, TENSORFLOW_BELOW))
    needed = f"TensorFlow >={least},<{below} (pip install 'tf_recsync[tensorflow-cpu]')"
    found = installed_tensorflow()
    if found is None:
        raise ImportError(f"tf_recsync needs {needed}; no TensorFlow is installed.")
    name, version = found
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        number = (0, 0)
    if os.environ.get(ANY_TENSORFLOW) == "1":
        return
    if not TENSORFLOW_MINIMUM <= number < TENSORFLOW_BELOW:
        raise ImportError(f"tf_recsync needs {needed}; {name} {version} is installed.")
