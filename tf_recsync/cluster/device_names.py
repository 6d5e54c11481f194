"""The names of this process's devices, which its first connection to a cluster changes."""

from __future__ import annotations

import os

from tensorflow.python.eager import context

from tf_recsync.cluster import connection, hosted_servers, local_cluster


def use_final_device_names(bind_address: str | None = None) -> None:
    """Gives this process's devices the names that they have as a cluster's coordinator.

    TensorFlow renames the devices of a process when it connects to a cluster for the first time,
    and variables, datasets' iterators and functions that were made before can't be used after
    it. Call this in the first lines of a program or a notebook that makes them before its
    cluster: they work before, during and after the connection, also after `Cluster.close`. It
    is not needed where the cluster or the strategy comes first.

    It starts TensorFlow's server of this process, which cluster and `connect` do otherwise. With
    the cluster in the environment variable `TF_CONFIG`, the server has the chief's address; else
    it listens on 127.0.0.1, for local clusters. A second call does nothing.

    Args:
      bind_address: As of `cluster_from_tf_config`, to which the same one has to be given: the
        server listens where it does from this call on. With `TF_CONFIG` only. Default None.

    Raises:
      RuntimeError: TensorFlow has run something in this process, whose devices have names, or
        this process cannot listen at the chief's address.
      ValueError: `TF_CONFIG` is wrong, this process is not its chief, or there is a
        `bind_address` without `TF_CONFIG`.

    Example:
      >>> import tf_recsync as recsync
      >>> recsync.use_final_device_names()  # doctest: +SKIP
    """
    eager_context = context.context()
    if eager_context.get_server_def() is not None:
        return
    if eager_context._context_handle is not None:
        raise RuntimeError(
            "use_final_device_names must be called before TensorFlow runs its first op in this "
            "process: what has been made by now knows the devices by their first names"
        )
    if os.environ.get("TF_CONFIG"):
        connection.cluster_from_tf_config(bind_address).start_alone()
    elif bind_address is not None:
        raise ValueError(
            "bind_address must be None without TF_CONFIG, since the servers of a LocalCluster are "
            f"reached from this machine only, got {bind_address!r}"
        )
    else:
        hosted_servers.reserve_threads()  # Before the first server.
        local_cluster.alone().start_alone()
