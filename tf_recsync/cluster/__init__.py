"""Clusters of TensorFlow servers: starting them, connecting to them, losing some of them."""

from tf_recsync.cluster.connection import Cluster, cluster_from_tf_config, is_reachable
from tf_recsync.cluster.local_cluster import LocalCluster

__all__ = ["Cluster", "LocalCluster", "cluster_from_tf_config", "is_reachable"]
