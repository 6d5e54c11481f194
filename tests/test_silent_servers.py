"""Servers that are there and do not answer: stopped, hung, or cut off from the network."""

import collections
import contextlib
import socket
import time

import keras
import pytest
import tensorflow as tf
from helpers import (
    AtBatch,
    compiled,
    compute_time,
    mean_output,
    only_stopped_ones_are_silent,
    slope_model,
    wait_until,
)

import tf_recsync as recsync
from tf_recsync.cluster import device_of, is_reachable, signs_of_life
from tf_recsync.cluster.signs_of_life import cut_connections, peers_of
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import comebacks, worker_run
from tf_recsync.strategies.watched_calls import watched
from tf_recsync.synchronization.synchronizer import Crew

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

MAKERS = {
    "async": recsync.AsyncStrategy,
    "sync": recsync.SyncStrategy,
}
LIMIT = 3.0  # Seconds that a server may be silent.
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
def test_others_go_on_when_a_worker_stands_still_and_it_takes_part_again(
    two, mode, caplog, monkeypatch
):
    only_stopped_ones_are_silent(monkeypatch, two)
    strategy = MAKERS[mode](two, silence_timeout=LIMIT)
    after = AfterReturn(two, caplog)
    train(strategy, after)
    assert after.returned
    assert "worker:1 has not answered for" in caplog.text
    assert "worker:0" not in caplog.text
    assert train(strategy, steps=6) == [-3.0 if mode != "async" else -6.0]


def test_a_model_is_not_built_on_a_parameter_server_that_stands_still(two, monkeypatch):
    only_stopped_ones_are_silent(monkeypatch, two)
    strategy = recsync.AsyncStrategy(two, silence_timeout=LIMIT)
    two.pause("ps", 0)
    with strategy.scope(), pytest.raises(RuntimeError, match="ps:0 has not answered for . s"):
        slope_model()


@pytest.mark.parametrize(
    "ask",
    [lambda layer: layer.key_counts(), lambda layer: layer.variables[0].keyed.in_order()],
    ids=["counts", "keys"],
)
def test_nobody_waits_for_ever_for_keys_of_a_parameter_server_that_stands_still(
    two, monkeypatch, ask
):
    only_stopped_ones_are_silent(monkeypatch, two)
    strategy = recsync.AsyncStrategy(two, silence_timeout=LIMIT)
    with strategy.scope():
        layer = EmbeddingCollection(
            [TableConfig("users", 64, 2, keys="any")], [FeatureConfig("user", "users")]
        )
        layer.build()
    two.pause("ps", 0)
    with pytest.raises(RuntimeError, match="ps:0 has not answered for"):
        ask(layer)


def test_a_call_that_waits_elsewhere_ends_when_a_parameter_server_is_gone(two, monkeypatch):
    """As one of which TensorFlow has forgotten that a part has failed."""
    only_stopped_ones_are_silent(monkeypatch, two)
    with tf.device("/job:worker/task:0"):
        queue = tf.queue.FIFOQueue(1, tf.float32)
    two.kill("ps", 0)
    with pytest.raises(RuntimeError, match="ps:0 has not answered"), watched(two, LIMIT):
        queue.dequeue()


def test_a_strategy_is_made_although_a_worker_stands_still(two, caplog):
    two.pause("worker", 1)
    recsync.ShadowSyncStrategy(two, recsync.EASGD(0.3), silence_timeout=LIMIT)
    assert "worker:1 does not answer, and whether it has threads enough is not known" in caplog.text


def test_training_fails_when_all_workers_stand_still(two, monkeypatch):
    only_stopped_ones_are_silent(monkeypatch, two)
    strategy = recsync.SyncStrategy(two, worker_timeout=1.0, silence_timeout=LIMIT)

    def pause():
        paused.append(time.monotonic())
        two.pause("worker", 0)
        two.pause("worker", 1)

    paused = []
    with pytest.raises(RuntimeError, match="worker:0 is lost.*worker:1 is lost") as error:
        train(strategy, AtBatch(8, pause))
    assert "worker_timeout" in str(error.value)
    assert time.monotonic() - paused[0] > LIMIT


def test_a_slow_worker_is_not_taken_for_silent(two, caplog):
    def is_waited_for() -> bool:
        caplog.clear()
        strategy = recsync.AsyncStrategy(two, worker_timeout=1.0, silence_timeout=LIMIT)
        model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
        # Longer than a silent server is waited for.
        with compute_time(strategy, 1.6 * LIMIT), contextlib.suppress(RuntimeError):
            model.fit(tf.ones([2, 1]), tf.ones([2, 1]), batch_size=1, verbose=0)
            return "answered" not in caplog.text and model.get_weights()[0].tolist() == [[-2.0]]
        return False

    # More than once only if a server stands still meanwhile, on a busy machine.
    assert any(is_waited_for() for _ in range(5))


def test_a_worker_that_was_started_again_takes_part_while_another_stands_still(clusters, caplog):
    three = clusters.get(workers=3, ps=1)
    strategy = recsync.AsyncStrategy(three, silence_timeout=LIMIT)
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    events = [
        ("", lambda: three.pause("worker", 0)),
        ("worker:0 was lost", lambda: three.kill("worker", 1)),
        ("worker:1 was lost", lambda: three.restart("worker", 1)),
        ("worker:1 is back", lambda: three.resume("worker", 0)),
        ("worker:0 is back", lambda: setattr(model, "stop_training", True)),
    ]

    def act(batch, logs):
        if events and batch > 5 and events[0][0] in caplog.text:
            events.pop(0)[1]()

    ones = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat(6_000)
    try:
        with compute_time(strategy, 0.05):
            act_then = keras.callbacks.LambdaCallback(on_train_batch_end=act)
            model.fit(ones, callbacks=[act_then], verbose=0)
    finally:
        three.resume("worker", 0)
    assert not events, events[0][0]


def test_what_stands_still_keeps_no_other_server_away_for_good(two, monkeypatch):
    """Whether it is known to be lost, as the parameter server here, or not, as the worker."""
    monkeypatch.setattr(comebacks, "_READMIT_SECONDS", 3.0)
    others = comebacks.Comebacks(two, Crew(), lambda seconds: time.sleep(seconds))

    def is_back(*server):
        return wait_until(lambda: others.is_back(server), 200.0)

    two.membership.lost(("ps", 1), None, "it was silent", silent_seconds=LIMIT)
    two.pause("ps", 1)
    two.pause("worker", 0)
    two.kill("worker", 1)
    two.membership.lost(("worker", 1), None, "it was killed")
    two.restart("worker", 1)
    assert is_back("worker", 1)
    assert not others.is_back(("ps", 1))
    assert two.membership.is_away(("worker", 0))
    two.resume("worker", 0)
    two.resume("ps", 1)
    assert is_back("worker", 0) and is_back("ps", 1)
    for server in SERVERS:
        assert is_reachable(device_of(*server))


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


def test_connections_to_many_are_cut_before_any_name_is_asked_for(two, monkeypatch):
    """A network that is cut often takes along who tells names, and asking takes long then."""
    cut, asked = [], collections.Counter()
    monkeypatch.setattr(signs_of_life, "cut_connections", cut.append)

    def look_up(host, port, **unused):
        assert cut
        asked[port] += 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    gone = SERVERS[:3]
    two.cut_off_all(gone)
    ports = {server: two.cluster_spec.task_address(*server).split(":")[1] for server in SERVERS}
    assert {int(ports[server]) for server in gone} == {port for _, port in cut[0]}
    assert asked == {int(ports[server]): 1 for server in gone}


def test_connections_are_cut_to_where_a_server_is_and_has_been(two, monkeypatch):
    """But not those to where it has been, if another one is there now."""
    addresses = [two.cluster_spec.task_address(*server) for server in SERVERS]
    where = {address: f"10.0.0.{number}" for number, address in enumerate(addresses)}
    cut = []
    monkeypatch.setattr(signs_of_life, "cut_connections", cut.append)

    def peers_of(address):
        if not where:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if address not in where:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return {(where[address], 1)}

    monkeypatch.setattr(signs_of_life, "peers_of", peers_of)
    monkeypatch.setattr(two, "_peers", {})
    monkeypatch.setattr(two, "_peers_ever", {})
    two.readmit()
    where |= {addresses[0]: "10.0.0.1", addresses[1]: "10.0.0.9"}
    two.readmit()
    two.cut_off("worker", 1)
    where[addresses[1]] = "10.0.0.10"  # It was started once more.
    two.cut_off("worker", 1)
    now, later = ("10.0.0.9", 1), ("10.0.0.10", 1)
    assert cut == [{now}, {now}, {now, later}]
    del where[addresses[1]]  # Its machine is gone, and another server has what it had.
    where[addresses[0]] = "10.0.0.10"
    two.readmit()
    two.cut_off("worker", 0)
    assert later in cut[-1]
    # While nobody tells names at all, what was known holds.
    where[addresses[1]] = "10.0.0.0"
    two.readmit()
    where.clear()
    two.readmit()
    two.cut_off("worker", 0)
    assert later in cut[-1] and ("10.0.0.0", 1) not in cut[-1]


# The last one: what it leaves on the servers is that of a pass that failed.
@pytest.mark.parametrize("mode", MAKERS)
def test_training_fails_when_a_parameter_server_stands_still(two, mode, monkeypatch):
    # It also is asked who waits for whom, which is logged before it is given up.
    monkeypatch.setattr(worker_run, "_STALL_SECONDS", 1.0)
    only_stopped_ones_are_silent(monkeypatch, two)
    strategy = MAKERS[mode](two, worker_timeout=1.0, silence_timeout=LIMIT)
    with pytest.raises(RuntimeError, match="parameter server ps:0 has not answered for"):
        train(strategy, AtBatch(8, lambda: two.pause("ps", 0)))
