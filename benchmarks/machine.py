"""What the benchmarks ask the machine: processor time and memory."""

from __future__ import annotations

import os
import pathlib
import resource
from collections.abc import Iterable

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(servers: Iterable[int]) -> float:
    """The processor time so far of this process and of servers, named by their process ids."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for pid in servers:
        # User and system time are the 14th and 15th field, the 2nd may hold spaces.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def busy_seconds() -> float:
    """The processor time so far of all programs of the machine, since it was started."""
    # What processors did not spend idle or waiting for input and output; guests are in user time.
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(int(f) for i, f in enumerate(fields) if i not in (3, 4)) / _TICKS


def machine_cores() -> int:
    """The cores of the machine."""
    return os.cpu_count() or 1


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int | None:
    """Bytes of memory that programs can still take; None where the system does not say."""
    path = pathlib.Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kilobytes[0]) if kilobytes else None
