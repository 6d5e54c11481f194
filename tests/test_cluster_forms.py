"""Local clusters whose servers share processes, or live in this one."""

import json
import os
import subprocess
import sys
import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compiled, mean_output, slope_model, steps_of, wait_until
from sockets import listening_addresses
from started_servers import Server
from test_cluster import ROOT, is_running

import tf_recsync as recsync
from tf_recsync import ops, server
from tf_recsync.cluster import local_cluster, tf_config
from tf_recsync.optimizers import SGD

SERVERS = [("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0), ("ps", 1)]


def check_trains(strategy):
    """On all servers; every step takes exactly 1 off the only weight."""
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(30)
    model.fit(ones, verbose=0)
    assert steps_of(model) == 30 and model.get_weights()[0] == -30


def addresses_of(cluster) -> set[tuple[str, int]]:
    return {
        tf_config.split_address(cluster.cluster_spec.task_address(job, index))
        for job, index in SERVERS
    }


def test_servers_in_this_process_train_and_can_not_be_killed():
    with recsync.LocalCluster(workers=3, ps=2, processes=0) as cluster:
        strategy = recsync.AsyncStrategy(cluster)
        for job, index in SERVERS:
            with tf.device(f"/job:{job}/task:{index}"):
                assert f"/job:{job}/replica:0/task:{index}/" in tf.add(1.0, 2.0).device
            assert cluster.pid(job, index) == os.getpid()
            assert cluster.is_alive(job, index)
        check_trains(strategy)
        own = listening_addresses(os.getpid())
        assert addresses_of(cluster) <= set(own)
        assert {address for address, _ in own} == {"127.0.0.1"}
        for method in (cluster.kill, cluster.restart, cluster.pause, cluster.resume):
            with pytest.raises(RuntimeError, match="worker:1 runs in this process.*processes="):
                method("worker", 1)
            with pytest.raises(ValueError, match="index must be an integer from 0 to 1, got 2"):
                method("ps", 2)
        check_trains(strategy)
        first = addresses_of(cluster)
    cluster.close()  # Once more does nothing.
    with pytest.raises(RuntimeError, match="closed"):
        cluster.is_alive("worker", 0)
    # They idle, and the next cluster that is as large uses them again.
    with recsync.LocalCluster(workers=3, ps=2, processes=0) as again:
        assert addresses_of(again) == first
        with recsync.LocalCluster(workers=3, ps=2, processes=0) as beside:
            assert not addresses_of(beside) & first
        check_trains(recsync.AsyncStrategy(again))


def test_a_call_in_flight_ends_with_its_cluster_and_hinders_no_later_one_in_this_process():
    about_to_wait = threading.Event()
    errors = []

    def wait(cluster):
        with cluster.dispatch_scope(), tf.device("/job:ps/task:1"):
            empty = tf.queue.FIFOQueue(1, [tf.float32])
            about_to_wait.set()
            try:
                empty.dequeue()
            except tf.errors.OpError as error:
                errors.append(error)

    with recsync.LocalCluster(workers=1, ps=2, processes=0) as cluster:
        cluster.connect()
        waiting = threading.Thread(target=wait, args=(cluster,), daemon=True)
        waiting.start()
        assert about_to_wait.wait(60)
        time.sleep(0.2)  # Until the call has reached the server.
    waiting.join(60)
    assert len(errors) == 1
    for ps in (3, 2):
        with recsync.LocalCluster(workers=1, ps=ps, processes=0) as cluster:
            cluster.connect()
            with cluster.dispatch_scope():
                numbers = []
                for index in range(ps):
                    with tf.device(f"/job:ps/task:{index}"):
                        numbers.append(tf.add(1.0, float(index)))
                with tf.device("/job:ps/task:1"):  # It fetches them from the others.
                    assert float(tf.add_n(numbers)) == ps * (ps + 1) / 2


@pytest.mark.full
def test_sixteen_workers_in_a_process_that_connected_elsewhere_before_all_go_on():
    # In a process of its own: the size of the pool that servers share is decided
    # once, by the first connection. 16 calls at a time need more threads than that.
    script = """
import tf_recsync as recsync
from test_cluster_forms import check_trains
with recsync.LocalCluster(workers=1, ps=1, processes=1) as cluster:
    check_trains(recsync.AsyncStrategy(cluster))
with recsync.LocalCluster(workers=16, ps=2, processes=0) as cluster:
    check_trains(recsync.AsyncStrategy(cluster))
try:
    recsync.LocalCluster(workers=32, ps=1, processes=0)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "33 servers in this process (processes=0) need 8 threads each" in done.stdout


def test_the_pool_of_threads_is_made_once():
    size = ops.server_threads(256)
    assert size.dtype == tf.int32 and size.shape == () and size > 0
    assert ops.server_threads(size + 1) == size
    for wrong in (0, -1, 2**31 - 1, [1, 2]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="threads must be"):
            ops.server_threads(wrong)
    with pytest.raises(ValueError, match="rank"):
        tf.function(lambda: ops.server_threads([1, 2]))()


def test_servers_of_one_process_are_lost_and_come_back_together(tmp_path):
    with recsync.LocalCluster(workers=3, ps=2, processes=3, log_dir=tmp_path) as cluster:
        pids = {task: cluster.pid(*task) for task in SERVERS}
        assert len(set(pids.values())) == 3
        # Parameter servers are not lost with a worker.
        assert {pids["ps", 0], pids["ps", 1]}.isdisjoint(pids["worker", i] for i in range(3))
        found = [address for pid in set(pids.values()) for address in listening_addresses(pid)]
        assert addresses_of(cluster) < set(found)
        assert len(found) == 2 * len(SERVERS)  # The others are the transport's.
        assert {address for address, _ in found} == {"127.0.0.1"}
        logs = "".join(path.read_text() for path in tmp_path.iterdir())
        for job, index in SERVERS:
            address = cluster.cluster_spec.task_address(job, index)
            assert f"tf_recsync server {job}:{index} listening on {address}" in logs

        strategy = recsync.AsyncStrategy(cluster)
        check_trains(strategy)
        together = [s for s in SERVERS if pids[s] == pids["worker", 2]]
        assert together == [("worker", 1), ("worker", 2)]
        cluster.kill("worker", 2)
        for task in SERVERS:
            assert cluster.is_alive(*task) == (task not in together)
        for job, index in together:
            with pytest.raises(tf.errors.UnavailableError), tf.device(f"/job:{job}/task:{index}"):
                tf.add(1.0, 2.0)
        check_trains(strategy)  # On worker 0 alone.
        cluster.restart("worker", 1)
        cluster.readmit()
        assert all(cluster.is_alive(*task) for task in SERVERS)
        assert cluster.pid("worker", 1) == cluster.pid("worker", 2) != pids["worker", 1]
        check_trains(strategy)
    assert wait_until(lambda: not any(map(is_running, pids.values())), 60.0)


@pytest.mark.parametrize(
    ("workers", "ps", "processes", "expected"),
    [
        (2, 1, None, [["w0"], ["w1"], ["p0"]]),
        (2, 1, 3, [["w0"], ["w1"], ["p0"]]),
        (2, 1, 2, [["w0", "w1"], ["p0"]]),
        (2, 1, 1, [["w0", "w1", "p0"]]),
        (3, 0, 2, [["w0"], ["w1", "w2"]]),
        (1, 3, 3, [["w0"], ["p0"], ["p1", "p2"]]),
        (4, 4, 4, [["w0", "w1"], ["w2", "w3"], ["p0", "p1"], ["p2", "p3"]]),
        (1, 1, 2, [["w0"], ["p0"]]),
    ],
)
def test_servers_are_shared_out_evenly_workers_and_parameter_servers_apart(
    workers, ps, processes, expected
):
    shared = local_cluster._share_out({"worker": workers, "ps": ps}, processes)
    assert [[f"{job[0]}{index}" for job, index in part] for part in shared] == expected


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
@pytest.mark.parametrize("ps", [0, 1, 4, 7])
def test_every_number_of_processes_gets_every_server_once(workers, ps):
    for processes in range(1, workers + ps + 1):
        shared = local_cluster._share_out({"worker": workers, "ps": ps}, processes)
        assert len(shared) == processes and all(shared)
        tasks = [task for part in shared for task in part]
        assert tasks == [("worker", i) for i in range(workers)] + [("ps", i) for i in range(ps)]
        if processes > 1:
            assert all(len({job for job, _ in part}) == 1 for part in shared)


@pytest.mark.parametrize(
    ("workers", "processes", "cores", "threads"),
    [(1, 3, 1, 1), (1, 3, 8, 8), (2, 4, 8, 4), (3, 5, 8, 2), (16, 18, 8, 1), (16, 3, 8, 4)],
)
def test_processes_with_workers_share_the_cores_of_a_machine(workers, processes, cores, threads):
    shares = local_cluster._share_out({"worker": workers, "ps": 2}, processes)
    assert local_cluster.default_intra_op_threads(shares, cores) == threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"processes": -1}, "processes must be an integer of at least 0, got -1"),
        ({"processes": 1.0}, "processes must be an integer of at least 0, got 1.0"),
        ({"processes": 4}, "processes must be at most one for each of the 3 servers, got 4"),
        ({"processes": 0, "log_dir": "logs"}, "log_dir must be None with processes=0.*'logs'"),
        ({"processes": 0, "inter_op_threads": 4}, "inter_op_threads must be None .* got 4"),
        ({"processes": 0, "intra_op_threads": 4}, "intra_op_threads must be None .* got 4"),
    ],
)
def test_wrong_forms_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        recsync.LocalCluster(workers=2, ps=1, **arguments)


ADDRESSES = {
    "chief": ["127.0.0.1:9"],
    "worker": ["127.0.0.1:10", "10.0.0.1:9"],
    "reader": ["127.0.0.1:11"],
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": ["worker:0", "worker:0"]}, "--tasks must be different tasks"),
        ({"tasks": ["worker"]}, "--tasks must be different tasks"),
        ({"tasks": [""]}, "--tasks must be different tasks"),
        ({"tasks": ["worker:0", "chief:0"]}, "must be 'worker', 'ps' or 'reader', got 'chief'"),
        ({"tasks": ["worker:0", "worker:9"]}, "from 0 to 1 for job 'worker', got 9"),
        ({"tasks": ["worker:0", "reader:0"]}, "--tasks must have readers among themselves"),
        ({"tasks": ["worker:0"], "task_index": 0}, "--tasks can't be used with"),
        ({"tasks": ["worker:0", "worker:1"]}, "listen on one address; .* --bind_address"),
    ],
)
def test_wrong_tasks_are_refused(monkeypatch, arguments, message):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": ADDRESSES}))
    flags = types.SimpleNamespace(**{"job_name": None, "task_index": None, **arguments})
    with pytest.raises(ValueError, match=message):
        server._loopback_address(server._read_tasks(flags))


def test_a_server_with_wrong_tasks_ends(tmp_path):
    with Server(tmp_path, ADDRESSES, "worker", 0, "--tasks=worker:0,worker:1") as server:
        assert server.wait(200.0) == 2
        assert "name it with --bind_address" in server.output()


def test_fit_in_another_thread_ends_with_an_error_when_the_cluster_is_closed(caplog):
    cluster = recsync.LocalCluster(workers=2, processes=0)
    strategy = recsync.HopStrategy(cluster, recsync.topology.ring(2))
    recsync.testing.set_compute_time(strategy, 0.05)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1)))).repeat()
    errors = []

    def fit():
        try:
            model.fit(data, steps_per_epoch=100_000, verbose=0)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=fit)
    thread.start()
    assert wait_until(lambda: sum(strategy.worker_steps(model)) > 4, 60.0)
    cluster.close()
    thread.join(120.0)
    assert len(errors) == 1 and "was closed in the middle of a pass" in errors[0]
    assert "lost" not in caplog.text
