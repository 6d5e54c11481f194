"""Artificial bandwidth."""

from __future__ import annotations

from collections.abc import Iterable

from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.testing.limits import chosen_devices, set_limit


def set_bandwidth(
    strategy: FitStrategy,
    bytes_per_second: float | None,
    servers: Iterable[int] | None = None,
    job: str | None = None,
) -> None:
    """Limits the bandwidth of servers, for all that a strategy sends to and from them.

    The messages of a step between the workers and a parameter server (what is looked
    up, the answers, the pushes; under a `HierarchicalStrategy` also what layers on servers get
    and give, between two servers, too) pass that server's link one after the other, in both
    directions together; who waits for one waits without using a processor. The
    numbers of steps, and changes of moving averages, are too small to count.

    With `job="worker"` it is the trainers' links of a `ShadowSyncStrategy` or
    `HierarchicalStrategy`: the same messages pass the trainer's link and the server's. Trainers
    that average with each other send on them, too; what goes to a sync PS and back passes the
    link of that alone.

    Under a `HopStrategy` it is the workers' links that are limited; what they send to
    each other passes the sender's and then the receiver's. Where it has
    parameter servers, `job="ps"` limits theirs, which hold tables.

    Args:
        strategy: the strategy whose steps are limited, from the next epoch's start on.
        bytes_per_second: a positive number, of each server; None for no limit.
        servers: the indices of the parameter servers (`HopStrategy`: workers) that it
            holds for; those of others stay as they are. Default None: all.
        job: "ps" or "worker": whose links. Default None: "worker" for a `HopStrategy`,
            else "ps"; only strategies whose workers have copies have both.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     strategy = recsync.AsyncStrategy(cluster)
    ...     recsync.testing.set_bandwidth(strategy, 125e6)  # A gigabit per second.
    ...     recsync.testing.set_bandwidth(strategy, 12.5e6, servers=[0])  # One server is slower.
    """
    job = job or strategy.linked_jobs[0]
    devices = chosen_devices(strategy, strategy.linked_jobs, job, servers)
    set_limit(strategy._settings.bandwidths, devices, "bytes_per_second", bytes_per_second)
