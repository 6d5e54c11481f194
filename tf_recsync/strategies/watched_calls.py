"""An end to the coordinator's own calls to servers, with an error that names the server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Server
from tf_recsync.cluster.diagnosis import Cause, diagnose
from tf_recsync.cluster.silence_watch import Wait, suspicious_after

_EXPECTED_SECONDS = 600.0  # For which calls are watched whose end nobody tells.


@contextlib.contextmanager
def watched(
    cluster: Cluster, silence_timeout: float, unneeded: Collection[Server] = ()
) -> Iterator[None]:
    """Inside, calls to a server that does not answer fail when it has been silent for too long.

    Args:
        cluster: the connected cluster.
        silence_timeout: for how many seconds a server may be silent.
        unneeded: the parameter servers that are not called.

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
        return [s for s in cluster.membership.servers("worker", "ps") if s not in unneeded]

    def give_up(server: Server, seconds: float) -> None:
        given_up[server] = seconds
        give_up_silent(cluster, server, seconds)

    wait = Wait(suspects, give_up, silence_timeout)
    cluster.watch.begin(wait)
    try:
        yield
    except tf.errors.OpError as error:
        # Those who are to be told are told elsewhere: locks may be held here that they take.
        for member in cluster.membership.members("ps"):
            server = member.job, member.index
            if server in unneeded:
                continue
            # Somebody else may have given it up.
            silent = given_up.get(server, 0.0)
            if not member.is_there and member.seconds < time.monotonic() - began:
                silent = silent or cluster.membership.silent_seconds(server)
            if silent:
                raise silent_parameter_server(member.index, silent) from error
        if not cluster.is_closed:
            check_parameter_servers(cluster, error, unneeded)
        raise
    finally:
        cluster.watch.end(wait)


class CallGuard:
    """Sees to it that this process's calls for the variables of a strategy end; thread-safe.

    Args:
        cluster: the connected cluster.
        silence_timeout: for how many seconds a server may be silent.
    """

    def __init__(self, cluster: Cluster, silence_timeout: float):
        self._cluster = cluster
        self._limit = silence_timeout
        self._expected = Wait(
            lambda: cluster.membership.servers("ps"),
            # No worker's calls: what writes a checkpoint is called by this process.
            lambda server, seconds: give_up_silent(cluster, server, seconds, callers=()),
            silence_timeout,
        )

    def watched(self, unneeded: Collection[Server] = ()) -> contextlib.AbstractContextManager[None]:
        """Inside, calls to a server that is silent end; see `watched`.

        Args:
            unneeded: the parameter servers that are not called.

        Raises:
            RuntimeError: if the cluster is closed.
        """
        self._cluster.check_open()
        return watched(self._cluster, self._limit, unneeded)

    def expect_calls(self) -> None:
        """TensorFlow calls parameter servers next, as to write a checkpoint: they are watched for
        a while."""
        self._expected.until = time.monotonic() + _EXPECTED_SECONDS
        self._cluster.watch.begin(self._expected)


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
    cluster.membership.lost(server, None, how, silent_seconds=seconds)
    workers = range(cluster.workers) if callers is None else callers
    waiting = [("worker", worker) for worker in workers] if server[0] == "ps" else []
    cluster.cut_off_all([server, *waiting])
    # In a thread, as those who are told call servers, and this one is to watch them.
    threading.Thread(target=cluster.tell_members, name="recsync_membership", daemon=True).start()


def lose_the_gone(cluster: Cluster, servers: Sequence[Server], seconds: float) -> None:
    """Finds servers that have nothing any more of what they had, or don't answer: they are lost.

    Those that were lost and answer can be used again. Connections to those that don't are cut.

    Args:
        cluster: the connected cluster.
        servers: the servers to ask; nothing may be asked of them meanwhile.
        seconds: how long to wait for an answer.
    """
    probes = {server: cluster.probe(*server) for server in servers}
    deadline = time.monotonic() + seconds
    silent = set()
    for server, probe in list(probes.items()):
        probe.join(max(0.0, deadline - time.monotonic()))
        if probe.is_alive():
            silent.add(server)  # Its probe fails when it is cut off.
            logging.warning("%s:%d has not answered for %.0f s.", *server, seconds)
            cluster.cut_off(*server)
        elif probe.answered is False:
            # A connection that broke while nobody used it shows at the first call.
            probe = probes[server] = cluster.probe(*server)
            probe.join(max(0.0, deadline - time.monotonic()))
    for server, probe in probes.items():
        if probe.reachable:
            cluster.membership.readmitted(server)
            continue
        was_silent = seconds if server in silent else 0.0
        cluster.membership.lost(server, None, "between two epochs", silent_seconds=was_silent)


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
        spared: those that nobody needs, or without which others go on.
    """
    found = diagnose(cluster, error, {}, spared)
    if found.cause is Cause.LOST_PS:
        raise lost_parameter_server(cluster, found.server) from error


def lost_parameter_server(cluster: Cluster, server: Server) -> RuntimeError:
    """The error that says so, or that it is silent, if somebody has given it up by that."""
    cluster.membership.lost(server, None, "in the middle of a pass")
    silent = cluster.membership.silent_seconds(server)
    if silent:
        return silent_parameter_server(server[1], silent)
    return RuntimeError(
        f"parameter server {server[0]}:{server[1]} was lost, and its parameters with it; start it "
        "again and load a checkpoint into a new model"
    )
