"""An end to the coordinator's own calls to servers, with an error that names the server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, device_of, is_reachable
from tf_recsync.strategies.silence_watch import SilenceWatch, suspicious_after
from tf_recsync.synchronization.arrangement import Server


@contextlib.contextmanager
def watched(
    cluster: Cluster, silence_timeout: float, expect_loss: Callable[[int], None]
) -> Iterator[None]:
    """Inside, calls to a server that does not answer fail when it has been silent for too long.

    Args:
        cluster: the connected cluster.
        silence_timeout: for how many seconds a server may be silent.
        expect_loss: told of a worker whose calls are about to fail.

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
        if server[0] == "worker":
            expect_loss(server[1])
        logging.warning("%s:%d has not answered for %.0f s.", *server, seconds)
        end_calls_to(cluster, *server)

    watch = SilenceWatch(cluster, suspects, give_up, silence_timeout)
    try:
        yield
    except tf.errors.OpError as error:
        for (job, index), seconds in given_up.items():
            if job == "ps":
                raise silent_parameter_server(index, seconds) from error
        if not cluster.is_closed:
            check_parameter_servers(cluster, error)
        raise
    finally:
        watch.end()


def end_calls_to(
    cluster: Cluster, job: str, index: int, callers: Iterable[int] | None = None
) -> None:
    """Ends all calls that wait for a server which does not answer.

    Workers wait for a parameter server over connections of their own, so calls to them end, too.

    Args:
        cluster: the connected cluster.
        job: "worker" or "ps".
        index: which of them.
        callers: the workers that may wait for it; None for all.
    """
    cluster.cut_off(job, index)
    if job == "ps":
        for worker in range(cluster.workers) if callers is None else callers:
            cluster.cut_off("worker", worker)


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
    for i in range(cluster.ps):
        if ("ps", i) not in spared and not is_reachable(device_of("ps", i)):
            raise RuntimeError(
                f"parameter server ps:{i} was lost, and its parameters with it; start it "
                "again and load a checkpoint into a new model"
            ) from error
