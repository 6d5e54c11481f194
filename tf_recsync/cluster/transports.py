"""How servers fetch tensors from each other: over connections of this package, or by gRPC."""

from __future__ import annotations

import functools
import pathlib

from absl import logging

RECSYNC = "recsync"
GRPC = "grpc"
TRANSPORTS = (RECSYNC, GRPC)
DEFAULT = RECSYNC

_LIBRARY = pathlib.Path(__file__).resolve().parent.parent / "_recsync_transport.so"
_PROTOCOLS = {RECSYNC: "grpc+recsync", GRPC: "grpc"}


def check(transport: str) -> str:
    """Gives `transport` back.

    Raises:
      ValueError: There is no such transport.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {transport!r}")
    return transport


def load(transport: str) -> str:
    """Makes a transport known to TensorFlow in this process.

    Call it before the process's listeners are confined: it listens, too.

    Args:
      transport: One of `TRANSPORTS`.

    Returns:
      The transport that servers of this process can have: `GRPC`, of which a warning says why,
      where another one can't be loaded.
    """
    return _load_library() if transport == RECSYNC else transport


@functools.cache
def _load_library() -> str:
    import tensorflow as tf

    try:
        tf.load_library(str(_LIBRARY))
    except (tf.errors.OpError, OSError, RuntimeError) as error:
        logging.warning(
            "The servers of this process fetch tensors over gRPC, as the transport %r can't be "
            "loaded: %s",
            RECSYNC,
            getattr(error, "message", error),
        )
        return GRPC
    return RECSYNC


def protocol(transport: str) -> str:
    """The protocol by which `tf.distribute.Server` knows a transport."""
    return _PROTOCOLS[transport]
