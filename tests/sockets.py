"""The TCP sockets of a process, from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import pathlib
import re
import socket
import sys
from collections.abc import Iterator

import pytest

_ESTABLISHED, _LISTEN = "01", "0A"
_PIDFD_GETFD = 438  # The number of the system call.

_libc = ctypes.CDLL(None, use_errno=True)


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process listens."""
    return list(_own_addresses(pid, _LISTEN))


def open_connections(pid: int) -> list[int]:
    """The own port of each of a process's connections."""
    return [port for _, port in _own_addresses(pid, _ESTABLISHED)]


def end_connections(pid: int, port: int) -> None:
    """Ends a process's connections to a port, as if the network had lost them.

    Skips the test where processes may not have each other's sockets, as in some containers.
    """
    inodes = {inode for inode, _, remote in _sockets(pid, _ESTABLISHED) if remote[1] == port}
    process = os.pidfd_open(pid)
    try:
        for descriptor, inode in _descriptors(pid):
            if inode not in inodes:
                continue
            copy = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
            if copy < 0:
                number = ctypes.get_errno()
                if number in (errno.EPERM, errno.ENOSYS):
                    pytest.skip("processes may not have each other's sockets here")
                raise OSError(number, os.strerror(number))
            with socket.socket(fileno=copy) as own:
                own.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)


def _own_addresses(pid: int, state: str) -> Iterator[tuple[str, int]]:
    for _, own, _ in _sockets(pid, state):
        yield own


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    """A process's sockets: descriptors and inodes."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            for inode in re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry.path)):
                yield int(entry.name), inode


def _sockets(pid: int, state: str) -> Iterator[tuple[str, tuple[str, int], tuple[str, int]]]:
    """A process's sockets in a state: inodes, and the addresses of both ends."""
    inodes = {inode for _, inode in _descriptors(pid)}
    for table in ("tcp", "tcp6"):
        path = pathlib.Path(f"/proc/{pid}/net/{table}")
        if not path.exists():  # No IPv6 here.
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != state or fields[9] not in inodes:
                continue
            yield fields[9], _address(fields[1]), _address(fields[2])


def _address(text: str) -> tuple[str, int]:
    address, port = text.split(":")
    # Words of four bytes in the machine's order.
    packed = b"".join(
        int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)
    )
    parsed = ipaddress.ip_address(packed)
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return str(parsed), int(port, 16)
