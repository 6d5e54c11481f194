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
    if not _variables() and not _iterators():
        return
    gc.collect()  # Models refer to themselves, and live on for a while when nobody needs them.
    names = sorted({variable.name.partition(":")[0] for variable in _variables()})
    iterators = len(_iterators())
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
        "first lines of the program. Datasets from before can be given to fit, evaluate and "
        "predict of a model that is made in the strategy's scope().",
        " and ".join([*filter(None, [", ".join(parts[:-1])]), parts[-1]]),
    )


def _variables() -> list[tf.Variable]:
    return _here(tf.Variable, "handle")


def _iterators() -> list[tf.data.Iterator]:
    return _here(tf.data.Iterator, "_iterator_resource")


def _here(kind: type, handle: str) -> list:
    """The objects of a kind on this process's devices, which are about to be renamed.

    Args:
        kind: their class.
        handle: the name of the attribute that tells the device.
    """
    # Not isinstance, which asks objects that stand for others what they are.
    found = [o for o in gc.get_objects() if issubclass(type(o), kind)]
    return [o for o in found if "/job:localhost/" in (_device_of(o, handle) or "")]


def _device_of(owner: object, handle: str) -> str | None:
    try:
        return getattr(owner, handle).device
    except (AttributeError, ValueError):  # Of a graph, or not made yet.
        return None
