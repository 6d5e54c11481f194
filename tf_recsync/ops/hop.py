"""The ops of decentralized training, typed. Their documentation is that of the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tf_recsync.ops import library

PHASES = ("idle", "computing", "waiting for updates", "waiting for tokens", "waiting for acks")
FOREVER = tf.int64.max

# tf.function may leave it out where nobody uses its result.
if "RecsyncHopState" not in auto_control_deps_utils.RESOURCE_READ_OPS:
    auto_control_deps_utils.register_read_only_resource_op("RecsyncHopState")

for _name in (
    "RecsyncHopWorker",
    "RecsyncHopBegin",
    "RecsyncHopNext",
    "RecsyncHopEnter",
    "RecsyncHopSend",
    "RecsyncHopReceive",
    "RecsyncHopCollect",
    "RecsyncHopAsk",
    "RecsyncHopDeliver",
    "RecsyncHopCarried",
    "RecsyncHopSetNeighbor",
    "RecsyncHopCloseOutboxes",
    "RecsyncHopHold",
    "RecsyncHopInterrupt",
    "RecsyncHopState",
    "RecsyncHopEvents",
):
    tf.no_gradient(_name)


class Parcel(NamedTuple):
    """What a worker tells a neighbor; the outputs of `RecsyncHopCollect`."""

    progress: tf.Tensor
    iteration: tf.Tensor
    update: tf.Tensor
    open: tf.Tensor
    number: tf.Tensor


class RawState(NamedTuple):
    """The outputs of `RecsyncHopState`, as its documentation describes them."""

    iteration: tf.Tensor
    phase: tf.Tensor
    seconds: tf.Tensor
    missing: tf.Tensor
    tokens: tf.Tensor
    declined: tf.Tensor
    counts: tf.Tensor


worker = library.recsync_hop_worker
begin = library.recsync_hop_begin
enter = library.recsync_hop_enter
send = library.recsync_hop_send
ask = library.recsync_hop_ask
deliver = library.recsync_hop_deliver
carried = library.recsync_hop_carried
set_neighbor = library.recsync_hop_set_neighbor
close_outboxes = library.recsync_hop_close_outboxes
hold = library.recsync_hop_hold
interrupt = library.recsync_hop_interrupt
events = library.recsync_hop_events


def next_iteration(handle: tf.Tensor, variables: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Waits until the worker may enter its next iteration; gives its number."""
    return library.recsync_hop_next(handle, variables, T=dtype)


def receive(
    handle: tf.Tensor,
    iteration: tf.Tensor,
    base: tf.Tensor,
    variables: Sequence[tf.Tensor],
    relative: bool,
) -> tf.Operation:
    """Waits for the in-neighbors' updates and averages them into the variables."""
    return library.recsync_hop_receive(handle, iteration, base, variables, relative=relative)


def collect(handle: tf.Tensor, neighbor: tf.Tensor, dtype: tf.DType) -> Parcel:
    """Waits until the worker has something to tell a neighbor; the same until carried."""
    return Parcel(*library.recsync_hop_collect(handle, neighbor, T=dtype))


def state(handle: tf.Tensor) -> RawState:
    """Where a worker stands, and whom it waits for."""
    return RawState(*library.recsync_hop_state(handle))
