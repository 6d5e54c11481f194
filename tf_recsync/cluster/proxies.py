"""Keeps the calls of a cluster from HTTP proxies."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tf_recsync.cluster import tf_config

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
# gRPC looks at the first that is set.
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
# gRPC asks proxies also for the address that a server listens on, which is all interfaces for
# TensorFlow's; and a process calls itself.
_OWN = ("0.0.0.0", "127.0.0.1")


def go_around(addresses: Iterable[str], bind_address: str | None) -> None:
    """Has gRPC call the servers of a cluster directly, if the environment names a proxy.

    A proxy is for the world outside: it seldom reaches the machines of a cluster, and gRPC would
    call even servers of this machine by it. Sets `no_grpc_proxy` for this process and those that it
    starts; to be called before TensorFlow connects or listens.

    Args:
      addresses: "host:port" of all tasks.
      bind_address: Numeric address on which this process listens; None for all interfaces.
    """
    if not any(os.environ.get(name) for name in _PROXIES):
        return
    known = next((os.environ[name] for name in _EXCEPTIONS if name in os.environ), "")
    hosts = [host.strip() for host in known.split(",") if host.strip()]
    hosts += [tf_config.split_address(address)[0] for address in addresses]
    hosts += [*_OWN, *([bind_address] if bind_address else [])]
    os.environ[_EXCEPTIONS[0]] = ",".join(dict.fromkeys(hosts))
