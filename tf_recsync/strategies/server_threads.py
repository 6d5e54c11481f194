"""Whether servers have threads enough for the calls that may wait in them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from tf_recsync import ops
from tf_recsync.cluster import Cluster, LocalCluster, device_of
from tf_recsync.synchronization.hop import listed


def check_threads(cluster: Cluster, needed: Sequence[int], why: str) -> None:
    """Raises a ValueError if calls that wait could take all threads of a worker's process.

    A worker that does not answer is not checked: training goes on without it, as when it is lost.

    Args:
        cluster: a connected cluster.
        needed: for each worker, how many calls may wait in it.
        why: what they wait for, in words.
    """
    processes: dict[int, list[int]] = {}  # The workers that share threads, as far as is known.
    for worker in range(cluster.workers):
        is_local = isinstance(cluster, LocalCluster)
        process = cluster.pid("worker", worker) if is_local else -1 - worker
        processes.setdefault(process, []).append(worker)
    for workers in processes.values():
        together = sum(needed[worker] for worker in workers)
        try:
            with tf.device(device_of("worker", workers[0])):
                threads = int(ops.server_threads(together))
        except tf.errors.OpError as error:
            logging.warning(
                "worker:%d does not answer, and whether it has threads enough is not known: %s",
                workers[0],
                error.message.partition("\n")[0],
            )
            continue
        if threads < together:
            each = max(needed[worker] for worker in workers)
            raise ValueError(
                f"the process of {listed(workers)} has {threads} threads, and up to {together} "
                f"calls may wait in it {why}; start the servers with "
                f"inter_op_threads={each} or more (a LocalCluster with processes=1 or more)"
            )
