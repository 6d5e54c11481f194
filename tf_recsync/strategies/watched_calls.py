"""An end to the coordinator's own calls to servers, with an error that names the server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Server
from tf_recsync.cluster.diagnosis import Cause, diagnose
from tf_recsync.strategies.silence_watch import SilenceWatch, suspicious_after


@contextlib.contextmanager
def watched(cluster: Cluster, silence_timeout: float) -> Iterator[None]:
    """Inside, calls to a server that does not answer fail when it has been silent for too long.

    Args:
        cluster: the connected cluster.
        silence_timeout: for how many seconds a server may be silent.

    Yields:
        None.

    Raises:
        RuntimeError: a call failed because a parameter server is silent or gone; the message
            names it. All other errors go on as they are.
    """
    began = time.monotonic()
    given_up: dict[Server, float] = {}

    def suspects() -> list[Server]:
        if time.monotonic() - began < suspicious_after(silence_timeout):
            return []
        workers = [("worker", index) for index in range(cluster.workers)]
        return [*workers, *(("ps", index) for index in range(cluster.ps))]

    def give_up(server: Server, seconds: float) -> None:
        given_up[server] = seconds
        give_up_silent(cluster, server, seconds)

    watch = SilenceWatch(cluster, suspects, give_up, silence_timeout)
    try:
        yield
    except tf.errors.OpError as error:
        cluster.membership.deliver()
        for (job, index), seconds in given_up.items():
            if job == "ps":
                raise silent_parameter_server(index, seconds) from error
        if not cluster.is_closed:
            check_parameter_servers(cluster, error)
        raise
    finally:
        watch.end()


def give_up_silent(
    cluster: Cluster, server: Server, seconds: float, callers: Iterable[int] | None = None
) -> None:
    """A server that does not answer is lost, and all calls that wait for it end.

    Workers wait for a parameter server over connections of their own, so calls to them end, too.

    Args:
        cluster: the connected cluster.
        server: a worker or a parameter server.
        seconds: for how long it has not answered.
        callers: the workers that may wait for it; None for all.
    """
    logging.warning("%s:%d has not answered for %.0f s.", *server, seconds)
    how = how_lost(server, f"it has not answered for {seconds:.0f} s")
    cluster.membership.lost(server, None, how, was_silent=True)
    cluster.cut_off(*server)
    if server[0] == "ps":
        for worker in range(cluster.workers) if callers is None else callers:
            cluster.cut_off("worker", worker)
    # In a thread, as those who are told call servers, and this one is to watch them.
    threading.Thread(
        target=cluster.membership.deliver, name="recsync_membership", daemon=True
    ).start()


def how_lost(server: Server, reason: str) -> str:
    """How a server was lost in a pass, and what that means, in words."""
    if server[0] == "worker":
        return (
            f"in the middle of a pass ({reason}); the batches in its hands are lost, the others "
            "go on"
        )
    return f"in the middle of a pass ({reason}), and its parameters with it"


def silent_parameter_server(index: int, seconds: float) -> RuntimeError:
    """The error that says so."""
    return RuntimeError(
        f"parameter server ps:{index} has not answered for {seconds:.0f} s; end it, "
        "start it again and load a checkpoint into a new model"
    )


def check_parameter_servers(
    cluster: Cluster, error: Exception, spared: Collection[Server] = ()
) -> None:
    """Raises a RuntimeError that names a parameter server that is lost, if one is.

    Args:
        cluster: the connected cluster.
        error: what made one ask.
        spared: those without which others go on.
    """
    found = diagnose(cluster, error, {}, spared)
    if found.cause is Cause.LOST_PS:
        raise lost_parameter_server(cluster, found.server) from error


def lost_parameter_server(cluster: Cluster, server: Server) -> RuntimeError:
    """The error that says so."""
    cluster.membership.lost(server, None, "in the middle of a pass; training ends")
    return RuntimeError(
        f"parameter server {server[0]}:{server[1]} was lost, and its parameters with it; start it "
        "again and load a checkpoint into a new model"
    )
