"""Which devices have an artificial speed, while a training step is traced in this thread.

What a device computes takes the time that its floating-point operations need at that speed, one
thing after the other, whoever's step it is for: so trainers of a group compete for its servers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

import tensorflow as tf
from keras.src import backend

from tf_recsync import ops
from tf_recsync._instead import instead
from tf_recsync.placement import flops
from tf_recsync.synchronization import links

_local = threading.local()


def limited(speeds: Mapping[str, float]) -> contextlib.AbstractContextManager[None]:
    """Inside, what some devices compute takes its time.

    Args:
        speeds: floating-point operations per second, by device.
    """
    return instead(_local, "speeds", dict(speeds))


def of(device: str) -> float | None:
    """The speed of a server's device; None if it has no limit."""
    return getattr(_local, "speeds", {}).get(device)


def of_trainer(worker: tf.Tensor) -> tf.Tensor | None:
    """The speed of the trainer whose step it is, a float64 scalar; None if no trainer has a limit.

    Args:
        worker: its index, an int64 scalar.
    """
    return links.of_worker(getattr(_local, "speeds", {}), worker)


def computed(
    results: Sequence[tf.Tensor],
    made: Sequence[tf.Operation],
    speed: float | tf.Tensor,
    batch: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Results, once a device has had the time to compute them; call it in its device scope.

    Args:
        results: what was computed there.
        made: the operations that count.
        speed: the device's.
        batch: tensors on the device, of which the first with an unknown first dimension says how
            many examples there are, where that is not known before the step runs.
    """
    fixed, each = flops.per_example(made)
    if not results or fixed + each <= 0:
        return list(results)
    open_ones = [x for x in batch if x.shape.rank and x.shape[0] is None]
    examples = tf.cast(tf.shape(open_ones[0])[0], tf.float64) if each and open_ones else 1.0
    return ops.computed(list(results), fixed + each * examples, speed)


def on_server(
    device: str,
    results: Sequence[tf.Tensor | None],
    made: Sequence[tf.Operation],
    batch: Sequence[tf.Tensor],
) -> list[tf.Tensor | None]:
    """Results on a server, once it has had the time to compute them; as they are without a limit.

    Args:
        device: the server's.
        results: see `computed`, like the rest; None where there is none.
        made: as above.
        batch: as above.
    """
    speed = of(device)
    if speed is None:
        return list(results)
    known = [result for result in results if result is not None]
    with tf.control_dependencies(None), tf.device(device):
        done = computed(known, made, speed, batch)
    for result, own in zip(known, done, strict=True):
        mask = backend.get_keras_mask(result)
        if mask is not None and own is not result:
            backend.set_keras_mask(own, mask)
    left = iter(done)
    return [None if result is None else next(left) for result in results]


def gradients_on_server(
    device: str,
    of_inputs: Sequence[tf.Tensor | None],
    of_weights: Sequence[tf.Tensor | None],
    made: Sequence[tf.Operation],
    batch: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor | None], list[tf.Tensor | None]]:
    """The same of gradients; those of inputs by themselves, as nobody may want them.

    Args:
        device: the server's.
        of_inputs: the gradients of a layer's inputs; None where there is none.
        of_weights: those of its weights.
        made: the operations that computed both.
        batch: see `computed`.

    Returns:
        The gradients of inputs, and those of weights.
    """
    if of(device) is None:
        return list(of_inputs), list(of_weights)
    for_weights = flops.needed(made, [g for g in of_weights if g is not None])
    others = {op.name for op in for_weights}
    for_inputs = flops.needed(made, [g for g in of_inputs if g is not None])
    for_inputs = [op for op in for_inputs if op.name not in others]
    return (
        on_server(device, of_inputs, for_inputs, batch),
        on_server(device, of_weights, for_weights, batch),
    )
