"""What TensorFlow's errors say, without what they tell besides."""

from __future__ import annotations

import os
import re
import sysconfig

import keras
import tensorflow as tf
from absl import logging

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Whoever wrote these did not write the model.
_OTHERS = (
    _PACKAGE,
    os.path.dirname(keras.__file__) + os.sep,
    os.path.dirname(tf.__file__) + os.sep,
    sysconfig.get_paths()["purelib"] + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<",
)
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line \d+, in .+')
# The first of several errors of one call.
_FIRST = re.compile(
    r"\d+ root error\(s\) found\.\s*\(0\) [A-Z_]+: (.*?)(\n\s*\(1\) .*)?", re.DOTALL
)


def plain(error: tf.errors.OpError, worker: int) -> tf.errors.OpError:
    """An error of the same class that says what is wrong, and on which worker, and nothing else.

    What TensorFlow tells besides, of nodes, of each function that called them and the same again
    as gRPC passes it on, is logged at verbosity 1.

    Args:
        error: as the call raised it.
        worker: whose call it was.
    """
    if type(error) is tf.errors.OpError:
        return error  # Its class does not say what it is.
    logging.vlog(1, "worker:%d: %s", worker, error.message)
    said, made_at = _read(error.message)
    where = f"\nThe operation was made at: {made_at}" if made_at else ""
    return type(error)(None, None, f"On worker:{worker}: {said}{where}")


def reason(error: Exception) -> str:
    """What an error says, in one line."""
    message = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return _read(message)[0].partition("\n")[0]


def _read(message: str) -> tuple[str, str]:
    """What a message says, and which line of the user's own made the operation; "" for none."""
    message = message.partition("\nAdditional GRPC error information")[0]
    lines = message.split("\n")
    made_at, is_inside = "", False
    while lines:
        line = lines[0]
        frame = _FRAME.fullmatch(line)
        if frame and frame["file"].startswith(_PACKAGE):
            is_inside = True
        elif line.startswith("Detected at node "):
            is_inside = False  # Where `fit` was called comes first, and is known.
        if frame and is_inside and not frame["file"].startswith(_OTHERS):
            made_at = line.strip()
        starts = ("Graph execution error:", "Detected at node ", "<stack traces unavailable>")
        if not frame and line.strip() and not line.startswith(starts):
            break
        lines.pop(0)
    said = "\n".join(line for line in lines if not line.startswith("\t [["))
    first = _FIRST.fullmatch(said)
    return (first[1] if first else said).strip(), made_at
