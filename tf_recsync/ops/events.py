"""What workers do, for timelines: the numbers of `Activity` in cc/engine/event_log.h."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_recsync.ops._library import library

ACTIVITIES = (
    "compute",
    "wait for updates",
    "wait for tokens",
    "send",
    "receive",
    "jump",
    "wait for a batch",
    "pull",
    "push",
    "push and pull",
    "synchronize",
)


def note(
    log: tf.Tensor, iteration: tf.Tensor, did: Sequence[tuple[str, tf.Tensor, tf.Tensor]]
) -> tf.Operation:
    """Notes what a step of a worker did when.

    Args:
        log: the handle of the worker's log.
        iteration: the number of the step, an int64 scalar.
        did: of each activity, its name among ACTIVITIES, when it began, and when it ended; in
            seconds since the Unix epoch, float64 scalars.
    """
    return library.recsync_note_events(
        log,
        iteration,
        tf.stack([tf.stack(times) for _, *times in did]),
        activities=[ACTIVITIES.index(name) for name, *_ in did],
    )


@functools.cache
def take() -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Takes what a worker noted since the last time, from the handle of its log.

    It is traced once, not for each worker's device, and returns (the events, [n, 5]: activity,
    begin, end, iteration, -1; how many are missing among them), int64.
    """

    def take(log):
        return list(library.recsync_take_events(log))

    with tf.device(None):
        return tf.function(take, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.resource)
        )
