"""The devices of servers, and how what lies there comes to the coordinator."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging


def device_of(job: str, index: int) -> str:
    """The name of a server, as TensorFlow's devices begin with it.

    Args:
      job: "worker", "ps" or "chief".
      index: Its number in the job, from 0.
    """
    return f"/job:{job}/replica:0/task:{index}"


def processor_of(job: str, index: int) -> str:
    """The device name of a server's processor: the only device that this package's ops run on."""
    return f"{device_of(job, index)}/device:CPU:0"


CHIEF = processor_of("chief", 0)  # This process's.


def fetch(tensors: Any) -> Any:
    """The values of tensors, some of which lie on servers.

    TensorFlow copies a tensor by operations that it makes for this one copy. The server keeps
    their kernels for the next time, which never comes: more than a kilobyte for each
    `tensor.numpy()`, a gigabyte a day where the coordinator asks a server ten times a second. A
    function, which has the tensors as its arguments, needs no such operations.

    Args:
        tensors: a nested structure of tensors; what is no tensor becomes an array as well.

    Returns:
        NumPy arrays in the same structure.

    Raises:
        tf.errors.OpError: a server is gone.
    """
    flat = tf.nest.flatten(tensors)
    away = [tensor for tensor in flat if not _is_here(tensor)]
    if away:
        brought = iter(_bring(away))
        flat = [tensor if _is_here(tensor) else next(brought) for tensor in flat]
    return tf.nest.pack_sequence_as(tensors, [np.asarray(tensor) for tensor in flat])


def _is_here(value: Any) -> bool:
    there = ("/job:worker", "/job:ps")
    return not isinstance(value, tf.Tensor) or not value.device.startswith(there)


def _bring(tensors: list[tf.Tensor]) -> list[Any]:
    try:
        with tf.device(CHIEF):
            return _copier(tuple(tensor.dtype for tensor in tensors))(*tensors)
    except tf.errors.OpError as error:
        # A copy by itself tells whose loss it was as callers expect it. Not by NumPy: of a tensor
        # of a server that is being cut off it makes a ValueError.
        logging.debug("tensors could not be fetched by a function: %s", error)
        return [tensor.numpy() for tensor in tensors]


@functools.lru_cache(maxsize=256)
def _copier(dtypes: tuple[tf.DType, ...]) -> tf.types.experimental.ConcreteFunction:
    """Copies tensors of these types to this process."""

    def copy(*tensors):
        with tf.device(CHIEF):
            return [tf.identity(tensor) for tensor in tensors]

    with tf.init_scope(), tf.device(None):
        function = tf.function(copy, autograph=False)
        return function.get_concrete_function(*[tf.TensorSpec(None, dtype) for dtype in dtypes])
