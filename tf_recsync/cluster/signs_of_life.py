"""Whether servers answer, and an end to waiting for those that don't."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING

import tensorflow as tf
from absl import logging
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context

from tf_recsync.cluster import tf_config
from tf_recsync.cluster.devices import device_of
from tf_recsync.cluster.membership import Server

_GREETING_SECONDS = 1.0  # For the answer to it.
_ASKERS = 64  # Servers that are asked at the same time.
_ANSWER_SECONDS = 3.0  # For a sign of life.
_NO_NAMES = (socket.EAI_NONAME, socket.EAI_NODATA)
RETRY_SECONDS = 0.1  # Between attempts to reach servers.
# As in cc/engine/sockets.cc: a machine that is gone is noticed after a minute.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}
# What a client of HTTP/2, and so of gRPC, begins with: a fixed text and empty settings.
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

if TYPE_CHECKING:
    from tf_recsync.cluster.connection import Cluster

Peer = tuple[str, int]  # A numeric address and a port.


def is_reachable(device: str) -> bool:
    """Whether a server runs an op for us; one that was restarted does not, until readmitted.

    Waits for a server that is there and does not answer, until its connections are cut.

    Args:
      device: The name of a device of the server.
    """
    return _ask(device) is None


def incarnations() -> dict[Server, int]:
    """The numbers that the servers that this process is connected to drew when they started."""
    eager_context = context.context()
    eager_context.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(eager_context._handle)
    try:
        found = {}
        for i in range(pywrap_tf_session.TF_DeviceListCount(devices)):
            name = tf.DeviceSpec.from_string(pywrap_tf_session.TF_DeviceListName(devices, i))
            # All devices of a server drew one each.
            if name.device_type == "CPU":
                number = pywrap_tf_session.TF_DeviceListIncarnation(devices, i)
                found[name.job, name.task] = number
        return found
    finally:
        pywrap_tf_session.TF_DeleteDeviceList(devices)


class Probe(threading.Thread):
    """Asks a server for a sign of life, in a thread of its own: TensorFlow has no time limit.

    Attributes:
      answered: Whether the server has answered, even with an error as a restarted one does;
        None as long as it has not, and False if it could not be reached.
      reachable: Whether it has run the op.
    """

    def __init__(self, cluster: Cluster, device: str):
        super().__init__(name="recsync_probe", daemon=True)
        self._cluster = cluster
        self._device = device
        self.answered: bool | None = None
        self.reachable = False
        self.start()

    def run(self) -> None:
        with self._cluster.dispatch_scope():
            error = _ask(self._device)
        self.reachable = error is None
        self.answered = not isinstance(error, tf.errors.UnavailableError)


def ask(cluster: Cluster, servers: Sequence[Server]) -> list[Probe]:
    """Asks servers for signs of life, all at once, and waits for the answers, not for long."""
    probes = [Probe(cluster, device_of(*server)) for server in servers]
    deadline = time.monotonic() + _ANSWER_SECONDS
    for probe in probes:
        probe.join(max(0.0, deadline - time.monotonic()))
    return probes


class ReaderProbe(Probe):
    """The same of a reader, whose service takes no ops: it answers when it greets us in HTTP/2.

    Calls to a reader that is gone do not fail but wait for it: `answered` is None then, too.

    Args:
        cluster: the cluster.
        address: "host:port" of the reader.
    """

    def __init__(self, cluster: Cluster, address: str):
        self._address = address
        super().__init__(cluster, "")

    def run(self) -> None:
        if greets(self._address):
            self.reachable = self.answered = True


def greets(address: str) -> bool:
    """Whether a server answers a greeting in HTTP/2; one that stands still does not.

    Args:
      address: The server's "host:port".
    """
    try:
        with socket.create_connection(
            tf_config.split_address(address), timeout=_GREETING_SECONDS
        ) as connection:
            connection.sendall(_HTTP2_GREETING)
            return bool(connection.recv(1))
    except OSError as error:
        logging.debug("%s does not answer: %s", address, error)
        return False


def silent(addresses: Mapping[str, Mapping[int, str]]) -> list[tuple[str, int, str]]:
    """The servers but the chief that do not answer a greeting, as (job, index, address).

    Args:
      addresses: Of the servers of each job, by their index.
    """
    return without(greets, _servers(addresses))


def without(
    is_up: Callable[[str], bool], servers: Sequence[tuple[str, int, str]]
) -> list[tuple[str, int, str]]:
    """Those of some servers, (job, index, address), that are not up.

    They are asked at the same time: a machine that is gone answers nobody, for a second each time.

    Args:
      is_up: Whether the one at an address is.
      servers: Which are asked.
    """
    with futures.ThreadPoolExecutor(_ASKERS) as pool:
        answers = pool.map(is_up, [address for _, _, address in servers])
        return [server for server, answer in zip(servers, answers, strict=True) if not answer]


def _servers(addresses: Mapping[str, Mapping[int, str]]) -> list[tuple[str, int, str]]:
    """All but the chief, as (job, index, address)."""
    return [
        (job, index, address)
        for job, of_job in addresses.items()
        for index, address in of_job.items()
        if job != tf_config.CHIEF
    ]


def accepts_connections(address: str) -> bool:
    """Whether something listens at an address, "host:port"; it may stand still."""
    try:
        with socket.create_connection(tf_config.split_address(address), timeout=1.0):
            return True
    except OSError:
        return False


def peers_of(address: str) -> set[Peer]:
    """What connections to a server have at their other end.

    Args:
      address: The server's "host:port".

    Raises:
      OSError: The host's name can't be resolved.
    """
    host, port = tf_config.split_address(address)
    peers = {info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return peers | {(f"::ffff:{peer}", number) for peer, number in peers}


def peers_of_each(addresses: Sequence[str]) -> dict[str, set[Peer]]:
    """The same of several servers, looked up at the same time.

    Args:
      addresses: "host:port" of each.

    Returns:
      Without those of which nobody tells at the moment. A name that does not exist has no peer.
    """
    with futures.ThreadPoolExecutor(_ASKERS) as pool:
        found = zip(addresses, pool.map(_peers_if_told, addresses), strict=True)
        return {address: peers for address, peers in found if peers is not None}


def _peers_if_told(address: str) -> set[Peer] | None:
    try:
        return peers_of(address)
    except OSError as error:
        logging.warning("%s can't be resolved: %s", address, error)
        is_none = isinstance(error, socket.gaierror) and error.errno in _NO_NAMES
        return set() if is_none else None


def cut_connections(peers: Collection[Peer]) -> int:
    """Ends this process's connections to a server, and with them calls that wait for it.

    These fail with `tf.errors.UnavailableError`; later ones connect anew.

    Args:
      peers: What they have at their other end, see `peers_of`.

    Returns:
      How many connections there were.
    """
    return _each_connection(peers, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def keep_alive(address: str) -> None:
    """Has this process's connections to a server end when its machine is gone, after a minute.

    For those that carry nothing: nobody would notice.

    Args:
      address: The server's "host:port".
    """
    _each_connection(_peers_if_told(address) or (), _probe)


def _probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _each_connection(peers: Collection[Peer], action: Callable[[socket.socket], None]) -> int:
    """Does something with each of this process's connections to a server; returns how many."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=int(name))
        except OSError:
            continue  # Not a socket.
        try:
            if connection.getpeername()[:2] in peers:
                action(connection)
                count += 1
        except OSError as error:
            logging.debug("socket %s is not connected: %s", name, error)
        finally:
            connection.detach()  # It stays gRPC's to close.
    return count


def _ask(device: str) -> Exception | None:
    """Has a server run an op; why it could not, or None."""
    try:
        with tf.device(device):
            tf.raw_ops.NoOp()  # One message: what has inputs or a result takes several.
    # The latter for messages of errors, and tensors, from a server that is being cut off.
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        logging.debug("%s can't be reached: %s", device, error)
        return error
    return None


def wait_until(
    is_up: Callable[[str], bool],
    addresses: Mapping[str, Mapping[int, str]],
    timeout: float,
    deadline: float,
    spare: int = 0,
) -> list[tuple[str, int, str]]:
    """Waits until all servers but the chief are up.

    Args:
      is_up: Whether the one at an address is.
      addresses: Of the servers of each job, by their index.
      timeout: Seconds to wait at most, for the message.
      deadline: When they are over, in seconds of time.monotonic().
      spare: How many workers may be missing then.

    Returns:
      The workers that are missing, as (job, index, address).

    Raises:
      RuntimeError: A server was not up in time; the message names it.
    """
    missing = _servers(addresses)
    while True:
        missing = without(is_up, missing)
        if not missing:
            return []
        if time.monotonic() >= deadline:
            if len(missing) <= spare and all(job == "worker" for job, _, _ in missing):
                return missing
            raise not_up_error(timeout, missing)
        time.sleep(RETRY_SECONDS)


def not_up_error(timeout: float, missing: Sequence[tuple[str, int, str]]) -> RuntimeError:
    """The error that names servers, (job, index, address), that were not up in time."""
    return RuntimeError(f"servers not up within timeout={timeout:g} s: {in_words(missing)}")


def in_words(servers: Sequence[tuple[str, int, str]]) -> str:
    """The names of servers, each with its address."""
    return ", ".join(f"{job}:{index} ({address})" for job, index, address in servers)
