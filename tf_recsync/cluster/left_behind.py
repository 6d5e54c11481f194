"""What was made before this process connected to a cluster, and can't be used after it."""

from __future__ import annotations

import gc

import tensorflow as tf
from absl import logging
from tensorflow.python.eager import context

_NAMED = 5  # Variables in the warning, at most.


def warn() -> None:
    """Warns of variables and iterators that there are; call it before the first connection."""
    if context.context()._context_handle is None:
        return  # TensorFlow has run nothing yet.
    if not _here():
        return
    gc.collect()  # Models refer to themselves, and live on for a while when nobody needs them.
    found = _here()
    variables = [o for o in found if isinstance(o, tf.Variable)]
    iterators = len(found) - len(variables)
    names = sorted({variable.name.partition(":")[0] for variable in variables})
    parts = names[:_NAMED]
    if len(names) > _NAMED:
        parts.append(f"{len(names) - _NAMED} more")
    if iterators:
        parts.append("an iterator of a dataset" if iterators == 1 else f"{iterators} iterators")
    if not parts:
        return
    logging.warning(
        "Variables and iterators that were made before this process connected to the cluster can't "
        "be used from now on, because TensorFlow gives this process's devices other names: %s. "
        "Make the strategy first, and models after it, or call use_final_device_names() in the "
        "first lines of the program, with the cluster's bind_address if it has one. Datasets from "
        "before can be given to fit, evaluate and predict of a model that is made in the "
        "strategy's scope().",
        " and ".join([*filter(None, [", ".join(parts[:-1])]), parts[-1]]),
    )


def _here() -> list[tf.Variable | tf.data.Iterator]:
    """The variables and iterators on this process's devices, which are about to be renamed."""
    # Not isinstance, which asks objects that stand for others what they are.
    found = [o for o in gc.get_objects() if issubclass(type(o), (tf.Variable, tf.data.Iterator))]
    return [o for o in found if "/job:localhost/" in (_device_of(o) or "")]


def _device_of(owner: tf.Variable | tf.data.Iterator) -> str | None:
    try:
        if isinstance(owner, tf.Variable):
            return owner.handle.device
        return owner._iterator_resource.device
    except (AttributeError, ValueError):  # Of a graph, or not made yet.
        return None
