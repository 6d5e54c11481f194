"""How servers fetch tensors from each other: over connections of this package, or by gRPC."""

from __future__ import annotations

import functools
import pathlib

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


def load(transport: str) -> None:
    """Makes a transport known to TensorFlow in this process.

    Call it before the process's listeners are confined: it listens, too.
    """
    if transport == RECSYNC:
        _load_library()


@functools.cache
def _load_library() -> None:
    import tensorflow as tf

    tf.load_library(str(_LIBRARY))


def protocol(transport: str) -> str:
    """The protocol by which `tf.distribute.Server` knows a transport."""
    return _PROTOCOLS[transport]
