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

# What errors say of a function that a server has not got, by their classes.
_UNKNOWN_FUNCTION = {
    # The function of a dataset.
    tf.errors.FailedPreconditionError: "Could not find required function definition",
    # One that another one calls.
    tf.errors.InternalError: "Can't find a function",
    # One that is called, and one that such a one calls and that is inlined there.
    tf.errors.NotFoundError: "name of a function|Failed to find function",
}
# Of a tensor that a server has not got: it was readmitted while the call was made.
_UNKNOWN_TENSOR = {
    tf.errors.InvalidArgumentError: "Unable to find the relevant tensor remote_handle",
}
# Of a connection that broke; of a server that was out of the cluster just then, as a neighbor is
# that has died while a worker comes back; or of what lay there before it was taken in again. Its
# new life may not be known yet: whoever takes servers in tells it when all are.
_BROKEN = {
    tf.errors.UnavailableError: "",
    # gRPC's calls fail so now and then, most of all just after a server was taken in.
    tf.errors.InternalError: "Unable to parse request",
    # It was started again, and is taken in.
    tf.errors.AbortedError: "Unable to find a context_id",
    tf.errors.InvalidArgumentError: "Resource input tensor contains an invalid device"
    r"|/job:(worker|ps)/replica:0/task:\d+/device:\S+ unknown device",
}


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
    for server in cluster.membership.servers("ps"):
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
    if _says(error, _UNKNOWN_TENSOR):
        server_defs.forget_numbers()  # It may be one of these.
        return Diagnosis(Cause.TRANSIENT, worker)
    is_left_out = isinstance(error, tf.errors.InvalidArgumentError) and is_without_client(error)
    if is_left_out or _says(error, _BROKEN):
        return Diagnosis(Cause.TRANSIENT, worker)
    return Diagnosis(Cause.USER)


def _says(error: Exception, words: Mapping[type[Exception], str]) -> bool:
    """Whether an error is of one of these classes, and says so."""
    return any(
        isinstance(error, kind) and re.search(text, error.message) for kind, text in words.items()
    )


def _is_unknown_function(error: Exception) -> bool:
    """Whether a server has not got a function: it was traced while the connection was broken."""
    if isinstance(error, tuple(_UNKNOWN_FUNCTION)):
        return _says(error, _UNKNOWN_FUNCTION)
    # One that a loop or a condition calls is told like an operation that the server can't do.
    found = re.search(r"Op type not registered '(\w+)'", getattr(error, "message", ""))
    return found is not None and context.context().has_function(found[1])
