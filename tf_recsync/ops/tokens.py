"""The ops of the token list, typed. Their documentation is that of the ops."""

from __future__ import annotations

from typing import Literal, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tf_recsync.ops import library

Gate = Literal["none", "step", "clock"]

# tf.function may leave it out where nobody uses its result.
if "RecsyncTokenListState" not in auto_control_deps_utils.RESOURCE_READ_OPS:
    auto_control_deps_utils.register_read_only_resource_op("RecsyncTokenListState")

for _name in (
    "RecsyncTokenList",
    "RecsyncTakeToken",
    "RecsyncLoseWorker",
    "RecsyncReissueTokens",
    "RecsyncLeaveTokens",
    "RecsyncReportStep",
    "RecsyncSeekTokens",
    "RecsyncTokenListState",
):
    tf.no_gradient(_name)


class Token(NamedTuple):
    """A token that a worker took.

    Attributes:
        index: int64 scalar, its place in the list.
        value: int64 scalar, the global step that its gradient is meant for.
        ticket: int64 scalar; whoever gets the same token later gets another one. 0 for none.
    """

    index: tf.Tensor
    value: tf.Tensor
    ticket: tf.Tensor


class Loss(NamedTuple):
    """The tokens of a worker that was lost.

    Attributes:
        lost: int64 scalar, how many are gone for good.
        withheld: int64 [n], the places in the list of those that may be handed out again.
        tickets: int64 [lost + n], theirs.
    """

    lost: tf.Tensor
    withheld: tf.Tensor
    tickets: tf.Tensor


class RawState(NamedTuple):
    """The outputs of `RecsyncTokenListState`, as its documentation describes them."""

    position: tf.Tensor
    steps: tf.Tensor
    clocks: tf.Tensor
    live: tf.Tensor
    held: tf.Tensor
    reissues: tf.Tensor
    waiting_workers: tf.Tensor
    waiting_seconds: tf.Tensor
    counts: tf.Tensor
    withheld: tf.Tensor


def token_list(
    shared_name: str,
    *,
    repeats: int,
    gate: Gate,
    workers: int,
    servers: int = 1,
    clock_bound: int = 0,
) -> tf.Tensor:
    """The handle of the device's list of this name, which is made if there is none."""
    return library.recsync_token_list(
        shared_name=shared_name,
        repeats=repeats,
        gate=gate,
        clock_bound=clock_bound,
        servers=servers,
        workers=workers,
    )


def take_token(handle: tf.Tensor, worker: int | tf.Tensor) -> Token:
    """Takes the next token when the gate opens for `worker`."""
    return Token(*library.recsync_take_token(handle, worker))


def lose_worker(handle: tf.Tensor, worker: int | tf.Tensor) -> Loss:
    """Takes a worker that is gone out of the list."""
    return Loss(*library.recsync_lose_worker(handle, worker))


def reissue_tokens(handle: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Has tokens of lost workers be the next to be handed out; how many there were."""
    return library.recsync_reissue_tokens(handle, indices)


def leave_tokens(handle: tf.Tensor, worker: int | tf.Tensor) -> tf.Operation | None:
    """Takes a worker that has come to the end of its data out of the list."""
    return library.recsync_leave_tokens(handle, worker)


def report_step(
    handle: tf.Tensor, server: int | tf.Tensor, step: int | tf.Tensor
) -> tf.Operation | None:
    """Tells the list how many applications a server has finished."""
    return library.recsync_report_step(handle, server, step)


def seek_tokens(handle: tf.Tensor, step: int | tf.Tensor) -> tf.Operation | None:
    """Goes on as a new list in which all servers have reached `step`."""
    return library.recsync_seek_tokens(handle, step)


def token_list_state(handle: tf.Tensor) -> RawState:
    """Where the list stands, and who waits."""
    return RawState(*library.recsync_token_list_state(handle))
