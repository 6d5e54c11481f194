"""The TCP sockets of a process, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import re
import sys
from collections.abc import Iterator

_ESTABLISHED, _LISTEN = "01", "0A"


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process listens."""
    return list(_own_addresses(pid, _LISTEN))


def open_connections(pid: int) -> list[int]:
    """The own port of each of a process's connections."""
    return [port for _, port in _own_addresses(pid, _ESTABLISHED)]


def _own_addresses(pid: int, state: str) -> Iterator[tuple[str, int]]:
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry.path)))
    for table in ("tcp", "tcp6"):
        path = pathlib.Path(f"/proc/{pid}/net/{table}")
        if not path.exists():  # No IPv6 here.
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != state or fields[9] not in inodes:
                continue
            address, port = fields[1].split(":")
            # Words of four bytes in the machine's order.
            packed = b"".join(
                int(address[i : i + 8], 16).to_bytes(4, sys.byteorder)
                for i in range(0, len(address), 8)
            )
            parsed = ipaddress.ip_address(packed)
            parsed = getattr(parsed, "ipv4_mapped", None) or parsed
            yield str(parsed), int(port, 16)
