"""Which servers have an artificial link, while a step is traced in this thread.

Messages between workers and a server pass its link, one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import tensorflow as tf

from tf_recsync import ops

_local = threading.local()


@contextlib.contextmanager
def limited(bandwidths: Mapping[str, float]) -> Iterator[None]:
    """Inside, messages of some servers take their time.

    Args:
        bandwidths: bytes per second, by the server's device.
    """
    previous = getattr(_local, "bandwidths", {})
    _local.bandwidths = dict(bandwidths)
    try:
        yield
    finally:
        _local.bandwidths = previous


def is_limited(device: str) -> bool:
    """Whether the link of a server is limited."""
    return device in getattr(_local, "bandwidths", {})


def received(message: tf.Tensor) -> tf.Tensor:
    """A copy of a worker's message on the server whose device scope this is."""
    return passed(tf.identity(message))


def passed(message: tf.Tensor) -> tf.Tensor:
    """What is on a server, and goes to a worker or comes from one, once it has passed the link.

    Args:
        message: a tensor on the server: before it is sent, or when it has arrived.

    Returns:
        The same; `message` itself if the server's link is not limited.
    """
    bandwidth = getattr(_local, "bandwidths", {}).get(message.device)
    if bandwidth is None:
        return message
    # It waits for the message and for nothing that happens on the worker.
    with tf.control_dependencies(None), tf.device(message.device):
        return ops.transfer(message, bandwidth)
