"""Servers that are there and do not answer: stopped, hung, or cut off from the network."""

import contextlib
import socket
import time

import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, compute_time, mean_output, slope_model

import tf_recsync as recsync
from tf_recsync.cluster import signs_of_life
from tf_recsync.cluster.signs_of_life import cut_connections, peers_of
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import worker_run
from tf_recsync.strategies.watched_calls import watched

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

MAKERS = {
    "async": recsync.AsyncStrategy,
    "sync": recsync.SyncStrategy,
}
LIMIT = 3.0  # Seconds that a server may be silent; a busy machine answers within that.
SERVERS = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]


@pytest.fixture
def two(clusters):
    """A cluster in which all servers run again after a test."""
    cluster = clusters.get(workers=2, ps=2)
    yield cluster
    for server in SERVERS:
        cluster.resume(*server)


def train(strategy, *callbacks, steps: int = 10_000) -> list[float]:
    """Returns the weight: each step of a batch takes 1 off."""
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat(steps)
    with compute_time(strategy, 0.05):
        model.fit(ones, callbacks=callbacks, verbose=0)
    return model.get_weights()[0].ravel().tolist()


class AfterReturn(AtBatch):
    """Lets a lost worker go on, and ends the epoch a while after it has come back."""

    def __init__(self, cluster, log):
        super().__init__(8, lambda: cluster.pause("worker", 1))
        self._cluster = cluster
        self._log = log
        self.returned = None

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if "worker:1 was lost" in self._log.text and self.returned is None:
            self._cluster.resume("worker", 1)
        if "worker:1 is back" in self._log.text:
            self.returned = self.returned or batch
            self.model.stop_training = batch > self.returned + 20


@pytest.mark.cases("sync")
@pytest.mark.parametrize("mode", MAKERS)
def test_others_go_on_when_a_worker_stands_still_and_it_takes_part_again(two, mode, caplog):
    strategy = MAKERS[mode](two, silence_timeout=LIMIT)
    after = AfterReturn(two, caplog)
    train(strategy, after)
    assert after.returned
    assert "worker:1 has not answered for" in caplog.text
    assert "worker:0" not in caplog.text
    assert train(strategy, steps=6) == [-3.0 if mode != "async" else -6.0]


def test_a_model_is_not_built_on_a_parameter_server_that_stands_still(two):
    strategy = recsync.AsyncStrategy(two, silence_timeout=LIMIT)
    two.pause("ps", 0)
    with strategy.scope(), pytest.raises(RuntimeError, match="ps:0 has not answered for . s"):
        slope_model()


@pytest.mark.parametrize(
    "ask",
    [lambda layer: layer.key_counts(), lambda layer: layer.variables[0].keyed.in_order()],
    ids=["counts", "keys"],
)
def test_nobody_waits_for_ever_for_keys_of_a_parameter_server_that_stands_still(two, ask):
    strategy = recsync.AsyncStrategy(two, silence_timeout=LIMIT)
    with strategy.scope():
        layer = EmbeddingCollection(
            [TableConfig("users", 64, 2, keys="any")], [FeatureConfig("user", "users")]
        )
        layer.build()
    two.pause("ps", 0)
    with pytest.raises(RuntimeError, match="ps:0 has not answered for"):
        ask(layer)


def test_a_call_that_waits_elsewhere_ends_when_a_parameter_server_is_gone(two):
    """As one of which TensorFlow has forgotten that a part has failed."""
    with tf.device("/job:worker/task:0"):
        queue = tf.queue.FIFOQueue(1, tf.float32)
    two.kill("ps", 0)
    with pytest.raises(RuntimeError, match="ps:0 has not answered"), watched(two, LIMIT):
        queue.dequeue()


def test_a_strategy_is_made_although_a_worker_stands_still(two, caplog):
    two.pause("worker", 1)
    recsync.ShadowSyncStrategy(two, recsync.EASGD(0.3), silence_timeout=LIMIT)
    assert "worker:1 does not answer, and whether it has threads enough is not known" in caplog.text


def test_training_fails_when_all_workers_stand_still(two):
    strategy = recsync.SyncStrategy(two, worker_timeout=1.0, silence_timeout=LIMIT)

    def pause():
        two.pause("worker", 0)
        two.pause("worker", 1)
        paused.append(time.monotonic())

    paused = []
    with pytest.raises(RuntimeError, match="worker:0 is lost.*worker:1 is lost") as error:
        train(strategy, AtBatch(8, pause))
    assert "worker_timeout" in str(error.value)
    assert LIMIT < time.monotonic() - paused[0] < 60


def test_a_slow_worker_is_not_taken_for_silent(two, caplog):
    strategy = recsync.AsyncStrategy(two, worker_timeout=1.0, silence_timeout=LIMIT)
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    with compute_time(strategy, 1.6 * LIMIT):  # Longer than a silent server is waited for.
        model.fit(tf.ones([2, 1]), tf.ones([2, 1]), batch_size=1, verbose=0)
    assert model.get_weights()[0].ravel().tolist() == [-2.0]
    assert "answered" not in caplog.text


def test_only_connections_to_the_named_server_are_cut():
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = listener.getsockname()
            ours = stack.enter_context(socket.create_connection(address, timeout=10))
            theirs = stack.enter_context(listener.accept()[0])
            ends.append((address[1], ours, theirs))
        (port, cut, _), (_, kept, theirs) = ends
        assert cut_connections(peers_of(f"localhost:{port}")) == 1
        assert cut.recv(1) == b""  # The end, rather than a wait.
        theirs.sendall(b"x")
        assert kept.recv(1) == b"x"


def test_connections_are_cut_also_when_a_name_can_no_longer_be_resolved(two, monkeypatch):
    two.connect()
    with tf.device("/job:worker/task:1"):
        tf.add(1, 2)
    cut = []
    monkeypatch.setattr(signs_of_life, "cut_connections", cut.append)

    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    two.cut_off("worker", 1)
    host, _, port = two.cluster_spec.task_address("worker", 1).rpartition(":")
    assert (host, int(port)) in cut[0]


# The last one: what it leaves on the servers is that of a pass that failed.
@pytest.mark.parametrize("mode", MAKERS)
def test_training_fails_when_a_parameter_server_stands_still(two, mode, monkeypatch):
    # It also is asked who waits for whom, which is logged before it is given up.
    monkeypatch.setattr(worker_run, "_STALL_SECONDS", 1.0)
    strategy = MAKERS[mode](two, worker_timeout=1.0, silence_timeout=LIMIT)
    with pytest.raises(RuntimeError, match="parameter server ps:0 has not answered for"):
        train(strategy, AtBatch(8, lambda: two.pause("ps", 0)))
