"""Artificial bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tf_recsync.strategies.fit_strategy import FitStrategy


def set_bandwidth(
    strategy: FitStrategy,
    bytes_per_second: float | None,
    servers: Iterable[int] | None = None,
    job: str | None = None,
) -> None:
    """Limits the bandwidth of servers, for all that a strategy sends to and from them.

    The messages of a step between the workers and a parameter server (what is looked
    up, the answers, the pushes) pass that server's link one after the other, in both
    directions together; who waits for one waits without using a processor. The
    numbers of steps, and changes of moving averages, are too small to count.

    Under a `HopStrategy` it is the workers' links that are limited; what they send to
    each other passes the sender's and then the receiver's. So does what the trainers of a
    `ShadowSyncStrategy` send to each other, with `job="worker"`. Where a `HopStrategy` has
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

    ```python
    recsync.testing.set_bandwidth(strategy, 125e6)  # a gigabit per second
    recsync.testing.set_bandwidth(strategy, 12.5e6, servers=[0])  # one of them slower
    ```
    """
    if bytes_per_second is not None:
        is_number = isinstance(bytes_per_second, (int, float))
        if (
            not is_number
            or isinstance(bytes_per_second, bool)
            or not (math.isfinite(bytes_per_second) and bytes_per_second > 0)
        ):
            raise ValueError(f"bytes_per_second must be positive or None, not {bytes_per_second!r}")
    if job is not None and job not in strategy.linked_jobs:
        raise ValueError(
            f"job must be one of {strategy.linked_jobs} for {type(strategy).__name__}, not {job!r}"
        )
    job = job or strategy.linked_jobs[0]
    number = strategy.cluster.workers if job == "worker" else strategy.cluster.ps
    chosen = range(number) if servers is None else list(servers)
    for server in chosen:
        if not isinstance(server, int) or isinstance(server, bool) or not 0 <= server < number:
            raise ValueError(f"servers must be from 0 to {number - 1}, not {server!r}")
    for server in chosen:
        device = f"/job:{job}/replica:0/task:{server}/device:CPU:0"
        strategy._bandwidths.pop(device, None)
        if bytes_per_second is not None:
            strategy._bandwidths[device] = float(bytes_per_second)
