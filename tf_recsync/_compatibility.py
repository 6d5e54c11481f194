"""Refuses to load beside a TensorFlow that the op library was not built for."""

from __future__ import annotations

import importlib.metadata

# Kept in step with the extras in pyproject.toml; a test compares them.
TENSORFLOW_MINIMUM = (2, 21)
TENSORFLOW_BELOW = (2, 22)
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly")


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
    needed = "TensorFlow >=2.21,<2.22 (pip install 'tf_recsync[tensorflow-cpu]')"
    found = installed_tensorflow()
    if found is None:
        raise ImportError(f"tf_recsync needs {needed}; no TensorFlow is installed.")
    name, version = found
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        number = (0, 0)
    if not TENSORFLOW_MINIMUM <= number < TENSORFLOW_BELOW:
        raise ImportError(f"tf_recsync needs {needed}; {name} {version} is installed.")
