"""The op library, loaded."""

from __future__ import annotations

import pathlib

import tensorflow as tf

_LIBRARY = pathlib.Path(__file__).resolve().parent.parent / "_recsync_ops.so"

if not _LIBRARY.exists():
    raise ImportError(f"tf_recsync's op library {_LIBRARY} was not built; reinstall tf_recsync.")
library = tf.load_op_library(str(_LIBRARY))
