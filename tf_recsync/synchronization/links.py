"""Which servers have an artificial link, while a step is traced in this thread.

Messages between workers and a server pass its link, one after the other, and so they do the
worker's, if that is limited.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping

import tensorflow as tf

from tf_recsync import ops
from tf_recsync._instead import instead

_local = threading.local()


def limited(bandwidths: Mapping[str, float]) -> contextlib.AbstractContextManager[None]:
    """Inside, messages of some servers take their time.

    Args:
        bandwidths: bytes per second, by the server's device.
    """
    return instead(_local, "bandwidths", dict(bandwidths))


def is_limited(device: str) -> bool:
    """Whether the link of a server is limited."""
    return device in getattr(_local, "bandwidths", {})


def of_trainer(worker: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Inside, what a step sends to servers, and gets from them, passes its trainer's link, too.

    Args:
        worker: the trainer's index, an int64 scalar.
    """
    return instead(_local, "trainer", of_worker(getattr(_local, "bandwidths", {}), worker))


def of_worker(limits: Mapping[str, float], worker: tf.Tensor) -> tf.Tensor | None:
    """The limit of the worker that runs a function which was traced for all.

    Args:
        limits: by device.
        worker: its index, an int64 scalar.

    Returns:
        A float64 scalar, infinity if it has no limit; None if no worker has one.
    """
    specs = {tf.DeviceSpec.from_string(device): limit for device, limit in limits.items()}
    known = {spec.task: limit for spec, limit in specs.items() if spec.job == "worker"}
    if not known:
        return None
    each = [known.get(index, math.inf) for index in range(max(known) + 2)]
    return tf.gather(tf.constant(each, tf.float64), tf.minimum(worker, len(each) - 1))


def received(message: tf.Tensor) -> tf.Tensor:
    """A copy of a worker's message on the server whose device scope this is."""
    copy = tf.identity(message)
    if copy.device and not message.device:
        copy = tf.identity(_passed_trainer(message))
    return passed(copy)


def arrived(message: tf.Tensor) -> tf.Tensor:
    """A copy of what a server has sent on the worker that runs the step."""
    copy = tf.identity(message)
    return _passed_trainer(copy) if message.device else copy


def _passed_trainer(message: tf.Tensor) -> tf.Tensor:
    """What is on the worker, once it has passed its link, if that is limited."""
    bandwidth = getattr(_local, "trainer", None)
    if bandwidth is None:
        return message
    with tf.control_dependencies(None), tf.device(None):
        return ops.transfer(message, bandwidth)


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
