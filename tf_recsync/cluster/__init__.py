"""Clusters of TensorFlow servers: starting them, connecting to them, losing some of them."""

from tf_recsync.cluster.connection import Cluster, cluster_from_tf_config
from tf_recsync.cluster.device_names import use_final_device_names
from tf_recsync.cluster.local_cluster import LocalCluster
from tf_recsync.cluster.membership import Member, MemberState, Server
from tf_recsync.cluster.messages import reason
from tf_recsync.cluster.signs_of_life import (
    CHIEF,
    Probe,
    ask,
    device_of,
    is_reachable,
    processor_of,
)

__all__ = [
    "CHIEF",
    "Cluster",
    "LocalCluster",
    "Member",
    "MemberState",
    "Probe",
    "Server",
    "ask",
    "cluster_from_tf_config",
    "device_of",
    "is_reachable",
    "processor_of",
    "reason",
    "use_final_device_names",
]
