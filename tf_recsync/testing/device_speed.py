"""Artificial speed of devices, and how much of it was used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import fetch
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.testing.limits import chosen_devices, set_limit


def set_device_speed(
    strategy: FitStrategy,
    flops_per_second: float | None,
    servers: Iterable[int] | None = None,
    job: str = "worker",
) -> None:
    """Gives servers an artificial speed, at which they compute one thing after the other.

    What a training step computes on a server takes the time of its floating-point operations
    at that speed, beside the time that it takes really, and begins when what came before
    is done, whoever's step that was for. Waiting uses no processor. So trainers of a
    group, and nets of a trainer, compete for a server as on machines of their own, while an
    artificial compute time (`set_compute_time`) passes for all that compute at once.

    A worker's own part of a step (layers that run there, losses, metrics, and the gradients of
    these) is computed before its push, all of it at once. Under a `HierarchicalStrategy` a layer
    that `placement` puts on a server is computed there, forward and backward by itself.
    Operations are counted as plans do it, of the batch as it is; updates, lookups and compression
    on servers don't count, nor do `evaluate` and `predict`.

    Args:
        strategy: the strategy whose steps take their time, from the next epoch's start on.
            Not a `HopStrategy`.
        flops_per_second: floating-point operations in a second of each server, a positive number;
            None for no limit.
        servers: the indices of the servers that it holds for; those of others stay as they are.
            Default None: all.
        job: "worker" (the default), or "ps" for parameter servers, under a
            `HierarchicalStrategy`.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.AsyncStrategy(cluster)
    ...     recsync.testing.set_device_speed(strategy, 1e9)  # Of each worker.
    """
    devices = chosen_devices(strategy, strategy.computing_jobs, job, servers)
    set_limit(strategy._settings.speeds, devices, "flops_per_second", flops_per_second)


class Use(NamedTuple):
    """What a server has had to do with an artificial speed and bandwidth since it was started.

    Attributes:
        flop: floating-point operations.
        compute_seconds: how long they take.
        bytes: that have passed its link.
        link_seconds: how long they take.
    """

    flop: int
    compute_seconds: float
    bytes: int
    link_seconds: float


def device_use(strategy: FitStrategy, job: str) -> list[Use]:
    """What each server of a job has had to do with artificial speeds and bandwidths.

    The difference of two of them over the time between them is the utilization of processors and
    links, as the Hierarchical Training paper's figure 9 shows it.

    Args:
        strategy: on whose cluster they are; all that was done on it since it was started
            counts.
        job: "worker" or "ps".

    Returns:
        For each server, by its index, what it was asked for up to now, and has still to do.

    Raises:
        ValueError: if the job is another one.
        RuntimeError: if a server is lost, or silent for `silence_timeout` seconds.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.AsyncStrategy(cluster)
    ...     used = recsync.testing.device_use(strategy, "ps")
    >>> len(used)  # One for each parameter server.
    1
    """
    found = []
    for device in chosen_devices(strategy, ("worker", "ps"), job, None):
        with strategy._guard.watched(), tf.device(device):
            (flop, bytes_), (computing, passing) = fetch(ops.reserved())
        found.append(Use(int(flop), float(computing), int(bytes_), float(passing)))
    return found
