"""Clusters of TensorFlow servers: starting them, connecting to them, losing some of them."""

from tf_recsync.cluster.connection import Cluster, cluster_from_tf_config
from tf_recsync.cluster.device_names import use_final_device_names
from tf_recsync.cluster.devices import CHIEF as CHIEF
from tf_recsync.cluster.devices import device_of as device_of
from tf_recsync.cluster.devices import fetch as fetch
from tf_recsync.cluster.devices import processor_of as processor_of
from tf_recsync.cluster.local_cluster import LocalCluster
from tf_recsync.cluster.membership import Member, MemberState, Server
from tf_recsync.cluster.messages import reason as reason
from tf_recsync.cluster.signs_of_life import Probe as Probe
from tf_recsync.cluster.signs_of_life import ask as ask
from tf_recsync.cluster.signs_of_life import is_reachable as is_reachable

# What other modules of the package use as well is imported under its own name.
__all__ = [
    "Cluster",
    "LocalCluster",
    "Member",
    "MemberState",
    "Server",
    "cluster_from_tf_config",
    "use_final_device_names",
]
