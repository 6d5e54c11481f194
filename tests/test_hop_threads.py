"""Threads for calls that wait for neighbors: every server has enough, or the strategy says so."""

import os

import pytest

import tf_recsync as recsync
from tf_recsync import ops, topology
from tf_recsync.cluster import grpc_settings, hosted_servers
from tf_recsync.synchronization import hop
from tf_recsync.synchronization.remote_values import at


@pytest.mark.parametrize("workers", [1, 2, 5, 16, 30])
def test_the_default_is_enough_for_any_graph(workers):
    graph = topology.complete(workers) if workers > 1 else topology.from_edges(1, [])
    needed = max(hop.threads_needed(graph, worker) for worker in range(workers))
    assert hosted_servers.default_threads(workers) >= needed


def test_the_default_does_not_grow_with_a_thousand_workers():
    most = max(64, 2 * os.cpu_count())
    assert hosted_servers.default_threads(30) == hosted_servers.default_threads(1000) == most
    # A ring's need no more, however many they are; those of all pairs would.
    assert hop.threads_needed(topology.ring(1000), 0) <= most
    assert hop.threads_needed(topology.complete(100), 0) > 64


def test_a_server_has_a_thread_for_each_of_four_queues_of_calls(monkeypatch):
    monkeypatch.delenv("TF_GRPC_WORKER_CACHE_QUEUES", raising=False)
    grpc_settings.apply()
    assert os.environ["TF_GRPC_WORKER_CACHE_QUEUES"] == "4"
    with recsync.LocalCluster(workers=1) as cluster:
        few = threads_of(cluster.pid("worker", 0))
    monkeypatch.setenv("TF_GRPC_WORKER_CACHE_QUEUES", "34")
    grpc_settings.apply()
    with recsync.LocalCluster(workers=1) as cluster:
        # What the user has set stays.
        assert threads_of(cluster.pid("worker", 0)) == pytest.approx(few + 30, abs=10)


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_all_may_wait_for_all_beside_a_parameter_server():
    graph = topology.complete(8)
    # Four workers in each of two processes, which share its threads.
    with recsync.LocalCluster(workers=8, ps=1, processes=3, start_timeout=240) as cluster:
        recsync.HopStrategy(cluster, graph)
        for worker in (0, 7):
            with at(cluster, worker):
                assert int(ops.server_threads(1)) >= 4 * hop.threads_needed(graph, worker)


def test_too_few_threads_are_refused_and_named():
    with (
        recsync.LocalCluster(
            workers=3, processes=1, inter_op_threads=7, start_timeout=240
        ) as cluster,
        pytest.raises(
            ValueError,
            match="the process of workers 0, 1 and 2 has 21 threads, and up to 24 calls may "
            "wait in it for neighbors; start the servers with inter_op_threads=8 or more",
        ),
    ):
        recsync.HopStrategy(cluster, topology.complete(3))


@pytest.mark.full
def test_servers_that_share_a_process_share_its_threads():
    with recsync.LocalCluster(workers=12, processes=0) as cluster:
        cluster.connect()
        recsync.HopStrategy(cluster, topology.ring_based(12))
        with pytest.raises(ValueError, match="has 256 threads, and up to 312 calls .* processes=1"):
            recsync.HopStrategy(cluster, topology.complete(12))
