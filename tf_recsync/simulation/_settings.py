"""What a simulated cluster is made of."""

from __future__ import annotations

import dataclasses

from tf_recsync._checks import check_at_least, number


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """Raises a ValueError unless an argument is a finite number of at least 0, or above 0."""
    bound = {"above": 0} if positive else {"least": 0}
    allowed = "positive" if positive else "at least 0"
    number(name, value, **bound, allowed=f"a finite number, {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """The links between machines. A parameter server has a machine of its own.

    Messages pass a link one after the other, in the order in which they come. Each machine has a
    link for each direction.

    Args:
        bandwidth: of each link of a worker's machine, a positive number of bytes per second; None
            (the default) for no limit.
        server_bandwidth: of each link of a server's machine; None (the default) for `bandwidth`.
        latency: how long a message takes from one machine to another besides, one way, in
            seconds, at least 0. Defaults to 0.0.
        workers_per_machine: how many workers share the links of a machine, an int of at least 1,
            the default. Workers 0 to `workers_per_machine` - 1 share the first one.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> gigabit = recsync.simulation.Network(bandwidth=125e6, latency=1e-4)
    >>> gigabit.workers_per_machine
    1
    """

    bandwidth: float | None = None
    server_bandwidth: float | None = None
    latency: float = 0.0
    workers_per_machine: int = 1

    def __post_init__(self) -> None:
        for name in ("bandwidth", "server_bandwidth"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), positive=True)
        check_number("latency", self.latency)
        check_at_least("workers_per_machine", self.workers_per_machine, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """The processor of each parameter server.

    It does what comes first first, `threads` things side by side. Where gradients are collected,
    a push takes the time of its bytes, and what is applied the time of an application and the
    same bytes once more.

    Args:
        threads: an int of at least 1, the default.
        seconds_per_pull: that an answer takes besides its bytes, in seconds. Defaults to 0.0.
        seconds_per_application: that an application takes besides its bytes. Defaults to 0.0.
        seconds_per_byte: of what is pulled, pushed or applied from a buffer. Defaults to 0.0.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> server = recsync.simulation.Server(threads=4, seconds_per_application=1e-3)
    >>> server.seconds_per_pull
    0.0
    """

    threads: int = 1
    seconds_per_pull: float = 0.0
    seconds_per_application: float = 0.0
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("threads", self.threads, 1)
        for name in ("seconds_per_pull", "seconds_per_application", "seconds_per_byte"):
            check_number(name, getattr(self, name))
