"""What artificial bandwidths and speeds have in common: whose they are, and which are allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tf_recsync._checks import integer, number
from tf_recsync.cluster import processor_of
from tf_recsync.strategies.fit_strategy import FitStrategy


def chosen_devices(
    strategy: FitStrategy, jobs: Sequence[str], job: str, servers: Iterable[int] | None
) -> list[str]:
    """The devices of servers; raises a ValueError if there are none of these.

    Args:
        strategy: on whose cluster they are.
        jobs: those that are allowed.
        job: whose servers.
        servers: their indices, or None for all.
    """
    if job not in jobs:
        raise ValueError(
            f"job must be one of {tuple(jobs)} for {type(strategy).__name__}, not {job!r}"
        )
    size = strategy.cluster.workers if job == "worker" else strategy.cluster.ps
    chosen = range(size) if servers is None else list(servers)
    for server in chosen:
        integer("each of servers", server, 0, size - 1)
    return [processor_of(job, server) for server in chosen]


def set_limit(
    limits: dict[str, float], devices: Iterable[str], name: str, value: float | None
) -> None:
    """Gives devices a limit, or takes it away; raises a ValueError if it makes no sense.

    Args:
        limits: gets it, by device.
        devices: whose it is.
        name: of the argument that has it.
        value: a positive number, or None for no limit.
    """
    if value is not None:
        number(name, value, above=0, allowed="positive or None")
    for device in devices:
        limits.pop(device, None)
        if value is not None:
            limits[device] = float(value)
