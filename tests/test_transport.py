"""Servers that fetch tensors from each other over connections of this package."""

import contextlib
import os
import resource
import socket
import struct
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from helpers import (
    AtBatch,
    clicks,
    compiled,
    compute_time,
    functional,
    held_back,
    mean_output,
    only_stopped_ones_are_silent,
    slope_model,
    wait_until,
)
from sockets import end_connections, listening_addresses, open_connections

import tf_recsync as recsync
from tf_recsync.cluster.silence_watch import Wait
from tf_recsync.optimizers import SGD, Adagrad

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

SERVERS = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
LIMIT = 3.0  # Seconds that a server may be silent while somebody waits.


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=2)


def own_port(cluster, job, index) -> int:
    """The port at which a server gives tensors to others, beside that of TensorFlow's calls."""
    known = int(cluster.cluster_spec.task_address(job, index).rpartition(":")[2])
    (port,) = {port for _, port in listening_addresses(cluster.pid(job, index))} - {known}
    return port


def connections_to(cluster, job, index) -> int:
    """How many connections other servers have to that port."""
    return open_connections(cluster.pid(job, index)).count(own_port(cluster, job, index))


def pass_on(values):
    """Tensors that go from worker 0 to ps 0, worker 1 and back to worker 0, by one function."""

    @tf.function
    def function():
        with tf.device("/job:worker/task:0"):
            tensors = [tf.identity(value) for value in values]
        for device in ("/job:ps/task:0", "/job:worker/task:1", "/job:worker/task:0"):
            with tf.device(device):
                tensors = [tf.identity(tensor) for tensor in tensors]
        return tensors

    with tf.device("/job:worker/task:0"):
        return function


def ones(batches):
    batch = tf.ones([2, 1])
    return tf.data.Dataset.from_tensors((batch, batch)).repeat(batches)


def train(strategy, *callbacks, batches=60, is_ready=lambda model: True):
    """Returns the weight and what was lost: each step of a batch takes 1 off the weight.

    Half of the batches come when `is_ready(model)`.
    """
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    data = held_back(ones(batches), batches // 2, lambda: is_ready(model))
    with compute_time(strategy, 0.03):
        model.fit(data, callbacks=callbacks, verbose=0)
    return float(model.get_weights()[0].item()), strategy.losses(model)


def test_tensors_of_all_types_arrive_as_they_were_sent(cluster):
    rng = np.random.default_rng(1)
    values = [
        tf.constant(rng.normal(size=shape), dtype)
        for dtype in (tf.float32, tf.float64, tf.bfloat16, tf.int64, tf.int32, tf.uint8)
        for shape in ((), (0,), (3, 0, 2), (5,), (1000, 300))
    ]
    values += [
        tf.constant([True, False]),
        tf.constant([1 + 2j], tf.complex64),
        tf.constant("text"),
        tf.constant([["", "a" * 100_000], ["\0", "ä"]]),
    ]
    function = pass_on(values)
    for _ in range(8):  # The first tensors go by TensorFlow's calls.
        for value, arrived in zip(values, function(), strict=True):
            assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape)
            assert np.asarray(arrived == value).all()
    assert connections_to(cluster, "ps", 0) > 0
    assert connections_to(cluster, "worker", 1) > 0


def test_branches_that_are_not_taken_send_nothing_to_other_servers(cluster):
    @tf.function
    def choose(which):
        with tf.device("/job:worker/task:0"):
            here, there = tf.raw_ops.Switch(data=tf.constant([1.0, 2.0]), pred=which)
        with tf.device("/job:ps/task:1"):
            moved = here + 1.0, there + 2.0
        with tf.device("/job:worker/task:0"):
            return tf.raw_ops.Merge(inputs=moved)[0]

    for which in (True, False) * 5:
        expected = [3.0, 4.0] if which else [2.0, 3.0]
        np.testing.assert_array_equal(choose(tf.constant(which)), expected)


def test_an_error_on_one_server_reaches_those_that_wait_for_its_tensors(cluster):
    @tf.function
    def function(divisor):
        # Both workers have begun when the error comes: TensorFlow may forget to end a part of a
        # function that it is about to start on a server when another part has failed already.
        with tf.device("/job:worker/task:0"):
            here = tf.minimum(divisor, 5)
        with tf.device("/job:worker/task:1"):
            there = tf.minimum(divisor, 6)
        with tf.device("/job:ps/task:0"):
            quotient = tf.constant([7]) // tf.minimum(here, there)
        with tf.device("/job:worker/task:1"):
            moved = quotient + 1
        with tf.device("/job:worker/task:0"):
            return moved + 1

    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="division by zero"):
            function(tf.constant(0))
        np.testing.assert_array_equal(function(tf.constant(2)), [5])


def test_tensors_with_names_that_are_too_long_for_a_request_arrive(cluster):
    @tf.function
    def function(value):
        with tf.device("/job:worker/task:0"):
            value = tf.identity(value, name="n" * 70_000)
        with tf.device("/job:ps/task:0"):
            value = tf.identity(value, name="m" * 70_000)
        with tf.device("/job:worker/task:0"):
            return value + 1

    pass_on([tf.constant(1)])()
    connections = connections_to(cluster, "ps", 0)
    for _ in range(5):
        assert function(tf.constant(1)).numpy() == 2
    assert connections_to(cluster, "ps", 0) >= connections


def message(head: bytes, body: int = 0) -> bytes:
    """A message as the transport frames it, but for the body."""
    return struct.pack("=IQ", len(head), body) + head


MAGIC = b"RECSYNC\x01"
REFUSED = b"this server has version 1 of the transport, not 7"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100), b""),  # gRPC's greeting.
        (message(b""), b""),
        (message(b"\0" * 40), b""),
        (message(MAGIC + struct.pack("=I", 7) + bytes(16)), REFUSED),
        (message(MAGIC + struct.pack("=I", 1) + bytes(16)), b""),  # Not the secret.
        (message(MAGIC + struct.pack("=I", 1), body=2**63), b""),
        (struct.pack("=IQ", 2**32 - 1, 2**64 - 1), b""),
    ],
)
def test_whoever_does_not_greet_as_it_should_is_sent_away(cluster, sent, answered):
    with socket.create_connection(("127.0.0.1", own_port(cluster, "ps", 0)), timeout=60) as client:
        client.sendall(sent)
        got = b""
        with contextlib.suppress(ConnectionResetError):  # It has not read all of it.
            while part := client.recv(1000):
                got += part
    assert got.endswith(answered)
    assert bool(got) == bool(answered)
    np.testing.assert_array_equal(pass_on([tf.constant([1.0])])(), [[1.0]])


def test_a_server_lives_through_more_connections_than_it_has_descriptors_for(cluster):
    pid = cluster.pid("ps", 0)
    address = ("127.0.0.1", own_port(cluster, "ps", 0))
    function = pass_on([tf.constant([1.0])])
    function()

    def busy_seconds() -> float:
        """Of a second with calls."""
        start, busy = time.monotonic(), cpu_seconds(pid)
        while time.monotonic() < start + 1:
            np.testing.assert_array_equal(function(), [[1.0]])
            time.sleep(0.05)
        return cpu_seconds(pid) - busy

    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    with contextlib.ExitStack() as stack:
        try:
            # Some are accepted. A few are left over, which threads of TensorFlow need that run
            # their first function.
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 40, before[1]))
            for _ in range(60):
                stack.enter_context(socket.create_connection(address, timeout=60))
            assert any(busy_seconds() < 0.5 for _ in range(10))  # It does not spin.
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    np.testing.assert_array_equal(function(), [[1.0]])


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def trained_weights(cluster) -> list[np.ndarray]:
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = functional()
        model.compile(Adagrad(0.1), "binary_crossentropy", steps_per_execution=2)
    ids, labels = clicks()
    model.fit(ids, labels, batch_size=32, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def memory(cluster, server, *, virtual=False) -> int:
    """The bytes that a server has; or for which it has addresses."""
    with open(f"/proc/{cluster.pid(*server)}/statm") as file:
        return int(file.read().split()[0 if virtual else 1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_the_tensors_that_were_sent(cluster):
    function = pass_on([tf.zeros([1_000_000])])

    def grown() -> int:
        before = [memory(cluster, server) for server in SERVERS]
        for _ in range(75):  # 300 MB through each of three servers.
            function()
        return max(
            memory(cluster, server) - old for server, old in zip(SERVERS, before, strict=True)
        )

    for _ in range(30):
        function()
    # More than once only if threads take part that had no memory of their own before.
    assert any(grown() < 100e6 for _ in range(10))


def test_what_has_come_of_a_tensor_is_freed_when_its_sender_dies(cluster, monkeypatch):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    size = tf.constant(250_000_000)

    @tf.function
    def send(value, size):
        with tf.device("/job:ps/task:0"):
            tensor = tf.fill([size], value)
        with tf.device("/job:worker/task:0"):
            return tf.reduce_max(tensor)

    def fail():
        with cluster.dispatch_scope(), contextlib.suppress(tf.errors.OpError):
            while True:  # However late it is seen that something has come.
                send(tf.constant(1.0), size)

    @tf.function
    def allocate():
        with tf.device("/job:worker/task:0"):
            return tf.shape(tf.raw_ops.Empty(shape=[size], dtype=tf.float32))

    def addresses():
        """Those that it needs to have a tensor of the size, once; untouched, it takes no memory.

        An allocator that keeps what was freed, as TensorFlow's for oneDNN does, uses it again.
        """
        allocate()
        return memory(cluster, ("worker", 0), virtual=True)

    def grown():
        return memory(cluster, ("worker", 0)) - before

    assert send(tf.constant(2.0), tf.constant(3)).numpy() == 2.0
    needed, before = addresses(), memory(cluster, ("worker", 0))
    thread = threading.Thread(target=fail)
    with calls_that_end(cluster):
        thread.start()
        assert wait_until(lambda: grown() > 100e6, 200)  # Of a thousand.
        cluster.kill("ps", 0)
        thread.join()
    assert wait_until(lambda: addresses() - needed < 800e6, 200)


@contextlib.contextmanager
def calls_that_end(cluster):
    """Inside, all calls fail when one of the servers is gone for a while.

    When a part of a function fails at once, as on a server that is gone, TensorFlow may forget to
    end another that it is about to start: see "Errors while a function starts" in
    docs/internals.md. Strategies watch their calls in the same way.
    """

    def end_calls(gone, seconds):
        logging.warning("%s:%d is gone and calls wait: they are cut off.", *gone)
        for server in SERVERS:
            cluster.cut_off(*server)

    wait = Wait(lambda: SERVERS, end_calls, LIMIT)
    cluster.watch.begin(wait)
    try:
        yield
    finally:
        cluster.watch.end(wait)


@pytest.mark.parametrize("job", ["worker", "ps"])
def test_a_server_that_was_started_again_is_found_again(cluster, job):
    function = pass_on([tf.constant([1.0])])
    for _ in range(3):
        function()
    cluster.kill(job, 0)
    ends = pytest.raises((tf.errors.UnavailableError, tf.errors.AbortedError))
    with calls_that_end(cluster), ends:
        function()
    cluster.restart(job, 0)
    cluster.readmit()
    function = pass_on([tf.constant([2.0])])
    deadline = time.monotonic() + 100
    while True:
        try:
            function()
            break
        except tf.errors.UnavailableError:  # gRPC lets calls fail for a while.
            assert time.monotonic() < deadline
            time.sleep(0.1)
    for _ in range(20):
        assert function()[0].numpy() == [2.0]
    assert connections_to(cluster, job, 0) > 0


def test_a_server_that_stood_still_when_it_was_first_asked_is_asked_again(cluster, monkeypatch):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    function = pass_on([tf.constant([1.0])])

    def is_connected() -> bool:
        function()
        return connections_to(cluster, "ps", 0) > 0

    def is_too_late() -> bool:
        """Whether it does not tell its address as long as others wait for that."""
        assert wait_until(is_connected, 200)
        cluster.pause("ps", 0)
        resume = threading.Timer(7.0, cluster.resume, ["ps", 0])
        resume.start()
        end_connections(cluster.pid("worker", 1), own_port(cluster, "ps", 0))
        function()
        resume.join()
        return connections_to(cluster, "ps", 0) == 0

    assert any(is_too_late() for _ in range(5))  # Who waits may stand still itself.
    assert wait_until(is_connected, 200)


def test_training_goes_on_when_a_worker_is_killed_and_comes_back(cluster, caplog):
    weight, losses = train(
        recsync.SyncStrategy(cluster),
        AtBatch(8, lambda: cluster.kill("worker", 1)),
        AtBatch(16, lambda: cluster.restart("worker", 1)),
        batches=400,
        is_ready=lambda model: "worker:1 is back" in caplog.text,
    )
    assert "worker:1 was lost" in caplog.text
    assert "worker:1 is back" in caplog.text
    # Two are a step; what was lost is done again, perhaps for the second time.
    assert -200 - losses.repeated - losses.steps <= weight <= -194


def test_training_ends_with_an_error_when_a_parameter_server_is_killed(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    with pytest.raises(RuntimeError, match="ps:0"):
        train(strategy, AtBatch(8, lambda: cluster.kill("ps", 0)), batches=10_000)


@pytest.mark.full
def test_servers_that_stand_still_are_given_up(cluster, caplog, monkeypatch):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    strategy = recsync.AsyncStrategy(cluster, silence_timeout=5.0)
    weight, losses = train(
        strategy,
        AtBatch(8, lambda: cluster.pause("worker", 1)),
        batches=400,
        is_ready=lambda model: strategy.losses(model).workers,
    )
    assert "worker:1 was lost" in caplog.text
    assert -400 - losses.repeated - losses.steps <= weight <= -400
    cluster.resume("worker", 1)
    with pytest.raises(RuntimeError, match="ps:1"):
        train(strategy, AtBatch(8, lambda: cluster.pause("ps", 1)), batches=10_000)


def test_a_server_without_the_transport_is_asked_as_tensorflow_does(cluster, monkeypatch):
    server = cluster._servers["worker", 1]
    flags = [flag.replace("transport=recsync", "transport=grpc") for flag in server._arguments]
    monkeypatch.setattr(server, "_arguments", flags)
    cluster.kill("worker", 1)
    cluster.restart("worker", 1)
    cluster.readmit()
    assert len(listening_addresses(cluster.pid("worker", 1))) == 1
    value = tf.constant([3.0])
    function = pass_on([value])
    for _ in range(20):
        assert function()[0].numpy() == [3.0]
    weight, _ = train(recsync.AsyncStrategy(cluster))
    assert weight == -60
    cluster.kill("worker", 1)  # The next one has the transport again.


# Last: these close the shared cluster's connection, or need none.


def test_training_gives_the_same_as_over_grpc(clusters):
    clusters.close()
    weights = []
    for processes in (None, 0):
        for transport in ("grpc", "recsync"):
            with recsync.LocalCluster(
                workers=1, ps=2, processes=processes, transport=transport
            ) as one:
                weights.append(trained_weights(one))
    for others in weights[1:]:
        for ours, theirs in zip(weights[0], others, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("wrong", ["tcp", None, 1])
def test_other_transports_are_refused(wrong):
    with pytest.raises(ValueError, match=r"transport must be one of .*recsync.*grpc"):
        recsync.LocalCluster(workers=1, ps=1, transport=wrong)
