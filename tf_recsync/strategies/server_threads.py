"""Whether servers have threads enough for the calls that may wait in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import tensorflow as tf
from absl import logging

from tf_recsync import ops
from tf_recsync.cluster import Cluster, LocalCluster, device_of, fetch, reason
from tf_recsync.synchronization.hop_exchange import listed


def check_threads(
    cluster: Cluster, needed: Sequence[int], why: str, job: Literal["worker", "ps"] = "worker"
) -> None:
    """Raises a ValueError if calls that wait could take all threads of a server's process.

    A server that does not answer is not checked: training goes on without it, as when it is lost.

    Args:
        cluster: a connected cluster.
        needed: for each server of the job, or the first ones, how many calls may wait in it.
        why: what they wait for, in words.
        job: whose servers.
    """
    noun = "worker" if job == "worker" else "parameter server"
    processes: dict[int, list[int]] = {}  # The servers that share threads, as far as is known.
    for server in range(len(needed)):
        is_local = isinstance(cluster, LocalCluster)
        process = cluster.pid(job, server) if is_local else -1 - server
        processes.setdefault(process, []).append(server)
    for servers in processes.values():
        together = sum(needed[server] for server in servers)
        try:
            with tf.device(device_of(job, servers[0])):
                threads = int(fetch(ops.server_threads(together)))
        except tf.errors.OpError as error:
            logging.warning(
                "%s:%d does not answer, and whether it has threads enough is not known: %s",
                job,
                servers[0],
                reason(error),
            )
            continue
        if threads < together:
            each = max(needed[server] for server in servers)
            raise ValueError(
                f"the process of {listed(servers, noun)} has {threads} threads, and up to "
                f"{together} calls may wait in it {why}; start the servers with "
                f"inter_op_threads={each} or more (a LocalCluster with processes=1 or more)"
            )
