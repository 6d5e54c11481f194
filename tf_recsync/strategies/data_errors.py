"""What is wrong with data that comes from readers, in words."""

from __future__ import annotations

import tensorflow as tf


def forgotten() -> RuntimeError:
    """The service of the readers no longer knows the data of a pass."""
    return RuntimeError(
        "reader:0 was started again, and has forgotten what was trained on; call fit again"
    )


def check(error: tf.errors.OpError) -> None:
    """Raises an error that says what is wrong with data from readers, if that is what is wrong."""
    is_forgotten = ("iteration client" in error.message and "dispatcher" in error.message) or (
        "not found" in error.message
        and ("Dataset id recsync_" in error.message or "Iteration id" in error.message)
    )
    if is_forgotten:
        raise forgotten() from error
    if "Could not find callback" in error.message:
        raise ValueError(
            "the dataset must not call Python (from_generator, py_function, numpy_function): "
            "the readers that run it are other processes"
        ) from error
    if "split provider" in error.message:
        raise ValueError(
            "the dataset can't be divided among several readers, as the elements of its source "
            f"can't be counted off; use one reader, or another source: {error.message}"
        ) from error
