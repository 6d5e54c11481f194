"""What was made before this process connected to a cluster, and can't be used after it."""

from __future__ import annotations

import gc

import tensorflow as tf
from absl import logging
from tensorflow.python.eager import context

_NAMED = 5  # Variables in the warning, at most.


def warn() -> None:
    """Warns of variables that there are; call it before the first connection."""
    if context.context()._context_handle is None:
        return  # TensorFlow has run nothing yet.
    if not _variables():
        return
    gc.collect()  # Models refer to themselves, and live on for a while when nobody needs them.
    names = sorted({variable.name.partition(":")[0] for variable in _variables()})
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    logging.warning(
        "Variables that were made before this process connected to the cluster can't be used from "
        "now on, because TensorFlow gives this process's devices other names: %s%s. Make the "
        "strategy first, and models after it, or call use_final_device_names() in the first lines "
        "of the program. Datasets from before can be given to fit, evaluate "
        "and predict of a model that is made in the strategy's scope().",
        ", ".join(names[:_NAMED]),
        more,
    )


def _variables() -> list[tf.Variable]:
    """The variables on this process's devices."""
    # Not isinstance, which asks objects that stand for others what they are.
    found = [o for o in gc.get_objects() if issubclass(type(o), tf.Variable)]
    return [v for v in found if "/job:localhost/" in (_device_of(v) or "")]


def _device_of(variable: tf.Variable) -> str | None:
    try:
        return variable.handle.device
    except (AttributeError, ValueError):  # Of a graph, or not made yet.
        return None
