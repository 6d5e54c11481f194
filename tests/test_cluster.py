"""Clusters of real server processes: life and death, reachability, reconnection."""

import contextlib
import gc
import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import tensorflow as tf
from helpers import quickest, taken, wait_until
from sockets import listening_addresses
from started_servers import Server
from tensorflow.python.eager import context

import tf_recsync as recsync
from tf_recsync import _engine
from tf_recsync import cluster as recsync_cluster
from tf_recsync.cluster import (
    connection,
    local_cluster,
    server_defs,
    server_template,
    signs_of_life,
    tf_config,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
SERVERS = [("worker", 0), ("worker", 1), ("ps", 0)]


@pytest.fixture(scope="module")
def cluster():
    with recsync_cluster.LocalCluster(workers=2, ps=1) as cluster:
        cluster.connect()
        yield cluster


def add_on(job: str, index: int) -> tuple[float, str]:
    """Runs an op on a server; returns the result and where it was computed."""
    with tf.device(f"/job:{job}/task:{index}"):
        result = tf.add(tf.constant(2.0), 3.0)
    return result.numpy(), result.device


def make_queue(device: str) -> tf.Tensor:
    # Not tf.queue.FIFOQueue: it raises in its destructor once its server is gone.
    with tf.device(device):
        return tf.raw_ops.FIFOQueueV2(component_types=[tf.float32], shapes=[[]], capacity=1)


def dequeue(queue: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.float32])[0]


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_every_server_runs_ops(cluster):
    for job, index in SERVERS:
        value, device = add_on(job, index)
        assert value == 5.0
        assert f"/job:{job}/replica:0/task:{index}/" in device


def test_cluster_describes_itself(cluster):
    assert (cluster.workers, cluster.ps) == (2, 1)
    assert cluster.cluster_spec.num_tasks("worker") == 2
    assert cluster.resolver.cluster_spec() == cluster.cluster_spec
    assert cluster.resolver.rpc_layer == "grpc"
    assert all(cluster.is_alive(*server) for server in SERVERS)
    cluster.connect()  # Once more does nothing.


def test_workers_see_each_other(cluster):
    with tf.device("/job:worker/task:0"):
        variable = tf.Variable(20.0)

    @tf.function
    def read():
        return variable + 1.0

    with tf.device("/job:worker/task:1"):
        assert read().numpy() == 21.0


def test_all_listeners_are_on_loopback(cluster):
    dispatcher = tf.data.experimental.service.DispatchServer()
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(
            dispatcher_address=dispatcher.target.split("://")[1]
        )
    )
    dataset = tf.data.Dataset.range(5).apply(
        tf.data.experimental.service.distribute("parallel_epochs", dispatcher.target)
    )
    assert list(dataset.as_numpy_iterator()) == [0, 1, 2, 3, 4]

    # Of this process: the eager client's server, the dispatcher and its worker.
    own = listening_addresses(os.getpid())
    assert len(own) >= 3
    assert int(dispatcher.target.rpartition(":")[2]) in {port for _, port in own}
    for job, index in SERVERS:
        listeners = listening_addresses(cluster.pid(job, index))
        expected = tf_config.split_address(cluster.cluster_spec.task_address(job, index))
        assert expected in listeners
        assert len(listeners) == 2  # The other one is the transport's.
        own += listeners
    assert {address for address, _ in own} == {"127.0.0.1"}
    del worker


def test_killed_server_fails_at_once_and_comes_back(cluster):
    with tf.device("/job:ps/task:0"):
        survivor = tf.Variable(7.0)
    pid = cluster.pid("worker", 1)

    cluster.kill("worker", 1)
    assert not cluster.is_alive("worker", 1)

    def fail():
        with pytest.raises(tf.errors.UnavailableError):
            add_on("worker", 1)

    assert quickest(lambda: taken(fail), 15.0) < 15.0
    assert add_on("worker", 0)[0] == 5.0
    with pytest.raises(RuntimeError, match=r"timeout=0.2 s: worker:1 \(127.0.0.1:\d+\)"):
        cluster.readmit(timeout=0.2)
    with pytest.raises(RuntimeError, match="timeout=0 s: worker:1"):
        cluster.readmit(timeout=1000.0, up_timeout=0.0)
    with pytest.raises(ValueError, match="up_timeout must be from 0 to timeout=1, got 2"):
        cluster.readmit(timeout=1.0, up_timeout=2.0)

    cluster.restart("worker", 1)
    assert cluster.is_alive("worker", 1)
    assert cluster.pid("worker", 1) != pid
    cluster.readmit()
    assert add_on("worker", 1)[0] == 5.0
    assert survivor.numpy() == 7.0


def test_a_worker_that_is_back_can_be_used_though_another_has_failed_meanwhile(
    cluster, monkeypatch
):
    assert add_on("worker", 0)[0] == 5.0  # TensorFlow keeps the numbers.

    def fail():
        # As if another server had ended after this one was taken in.
        raise tf.errors.UnavailableError(None, None, "Connection refused")

    for _ in range(20):
        cluster.kill("worker", 0)
        cluster.restart("worker", 0)
        with monkeypatch.context() as patch:
            patch.setattr(context.context(), "_initialize_logical_devices", fail)
            with pytest.raises((tf.errors.UnavailableError, RuntimeError)) as error:
                cluster.readmit(timeout=3.0)
        if error.type is tf.errors.UnavailableError:
            break
        # On a busy machine, a server may not have answered in time.
    assert "Connection refused" in str(error.value)
    assert add_on("worker", 0)[0] == 5.0


def check_goes_on(cluster, bring_back):
    """The connection can be changed without worker 1, and with it when it was brought back."""
    cluster.readmit(timeout=100.0, without=[1])
    assert add_on("worker", 0)[0] == 5.0
    bring_back("worker", 1)
    cluster.readmit(timeout=100.0)
    assert add_on("worker", 1)[0] == 5.0


def test_who_is_left_out_is_asked_when_it_is_known(cluster):
    """Another thread may just have taken that one in."""
    cluster.kill("worker", 1)
    asked = threading.Event()

    def left_out():
        asked.set()
        return [("worker", 1)] if cluster.membership.is_away(("worker", 1)) else []

    with connection._lock:
        thread = threading.Thread(target=lambda: cluster.readmit(timeout=100.0, without=left_out))
        thread.start()
        cluster.restart("worker", 1)
        cluster.readmit()
        assert not asked.is_set()
    thread.join()
    assert asked.is_set()
    assert add_on("worker", 1)[0] == 5.0


def test_a_server_that_ends_while_it_is_readmitted_keeps_no_later_change_waiting(
    cluster, monkeypatch
):
    cluster.kill("worker", 1)
    with monkeypatch.context() as patch:
        # As if it had ended right after it was looked at.
        patch.setattr(signs_of_life, "accepts_connections", lambda address: True)
        with pytest.raises(RuntimeError, match=r"worker:1 (did not answer|\(127)"):
            cluster.readmit(timeout=0.5)
    check_goes_on(cluster, cluster.restart)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_server_that_stands_still_keeps_no_later_change_waiting(cluster, is_new):
    if is_new:
        cluster.restart("worker", 1)
    cluster.pause("worker", 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"worker:1 (did not answer|\(127)"):
            cluster.readmit(timeout=0.5)
    check_goes_on(cluster, cluster.resume)


def test_readmit_does_not_wait_for_calls_in_dispatch_scope(cluster):
    queue = make_queue("/job:ps/task:0")

    @tf.function
    def take():
        return dequeue(queue)

    values = []

    def wait_in_an_op():
        with cluster.dispatch_scope(), tf.device("/job:worker/task:0"):
            values.append(take().numpy())

    thread = threading.Thread(target=wait_in_an_op, daemon=True)
    thread.start()
    time.sleep(0.5)  # For the call to reach the worker.
    cluster.readmit(timeout=100.0)
    assert thread.is_alive()
    with tf.device("/job:ps/task:0"):
        tf.raw_ops.QueueEnqueueV2(handle=queue, components=[3.0])
    thread.join(100.0)
    assert values == [3.0]


def make_function():
    return tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([]))


@pytest.mark.parametrize("needs", ["a function", "a constant there", "a value from there"])
def test_a_server_that_stands_still_stops_only_threads_that_need_it(cluster, needs):
    device = "/job:worker/task:1"
    with tf.device(device):
        there = tf.add(tf.constant(1.0), 1.0)
    answers = []

    def need():
        with cluster.dispatch_scope():
            if needs == "a function":
                make_function()
            elif needs == "a constant there":
                with tf.device(device):
                    # TensorFlow keeps numbers that were sent before.
                    tf.constant(time.monotonic())
            else:
                answers.append(there.numpy())
        answers.append("done")

    with standing_still(cluster.pid("worker", 1)) as others_can_run:
        thread = threading.Thread(target=need)
        thread.start()
        time.sleep(1.0)
        assert others_can_run()
        assert not answers
    thread.join(100.0)
    assert answers[-1] == "done"


def test_nobody_waits_for_functions_to_be_dropped(cluster):
    functions = [make_function() for _ in range(3)]
    names = [function.name for function in functions]
    with standing_still(cluster.pid("worker", 1)) as others_can_run:
        del functions
        gc.collect()
        assert others_can_run()
        # Servers that do answer are of use meanwhile.
        assert add_on("worker", 0)[0] == 5.0
    assert wait_until(lambda: not any(map(context.context().has_function, names)), 100.0)


def test_the_end_of_a_dispatch_scope_waits_for_its_own_calls_only(cluster):
    with tf.device("/job:worker/task:1"):
        there = tf.add(tf.constant(1.0), 1.0)
    with standing_still(cluster.pid("worker", 1)) as others_can_run:
        del there  # A call that is not answered.
        with cluster.dispatch_scope():
            assert add_on("worker", 0)[0] == 5.0
        assert others_can_run()


@contextlib.contextmanager
def standing_still(pid):
    """Inside, a process stands still; yields what tells whether we did not have to wait for it.

    Another process ends it in any case: this one might not be able to.
    """
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: local_cluster.stands_still(pid), 100.0)
    command = ["sh", "-c", f"sleep 200; kill -CONT {pid}"]
    rescue = subprocess.Popen(command, start_new_session=True)
    try:
        yield lambda: rescue.poll() is None
    finally:
        os.killpg(rescue.pid, signal.SIGKILL)  # What sleeps, too.
        rescue.wait()
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("job", "index", "message"),
    [
        ("chief", 0, r"job must be one of .*'worker', 'ps'.*got 'chief'"),
        ("worker", True, "index must be an integer from 0 to 1, got True"),
        ("worker", 2, "index must be an integer from 0 to 1, got 2"),
        ("ps", -1, "index must be an integer from 0 to 0, got -1"),
    ],
)
def test_wrong_server_is_refused(cluster, job, index, message):
    for method in (cluster.kill, cluster.restart, cluster.pid, cluster.is_alive):
        with pytest.raises(ValueError, match=message):
            method(job, index)


def test_second_cluster_waits_for_the_first_to_close(cluster, monkeypatch):
    servers = {"chief": ["127.0.0.1:2"], "worker": ["127.0.0.1:1"]}
    task = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": servers, "task": task}))
    second = recsync_cluster.cluster_from_tf_config()
    with pytest.raises(RuntimeError, match="connected to another cluster.*close"):
        second.connect(timeout=0.1)


@pytest.mark.parametrize(
    ("started_on", "bind_address", "where"),
    [
        ("127.0.0.1", "127.0.0.2", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1", "all interfaces"),
    ],
)
def test_a_bind_address_is_refused_when_the_server_of_this_process_listens_elsewhere(
    cluster, monkeypatch, started_on, bind_address, where
):
    assert server_defs._listens_on == "127.0.0.1"  # As of any LocalCluster.
    monkeypatch.setattr(server_defs, "_listens_on", started_on)
    late = connection.Cluster(
        {"worker": ["127.0.0.1:1"]},
        chief_address=cluster._chief_address,
        bind_address=bind_address,
    )
    message = f"bind_address='{bind_address}' comes too late: .* listens on {where}, since"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            late.start_alone()
        assert _engine.confined_address() == "127.0.0.1"
    # Another chief gets a server of its own.
    assert server_defs.listens_on("127.0.0.1:1") is None


def test_reopening_after_close_and_after_a_taken_port(cluster, monkeypatch):
    # Runs after the tests of the module's cluster, as it closes that.
    pids = [cluster.pid(*server) for server in SERVERS]
    own_variable = tf.Variable(1.0)
    queue_device = "/job:ps/task:0"
    queue = make_queue(queue_device)
    errors = []

    def wait_in_an_op():
        try:
            with tf.device(queue_device):
                dequeue(queue)
        except tf.errors.OpError as error:
            errors.append(error)

    # A call in flight on the default executor: TensorFlow waits for it to end.
    thread = threading.Thread(target=wait_in_an_op, daemon=True)
    thread.start()
    time.sleep(0.3)
    cluster.close()
    thread.join(100.0)
    assert len(errors) == 1
    assert not any(is_running(pid) for pid in pids)
    assert not cluster.log_dir.exists()
    cluster.close()  # Once more does nothing.
    with pytest.raises(RuntimeError, match="closed"):
        cluster.connect()
    with pytest.raises(RuntimeError, match="closed"):
        cluster.pid("worker", 0)

    # Another process listens on the first port chosen; the start is repeated.
    reserve_port = local_cluster._reserve_port
    chosen = []

    def reserve_a_taken_port_first():
        chosen.append(reserve_port())
        if len(chosen) == 1:
            chosen[0].listen()
        return chosen[-1]

    monkeypatch.setattr(local_cluster, "_reserve_port", reserve_a_taken_port_first)
    with recsync_cluster.LocalCluster(workers=1) as second:
        assert len(chosen) == 2
        second.connect()
        assert add_on("worker", 0)[0] == 5.0
        assert own_variable.assign_add(1.0).numpy() == 2.0
        assert {address for address, _ in listening_addresses(os.getpid())} == {"127.0.0.1"}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A program that has closed a cluster and started another one.

    Yields:
        Its process, the process id of a server, the program's folder, and a temporary one of its.
    """
    folder = tmp_path_factory.mktemp("parent")
    script = folder / "train.py"  # No main guard.
    script.write_text(
        textwrap.dedent(
            """
            import os, time
            import tensorflow as tf
            from tf_recsync.cluster import LocalCluster, redirections
            redirections.filter_logs = lambda: None  # Errors that nobody shall have are seen.
            with LocalCluster(workers=1, start_timeout=300.0) as cluster:
                cluster.connect(timeout=200.0)
                functions = [tf.function(lambda i=i: tf.constant(i)) for i in range(100)]
                for function in functions:
                    function()
                del function, functions
            cluster = LocalCluster(workers=1, log_dir="logs", start_timeout=300.0)
            other = LocalCluster(workers=1, start_timeout=300.0)
            if os.fork() == 0:  # Inherits the pipes, and outlives its parent.
                time.sleep(300)
                os._exit(0)
            print(cluster.pid("worker", 0), other.log_dir, flush=True)
            time.sleep(300)
            """
        )
    )
    with open(folder / "errors", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        server, _, temporary = process.stdout.readline().strip().partition(" ")
        assert server, (folder / "errors").read_text()
        yield process, int(server), folder, pathlib.Path(temporary)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # The forked child too.
        process.wait(60)
        process.stdout.close()


def test_functions_dropped_just_before_the_end_of_a_cluster_leave_no_errors(parent):
    folder = parent[2]
    assert "Failed to remove function" not in (folder / "errors").read_text()


def test_servers_and_their_temporary_folder_go_with_a_killed_parent(parent):
    process, server, folder, temporary = parent
    assert is_running(server) and temporary.is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert wait_until(lambda: not is_running(server), 60.0)
    assert wait_until(lambda: not temporary.exists(), 60.0)
    assert (
        "tf_recsync server worker:0 listening on 127.0.0.1:"
        in (folder / "logs" / "worker-0.log").read_text()
    )


@pytest.fixture
def port():
    """A port that a server can listen on."""
    with local_cluster._reserve_port() as port:
        yield port.getsockname()[1]


def test_sigterm_ends_a_server_with_exit_code_0(port):
    address = f"127.0.0.1:{port}"
    config = {"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}}
    server = subprocess.Popen(
        [sys.executable, "-m", "tf_recsync.server"],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_CONFIG": json.dumps(config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        ready = server.stdout.readline()
        assert ready == f"tf_recsync server worker:0 listening on {address}\n"
        # Without --bind_address: the host of its own address, for the transport, too.
        listeners = listening_addresses(server.pid)
        assert tf_config.split_address(address) in listeners
        assert [host for host, _ in listeners] == ["127.0.0.1"] * 2
        server.terminate()
        assert server.wait(30.0) == 0
    finally:
        server.kill()
        server.wait(10.0)
        server.stdout.close()


def test_taken_port_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Server(tmp_path, {"worker": [address]}, "worker", 0) as server:
            assert server.wait(60.0) == 98
            message = f"worker:0 cannot listen on {address}: another process has the port"
            assert message in server.output()


def test_a_server_whose_bind_address_is_of_another_machine_names_it(port, tmp_path):
    address = f"127.0.0.1:{port}"
    # An address of nobody, kept for documentation.
    flag = "--bind_address=192.0.2.1"
    with Server(tmp_path, {"worker": [address]}, "worker", 0, flag) as server:
        assert server.wait(60.0) == 1
        reason = f"worker:0 cannot listen on {address} ({flag}): Cannot assign requested address"
        assert reason in server.output()


def test_server_with_wrong_task_is_refused(port, tmp_path):
    servers = {"worker": [f"127.0.0.1:{port}"]}
    with Server(tmp_path, servers, "worker", 0, "--task_index=1") as server:
        assert server.wait(60.0) == 2
        assert "must be an integer from 0 to 0 for job 'worker', got 1" in server.output()


@pytest.mark.parametrize("flag", ["--nonsense", "--inter_op_threads=0"])
def test_a_server_with_a_wrong_flag_ends_with_a_line_that_names_it(port, tmp_path, flag):
    servers = {"worker": [f"127.0.0.1:{port}"]}
    with Server(tmp_path, servers, "worker", 0, flag) as server:
        assert server.wait(60.0) == 2
        (line,) = server.output().splitlines()
        assert line.startswith("tf_recsync server: ") and flag.strip("-").split("=")[0] in line


def test_failed_start_is_reported_with_the_log(tmp_path, monkeypatch):
    # Python imports sitecustomize before anything else.
    (tmp_path / "sitecustomize.py").write_text(
        'import os\nos.write(2, b"first words\\nlast words\\n")\nos._exit(7)\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        RuntimeError, match="(?s)servers are forked from ended with exit code 7.*last words"
    ):
        recsync_cluster.LocalCluster(workers=1, log_dir=tmp_path)


def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_servers_are_forked_from_one_process_for_each_import(monkeypatch):
    with recsync_cluster.LocalCluster(workers=1, ps=1) as cluster:
        template = parent_of(cluster.pid("worker", 0))
        assert parent_of(cluster.pid("ps", 0)) == template != os.getpid()
        cluster.restart("ps", 0)
        assert parent_of(cluster.pid("ps", 0)) == template
        # What is read at import takes another process; the servers that run stay, and the
        # first one is used again.
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
        with recsync_cluster.LocalCluster(workers=1) as other:
            assert parent_of(other.pid("worker", 0)) not in (template, os.getpid())
            variables = pathlib.Path(f"/proc/{other.pid('worker', 0)}/environ")
            assert b"TF_ENABLE_ONEDNN_OPTS=0" in variables.read_bytes()
        assert cluster.is_alive("worker", 0)
        monkeypatch.undo()
        with recsync_cluster.LocalCluster(workers=1) as third:
            assert parent_of(third.pid("worker", 0)) == template


def test_servers_start_again_after_the_process_they_were_forked_from_was_killed():
    with recsync_cluster.LocalCluster(workers=1) as cluster:
        os.kill(parent_of(cluster.pid("worker", 0)), signal.SIGKILL)
        assert wait_until(lambda: not cluster.is_alive("worker", 0), 60.0)
        cluster.restart("worker", 0)
        assert cluster.is_alive("worker", 0)


def test_slow_start_is_reported(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(30)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = "servers are forked from was not ready within start_timeout=0.3 s"
    with pytest.raises(RuntimeError, match=message):
        recsync_cluster.LocalCluster(workers=1, start_timeout=0.3)
    monkeypatch.undo()
    with recsync_cluster.LocalCluster(workers=1) as cluster:
        assert cluster.is_alive("worker", 0)


def test_many_servers_that_do_not_answer_are_waited_for_at_the_same_time():
    everyone = threading.Barrier(60)

    def is_up(address):
        everyone.wait(100.0)  # An error, if the others are not asked meanwhile.
        return False

    addresses = {"worker": {index: f"worker-{index}:1" for index in range(60)}}
    with pytest.raises(RuntimeError, match=r"timeout=2 s: worker:0 \(worker-0:1\), worker:1 "):
        signs_of_life.wait_until(is_up, addresses, 2.0, time.monotonic())


def interrupt_once(monkeypatch, owner, name):
    """Has the next call of a method end by Ctrl-C."""
    method = getattr(owner, name)

    def interrupted(*unused, **unused_by_name):
        monkeypatch.setattr(owner, name, method)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name"), [(server_defs.Change, "join"), (server_template.ForkedProcess, "kill")]
)
def test_a_close_that_was_interrupted_can_be_done_again(monkeypatch, owner, name):
    with recsync_cluster.LocalCluster(workers=1) as cluster:
        cluster.connect()
        pid = cluster.pid("worker", 0)
        interrupt_once(monkeypatch, owner, name)
        with pytest.raises(KeyboardInterrupt):
            cluster.close()
        assert cluster.is_closed
        cluster.close()
        assert not is_running(pid) and not cluster.log_dir.exists()


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_close_ends_what_waits_for_a_server_in_another_thread(how):
    with recsync_cluster.LocalCluster(workers=1) as cluster:
        cluster.connect()
        getattr(cluster, how)("worker", 0)
        errors = []

        def readmit():
            try:
                cluster.readmit(timeout=300.0)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=readmit)
        thread.start()

        def is_waiting():
            if connection._lock.acquire(blocking=False):
                connection._lock.release()
                return False
            return True

        assert wait_until(is_waiting, 100.0)
        time.sleep(0.5)  # For it to call the server.
        cluster.close()
        thread.join()
    # The one that is gone was waited for; to the other one TensorFlow's call was ended.
    assert re.search("is closed, and what lay on|worker:0 did not answer", errors[0])


def test_limits_of_time_may_be_infinite():
    endless = float("inf")
    with recsync_cluster.LocalCluster(workers=1, ps=1, start_timeout=endless) as cluster:
        cluster.connect(timeout=endless)
        recsync.AsyncStrategy(cluster, silence_timeout=endless)
        cluster.restart("worker", 0)
        cluster.readmit(timeout=endless)
        assert add_on("worker", 0)[0] == 5.0


def test_a_change_of_the_connection_is_waited_for_though_it_was_interrupted(monkeypatch):
    server_defs.wait_for_pending(time.monotonic() + 60.0, "testing")
    end = threading.Event()
    interrupt_once(monkeypatch, server_defs.Change, "join")
    with pytest.raises(KeyboardInterrupt):
        server_defs.run_with_limit(end.wait, time.monotonic() + 60.0, "testing", list)
    with pytest.raises(RuntimeError, match="an earlier change of the connection has not ended"):
        server_defs.wait_for_pending(time.monotonic(), "testing")
    end.set()
    server_defs.wait_for_pending(time.monotonic() + 60.0, "testing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"workers": 1.5}, "workers must be an integer of at least 1, got 1.5"),
        ({"workers": True}, "workers must be an integer of at least 1, got True"),
        ({"workers": 1, "ps": -1}, "ps must be an integer of at least 0, got -1"),
        ({"workers": 1, "inter_op_threads": 0}, "inter_op_threads must be .* got 0"),
        ({"workers": 1, "intra_op_threads": "2"}, "intra_op_threads must be .* got '2'"),
        ({"workers": 1, "start_timeout": 0}, "start_timeout must be positive, in seconds, not 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        recsync_cluster.LocalCluster(**arguments)


def test_a_server_may_be_asked_by_many_threads_whether_it_runs():
    """Nobody reads from a descriptor that another one has closed, and that is another file's."""
    for _ in range(50):
        told, tell = os.pipe()
        process = server_template.ForkedProcess(os.getpid(), os.dup(told), told)
        everyone, errors = threading.Barrier(9), []

        def ask(process=process, everyone=everyone, errors=errors):
            try:
                everyone.wait(100)
                while process.poll() is None:
                    os.close(os.open("/proc/self/environ", os.O_RDONLY))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        everyone.wait(100)
        os.write(tell, b"exit 3\n")
        os.close(tell)
        for thread in threads:
            thread.join(100)
        assert not errors and process.poll() == 3


def test_a_server_can_be_asked_in_a_program_with_many_open_files():
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most <= 1500:
        pytest.skip("this process may not open so many files")
    told, tell = os.pipe()
    os.dup2(told, 1500)
    os.close(told)
    process = server_template.ForkedProcess(os.getpid(), os.dup(tell), 1500)
    assert process.poll() is None
    os.write(tell, b"exit 3\n")
    os.close(tell)
    assert process.poll() == 3


class _Interrupted:
    """A socket on which somebody waits who presses Ctrl-C."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def recv(self, size):
        raise KeyboardInterrupt


def test_ctrl_c_while_a_server_starts_gives_no_later_one_its_process_id(monkeypatch, tmp_path):
    # It reads its standard input, and answers nothing as long as that is open.
    monkeypatch.setattr(server_template, "_MODULE", "json.tool")
    template = server_template.Template(os.environ)
    monkeypatch.setattr(template, "_socket", _Interrupted(template._socket))
    with open(tmp_path / "log", "wb") as log, pytest.raises(KeyboardInterrupt):
        template.fork([], {}, log, log.fileno(), 10.0)
    assert not template.is_alive()
