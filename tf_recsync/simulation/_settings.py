"""What a simulated cluster is made of."""

from __future__ import annotations

import dataclasses
import math

from tf_recsync._checks import check_at_least, number

# The engine's limits: of machines, of threads and of what else there are many of; of the seconds
# that one thing takes; and of sigma.
MOST_OF_ALL = 2**20
MOST_SECONDS = 1e6
MOST_NOISE = 5.0
# Of steps and operations: what the engine can count, with room for sums. Steps without a number
# are as many, see cc/simulation/steps_in_no_time.h.
MOST = 2**62


def check_number(
    name: str, value: float, *, positive: bool = False, most: float = math.inf
) -> None:
    """Raises a ValueError unless an argument is a finite number from 0, or above 0, to `most`."""
    bound = {"above": 0} if positive else {"least": 0}
    allowed = "positive" if positive else "at least 0"
    if most < math.inf:
        allowed = f"from 0 to {most:g}"
    number(name, value, **bound, most=most, allowed=f"a finite number, {allowed}")


def check_count(
    name: str, value: float, least: int = 0, most: int = MOST, whole: bool = True
) -> None:
    """Raises a ValueError if an argument is not from `least` to `most`, or is no integer where it
    has to be one."""
    if whole:
        check_at_least(name, value, least)
    else:
        check_number(name, value)
    if value > most:
        raise ValueError(f"{name} must be at most {most}, not {value!r}")


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
        check_number("latency", self.latency, most=MOST_SECONDS)
        check_count("workers_per_machine", self.workers_per_machine, 1, MOST_OF_ALL)


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
        check_count("threads", self.threads, 1, MOST_OF_ALL)
        for name in ("seconds_per_pull", "seconds_per_application", "seconds_per_byte"):
            check_number(name, getattr(self, name), most=MOST_SECONDS)
