"""Functions that are made while a server is taken in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf
from absl import logging

_ATTEMPTS, _RETRY_SECONDS = 10, 0.2
_Made = TypeVar("_Made")


def making_functions(make: Callable[[], _Made]) -> _Made:
    """What `make` returns, which traces functions; it is called again if a server was taken in.

    TensorFlow sends each function to all servers. While another thread takes one in, or leaves one
    out, it may not find the server.

    Args:
        make: makes something of functions; may be called again when it has failed.

    Raises:
        tf.errors.OpError: as `make` raises it, which has failed for another reason, or again and
            again.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return make()
        except tf.errors.InvalidArgumentError as error:
            if not is_without_client(error):
                raise
            logging.debug("Functions are made once more, as servers have changed: %s", error)
        time.sleep(_RETRY_SECONDS)
    return make()


def is_without_client(error: tf.errors.OpError) -> bool:
    """Whether something could not be sent to a server, as that was out of the cluster just then."""
    return "Client for target" in error.message and "not found" in error.message
