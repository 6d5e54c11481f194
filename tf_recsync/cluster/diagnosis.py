"""Why a call to a server failed: one answer to one question, wherever it is asked."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Collection, Mapping

import tensorflow as tf
from tensorflow.python.eager import context

from tf_recsync.cluster import server_defs
from tf_recsync.cluster.connection import Cluster
from tf_recsync.cluster.devices import device_of
from tf_recsync.cluster.making_functions import is_without_client
from tf_recsync.cluster.membership import Server
from tf_recsync.cluster.signs_of_life import is_reachable


class Cause(enum.Enum):
    """What made a call fail."""

    LOST_PS = "a parameter server is gone without which nobody goes on"
    LOST_SERVER = "a server is gone that the call needed"
    FORGOTTEN = "the worker lacks a function that was traced while it could not be reached"
    TRANSIENT = "a connection broke, and all servers are there"
    USER = "the call itself is wrong"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What made a call fail.

    Attributes:
        cause: see above.
        server: the server that is gone, or whose connection broke; None for the user's errors.
    """

    cause: Cause
    server: Server | None = None


def diagnose(
    cluster: Cluster,
    error: Exception,
    lives: Mapping[Server, int],
    spared: Collection[Server] = (),
) -> Diagnosis:
    """Finds out why a call to a worker failed; asks servers for signs of life.

    Waits for one that does not answer: whoever calls this is to be watched.

    Args:
        cluster: the connected cluster.
        error: as the call raised it.
        lives: those of the servers that it needed when it began, the worker's last.
        spared: the parameter servers that nobody needs, or without which others go on.
    """
    for ps in range(cluster.ps):
        server = ("ps", ps)
        if server not in spared and not is_reachable(device_of(*server)):
            return Diagnosis(Cause.LOST_PS, server)
    for server, life in lives.items():
        # In this order: while it is asked, one that was started again may be taken in.
        answers = is_reachable(device_of(*server))
        if not answers or not cluster.membership.are_current({server: life}):
            return Diagnosis(Cause.LOST_SERVER, server)
    worker = next(reversed(lives), None)
    if _is_unknown_function(error):
        return Diagnosis(Cause.FORGOTTEN, worker)
    is_unknown_tensor = _is_unknown_tensor(error)
    if is_unknown_tensor:
        server_defs.forget_numbers()  # It may be one of these.
    is_unavailable = isinstance(error, tf.errors.UnavailableError)
    # gRPC's calls fail so now and then, most of all just after a server was taken in.
    is_garbled = isinstance(error, tf.errors.InternalError) and (
        "Unable to parse request" in error.message
    )
    if is_unknown_tensor or is_unavailable or is_garbled or _is_left_out(error):
        return Diagnosis(Cause.TRANSIENT, worker)
    return Diagnosis(Cause.USER)


def _is_unknown_function(error: Exception) -> bool:
    """Whether a server has not got a function: it was traced while the connection was broken."""
    if isinstance(error, tf.errors.FailedPreconditionError):  # The function of a dataset.
        return "Could not find required function definition" in error.message
    if isinstance(error, tf.errors.InternalError):  # One that another one calls.
        return "Can't find a function" in error.message
    if isinstance(error, tf.errors.NotFoundError):
        # One that is called, and one that such a one calls and that is inlined there.
        texts = ("name of a function", "Failed to find function")
        return any(text in error.message for text in texts)
    # One that a loop or a condition calls is told like an operation that the server can't do.
    found = re.search(r"Op type not registered '(\w+)'", getattr(error, "message", ""))
    return found is not None and context.context().has_function(found[1])


def _is_left_out(error: Exception) -> bool:
    """Whether a call needed a server that was out of the cluster just then, as a neighbor is that
    has died while a worker comes back; or what lay there before it was taken in again.

    Its new life may not be known yet: whoever takes servers in tells it when all are.
    """
    if isinstance(error, tf.errors.AbortedError):  # It was started again, and is taken in.
        return "Unable to find a context_id" in error.message
    if not isinstance(error, tf.errors.InvalidArgumentError):
        return False
    if "Resource input tensor contains an invalid device" in error.message:
        return True
    if re.search(r"/job:(worker|ps)/replica:0/task:\d+/device:\S+ unknown device", error.message):
        return True
    return is_without_client(error)


def _is_unknown_tensor(error: Exception) -> bool:
    """Whether a server has not got a tensor: it was readmitted while the call was made."""
    return isinstance(error, tf.errors.InvalidArgumentError) and (
        "Unable to find the relevant tensor remote_handle" in error.message
    )
