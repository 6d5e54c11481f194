"""The op library, loaded."""

from __future__ import annotations

import ctypes
import pathlib

import tensorflow as tf

_LIBRARY = pathlib.Path(__file__).resolve().parent.parent / "_recsync_ops.so"

if not _LIBRARY.exists():
    raise ImportError(f"tf_recsync's op library {_LIBRARY} was not built; reinstall tf_recsync.")
library = tf.load_op_library(str(_LIBRARY))
_native = ctypes.CDLL(str(_LIBRARY))  # The same one, for what is no op.


def filter_logs() -> None:
    """Keeps out what TensorFlow logs, in this process, about servers that are lost.

    It does so for each function that is traced or dropped, in several lines. What matters of it is
    an exception, or a line of this package. All else that TensorFlow logs is written as before.
    """
    _native.RecsyncFilterLogs()
